"""Decides what the next step computes, and who gets pages.

A step may be made while the one before is being computed: it goes on from where that one will end, with every sequence
that goes on whatever token it gets. What is not safe then is left for when that step is settled.

A step is made in this order: adopted sequences get free rows; decoding ones get a page where their next token needs
one; every decoding sequence contributes one token; what is left of `chunk_tokens` goes to prompts that have begun, then
to new ones. Where any sequence decodes, all of these wait for the step, and `mixed_chunk_tokens` takes the place of
`chunk_tokens`. Where decoding alone fills the budget, prompts still get up to one page of tokens, so that they move.

What is copied of a prompt behind the last step that computes it is what its decode worker waits for. So the end of a
long prompt that is handed over, `tail_tokens`, is a chunk of its own: the rest is copied while that is computed.

Pages of a prompt are taken all at once when its first chunk is scheduled, so that a sequence whose destination has
granted pages needs nothing more here: two workers that hand over to each other cannot wait for each other's memory.
Decoding sequences grow page by page. When there is no page left, the youngest sequence gives up its own (preemption by
recompute), never one whose pages are granted for or being copied; if nobody can, the growing one pauses, and whoever
holds the pages is by construction about to finish, or waits for the row of the growing one, which then gives way.

New work (waiting sequences, and offers of peers) is admitted in the order of priority and arrival while it leaves
head-room for the growth of what runs. A small claim may pass a large one that does not fit, but only PATIENCE times;
then nobody younger is admitted before it.
"""

from __future__ import annotations

import bisect
import enum
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import Protocol

import numpy as np

from slipstream.engine.observe import NoObserver, Observer
from slipstream.engine.plan import IntArray
from slipstream.engine.rows import RowTable
from slipstream.engine.sequence import Phase, Sequence
from slipstream.kv.pages import PageAccount

TAILS = 8  # chunks of at least so many tails have one
PATIENCE = 8  # how often a claim may be passed over for its size
LOOKAHEAD = 8  # how many claims of each kind may be refused before no more of it are considered

Key = tuple[int, int]


class Verdict(enum.Enum):
    TAKEN = "taken"
    NO_PAGES = "no pages"
    LATER = "later"  # something other than pages is missing


class Claim(Protocol):
    """Who wants pages: a waiting sequence or an offer."""

    key: Key
    passed_over: int


