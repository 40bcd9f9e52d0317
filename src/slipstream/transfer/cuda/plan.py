"""Decides how a batch of runs is copied: by the copy engine, by the kernel, or each by what suits it.

The copy engine moves long runs at the rate of the link but takes a while to begin each; the kernel begins once for a
batch and is a little slower per byte. What either costs is measured on the pair of GPUs at hand (`CopyCosts`), and the
cheaper way is taken. Before that, `survey` looks at every offset once: whether the batch stays inside both regions,
whether all runs have one length, and what alignment they share.

Pure: numpy and arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.transfer.transports.base import Runs

WORD = 16  # bytes that one lane of the kernel moves at once
PIECE_BYTES = 64 << 10  # longest run of unequal ones that one program moves, so that the work is even
_BLOCK = 16384  # runs looked at together, so that they are still in the cache for the next look


class Survey(NamedTuple):
    """What is known of a batch: the `length` of all runs, 0 when they differ; `alignment`, the largest power of two, up
    to 4096, that divides all offsets and lengths; `total` bytes."""

    length: int
    alignment: int
    total: int


def survey(runs: Runs, source_bytes: int, destination_bytes: int, second: Executor | None = None) -> Survey:
    """Checks every run of a batch that is not empty, or the extent that is known of it; `second` is a thread to share
    the work with.

    Raises ValueError when columns differ in length, a run is empty or leaves its region; the message names the run.
    """
    length = common_length(runs)
    count = len(runs.length)
    ends = runs.extent
    if ends and ends.source_end <= source_bytes and ends.destination_end <= destination_bytes:
        return Survey(length, min(ends.unit & -ends.unit, 4096), runs.total)
    bits = length or int(np.bitwise_or.reduce(runs.length))
    block = count if second else _BLOCK  # two threads that come back for each block would wait for each other
    arguments = (runs.destination, runs.length, length, destination_bytes, block)
    other = second.submit(_look, *arguments) if second else None
    looks = [_look(runs.source, runs.length, length, source_bytes, block)]
    looks.append(other.result() if other else _look(*arguments))
    bits |= judged(runs, (source_bytes, destination_bytes), looks)
    total = length * count if length else int(runs.length.sum())
    return Survey(length, min(bits & -bits, 4096) if bits else 4096, total)


def common_length(runs: Runs) -> int:
    """The length of all runs, or 0. A column that was broadcast from one number costs nothing to look at.

    Raises ValueError when there are no runs, or columns differ in length.
    """
    length, count = runs.length, len(runs.length)
    if len(runs.source) != count or len(runs.destination) != count:
        raise ValueError(
            f"columns of {len(runs.source)}, {len(runs.destination)} and {count} rows are not one list of runs"
        )
    if count == 0:
        raise ValueError("a batch without runs")
    first = int(length[0])
    if length.strides == (0,) or bool((length == first).all()):
        return max(first, 0)
    return 0


class Look(NamedTuple):
    """Of one column: whether all runs are inside the region, and the OR of all offsets."""

    inside: bool
    bits: int


def look(offsets: NDArray[np.int64], common: int, size: int) -> Look:
    """At runs of the length `common` that shall be inside [0, size)."""
    seen = int(np.bitwise_or.reduce(offsets))
    # No offset is above the OR of all; a negative one is a very large one without its sign.
    if 0 <= seen <= size - common:
        return Look(True, seen)
    inside = size >= common and int(offsets.view(np.uint64).max()) <= size - common
    return Look(inside, seen)


def judged(runs: Runs, sizes: tuple[int, int], looks: Sequence[Look]) -> int:
    """The OR of all offsets, from looks at the source and the destination column. Raises ValueError, naming the run,
    when one of them leaves its region."""
    for side, offsets, size, seen in zip(
        ("source", "destination"), (runs.source, runs.destination), sizes, looks, strict=True
    ):
        if not seen.inside:
            raise ValueError(_outside(side, offsets, runs.length, size))
    return looks[0].bits | looks[1].bits


def _look(offsets: NDArray[np.int64], length: NDArray[np.int64], common: int, size: int, step: int) -> Look:
    if common and len(offsets) <= step:
        return look(offsets, common, size)
    bits = 0
    for start in range(0, len(offsets), step):
        block = offsets[start : start + step]
        if common:
            seen = look(block, common, size)
        else:
            lengths = length[start : start + step]
            inside = int(lengths.min()) > 0 and int(block.min()) >= 0 and not bool((lengths > size - block).any())
            seen = Look(inside, int(np.bitwise_or.reduce(block)))
        if not seen.inside:
            return seen
        bits |= seen.bits
    return Look(True, bits)


def _outside(side: str, offsets: NDArray[np.int64], length: NDArray[np.int64], size: int) -> str:
    bad = int(np.flatnonzero((offsets < 0) | (length <= 0) | (length > size - offsets))[0])
    return (
        f"run {bad} of {len(offsets)} leaves the {side} region: {int(length[bad])} bytes at {int(offsets[bad])}, "
        f"the region has {size}"
    )


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """What copies cost between two pools, measured; seconds and seconds a byte.

    A batch of n runs and B bytes takes kernel_start + B * kernel_byte by the kernel. By the copy engine it takes
    engine_start and the longer of n * engine_run and B * engine_byte: the next runs are begun while one is moved.
    """

    kernel_start: float
    kernel_byte: float
    engine_start: float
    engine_run: float
    engine_byte: float

    def kernel(self, total: int) -> float:
        return self.kernel_start + total * self.kernel_byte

    def engine(self, count: int, total: int) -> float:
        return self.engine_start + max(count * self.engine_run, total * self.engine_byte)

    def crossover(self, preference: float = 1.0) -> float:
        """The run length in bytes from which on the engine takes at most `preference` times as long as the kernel in a
        large batch; inf when it never does."""
        byte = preference * self.kernel_byte
        return self.engine_run / byte if byte >= self.engine_byte else math.inf


class Sizes(NamedTuple):
    """What the five measurements move: `small` bytes a run in small ones, `many` of them in one batch; `large` bytes in
    large ones, in `few` runs by the engine."""

    small: int
    many: int
    large: int
    few: int


def costs_from_times(
    kernel_small: float, kernel_large: float, engine_small: float, engine_many: float, engine_large: float, sizes: Sizes
) -> CopyCosts:
    """Solves the five costs from five measured times, of which the small ones are of one run of `sizes.small` bytes.

    Noise never makes a cost negative.
    """
    kernel_byte = max((kernel_large - kernel_small) / (sizes.large - sizes.small), 1e-15)
    engine_byte = max((engine_large - engine_small) / (sizes.large - sizes.small), 1e-15)
    engine_run = max(
        (engine_many - engine_small) / (sizes.many - 1), 0.0
    )  # one more of those that take no time to move
    return CopyCosts(
        kernel_start=max(kernel_small - sizes.small * kernel_byte, 0.0),
        kernel_byte=kernel_byte,
        engine_start=max(engine_small - max(engine_run, sizes.small * engine_byte), 0.0),
        engine_run=engine_run,
        engine_byte=engine_byte,
    )


class Division(NamedTuple):
    """Which runs go by which way: row numbers, None for all of them; an empty array for none."""

    kernel: NDArray[np.int64] | None
    engine: NDArray[np.int64] | None


_NONE = np.empty(0, np.int64)
ALL_BY_KERNEL = Division(None, _NONE)
_ALL_BY_ENGINE = Division(_NONE, None)


def divide(runs: Runs, seen: Survey, costs: CopyCosts, preference: float = 1.0) -> Division:
    """Takes the cheapest of: all by the kernel, all by the engine, long runs by the engine and the rest by the kernel.

    The engine takes no multiprocessor from the model, so it is taken also when it is as slow as `preference` times the
    kernel.
    """
    count = len(runs.length)
    by_kernel = costs.kernel(seen.total) * preference
    by_engine = costs.engine(count, seen.total)
    if seen.length == 0 and (crossover := costs.crossover(preference)) < math.inf:
        long = runs.length >= crossover
        many = int(long.sum())
        if 0 < many < count:
            moved = int(runs.length[long].sum())
            both = costs.engine(many, moved) + costs.kernel(seen.total - moved) * preference
            if both < min(by_kernel, by_engine):
                return Division(np.flatnonzero(~long), np.flatnonzero(long))
    return _ALL_BY_ENGINE if by_engine <= by_kernel else ALL_BY_KERNEL


def cut_long_runs(runs: Runs) -> Runs:
    """Cuts runs of more than PIECE_BYTES into pieces of it, the last of a run shorter."""
    if int(runs.length.max(initial=0)) <= PIECE_BYTES:
        return runs
    pieces = -(-runs.length // PIECE_BYTES)
    owner = np.repeat(np.arange(len(pieces)), pieces)
    inside = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * PIECE_BYTES
    length = np.minimum(runs.length[owner] - inside, PIECE_BYTES)
    return Runs(runs.source[owner] + inside, runs.destination[owner] + inside, length)
