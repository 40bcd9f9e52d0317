"""Turns page lists into byte runs, for ranks that hold the same or different heads.

A handoff names pages; a transport moves runs of bytes. Between them stands the head range of either rank: a page is
ordered by head first (`kv.layout`), so what two ranks share of a page is one contiguous run. `head_moves` says, once
for each pair of workers, which source rank sends which heads to which destination rank; `page_runs` makes the runs of
one copy, merging neighbours; `split` cuts runs into pieces of bounded size for transports that move pieces.

Pure: numpy and arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.kv.layout import HeadRange as HeadRange
from slipstream.kv.layout import KVLayout
from slipstream.kv.layout import head_range as head_range
from slipstream.transfer.transports.base import Runs


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


def page_runs(
    source: KVLayout,
    destination: KVLayout,
    heads: HeadRange,
    source_pages: ArrayLike,
    destination_pages: ArrayLike,
) -> Runs:
    """The runs that copy `heads` of `source_pages[i]` to `destination_pages[i]`, neighbours merged.

    Offsets count from the start of either pool. Raises ValueError when the lists differ in length, name a negative
    page or one destination page twice, or when a rank does not hold the heads.
    """
    for side, layout in (("source", source), ("destination", destination)):
        if heads.first < layout.first_head or heads.end > layout.first_head + layout.kv_heads or heads.size < 1:
            raise ValueError(
                f"the {side} rank holds KV heads {layout.first_head} to {layout.first_head + layout.kv_heads - 1}, "
                f"not {heads.first} to {heads.end - 1}"
            )
    if source.head_bytes != destination.head_bytes:
        raise ValueError(f"a head of a page has {source.head_bytes} bytes here and {destination.head_bytes} there")
    from_pages, to_pages = _page_lists(source_pages, destination_pages)
    offsets_from = from_pages * source.page_bytes + (heads.first - source.first_head) * source.head_bytes
    offsets_to = to_pages * destination.page_bytes + (heads.first - destination.first_head) * destination.head_bytes
    length = heads.size * source.head_bytes
    return merged(Runs(offsets_from, offsets_to, np.full(len(from_pages), length, np.int64)))


def _page_lists(source_pages: ArrayLike, destination_pages: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Both lists, ordered by destination page, checked."""
    sources = np.asarray(source_pages, np.int64).reshape(-1)
    destinations = np.asarray(destination_pages, np.int64).reshape(-1)
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} source pages cannot be copied to {len(destinations)} destination pages")
    if len(sources) == 0:
        return sources, destinations
    order = np.argsort(destinations, kind="stable")
    sources, destinations = sources[order], destinations[order]
    if destinations[0] < 0 or sources.min() < 0:
        raise ValueError(f"page numbers must not be negative: {min(int(destinations[0]), int(sources.min()))}")
    twice = np.flatnonzero(destinations[1:] == destinations[:-1])
    if len(twice):
        raise ValueError(f"destination page {int(destinations[twice[0]])} is named twice")
    return sources, destinations


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
