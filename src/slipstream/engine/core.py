"""The engine without the engine room: everything a worker decides, and nothing that computes, waits or sends.

The loop of a worker feeds it what arrives, asks for a plan, has it executed, and settles the outcome:

    core.submit(...), core.from_source(...), core.copies_done(...), ...      whatever has happened
    plan = core.schedule()                                                    also when idle: grants are decided here
    carry out core.take_effects()                                             offers leave before the chunk is computed
    runner.launch(plan)                                                       nothing to do when the plan is None
    core.launched(plan, behind), take_effects()                               where copies can wait for a step: on GPUs
    core.settle(plan, runner.collect())                                       or core.step_failed(plan, reason)
    carry out core.take_effects()                                             tokens, copies of the chunk, commits
    core.catch_up()                                                           now and then, when nobody waits

Events may come at any time. One more step may be scheduled before the last is settled, so that a device need not wait
for the host: it goes on from where that one will end, with every sequence whose next token can be sampled without the
host knowing the last. A sequence that turns out to have ended is computed once too often then: what that step brings
for it is dropped, and until the last step that computes it is settled it keeps its pages and its row. Steps are
settled in their order.

A step that fails is blamed on nobody (see `flights`): each of its sequences is computed again in a step of its own.
One that fails so gets engine_failure and is not tried elsewhere, where it would do the same.

Every request that `submit` takes ends with exactly one answer from its owner: a Tokens with `finish`, or Failed; an
aborted one, and all of a lost router, with none. Handed over to a peer, the peer owns it (it says Adopted first). A
router that hears from a worker about a request or attempt it has given up sends Abort for it.
"""

from __future__ import annotations

import logging

import numpy as np

from slipstream import wire
from slipstream.engine.admission import Admission
from slipstream.engine.effects import Effect, Outbox
from slipstream.engine.flights import Flights, Work
from slipstream.engine.incoming import Arrival, Incoming
from slipstream.engine.observe import NoObserver, Observer
from slipstream.engine.outgoing import Outgoing, Owner
from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.engine.rows import RowTable
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Phase, Sequence
from slipstream.engine.terms import CHUNK_TOKENS, TAIL_BYTES, EngineNumbers, Terms
from slipstream.errors import REQUEST_ERRORS
from slipstream.kv.layout import KVLayout
from slipstream.kv.pages import PageAccount, PageAudit, PageState
from slipstream.kv.prefix import Changes, PrefixIndex, root_key
from slipstream.transfer.job import Behind
from slipstream.types import FinishReason, Logprob, Request

logger = logging.getLogger(__name__)


