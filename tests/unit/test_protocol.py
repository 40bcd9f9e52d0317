"""The two machines of a handoff, alone and against each other."""

from __future__ import annotations

import random
from collections import deque

import pytest

from slipstream import wire
from slipstream.transfer.protocol import (
    Adopt,
    Copy,
    DestinationHandoff,
    DestinationState,
    Fail,
    Free,
    HandedOver,
    Send,
    SourceHandoff,
    SourceState,
    Unpin,
    release_of,
)
from slipstream.types import Request, SamplingParams

PAGE = 4


def offer(prompt: int = 14, xfer: int = 7) -> wire.Offer:
    return wire.Offer(
        xfer=xfer,
        request="r",
        attempt=0,
        prompt_len=prompt,
        block_keys=[bytes([i]) * 16 for i in range(prompt // PAGE)],
        pages_needed=-(-prompt // PAGE),
        max_tokens=9,
    )


def commit(prompt: int = 14, generation: int = 0, xfer: int = 7) -> wire.Commit:
    request = Request(id="r", prompt_ids=[5] * prompt, sampling=SamplingParams(), output_ids=[6])
    return wire.Commit(xfer=xfer, generation=generation, request=request, router="router", cached_tokens=0)


def grant(skip: int = 0, pages: list[int] | None = None, generation: int = 3) -> wire.Grant:
    return wire.Grant(
        xfer=7, skip_tokens=skip, pages=[11, 12, 13, 14] if pages is None else pages, generation=generation
    )


def source() -> SourceHandoff:
    return SourceHandoff(7, "decode", 4, PAGE)


def sent(actions: list, kind: type) -> list:
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def of(actions: list, kind: type) -> list:
    return [action for action in actions if isinstance(action, kind)]


# ------------------------------------------------------------------------------------------------------- source


def test_full_pages_are_copied_as_they_are_computed_and_the_last_in_part_at_the_end() -> None:
    machine = source()
    assert machine.on_grant(grant()) == []
    assert machine.ready(2) == [Copy(0, [11, 12])]
    assert machine.ready(2) == []
    assert machine.ready(3) == [Copy(2, [13])]
    assert machine.complete(commit()) == [Copy(3, [14])]


def test_what_was_computed_before_the_grant_is_copied_when_it_comes() -> None:
    machine = source()
    assert machine.ready(2) == []
    assert machine.on_grant(grant()) == [Copy(0, [11, 12])]


def test_skipped_pages_are_not_copied() -> None:
    machine = source()
    machine.on_grant(grant(skip=2 * PAGE, pages=[13, 14]))
    assert machine.ready(1) == []
    assert machine.ready(3) == [Copy(2, [13])]
    assert machine.complete(commit()) == [Copy(3, [14])]


def test_commit_waits_for_every_copy_and_carries_the_generation_of_the_grant() -> None:
    machine = source()
    machine.on_grant(grant())
    machine.ready(3)
    machine.complete(commit())
    assert machine.copied() == []
    (committed,) = sent(machine.copied(), wire.Commit)
    assert committed.generation == 3
    assert machine.state is SourceState.COMMITTED


def test_a_prompt_that_the_destination_holds_entirely_is_committed_without_a_copy() -> None:
    machine = SourceHandoff(7, "decode", 3, PAGE)
    machine.on_grant(grant(skip=3 * PAGE, pages=[]))
    assert len(sent(machine.complete(commit(12)), wire.Commit)) == 1


def test_accepted_hands_over_and_unpins() -> None:
    machine = source()
    machine.on_grant(grant(skip=4 * PAGE, pages=[]))
    machine.complete(commit())
    assert machine.on_accepted() == [HandedOver(), Unpin()]
    assert machine.closed


def test_a_cancel_before_the_grant_ends_at_once_and_the_late_grant_is_released() -> None:
    machine = source()
    actions = machine.cancel("client_closed_request")
    assert [type(a) for a in actions] == [Send, Unpin]
    (released,) = release_of(grant(generation=5))
    assert released.message == wire.Released(xfer=7, generation=5)


def test_a_cancel_with_copies_under_way_releases_after_the_last_of_them() -> None:
    machine = source()
    machine.on_grant(grant())
    machine.ready(1)
    machine.ready(2)
    assert [type(a.message) for a in machine.cancel("stop") if isinstance(a, Send)] == [wire.Cancel]
    assert machine.copied() == []
    assert machine.copied() == [Send(wire.Released(xfer=7, generation=3)), Unpin()]


def test_a_revoke_fails_the_request_and_is_answered_behind_the_last_copy() -> None:
    machine = source()
    machine.on_grant(grant())
    machine.ready(1)
    actions = machine.on_revoke(wire.Revoke(xfer=7, code="client_closed_request"))
    assert [type(a) for a in actions] == [Fail]
    assert machine.copied() == [Send(wire.Released(xfer=7, generation=3)), Unpin()]


def test_a_revoke_that_crosses_the_commit_gives_the_request_back() -> None:
    machine = source()
    machine.on_grant(grant(skip=4 * PAGE, pages=[]))
    machine.complete(commit())
    actions = machine.on_revoke(wire.Revoke(xfer=7, code="x"))
    assert [type(a) for a in actions] == [Fail, Send, Unpin]
    assert machine.on_accepted() == []


def test_a_failed_copy_fails_the_transfer_as_a_whole_and_waits_for_the_others() -> None:
    machine = source()
    machine.on_grant(grant())
    machine.ready(1)
    machine.ready(2)
    actions = machine.copy_failed("cable")
    assert [type(a) for a in actions] == [Fail, Send]
    assert "cable" in of(actions, Fail)[0].message
    assert machine.state is SourceState.CLOSING
    assert machine.copy_failed("cable") == [Send(wire.Released(xfer=7, generation=3)), Unpin()]


def test_a_lost_destination_keeps_the_source_pages_until_the_copies_are_answered() -> None:
    machine = source()
    machine.on_grant(grant())
    machine.ready(2)
    actions = machine.on_lost()
    assert of(actions, Fail)[0].code == "worker_lost"
    assert not of(actions, Unpin)
    assert machine.on_lost() == []
    assert of(machine.copied(), Unpin)


def test_a_destination_lost_after_commit_still_needs_an_answer() -> None:
    machine = source()
    machine.on_grant(grant(skip=4 * PAGE, pages=[]))
    machine.complete(commit())
    actions = machine.on_lost()
    assert of(actions, Fail)
    assert of(actions, Unpin)


def test_a_refusal_fails_with_its_own_code() -> None:
    machine = source()
    actions = machine.on_refuse(wire.Refuse(xfer=7, code="context_length_exceeded", message="too long"))
    assert actions == [Fail("context_length_exceeded", "too long"), Unpin()]


@pytest.mark.parametrize(("skip", "pages"), [(0, [1, 2, 3]), (3, [2, 3, 4]), (4, [1, 2, 3, 4]), (40, [])])
def test_a_grant_of_the_wrong_size_is_released_and_fails(skip: int, pages: list[int]) -> None:
    machine = source()
    actions = machine.on_grant(grant(skip=skip, pages=pages))
    assert [type(a) for a in actions] == [Fail, Send, Send, Unpin]
    assert sent(actions, wire.Released)[0].generation == 3


def test_a_copy_answered_twice_is_a_programming_error() -> None:
    machine = source()
    machine.on_grant(grant())
    machine.ready(1)
    machine.copied()
    with pytest.raises(AssertionError, match="more copies answered than started"):
        machine.copied()


# ----------------------------------------------------------------------------------------------------- destination


def granted(generation: int = 3) -> DestinationHandoff:
    machine = DestinationHandoff("prefill", offer())
    machine.grant(0, [11, 12, 13, 14], generation)
    return machine


def test_a_commit_is_accepted_and_adopted() -> None:
    machine = granted()
    actions = machine.on_commit(commit(generation=3))
    assert [type(a) for a in actions] == [Send, Adopt]
    assert machine.closed


def test_deferral_is_said_once() -> None:
    machine = DestinationHandoff("prefill", offer())
    assert len(machine.defer()) == 1
    assert machine.defer() == []


def test_a_cancelled_grant_is_not_reused_before_release() -> None:
    machine = granted()
    assert machine.on_cancel() == []
    assert machine.state is DestinationState.CLOSING
    assert machine.on_released(wire.Released(xfer=7, generation=3)) == [Free()]


def test_a_revoked_grant_is_not_reused_before_release() -> None:
    machine = granted()
    assert [type(a) for a in machine.revoke("x")] == [Send]
    assert machine.on_cancel() == []
    assert machine.on_released(wire.Released(xfer=7, generation=3)) == [Free()]


def test_a_commit_that_crosses_the_revoke_frees_and_is_not_adopted() -> None:
    machine = granted()
    machine.revoke("x")
    assert machine.on_commit(commit(generation=3)) == [Free()]


@pytest.mark.parametrize("generation", [0, 2, 4])
def test_another_generation_is_stale(generation: int) -> None:
    machine = granted()
    assert machine.on_released(wire.Released(xfer=7, generation=generation)) == []
    assert machine.on_commit(commit(generation=generation)) == []
    assert machine.state is DestinationState.GRANTED


def test_an_offer_that_waits_has_nothing_to_free() -> None:
    assert DestinationHandoff("prefill", offer()).on_cancel() == []
    assert DestinationHandoff("prefill", offer()).on_lost() == []
    machine = DestinationHandoff("prefill", offer())
    assert machine.on_released(wire.Released(xfer=7, generation=0)) == []
    assert machine.on_commit(commit()) == []
    assert sent(machine.revoke("client_closed_request"), wire.Refuse)[0].code == "client_closed_request"


@pytest.mark.parametrize("before", ["nothing", "cancel", "revoke"])
def test_proof_that_the_source_is_gone_frees(before: str) -> None:
    machine = granted()
    if before == "cancel":
        machine.on_cancel()
    elif before == "revoke":
        machine.revoke("x")
    assert machine.on_lost() == [Free()]
    assert machine.closed


def test_a_commit_that_does_not_fit_its_offer_is_refused() -> None:
    machine = granted()
    actions = machine.on_commit(commit(prompt=9, generation=3))
    assert [type(a) for a in actions] == [Send, Free]


# ------------------------------------------------------------------------------------------------- against each other


class Pair:
    """Both machines, two ordered links, a mover, and an account of what may be written and reused."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.source = source()
        self.destination: DestinationHandoff | None = None
        self.onward: deque = deque([offer()])
        self.back: deque = deque()
        self.jobs: deque = deque()
        self.computed = 0
        self.reusable = True  # the destination's pages
        self.pinned = True  # the source's
        self.owner = "source"
        self.answers = 0  # failures said by the source
        self.ended = False  # by the client, without an answer
        self.gone = False

    def step(self) -> bool:
        moves = []
        if self.onward:
            moves.append(self._to_destination)
        if self.back:
            moves.append(self._to_source)
        if self.jobs:
            moves.append(self._copy)
        if self.destination is not None and self.destination.state is DestinationState.WAITING:
            moves.append(self._decide)
        if self.computed < 5 and not self.ended and not self.answers:
            moves.append(self._compute)
        if not moves:
            return False
        self.rng.choice(moves)()
        return True

    def trouble(self) -> None:
        self.rng.choice((self._cancel, self._revoke, self._lose))()

    def _compute(self) -> None:
        self.computed += 1
        self._source(self.source.complete(commit()) if self.computed == 5 else self.source.ready(self.computed - 1))

    def _decide(self) -> None:
        assert self.destination is not None
        roll = self.rng.random()
        if roll < 0.3:
            self._dest(self.destination.defer())
        elif roll < 0.4:
            self._dest(self.destination.refuse("no_workers", "draining"))
        else:
            self.reusable = False
            self._dest(self.destination.grant(PAGE, [12, 13, 14], 3))

    def _copy(self) -> None:
        self.jobs.popleft()
        assert self.gone or not self.reusable, "a copy writes into pages that may be reused"
        assert self.pinned, "a copy reads pages that are not pinned"
        failed = self.rng.random() < 0.2
        self._source(self.source.copy_failed("trouble") if failed else self.source.copied())

    def _cancel(self) -> None:
        if self.owner == "source" and not self.answers and self.source.state is not SourceState.COMMITTED:
            self.ended = True
            self._source(self.source.cancel("client_closed_request"))

    def _revoke(self) -> None:
        if self.destination is not None and not self.destination.closed:
            self._dest(self.destination.revoke("client_closed_request"))

    def _lose(self) -> None:
        """The link ends; the destination is told when the last job has been answered."""
        self.onward.clear()
        self.back.clear()
        self._source(self.source.on_lost())
        self.onward.clear()
        while self.jobs:
            self._copy()
        self.gone = True
        if self.destination is not None:
            self._dest(self.destination.on_lost())

    def _to_destination(self) -> None:
        message = self.onward.popleft()
        machine = self.destination
        if isinstance(message, wire.Offer):
            self.destination = DestinationHandoff("prefill", message)
        elif machine is None:
            raise AssertionError("something came before the offer")
        elif isinstance(message, wire.Commit):
            self._dest(machine.on_commit(message))
        elif isinstance(message, wire.Cancel):
            self._dest(machine.on_cancel())
        else:
            self._dest(machine.on_released(message))

    def _to_source(self) -> None:
        message, machine = self.back.popleft(), self.source
        match message:
            case wire.Grant():
                self._source(list(release_of(message)) if machine.closed else machine.on_grant(message))
            case wire.Refuse():
                self._source(machine.on_refuse(message))
            case wire.Defer():
                self._source(machine.on_defer())
            case wire.Revoke():
                self._source(machine.on_revoke(message))
            case wire.Accepted():
                self._source(machine.on_accepted())

    def _source(self, actions: list) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.onward.append(message)
                case Copy():
                    self.jobs.append(action)
                case Fail():
                    self.answers += 1
                case HandedOver():
                    assert self.owner == "destination", "the source let go of what nobody had taken"
                case Unpin():
                    assert self.pinned, "unpinned twice"
                    self.pinned = False

    def _dest(self, actions: list) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.back.append(message)
                case Adopt():
                    assert not self.jobs, "committed with copies under way"
                    self.owner = "destination"
                case Free():
                    assert not self.reusable, "freed twice"
                    assert not self.jobs or self.gone, "freed while a copy may still write"
                    self.reusable = True


@pytest.mark.parametrize("shard", range(10))
def test_any_interleaving_ends_with_one_owner_and_all_pages_free(shard: int) -> None:
    for seed in range(shard * 300, (shard + 1) * 300):
        pair = Pair(seed)
        troubles = pair.rng.choice((0, 0, 1, 2))
        while pair.step():
            if troubles and pair.rng.random() < 0.1:
                troubles -= 1
                pair.trouble()
        assert not pair.pinned, f"seed {seed}: the source's pages are pinned for ever ({pair.source.state})"
        if pair.owner == "source":
            assert pair.reusable, f"seed {seed}: the destination's pages are reserved for ever"
            assert pair.answers == (0 if pair.ended else 1), f"seed {seed}: {pair.answers} answers"
        else:
            assert not pair.reusable
