"""The lines that `serve` prints when the cluster is ready: who runs where, how KV travels, what to type next.

Made from the router's `/workers`, which is what it really uses, not from what was asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from slipstream.errors import SetupError
from slipstream.types import Role


class Route(msgspec.Struct, kw_only=True):
    """One entry of `routes` of a worker in the router's `/workers`."""

    peer: str
    transport: str = ""
    gb_per_s: float = 0.0
    latency_us: float = 0.0
    rejected: dict[str, str] = {}
    error: str = ""


class Member(msgspec.Struct, kw_only=True):
    """One worker in the router's `/workers`, as far as it is shown here."""

    url: str
    state: str
    role: Role
    name: str = ""
    pid: int = 0
    devices: list[str] = []
    served_name: str = ""
    max_model_len: int = 0
    pages_total: int = 0
    problem: str = ""
    problems: list[str] = []
    routes: list[Route] = []


class Members(msgspec.Struct, kw_only=True):
    """The answer of the router's `/workers`."""

    workers: list[Member] = []


Severity = Literal["plain", "warning"]


def pairs(members: Sequence[Member]) -> Iterator[tuple[Member, Member, Route | None]]:
    """Every (source, destination) between which a request may be handed over, with the route where one is known."""
    for source in members:
        for destination in members:
            if source is destination or source.role == "decode" or destination.role == "prefill":
                continue
            yield source, destination, next((r for r in source.routes if r.peer == destination.name), None)


def print_banner(
    console: Console, members: Sequence[Member], *, url: str, page_tokens: int, seconds: float, router_pid: int
) -> None:
    """Tables and a curl line on `console`. Raises SetupError when there is no member."""
    if not members:
        raise SetupError("the router knows no worker")
    model = members[0].served_name
    context = min(member.max_model_len for member in members)
    console.print(f"\n{model} is served at {url} (context {context} tokens), ready after {seconds:.1f} s\n")
    console.print(_who(members, url, page_tokens, router_pid))
    routes = list(pairs(members))
    if routes:
        console.print(_how(routes))
    for member in members:
        for problem in [member.problem, *member.problems]:
            if problem:
                console.print(f"warning: {member.name}: {problem}")
    console.print("try it:\n")
    console.print(curl_line(url, model), soft_wrap=True)
    console.print("\nCtrl-C ends it.\n")


def _who(members: Sequence[Member], url: str, page_tokens: int, router_pid: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("name", "role", "pid", "device", "url", "KV pages", "KV tokens"):
        table.add_column(title, justify="right" if title in ("pid", "KV pages", "KV tokens") else "left", no_wrap=True)
    table.add_row("router", "front", str(router_pid), "", url, "", "")
    for m in members:
        tokens = f"{m.pages_total * page_tokens:,}"
        table.add_row(m.name, m.role, str(m.pid), ", ".join(m.devices), m.url, f"{m.pages_total:,}", tokens)
    return table


def _how(routes: Sequence[tuple[Member, Member, Route | None]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(1, 3, 0, 0), collapse_padding=True)
    for title in ("KV route", "transport", "measured", "latency", "why nothing faster"):
        table.add_column(title, justify="right" if title in ("measured", "latency") else "left", no_wrap=True)
    for source, destination, route in routes:
        pair = f"{source.name} -> {destination.name}"
        if route is None:
            table.add_row(pair, "not measured yet", "", "", "")
        elif route.error:
            table.add_row(pair, "none", "", "", route.error)
        else:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in route.rejected.items())
            rate, latency = f"{route.gb_per_s:.2f} GB/s", f"{route.latency_us:.0f} µs"
            table.add_row(pair, route.transport, rate, latency, reasons or "it is the fastest there is")
    return table


def curl_line(url: str, model: str) -> str:
    """A command to paste into a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}
    text = msgspec.json.encode(body).decode()
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(text)}"
