"""Counts what the front does, for /metrics.

Plain integers, touched by the event loop alone and read when somebody scrapes: a token costs one bisect. Bounds reach
from 1 ms (first token) and 2 ms (between tokens), where small models on fast GPUs are, up to minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slipstream.version import __version__

# fmt: off
TTFT_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
               80, 160, 640, 2560)
ITL_BOUNDS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
              0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
DURATION_BOUNDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
# fmt: on


class Histogram:
    """Observations in seconds, counted by the first bound that they do not exceed."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += count
        self.sum += seconds * count

    def buckets(self) -> list[tuple[str, float]]:
        total = 0
        buckets = []
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), float(total)))
        return buckets


class FrontMetrics(Collector):
    """All counts of one front. `model` labels them once it is known."""

    def __init__(self) -> None:
        self.model = ""
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.duration = Histogram(DURATION_BOUNDS)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.statuses: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.in_flight = 0
        self.merged = 0

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("slipstream_front", "Version of the front.", {"version": __version__})
        for name, text, histogram in (
            ("time_to_first_token", "Seconds from the request to its first token, as the front sees it.", self.ttft),
            ("inter_token_latency", "Seconds between two tokens of one answer, as the front sees it.", self.itl),
            ("request_duration", "Seconds from the request to the end of its answer.", self.duration),
        ):
            family = HistogramMetricFamily(f"slipstream_{name}_seconds", text, labels=("model_name",))
            family.add_metric((self.model,), histogram.buckets(), histogram.sum)
            yield family
        yield self._labelled(
            "slipstream_requests", "Generation requests by how they ended.", ("endpoint", "outcome"), self.outcomes
        )
        yield self._labelled("slipstream_http_responses", "Responses by status.", ("path", "status"), self.statuses)
        for name, text, value in (
            ("prompt_tokens", "Tokens of the prompts of answered requests.", self.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens whose KV was in a prefix cache.", self.cached_tokens),
            ("generated_tokens", "Tokens generated.", self.generated_tokens),
            (
                "merged_chunks",
                "Chunks that waited, as for a slow client, and left together with a later one.",
                self.merged,
            ),
        ):
            family = CounterMetricFamily(f"slipstream_{name}", text, labels=("model_name",))
            family.add_metric((self.model,), value)
            yield family
        gauge = GaugeMetricFamily(
            "slipstream_requests_in_flight", "Generation requests being answered.", labels=("model_name",)
        )
        gauge.add_metric((self.model,), self.in_flight)
        yield gauge

    def _labelled(
        self, name: str, text: str, labels: tuple[str, str], counts: Counter[tuple[str, str]]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=("model_name", *labels))
        entries: Iterable[tuple[tuple[str, str], int]] = sorted(counts.items())
        for values, count in entries:
            family.add_metric((self.model, *values), count)
        return family
