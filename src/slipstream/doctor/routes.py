"""How KV travels, as a table: what topology proposes for this machine, or what a running slipstream measured.

The measured table is the router's `GET /workers`: each worker reports the route that its preflight proved, and the
reason against every transport that would have been faster.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.asking import Unreachable, get
from slipstream.errors import ConfigError
from slipstream.topo.choose import Pair, Plan
from slipstream.transfer.order import better
from slipstream.wire import RouteReport

_WIDTH = 110


class Member(msgspec.Struct, kw_only=True):
    """One worker of a cluster, as the router describes it."""

    url: str
    state: str = ""
    role: str = ""
    name: str = ""
    host: str = ""
    pid: int = 0
    version: str = ""
    model: str = ""
    fingerprint_text: str = ""
    devices: list[str] = []
    problem: str = ""
    problems: list[str] = []
    routes: list[RouteReport] = []


class Members(msgspec.Struct, kw_only=True):
    """What `/workers` says; without the field it is something else that answers with JSON."""

    workers: list[Member]


def ask(url: str, api_key: str = "") -> bytes:
    """The answer of `GET /workers` at a router. Raises Unreachable, ConfigError."""
    status, body = get(url, "/workers", api_key)
    if status == 401:
        raise ConfigError(f"{url} wants an API key: give --api-key or set SLIPSTREAM_API_KEY.")
    if status != 200:
        raise Unreachable(f"{url}/workers answered {status}: this is no slipstream router (a worker's port, perhaps).")
    return body


def members(body: bytes) -> list[Member]:
    """The workers of an answer of `/workers`. Raises Unreachable."""
    try:
        return msgspec.json.decode(body, type=Members).workers
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Unreachable(f"the answer of /workers is not that of a slipstream router: {error}") from error


def measured(body: bytes, url: str) -> str:
    """The table of measured routes, and below it why nothing better was taken."""
    workers = members(body)
    rows = [("KV route", "ranks", "transport", "measured", "latency", "")]
    notes: dict[str, list[str]] = {}
    for worker in workers:
        for route in worker.routes:
            pair = f"{worker.name or worker.url} -> {route.peer}"
            ranks = f"{route.source_rank} -> {route.destination_rank}"
            if route.error:
                rows.append((pair, ranks, "none", "", "", "no route"))
                notes.setdefault(route.error, []).append(pair)
                continue
            rows.append(
                (pair, ranks, route.transport, f"{route.gb_per_s:.2f} GB/s", f"{route.latency_us:.0f} µs", "verified")
            )
            for name, reason in better(route.transport, route.rejected, route.rdma).items():
                notes.setdefault(f"not {name}: {reason.removeprefix('here: ')}", []).append(pair)
    if len(rows) == 1:
        who = ", ".join(f"{worker.name or worker.url} ({worker.role}, {worker.state})" for worker in workers)
        return f"{url} knows no routes yet; its workers: {who or 'none'}."
    lines = [
        f"{note}" if len(pairs) == len(rows) - 1 else f"{', '.join(pairs)}: {note}" for note, pairs in notes.items()
    ]
    return "\n".join([table(rows), *(["", "Why nothing better"] if lines else []), *map(_wrap, lines)])


def measured_json(body: bytes) -> str:
    """The routes as JSON: a list of source, destination and what was measured."""
    found: list[dict[str, Any]] = [
        {"source": worker.name or worker.url, "destination": route.peer, **msgspec.to_builtins(route)}
        for worker in members(body)
        for route in worker.routes
    ]
    for entry in found:
        del entry["peer"]
    return msgspec.json.format(msgspec.json.encode({"routes": found}), indent=1).decode()


def planned(plan: Plan) -> str:
    """The ranked ways of all GPU pairs; pairs with the same ranking are shown once."""
    if not plan.pairs:
        return plan.handoff
    groups: dict[str, list[str]] = {}
    for pair in plan.pairs:
        groups.setdefault(_ranking(pair), []).append(f"{pair.a}-{pair.b}")
    parts = [plan.handoff]
    for ranking, names in groups.items():
        title = "all pairs" if len(names) == len(plan.pairs) and len(names) > 1 else ", ".join(names)
        parts.append(f"{_wrap(title)}\n{ranking}")
    return "\n\n".join(parts)


def _ranking(pair: Pair) -> str:
    lines = []
    for place, path in enumerate(pair.paths, 1):
        state = {True: "", None: "to be proven by a test", False: "not possible"}[path.possible]
        speed = f"{path.gbps:g} GB/s one way at most" if path.gbps and path.possible is not False else ""
        what = ", ".join(part for part in (path.level if path.possible is not False else "", speed, state) if part)
        why = "; ".join(reason.text for reason in path.reasons)
        head = f"{place}. " if path.possible is not False else " - "
        lines.append(_wrap(f"{head}{path.way} by {path.transport}{f' ({what})' if what else ''}: {why}", "  ", "     "))
    return "\n".join(lines)


def planned_json(plan: Plan) -> str:
    report = {"handoff": plan.handoff, "pairs": plan.pairs}
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, three spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _wrap(line: str, first: str = "  ", later: str = "    ") -> str:
    return textwrap.fill(line, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