class EngineCore:
    """One worker's requests, pages and transfers. Used by one thread.

    `pages` counts the scratch page. `headroom_tokens` of growth are kept free for every sequence that decodes or will
    soon when new work is admitted. `vocab` is the number of token ids the model has; requests that hold others are
    refused. `step_tokens` bounds the tokens of a plan: `chunk_tokens`, or one for each decoding
    sequence and a page of prompt where that is more.
    """

    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        settings: EngineNumbers,
        eos_ids: tuple[int, ...],
        *,
        headroom_tokens: int = 64,
        vocab: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer = observer or NoObserver()
        self.page_tokens = layout.page_tokens
        self.max_model_len = settings.max_model_len or (pages - 1) * layout.page_tokens
        chunk_tokens = settings.chunk_tokens or CHUNK_TOKENS
        self.step_tokens = max(chunk_tokens, settings.max_sequences + min(chunk_tokens, layout.page_tokens))
        self.draining = False
        self._fingerprint = layout.fingerprint
        self._eos_ids = eos_ids
        self._index = PrefixIndex()
        self._account = PageAccount(pages, self._index)
        self._terms = Terms(self.page_tokens, self._account.total, self.max_model_len, settings.max_waiting, vocab)
        table_width = -(-self.max_model_len // self.page_tokens)
        self._rows = RowTable(settings.max_sequences, table_width, self.page_tokens, eos_ids)
        self._outbox = Outbox()
        self._outgoing = Outgoing(
            self._outbox, Owner(self._handed_over, self._fail, self._release), self.page_tokens, observer
        )
        self._scheduler = Scheduler(
            self._account,
            self._rows,
            page_tokens=self.page_tokens,
            chunk_tokens=chunk_tokens,
            mixed_chunk_tokens=min(settings.mixed_chunk_tokens or chunk_tokens, chunk_tokens),
            headroom_tokens=headroom_tokens,
            tail_tokens=TAIL_BYTES // layout.token_bytes,
            prefix_cache=settings.prefix_cache,
            fits=lambda cost, growth: self._admission.fits(cost, growth),
            withdraw=lambda sequence: self._outgoing.cancel(sequence, "worker_lost"),
            give_up=self._outgrown,
            observer=observer,
        )
        self._incoming = Incoming(
            self._outbox,
            self._account,
            self._scheduler,
            page_tokens=self.page_tokens,
            max_model_len=self.max_model_len,
            max_sequences=settings.max_sequences,
            prefix_cache=settings.prefix_cache,
            vocab=self._terms.token_ids,
            fits=lambda cost, growth: self._admission.fits(cost, growth),
            adopted=self._adopt,
            observer=observer,
        )
        self._admission = Admission(self._account, self._scheduler, self._incoming, self._outgoing)
        self._live: dict[str, Sequence] = {}  # by request id: those that may still need an answer from here
        self._unregistered: list[Sequence] = []  # adopted; what they have computed has no name yet
        self._saltless = root_key(layout.fingerprint)
        self._ending: set[Sequence] = set()  # ended, but a step or a copy still uses their pages
        self._flights = Flights(self._rows, self._scheduler, observer, lambda sequence: self._release(sequence))

    def limit_mixed(self, tokens: int) -> None:
        """From now on steps in which sequences decode hold so many tokens at most, or what they need to go on."""
        self._scheduler.limit_mixed(tokens)

    # --------------------------------------------------------------------------------------------------- from routers

    def submit(self, request: Request, router: str, decode_at: str | None = None) -> None:
        """Takes a request. `decode_at` is the id of the peer that shall decode it, None for this worker."""
        known = self._live.get(request.id)
        if known is not None and known.request.attempt >= request.attempt:
            logger.warning("request %s attempt %d was submitted twice; ignored", request.id, request.attempt + 1)
            return
        if known is not None:
            self._end(known, "superseded")
        arrival = self._scheduler.next_arrival()
        root = self._root(request.cache_salt)
        sequence = Sequence(request, router, decode_at, arrival, root, self._eos_ids, self.max_model_len)
        self._observer.submitted(sequence)
        refusal = self._terms.refusal(sequence, len(self._scheduler.waiting), self.draining)
        if refusal is not None:
            self._answer_failed(sequence, *refusal)
        elif len(sequence.tokens) >= sequence.limit:
            self._outbox.tokens(router, sequence.message(len(sequence.tokens), finish="length"))
            self._observer.ended(sequence, "finished")
        else:
            self._live[request.id] = sequence
            self._scheduler.enter(sequence, Phase.WAITING)

    def _root(self, cache_salt: str) -> bytes:
        return root_key(self._fingerprint, cache_salt) if cache_salt else self._saltless

    def abort(self, request_id: str, attempt: int) -> None:
        """Ends a request without an answer, wherever it is; an unknown one, or a newer attempt, is left alone."""
        sequence = self._live.get(request_id)
        if sequence is not None and sequence.request.attempt <= attempt:
            self._end(sequence, "client_closed_request")
        self._incoming.withdraw(request_id, attempt, "client_closed_request")

    def router_lost(self, router: str) -> None:
        """Nobody is there to be answered: ends all requests of this router."""
        for sequence in [s for s in self._live.values() if s.router == router]:
            self._end(sequence, "client_closed_request")

    def drain(self) -> None:
        """Takes no more requests or offers; what is here is finished."""
        self.draining = True
        self._incoming.refuse_deferred("no_workers", "the decode worker is draining")

    # ----------------------------------------------------------------------------------------------------- from peers

    def from_destination(self, peer_id: str, message: wire.Message) -> None:
        """Grant, Defer, Refuse, Accepted or Revoke of a peer that we are the source to."""
        self._outgoing.receive(peer_id, message)

    def from_source(self, peer_id: str, message: wire.Message) -> None:
        """Offer, Commit, Cancel or Released of a peer that we are the destination to."""
        if isinstance(message, wire.Offer):
            draining = ("no_workers", "the decode worker is draining")
            self._incoming.offer(peer_id, message, draining if self.draining else None)
        else:
            self._incoming.receive(peer_id, message)

    def destination_lost(self, peer_id: str) -> None:
        """The link to this peer is gone. Copies under way to it are still answered, each by done or failed."""
        self._outgoing.lost(peer_id)
        for sequence in [s for s in self._scheduler.waiting if s.destination == peer_id and not s.ends_with_next_token]:
            self._fail(sequence, "worker_lost", f"the decode worker {peer_id} was lost")

    def source_lost(self, peer_id: str) -> None:
        """Proof that this peer writes no more: its process has ended, or it has closed its mapping of our pool.

        Has to come before anything from a new link of the same peer.
        """
        self._incoming.lost(peer_id)

    def catch_up(self) -> None:
        """Does what is left of grants and commits that nobody waits for. For a loop that has delivered the effects;
        nothing goes wrong without it, but later."""
        self._incoming.read_ahead()
        unregistered, self._unregistered = self._unregistered, []
        for sequence in unregistered:
            if sequence.pages:
                self._scheduler.register(sequence)

    # -------------------------------------------------------------------------------------------------- from the mover

    def copies_done(self, peer_id: str, xfer: int, count: int) -> None:
        """The job of one CopyPages effect is visible at the peer. `count` is its number of pages."""
        self._outgoing.copied(xfer, None)

    def copies_failed(self, peer_id: str, xfer: int, reason: str) -> None:
        """The job of one CopyPages effect has failed, and nothing of it can arrive any more."""
        self._outgoing.copied(xfer, reason)

    # -------------------------------------------------------------------------------------------------------- the step

    def schedule(self) -> StepPlan | None:
        """The next step; also decides which offers are granted.

        None when there is nothing to compute now; if a step is under way, ask again when it is settled.
        """
        flights = self._flights
        if flights.careful:
            if flights:
                return None
            suspect = flights.suspect()
            if suspect is not None:
                return flights.launch(suspect)
        if self._scheduler.idle and not self._incoming.deferred:
            return None
        begun = self._scheduler.begin(busy=bool(flights))
        if begun is None:
            return None
        decodes, rows = begun
        self._admission.serve(busy=bool(flights))
        chunks = self._scheduler.take_chunks()
        return flights.launch(Work(decodes, rows, chunks)) if decodes or chunks else None

    def answer_offers(self) -> None:
        """Decides on offers of peers between two steps, for a loop that makes no step now because some are under way.

        As `schedule` does, but nothing of ours begins.
        """
        if self._incoming.deferred and not self._flights.careful:
            self._scheduler.end_step()
            self._admission.serve(busy=bool(self._flights))

    @property
    def handing_over(self) -> bool:
        """Whether `launched` has anything to say. For any thread, without the turn."""
        return len(self._outgoing) > 0

    def launched(self, plan: StepPlan, behind: Behind) -> None:
        """The device has been given this plan: what it will compute of prompts can be copied behind it, now.

        For devices that keep an order of steps and copies; elsewhere copies start when the plan is settled.
        """
        flight = self._flights.find(plan)
        if flight is None:
            return
        ends = plan.context_lens[len(flight.decodes) :].tolist()
        for (sequence, _), end in zip(flight.chunks, ends, strict=True):
            if sequence.phase is not Phase.ENDED:
                self._outgoing.computing(sequence, end, behind)

    def settle(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Takes the outcome of the plan: tokens go to the routers, full pages to their destinations."""
        if outcome.step != plan.step:
            raise ValueError(f"outcome of step {outcome.step} given for step {plan.step}")
        flight = self._flights.land(plan)
        self._observer.settled(plan.step, flight.decodes, flight.chunks)
        self._rows.settle(plan.rows[plan.sample], outcome.token_ids[plan.sample])
        tokens = outcome.token_ids.tolist()
        logprobs = outcome.logprobs
        unsound = set(np.flatnonzero(plan.sample & (outcome.token_ids < 0)).tolist())
        for i, sequence in enumerate(flight.decodes):
            if self._flights.back(sequence) and not (i in unsound and self._unsound(sequence)):
                sequence.computed += 1
                if sequence.computed % self.page_tokens == 0:
                    self._scheduler.register(sequence)
                self._next_token(sequence, tokens[i], logprobs[i])
        for i, (sequence, count) in enumerate(flight.chunks, len(flight.decodes)):
            if self._flights.back(sequence) and not (i in unsound and self._unsound(sequence)):
                if i in plan.prompt_logprobs:
                    self._keep_prompt_logprobs(sequence, outcome.prompt_logprobs[i])
                sequence.computed += count
                self._scheduler.register(sequence)
                if sequence.computed < len(sequence.tokens):
                    self._outgoing.progress(sequence)
                else:
                    self._prompt_done(sequence, tokens[i], logprobs[i])

    def _unsound(self, sequence: Sequence) -> bool:
        """Fails a sequence for which the model has computed no numbers."""
        reason = "the model's logits are not finite for this prompt; the weights or the chosen dtype do not suit it"
        self._fail(sequence, "engine_failure", reason, retriable=False)
        return True

    def step_failed(self, plan: StepPlan, reason: str) -> None:
        """The plan could not be executed: its sequences are computed again one by one; one that was has failed.

        A step that was scheduled behind it is void: its outcome must not be settled. The next plan repeats what these
        said of rows that are still in use, so a runner takes a new row for one it may know already, and a freed one
        that it does not know.
        """
        for sequence in self._flights.prompts():
            self._outgoing.rewind(sequence)
        for sequence in self._flights.void(plan):
            self._fail(sequence, "engine_failure", reason, retriable=False)

    def _keep_prompt_logprobs(self, sequence: Sequence, values: list[Logprob | None]) -> None:
        if sequence.prompt_logprobs is None:
            sequence.prompt_logprobs = [None]  # of the first token there is none
        room = sequence.prompt_tokens - len(sequence.prompt_logprobs)
        sequence.prompt_logprobs += values[:room]

    def _prompt_done(self, sequence: Sequence, token: int, logprob: Logprob | None) -> None:
        """All tokens are computed and the next is sampled: the sequence decodes here, or goes to its destination."""
        self._observer.sampled(sequence)
        if sequence.handoff is None:
            self._next_token(sequence, token, logprob)
            return
        self._scheduler.shift(sequence, Phase.HANDOFF)
        self._rows.release(sequence)
        self._next_token(sequence, token, logprob)
        if sequence.phase is Phase.HANDOFF:
            self._outgoing.complete(sequence)

    def _next_token(self, sequence: Sequence, token: int, logprob: Logprob | None) -> None:
        """Appends a sampled token, tells the router, and ends the sequence where it ends."""
        tokens = sequence.tokens
        index = len(tokens)
        tokens.append(token)
        finish: FinishReason | None = None
        if token in sequence.stops and index >= sequence.min_length:
            finish = "stop"
        elif index + 1 >= sequence.limit:
            finish = "length"
        self._outbox.tokens(sequence.router, sequence.message(index, finish, logprob))
        if finish is not None:
            self._end(sequence, "finished")

    # ------------------------------------------------------------------------------------------------------ the ends

    def _adopt(self, arrival: Arrival, commit: wire.Commit) -> None:
        """A peer has committed: the request is ours, its KV is in the pages of the grant."""
        request = commit.request
        known = self._live.get(request.id)
        if known is not None:
            self._end(known, "superseded")
        sequence = Sequence(
            request, commit.router, None, arrival.key[1], self._root(request.cache_salt), self._eos_ids,
            self.max_model_len, arrival.ids, None if arrival.ids is None else arrival.tokens,
        )  # fmt: skip
        foreign = self._terms.foreign_arrival(arrival, sequence)
        if foreign is not None:
            self._account.drop(arrival.pages)
            self._answer_failed(sequence, *foreign)
            return
        sequence.pages, sequence.page_ids, sequence.reservation = arrival.pages, arrival.page_ids, arrival.reservation
        sequence.keys = arrival.handoff.offer.block_keys.copy()
        sequence.computed = len(sequence.tokens) - 1
        sequence.spoke = True
        self._unregistered.append(sequence)
        self._live[request.id] = sequence
        self._scheduler.enter(sequence, Phase.LANDED)
        self._observer.adopted(sequence, arrival, commit)
        self._outbox.router(commit.router, wire.Adopted(request=request.id, attempt=request.attempt))

    def _handed_over(self, sequence: Sequence) -> None:
        if sequence.phase is not Phase.ENDED:
            self._observer.handed_over(sequence)
            self._forget(sequence)

    def _fail(self, sequence: Sequence, code: str, message: str, *, retriable: bool = True) -> None:
        """Answers for a request that cannot go on here, unless it has ended."""
        if sequence.phase is not Phase.ENDED:
            self._answer_failed(sequence, code, message, retriable)
            self._end(sequence, code)

    def _outgrown(self, sequence: Sequence) -> None:
        """It has lost its pages while it waited for its destination, and with its first token needs more than all."""
        self._fail(
            sequence,
            "engine_failure",
            f"{len(sequence.tokens)} tokens have to be computed again, this worker has KV pages for "
            f"{self._account.total * self.page_tokens}; give it more with --kv-tokens",
        )

    def _answer_failed(self, sequence: Sequence, code: str, message: str, retriable: bool | None = None) -> None:
        self._observer.failed(sequence, code, message)
        name, attempt = sequence.identity
        if retriable is None:
            retriable = REQUEST_ERRORS[code].retriable
        failed = wire.Failed(request=name, attempt=attempt, code=code, message=message, retriable=retriable)
        self._outbox.router(sequence.router, failed)

    def _end(self, sequence: Sequence, code: str) -> None:
        """Ends a sequence in whatever phase; its pages go when no step and no copy uses them."""
        self._observer.ended(sequence, code)
        self._forget(sequence)
        self._outgoing.cancel(sequence, code)
        self._release(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.leave(sequence)
        sequence.phase = Phase.ENDED
        self._live.pop(sequence.request.id, None)
        self._ending.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Takes row and pages of an ended sequence back, if nothing uses them any more."""
        if sequence.phase is not Phase.ENDED or sequence.in_flight:
            return
        self._rows.release(sequence)
        if sequence.handoff is None:
            self._scheduler.register(sequence)  # an adopted one may not have been
            sequence.occupy()
            self._account.drop(sequence.pages)
            sequence.pages = []
            self._ending.discard(sequence)

    # ------------------------------------------------------------------------------------------------------ reporting

    def take_effects(self) -> list[Effect]:
        """What has to be done outside, in order."""
        return self._outbox.take()

    @property
    def idle(self) -> bool:
        """Whether no request and no transfer is here."""
        return not (self._live or self._ending or len(self._incoming) or len(self._outgoing))

    @property
    def preemptions(self) -> int:
        """How often a sequence has given up its pages to be computed again, since the start."""
        return self._scheduler.preemptions

    def stages(self) -> dict[str, int]:
        """Requests here by stage; `offered` and `granted` are those of peers that are on their way."""
        scheduler = self._scheduler
        return {
            "waiting": len(scheduler.waiting),
            "prefilling": len(scheduler.prefilling),
            "handing_off": len(scheduler.handing_off),
            "offered": len(self._incoming.deferred),
            "granted": self._incoming.granted,
            "landed": len(scheduler.landed),
            "decoding": len(scheduler.decoding),
        }

    def page_state(self, page: int) -> PageState:
        return self._account.state(page)

    def granted_pages(self, peer_id: str, xfer: int) -> list[int]:
        """The pages that this source may write under this transfer now; empty without a live grant."""
        return self._incoming.granted_pages(peer_id, xfer)

    def status(self) -> wire.Status:
        """Load, and the block keys that entered or left the prefix cache since the last call."""
        self.catch_up()
        return self._status(self._index.take_changes())

    def status_for_new_router(self) -> wire.Status:
        """Load and all block keys, for a router that knows none; takes nothing from the next `status`."""
        self.catch_up()
        return self._status(Changes(added=self._index.keys(), reset=True))

    def _status(self, changes: Changes) -> wire.Status:
        return self._admission.status(self.draining, changes)

    def audit(self) -> PageAudit:
        """Compares the page account with what sequences and transfers hold."""
        holders = [(repr(s), s.pages) for s in {*self._live.values(), *self._ending}]
        audit = self._account.audit([*holders, *self._incoming.holders()])
        audit.problems.extend(self._incoming.problems())
        if self.idle and not audit.settled:
            audit.problems.append(
                f"idle, but {audit.total - audit.free - audit.cached} pages are neither free nor cached"
            )
        return audit
