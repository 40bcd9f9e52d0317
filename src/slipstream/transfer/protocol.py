"""The handoff of a request from its prefill worker (source) to its decode worker (destination).

Two pure machines, one for each side of one transfer: events in, actions out; no clock, no socket, no memory account.
The engine feeds them what arrives from the link and the mover, and carries their actions out in order.

    source                                        destination
    offer ------------------ Offer -------------> (defer: Defer) ... grant
    copies of full pages <-- Grant -------------- pages reserved, prefix pages held
    complete, last copy done
    committed -------------- Commit ------------> adopted: the request is the destination's
    pages unpinned <-------- Accepted -----------

    cancel ----------------- Cancel ------------> stop expecting; pages stay reserved
    copies end ------------- Released ----------> pages may be reused

    copies end <------------ Revoke ------------- the request was aborted here
    ------------------------ Released ----------> pages may be reused

The rule behind it: only the source knows whether a copy may still arrive. So the destination reuses a granted page
after Commit or Released of that grant's generation, or when `lost` says with proof that the source and its mapping are
gone; nothing else, no time-out in particular. And the source unpins a page when its last copy has been answered,
whatever has happened to the link.

Ownership: the request is the source's until the destination has processed Commit. A source that hears Revoke, Refuse
or the end of its destination before Accepted answers for the request (action Fail); a destination that has revoked
ignores a Commit that crossed it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from slipstream import wire


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the other side."""

    message: wire.Message


@dataclass(frozen=True, slots=True)
class Copy:
    """Source: copy our pages number `first`, `first + 1`, ... of the sequence to `destination_pages`, as one job."""

    first: int
    destination_pages: list[int]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Source: the request is the destination's."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Source: the transfer has failed while the request was ours; answer the router, it may be tried elsewhere."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Unpin:
    """Source: no copy reads the sequence's pages any more. The last action of every transfer, exactly once."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Destination: all granted pages are written and the request is ours."""

    commit: wire.Commit


@dataclass(frozen=True, slots=True)
class Free:
    """Destination: nothing will be written under this grant any more; its pages may be reused."""


SourceAction = Send | Copy | HandedOver | Fail | Unpin
DestinationAction = Send | Adopt | Free


class SourceState(enum.Enum):
    OFFERED = "offered"
    COPYING = "copying"  # granted
    COMMITTED = "committed"
    CLOSING = "closing"  # over, but copies may still be running
    CLOSED = "closed"


class DestinationState(enum.Enum):
    WAITING = "waiting"
    GRANTED = "granted"
    CLOSING = "closing"  # revoked or cancelled, writes may still arrive
    CLOSED = "closed"


