"""When requests are due, in seconds after the start, decided before the first one is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from slipstream.errors import ConfigError

Arrivals = Literal["poisson", "exact", "constant", "burst", "trace"]
KINDS: tuple[Arrivals, ...] = ("poisson", "exact", "constant", "burst", "trace")


def due_times(
    kind: Arrivals, count: int, rate: float, rng: np.random.Generator, *, variation: float = 2.0
) -> list[float]:
    """`count` times at `rate` requests a second on average.

    `poisson`: independent, gaps exponential. `exact`: the same, given that `count` of them fall into `count / rate`
    seconds: each comes at any moment of these as likely as at any other. `constant`: equal gaps. `burst`: gaps of a
    gamma distribution whose standard deviation is `variation` times its mean (1 is poisson; above, requests come in
    clumps).
    """
    if rate <= 0:
        raise ConfigError(f"a rate of {rate:g} requests/s sends nothing; give one above 0.")
    if kind == "constant":
        return [(number + 0.5) / rate for number in range(count)]
    if kind == "exact":
        return np.sort(rng.uniform(0.0, count / rate, count)).tolist()
    shape = 1.0 if kind == "poisson" else 1.0 / variation**2
    if kind == "burst" and variation <= 0:
        raise ConfigError(f"--variation is {variation:g}; the spread of gaps must be above 0. 1 is like poisson.")
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count)).tolist()


def trace_times(times_s: Sequence[float], *, speed: float) -> list[float]:
    """A trace's own times from its first on, `speed` times as fast."""
    if speed <= 0:
        raise ConfigError(f"a trace cannot be replayed at {speed:g} times its speed; give a number above 0.")
    return [(time - times_s[0]) / speed for time in times_s]
