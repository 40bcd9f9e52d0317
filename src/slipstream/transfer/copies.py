"""Turns page lists into byte runs, for ranks that hold the same or different heads.

A handoff names pages; a transport moves runs of bytes. Between them stands the head range of either rank: a page is
ordered by head first (`kv.layout`), so what two ranks share of a page is one contiguous run. `head_moves` says, once
for each pair of workers, which source rank sends which heads to which destination rank; a `PageMap`, made once a route,
turns the checked `PageLists` of one copy into its runs, merging neighbours where it pays; `split` cuts runs into pieces of bounded
size for transports that move pieces.

Pure: numpy and arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.kv.layout import HeadRange as HeadRange
from slipstream.kv.layout import KVLayout
from slipstream.kv.layout import head_range as head_range
from slipstream.transfer.transports.base import Runs, repeated


_MOST = 1 << 62  # no page number
_HARDLY = 16  # neighbours are merged when one page in so many has one


class HeadMove(NamedTuple):
    """One source rank sends `heads` to one destination rank."""

    source_rank: int
    destination_rank: int
    heads: HeadRange


def head_moves(sources: Sequence[HeadRange], destinations: Sequence[HeadRange]) -> tuple[HeadMove, ...]:
    """Which source rank sends which heads to which destination rank.

    Every destination rank gets each of its heads exactly once. Where several source ranks hold a head, the one that
    sends it is designated by the destination rank's number, so that replicas share the work; neighbouring heads of
    one pair of ranks are one move. Raises ValueError when no source rank holds a head that is needed.
    """
    moves: list[HeadMove] = []
    for destination_rank, wanted in enumerate(destinations):
        for head in range(wanted.first, wanted.end):
            holders = [rank for rank, held in enumerate(sources) if held.first <= head < held.end]
            if not holders:
                raise ValueError(
                    f"no source rank holds KV head {head}, which destination rank {destination_rank} needs"
                )
            source_rank = holders[destination_rank % len(holders)]
            last = moves[-1] if moves else None
            if (
                last is not None
                and (last.source_rank, last.destination_rank) == (source_rank, destination_rank)
                and last.heads.end == head
            ):
                moves[-1] = last._replace(heads=HeadRange(last.heads.first, last.heads.size + 1))
            else:
                moves.append(HeadMove(source_rank, destination_rank, HeadRange(head, 1)))
    return tuple(moves)


class PageMap:
    """Where `heads` of a page lie in the pools of two ranks: what is known of a copy before its pages are. Made once a
    route.

    Raises ValueError when a rank does not hold the heads, or a head has another size there.
    """

    def __init__(self, source: KVLayout, destination: KVLayout, heads: HeadRange) -> None:
        for side, layout in (("source", source), ("destination", destination)):
            if heads.first < layout.first_head or heads.end > layout.first_head + layout.kv_heads or heads.size < 1:
                raise ValueError(
                    f"the {side} rank holds KV heads {layout.first_head} to {layout.first_head + layout.kv_heads - 1}, "
                    f"not {heads.first} to {heads.end - 1}"
                )
        if source.head_bytes != destination.head_bytes:
            raise ValueError(f"a head of a page has {source.head_bytes} bytes here and {destination.head_bytes} there")
        self._length = heads.size * source.head_bytes
        self._steps = np.array([[source.page_bytes], [destination.page_bytes]], np.int64)
        starts = [(heads.first - layout.first_head) * source.head_bytes for layout in (source, destination)]
        self._starts = np.array([[start] for start in starts], np.int64)
        self._whole = source.page_bytes == destination.page_bytes == self._length  # else no two runs are neighbours

    def runs(self, pages: PageLists) -> Runs:
        """Of these pages, neighbours merged where there are some. Offsets count from the start of either pool."""
        rows, count = pages.rows, pages.rows.shape[1]
        joined = pages.joined() if self._whole and count > 1 else None
        if joined is None:
            offsets = rows * self._steps
            if not self._whole:
                offsets += self._starts
            return Runs(offsets[0], offsets[1], repeated(self._length, count))
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        offsets = rows[:, starts] * self._steps
        return Runs(offsets[0], offsets[1], np.diff(starts, append=count) * self._length)


class PageLists:
    """Source and destination pages of a copy, ordered by destination page, checked.

    Raises ValueError when the lists differ in length, name a negative page or one destination page twice, or name a
    page that is not among the first `have` of their pool, where these are given: (source, destination).
    """

    def __init__(
        self,
        source_pages: Sequence[int] | NDArray[np.integer[Any]],
        destination_pages: Sequence[int] | NDArray[np.integer[Any]],
        have: tuple[int, int] | None = None,
    ) -> None:
        count = len(source_pages)
        if len(destination_pages) != count:
            raise ValueError(f"{count} source pages cannot be copied to {len(destination_pages)} destination pages")
        self.rows = np.empty((2, count), np.int64)
        self.rows[0], self.rows[1] = source_pages, destination_pages
        self._steps = self.rows[:, :0]  # from each page to the next
        if count > 1:
            self.rows = self.rows.take(self.rows[1].argsort(), axis=1)
            self._steps = self.rows[:, 1:] - self.rows[:, :-1]
        if count:
            self._check(have)

    def _check(self, have: tuple[int, int] | None) -> None:
        sources, destinations = self.rows
        highest = int(sources.view(np.uint64).max())  # a negative number is a very large one without its sign
        lowest, last = int(destinations[0]), int(destinations[-1])
        if highest > _MOST or lowest < 0:
            raise ValueError(f"page numbers must not be negative: {min(int(sources.min()), lowest)}")
        if have is not None and (highest >= have[0] or last >= have[1]):
            side, page, pages = ("source", highest, have[0]) if highest >= have[0] else ("destination", last, have[1])
            raise ValueError(f"{side} page {page} does not exist; the pool has {pages} pages")
        steps = self._steps[1]
        if np.count_nonzero(steps) != len(steps):
            raise ValueError(f"destination page {int(destinations[np.flatnonzero(steps == 0)[0]])} is named twice")

    def joined(self) -> NDArray[np.bool_] | None:
        """Which pages are followed by the next ones on both sides; None when hardly any are, since runs that are all
        alike are worth more than a few runs less."""
        follows = (self._steps == 1).all(axis=0)
        return follows if np.count_nonzero(follows) * _HARDLY >= self.rows.shape[1] else None


def page_runs(
    source: KVLayout,
    destination: KVLayout,
    heads: HeadRange,
    source_pages: Sequence[int] | NDArray[np.integer[Any]],
    destination_pages: Sequence[int] | NDArray[np.integer[Any]],
) -> Runs:
    """The runs that copy `heads` of `source_pages[i]` to `destination_pages[i]`, neighbours merged.

    Raises ValueError as PageMap and PageLists do.
    """
    return PageMap(source, destination, heads).runs(PageLists(source_pages, destination_pages))


def merged(runs: Runs) -> Runs:
    """Joins each run with the one behind it when they are neighbours on both sides."""
    if len(runs.length) < 2:
        return runs
    follows = (runs.source[1:] == runs.source[:-1] + runs.length[:-1]) & (
        runs.destination[1:] == runs.destination[:-1] + runs.length[:-1]
    )
    if not follows.any():
        return runs
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return Runs(runs.source[starts], runs.destination[starts], np.add.reduceat(runs.length, starts))


def check_bounds(runs: Runs, source_bytes: int, destination_bytes: int) -> None:
    """Raises ValueError when there are no runs, or one is empty or leaves either region."""
    if len(runs.length) == 0:
        raise ValueError("a copy needs at least one run")
    for side, offsets, size in (
        ("source", runs.source, source_bytes),
        ("destination", runs.destination, destination_bytes),
    ):
        bad = np.flatnonzero((offsets < 0) | (runs.length <= 0) | (runs.length > size - offsets))
        if len(bad):
            first = int(bad[0])
            raise ValueError(
                f"run {first} of {len(offsets)} leaves the {side} region: {int(runs.length[first])} bytes at "
                f"{int(offsets[first])}, the region has {size}"
            )


def split(runs: Runs, piece_bytes: int, piece_runs: int) -> Iterator[Runs]:
    """Cuts runs into pieces of at most `piece_bytes` bytes and `piece_runs` runs; longer runs are cut themselves."""
    if len(runs.length) == 0:
        return
    ends = np.cumsum(runs.length)
    total = int(ends[-1])
    if total <= piece_bytes and len(ends) <= piece_runs:
        yield runs
        return
    if int(runs.length.max()) <= piece_bytes:
        yield from _split_between(runs, ends, piece_bytes, piece_runs)
        return
    cuts = np.union1d(np.concatenate(([0], ends[:-1])), np.arange(0, total, piece_bytes, dtype=np.int64))
    owner = np.searchsorted(ends, cuts, side="right")
    inside = cuts - (ends[owner] - runs.length[owner])
    source, destination = runs.source[owner] + inside, runs.destination[owner] + inside
    length = np.diff(cuts, append=total)
    bounds = np.append(np.flatnonzero(np.diff(cuts // piece_bytes, prepend=-1)), len(cuts)).tolist()
    for start, end in itertools.pairwise(bounds):
        for first in range(start, end, piece_runs):
            piece = slice(first, min(first + piece_runs, end))
            yield Runs(source[piece], destination[piece], length[piece])


def _split_between(runs: Runs, ends: NDArray[np.int64], piece_bytes: int, piece_runs: int) -> Iterator[Runs]:
    """The same where no run is longer than a piece, so that none has to be cut. `ends`: bytes up to each run's end."""
    start, sent = 0, 0
    while start < len(ends):
        end = min(int(np.searchsorted(ends, sent + piece_bytes, side="right")), start + piece_runs)
        piece = slice(start, end)
        yield Runs(runs.source[piece], runs.destination[piece], runs.length[piece])
        start, sent = end, int(ends[end - 1])
