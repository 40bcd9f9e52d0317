"""How batches of runs are checked and divided between copy engine and kernel."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slipstream.transfer.cuda.plan import (
    PIECE_BYTES,
    CopyCosts,
    Sizes,
    costs_from_times,
    cut_long_runs,
    divide,
    survey,
)
from slipstream.transfer.transports.base import Extent, Runs

NVLINK = CopyCosts(
    kernel_start=20e-6, kernel_byte=1 / 366e9, engine_start=8e-6, engine_run=0.55e-6, engine_byte=1 / 395e9
)


def runs_of(source: list[int], destination: list[int], length: list[int]) -> Runs:
    return Runs(*(np.array(column, np.int64) for column in (source, destination, length)))


def equal_runs(count: int, length: int) -> Runs:
    offsets = np.arange(count, dtype=np.int64) * length
    return Runs(offsets, offsets[::-1].copy(), np.full(count, length, np.int64))


def test_a_survey_tells_equal_runs_and_their_alignment():
    seen = survey(equal_runs(1000, 48), 48000, 48000)
    assert (seen.length, seen.alignment, seen.total) == (48, 16, 48000)
    assert survey(equal_runs(5, 8192), 40960, 40960).alignment == 4096


def test_a_survey_tells_unequal_runs():
    seen = survey(runs_of([0, 64], [128, 0], [16, 24]), 1024, 1024)
    assert (seen.length, seen.alignment, seen.total) == (0, 8, 40)


def test_a_broadcast_length_is_the_common_length():
    offsets = np.arange(40000, dtype=np.int64) * 32
    runs = Runs(offsets, offsets, np.broadcast_to(np.int64(32), (40000,)))
    assert survey(runs, 40000 * 32, 40000 * 32).length == 32


@pytest.mark.parametrize("position", [0, 7, 16383, 16384, 39999])
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("offset", [-16, -(1 << 62), 40000 * 32 - 16, 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize("equal", [True, False])
def test_a_run_outside_its_region_is_named(position: int, side: str, offset: int, equal: bool):
    runs = equal_runs(40000, 32)
    if not equal:
        runs.length[20000] = 16
    getattr(runs, side)[position] = offset
    with pytest.raises(ValueError, match=rf"run {position} of 40000 leaves the {side} region"):
        survey(runs, 40000 * 32, 40000 * 32)


@pytest.mark.parametrize("length", [0, -32])
def test_an_empty_run_is_refused(length: int):
    runs = equal_runs(10, 32)
    runs.length[3] = length
    with pytest.raises(ValueError, match="run 3 of 10"):
        survey(runs, 320, 320)
    runs.length[:] = length
    with pytest.raises(ValueError, match="run 0 of 10"):
        survey(runs, 320, 320)


def test_equal_runs_longer_than_the_region_are_refused():
    with pytest.raises(ValueError, match="run 0 of 1"):
        survey(equal_runs(1, 64), 32, 64)


def test_two_threads_see_what_one_sees():
    runs = equal_runs(100, 64)
    with ThreadPoolExecutor(1) as second:
        assert survey(runs, 6400, 6400, second) == survey(runs, 6400, 6400)
        with pytest.raises(ValueError, match=r"run 0 of 100 leaves the destination"):
            survey(runs, 6400, 6399, second)
        with pytest.raises(ValueError, match=r"leaves the source"):
            survey(runs, 6399, 6399, second)


def test_what_is_known_of_a_list_is_what_its_runs_show():
    plain = equal_runs(100, 48)
    known = Runs(plain.source, plain.destination, plain.length, extent=Extent(4800, 4800, 48))
    assert survey(known, 4800, 4800) == survey(plain, 4800, 4800)
    with pytest.raises(ValueError, match="run 99 of 100 leaves the source region"):
        survey(known, 4799, 4800)
    with pytest.raises(ValueError, match="run 0 of 100 leaves the destination region"):
        survey(known, 4800, 4799)
    with pytest.raises(ValueError, match="without runs"):
        survey(Runs(*(plain.source[:0],) * 3, extent=Extent(0, 0, 16)), 10, 10)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="not one list"):
        survey(Runs(np.zeros(2, np.int64), np.zeros(3, np.int64), np.ones(2, np.int64)), 10, 10)


def test_the_crossover_is_where_both_ways_cost_the_same():
    length = NVLINK.crossover()
    assert NVLINK.engine(1000, int(1000 * length)) - NVLINK.engine_start == pytest.approx(1000 * NVLINK.engine_run)
    assert length * NVLINK.kernel_byte == pytest.approx(NVLINK.engine_run)
    assert CopyCosts(0, 1e-12, 0, 1e-6, 2e-12).crossover() == math.inf


def test_small_pages_go_by_the_kernel_and_blocks_by_the_engine():
    pages = equal_runs(4096, 32768)
    division = divide(pages, survey(pages, 1 << 27, 1 << 27), NVLINK)
    assert division.kernel is None
    assert division.engine is not None
    assert len(division.engine) == 0
    block = equal_runs(1, 1 << 30)
    division = divide(block, survey(block, 1 << 30, 1 << 30), NVLINK)
    assert division.engine is None


def test_a_single_small_run_goes_by_the_engine_which_starts_sooner():
    run = equal_runs(1, 4096)
    assert divide(run, survey(run, 4096, 4096), NVLINK).engine is None


def test_a_mixed_batch_is_divided_at_the_crossover():
    lengths = [64 << 20] * 8 + [8192] * 4000
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).tolist()
    runs = runs_of(starts, starts, lengths)
    size = sum(lengths)
    division = divide(runs, survey(runs, size, size), NVLINK)
    assert division.engine is not None
    assert division.kernel is not None
    assert division.engine.tolist() == list(range(8))
    assert division.kernel.tolist() == list(range(8, 4008))


def test_an_engine_that_is_preferred_may_be_slower():
    pages = equal_runs(640, 184 << 10)
    seen = survey(pages, 1 << 30, 1 << 30)
    assert divide(pages, seen, NVLINK).kernel is None
    assert divide(pages, seen, NVLINK, preference=1.2).engine is None
    assert NVLINK.crossover(1.2) < 184 << 10 < NVLINK.crossover()


def test_every_run_goes_exactly_one_way():
    random = np.random.default_rng(5)
    for _ in range(50):
        lengths = 16 * random.integers(1, 1 << int(random.integers(1, 20)), size=int(random.integers(1, 300)))
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
        runs = Runs(starts, starts, lengths.astype(np.int64))
        costs = CopyCosts(*(random.random(5) * [1e-4, 4e-12, 1e-4, 1e-5, 4e-12]))
        size = int(lengths.sum())
        kernel, engine = divide(runs, survey(runs, size, size), costs)
        everything = np.arange(len(lengths))
        kernel = everything if kernel is None else kernel
        engine = everything if engine is None else engine
        assert sorted([*kernel.tolist(), *engine.tolist()]) == everything.tolist()


def test_measured_times_give_back_the_costs():
    sizes = Sizes(small=4096, many=256, large=128 << 20, few=8)
    times = (
        NVLINK.kernel(sizes.small),
        NVLINK.kernel(sizes.large),
        NVLINK.engine(1, sizes.small),
        NVLINK.engine(sizes.many, sizes.many * sizes.small),
        NVLINK.engine(sizes.few, sizes.large),
    )
    costs = costs_from_times(*times, sizes=sizes)
    for name in ("kernel_start", "kernel_byte", "engine_start", "engine_run", "engine_byte"):
        assert getattr(costs, name) == pytest.approx(getattr(NVLINK, name)), name


def test_noise_makes_no_cost_negative():
    costs = costs_from_times(5e-5, 4e-5, 9e-5, 1e-5, 3e-5, sizes=Sizes(4096, 64, 1 << 20, 4))
    assert min(costs.kernel_start, costs.kernel_byte, costs.engine_start, costs.engine_run, costs.engine_byte) >= 0


def test_long_runs_are_cut_without_loss():
    runs = runs_of([0, 1 << 20, 5], [1 << 21, 0, 7], [3 * PIECE_BYTES, 10, PIECE_BYTES + 1])
    pieces = cut_long_runs(runs)
    assert pieces.length.max() == PIECE_BYTES
    moved = {(int(s + i), int(d + i)) for s, d, n in zip(*_columns(pieces), strict=True) for i in range(0, n, 1)}
    wanted = {(int(s + i), int(d + i)) for s, d, n in zip(*_columns(runs), strict=True) for i in range(0, n, 1)}
    assert moved == wanted
    assert pieces.total == runs.total


def _columns(runs: Runs) -> tuple[list[int], list[int], list[int]]:
    return runs.source.tolist(), runs.destination.tolist(), runs.length.tolist()
