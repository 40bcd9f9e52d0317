"""Machines that are broken on purpose, each in one rule, to show that the simulation would notice.

A mutant replaces methods of the engine for as long as its context lasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from slipstream import wire
from slipstream.engine import outgoing, scheduler, sequence
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import CopyPages, Outbox
from slipstream.engine.flights import Flights
from slipstream.engine.incoming import Incoming
from slipstream.engine.outgoing import Outgoing
from slipstream.engine.rows import RowTable
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Sequence
from slipstream.kv.prefix import PrefixIndex
from slipstream.transfer.protocol import (
    DestinationHandoff,
    DestinationState,
    Free,
    Send,
    SourceHandoff,
    SourceState,
    Unpin,
)

Patch = tuple[Any, str, Any]
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}


def mutant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    MUTANTS[make.__name__] = make
    return make


@contextmanager
def broken(name: str) -> Iterator[None]:
    patches = MUTANTS[name]()
    before = [(where, attribute, vars(where)[attribute]) for where, attribute, _ in patches]
    try:
        for where, attribute, value in patches:
            setattr(where, attribute, value)
        yield
    finally:
        for where, attribute, value in before:
            setattr(where, attribute, value)


def _closing(actions: list, handoff: DestinationHandoff) -> list:
    if handoff.state is DestinationState.CLOSING:
        handoff.state = DestinationState.CLOSED
        return [*actions, Free()]
    return actions


# ------------------------------------------------------------------------------------------------- the destination


@mutant
def pages_are_reused_on_revoke_before_released() -> list[Patch]:
    revoke = DestinationHandoff.revoke
    return [(DestinationHandoff, "revoke", lambda self, code: _closing(revoke(self, code), self))]


@mutant
def pages_are_reused_on_cancel_before_released() -> list[Patch]:
    on_cancel = DestinationHandoff.on_cancel
    return [(DestinationHandoff, "on_cancel", lambda self: _closing(on_cancel(self), self))]


@mutant
def a_stale_release_frees_a_live_grant() -> list[Patch]:
    on_released = DestinationHandoff.on_released

    def careless(self: DestinationHandoff, released: wire.Released) -> list:
        return on_released(self, msgspec.structs.replace(released, generation=self.generation))

    return [(DestinationHandoff, "on_released", careless)]


@mutant
def one_page_too_many_is_skipped() -> list[Patch]:
    grant = DestinationHandoff.grant

    def generous(self: DestinationHandoff, skip_tokens: int, pages: list[int], generation: int) -> list:
        page_tokens = self.offer.prompt_len // max(1, len(self.offer.block_keys))
        if len(pages) < 2 or not self.offer.block_keys or self.offer.prompt_len % page_tokens:
            return grant(self, skip_tokens, pages, generation)
        return grant(self, skip_tokens + page_tokens, pages[1:], generation)

    return [(DestinationHandoff, "grant", generous)]


@mutant
def a_commit_is_not_accepted() -> list[Patch]:
    on_commit = DestinationHandoff.on_commit

    def deaf(self: DestinationHandoff, commit: wire.Commit) -> list:
        return [
            a for a in on_commit(self, commit) if not (isinstance(a, Send) and isinstance(a.message, wire.Accepted))
        ]

    return [(DestinationHandoff, "on_commit", deaf)]


@mutant
def held_prefix_pages_of_a_grant_are_not_held() -> list[Patch]:
    def grant(self: Incoming, arrival: Any) -> scheduler.Verdict:
        hold = self._account.hold
        self._account.hold = lambda pages: None  # type: ignore[method-assign]
        try:
            return honest(self, arrival)
        finally:
            self._account.hold = hold  # type: ignore[method-assign]

    honest = Incoming.try_grant
    return [(Incoming, "try_grant", grant)]


@mutant
def deferred_offers_are_forgotten_when_pages_come_back() -> list[Patch]:
    def claims(self: Scheduler, offers: Any) -> Any:
        return honest(self, [offer for offer in offers if not offer.handoff.deferred])

    honest = Scheduler.claims
    return [(Scheduler, "claims", claims), (Scheduler, "reclaim", lambda self, wanted: False)]


# ------------------------------------------------------------------------------------------------------ the source


@mutant
def the_commit_does_not_wait_for_the_copies() -> list[Patch]:
    proceed = SourceHandoff._proceed

    def hasty(self: SourceHandoff) -> list:
        jobs, self.jobs = self.jobs, 0
        issued = self._issued
        if self._commit is None or self.state is not SourceState.COPYING or self._ready > issued:
            self.jobs = jobs
            return proceed(self)
        actions = proceed(self)
        self.jobs += jobs
        return actions

    return [(SourceHandoff, "_proceed", hasty), (SourceHandoff, "copied", _tolerant_copied())]


def _tolerant_copied() -> Callable[[SourceHandoff], list]:
    honest = SourceHandoff.copied

    def copied(self: SourceHandoff) -> list:
        if self._commit is not None and self.state is SourceState.COPYING and self.jobs > 1:
            self.jobs -= 1
            return self._proceed()
        return honest(self)

    return copied


@mutant
def source_pages_are_dropped_while_copies_read_them() -> list[Patch]:
    def close(self: SourceHandoff) -> list:
        jobs, self.jobs = self.jobs, 0
        actions = honest(self)
        self.jobs = jobs
        return actions

    honest = SourceHandoff._close
    return [(SourceHandoff, "_close", close), (outgoing.Outgoing, "copied", _forgiving_copied())]


def _forgiving_copied() -> Callable[[outgoing.Outgoing, int, str | None], None]:
    honest = outgoing.Outgoing.copied

    def copied(self: outgoing.Outgoing, xfer: int, failure: str | None) -> None:
        if xfer in self._transfers:
            honest(self, xfer, failure)

    return copied


@mutant
def released_is_said_while_copies_run() -> list[Patch]:
    def close(self: SourceHandoff) -> list:
        actions = honest(self)
        if self.state is SourceState.CLOSING and self._grant is not None:
            return [*actions, Send(wire.Released(xfer=self.xfer, generation=self._grant.generation))]
        return actions

    honest = SourceHandoff._close
    return [(SourceHandoff, "_close", close)]


@mutant
def a_cancel_is_lost() -> list[Patch]:
    def cancel(self: SourceHandoff, code: str) -> list:
        return [a for a in honest(self, code) if isinstance(a, Unpin)]

    honest = SourceHandoff.cancel
    return [(SourceHandoff, "cancel", cancel)]


@mutant
def a_late_grant_is_not_released() -> list[Patch]:
    return [(outgoing, "release_of", lambda message: [])]


@mutant
def a_refusal_is_not_answered() -> list[Patch]:
    return [(SourceHandoff, "on_refuse", lambda self, refuse: [])]


@mutant
def a_lost_destination_is_not_answered() -> list[Patch]:
    return [(EngineCore, "destination_lost", lambda self, peer_id: None)]


@mutant
def a_failed_copy_counts_as_done() -> list[Patch]:
    return [(SourceHandoff, "copy_failed", lambda self, reason: self.copied())]


@mutant
def the_partial_last_page_is_not_copied() -> list[Patch]:
    def proceed(self: SourceHandoff) -> list:
        if self._commit is not None and self._pages > 1:
            self._issued = max(self._issued, self._pages - 1) + (self._issued >= self._pages - 1)
            self._issued = min(self._issued, self._pages)
        return honest(self)

    honest = SourceHandoff._proceed
    return [(SourceHandoff, "_proceed", proceed)]


# ------------------------------------------------------------------------------------------------------- the engine


@mutant
def pages_of_an_ended_sequence_are_dropped_during_its_step() -> list[Patch]:
    def release(self: EngineCore, sequence: Sequence) -> None:
        flying, sequence.in_flight = sequence.in_flight, 0
        honest(self, sequence)
        sequence.in_flight = flying

    honest = EngineCore._release
    return [(EngineCore, "_release", release)]


@mutant
def sequences_with_granted_pages_are_preempted() -> list[Patch]:
    def copying(self: Sequence) -> bool:
        return self.handoff is not None and self.handoff.jobs > 0 and self.handoff.state is not SourceState.COPYING

    return [(Sequence, "copying", property(copying))]


@mutant
def pages_are_named_before_they_are_computed() -> list[Patch]:
    def register(self: Scheduler, sequence: Sequence) -> None:
        computed = sequence.computed
        sequence.computed = min(len(sequence.tokens), computed + 2 * self._page_tokens)
        honest(self, sequence)
        sequence.computed = computed

    honest = Scheduler.register
    return [(Scheduler, "register", register)]


@mutant
def keys_ignore_what_came_before() -> list[Patch]:
    def extend(keys: list[bytes], token_ids: Any, page_tokens: int, root: bytes) -> None:
        for start in range(len(keys) * page_tokens, len(token_ids) - page_tokens + 1, page_tokens):
            keys.append(bytes(t % 256 for t in token_ids[start : start + page_tokens]))

    return [(sequence, "extend_keys", extend)]


@mutant
def nothing_is_reclaimed_from_those_who_wait_for_each_other() -> list[Patch]:
    return [(Scheduler, "reclaim", lambda self, wanted: False)]


@mutant
def a_preempted_sequence_samples_its_last_token_again() -> list[Patch]:
    def reset(self: Sequence) -> None:
        honest(self)
        if self.outputs:
            self.tokens.pop()

    honest = Sequence.reset
    return [(Sequence, "reset", reset)]


@mutant
def an_adopted_sequence_is_not_announced() -> list[Patch]:
    def router(self: Outbox, name: str, message: wire.Message) -> None:
        if not isinstance(message, wire.Adopted):
            honest(self, name, message)

    honest = Outbox.router
    return [(Outbox, "router", router)]


@mutant
def the_first_token_is_computed_again_after_adoption() -> list[Patch]:
    def adopt(self: EngineCore, arrival: Any, commit: wire.Commit) -> None:
        honest(self, arrival, commit)
        self._live[commit.request.id].tokens.pop()

    honest = EngineCore._adopt
    return [(EngineCore, "_adopt", adopt)]


@mutant
def evicted_pages_keep_their_names() -> list[Patch]:
    def evict(self: PrefixIndex, count: int = 1) -> list[int]:
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._keys.pop(page)
        return pages

    return [(PrefixIndex, "evict", evict)]


# --------------------------------------------------------------------------------------------- two steps under way


@mutant
def a_row_is_given_away_while_a_step_computes_its_last_sequence() -> list[Patch]:
    def forget(self: EngineCore, sequence: Sequence) -> None:
        honest(self, sequence)
        self._rows.release(sequence)

    honest = EngineCore._forget
    return [(EngineCore, "_forget", forget)]


@mutant
def pages_come_back_with_the_first_of_two_steps() -> list[Patch]:
    def back(self: Flights, sequence: Sequence) -> bool:
        flying, sequence.in_flight = sequence.in_flight, 1
        alive = honest(self, sequence)
        sequence.in_flight = flying - 1
        return alive

    honest = Flights.back
    return [(Flights, "back", back)]


@mutant
def what_a_step_brings_for_an_ended_sequence_counts() -> list[Patch]:
    def back(self: Flights, sequence: Sequence) -> bool:
        return honest(self, sequence) or bool(sequence.pages)

    honest = Flights.back
    return [(Flights, "back", back)]


@mutant
def a_sequence_goes_on_beyond_its_limit() -> list[Patch]:
    def ready(self: RowTable, rows: Any) -> Any:
        limit, self._limit = self._limit, self._limit + 9
        able = honest(self, rows)
        self._limit = limit
        return able

    honest = RowTable.ready
    return [(RowTable, "ready", ready)]


@mutant
def tokens_that_the_host_has_to_know_are_not_waited_for() -> list[Patch]:
    return [(Sequence, "needs_host", property(lambda self: False))]


@mutant
def a_chunk_is_planned_again_while_it_is_computed() -> list[Patch]:
    def plan(self: RowTable, step: int, decode_rows: Any, chunks: list[tuple[Sequence, int]]) -> Any:
        for one, count in chunks:
            one.planned = min(one.computed, len(one.tokens) - count)
        return honest(self, step, decode_rows, chunks)

    honest = RowTable.plan
    return [(RowTable, "plan", plan)]


@mutant
def the_step_behind_a_failed_one_is_forgotten() -> list[Patch]:
    def rewind(self: RowTable, sequence: Sequence) -> None:
        if self.pending[sequence.row] < 2:
            honest(self, sequence)

    honest = RowTable.rewind
    return [(RowTable, "rewind", rewind)]


@mutant
def a_failed_chunk_is_not_computed_again() -> list[Patch]:
    def void(self: Flights, plan: Any) -> list[Sequence]:
        ends = {one: one.planned for flight in self._under_way for one, _ in flight.chunks}
        blamed = honest(self, plan)
        for one, end in ends.items():
            one.planned = end
        return blamed

    honest = Flights.void
    return [(Flights, "void", void)]


@mutant
def a_chunk_of_a_failed_step_is_copied_once() -> list[Patch]:
    return [(SourceHandoff, "rewind", lambda self, pages: None)]


@mutant
def a_copy_behind_a_failed_step_is_not_waited_for() -> list[Patch]:
    def rewind(self: SourceHandoff, pages: int) -> None:
        honest(self, pages)
        self._again = False

    honest = SourceHandoff.rewind
    return [(SourceHandoff, "rewind", rewind)]


@mutant
def a_copy_does_not_wait_for_its_step() -> list[Patch]:
    def copy(self: Outbox, job: CopyPages) -> None:
        job = dataclasses.replace(job, behind=None)
        honest(self, job)

    honest = Outbox.copy
    return [(Outbox, "copy", copy)]


@mutant
def the_unfinished_page_of_a_chunk_is_copied() -> list[Patch]:
    def computing(self: Outgoing, one: Sequence, tokens: int, behind: Any) -> None:
        honest(self, one, -(-tokens // self._page_tokens) * self._page_tokens, behind)

    honest = Outgoing.computing
    return [(Outgoing, "computing", computing)]


@mutant
def pages_are_taken_from_what_is_being_computed() -> list[Patch]:
    def preempt(self: Scheduler, one: Sequence) -> None:
        flying, one.in_flight = one.in_flight, 0
        preempt_quietly(self, one)
        one.in_flight = flying

    preempt_quietly = Scheduler.preempt
    grow = Scheduler._grow
    return [(Scheduler, "preempt", preempt), (Scheduler, "_grow", lambda self, busy: grow(self, False))]
