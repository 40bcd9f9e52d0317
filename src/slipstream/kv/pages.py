"""One account for all KV pages of a worker.

A page is taken by a sequence (running) or promised to a peer that will write into it (reserved). What a peer has
written and handed over is landed, until its sequence first computes; then it is running too. A page may have several
holders, who share a prefix. When the last one drops it, it is cached if the prefix index has a name for it, otherwise
free. Cached pages are given up, least recently used first, when free ones run out.

What is reserved for one transfer changes its state as one: a commit of any length is one step here.

Page 0 is the scratch page that padded rows write to; it is never given out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.kv.prefix import PrefixIndex


class PageState(enum.IntEnum):
    FREE = 0
    CACHED = 1
    RUNNING = 2
    LANDED = 3
    RESERVED = 4


class Reservation:
    """`pages` that were promised to a peer, and the state of those that are not given up since."""

    __slots__ = ("pages", "state")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.state = PageState.RESERVED

    def land(self) -> None:
        """The peer has written and handed over."""
        assert self.state is PageState.RESERVED, f"reserved pages landed while {self.state.name}"
        self.state = PageState.LANDED

    def run(self) -> None:
        """The sequence that they were reserved for computes."""
        self.state = PageState.RUNNING


@dataclass(frozen=True, slots=True)
class PageAudit:
    """Where every page is. `total` does not count the scratch page; `problems` is empty when the account is sound."""

    total: int
    free: int
    cached: int
    running: int
    landed: int
    reserved: int
    problems: list[str] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """Whether every page is free or cached, as it must be when no request is here."""
        return not self.problems and self.free + self.cached == self.total


class PageAccount:
    """Holders and state of `pages` pages, of which `pages - 1` can be held.

    `take` never fails halfway: the caller compares with `available` first; taking more is a programming error.
    `releases` counts the pages that became available again, so that a caller can see whether asking again is useful.
    """

    def __init__(self, pages: int, index: PrefixIndex) -> None:
        if pages < 2:
            raise ValueError(f"{pages} pages given, at least 2 are needed: the scratch page and one to use")
        self.index = index
        self.total = pages - 1
        self.releases = 0
        self._free = list(range(pages - 1, 0, -1))
        self._holders = [0] * pages
        self._state: list[PageState | Reservation] = [PageState.FREE] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self.index.evictable

    @property
    def available(self) -> int:
        """Pages that `take` can give: free ones, and cached ones that nobody holds."""
        return len(self._free) + self.index.evictable

    def take(self, count: int) -> list[int]:
        """`count` pages with one holder each, the caller. Gives up cached pages where free ones do not suffice."""
        return self._take(count, PageState.RUNNING)

    def reserve(self, count: int) -> Reservation:
        """As `take`, for a peer that will write into them."""
        reservation = Reservation()
        reservation.pages = self._take(count, reservation)
        return reservation

    def _take(self, count: int, state: PageState | Reservation) -> list[int]:
        assert count <= self.available, f"{count} pages taken, {self.available} available"
        if len(self._free) < count:
            self._free += self.index.evict(count - len(self._free))
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        holders, states = self._holders, self._state
        for page in pages:
            assert not holders[page], f"page {page} was free and held"
            holders[page] = 1
            states[page] = state
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for pages that are cached or held already."""
        for page in pages:
            if self._holders[page] == 0:
                assert self._state[page] is PageState.CACHED, f"page {page} held while {self.state(page).name}"
                self.index.revive(page)
                self._state[page] = PageState.RUNNING
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One holder less, from the last page of a chain to its first."""
        holders, state, free, named = self._holders, self._state, self._free, self.index.named
        released, cached, nobodys, idle = 0, PageState.CACHED, PageState.FREE, self.index.retire
        for page in reversed(pages):
            left = holders[page] - 1
            assert left >= 0, f"page {page} dropped by nobody who held it"
            holders[page] = left
            if left:
                continue
            released += 1
            if page in named:
                state[page] = cached
                idle(page)
            else:
                state[page] = nobodys
                free.append(page)
        self.releases += released

    def state(self, page: int) -> PageState:
        state = self._state[page]
        return state.state if isinstance(state, Reservation) else state

    def idle_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody holds: holding them makes as many pages unavailable."""
        return sum(self._holders[page] == 0 for page in pages)

    def audit(self, holders: Iterable[tuple[str, Sequence[int]]]) -> PageAudit:
        """Compares the account with what the holders say they hold: (who, pages) of each."""
        expected = [0] * len(self._holders)
        problems: list[str] = []
        for who, pages in holders:
            if len(set(pages)) != len(pages):
                problems.append(f"{who} holds a page twice: {sorted(pages)}")
            for page in pages:
                if not 0 < page < len(expected):
                    problems.append(f"{who} holds page {page}, which cannot be held")
                else:
                    expected[page] += 1
        problems += self._compare(expected)
        counts = [0] * len(PageState)
        for page in range(1, len(self._state)):
            counts[self.state(page)] += 1
        free, cached, running, landed, reserved = counts
        return PageAudit(self.total, free, cached, running, landed, reserved, problems)

    def _compare(self, expected: list[int]) -> list[str]:
        problems: list[str] = []
        free, idle = set(self._free), set(self.index.idle_pages())
        if len(free) != len(self._free):
            problems.append("a page is twice in the free list")
        for page in range(1, len(expected)):
            holders, state = self._holders[page], self.state(page)
            if holders != expected[page]:
                problems.append(f"page {page} ({state.name}) counts {holders} holders, {expected[page]} hold it")
            should = PageState.FREE if page in free else PageState.CACHED if page in idle else None
            if should is not None and (holders or page in free & idle):
                problems.append(f"page {page} is given away and has {holders} holders")
            if (should is None) != (state not in (PageState.FREE, PageState.CACHED)) or should not in (None, state):
                problems.append(
                    f"page {page} is {state.name} but lies in the list of {should.name if should else 'none'}"
                )
            if should is None and not holders:
                problems.append(f"page {page} is {state.name} and lost: nobody holds it and no list has it")
        return problems
