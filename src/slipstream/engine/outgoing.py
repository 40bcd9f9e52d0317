"""The source's transfers: one machine of `transfer.protocol` for each sequence on its way to another worker.

Carries out the actions of the machines: messages and copies go to the outbox; that a request has been handed over,
has failed, or has had its pages unpinned goes to the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from slipstream import wire
from slipstream.engine.effects import CopyPages, Outbox
from slipstream.engine.observe import NoObserver, Observer
from slipstream.engine.sequence import Sequence
from slipstream.transfer.job import Behind
from slipstream.transfer.protocol import (
    Copy,
    Fail,
    HandedOver,
    Send,
    SourceAction,
    SourceHandoff,
    Unpin,
    release_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """What the engine does about its sequences: `failed` answers the router, `unpinned` may drop the pages."""

    handed_over: Callable[[Sequence], None]
    failed: Callable[[Sequence, str, str], None]
    unpinned: Callable[[Sequence], None]


class Outgoing:
    """All transfers that this worker is the source of. Transfer numbers are never used twice."""

    def __init__(self, outbox: Outbox, owner: Owner, page_tokens: int, observer: Observer | None = None) -> None:
        self._observer = observer or NoObserver()
        self._outbox = outbox
        self._owner = owner
        self._page_tokens = page_tokens
        self._transfers: dict[int, tuple[SourceHandoff, Sequence]] = {}
        self._last_xfer = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def offer(self, sequence: Sequence) -> None:
        """Tells the destination what is about to be computed."""
        assert sequence.destination is not None
        assert sequence.handoff is None, f"{sequence!r} offered twice"
        self._last_xfer += 1
        tokens = len(sequence.tokens)
        pages = -(-tokens // self._page_tokens)
        handoff = SourceHandoff(self._last_xfer, sequence.destination, pages, self._page_tokens)
        sequence.handoff = handoff
        self._transfers[handoff.xfer] = (handoff, sequence)
        offer = wire.Offer(
            xfer=handoff.xfer,
            request=sequence.request.id,
            attempt=sequence.request.attempt,
            prompt_len=tokens,
            block_keys=sequence.extend_keys(self._page_tokens)[: tokens // self._page_tokens],
            pages_needed=pages,
            max_tokens=sequence.request.sampling.max_tokens - sequence.outputs,
            priority=sequence.request.priority,
            prompt=sequence.ids(0, sequence.prompt_tokens).astype("<i4").tobytes(),
        )
        self._outbox.peer(handoff.peer, True, offer)
        self._observer.offered(sequence)

    def computing(self, sequence: Sequence, tokens: int, behind: Behind) -> None:
        """A step under way will have computed the first `tokens` tokens: their copies can wait for it on the device."""
        if sequence.handoff is not None:
            sequence.behind = behind
            whole = tokens == len(sequence.tokens)
            pages = -(-tokens // self._page_tokens) if whole else tokens // self._page_tokens
            self._perform(sequence, sequence.handoff, sequence.handoff.ready(pages))

    def rewind(self, sequence: Sequence) -> None:
        """A step has failed: of the sequence no more is there than what is settled."""
        sequence.behind = None
        if sequence.handoff is not None:
            sequence.handoff.rewind(sequence.computed // self._page_tokens)

    def progress(self, sequence: Sequence) -> None:
        """More of the sequence is computed: what is full can be copied."""
        if sequence.handoff is not None:
            self._perform(sequence, sequence.handoff, sequence.handoff.ready(sequence.computed // self._page_tokens))

    def complete(self, sequence: Sequence) -> None:
        """The first token is sampled and sent: commit when the copies are done."""
        handoff = sequence.handoff
        assert handoff is not None, f"{sequence!r} has no transfer to complete"
        outputs = sequence.tokens[sequence.prompt_tokens :]
        commit = wire.Commit(
            xfer=handoff.xfer,
            generation=0,
            request=msgspec.structs.replace(sequence.request, prompt_ids=[], output_ids=outputs),
            router=sequence.router,
            cached_tokens=max(0, sequence.cached_tokens),
        )
        self._perform(sequence, handoff, handoff.complete(commit))

    def cancel(self, sequence: Sequence, code: str) -> None:
        if sequence.handoff is not None:
            self._perform(sequence, sequence.handoff, sequence.handoff.cancel(code))

    def receive(self, peer: str, message: wire.Message) -> None:
        """A message of the destination `peer`. One about a closed transfer is answered as the protocol says."""
        xfer = getattr(message, "xfer", -1)
        handoff, sequence = self._transfers.get(xfer, (None, None))
        if handoff is None or sequence is None or handoff.peer != peer:
            for action in release_of(message):
                self._outbox.peer(peer, True, action.message)
            return
        self._observer.answered(sequence, message)
        match message:
            case wire.Grant():
                actions = handoff.on_grant(message)
            case wire.Defer():
                actions = handoff.on_defer()
            case wire.Refuse():
                actions = handoff.on_refuse(message)
            case wire.Accepted():
                actions = handoff.on_accepted()
            case wire.Revoke():
                actions = handoff.on_revoke(message)
            case _:
                logger.warning("%s sent %s, which has no meaning from a destination", peer, type(message).__name__)
                return
        self._perform(sequence, handoff, actions)

    def copied(self, xfer: int, failure: str | None) -> None:
        """One copy job has ended. Raises KeyError for a job that was never started or was answered twice."""
        handoff, sequence = self._transfers[xfer]
        self._observer.copied(sequence, failure)
        self._perform(sequence, handoff, handoff.copied() if failure is None else handoff.copy_failed(failure))

    def lost(self, peer: str) -> None:
        for handoff, sequence in [t for t in self._transfers.values() if t[0].peer == peer]:
            self._perform(sequence, handoff, handoff.on_lost())

    def states(self) -> Iterable[tuple[SourceHandoff, Sequence]]:
        return self._transfers.values()

    def _perform(self, sequence: Sequence, handoff: SourceHandoff, actions: list[SourceAction]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self._outbox.peer(handoff.peer, True, message)
                    if isinstance(message, wire.Commit):
                        self._observer.committed(sequence)
                case Copy(first, destination_pages):
                    source_pages = sequence.pages[first : first + len(destination_pages)]
                    behind = sequence.behind
                    self._outbox.copy(CopyPages(handoff.peer, handoff.xfer, source_pages, destination_pages, behind))
                    self._observer.copying(sequence, len(destination_pages))
                case HandedOver():
                    self._owner.handed_over(sequence)
                case Fail(code, message):
                    self._observer.handoff_failed(sequence, code, message)
                    self._owner.failed(sequence, code, message)
                case Unpin():
                    del self._transfers[handoff.xfer]
                    sequence.handoff = None
                    self._owner.unpinned(sequence)