class SourceHandoff:
    """The source's side of one transfer of the first `pages` pages of a sequence.

    `ready` says how many of them are computed, or will be when a copy that is started now reads them; `rewind` that
    this has not come true; `complete` that all are, and what to commit. Every Copy is answered by exactly one `copied`
    or `copy_failed`.
    """

    def __init__(self, xfer: int, peer: str, pages: int, page_tokens: int) -> None:
        self.xfer = xfer
        self.peer = peer
        self.state = SourceState.OFFERED
        self.deferred = False
        self.jobs = 0  # copies that have not been answered
        self._pages = pages
        self._page_tokens = page_tokens
        self._ready = 0
        self._issued = 0
        self._again = False  # pages that are being copied will be copied once more, behind that
        self._grant: wire.Grant | None = None
        self._skip = 0
        self._commit: wire.Commit | None = None

    @property
    def pins_source(self) -> bool:
        """Whether the destination has pages for it or copies may read ours."""
        return self.state in (SourceState.COPYING, SourceState.COMMITTED, SourceState.CLOSING)

    @property
    def closed(self) -> bool:
        return self.state is SourceState.CLOSED

    # ------------------------------------------------------------------------------------------ from the destination

    def on_grant(self, grant: wire.Grant) -> list[SourceAction]:
        if self.state is not SourceState.OFFERED:
            return list(release_of(grant))
        self._grant = grant
        skip, rest = divmod(grant.skip_tokens, self._page_tokens)
        if rest or skip + len(grant.pages) != self._pages:
            return self._fail(
                "engine_failure",
                f"the decode worker {self.peer} granted {len(grant.pages)} pages behind {grant.skip_tokens} tokens; "
                f"{self._pages} pages of {self._page_tokens} tokens were asked for",
            )
        self.state = SourceState.COPYING
        self._skip = skip
        self._issued = skip
        return self._proceed()

    def on_defer(self) -> list[SourceAction]:
        self.deferred = True
        return []

    def on_refuse(self, refuse: wire.Refuse) -> list[SourceAction]:
        if self.state is not SourceState.OFFERED:
            return []
        self.state = SourceState.CLOSED
        return [Fail(refuse.code, refuse.message), Unpin()]

    def on_accepted(self) -> list[SourceAction]:
        if self.state is not SourceState.COMMITTED:
            return []
        self.state = SourceState.CLOSED
        return [HandedOver(), Unpin()]

    def on_revoke(self, revoke: wire.Revoke) -> list[SourceAction]:
        if self.state in (SourceState.CLOSING, SourceState.CLOSED):
            return []  # Released is on its way or follows the last copy
        return [Fail(revoke.code, f"the decode worker {self.peer} revoked its grant"), *self._close()]

    def on_lost(self) -> list[SourceAction]:
        """The link to the destination is gone. Running copies are still answered.

        Cancel and Released are said all the same: they are true, and should the peer have been linked again meanwhile
        it must not wait for them.
        """
        if self.state in (SourceState.CLOSING, SourceState.CLOSED):
            return []
        return self._fail("worker_lost", f"the decode worker {self.peer} was lost during the handoff")

    # --------------------------------------------------------------------------------------- from the engine and mover

    def ready(self, pages: int) -> list[SourceAction]:
        """The first `pages` pages are computed in full."""
        self._ready = max(self._ready, pages)
        return self._proceed()

    def rewind(self, pages: int) -> None:
        """The step that should compute the pages from `pages` on has failed: they will be computed again, and copied
        again when no copy of them is under way."""
        self._ready = min(self._ready, pages)
        kept = max(self._ready, self._skip)
        if self._issued > kept:
            self._issued = kept
            self._again = True

    def complete(self, commit: wire.Commit) -> list[SourceAction]:
        """All is computed; `commit` goes out (with the grant's generation) when all copies are done."""
        self._ready = self._pages
        self._commit = commit
        return self._proceed()

    def cancel(self, code: str) -> list[SourceAction]:
        """The request ends here, or is not to be handed over now. No effect once it is committed."""
        if self.state not in (SourceState.OFFERED, SourceState.COPYING):
            return []
        return [Send(wire.Cancel(xfer=self.xfer, code=code)), *self._close()]

    def copied(self) -> list[SourceAction]:
        self.jobs -= 1
        assert self.jobs >= 0, f"transfer {self.xfer}: more copies answered than started"
        return self._close() if self.state is SourceState.CLOSING else self._proceed()

    def copy_failed(self, reason: str) -> list[SourceAction]:
        self.jobs -= 1
        assert self.jobs >= 0, f"transfer {self.xfer}: more copies answered than started"
        if self.state is SourceState.CLOSING:
            return self._close()
        return self._fail("engine_failure", f"the KV transfer to {self.peer} failed: {reason}")

    # ------------------------------------------------------------------------------------------------------- inside

    def _proceed(self) -> list[SourceAction]:
        if self.state is not SourceState.COPYING or self._grant is None:
            return []
        if self._again and self.jobs:
            return []
        self._again = False
        actions: list[SourceAction] = []
        if self._ready > self._issued:
            first, self._issued = self._issued, self._ready
            self.jobs += 1
            actions.append(Copy(first, self._grant.pages[first - self._skip : self._ready - self._skip]))
        if self._commit is not None and self.jobs == 0:
            self.state = SourceState.COMMITTED
            commit = msgspec.structs.replace(self._commit, generation=self._grant.generation)
            actions.append(Send(commit))
        return actions

    def _fail(self, code: str, message: str) -> list[SourceAction]:
        return [Fail(code, message), Send(wire.Cancel(xfer=self.xfer, code=code)), *self._close()]

    def _close(self) -> list[SourceAction]:
        if self.jobs:
            self.state = SourceState.CLOSING
            return []
        self.state = SourceState.CLOSED
        if self._grant is None:
            return [Unpin()]
        return [Send(wire.Released(xfer=self.xfer, generation=self._grant.generation)), Unpin()]


