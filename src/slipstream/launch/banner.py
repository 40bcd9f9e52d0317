"""The lines that `serve` prints when the cluster is ready: who runs where, how KV travels, what to type next.

Made from the router's `/workers`, which is what it really uses, not from what was asked for.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from slipstream.transfer.order import better
from slipstream.types import Role
from slipstream.wire import RouteReport


class Member(msgspec.Struct, kw_only=True):
    """One worker in the router's `/workers`, as far as it is shown here."""

    url: str
    state: str
    role: Role
    joins: bool = False
    name: str = ""
    pid: int = 0
    devices: list[str] = []
    served_name: str = ""
    max_model_len: int = 0
    pages_total: int = 0
    problem: str = ""
    problems: list[str] = []
    routes: list[RouteReport] = []


class Members(msgspec.Struct, kw_only=True):
    """The answer of the router's `/workers`."""

    workers: list[Member] = []


def pairs(members: Sequence[Member]) -> Iterator[tuple[Member, Member, RouteReport | None]]:
    """Every (source, destination) between which a request may be handed over, with the route where one is known."""
    for source in members:
        for destination in members:
            if source is destination or source.role == "decode" or destination.role == "prefill":
                continue
            yield source, destination, next((r for r in source.routes if r.peer == destination.name), None)


def why_no_route(members: Sequence[Member]) -> str:
    """Why no request can be handed over at all, each reason once; "" while any pair may still do it."""
    reasons: dict[str, None] = {}
    for source, destination, route in pairs(members):
        if route is not None and not route.error:
            return ""
        told = [route.error] if route is not None else _problems_between(source, destination)
        if not told:
            return ""  # not measured yet
        reasons.update(dict.fromkeys(told))
    return "; ".join(reasons)


def _problems_between(source: Member, destination: Member) -> list[str]:
    names = (source.name, destination.name)
    return [problem for problem in source.problems if all(name in problem for name in names)]


def banner(
    members: Sequence[Member],
    *,
    url: str,
    page_tokens: int,
    seconds: float,
    router_pid: int,
    chats: bool = True,
    with_key: bool = False,
    command: str = "slipstream",
    width: int = 120,
) -> str:
    """The text for a cluster of at least one member; lines of tables may be wider than `width` where names are.

    `chats`: the model has a chat template. `with_key`: the server asks for its API key.
    `command` is what starts slipstream in another shell (`own_command`).
    """
    model = members[0].served_name
    context = min(member.max_model_len for member in members)
    parts = [f"{model} is served at {url} (context {context:,} tokens), ready after {seconds:.1f} s"]
    parts.append(_who(members, url, page_tokens, router_pid))
    if routes := list(pairs(members)):
        parts.append(_how(routes, width))
    problems = [f"warning: {m.name}: {problem}" for m in members for problem in [m.problem, *m.problems] if problem]
    if problems:
        parts.append("\n".join(problems))
    if with_key:
        parts += ["it asks for its API key; in another shell, first:", "export SLIPSTREAM_API_KEY=<your key>"]
    parts += ["try it:", curl_line(url, model, chats=chats, with_key=with_key)]
    see = f"see it: {url}/dashboard, {command} timeline --url {url}"
    parts.append(f"{see}\ncheck it: {command} doctor --url {url}. Ctrl-C ends it.")
    return "\n" + "\n\n".join(parts) + "\n"


def own_command() -> str:
    """What starts this slipstream in a shell that has the same PATH and working directory, quoted for it."""
    script = Path(sys.executable).with_name("slipstream")
    found = shutil.which("slipstream")
    if found and script.exists() and os.path.samefile(found, script):
        return "slipstream"
    if script.exists():
        return shlex.quote(min(os.path.relpath(script), str(script), key=len))
    return f"{shlex.quote(sys.executable)} -m slipstream"


def _who(members: Sequence[Member], url: str, page_tokens: int, router_pid: int) -> str:
    rows = [("name", "role", "pid", "device", "url", "KV pages", "KV tokens")]
    rows.append(("router", "front", str(router_pid), "", url, "", ""))
    for m in members:
        tokens = f"{m.pages_total * page_tokens:,}"
        rows.append((m.name, m.role, str(m.pid), _devices(m.devices), m.url, f"{m.pages_total:,}", tokens))
    return _table(rows, right=(2, 5, 6))


def _devices(names: Sequence[str]) -> str:
    """Each device once, with the number of ranks where several are on it."""
    counts = Counter(names)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _how(routes: Sequence[tuple[Member, Member, RouteReport | None]], width: int) -> str:
    rows = [("KV route", "transport", "measured", "latency")]
    notes: list[str] = []
    for source, destination, route in _by_rank(routes):
        pair = f"{source.name} -> {destination.name}"
        if route is not None and max(len(source.devices), len(destination.devices)) > 1:
            pair = f"{source.name} rank {route.source_rank} -> {destination.name} rank {route.destination_rank}"
        if route is None:
            rows.append((pair, "not measured yet", "", ""))
        elif route.error:
            rows.append((pair, "none", "", ""))
            notes.append(f"{pair}: {route.error}")
        else:
            rows.append((pair, route.transport, f"{route.gb_per_s:.2f} GB/s", f"{route.latency_us:.0f} µs"))
            gpus = any(device.startswith("cuda") for m in (source, destination) for device in m.devices)
            notes += [
                f"not {name}: {reason.removeprefix('here: ')}"
                for name, reason in better(route.transport, route.rejected, route.rdma).items()
                if gpus or name != "cuda_ipc"
            ]
    wrapped = [textwrap.fill(note, width, subsequent_indent="    ") for note in dict.fromkeys(notes)]
    return "\n".join([_table(rows, right=(2, 3)), *wrapped])


def _by_rank(
    routes: Sequence[tuple[Member, Member, RouteReport | None]],
) -> Iterator[tuple[Member, Member, RouteReport | None]]:
    """The same with every route of a pair of workers: there is one for each pair of ranks that share heads."""
    for source, destination, first in routes:
        if first is None or first.error:
            yield source, destination, first
        else:
            yield from ((source, destination, r) for r in source.routes if r.peer == destination.name)


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Columns as wide as their widest cell, three spaces apart; those in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def curl_line(url: str, model: str, *, chats: bool = True, with_key: bool = False) -> str:
    """A command to paste into a shell. The key stays out of it: terminals are shown around and recorded."""
    if chats:
        path = "/v1/chat/completions"
        asked: dict[str, object] = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    else:
        path, asked = "/v1/completions", {"prompt": "The sky is blue because", "max_tokens": 64}
    text = msgspec.json.encode({"model": model, **asked, "stream": True}).decode()
    key = ' -H "authorization: Bearer $SLIPSTREAM_API_KEY"' if with_key else ""
    return f"curl -N {url}{path} -H 'content-type: application/json'{key} -d {shlex.quote(text)}"
