"""The fleet as people see it: one plain struct a worker, ready to be JSON."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from slipstream.router.remote import RemoteWorker, WorkerState
from slipstream.types import Role


class RouteView(msgspec.Struct, kw_only=True):
    """One route of a worker as the source, with the peer by name."""

    peer: str
    transport: str
    gb_per_s: float
    latency_us: float
    source_rank: int
    destination_rank: int
    rejected: dict[str, str]
    error: str


class WorkerView(msgspec.Struct, kw_only=True):
    """A registered worker, for tables, `/workers` and the banner.

    `requests`, `sequences` and `prefill_tokens` are this router's own; `waiting` to `pages_total` are what the worker
    last reported (0 before that). `joins`: it joined by itself, and nobody has named it. `problems` are pairs it cannot
    serve in, in words.
    """

    url: str
    state: WorkerState
    role: Role
    joins: bool = False
    problem: str = ""
    problems: list[str] = []
    id: str = ""
    name: str = ""
    model: str = ""
    served_name: str = ""
    wire: str = ""
    devices: list[str] = []
    host: str = ""
    pid: int = 0
    version: str = ""
    fingerprint_text: str = ""
    max_model_len: int = 0
    requests: int = 0
    sequences: int = 0
    prefill_tokens: int = 0
    waiting: int = 0
    running: int = 0
    handing_off: int = 0
    waiting_tokens: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    prefix_keys: int = 0
    page_tokens: int = 0
    routes: list[RouteView] = []


def view(worker: RemoteWorker, *, requests: int, problems: list[str], name_of: Callable[[str], str]) -> WorkerView:
    """`name_of` turns what a worker calls its peer into a name people know."""
    shown = WorkerView(url=worker.url, state=worker.state, role=worker.role, problem=worker.problem, id=worker.id)
    info, status, standing = worker.info, worker.status, worker.standing
    if info is not None:
        shown.name, shown.model, shown.served_name = info.name, info.model, info.served_name
        shown.wire, shown.devices, shown.host, shown.pid = worker.wire_address, info.devices, info.host, info.pid
        shown.version, shown.fingerprint_text = info.version, info.fingerprint_text
        shown.max_model_len, shown.pages_total = info.max_model_len, info.pages
        shown.page_tokens = info.page_tokens
    if standing is not None:
        shown.sequences, shown.prefill_tokens = standing.sequences, standing.prefill_tokens
        shown.prefix_keys = len(standing.keys)
    if status is not None:
        shown.waiting, shown.running, shown.handing_off = status.waiting, status.running, status.handing_off
        shown.waiting_tokens, shown.pages_free = status.waiting_tokens, status.pages_free
        shown.pages_cached, shown.pages_total = status.pages_cached, status.pages_total
    shown.requests, shown.problems, shown.joins = requests, problems, worker.joins
    shown.routes = [
        RouteView(
            peer=name_of(report.peer),
            transport=report.transport,
            gb_per_s=report.gb_per_s,
            latency_us=report.latency_us,
            source_rank=report.source_rank,
            destination_rank=report.destination_rank,
            rejected=report.rejected,
            error=report.error,
        )
        for reports in worker.routes.values()
        for report in reports
    ]
    return shown
