"""Seeds to scenarios: a cluster, requests and trouble, all drawn from one number; and the checks when it is over."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.types import Request, SamplingParams

from .cluster import Channel, Link, Numbers, Trouble, Worker, World
from .model import EOS, VOCABULARY, Violation, answer
from .router import Router, Ticket

TOPOLOGIES = (
    ("prefill", "decode"),
    ("prefill", "decode"),
    ("prefill", "prefill", "decode", "decode"),
    ("prefill", "decode", "decode"),
    ("both", "both"),
    ("both", "both"),
    ("both",),
    ("prefill", "both"),
)
CHAOS = 30.0  # no new trouble after this time


@dataclass
class Result:
    """What a seed did, so that a test can see that the seeds are not all peaceful."""

    answered: int = 0
    aborted: int = 0
    refused: int = 0
    attempts: int = 0
    preemptions: int = 0
    adoptions: int = 0
    kills: int = 0
    losses: int = 0
    events: int = 0

    def add(self, other: Result) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Scenario:
    """One seed."""

    def __init__(self, seed: int, *, trace: bool = False, premature_proof: bool = False) -> None:
        self.seed = seed
        self.world = World(seed, trace)
        rng = self.world.rng
        self.numbers = _numbers(rng, depth=1 + seed % 2, ordered=seed % 4 > 1)
        self.trouble = _trouble(rng)
        if self.numbers.ordered and rng.random() < 0.5:  # steps that fail with copies behind them
            self.trouble = replace(self.trouble, step_failures=0.2, copy_delay=10.0)
        self.trouble.premature_proof = premature_proof
        self.result = Result()
        self.workers: list[Worker] = []
        self.tickets: list[Ticket] = []
        self._incarnations = 0
        self._routers = 1
        self.router = Router(self.world, "router1")
        roles = rng.choice(TOPOLOGIES)
        for role in roles:
            self._start_worker(role)
        self._requests(rng.choice((2, 4, 7, 11)))
        self._plan_trouble()
        if trace:
            self.world.say(f"seed {seed}: {roles} {self.numbers} {self.trouble}")

    # --------------------------------------------------------------------------------------------------------- set-up

    def _start_worker(self, role: str) -> None:
        self._incarnations += 1
        worker = Worker(self.world, f"{role}{self._incarnations}", role, self.numbers, self.trouble)
        for other in self.workers:
            if not other.alive:
                continue
            if role != "decode" and other.role != "prefill":
                Link(self.world, worker, other)
            if role != "prefill" and other.role != "decode":
                Link(self.world, other, worker)
        self.workers.append(worker)
        self._meet(worker)

    def _meet(self, worker: Worker) -> None:
        worker.router = self.router
        worker.to_router = Channel(self.world, self.trouble.delay)
        worker.from_router = Channel(self.world, self.trouble.delay)
        self.router.join(worker)

    def _requests(self, count: int) -> None:
        rng = self.world.rng
        stems = [[rng.randint(EOS + 1, EOS + VOCABULARY) for _ in range(16)] for _ in range(2)]
        longest = (self.numbers.pages - 1) * self.numbers.page_tokens
        for i in range(count):
            prompt = rng.choice(stems)[: rng.choice((0, 4, 8, 12, 16))]
            prompt = prompt + [rng.randint(EOS + 1, EOS + VOCABULARY) for _ in range(rng.randint(1, 8))]
            sampling = SamplingParams(
                max_tokens=rng.choice((1, 2, 6, 12, 24)),
                min_tokens=rng.choice((0, 0, 3)),
                ignore_eos=rng.random() < 0.6,
                stop_token_ids=(EOS + 1,) if rng.random() < 0.2 else (),
                min_p=0.5 if (self.seed + 7 * i) % 23 == 0 else 0.0,  # for the pretend model: may have no finite logits
            )
            request = Request(id=f"r{i}", prompt_ids=prompt, sampling=sampling, priority=rng.choice((0, 0, 0, -1)))
            expected, finish = answer(request, self.numbers.max_model_len)
            refusals = {"engine_failure"} if finish is None else set()
            most = min(len(prompt) + sampling.max_tokens, self.numbers.max_model_len) - 1
            if most > longest or len(prompt) >= self.numbers.max_model_len:
                refusals.add("context_length_exceeded")
            ticket = Ticket(request, expected, finish, refusals)
            self.tickets.append(ticket)
            self.world.at(rng.random() * rng.choice((2.0, 15.0)), lambda t=ticket: self._submit(t))
            if rng.random() < 0.12:
                self.world.at(rng.random() * CHAOS, lambda t=ticket: self.router.abort(t))

    def _submit(self, ticket: Ticket) -> None:
        self.router.submit(ticket)

    # -------------------------------------------------------------------------------------------------------- trouble

    def _plan_trouble(self) -> None:
        rng = self.world.rng
        kinds: list[Callable[[], None]] = [self._kill, self._kill, self._lose_link, self._lose_link, self._drain]
        kinds.append(self._kill_router)
        if rng.random() < 0.35:
            return
        for _ in range(rng.randint(1, 3)):
            self.world.at(rng.random() * CHAOS, rng.choice(kinds))

    def _kill(self) -> None:
        self._kill_worker(self.world.rng.choice(self.workers))

    def _kill_worker(self, worker: Worker) -> None:
        if not worker.alive:
            return
        world = self.world
        self.result.kills += 1
        self.result.preemptions += worker.core.preemptions
        if world.tracing:
            world.say(f"{worker.id} dies")
        worker.alive = False
        for link in worker.links:
            link.lose(relink=False)
            link.prove()  # of one that was lost before, and whose source has not come to hear of it
        if worker.to_router is not None and worker.from_router is not None:
            worker.from_router.cut(0.0)
            router = self.router
            world.at(worker.to_router.cut(2.0), lambda: router.lost(worker.id))
        world.after(1.0 + world.rng.random() * 6.0, lambda: self._start_worker(worker.role))

    def _lose_link(self) -> None:
        links = [link for w in self.workers if w.alive for link in w.out.values()]
        if links:
            self.result.losses += 1
            self.world.rng.choice(links).lose(relink=True)

    def _drain(self) -> None:
        worker = self.world.rng.choice(self.workers)
        if not worker.alive:
            return
        if self.world.tracing:
            self.world.say(f"{worker.id} drains")
        self.router.unusable.add(worker.id)
        worker.post(worker.core.drain)
        self.world.after(20.0, lambda: self._kill_worker(worker))

    def _kill_router(self) -> None:
        """The router dies with its requests; another takes its place and knows nothing."""
        if self.world.tracing:
            self.world.say(f"{self.router.id} dies")
        old = self.router
        old.alive = False
        for ticket in old.tickets.values():
            ticket.ended = ticket.ended or "forgotten"
        self._routers += 1
        self.router = Router(self.world, f"router{self._routers}")
        self.router.unusable = old.unusable
        for worker in self.workers:
            if not worker.alive or worker.to_router is None or worker.from_router is None:
                continue
            worker.to_router.cut(0.0)
            end = worker.from_router.cut(2.0)
            worker.router = None
            self.world.at(end, lambda w=worker: w.post(lambda: w.core.router_lost(old.id)))
            self.world.at(end + 0.5, lambda w=worker: self._meet(w) if w.alive else None)

    # ------------------------------------------------------------------------------------------------------ the checks

    def run(self) -> Result:
        """Plays the seed to its end. Raises Violation (or whatever the engine raised)."""
        self.world.run()
        for ticket in self.tickets:
            if ticket.ended is None:
                raise Violation(
                    f"{ticket.request.id} was never answered: attempt {ticket.attempt} at {ticket.prefill} and "
                    f"{ticket.decode}, {len(ticket.tokens)} of {len(ticket.expected)} tokens"
                )
            self.result.attempts += ticket.attempts
            self.result.adoptions += ticket.adoptions
            self.result.answered += ticket.ended == "answered"
            self.result.aborted += ticket.ended == "aborted"
            self.result.refused += ticket.ended == "refused"
        for worker in self.workers:
            if not worker.alive:
                continue
            worker.check()
            audit = worker.core.audit()
            if not worker.core.idle or not audit.settled:
                raise Violation(f"{worker.id} is not idle when the dust has settled: {audit}")
            self.result.preemptions += worker.core.preemptions
        self.result.events = self.world.events
        return self.result


def _numbers(rng: random.Random, depth: int, ordered: bool) -> Numbers:
    """Small pools: mostly with room for one of the longest requests and a little more, sometimes not even for it."""
    page_tokens = rng.choice((2, 4, 4))
    longest = rng.choice((24, 40))
    return Numbers(
        page_tokens=page_tokens,
        pages=longest // page_tokens + rng.choice((-2, 1, 2, 3, 4, 6, 12, 20)),
        chunk_tokens=rng.choice((3, 4, 8, 16)),
        max_sequences=rng.choice((2, 3, 4, 6)),
        max_model_len=longest,
        prefix_cache=rng.random() < 0.85,
        headroom_tokens=rng.choice((0, 0, 2, 8)),
        depth=depth,
        ordered=ordered,
        mixed_chunk_tokens=rng.choice((0, 0, 3, 8)),
    )


def _trouble(rng: random.Random) -> Trouble:
    calm = Trouble(
        delay=rng.choice((0.2, 2.0, 6.0)),
        copy_delay=rng.choice((0.5, 4.0, 10.0)),
        eager=rng.random() < 0.5,
    )
    if rng.random() < 0.4:
        return calm
    return replace(
        calm,
        copy_failures=rng.choice((0.0, 0.05, 0.3)),
        step_failures=rng.choice((0.0, 0.0, 0.02)),
        forged=rng.choice((0.0, 0.2)),
    )


def play(seed: int, **options: bool) -> Result:
    """Runs one seed. A failure says how to see it again."""
    scenario = Scenario(seed, **options)
    try:
        return scenario.run()
    except Exception as error:
        raise Violation(
            f"seed {seed} at {scenario.world.now:.3f}: {type(error).__name__}: {error}\n"
            f"replay with a trace: python -m tests.sim.replay {seed}"
        ) from error
