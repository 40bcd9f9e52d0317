"""What a worker counts, as Prometheus metrics named `slipstream_worker_*`.

Each worker has its own registry, so that two fit in one process. Counters and histograms are touched on the loop
thread, a few times a step and a request; gauges are set whenever the load is published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry

from slipstream.engine.pace import Pace
from slipstream.engine.plan import StepPlan
from slipstream.telemetry.compat import Compat, Flavour
from slipstream.telemetry.meters import (
    BYTES_BOUNDS,
    COPY_BOUNDS,
    COUNT_BOUNDS,
    DURATION_BOUNDS,
    ITL_BOUNDS,
    RATE_BOUNDS,
    STEP_BOUNDS,
    TTFT_BOUNDS,
    Meters,
    build_info,
)
from slipstream.wire import RouteReport, Status, WorkerInfo

PREFIX = "slipstream_worker_"
Stages = Mapping[str, int]


class WorkerMetrics(Meters):
    """Steps, requests by stage, transfers and pages of one worker.

    `identify` names the worker once it is known; until then its labels are empty. `failed` reads the failed steps and
    events of the loop, `decode_rate` the tokens a second, `step_age` how long the step under way has taken; whoever has
    them puts them here.
    """

    def __init__(self, compat: Flavour | Literal["none"] = "none") -> None:
        self.failed: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.decode_rate: Callable[[], float] = lambda: 0.0
        self.step_age: Callable[[], float] = lambda: 0.0
        self.pace = Pace()
        self._labels_now: dict[str, str] = {"model_name": "", "worker": "", "role": ""}
        super().__init__(PREFIX, lambda: self._labels_now)
        self._step_meters()
        self._request_meters()
        self._transfer_meters()
        self._state_meters()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        if compat != "none":
            self.registry.register(Compat(compat, "worker", self.collect, self.identity))

    def identify(self, info: WorkerInfo) -> None:
        self._labels_now = {"model_name": info.served_name, "worker": info.name, "role": info.role}
        self.shape.replace({(str(info.page_tokens), str(info.pages), str(info.max_sequences)): 1.0})

    # ------------------------------------------------------------------------------------------ what there is

    def _step_meters(self) -> None:
        self.steps = self.counter("steps", "Engine steps executed.")
        self.step_seconds = self.histogram(
            "step_seconds", "Seconds of an engine step: compute, sampling and bookkeeping.", STEP_BOUNDS
        )
        self.step_tokens = self.histogram("step_tokens", "Tokens computed in a step.", COUNT_BOUNDS)
        self.tokens = self.counter("tokens", "Tokens computed, by kind of work (prefill, decode).", "stage")
        self.gauge(
            "step_age_seconds",
            "Seconds that the step under way has taken so far, to about a second; 0 when none is. At the limit "
            "(step_timeout_s and more for large steps) the worker hangs, and ends.",
            read=lambda: {(): self.step_age()},
        )
        self.counter("failed_steps", "Steps that raised.", read=lambda: {(): self.failed()[0]})
        self.counter(
            "failed_events", "Events (messages, ends of copies) that raised.", read=lambda: {(): self.failed()[1]}
        )
        self.retried = self.counter("retried_sequences", "Sequences computed again alone because their step failed.")

    def _request_meters(self) -> None:
        self.requests_ended = self.counter(
            "requests_ended",
            "Requests that left this worker: finished, handed_over, or the code of what ended them.",
            "outcome",
        )
        self.preemptions = self.counter("preemptions", "Sequences whose pages were taken away; each is computed again.")
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of requests that began to be computed here.")
        self.cached_tokens = self.counter("cached_prompt_tokens", "Those whose KV was in the prefix cache.")
        self.gauge("prefix_hit_ratio", "Share of prompt tokens found in the prefix cache so far.", read=self._hit_ratio)
        self.queue_seconds = self.histogram(
            "queue_seconds", "Seconds from a request's arrival to its first chunk being scheduled.", TTFT_BOUNDS
        )
        self.prefill_seconds = self.histogram(
            "prefill_seconds", "Seconds from there to its first token being sampled.", TTFT_BOUNDS
        )
        self.first_token_seconds = self.histogram(
            "time_to_first_token_seconds", "Both together: arrival to first token.", TTFT_BOUNDS
        )
        self.decode_seconds = self.histogram(
            "decode_seconds", "Seconds that a request decoded here, pauses included.", DURATION_BOUNDS
        )
        self.inference_seconds = self.histogram(
            "inference_seconds", "Seconds from being scheduled or taken over to leaving this worker.", DURATION_BOUNDS
        )
        self.token_seconds = self.histogram(
            "inter_token_seconds", "Seconds between two tokens of a decoding sequence.", ITL_BOUNDS
        )

    def _transfer_meters(self) -> None:
        self.transfer_bytes = self.counter("transfer_bytes", "KV bytes copied to peers.", "transport")
        self.copies = self.counter("copies", "KV copies (one a chunk) that arrived.", "transport")
        self.copy_failures = self.counter("copy_failures", "KV copies that failed.", "transport")
        self.copy_wire = self.histogram(
            "copy_wire_seconds",
            "Seconds of one KV copy on the wire, until the peer can see it; copies that overlap share the wire.",
            COPY_BOUNDS,
            "transport",
        )
        self.copy_queue = self.histogram(
            "copy_queue_seconds",
            "Seconds that a KV copy waited before, for the mover to begin it.",
            COPY_BOUNDS,
            "transport",
        )
        self.copy_rate = self.histogram(
            "copy_bytes_per_second", "Rate of single KV copies on the wire.", RATE_BOUNDS, "transport"
        )
        self.grant_seconds = self.histogram(
            "grant_seconds",
            "Seconds from an offer to the decode worker's grant, as the prefill worker sees it, between two steps.",
            TTFT_BOUNDS,
        )
        self.handoff_seconds = self.histogram(
            "handoff_seconds",
            "Seconds from the first token to the decode worker having taken over, as the prefill worker sees it.",
            TTFT_BOUNDS,
        )
        self.reserve_seconds = self.histogram(
            "reserve_seconds", "Seconds from an offer's coming to its grant, at the decode worker.", TTFT_BOUNDS
        )
        self.handoff_bytes = self.histogram("handoff_bytes", "KV bytes of a request handed over.", BYTES_BOUNDS)
        self.handoffs = self.counter("handoffs", "Requests handed over (source) or taken over (destination).", "side")
        self.deferred = self.counter("deferred_offers", "Offers that the decode worker had no room for at once.")
        self.handoff_failures = self.counter("handoff_failures", "Handoffs that failed, by reason.", "reason")

    def _state_meters(self) -> None:
        self.requests = self.gauge(
            "requests",
            "Requests here by stage: waiting, prefilling, handing_off (source), offered and granted (destination), "
            "landed, decoding.",
            "stage",
        )
        self.waiting_tokens = self.gauge("waiting_tokens", "Tokens of the waiting requests.")
        self.pages = self.gauge("pages", "Pages of the KV pool, by state (used, cached, free).", "state")
        self.kv_usage = self.gauge("kv_usage_ratio", "Share of the KV pool that live requests hold, 0 to 1.")
        self.gauge(
            "decode_tokens_per_second", "Tokens decoded in the last second.", read=lambda: {(): self.decode_rate()}
        )
        self.route_rate = self.gauge(
            "route_bytes_per_second",
            "Rate of a route to a decode worker, measured by its preflight.",
            "peer",
            "transport",
        )
        self.route_latency = self.gauge(
            "route_latency_seconds", "Latency of a route, measured by its preflight.", "peer", "transport"
        )
        self.shape = self.gauge(
            "pool_info", "The KV pool and batch; always 1.", "page_tokens", "pages", "max_sequences"
        )
        self.gauge(
            "slipstream_build_info",
            "Version; always 1.",
            "component",
            "version",
            "python",
            read=lambda: build_info("worker"),
        )

    def identity(self) -> tuple[str, str]:
        """Model name and role."""
        return self._labels_now["model_name"], self._labels_now["role"]

    def _hit_ratio(self) -> dict[tuple[str, ...], float]:
        return {(): self.cached_tokens.total / max(1.0, self.prompt_tokens.total)}

    # ------------------------------------------------------------------------------------------ what is told

    def step(self, plan: StepPlan, seconds: float) -> None:
        decode, total = plan.decodes, len(plan.token_ids)
        self.steps.add()
        self.step_seconds.only().observe(seconds)
        self.step_tokens.only().observe(total)
        self.tokens.add(decode, "decode")
        self.tokens.add(total - decode, "prefill")
        self.pace.step(decode, total - decode, seconds)

    def status(self, status: Status, stages: Stages) -> None:
        self.requests.replace({(stage,): count for stage, count in stages.items()})
        self.waiting_tokens.set(status.waiting_tokens)
        used = status.pages_total - status.pages_free - status.pages_cached
        self.pages.replace({("free",): status.pages_free, ("cached",): status.pages_cached, ("used",): used})
        self.kv_usage.set(used / max(1, status.pages_total))

    def routes(self, reports: list[RouteReport]) -> None:
        proven = [report for report in reports if not report.error]
        proven.sort(key=lambda report: -report.gb_per_s)  # of several pairs of ranks the slowest counts
        self.route_rate.replace({(r.peer, r.transport): r.gb_per_s * 1e9 for r in proven})
        self.route_latency.replace({(r.peer, r.transport): r.latency_us / 1e6 for r in proven})
