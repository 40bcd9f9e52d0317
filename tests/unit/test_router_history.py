"""The history of requests, put together from workers that answer, do not answer, have ended, or were replaced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from slipstream.engine.http import MOST_CHAPTERS
from slipstream.router import history
from slipstream.router.journal import Journal
from slipstream.telemetry import clock
from slipstream.types import Request, SamplingParams

NAMES = [f"r{number}" for number in range(150)]


class Worker:
    """A worker's HTTP port. `asked` are the ids of each question; from question `silent_from` on it says nothing."""

    def __init__(self, identity: str, silent_from: int = 1000) -> None:
        self.identity = identity
        self.asked: list[list[str]] = []
        self.url = ""
        self._silent_from = silent_from

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        names = head.split(b" ")[1].decode().removeprefix("/timeline/").split(",")
        self.asked.append(names)
        if len(self.asked) > self._silent_from:
            await reader.read()  # until the other side has had enough
        else:
            event = {"name": "queued", "start": 1.0, "duration_s": 0.5, "attributes": {}}
            chapter = {"attempt": 0, "outcome": "", "events": [event]}
            requests = {name: [chapter] for name in names}
            body = {"id": self.identity, "name": "w", "clock": clock.machine_clock(), "now": 1.0, "requests": requests}
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(body).encode())
        writer.close()


@asynccontextmanager
async def served(*workers: Worker) -> AsyncIterator[None]:
    servers = [await asyncio.start_server(worker.answer, "127.0.0.1", 0) for worker in workers]
    for worker, server in zip(workers, servers, strict=True):
        worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield
    for server in servers:
        server.close()


def journal_of(*visits: tuple[str, str, str]) -> Journal:
    """Every request was at all of these workers."""
    journal = Journal()
    for name in NAMES:
        journal.begin(Request(id=name, prompt_ids=[1], sampling=SamplingParams())).visits.update(dict.fromkeys(visits))
    return journal


def test_a_question_is_as_long_as_a_worker_takes():
    assert history.TOGETHER == MOST_CHAPTERS


async def test_a_worker_that_does_not_answer_is_asked_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ANSWER_S", 0.3)
    sound, silent = Worker("p"), Worker("d", silent_from=0)
    async with served(sound, silent):
        found = await history.history(journal_of(("p", "P", sound.url), ("d", "D", silent.url)), NAMES)
    assert len(silent.asked) == 1
    assert [name for names in sound.asked for name in names] == NAMES
    assert max(map(len, sound.asked)) <= MOST_CHAPTERS
    gap = {"where": "D", "reason": "the worker did not answer within 0.3 s"}
    assert all(found.missing[name] == [gap] for name in NAMES)
    assert all([event.where for event in found.events[name]] == ["P"] for name in NAMES)


async def test_what_a_worker_told_before_it_stopped_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ANSWER_S", 0.3)
    worker = Worker("p", silent_from=1)
    async with served(worker):
        found = await history.history(journal_of(("p", "P", worker.url)), NAMES)
    told = NAMES[: history.TOGETHER]
    assert [len(found.events[name]) for name in NAMES] == [1] * len(told) + [0] * (len(NAMES) - len(told))
    assert list(found.missing) == NAMES[len(told) :]


async def test_all_questions_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ALL_S", 0.0)
    worker = Worker("p")
    async with served(worker):
        found = await history.history(journal_of(("p", "P", worker.url)), NAMES)
    assert worker.asked == []
    assert found.missing["r0"] == [{"where": "P", "reason": "the worker had not told everything after 0 s"}]


async def test_workers_that_have_ended_or_were_replaced_are_named_for_the_requests_they_had() -> None:
    successor = Worker("new")
    async with served(successor):
        visits = ("old", "P", successor.url), ("dead", "D", "http://127.0.0.1:1")
        found = await history.history(journal_of(*visits), NAMES)
    assert len(successor.asked) == 1
    reasons = {gap["where"]: gap["reason"] for gap in found.missing["r149"]}
    assert "another process is at its address now" in reasons["P"]
    assert "cannot be asked" in reasons["D"]
    assert found.events["r149"] == []
