"""Numbers out of the text that `/metrics` gives, each with the name of its metric.

The dashboard shows nothing that it has counted itself: a snapshot keeps the text of the front's and of each worker's
metrics, and every figure is read out of these texts. So a figure can say which metric it is, and anybody can check it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.metrics_core import Metric

Labels = Mapping[str, str | list[str]]
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One number of the page. `value` is None when there is none (or none that JSON can hold).

    `metric` (several joined by "+") and `labels` (a list: any of these) name the samples whose sum it is, `worker`
    whose metrics ("" is the front's). With `quantile`
    it is that quantile of the histogram; with `since` it is the growth for each second since that snapshot.
    """

    value: float | None
    metric: str
    labels: Labels = {}
    worker: str = ""
    quantile: float | None = None
    since: int | None = None
    per: str = ""  # divided by the growth of this metric instead of by the time


class Samples:
    """The samples of some metrics, by sample name."""

    def __init__(self, samples: Iterable[tuple[str, dict[str, str], float]]) -> None:
        self._by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
        for name, labels, value in samples:
            self._by_name.setdefault(name, []).append((labels, value))

    @staticmethod
    def of_text(text: str, names: frozenset[str]) -> Samples:
        """Those of `names` in an exposition; lines that make no sense are passed over."""
        return Samples(sample for line in text.splitlines() if (sample := _sample(line, names)) is not None)

    @staticmethod
    def of_families(families: Iterable[Metric], names: frozenset[str]) -> Samples:
        return Samples((s.name, s.labels, s.value) for f in families for s in f.samples if s.name in names)

    def total(self, name: str, labels: Labels | None = None) -> float | None:
        """The sum of all samples with these labels, of several metrics for "a+b"; None when there are none."""
        wanted = [(key, [one] if isinstance(one, str) else one) for key, one in (labels or {}).items()]
        found = [
            value
            for part in name.split("+")
            for have, value in self._by_name.get(part, ())
            if all(have.get(key) in any_of for key, any_of in wanted)
        ]
        return sum(found) if found else None

    def values(self, name: str, label: str) -> list[str]:
        """What a label is in the samples of a metric."""
        return sorted({have[label] for have, _ in self._by_name.get(name, ()) if label in have})

    def buckets(self, histogram: str) -> dict[float, float]:
        """Observations up to each bound, summed over all labels but `le`."""
        found: dict[float, float] = {}
        for labels, value in self._by_name.get(f"{histogram}_bucket", ()):
            bound = _number(labels.get("le", ""))
            if bound is not None:
                found[bound] = found.get(bound, 0.0) + value
        return dict(sorted(found.items()))


def quantile(buckets: Mapping[float, float], q: float, before: Mapping[float, float] | None = None) -> float | None:
    """The q-quantile of a histogram, as `histogram_quantile` of Prometheus estimates it: linear within a bucket, and
    the last finite bound beyond that. With `before`, of the observations that came since. None without any."""
    earlier = before or {}
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in sorted(buckets.items())]
    if not counts or not counts[-1][1] > 0:
        return None
    rank, low, below = q * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            if math.isinf(bound):
                return low or None
            return min(bound, low + (bound - low) * (rank - below) / (count - below))  # rounding can pass the bound
        low, below = (low if math.isinf(bound) else bound), count
    return None


def _sample(line: str, names: frozenset[str]) -> tuple[str, dict[str, str], float] | None:
    end = line.find("{")
    if end < 0:
        end = line.find(" ")
    name = line[:end]
    if name not in names:
        return None
    labels, _, number = line[end:].rpartition("}")
    value = _number((number or line[end:]).split()[0]) if line[end:].strip() else None
    if value is None:
        return None
    return name, {key: _plain(text) for key, text in _LABEL.findall(labels)}, value


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], text) if "\\" in text else text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
