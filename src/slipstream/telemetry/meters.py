"""Numbers that are cheap to count, and become Prometheus families when somebody scrapes.

A counter is a dictionary entry, an observation one bisect: well under a microsecond each, without a lock. Each meter is
written by one thread; a scrape on another may see one number a moment before another, never half of one. Names follow
Prometheus: base units in the name (`_seconds`, `_bytes`, `_ratio`), `_total` behind counters.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slipstream.version import __version__

Kind = Literal["counter", "gauge", "histogram"]
Values = tuple[str, ...]
Meter = TypeVar("Meter", "Counter", "Gauge", "Histogram")
Read = Callable[[], Mapping[Values, float]]

# fmt: off
TTFT_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
               80, 160, 640, 2560)
ITL_BOUNDS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
              0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
DURATION_BOUNDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_BOUNDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 5.0)
COPY_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
RATE_BOUNDS = (1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2e10, 4e10, 8e10, 1.2e11, 1.6e11, 2e11, 2.4e11, 2.8e11, 3.2e11,
               3.6e11, 4e11)
BYTES_BOUNDS = tuple(float(1 << power) for power in range(12, 36, 2))
COUNT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# fmt: on


@dataclass(frozen=True, slots=True)
class Spec:
    """A metric as documents know it: the name without `_total`, HELP, and labels beyond those of its meter."""

    name: str
    kind: Kind
    text: str
    labels: Values = ()
    bounds: tuple[float, ...] = ()


class Counter:
    """A count for each combination of label values; without labels it shows from the start. With `read` it shows a
    count that is kept elsewhere."""

    def __init__(self, spec: Spec, read: Read | None = None) -> None:
        self.spec = spec
        self.values: dict[Values, float] = {} if spec.labels else {(): 0}
        self._read = read

    def add(self, amount: float = 1, *values: str) -> None:
        self.values[values] = self.values.get(values, 0) + amount

    def __getitem__(self, values: str | Values) -> float:
        return self.values.get((values,) if isinstance(values, str) else values, 0)

    @property
    def total(self) -> float:
        return sum(list(self.values.values()))

    def samples(self) -> Iterator[tuple[str, Values, float, str]]:
        numbers = self._read() if self._read is not None else self.values
        for values, number in list(numbers.items()):
            yield "_total", values, number, ""


class Gauge:
    """A number for each combination of label values; either `set`, or read anew at each scrape."""

    def __init__(self, spec: Spec, read: Read | None = None) -> None:
        self.spec = spec
        self.values: dict[Values, float] = {}
        self._read = read

    def set(self, number: float, *values: str) -> None:
        self.values[values] = number

    def replace(self, numbers: Mapping[Values, float]) -> None:
        """These and no others."""
        self.values = dict(numbers)

    def samples(self) -> Iterator[tuple[str, Values, float, str]]:
        numbers = self._read() if self._read is not None else self.values
        for values, number in list(numbers.items()):
            yield "", values, number, ""


@dataclass(slots=True)
class Distribution:
    """Observations, counted by the first bound that they do not exceed."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def total(self) -> int:
        return sum(self.counts)


class Histogram:
    """A distribution for each combination of label values; without labels it shows from the start."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.values: dict[Values, Distribution] = {} if spec.labels else {(): Distribution(spec.bounds)}

    def observe(self, value: float, *values: str, count: int = 1) -> None:
        found = self.values.get(values)
        if found is None:
            found = self.values[values] = Distribution(self.spec.bounds)
        found.observe(value, count)

    def only(self) -> Distribution:
        """The distribution of a histogram without labels, for hot paths."""
        return self.values[()]

    def samples(self) -> Iterator[tuple[str, Values, float, str]]:
        for values, found in list(self.values.items()):
            total = 0
            for bound, count in zip((*found.bounds, None), list(found.counts), strict=True):
                total += count
                yield "_bucket", values, total, "+Inf" if bound is None else str(float(bound))
            yield "_count", values, total, ""
            yield "_sum", values, found.sum, ""


class Meters(Collector):
    """The meters of one part of a process. `labels` are those of all its metrics, asked for at a scrape.

    Names get the prefix, unless they begin with `slipstream_` themselves.
    """

    def __init__(self, prefix: str, labels: Callable[[], Mapping[str, str]]) -> None:
        self._prefix = prefix
        self._labels = labels
        self._meters: list[Counter | Gauge | Histogram] = []

    def counter(self, name: str, text: str, *labels: str, read: Read | None = None) -> Counter:
        return self._keep(Counter(Spec(self._full(name), "counter", text, labels), read))

    def gauge(self, name: str, text: str, *labels: str, read: Read | None = None) -> Gauge:
        return self._keep(Gauge(Spec(self._full(name), "gauge", text, labels), read))

    def histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return self._keep(Histogram(Spec(self._full(name), "histogram", text, labels, bounds)))

    def _full(self, name: str) -> str:
        return name if name.startswith("slipstream_") else self._prefix + name

    def _keep(self, meter: Meter) -> Meter:
        self._meters.append(meter)
        return meter

    @property
    def specs(self) -> list[Spec]:
        return [meter.spec for meter in self._meters]

    @property
    def base_labels(self) -> list[str]:
        return list(self._labels())

    def describe(self) -> Iterable[Metric]:
        return [Metric(spec.name, spec.text, spec.kind) for spec in self.specs]

    def collect(self) -> Iterator[Metric]:
        base = dict(self._labels())
        for meter in self._meters:
            spec = meter.spec
            family = Metric(spec.name, spec.text, spec.kind)
            for suffix, values, number, bound in meter.samples():
                labels = {**base, **dict(zip(spec.labels, values, strict=True))}
                if bound:
                    labels["le"] = bound
                family.add_sample(spec.name + suffix, labels, number)
            yield family


def build_info(component: str) -> dict[Values, float]:
    """The only value of `slipstream_build_info`: labels component, version, python."""
    return {(component, __version__, platform.python_version()): 1.0}
