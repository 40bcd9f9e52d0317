"""Turns page lists into byte runs, for ranks that hold the same or different heads.

A handoff names pages; a transport moves runs of bytes. Between them stands the head range of either rank: a page is
ordered by head first (`kv.layout`), so what two ranks share of a page is one contiguous run. `head_moves` says, once
for each pair of workers, which source rank sends which heads to which destination rank; a `PageMap`, made once a route,
turns the checked `PageLists` of a copy into its runs, merging neighbours where it pays; `split` cuts runs into pieces
of bounded size for transports that move pieces.

Pure: numpy and arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.kv.layout import HeadRange as HeadRange
from slipstream.kv.layout import KVLayout
from slipstream.kv.layout import head_range as head_range
from slipstream.transfer.transports.base import Extent, Runs, repeated

_SHORT = 256  # pages
_NONE = -(1 << 62)  # no page number
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
        self._pages = source.page_bytes, destination.page_bytes
        first, second = ((heads.first - layout.first_head) * source.head_bytes for layout in (source, destination))
        self._starts = first, second
        self._unit = math.gcd(self._length, *self._pages, *self._starts)
        self._whole = source.page_bytes == destination.page_bytes == self._length  # else no two runs are neighbours

    def runs(self, pages: PageLists) -> Runs:
        """Of these pages, neighbours merged where there are some. Offsets count from the start of either pool."""
        (source_page, destination_page), (source_start, destination_start) = self._pages, self._starts
        sources, destinations, count = pages.sources, pages.destinations, len(pages.sources)
        length = repeated(self._length, count)
        if self._whole and len(pages.joined) * _HARDLY >= max(count, 1):
            starts = np.delete(np.arange(count), pages.joined)
            sources, destinations = np.asarray(sources)[starts], np.asarray(destinations)[starts]
            length = np.diff(starts, append=count) * self._length
        last, final = pages.highest
        extent = Extent(
            last * source_page + source_start + self._length,
            final * destination_page + destination_start + self._length,
            self._unit,
        )
        return Runs(
            _offsets(sources, source_page, source_start),
            _offsets(destinations, destination_page, destination_start),
            length,
            extent=extent,
        )


Numbers = list[int] | NDArray[np.int64]


def _offsets(pages: Numbers, page_bytes: int, start: int) -> NDArray[np.int64]:
    if isinstance(pages, list):
        return np.array([page * page_bytes + start for page in pages], np.int64)
    return pages * page_bytes + start


class PageLists:
    """Source and destination pages of a copy, ordered by destination page, checked.

    `highest` are the highest numbers of either, -1 where there are no pages. `joined` are the places of pages that
    follow those before them on both sides.

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
        self.sources: Numbers
        self.destinations: Numbers
        self.joined: Numbers
        if count <= _SHORT:
            lowest = self._sort(source_pages, destination_pages)
        else:
            lowest = self._sort_many(source_pages, destination_pages)
        if lowest < 0:
            raise ValueError(f"page numbers must not be negative: {lowest}")
        if have is not None:
            for side, highest, pages in zip(("source", "destination"), self.highest, have, strict=True):
                if highest >= pages:
                    raise ValueError(f"{side} page {highest} does not exist; the pool has {pages} pages")

    def _sort(self, source_pages: Iterable[Any], destination_pages: Iterable[Any]) -> int:
        """Returns the lowest number. By the interpreter: numpy's functions, each called once in a while, are not in
        the cache when a handoff comes."""
        try:
            pairs = sorted(zip(map(index, destination_pages), map(index, source_pages), strict=True))
        except TypeError as error:
            raise ValueError(f"page numbers must be integers: {error}") from error
        self.destinations, self.sources = [to for to, _ in pairs], [origin for _, origin in pairs]
        self.joined = []
        last = before = _NONE
        for place, (to, origin) in enumerate(pairs):
            if to == last + 1 and origin == before + 1:
                self.joined.append(place)
            elif to == last:
                raise _twice(to)
            last, before = to, origin
        self.highest = max(self.sources, default=-1), last if pairs else -1
        return min(*self.sources, self.destinations[0]) if pairs else 0

    def _sort_many(self, source_pages: Any, destination_pages: Any) -> int:
        sources, destinations = np.asarray(source_pages), np.asarray(destination_pages)
        for pages in (sources, destinations):
            if pages.dtype.kind not in "iu":
                raise ValueError(f"page numbers must be integers, not {pages.dtype}")
        order = destinations.argsort()
        sources, destinations = (
            sources.astype(np.int64, copy=False)[order],
            destinations.astype(np.int64, copy=False)[order],
        )
        steps = destinations[1:] - destinations[:-1]
        if np.count_nonzero(steps) != len(steps):
            raise _twice(int(destinations[np.flatnonzero(steps == 0)[0]]))
        self.sources, self.destinations = sources, destinations
        self.joined = np.flatnonzero((steps == 1) & (sources[1:] - sources[:-1] == 1)) + 1
        self.highest = int(sources.max()), int(destinations[-1])
        return min(int(sources.min()), int(destinations[0]))


def _twice(page: int) -> ValueError:
    return ValueError(f"destination page {page} is named twice")


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
