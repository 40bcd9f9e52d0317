"""The numbers under the names that boards, autoscalers and endpoint pickers for other engines read.

An alias is made of native families at each scrape: samples are chosen by labels, added up, scaled, and renamed. So an
alias can never say anything else than the native metric that it is made of. Where another engine knows a thing that
does not exist here (LoRA adapters, expired transfers) there is no alias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Flavour = Literal["vllm", "sglang"]
Part = Literal["front", "worker"]

WAITING = ("waiting", "offered")
RUNNING = ("prefilling", "landed", "decoding", "handing_off")
REJECTED = ("queue_full", "no_workers", "context_length_exceeded")
POOL = {"page_tokens": "block_size", "pages": "num_gpu_blocks"}
UNMET = ("no_workers", "context_length_exceeded", "layout_mismatch")  # handoffs that ended before a grant


@dataclass(frozen=True, slots=True)
class Source:
    """A native family, the label values that count (with `but`, those that do not), and labels to add."""

    name: str
    label: str = ""
    values: tuple[str, ...] = ()
    but: bool = False
    add: Mapping[str, str] = field(default_factory=dict)

    def takes(self, labels: Mapping[str, str]) -> bool:
        return not self.label or (labels.get(self.label) in self.values) is not self.but


@dataclass(frozen=True, slots=True)
class Alias:
    """`name` comes without `_total`. `keep` maps native labels to those of the alias; `words` rewrites their values."""

    name: str
    sources: tuple[Source, ...]
    keep: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0
    words: Callable[[str], str] = str
    base: bool = True  # has the labels that all metrics of the other engine have


def _of(name: str, label: str = "", *values: str, but: bool = False, **add: str) -> tuple[Source, ...]:
    return (Source("slipstream_" + name, label, values, but, add),)


ROUTER_WAITING = _of("router_load", "state", "queued")
ROUTER_RUNNING = _of("router_load", "state", "running")
FAILED_TRANSFERS = _of("worker_copy_failures", "transport", "mooncake", but=True)

VLLM: dict[Part, tuple[Alias, ...]] = {
    "front": (
        Alias("vllm:num_requests_running", ROUTER_RUNNING),
        Alias("vllm:num_requests_waiting", ROUTER_WAITING),
        Alias("vllm:kv_cache_usage_perc", _of("router_kv_usage_ratio")),
        Alias("vllm:cache_config_info", _of("router_pool_info"), POOL),
        Alias("vllm:prompt_tokens", _of("prompt_tokens")),
        Alias("vllm:generation_tokens", _of("generated_tokens")),
        Alias("vllm:request_success", _of("finished_choices"), {"reason": "finished_reason"}),
        Alias("vllm:admission_rejections", _of("requests", "outcome", *REJECTED), {"outcome": "reason"}),
        Alias("vllm:time_to_first_token_seconds", _of("time_to_first_token_seconds")),
        Alias("vllm:inter_token_latency_seconds", _of("inter_token_latency_seconds")),
        Alias("vllm:request_time_per_output_token_seconds", _of("time_per_output_token_seconds")),
        Alias("vllm:e2e_request_latency_seconds", _of("request_duration_seconds")),
        Alias("vllm:request_prompt_tokens", _of("request_prompt_tokens")),
        Alias("vllm:request_generation_tokens", _of("request_generated_tokens")),
        Alias("http_requests", _of("http_responses"), {"path": "handler", "status": "status"},
              words=lambda word: f"{word[0]}xx" if word.isdigit() else word, base=False),
    ),
    "worker": (
        Alias("vllm:num_requests_running", _of("worker_requests", "stage", *RUNNING)),
        Alias("vllm:num_requests_waiting", _of("worker_requests", "stage", *WAITING)),
        Alias("vllm:num_requests_waiting_by_reason",
              _of("worker_requests", "stage", "waiting", reason="capacity")
              + _of("worker_requests", "stage", "offered", reason="deferred")),
        Alias("vllm:kv_cache_usage_perc", _of("worker_kv_usage_ratio")),
        Alias("vllm:cache_config_info", _of("worker_pool_info"), POOL),
        Alias("vllm:prompt_tokens", _of("worker_tokens", "stage", "prefill")),
        Alias("vllm:generation_tokens", _of("worker_tokens", "stage", "decode")),
        Alias("vllm:prefix_cache_queries", _of("worker_prompt_tokens")),
        Alias("vllm:prefix_cache_hits", _of("worker_cached_prompt_tokens")),
        Alias("vllm:num_preemptions", _of("worker_preemptions")),
        Alias("vllm:time_to_first_token_seconds", _of("worker_time_to_first_token_seconds")),
        Alias("vllm:inter_token_latency_seconds", _of("worker_inter_token_seconds")),
        Alias("vllm:request_queue_time_seconds", _of("worker_queue_seconds")),
        Alias("vllm:request_prefill_time_seconds", _of("worker_prefill_seconds")),
        Alias("vllm:request_decode_time_seconds", _of("worker_decode_seconds")),
        Alias("vllm:request_inference_time_seconds", _of("worker_inference_seconds")),
        Alias("vllm:iteration_tokens_total", _of("worker_step_tokens")),
        Alias("vllm:nixl_xfer_time_seconds", _of("worker_copy_wire_seconds", "transport", "mooncake", but=True)),
        Alias("vllm:nixl_bytes_transferred", _of("worker_handoff_bytes")),
        Alias("vllm:nixl_num_failed_transfers", FAILED_TRANSFERS),
        Alias("vllm:mooncake_xfer_time_seconds", _of("worker_copy_wire_seconds", "transport", "mooncake")),
        Alias("vllm:mooncake_num_failed_transfers", _of("worker_copy_failures", "transport", "mooncake")),
    ),
}  # fmt: skip

SGLANG: dict[Part, tuple[Alias, ...]] = {
    "front": (
        Alias("sglang:num_running_reqs", ROUTER_RUNNING),
        Alias("sglang:num_queue_reqs", ROUTER_WAITING),
        Alias("sglang:token_usage", _of("router_kv_usage_ratio")),
        Alias("sglang:prompt_tokens", _of("prompt_tokens")),
        Alias("sglang:generation_tokens", _of("generated_tokens")),
        Alias("sglang:cached_tokens", _of("cached_prompt_tokens")),
        Alias("sglang:num_requests", _of("requests")),
        Alias("sglang:time_to_first_token_seconds", _of("time_to_first_token_seconds")),
        Alias("sglang:inter_token_latency_seconds", _of("inter_token_latency_seconds")),
        Alias("sglang:e2e_request_latency_seconds", _of("request_duration_seconds")),
    ),
    "worker": (
        Alias("sglang:num_running_reqs", _of("worker_requests", "stage", *RUNNING)),
        Alias("sglang:num_queue_reqs", _of("worker_requests", "stage", *WAITING)),
        Alias("sglang:token_usage", _of("worker_kv_usage_ratio")),
        Alias("sglang:gen_throughput", _of("worker_decode_tokens_per_second")),
        Alias("sglang:cache_hit_rate", _of("worker_prefix_hit_ratio")),
        Alias("sglang:time_to_first_token_seconds", _of("worker_time_to_first_token_seconds")),
        Alias("sglang:inter_token_latency_seconds", _of("worker_inter_token_seconds")),
        Alias("sglang:queue_time_seconds", _of("worker_queue_seconds")),
        Alias("sglang:per_stage_req_latency_seconds",
              _of("worker_prefill_seconds", stage="prefill_forward")
              + _of("worker_grant_seconds", stage="prefill_bootstrap")
              + _of("worker_handoff_seconds", stage="prefill_transfer_kv_cache")),
        Alias("sglang:num_prefill_bootstrap_queue_reqs", _of("worker_requests", "stage", "waiting")),
        Alias("sglang:num_prefill_inflight_queue_reqs", _of("worker_requests", "stage", "handing_off")),
        Alias("sglang:num_decode_prealloc_queue_reqs", _of("worker_requests", "stage", "offered")),
        Alias("sglang:num_decode_transfer_queue_reqs", _of("worker_requests", "stage", "granted")),
        Alias("sglang:kv_transfer_speed_gb_s", _of("worker_copy_bytes_per_second"), scale=1e-9),
        Alias("sglang:kv_transfer_latency_ms", _of("worker_copy_wire_seconds"), scale=1e3),
        Alias("sglang:kv_transfer_bootstrap_ms", _of("worker_grant_seconds"), scale=1e3),
        Alias("sglang:kv_transfer_alloc_ms", _of("worker_reserve_seconds"), scale=1e3),
        Alias("sglang:kv_transfer_total_mb", _of("worker_handoff_bytes"), scale=1e-6),
        Alias("sglang:num_bootstrap_failed_reqs", _of("worker_handoff_failures", "reason", *UNMET)),
        Alias("sglang:num_transfer_failed_reqs", _of("worker_handoff_failures", "reason", *UNMET, but=True)),
        Alias("sglang:num_prefill_retries", _of("worker_retried_sequences")),
    ),
}  # fmt: skip

ALIASES: dict[Flavour, dict[Part, tuple[Alias, ...]]] = {"vllm": VLLM, "sglang": SGLANG}
ENGINE_TYPES = {"prefill": "prefill", "decode": "decode"}


def base_labels(flavour: Flavour, model: str, role: str) -> dict[str, str]:
    """The labels that each metric of this engine has."""
    if flavour == "vllm":
        return {"model_name": model, "engine": "0"}
    return {"model_name": model, "engine_type": ENGINE_TYPES.get(role, "unified"), "tp_rank": "0", "pp_rank": "0"}


class Compat(Collector):
    """The aliases of one part, made of what `natives` collects now. `identity` gives model name and role."""

    def __init__(
        self,
        flavour: Flavour,
        part: Part,
        natives: Callable[[], Iterable[Metric]],
        identity: Callable[[], tuple[str, str]],
    ) -> None:
        self._flavour: Flavour = flavour
        self._aliases = ALIASES[flavour][part]
        self._natives = natives
        self._identity = identity

    def describe(self) -> Iterable[Metric]:
        return [Metric(alias.name, alias.name, "untyped") for alias in self._aliases]

    def collect(self) -> Iterator[Metric]:
        natives = {family.name: family for family in self._natives()}
        base = base_labels(self._flavour, *self._identity())
        for alias in self._aliases:
            yield _made(alias, natives, base if alias.base else {})


def _made(alias: Alias, natives: Mapping[str, Metric], base: Mapping[str, str]) -> Metric:
    kind = natives[alias.sources[0].name].type
    told = " and ".join(dict.fromkeys(source.name for source in alias.sources))
    family = Metric(alias.name, f"Alias of {told}.", kind)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for source in alias.sources:
        native = natives[source.name]
        for sample in native.samples:
            if not source.takes(sample.labels):
                continue
            labels = {**base, **source.add}
            labels.update({alias.keep[k]: alias.words(v) for k, v in sample.labels.items() if k in alias.keep})
            if "le" in sample.labels:
                labels["le"] = _scaled(sample.labels["le"], alias.scale)
            suffix = sample.name.removeprefix(native.name)
            value = sample.value * (alias.scale if suffix in ("_sum", "") else 1.0)
            key = (suffix, tuple(labels.items()))
            sums[key] = sums.get(key, 0.0) + value
    if not sums and not alias.keep and kind != "histogram":
        sums[("_total" if kind == "counter" else "", tuple(base.items()))] = 0.0
    for (suffix, labels), value in sums.items():
        family.add_sample(alias.name + suffix, dict(labels), value)
    return family


def _scaled(bound: str, scale: float) -> str:
    return bound if bound == "+Inf" or scale == 1.0 else f"{float(bound) * scale:.12g}"