def release_of(message: wire.Message) -> list[Send]:
    """The source's answer to a message about a transfer that it has closed: a late grant is released at once."""
    if isinstance(message, wire.Grant):
        return [Send(wire.Released(xfer=message.xfer, generation=message.generation))]
    return []


class DestinationHandoff:
    """The destination's side of one transfer. The engine decides when to grant; `generation` is the grant's number."""

    def __init__(self, peer: str, offer: wire.Offer) -> None:
        self.peer = peer
        self.offer = offer
        self.state = DestinationState.WAITING
        self.deferred = False
        self.generation = 0

    @property
    def closed(self) -> bool:
        return self.state is DestinationState.CLOSED

    # ------------------------------------------------------------------------------------------------ from the engine

    def defer(self) -> list[DestinationAction]:
        """No room yet; says so once."""
        if self.deferred or self.state is not DestinationState.WAITING:
            return []
        self.deferred = True
        return [Send(wire.Defer(xfer=self.offer.xfer))]

    def grant(self, skip_tokens: int, pages: list[int], generation: int) -> list[DestinationAction]:
        assert self.state is DestinationState.WAITING, f"granted while {self.state.value}"
        self.state = DestinationState.GRANTED
        self.generation = generation
        grant = wire.Grant(xfer=self.offer.xfer, skip_tokens=skip_tokens, pages=pages, generation=generation)
        return [Send(grant)]

    def refuse(self, code: str, message: str) -> list[DestinationAction]:
        assert self.state is DestinationState.WAITING, f"refused while {self.state.value}"
        self.state = DestinationState.CLOSED
        return [Send(wire.Refuse(xfer=self.offer.xfer, code=code, message=message))]

    def revoke(self, code: str) -> list[DestinationAction]:
        """The request is not wanted here any more. Granted pages stay reserved until the source has released them."""
        if self.state is DestinationState.WAITING:
            return self.refuse(code, "the request was withdrawn at its decode worker")
        if self.state is not DestinationState.GRANTED:
            return []
        self.state = DestinationState.CLOSING
        return [Send(wire.Revoke(xfer=self.offer.xfer, code=code))]

    # ------------------------------------------------------------------------------------------------ from the source

    def awaits(self, commit: wire.Commit) -> bool:
        """Whether this is the commit of what is granted now. Any other says nothing of the pages."""
        return self.state is DestinationState.GRANTED and commit.generation == self.generation

    def on_commit(self, commit: wire.Commit) -> list[DestinationAction]:
        """A commit of another generation is stale and ignored. Behind a Revoke it only says that no write is left."""
        if commit.generation != self.generation:
            return []
        tokens = len(commit.request.prompt_ids) + len(commit.request.output_ids)
        if self.state is DestinationState.GRANTED and tokens - 1 == self.offer.prompt_len:
            self.state = DestinationState.CLOSED
            return [Send(wire.Accepted(xfer=self.offer.xfer)), Adopt(commit)]
        if self.state is DestinationState.GRANTED:
            self.state = DestinationState.CLOSED
            return [Send(wire.Revoke(xfer=self.offer.xfer, code="engine_failure")), Free()]
        if self.state is DestinationState.CLOSING:
            self.state = DestinationState.CLOSED
            return [Free()]
        return []

    def on_cancel(self) -> list[DestinationAction]:
        """Pages that were granted stay reserved until Released."""
        if self.state is DestinationState.WAITING:
            self.state = DestinationState.CLOSED
        elif self.state is DestinationState.GRANTED:
            self.state = DestinationState.CLOSING
        return []

    def on_released(self, released: wire.Released) -> list[DestinationAction]:
        """A release of another generation is stale and ignored."""
        if released.generation != self.generation or self.state not in (
            DestinationState.GRANTED,
            DestinationState.CLOSING,
        ):
            return []
        self.state = DestinationState.CLOSED
        return [Free()]

    def on_lost(self) -> list[DestinationAction]:
        """Proof that the source's process and mapping are gone: nothing can be written any more."""
        held = self.state in (DestinationState.GRANTED, DestinationState.CLOSING)
        self.state = DestinationState.CLOSED
        return [Free()] if held else []
