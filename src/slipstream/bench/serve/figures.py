"""Figures from samples: percentiles with intervals, goodput, throughput, and what makes them doubtful.

Intervals are 95 % bootstrap intervals. With one or two seeds requests are drawn again, with three and more first seeds,
then requests within each, since requests of one run are not independent of each other. A request is drawn with all its
tokens. The interval of a share is not narrower than Wilson's, so that 50 of 50 is not certainty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.bench.serve.load import LoadResult, Sample
from slipstream.errors import ConfigError

Floats = NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)
DRAWS = 400
SEEDS_TO_DRAW = 3
BUSY = 0.85  # share of a core from which on the client may be what is measured
LATE_S = 0.005


class Spread(msgspec.Struct, kw_only=True):
    """Percentiles in milliseconds; `low` and `high` are the ends of the intervals of p50, p90, p95, p99."""

    n: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    low: list[float] = []
    high: list[float] = []


class Share(msgspec.Struct, kw_only=True):
    """A share of requests, from 0 to 1, with its interval."""

    value: float
    low: float
    high: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds in seconds; None where there is none. `itl` is that of a request's longest gap."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=1s,tpot=10ms`. Raises ConfigError."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in cls.__struct_fields__:
                raise ConfigError(f"--slo {part!r}: bounds are ttft, tpot, itl and e2e, as in ttft=1s,tpot=10ms.")
            bounds[name] = seconds(value, f"--slo {name}")
        return cls(**bounds)

    def met(self, sample: Sample) -> bool:
        if not sample.ok:
            return False
        gaps = np.diff(sample.stream.times) if self.itl is not None else ()
        found = (
            (self.ttft, sample.ttft_s),
            (self.tpot, sample.tpot_s or 0.0),
            (self.itl, max(gaps, default=0.0)),
            (self.e2e, sample.e2e_s),
        )
        return all(bound is None or value <= bound for bound, value in found)

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ", ".join(f"{name} {1e3 * bound:g} ms" for name, bound in given if bound is not None)


class Figures(msgspec.Struct, kw_only=True):
    """One rate, all its seeds together. Latencies are of whole answers; errors count against goodput.

    `rate` is what was asked for: requests a second, or how many times as fast a trace was replayed; `sent_per_s` what
    was sent, which differs by the chance of the arrivals. This and the other rates are per second of the windows in
    which requests arrived, over everything that happened in them: requests completed, tokens that came, prompt tokens
    whose first token came. `wrong_length` counts whole answers that are not as long as asked, `other_prompts` prompts
    whose length by the server's count is not the wanted one.
    """

    rate: float
    seeds: list[int]
    requests: int
    ok: int
    errors: dict[str, int]
    error_examples: dict[str, str] = {}
    window_s: float
    sent_per_s: float
    done_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    good: Share | None = None
    good_per_s: float | None = None
    lateness: Spread
    client_cpu: float
    client_lag_ms: float
    open_at_end: int
    tokens_per_event: float
    cached_share: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    wrong_length: int
    other_prompts: int
    notes: list[str] = []


def seconds(text: str, what: str) -> float:
    """Seconds of `1s`, `10ms`, `0.5`. Raises ConfigError."""
    number, factor = text.strip(), 1.0
    for unit, size in (("ms", 1e-3), ("us", 1e-6), ("s", 1.0)):
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), size
            break
    try:
        value = float(number) * factor
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise ConfigError(f"{what} {text!r} is no time; write it like 1s or 10ms.")
    return value


# --------------------------------------------------------------------------------------------------------- percentiles


class Draws:
    """How often each request counts in each of `DRAWS` repetitions: [draws, requests]."""

    def __init__(self, seeds: Sequence[int], rng: np.random.Generator) -> None:
        groups = np.asarray(seeds)
        names = np.unique(groups)
        self.weights = np.zeros((DRAWS, len(groups)))
        members = {name: np.flatnonzero(groups == name) for name in names}
        by_seed = len(names) >= SEEDS_TO_DRAW
        for row in self.weights:
            for name in rng.choice(names, len(names)) if by_seed else names:
                chosen = rng.integers(0, len(members[name]), len(members[name]))
                row[members[name]] += np.bincount(chosen, minlength=len(members[name]))


def spread(values: Floats, owners: NDArray[np.int64], draws: Draws | None) -> Spread:
    """Of `values` in seconds; `owners[i]` is the request that the i-th belongs to."""
    if not len(values):
        return Spread()
    found = Spread(n=len(values), mean=1e3 * float(values.mean()), max=1e3 * float(values.max()))
    for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
        setattr(found, f"p{percent}", 1e3 * float(value))
    if draws is not None and len(values) > 1:
        found.low, found.high = _intervals(values, owners, draws)
    return found


def _intervals(values: Floats, owners: NDArray[np.int64], draws: Draws) -> tuple[list[float], list[float]]:
    order = np.argsort(values)
    ordered, owned = values[order], owners[order]
    found = []
    for weights in draws.weights:
        reached = np.cumsum(weights[owned])
        if reached[-1] > 0:
            at = np.searchsorted(reached, reached[-1] * np.asarray(PERCENTILES) / 100)
            found.append(ordered[np.minimum(at, len(ordered) - 1)])
    if not found:
        return [], []
    low, high = np.percentile(np.asarray(found), (2.5, 97.5), axis=0) * 1e3
    return low.tolist(), high.tolist()


def share(met: NDArray[np.bool_], draws: Draws) -> Share:
    low, high = wilson(int(met.sum()), len(met))
    totals = draws.weights.sum(axis=1)
    drawn = (draws.weights @ met)[totals > 0] / totals[totals > 0]
    if len(drawn):
        low, high = min(low, float(np.percentile(drawn, 2.5))), max(high, float(np.percentile(drawn, 97.5)))
    return Share(value=float(met.mean()), low=low, high=high)


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    middle = (hits + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * (hits * (n - hits) / n + z * z / 4) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


# --------------------------------------------------------------------------------------------------------- one rate


def figures(rate: float, results: dict[int, LoadResult], slo: Slo | None, *, told_usage: bool) -> Figures:
    """Of the loads of one rate, by seed."""
    pairs = [(seed, s) for seed, result in results.items() for s in result.samples if s.planned.measured]
    whole = [(seed, s) for seed, s in pairs if s.ok]
    rng = np.random.default_rng(0)
    draws = Draws([seed for seed, _ in whole], rng) if whole else None
    window = sum(result.end - result.begin for result in results.values())
    good = share(np.array([slo.met(s) for _, s in pairs]), Draws([seed for seed, _ in pairs], rng)) if slo else None
    oks = [s for _, s in whole]
    each = np.arange(len(oks))
    gaps = [np.diff(s.stream.times) for s in oks]
    paced = [(n, s.tpot_s) for n, s in enumerate(oks) if s.tpot_s is not None]
    failed = [s.stream for _, s in pairs if not s.ok]
    done, prompts, tokens = _inside(results)
    found = Figures(
        rate=rate,
        seeds=list(results),
        requests=len(pairs),
        ok=len(oks),
        errors=dict(Counter(stream.problem for stream in failed).most_common()),
        error_examples={stream.problem: stream.detail for stream in reversed(failed)},
        window_s=window,
        sent_per_s=len(pairs) / window,
        done_per_s=done / window,
        prompt_tokens_per_s=prompts / window,
        output_tokens_per_s=tokens / window,
        ttft=spread(np.array([s.ttft_s for s in oks]), each, draws),
        itl=spread(_joined(gaps), np.repeat(each, [len(g) for g in gaps]) if oks else each, draws),
        tpot=spread(np.array([value for _, value in paced]), np.array([n for n, _ in paced], dtype=np.int64), draws),
        e2e=spread(np.array([s.e2e_s for s in oks]), each, draws),
        good=good,
        good_per_s=good.value * len(pairs) / window if good else None,
        lateness=spread(np.array([s.lateness_s for _, s in pairs]), np.arange(len(pairs)), None),
        client_cpu=max(result.client_cpu for result in results.values()),
        client_lag_ms=1e3 * max(result.lag_s for result in results.values()),
        open_at_end=max(result.open_at_end for result in results.values()),
        tokens_per_event=sum(s.output_tokens for s in oks) / max(1, sum(len(s.stream.times) for s in oks)),
        cached_share=_cached(oks),
        mean_prompt_tokens=_mean([prompt_tokens(s) for s in oks]),
        mean_output_tokens=_mean([s.output_tokens for s in oks]),
        wrong_length=sum(s.output_tokens != s.planned.item.output for s in oks),
        other_prompts=sum(prompt_tokens(s) != s.planned.item.input for s in oks),
    )
    found.notes = notes(found, told_usage=told_usage)
    return found


def _inside(results: dict[int, LoadResult]) -> tuple[int, int, int]:
    """(requests completed, prompt tokens whose first token came, tokens that came) within the windows."""
    done = prompts = tokens = 0
    for result in results.values():
        for sample in result.samples:
            times, counts = sample.stream.times, sample.stream.counts
            inside = [result.begin <= time < result.end for time in times]
            tokens += sum(count for count, within in zip(counts, inside, strict=True) if within)
            if inside and inside[0]:
                prompts += prompt_tokens(sample)
            done += sample.ok and inside[-1]
    return done, prompts, tokens


def notes(found: Figures, *, told_usage: bool) -> list[str]:
    """What whoever reads the figures must know, in sentences."""
    said = []
    slow = found.lateness.p99 > max(1e3 * LATE_S, 0.1 * found.ttft.p50) if found.ttft.n else found.lateness.p99 > 5
    if found.client_cpu > BUSY or slow:
        said.append(
            f"the client is a bottleneck here: {100 * found.client_cpu:.0f} % of a core, requests written "
            f"{found.lateness.p99:.1f} ms late (p99); the latencies are partly its own. Use a faster or idler machine."
        )
    if found.requests and found.ok < found.requests:
        said.append(f"{found.requests - found.ok} of {found.requests} requests failed; latencies are of the others")
    if found.wrong_length:
        said.append(
            f"{found.wrong_length} of {found.ok} answers were not as long as asked "
            f"(mean {found.mean_output_tokens:.1f} tokens): the work was not the one planned"
        )
    if found.ok and not told_usage:
        said.append("answer lengths are counts of events, since the server tells no usage")
    if found.tokens_per_event > 1.05:
        said.append(
            f"events brought {found.tokens_per_event:.2f} tokens on average: gaps between events are not gaps between "
            "tokens; read TPOT"
        )
    if found.sent_per_s and found.done_per_s < 0.9 * found.sent_per_s:
        said.append(
            f"the server completed {found.done_per_s:.2f} of {found.sent_per_s:.2f} requests/s sent "
            f"({found.open_at_end} open at the end): either it does not keep up, and latencies grow with the length of "
            "the run, or the run is short for its answers"
        )
    if found.requests < 100:
        said.append(f"{found.requests} requests: the 99th percentile is close to the largest value")
    return said


def prompt_tokens(sample: Sample) -> int:
    told = sample.stream.prompt_tokens
    return sample.planned.item.input if told is None else told


def _cached(oks: list[Sample]) -> float:
    total = sum(prompt_tokens(s) for s in oks)
    return sum(s.stream.cached_tokens or 0 for s in oks) / total if total else 0.0


def _mean(values: list[int]) -> float:
    return float(np.mean(values)) if values else 0.0


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.array([])
