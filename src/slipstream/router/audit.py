"""Checks the router's books against each other, on demand and at any time.

Each standing must carry exactly what the requests under way have charged to it, each request under way must be at
workers that are linked or wait in the queue, and nothing may be remembered of a request that has ended.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from slipstream.router.fleet import Fleet
from slipstream.router.life import Life

if TYPE_CHECKING:
    from slipstream.router.lives import Lives


class RequestView(msgspec.Struct, kw_only=True):
    """One request under way; `prefill` and `decode` are worker names, "" while it waits or when that worker is gone."""

    id: str
    stage: str
    attempt: int
    tokens: int
    prefill: str
    decode: str


class RouterAudit(msgspec.Struct, kw_only=True):
    """`stages` counts requests by stage; `problems` are sentences, none when the books are right."""

    stages: dict[str, int]
    requests: list[RequestView]
    problems: list[str]


def audit(fleet: Fleet, lives: Lives) -> RouterAudit:
    under_way = lives.under_way()
    problems = [problem for life in under_way for problem in _of_request(fleet, life)]
    problems += _of_charges(fleet, under_way) + lives.leftovers()
    if any(life.stage == "waiting" for life in under_way) and lives.placement() is not None:
        problems.append("requests wait although a pair of workers could take them")
    views = [
        RequestView(
            id=life.request.id,
            stage=life.stage,
            attempt=life.entry.attempts,
            tokens=len(life.delivered),
            prefill=fleet.name_of(life.prefill),
            decode=fleet.name_of(life.decode),
        )
        for life in under_way
    ]
    return RouterAudit(stages=lives.stages(), requests=views, problems=problems)


def _of_request(fleet: Fleet, life: Life) -> list[str]:
    if life.stage == "waiting":
        return [f"{life.request.id} waits but names workers"] if life.owner or life.placement else []
    problems = []
    if fleet.by_id(life.owner) is None:
        problems.append(f"{life.request.id} is owned by {life.owner!r}, which is not linked")
    if fleet.by_id(life.decode) is None:
        problems.append(f"{life.request.id} is to be decoded by {life.decode!r}, which is not linked")
    if life.stage == "ended":
        problems.append(f"{life.request.id} has ended but is still in the table")
    if life.deadline is None:
        problems.append(f"{life.request.id} has no deadline")
    return problems


def _of_charges(fleet: Fleet, under_way: list[Life]) -> list[str]:
    tokens: Counter[str] = Counter()
    sequences: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    coming: Counter[str] = Counter()
    for life in under_way:
        tokens[life.prefill] += life.charged
        sequences[life.decode] += 1
        prompts[life.prefill] += life.charged > 0
        coming[life.decode] += life.charged > 0 and life.prefill != life.decode
    problems = []
    for standing in fleet.standings():
        if standing.prefill_tokens != tokens[standing.id]:
            problems.append(
                f"{fleet.name_of(standing.id)} carries {standing.prefill_tokens} prompt tokens, its requests "
                f"{tokens[standing.id]}"
            )
        if standing.sequences != sequences[standing.id]:
            problems.append(
                f"{fleet.name_of(standing.id)} carries {standing.sequences} sequences, its requests are "
                f"{sequences[standing.id]}"
            )
        told, true = (standing.prompts, standing.coming), (prompts[standing.id], coming[standing.id])
        if told != true:
            problems.append(
                f"{fleet.name_of(standing.id)} carries {told[0]} prompts and {told[1]} sequences to come, its requests "
                f"are {true[0]} and {true[1]}"
            )
    return problems
