"""One snapshot as JSON: what the page shows, every number as a figure that names its metric."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.front.dashboard.figures import Figure, quantile
from slipstream.front.dashboard.watch import (
    GENERATED,
    IN_FLIGHT,
    LATENCIES,
    MADE,
    REQUESTS,
    STEP_S,
    WINDOW_S,
    WORKER,
    Snapshot,
    Watch,
)
from slipstream.topo.draw import Handoff, Overlay, Placed
from slipstream.topo.levels import natural

ARRIVING = ["offered", "granted", "landed"]
ROLES = ("prefill", "both", "decode")
PAGES = ("used", "cached", "free")
_PLAIN = ("name", "id", "url", "role", "state", "problem", "problems", "host", "pid", "devices", "version", "model")


def state(watch: Watch, snapshot: Snapshot, since: float) -> dict[str, Any]:
    """The numbers of a snapshot, and the points of the history after `since` (Unix seconds)."""
    return {
        "id": snapshot.id,
        "time": snapshot.time,
        "totals": _totals(watch, snapshot),
        "latency": {key: _latency(snapshot, name) for key, name in LATENCIES.items()},
        "history": {"step_s": STEP_S, "window_s": WINDOW_S, "points": watch.history.since(since)},
        "workers": [_worker(watch, snapshot, worker) for worker in sorted(snapshot.workers, key=_place)],
        "routes": _routes(snapshot),
    }


def _front(snapshot: Snapshot, metric: str, labels: dict[str, str] | None = None) -> Figure:
    return Figure(value=snapshot.front.samples.total(metric, labels), metric=metric, labels=labels or {})


def _totals(watch: Watch, snapshot: Snapshot) -> dict[str, Any]:
    samples = snapshot.front.samples
    return {
        "in_flight": _front(snapshot, IN_FLIGHT),
        "waiting": _front(snapshot, "slipstream_router_requests", {"stage": "waiting"}),
        "tokens_per_s": watch.rate(snapshot, MADE),
        "requests_per_s": watch.rate(snapshot, REQUESTS),
        "generated_tokens": _front(snapshot, GENERATED),
        "prompt_tokens": _front(snapshot, "slipstream_prompt_tokens_total"),
        "cached_tokens": _front(snapshot, "slipstream_cached_prompt_tokens_total"),
        "outcomes": {o: _front(snapshot, REQUESTS, {"outcome": o}) for o in samples.values(REQUESTS, "outcome")},
    }


def _latency(snapshot: Snapshot, name: str) -> dict[str, Figure]:
    """Since the front was started."""
    buckets = snapshot.front.samples.buckets(name)
    found = {"count": _front(snapshot, f"{name}_count")}
    for key, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        found[key] = Figure(value=quantile(buckets, q), metric=name, quantile=q)
    return found


def _worker(watch: Watch, snapshot: Snapshot, view: dict[str, Any]) -> dict[str, Any]:
    reading = snapshot.readings.get(view.get("id", ""))
    name = view.get("name") or view["url"]
    shown = {key: view.get(key) for key in _PLAIN} | {"name": name, "figures": None, "figures_problem": ""}
    if reading is None or reading.problem:
        shown["figures_problem"] = reading.problem if reading else "not linked"
        return shown
    who = view["id"], name

    def now(metric: str, **labels: str | list[str]) -> Figure:
        value = reading.samples.total(WORKER + metric, labels)
        return Figure(value=value, metric=WORKER + metric, labels=labels, worker=name)

    def rate(metric: str, **labels: str) -> Figure:
        return watch.rate(snapshot, WORKER + metric, labels, who)

    shown["figures"] = {
        "waiting": now("requests", stage="waiting"),
        "prefilling": now("requests", stage="prefilling"),
        "decoding": now("requests", stage="decoding"),
        "leaving": now("requests", stage="handing_off"),
        "arriving": now("requests", stage=ARRIVING),
        "waiting_tokens": now("waiting_tokens"),
        "pages": {page: now("pages", state=page) for page in PAGES},
        "prefill_per_s": rate("tokens_total", stage="prefill"),
        "decode_per_s": rate("tokens_total", stage="decode"),
        "tokens_per_step": watch.each(snapshot, WORKER + "tokens_total", WORKER + "steps_total", who),
        "preemptions": now("preemptions_total"),
        "copies": now("copies_total"),
        "copy_failures": now("copy_failures_total"),
        "transfer": {t: rate("transfer_bytes_total", transport=t) for t in _transports(view)},
        "transferred": {t: now("transfer_bytes_total", transport=t) for t in _transports(view)},
    }
    return shown


def _place(view: dict[str, Any]) -> tuple[int, tuple[tuple[int, int, str], ...], str]:
    """The order of the table: prefill first, then by name."""
    role = view.get("role") or ""
    return ROLES.index(role) if role in ROLES else len(ROLES), natural(view.get("name") or ""), view["url"]


def _transports(view: dict[str, Any]) -> list[str]:
    return sorted({route["transport"] for route in view.get("routes", []) if not route["error"]})


def _routes(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Every measured pair, with the reasons against other transports; figures where the source's metrics have them."""
    peers = {worker["id"]: worker for worker in snapshot.workers}
    by_name = {worker.get("name", ""): worker["id"] for worker in snapshot.workers}
    found = []
    for view in snapshot.workers:
        reading = snapshot.readings.get(view.get("id", ""))
        for route in view.get("routes", []):
            shown = {key: route[key] for key in ("peer", "transport", "rejected", "error")}
            shown |= {"source": view.get("name") or view["url"], "ranks": _ranks(route)}
            labels = {"peer": route["peer"], "transport": route["transport"]}
            peer_id = by_name.get(route["peer"], "")
            if reading is not None and peer_id in peers:
                known = reading.samples.values(WORKER + "route_bytes_per_second", "peer")
                labels["peer"] = next((name for name in (route["peer"], peer_id) if name in known), route["peer"])
            for key, metric in (("rate", "route_bytes_per_second"), ("latency", "route_latency_seconds")):
                value = reading.samples.total(WORKER + metric, labels) if reading and not route["error"] else None
                shown[key] = Figure(value=value, metric=WORKER + metric, labels=labels, worker=shown["source"])
            found.append(shown)
    return found


def _ranks(route: dict[str, Any]) -> str:
    source, destination = route.get("source_rank", 0), route.get("destination_rank", 0)
    return f"{source} to {destination}" if source or destination else ""


def overlay(workers: list[dict[str, Any]], here: frozenset[str]) -> Overlay:
    """Workers and ways of KV for the drawing; `here` are the names of the drawn machine."""
    workers = sorted(workers, key=_place)
    names = [worker.get("name") or worker["url"] for worker in workers]
    placed = tuple(
        Placed(name, worker.get("role") or "both", tuple(worker.get("devices") or ()), worker.get("host") or "",
               (worker.get("host") or "") in here)
        for name, worker in zip(names, workers, strict=True)
    )  # fmt: skip
    ways: dict[tuple[str, str], list[str]] = {}
    for name, worker in zip(names, workers, strict=True):
        for route in worker.get("routes", []):
            if not route["error"] and route["peer"] in names:
                found = ways.setdefault((name, route["transport"]), [])
                if route["peer"] not in found:
                    found.append(route["peer"])
    handoffs = tuple(Handoff(source, tuple(peers), transport) for (source, transport), peers in sorted(ways.items()))
    return Overlay(placed, handoffs)


def encode(value: object) -> bytes:
    """JSON; what is no number there (NaN, infinity) becomes null."""
    return msgspec.json.encode(value)
