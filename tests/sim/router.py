"""A scripted router: it places requests at random, continues them elsewhere, and checks every answer.

What it does about losses is what any router has to do for the workers' promises to become one answer a request:
an attempt whose prefill or decode worker is lost is continued, unless the other one has adopted it and all tokens of
the lost one are here; what is heard about an attempt that was given up is answered with Abort.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream import wire
from slipstream.types import Request, Tokens

from .cluster import RouterSide, Worker, World
from .model import Violation


@dataclass
class Ticket:
    """One request and what has been heard of it. `tokens` is complete and in order; `early` waits for a gap."""

    request: Request
    expected: list[int]
    finish: str | None  # None when it fails behind the expected tokens
    refusals: set[str]  # error codes that are right answers
    attempt: int = -1
    prefill: str | None = None
    decode: str | None = None
    owner: str | None = None
    tokens: list[int] = field(default_factory=list)
    early: dict[int, Tokens] = field(default_factory=dict)
    first_index: int = 0  # of the attempt
    spoken: set[int] = field(default_factory=set)  # indices heard in this attempt
    ended: str | None = None
    attempts: int = 0
    adoptions: int = 0


class Router(RouterSide):
    """Requests in, checked answers out. `id` changes when the router is restarted."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.id = name
        self.workers: dict[str, Worker] = {}
        self.unusable: set[str] = set()  # draining
        self.tickets: dict[str, Ticket] = {}
        self._unplaced: list[Ticket] = []
        self.alive = True

    # ------------------------------------------------------------------------------------------------------- workers

    def join(self, worker: Worker) -> None:
        self.workers[worker.id] = worker
        waiting, self._unplaced = self._unplaced, []
        for ticket in waiting:
            self.place(ticket)

    def lost(self, worker_id: str) -> None:
        """A worker's link has ended."""
        if not self.alive:
            return
        self.workers.pop(worker_id, None)
        for ticket in list(self.tickets.values()):
            if ticket.ended is None and self._hit_by(ticket, worker_id):
                self._continue(ticket)

    def _hit_by(self, ticket: Ticket, worker_id: str) -> bool:
        if ticket.decode == worker_id:
            return True  # who owns it is not known: the prefill worker may have been told Accepted
        if ticket.prefill != worker_id:
            return False
        return ticket.owner == worker_id or len(ticket.tokens) <= ticket.first_index

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, ticket: Ticket) -> None:
        self.tickets[ticket.request.id] = ticket
        self.place(ticket)

    def place(self, ticket: Ticket) -> None:
        """Submits the next attempt to a random pair, or keeps it until one is there."""
        if ticket.ended is not None or not self.alive:
            return
        rng = self.world.rng
        usable = [w for w in self.workers.values() if w.id not in self.unusable]
        prefills = [w for w in usable if w.role in ("prefill", "both")]
        decodes = [w for w in usable if w.role in ("decode", "both")]
        if not prefills or not decodes:
            self._unplaced.append(ticket)
            return
        prefill, decode = rng.choice(prefills), rng.choice(decodes)
        ticket.attempt += 1
        ticket.attempts += 1
        ticket.prefill, ticket.decode, ticket.owner = prefill.id, decode.id, prefill.id
        ticket.early.clear()
        ticket.spoken.clear()
        ticket.first_index = len(ticket.tokens)
        old = ticket.request
        ticket.request = Request(
            id=old.id,
            prompt_ids=old.prompt_ids,
            sampling=old.sampling,
            output_ids=list(ticket.tokens),
            attempt=ticket.attempt,
            priority=old.priority,
            cache_salt=old.cache_salt,
        )
        request, at = ticket.request, None if prefill is decode else decode.id
        if self.world.tracing:
            self.world.say(f"{self.id} submits {request.id}#{request.attempt} to {prefill.id}, decode at {at}")
        self._send(prefill, lambda: prefill.submit(request, self.id, at))

    def _continue(self, ticket: Ticket) -> None:
        self.world.after(0.3 + self.world.delay(3.0), lambda: self.place(ticket))
        for name in dict.fromkeys((ticket.prefill, ticket.decode)):
            self._abort(name, ticket.request.id, ticket.attempt)
        ticket.owner = None
        ticket.prefill = ticket.decode = None

    def abort(self, ticket: Ticket) -> None:
        """The client has gone."""
        if ticket.ended is None:
            ticket.ended = "aborted"
            for name in dict.fromkeys((ticket.prefill, ticket.decode)):
                self._abort(name, ticket.request.id, ticket.attempt)

    def _abort(self, worker_id: str | None, request: str, attempt: int) -> None:
        worker = self.workers.get(worker_id or "")
        if worker is not None:
            self._send(worker, lambda: worker.core.abort(request, attempt))

    def _send(self, worker: Worker, event) -> None:
        if worker.from_router is not None:
            worker.from_router.send(lambda: worker.post(event))

    # -------------------------------------------------------------------------------------------------------- answers

    def hear(self, worker: Worker, message: wire.Message) -> None:
        if not self.alive:
            return
        match message:
            case wire.StepOutput(tokens=batch):
                for tokens in batch:
                    self._hear_tokens(worker, tokens)
            case wire.Adopted(request=name, attempt=attempt):
                ticket = self._current(worker, name, attempt)
                if ticket is not None:
                    if worker.id != ticket.decode:
                        raise Violation(f"{worker.id} adopted {name}, which {ticket.decode} should decode")
                    ticket.owner = worker.id
                    ticket.adoptions += 1
            case wire.Failed():
                self._hear_failed(worker, message)

    def _current(self, worker: Worker, name: str, attempt: int) -> Ticket | None:
        """The ticket, if this is about its present attempt; else the worker is told to stop."""
        ticket = self.tickets.get(name)
        if ticket is None or ticket.ended == "aborted" or attempt != ticket.attempt or ticket.owner is None:
            self._abort(worker.id, name, attempt)
            return None
        return ticket

    def _hear_tokens(self, worker: Worker, tokens: Tokens) -> None:
        ticket = self._current(worker, tokens.request, tokens.attempt)
        if ticket is None:
            return
        name = f"{tokens.request}#{tokens.attempt} from {worker.id}"
        if ticket.ended == "refused" and worker.id != ticket.owner:
            return  # the first token comes late, the decode worker has failed meanwhile
        if ticket.ended is not None:
            raise Violation(f"{name}: tokens {tokens.token_ids} at {tokens.index} after the end ({ticket.ended})")
        if tokens.index in ticket.spoken:
            raise Violation(f"{name}: index {tokens.index} comes twice")
        if (tokens.cached_tokens is not None) != (tokens.index == ticket.first_index):
            raise Violation(f"{name}: cached_tokens={tokens.cached_tokens} at index {tokens.index}")
        if worker.id == ticket.decode and ticket.owner != worker.id:
            raise Violation(f"{name}: tokens of a request that {worker.id} has not said it adopted")
        ticket.spoken.add(tokens.index)
        ticket.early[tokens.index] = tokens
        while (next_tokens := ticket.early.pop(len(ticket.tokens), None)) is not None:
            self._append(ticket, name, next_tokens)

    def _append(self, ticket: Ticket, name: str, tokens: Tokens) -> None:
        ticket.tokens += tokens.token_ids
        if ticket.tokens != ticket.expected[: len(ticket.tokens)]:
            raise Violation(f"{name}: tokens {ticket.tokens}, expected {ticket.expected}")
        complete = len(ticket.tokens) == len(ticket.expected) and ticket.finish is not None
        if complete != (tokens.finish is not None) or (complete and tokens.finish != ticket.finish):
            raise Violation(
                f"{name}: finish={tokens.finish} after {len(ticket.tokens)} of {len(ticket.expected)} tokens"
            )
        if complete:
            ticket.ended = "answered"

    def _hear_failed(self, worker: Worker, failed: wire.Failed) -> None:
        ticket = self._current(worker, failed.request, failed.attempt)
        if ticket is None or ticket.ended is not None or ticket.owner != worker.id:
            return
        if failed.code == "no_workers":
            self.unusable.add((ticket.decode if "decode worker" in failed.message else worker.id) or "")
        if failed.retriable and ticket.attempts < 200:
            self._continue(ticket)
            return
        if failed.code not in ticket.refusals:
            raise Violation(f"{failed.request}: failed with {failed.code} ({failed.message})")
        ticket.ended = "refused"