class Scheduler:
    """The sequences of one worker by phase, each list in the order of `Sequence.key`.

    `headroom_tokens` is how many tokens of growth are kept free for each sequence that decodes or will soon;
    `tail_tokens` the size of the last chunk of a long prompt that is handed over, 0 for no such chunk.
    `fits(cost, growth)` says whether new work may take `cost` pages now and will soon need `growth` more.
    `withdraw(sequence)` is called to cancel the ungranted offer of a sequence that is preempted, `give_up(sequence)` to
    fail one that has grown too large for this pool, which only one for a larger decode worker can.
    """

    def __init__(
        self,
        account: PageAccount,
        rows: RowTable,
        *,
        page_tokens: int,
        chunk_tokens: int,
        mixed_chunk_tokens: int,
        headroom_tokens: int,
        tail_tokens: int,
        prefix_cache: bool,
        fits: Callable[[int, int], bool],
        withdraw: Callable[[Sequence], None],
        give_up: Callable[[Sequence], None],
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer or NoObserver()
        self.account = account
        self.rows = rows
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.landed: list[Sequence] = []
        self.handing_off: list[Sequence] = []
        self.waiting_tokens = 0
        self.preemptions = 0
        self.arrivals = 0
        self._page_tokens = page_tokens
        self._chunk_tokens, self._mixed_chunk_tokens = chunk_tokens, mixed_chunk_tokens
        self._headroom_tokens = headroom_tokens
        self._tail_tokens = tail_tokens
        self._prefix_cache = prefix_cache
        self._fits = fits
        self._withdraw = withdraw
        self._give_up = give_up
        self._lists = {
            Phase.WAITING: self.waiting,
            Phase.PREFILL: self.prefilling,
            Phase.DECODE: self.decoding,
            Phase.LANDED: self.landed,
            Phase.HANDOFF: self.handing_off,
        }
        self._budget = 0
        self._chunks: list[tuple[Sequence, int]] = []
        self._decode_rows: IntArray | None = None  # rows of `decoding`, in order; None: to be read anew

    # ------------------------------------------------------------------------------------------------------- phases

    def next_arrival(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def enter(self, sequence: Sequence, phase: Phase) -> None:
        sequence.phase = phase
        bisect.insort(self._lists[phase], sequence, key=_key)
        if phase is Phase.DECODE:
            self._decode_rows = None
        elif phase is Phase.WAITING:
            self.waiting_tokens += len(sequence.tokens)

    def leave(self, sequence: Sequence) -> None:
        """Takes the sequence out of the list of its phase; the caller sets the next."""
        members = self._lists[sequence.phase]
        del members[bisect.bisect_left(members, sequence.key, key=_key)]
        if sequence.phase is Phase.DECODE:
            self._decode_rows = None
        elif sequence.phase is Phase.WAITING:
            self.waiting_tokens -= len(sequence.tokens)

    def shift(self, sequence: Sequence, phase: Phase) -> None:
        self.leave(sequence)
        self.enter(sequence, phase)

    @property
    def idle(self) -> bool:
        """Whether nothing here waits for a step."""
        return not (self.waiting or self.prefilling or self.decoding or self.landed)

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.landed)

    def limit_mixed(self, tokens: int) -> None:
        """Takes the place of `mixed_chunk_tokens`."""
        self._mixed_chunk_tokens = min(tokens, self._chunk_tokens)

    # ------------------------------------------------------------------------------------------------------- a step

    def begin(self, *, busy: bool) -> tuple[list[Sequence], IntArray] | None:
        """First half of a step: the sequences that decode, and their rows, which have pages for their next tokens.

        `busy` says that a step is under way. None: pages are short, and may have to be taken from what it computes;
        ask again when it is settled.
        """
        self._seat_landed()
        paused = self._grow(busy)
        if paused is None:
            return None
        decodes, rows = list(self.decoding), self._rows_of_decoding()
        if decodes and (busy or paused):  # else all their tokens are known
            able = self.rows.ready(rows)
            if paused:
                able &= ~np.isin(rows, list(paused))
            if not able.all():
                decodes, rows = [decodes[i] for i in np.flatnonzero(able)], rows[able]
        prompts = bool(self.prefilling or self.waiting)
        most = self._mixed_chunk_tokens if decodes else self._chunk_tokens
        self._budget = max(most - len(rows), min(most, self._page_tokens)) if prompts else 0
        self._chunks = []
        for sequence in self.prefilling:
            if self.spent:
                break
            self._add_chunk(sequence)
        return decodes, rows

    def take_chunks(self) -> list[tuple[Sequence, int]]:
        """Second half: (sequence, tokens) of all prompt chunks, those of newly admitted sequences included."""
        chunks, self._chunks = self._chunks, []
        return chunks

    @property
    def spent(self) -> bool:
        """Whether no token is left for a prompt to begin with."""
        return self._budget == 0

    def end_step(self) -> None:
        """No step is being made: nothing is begun until the next one is."""
        self._budget = 0

    def _add_chunk(self, sequence: Sequence) -> None:
        left = len(sequence.tokens) - sequence.planned
        count = min(self._budget, left)
        if count == left and sequence.destination is not None and count >= TAILS * self._tail_tokens:
            count -= self._tail_tokens
        if count:
            self._budget -= count
            self._chunks.append((sequence, count))

    def _seat_landed(self) -> None:
        while self.landed and self.rows.free:
            sequence = self.landed[0]
            sequence.occupy()
            self.rows.assign(sequence)
            self.shift(sequence, Phase.DECODE)
            self._observer.seated(sequence)

    def _grow(self, busy: bool) -> set[int] | None:
        """Gives every sequence that can decode the page of its next token; returns the rows of those that got none.

        None when pages are short while a step is under way.
        """
        if not self.decoding:
            return set()
        rows = self._rows_of_decoding()
        lacking = self.rows.lacking_page(rows)
        paused: set[int] = set()
        if lacking and busy:
            ready = self.rows.ready(rows)
            lacking = [i for i in lacking if ready[i]]
        for sequence in [self.decoding[i] for i in lacking]:
            if sequence.phase is not Phase.DECODE:
                continue  # preempted for an older one a moment ago
            if busy and not self.account.available:
                return None
            while not self.account.available and self._preempt_for(sequence):
                pass
            if self.account.available:
                self.rows.add_page(sequence, self.account.take(1)[0])
            else:
                paused.add(sequence.row)
        if paused and self._stuck(paused):
            self.preempt(self.decoding[-1])
            self._seat_landed()
            return self._grow(busy)
        return paused

    def _stuck(self, paused: set[int]) -> bool:
        """Whether all that decode wait for pages of older sequences, and these for a row: with one row there may be
        nobody else to give way."""
        copying = any(s.copying for s in self.handing_off)
        return bool(self.landed) and len(paused) == len(self.decoding) and not (self.prefilling or copying)

    def _rows_of_decoding(self) -> IntArray:
        if self._decode_rows is None:
            self._decode_rows = np.asarray([sequence.row for sequence in self.decoding], dtype=np.int64)
        return self._decode_rows

    # --------------------------------------------------------------------------------------------------- preemption

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempts the youngest that is younger than `sequence`, else any that waits for a grant. False: nobody."""
        candidates = [s for members in self._holding() for s in members if not s.copying and s.key > sequence.key]
        if not candidates:
            candidates = [s for s in self.handing_off if not s.copying]
        if not candidates:
            return False
        self.preempt(max(candidates, key=_key))
        return True

    def _holding(self) -> tuple[list[Sequence], ...]:
        return self.prefilling, self.decoding, self.landed, self.handing_off

    def preempt(self, sequence: Sequence) -> None:
        """Takes the pages away; the sequence waits again, with all its tokens, and will compute them again."""
        assert not sequence.copying, f"{sequence!r} preempted while its pages are being copied"
        assert not sequence.in_flight, f"{sequence!r} preempted while it is being computed"
        self.preemptions += 1
        self._observer.preempted(sequence)
        self.register(sequence)  # an adopted one may not have been
        if len(sequence.tokens) > self.account.total * self._page_tokens:
            self._give_up(sequence)
            return
        self._withdraw(sequence)
        self.rows.release(sequence)
        self.leave(sequence)
        self.account.drop(sequence.pages)
        sequence.reset()
        self.enter(sequence, Phase.WAITING)

    def reclaim(self, wanted: Callable[[], bool]) -> bool:
        """Preempts sequences that wait for a grant, the youngest first, until `wanted()`. For when nothing else moves:
        two workers full of sequences for each other would otherwise wait for ever."""
        while not wanted():
            idle = [s for s in self.handing_off if not s.copying]
            if not idle:
                return False
            self.preempt(idle[-1])
        return True

    @property
    def moving(self) -> bool:
        """Whether anything here will free pages by itself."""
        return bool(self.prefilling or self.decoding or self.landed) or any(s.copying for s in self.handing_off)

    # ---------------------------------------------------------------------------------------------------- admission

    def growth(self, length: int, limit: int, pages: int) -> int:
        """Pages that a sequence of `length` tokens and at most `limit` will need soon, beyond the `pages` it has."""
        soon = min(length + self._headroom_tokens, limit - 1)  # KV of the last token is never needed
        return max(0, -(-soon // self._page_tokens) - pages)

    def headroom(self) -> int:
        """Pages to keep free for the growth of what is here."""
        return sum(
            self.growth(len(s.tokens), s.limit, len(s.pages))
            for members in (self.prefilling, self.decoding, self.landed)
            for s in members
            if s.destination is None
        )

    def admit(self, claims: Iterable[Claim], attempt: Callable[[Claim], Verdict]) -> bool:
        """Serves claims in order. True when asking again is useless until pages are released or a claim arrives."""
        blocked: list[Claim] = []
        refused: dict[type, int] = defaultdict(int)
        settled = True
        for claim in claims:
            if refused[type(claim)] >= LOOKAHEAD:
                continue
            if any(b.passed_over >= PATIENCE for b in blocked):
                break
            verdict = attempt(claim)
            if verdict is Verdict.TAKEN:
                for b in blocked:
                    b.passed_over += 1
            else:
                refused[type(claim)] += 1
                if verdict is Verdict.NO_PAGES or claim.passed_over >= PATIENCE:
                    blocked.append(claim)
            settled = settled and verdict is Verdict.NO_PAGES
        return settled

    def claims(self, offers: List[Claim]) -> Iterable[Claim]:
        """Waiting sequences, as many as may find a row and LOOKAHEAD more, and `offers`, merged in order."""
        waiting: List[Claim] = self.waiting[: self.rows.free + LOOKAHEAD]
        return heapq.merge(waiting, offers, key=_claim_key)

    def admit_waiting(self, sequence: Sequence) -> Verdict:
        """Begins a waiting sequence: prefix hits held, pages of its whole prompt taken, a first chunk scheduled.

        Pages are looked for also when no token is left to begin with, as between two steps: who has none is passed over
        by whoever takes some then, and that counts.
        """
        if not self.rows.free:
            return Verdict.LATER
        tokens = len(sequence.tokens)
        hits = self._prefix_hits(sequence)
        pages = -(-tokens // self._page_tokens)
        new_pages = pages - len(hits)
        cost = new_pages + self.account.idle_among(hits)
        growth = self.growth(tokens, sequence.limit, pages) if sequence.destination is None else 0
        if not self._fits(cost, growth):
            return Verdict.NO_PAGES
        if self.spent:
            return Verdict.LATER
        self.account.hold(hits)
        sequence.pages = hits + self.account.take(new_pages)
        sequence.computed = sequence.planned = len(hits) * self._page_tokens
        sequence.registered = len(hits)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
        sequence.passed_over = 0
        self.shift(sequence, Phase.PREFILL)
        self.rows.assign(sequence)
        self._observer.admitted(sequence)
        self._add_chunk(sequence)
        return Verdict.TAKEN

    def _prefix_hits(self, sequence: Sequence) -> list[int]:
        """Known pages of its prefix, but never of all its tokens: the last has to be computed to be sampled from."""
        if not self._prefix_cache or sequence.wants_prompt_logprobs:
            return []
        keys = sequence.extend_keys(self._page_tokens)
        return self.account.index.match(keys[: (len(sequence.tokens) - 1) // self._page_tokens])

    def register(self, sequence: Sequence) -> None:
        """Names the pages that are computed in full, so that others may share them."""
        full = sequence.computed // self._page_tokens
        if not self._prefix_cache or full <= sequence.registered:
            return
        keys, first = sequence.extend_keys(self._page_tokens), sequence.registered
        self.account.index.insert_all(keys[first:full], sequence.pages[first:full])
        sequence.registered = full


def _key(sequence: Sequence) -> Key:
    return sequence.key


def _claim_key(claim: Claim) -> Key:
    return claim.key
