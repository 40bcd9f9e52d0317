"""The destination's transfers: what peers have offered, which pages they were granted, what they have committed.

An offer is granted when its pages fit beside the head-room for the growth of what runs here, else deferred and asked
again whenever pages come back. The pages of a prefix that is cached here already are held from the grant on and need
no copy; the others are reserved: nobody else gets them before the machine of the transfer says Free.

Behind the last copy the request waits for its commit to be taken in. So what is known of it before, its prompt and its
pages, is read when the grant is on its way (`read_ahead`), or with the commit where that comes sooner.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipstream import wire
from slipstream.engine.effects import Outbox
from slipstream.engine.observe import NoObserver, Observer
from slipstream.engine.scheduler import LOOKAHEAD, Scheduler, Verdict
from slipstream.kv.pages import PageAccount, PageState, Reservation
from slipstream.transfer.protocol import Adopt, DestinationAction, DestinationHandoff, DestinationState, Free, Send

logger = logging.getLogger(__name__)

EARLY_GRANTS = 0.25  # share of max_sequences that may be granted beyond those that have a row


class Arrival:
    """One offered transfer; `pages` are its held prefix pages and its reserved ones, in the order of the prompt.

    `prompt` are the ids that the offer has brought, once they are read, `foreign` one of them that the model does not
    have, and `page_ids` the pages as an array.
    """

    __slots__ = (
        "foreign", "growth", "handoff", "ids", "key", "limit", "note", "page_ids", "pages", "passed_over", "prompt",
        "reservation", "tokens",
    )  # fmt: skip

    def __init__(self, handoff: DestinationHandoff, key: tuple[int, int], limit: int, growth: int) -> None:
        self.handoff = handoff
        self.key = key
        self.limit = limit  # tokens at which the sequence ends
        self.growth = growth  # pages that it will need soon after it is adopted
        self.pages: list[int] = []
        self.passed_over = 0
        self.note: object = None  # the observer's
        self.reservation: Reservation | None = None
        self.page_ids: NDArray[np.int64] | None = None
        self.ids: NDArray[np.int64] | None = None
        self.prompt: list[int] = []
        self.tokens: list[int] = []  # another list of the same, for the sequence to extend
        self.foreign: int | None = None

    def read_ahead(self, vocab: int) -> None:
        """Reads prompt and pages, unless that is done."""
        if self.page_ids is not None:
            return
        self.page_ids = np.asarray(self.pages, dtype=np.int64)
        data = self.handoff.offer.prompt
        if data:
            self.ids = ids = np.frombuffer(data, dtype="<i4").astype(np.int64)
            self.prompt = ids.tolist()
            self.tokens = self.prompt.copy()
            if ids.min() < 0 or ids.max() >= vocab:
                self.foreign = int(ids[(ids < 0) | (ids >= vocab)][0])

    def complete(self, commit: wire.Commit) -> None:
        """Gives the commit the prompt that the offer has brought; forgets that where the commit brings its own."""
        if commit.request.prompt_ids:
            self.ids, self.prompt, self.tokens, self.foreign = None, [], [], None
        else:
            commit.request.prompt_ids = self.prompt


class Incoming:
    """All transfers that this worker is the destination of.

    `fits(cost, growth)` says whether new work may take `cost` pages now and will soon need `growth` more.
    `adopted(arrival, commit)` takes over the pages. `vocab` is the number of token ids that the model has.
    """

    def __init__(
        self,
        outbox: Outbox,
        account: PageAccount,
        scheduler: Scheduler,
        *,
        page_tokens: int,
        max_model_len: int,
        max_sequences: int,
        prefix_cache: bool,
        vocab: int,
        fits: Callable[[int, int], bool],
        adopted: Callable[[Arrival, wire.Commit], None],
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer or NoObserver()
        self.deferred: list[Arrival] = []
        self.headroom = 0  # pages that the granted sequences will need soon after they are adopted
        self._outbox = outbox
        self._account = account
        self._scheduler = scheduler
        self._page_tokens = page_tokens
        self._max_model_len = max_model_len
        self._seats = max_sequences + max(2, int(max_sequences * EARLY_GRANTS))
        self._prefix_cache = prefix_cache
        self._vocab = vocab
        self._fits = fits
        self._adopted = adopted
        self._arrivals: dict[tuple[str, int], Arrival] = {}
        self._generation = 0
        self._unread: list[Arrival] = []  # granted
        self._untold: list[Arrival] = []  # offered since sources were last told to wait

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def granted(self) -> int:
        return len(self._arrivals) - len(self.deferred)

    @property
    def _free_seats(self) -> int:
        return self._seats - self._scheduler.running - self.granted

    def holders(self) -> list[tuple[str, list[int]]]:
        return [(f"grant {xfer} to {peer}", a.pages) for (peer, xfer), a in self._arrivals.items() if a.pages]

    def problems(self) -> list[str]:
        """What is wrong with the head-room, for an audit."""
        needed = sum(a.growth for a in self._arrivals.values() if a.pages)
        if needed == self.headroom:
            return []
        return [f"head-room of {self.headroom} pages is kept for granted sequences, which will need {needed}"]

    def granted_pages(self, peer: str, xfer: int) -> list[int]:
        """Pages that the source may write; empty without a live grant."""
        arrival = self._arrivals.get((peer, xfer))
        if arrival is None:
            return []
        return [page for page in arrival.pages if self._account.state(page) is PageState.RESERVED]

    # -------------------------------------------------------------------------------------------------- from the peer

    def offer(self, peer: str, offer: wire.Offer, refusal: tuple[str, str] | None) -> None:
        """Takes note of an offer, to be granted when there is room; `refusal` is why nothing at all is taken now."""
        handoff = DestinationHandoff(peer, offer)
        limit = min(offer.prompt_len + offer.max_tokens, self._max_model_len)
        growth = self._scheduler.growth(offer.prompt_len + 1, limit, offer.pages_needed)
        arrival = Arrival(handoff, (offer.priority, self._scheduler.next_arrival()), limit, growth)
        self._observer.offer_came(arrival)
        refusal = refusal or self._never(offer, limit)
        if refusal is not None:
            self._perform(arrival, handoff.refuse(*refusal))
            return
        if (peer, offer.xfer) in self._arrivals:
            logger.error("%s offered transfer %d twice; the second offer is ignored", peer, offer.xfer)
            return
        self._arrivals[peer, offer.xfer] = arrival
        self._untold.append(arrival)
        bisect.insort(self.deferred, arrival, key=lambda a: a.key)

    def _never(self, offer: wire.Offer, limit: int) -> tuple[str, str] | None:
        page_tokens = self._page_tokens
        if offer.prompt_len < 1:
            return "engine_failure", f"{offer.prompt_len} tokens offered; at least one is needed"
        if offer.pages_needed != -(-offer.prompt_len // page_tokens):
            return "engine_failure", f"{offer.pages_needed} pages offered for {offer.prompt_len} tokens"
        if len(offer.prompt) % 4 or len(offer.prompt) > 4 * offer.prompt_len:
            return "engine_failure", f"a prompt of {len(offer.prompt)} bytes offered for {offer.prompt_len} tokens"
        if len(offer.block_keys) not in (0, offer.prompt_len // page_tokens):
            return "engine_failure", f"{len(offer.block_keys)} block keys offered for {offer.prompt_len} tokens"
        if offer.prompt_len + 1 >= self._max_model_len:
            return (
                "context_length_exceeded",
                f"{offer.prompt_len} tokens leave no room to generate: the decode worker takes at most "
                f"{self._max_model_len} (--max-model-len)",
            )
        needed = -(-(limit - 1) // page_tokens)
        if needed > self._account.total:
            return (
                "context_length_exceeded",
                f"{needed} KV pages are needed for up to {limit} tokens, the decode worker has {self._account.total}; "
                "lower max_tokens or give it more with --kv-tokens",
            )
        return None

    def receive(self, peer: str, message: wire.Message) -> None:
        """Commit, Cancel or Released of the source `peer`. About an unknown transfer nothing has to be done."""
        arrival = self._arrivals.get((peer, getattr(message, "xfer", -1)))
        if arrival is None:
            return
        match message:
            case wire.Commit():
                if arrival.handoff.awaits(message):
                    arrival.read_ahead(self._vocab)
                    arrival.complete(message)
                actions = arrival.handoff.on_commit(message)
            case wire.Cancel():
                actions = arrival.handoff.on_cancel()
            case wire.Released():
                actions = arrival.handoff.on_released(message)
            case _:
                logger.warning("%s sent %s, which has no meaning from a source", peer, type(message).__name__)
                return
        self._perform(arrival, actions)

    def lost(self, peer: str) -> None:
        """Proof that this source can write no more."""
        for arrival in [a for (p, _), a in self._arrivals.items() if p == peer]:
            self._perform(arrival, arrival.handoff.on_lost())

    def read_ahead(self) -> None:
        """Reads what was granted since the last call, while its pages are being written."""
        unread, self._unread = self._unread, []
        for arrival in unread:
            if not arrival.handoff.closed:
                arrival.read_ahead(self._vocab)

    # ---------------------------------------------------------------------------------------------------- our decisions

    def withdraw(self, request: str, attempt: int, code: str) -> bool:
        """The request was aborted: revokes or refuses its transfer. False when there is none."""
        for arrival in self._arrivals.values():
            offer = arrival.handoff.offer
            if offer.request == request and offer.attempt <= attempt:
                self._perform(arrival, arrival.handoff.revoke(code))
                return True
        return False

    def refuse_deferred(self, code: str, message: str) -> None:
        for arrival in list(self.deferred):
            self._perform(arrival, arrival.handoff.refuse(code, message))

    def candidates(self) -> list[Arrival]:
        """The first offers: as many as may find a seat, and LOOKAHEAD more."""
        return self.deferred[: max(0, self._free_seats) + LOOKAHEAD]

    def defer_rest(self) -> None:
        """Tells the sources of all offers that are not granted yet to wait; each is told once."""
        untold, self._untold = self._untold, []
        for arrival in untold:
            if not arrival.handoff.closed:
                self._perform(arrival, arrival.handoff.defer())

    def try_grant(self, arrival: Arrival) -> Verdict:
        """Grants when there is a row for it soon and its pages fit."""
        if self._free_seats <= 0:
            return Verdict.LATER
        offer = arrival.handoff.offer
        hits = self._account.index.match(offer.block_keys) if self._prefix_cache else []
        new_pages = offer.pages_needed - len(hits)
        cost = new_pages + self._account.idle_among(hits)
        if not self._fits(cost, arrival.growth):
            return Verdict.NO_PAGES
        self._account.hold(hits)
        arrival.reservation = reservation = self._account.reserve(new_pages)
        arrival.pages = hits + reservation.pages
        self.headroom += arrival.growth
        self._generation += 1
        self.deferred.remove(arrival)
        self._unread.append(arrival)
        skip = len(hits) * self._page_tokens
        self._perform(arrival, arrival.handoff.grant(skip, reservation.pages, self._generation))
        return Verdict.TAKEN

    def _perform(self, arrival: Arrival, actions: list[DestinationAction]) -> None:
        handoff = arrival.handoff
        for action in actions:
            match action:
                case Send(message):
                    self._outbox.peer(handoff.peer, False, message)
                    self._observer.replied(arrival, message)
                case Adopt(commit):
                    assert arrival.reservation is not None
                    arrival.reservation.land()
                    self._adopted(arrival, commit)
                    self._let_go(arrival)
                case Free():
                    self._account.drop(arrival.pages)
                    self._let_go(arrival)
        if handoff.state is DestinationState.CLOSED:
            self._arrivals.pop((handoff.peer, handoff.offer.xfer), None)
            if arrival in self.deferred:
                self.deferred.remove(arrival)

    def _let_go(self, arrival: Arrival) -> None:
        """Its pages are somebody else's, or free."""
        arrival.pages = []
        self.headroom -= arrival.growth
