"""Page lists to runs, against a reference that moves one element at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.kv.layout import KVLayout
from slipstream.transfer.copies import (
    HeadRange,
    PageLists,
    check_bounds,
    head_moves,
    head_range,
    merged,
    page_runs,
    split,
)
from slipstream.transfer.transports.base import Runs

WHOLE = KVLayout(page_tokens=2, layers=1, kv_heads=8, head_dim=2, dtype="float16", total_kv_heads=8)


def layout_of(heads: HeadRange, total: int) -> KVLayout:
    return msgspec.structs.replace(WHOLE, kv_heads=heads.size, first_head=heads.first, total_kv_heads=total)


def runs_of(*runs: tuple[int, int, int]) -> Runs:
    columns = np.array(runs, np.int64).reshape(-1, 3)
    return Runs(columns[:, 0], columns[:, 1], columns[:, 2])


def triples(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True))


def carry_out(runs: Runs, source: np.ndarray, destination: np.ndarray) -> None:
    for origin, to, length in triples(runs):
        destination[to : to + length] = source[origin : origin + length]


def pool(heads: HeadRange, pages: int, head_bytes: int, rng: np.random.Generator | None) -> np.ndarray:
    """[pages, heads, head_bytes]; zeros without a generator."""
    shape = (pages, heads.size, head_bytes)
    return np.zeros(shape, np.uint8) if rng is None else rng.integers(1, 256, shape, dtype=np.uint8)


def test_ten_thousand_random_page_lists_arrive_as_the_reference_says() -> None:
    rng = np.random.default_rng(7)
    layout = layout_of(HeadRange(0, 1), 1)
    size = layout.page_bytes
    for _ in range(10_000):
        pages = int(rng.integers(1, 24))
        count = int(rng.integers(0, pages + 1))
        origin = rng.integers(0, pages, count)  # one source page may go to several places
        to = rng.permutation(pages)[:count]
        if rng.random() < 0.3:
            origin, to = np.sort(origin), np.sort(to)
        source = rng.integers(1, 256, (pages, size), dtype=np.uint8)
        found, expected = np.zeros((pages, size), np.uint8), np.zeros((pages, size), np.uint8)
        carry_out(page_runs(layout, layout, HeadRange(0, 1), origin, to), source.reshape(-1), found.reshape(-1))
        for a, b in zip(origin.tolist(), to.tolist(), strict=True):
            expected[b] = source[a]
        assert np.array_equal(found, expected)


TP = [(total, s, d) for total in (1, 2, 4, 8) for s in (1, 2, 4, 8) for d in (1, 2, 4, 8)]


@pytest.mark.parametrize(("total", "source_ranks", "destination_ranks"), TP)
def test_unequal_tensor_parallel_ranks_together_receive_every_head_once(
    total: int, source_ranks: int, destination_ranks: int
) -> None:
    rng = np.random.default_rng(total * 100 + source_ranks * 10 + destination_ranks)
    sources = [head_range(total, source_ranks, rank) for rank in range(source_ranks)]
    destinations = [head_range(total, destination_ranks, rank) for rank in range(destination_ranks)]
    head_bytes = WHOLE.head_bytes
    for _ in range(160):  # 10,240 lists in all
        pages = int(rng.integers(2, 12))
        count = int(rng.integers(1, pages + 1))
        origin, to = rng.permutation(pages)[:count], rng.permutation(pages)[:count]
        model = rng.integers(1, 256, (pages, total, head_bytes), dtype=np.uint8)
        held = [np.ascontiguousarray(model[:, heads.first : heads.end]) for heads in sources]
        found = [pool(heads, pages, head_bytes, None) for heads in destinations]
        written = [np.zeros_like(area, np.int32) for area in found]
        for move in head_moves(sources, destinations):
            runs = page_runs(
                layout_of(sources[move.source_rank], total),
                layout_of(destinations[move.destination_rank], total),
                move.heads,
                origin,
                to,
            )
            check_bounds(runs, held[move.source_rank].size, found[move.destination_rank].size)
            carry_out(runs, held[move.source_rank].reshape(-1), found[move.destination_rank].reshape(-1))
            for _, at, length in triples(runs):
                written[move.destination_rank].reshape(-1)[at : at + length] += 1
        for heads, area, times in zip(destinations, found, written, strict=True):
            expected = np.zeros_like(area)
            for a, b in zip(origin.tolist(), to.tolist(), strict=True):
                expected[b] = model[a, heads.first : heads.end]
                assert (times[b] == 1).all()
            assert np.array_equal(area, expected)


def test_replicas_of_a_head_share_the_sending() -> None:
    moves = head_moves([HeadRange(0, 1)] * 4, [HeadRange(0, 1)] * 8)
    assert [move.source_rank for move in moves] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [move.destination_rank for move in moves] == list(range(8))


def test_equal_ranks_exchange_their_whole_range_in_one_move() -> None:
    ranks = [head_range(8, 4, rank) for rank in range(4)]
    assert [(m.source_rank, m.destination_rank, m.heads) for m in head_moves(ranks, ranks)] == [
        (rank, rank, HeadRange(2 * rank, 2)) for rank in range(4)
    ]


def test_a_head_that_no_source_rank_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="no source rank holds KV head 1, which destination rank 0 needs"):
        head_moves([HeadRange(0, 1)], [HeadRange(0, 2)])


@pytest.mark.parametrize(("total", "ranks"), [(3, 2), (2, 3), (6, 4)])
def test_heads_that_ranks_cannot_share_evenly_are_refused(total: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="one must divide the other"):
        head_range(total, ranks, 0)


def test_pages_that_are_neighbours_on_both_sides_become_one_run() -> None:
    layout = layout_of(HeadRange(0, 8), 8)
    size = layout.page_bytes
    runs = page_runs(layout, layout, HeadRange(0, 8), [3, 4, 5, 9, 1], [10, 11, 12, 13, 20])
    assert triples(runs) == [(3 * size, 10 * size, 3 * size), (9 * size, 13 * size, size), (size, 20 * size, size)]


def test_neighbours_named_in_another_order_still_become_one_run() -> None:
    layout = layout_of(HeadRange(0, 8), 8)
    size = layout.page_bytes
    assert triples(page_runs(layout, layout, HeadRange(0, 8), [5, 3, 4], [12, 10, 11])) == [
        (3 * size, 10 * size, 3 * size)
    ]


def test_a_part_of_the_heads_never_merges_over_the_gap_between_pages() -> None:
    part = page_runs(WHOLE, layout_of(HeadRange(2, 3), 8), HeadRange(2, 3), [0, 1], [0, 1])
    head = WHOLE.head_bytes
    assert triples(part) == [(2 * head, 0, 3 * head), (10 * head, 3 * head, 3 * head)]


@pytest.mark.parametrize("count", [1, 2, 100, 256, 257, 3000])
@pytest.mark.parametrize("heads", [HeadRange(0, 8), HeadRange(2, 3)])
def test_long_and_short_lists_become_the_same_runs(count: int, heads: HeadRange) -> None:
    random = np.random.default_rng(count)
    pages = [random.permutation(4 * count)[:count] for _ in range(2)]
    runs = page_runs(WHOLE, WHOLE, heads, pages[0].tolist(), pages[1])
    found = {(int(s), int(d), int(n)) for s, d, n in zip(runs.source, runs.destination, runs.length, strict=True)}
    start, size, page = heads.first * WHOLE.head_bytes, heads.size * WHOLE.head_bytes, WHOLE.page_bytes
    wanted = {
        (s * page + start, d * page + start, size) for s, d in zip(*(side.tolist() for side in pages), strict=True)
    }
    assert found == wanted
    assert runs.total == count * size
    assert runs.extent is not None
    assert runs.extent[:2] == (max(s for s, _, _ in wanted) + size, max(d for _, d, _ in wanted) + size)
    assert not any(number % runs.extent.unit for run in wanted for number in run)


@pytest.mark.parametrize("count", [40, 1000])
def test_neighbours_are_merged_where_there_are_some(count: int) -> None:
    pages = np.arange(count)
    size = WHOLE.page_bytes
    assert triples(page_runs(WHOLE, WHOLE, HeadRange(0, 8), pages, pages + 5)) == [(0, 5 * size, count * size)]
    apart = 2 * pages
    apart[1] = 1  # one pair in so many: runs of one length are worth more
    runs = page_runs(WHOLE, WHOLE, HeadRange(0, 8), apart, apart)
    assert set(runs.length.tolist()) == {size}
    with pytest.raises(ValueError, match="destination page 6 is named twice"):
        page_runs(WHOLE, WHOLE, HeadRange(0, 8), pages, np.where(pages == 4, 6, pages * 2))
    with pytest.raises(ValueError, match=r"must not be negative: -7"):
        page_runs(WHOLE, WHOLE, HeadRange(0, 8), np.where(pages == 3, -7, pages), pages)
    with pytest.raises(ValueError, match=rf"source page {count - 1} does not exist; the pool has {count - 1} pages"):
        PageLists(pages, pages, (count - 1, count))
    with pytest.raises(ValueError, match=rf"destination page {count - 1} does not exist"):
        PageLists(pages, pages, (count, count - 1))


def test_a_destination_page_named_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="destination page 4 is named twice"):
        page_runs(WHOLE, WHOLE, HeadRange(0, 8), [1, 2, 3], [4, 5, 4])


@pytest.mark.parametrize(("origin", "to"), [([-1], [0]), ([0], [-2])])
def test_negative_pages_are_an_error(origin: list[int], to: list[int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        page_runs(WHOLE, WHOLE, HeadRange(0, 8), origin, to)


def test_lists_of_unequal_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 source pages cannot be copied to 1"):
        page_runs(WHOLE, WHOLE, HeadRange(0, 8), [1, 2], [4])


def test_heads_that_a_rank_does_not_hold_are_an_error() -> None:
    with pytest.raises(ValueError, match="the destination rank holds KV heads 2 to 3, not 2 to 4"):
        page_runs(WHOLE, layout_of(HeadRange(2, 2), 8), HeadRange(2, 3), [0], [0])


def test_merging_leaves_the_bytes_that_are_moved_unchanged() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        count = int(rng.integers(1, 12))
        length = rng.integers(1, 5, count)
        source = np.cumsum(length) - length + np.cumsum(rng.integers(0, 2, count) * 3)
        destination = np.cumsum(length) - length + np.cumsum(rng.integers(0, 2, count) * 2)
        runs = Runs(source, destination, length)
        data = rng.integers(0, 256, 200, dtype=np.uint8)
        found, expected = np.zeros(200, np.uint8), np.zeros(200, np.uint8)
        carry_out(merged(runs), data, found)
        carry_out(runs, data, expected)
        assert np.array_equal(found, expected)


def test_split_pieces_are_bounded_and_move_the_same_bytes() -> None:
    rng = np.random.default_rng(11)
    for _ in range(500):
        count = int(rng.integers(1, 20))
        length = rng.integers(1, 50, count)
        source = (np.cumsum(length) - length)[::-1].copy() if rng.random() < 0.5 else rng.integers(0, 900, count)
        destination = np.cumsum(length) - length
        runs = Runs(source.astype(np.int64), destination.astype(np.int64), length.astype(np.int64))
        piece_bytes, piece_runs = int(rng.integers(1, 80)), int(rng.integers(1, 6))
        data = rng.integers(1, 256, 1000, dtype=np.uint8)
        found, expected = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
        pieces = list(split(runs, piece_bytes, piece_runs))
        for piece in pieces:
            assert piece.total <= piece_bytes
            assert 1 <= len(piece.length) <= piece_runs
            assert (piece.length > 0).all()
            carry_out(piece, data, found)
        assert sum(piece.total for piece in pieces) == runs.total
        carry_out(runs, data, expected)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("run", [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 101), (100, 0, 1), (0, 2**62, 2**62)])
def test_a_run_that_leaves_a_region_is_an_error(run: tuple[int, int, int]) -> None:
    check_bounds(runs_of((0, 0, 100)), 100, 100)
    with pytest.raises(ValueError, match="leaves the"):
        check_bounds(runs_of((0, 0, 100), run), 100, 100)


def test_a_copy_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        check_bounds(runs_of(), 100, 100)


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize("side", [0, 1])
def test_page_numbers_that_are_no_integers_are_refused_and_not_cut_off(count: int, side: int) -> None:
    lists: list[Any] = [list(range(count)), list(range(count))]
    lists[side][1] = 1.5
    with pytest.raises(ValueError, match="must be integers"):
        PageLists(*lists)
