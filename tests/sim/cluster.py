"""A cluster of engine cores on a virtual clock.

Workers run the loop of a real one (receive, schedule, compute, settle) over a pretend model. Links keep the order of
their messages and nothing else: each message is delayed at random, a link may be lost with what is in flight, a worker
may die and come back as another. The mover copies pages at some time between its orders and its reports, and some of
its jobs fail, with all, some or garbage of their pages written.

What is checked while it runs: a page is written only under a live grant; a source page is not given away while a copy
reads it; every plan is consistent and attends to committed pages only; every page account is sound.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream import wire
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import CopyPages, ToPeer, ToRouter
from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.kv.layout import KVLayout
from slipstream.kv.pages import PageState
from slipstream.transfer.job import Behind

from .model import PretendModel, Violation

EVENTS = 60_000  # a seed that takes more is taken for a livelock


@dataclass(frozen=True)
class Numbers:
    """The settings of the engine cores of one seed."""

    page_tokens: int = 4
    pages: int = 16
    chunk_tokens: int = 8
    mixed_chunk_tokens: int = 0
    max_sequences: int = 3
    max_waiting: int = 64
    max_model_len: int = 40
    prefix_cache: bool = True
    headroom_tokens: int = 4
    depth: int = 1  # steps that are launched before the first of them is settled
    ordered: bool = False  # the device keeps an order of steps and copies, as GPUs do: copies are begun behind steps


@dataclass
class Trouble:
    """How hostile the world of one seed is."""

    delay: float = 3.0  # messages take up to this long; a step takes up to 2
    copy_delay: float = 6.0
    copy_failures: float = 0.0
    step_failures: float = 0.0
    forged: float = 0.0  # share of grants behind which a stale Released of another generation turns up
    eager: bool = False  # messages reach the core also while a step runs
    premature_proof: bool = False  # mutant: a lost link is taken as proof that the source writes no more


class World:
    """Clock, random numbers and trace."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.tracing = trace
        self.lines: list[str] = []
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        self.events += 1
        heapq.heappush(self._heap, (max(time, self.now), self.events, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def delay(self, most: float) -> float:
        """Mostly short, sometimes long."""
        return most * self.rng.random() ** 3

    def say(self, text: str) -> None:
        self.lines.append(f"{self.now:9.3f}  {text}")

    def run(self) -> None:
        heap = self._heap
        while heap:
            self.now, _, action = heapq.heappop(heap)
            action()
            if self.events > EVENTS:
                raise Violation(f"{EVENTS} events and no end: a livelock")


class Channel:
    """One direction of a link: ordered, delayed, and cut with what is in flight."""

    def __init__(self, world: World, most: float) -> None:
        self._world = world
        self._most = most
        self._last = 0.0
        self.cut_at = float("inf")

    def send(self, deliver: Callable[[], None]) -> None:
        world = self._world
        if world.now >= self.cut_at:
            return
        self._last = max(self._last, world.now + world.delay(self._most))
        world.at(self._last, lambda: self._arrive(deliver))

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if self._world.now < self.cut_at:
            deliver()

    def cut(self, within: float) -> float:
        """Ends the channel soon: what is delivered before that arrives, the rest is lost. Returns when."""
        self.cut_at = min(self.cut_at, self._world.now + self._world.rng.random() * within)
        return self.cut_at


@dataclass(eq=False)
class Launched:
    """A step under way; `outcome` is there when the device has done it."""

    plan: StepPlan
    outcome: StepOutcome | None = None
    failed: bool = False
    behind: Behind = field(init=False)
    waiting: list[Callable[[], None]] = field(default_factory=list)  # what begins when it is done

    def __post_init__(self) -> None:
        self.behind = Behind(self)

    def over(self) -> None:
        """The device has done it, or given it up."""
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            action()


class RouterSide:
    """What a worker's link to the router ends in; see `router.Router`."""

    id: str

    def hear(self, worker: Worker, message: wire.Message) -> None: ...


class Worker:
    """One incarnation of a worker."""

    def __init__(self, world: World, name: str, role: str, numbers: Numbers, trouble: Trouble) -> None:
        self.world = world
        self.id = name
        self.role = role
        self.numbers = numbers
        self.trouble = trouble
        layout = KVLayout(
            page_tokens=numbers.page_tokens, layers=1, kv_heads=1, head_dim=4, dtype="float32", total_kv_heads=1
        )
        self.core = EngineCore(layout, numbers.pages, numbers, (2,), headroom_tokens=numbers.headroom_tokens)
        self.model = PretendModel(self.core, numbers.pages, numbers.page_tokens, world.rng, numbers.depth)
        self.alive = True
        self.router: RouterSide | None = None
        self.to_router: Channel | None = None
        self.from_router: Channel | None = None
        self.out: dict[str, Link] = {}  # links on which we are the source, by peer id
        self.into: dict[str, Link] = {}
        self.links: list[Link] = []  # all that there ever were
        self._under_way: deque[Launched] = deque()
        self._spared = 0  # steps that will not fail
        self._woken = False
        self._inbox: list[Callable[[], None]] = []

    # ------------------------------------------------------------------------------------------------------- the loop

    def post(self, event: Callable[[], None]) -> None:
        """Something happens to the core: at once, or behind the step that runs, as a real loop has it."""
        if not self.alive:
            return
        if self._under_way and not self.trouble.eager:
            self._inbox.append(event)
            return
        event()
        if self._under_way:
            self.core.answer_offers()
            self.deliver()
        else:
            self.wake()
        if self.world.events % 3 == 0:  # sooner, later or never, as behind a busy loop
            self.core.catch_up()

    def wake(self) -> None:
        if not self._woken and len(self._under_way) < self.numbers.depth:
            self._woken = True
            self.world.after(self.world.delay(0.2), self._loop)

    def _loop(self) -> None:
        """Launches steps until there are enough of them, then waits for the oldest."""
        self._woken = False
        if not self.alive or len(self._under_way) >= self.numbers.depth:
            return
        plan = self.core.schedule()
        if self.world.tracing:
            self._trace(plan)
        self.deliver()
        if plan is None:
            return
        self._under_way.append(Launched(plan))
        if self.numbers.ordered:
            self.core.launched(plan, self._under_way[-1].behind)
            self.deliver()
        if self.world.rng.random() < 0.5:
            self._compute(len(self._under_way))
        self.world.after(0.1 + self.world.delay(2.0), self._settle)
        if len(self._under_way) < self.numbers.depth:
            self.wake()

    def _compute(self, steps: int) -> None:
        """The device does the first steps, in their order."""
        for launched in list(self._under_way)[:steps]:
            if launched.outcome is None:
                launched.outcome = self.model.execute(launched.plan)
                if not self._spared and self.world.rng.random() < self.trouble.step_failures:
                    launched.failed = True
                    self.model.spoil(launched.plan)
                launched.over()

    def _settle(self) -> None:
        if not self.alive or not self._under_way:
            return
        self._compute(1)
        launched = self._under_way.popleft()
        plan, outcome = launched.plan, launched.outcome
        assert outcome is not None
        if launched.failed:
            self._spared = plan.sequences
            for behind in self._under_way:  # what comes of these is not looked at
                behind.over()
            self._under_way.clear()
            self.core.step_failed(plan, "the step failed")
            self.model.failed()
        else:  # the sequences of a failed step are computed alone, and then succeed
            self._spared = max(0, self._spared - 1)
            self.core.settle(plan, outcome)
        self.deliver()
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            event()
        if self.world.rng.random() < 0.1:
            self.check()
        self.wake()

    def check(self) -> None:
        audit = self.core.audit()
        if audit.problems:
            raise Violation(f"{self.id}: " + "; ".join(audit.problems))

    def _trace(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self.world.say(
                f"{self.id} step {plan.step}: rows {plan.rows.tolist()} tokens {plan.query_start.tolist()} "
                f"contexts {plan.context_lens.tolist()} pages {plan.block_tables.tolist()}"
            )

    # ------------------------------------------------------------------------------------------------------ effects

    def deliver(self) -> None:
        for effect in self.core.take_effects():
            if self.world.tracing:
                self.world.say(f"{self.id} -> {effect}")
            match effect:
                case ToRouter(router, message):
                    self._tell_router(router, message)
                case ToPeer(peer, as_source, message):
                    if isinstance(message, wire.Offer) and message.max_tokens < 2:
                        raise Violation(f"{message.request} is offered, but ends with its first token")
                    link = (self.out if as_source else self.into).get(peer)
                    if link is not None:
                        link.send(self, message)
                case CopyPages():
                    self._copy(effect)

    def _tell_router(self, router: str, message: wire.Message) -> None:
        target = self.router
        if target is None or target.id != router or self.to_router is None:
            self.world.after(0.0, lambda: self.post(lambda: self.core.router_lost(router)))
            return
        self.to_router.send(lambda: target.hear(self, message))

    def submit(self, request, router: str, decode_at: str | None) -> None:
        """As the worker does: only a live link is handed to the core."""
        if decode_at is not None and decode_at not in self.out:
            failed = wire.Failed(
                request=request.id, attempt=request.attempt, code="worker_lost", message="no link", retriable=True
            )
            self._tell_router(router, failed)
        else:
            self.core.submit(request, router, decode_at)

    def _copy(self, job: CopyPages) -> None:
        """The mover: runs the job some time, reports it some time later."""
        world, rng = self.world, self.world.rng
        link = self.out.get(job.peer)
        if link is None:
            world.after(world.delay(1.0), lambda: self.post(lambda: self._report(job, "no link")))
            return
        link.jobs += 1
        error = "told to fail" if rng.random() < self.trouble.copy_failures else None

        def begin() -> None:
            runs = 0.05 + world.delay(self.trouble.copy_delay)
            read = [list(self.model.store[page]) for page in job.source_pages] if rng.random() < 0.5 else None
            world.after(runs, lambda: link.write(job, error, read))
            world.after(runs + world.delay(1.0), lambda: self._copied(link, job, error))

        step = None if job.behind is None else job.behind.event
        if step is None or step not in self._under_way or step.outcome is not None:
            begin()
        else:
            step.waiting.append(begin)

    def _copied(self, link: Link, job: CopyPages, error: str | None) -> None:
        link.jobs -= 1
        self.post(lambda: self._report(job, error))
        link.prove()

    def _report(self, job: CopyPages, error: str | None) -> None:
        if error is None:
            self.core.copies_done(job.peer, job.xfer, len(job.source_pages))
        else:
            self.core.copies_failed(job.peer, job.xfer, error)


@dataclass
class Link:
    """From a source to a destination: two channels, and the mover's jobs over it."""

    world: World
    source: Worker
    destination: Worker
    onward: Channel = field(init=False)
    back: Channel = field(init=False)
    jobs: int = 0
    lost: bool = False
    source_knows: bool = False
    proven: bool = False
    relink: bool = False

    def __post_init__(self) -> None:
        self.onward = Channel(self.world, self.source.trouble.delay)
        self.back = Channel(self.world, self.source.trouble.delay)
        self.source.out[self.destination.id] = self
        self.destination.into[self.source.id] = self
        self.source.links.append(self)
        self.destination.links.append(self)

    def send(self, sender: Worker, message: wire.Message) -> None:
        if sender is self.source:
            self.onward.send(lambda: self._to_destination(message))
        else:
            self.back.send(lambda: self._to_source(message))

    def _to_destination(self, message: wire.Message) -> None:
        destination = self.destination
        destination.post(lambda: destination.core.from_source(self.source.id, message))

    def _to_source(self, message: wire.Message) -> None:
        source = self.source
        if isinstance(message, wire.Grant) and self.world.rng.random() < source.trouble.forged:
            stale = wire.Released(xfer=message.xfer, generation=message.generation - 1)
            self.onward.send(lambda: self._to_destination(stale))
        source.post(lambda: source.core.from_destination(self.destination.id, message))

    # --------------------------------------------------------------------------------------------------------- copies

    def write(self, job: CopyPages, error: str | None, read: list[list[int]] | None) -> None:
        """The bytes move, those that were `read` when the job began or those that are there now. A job that will fail
        has written all, some or garbage."""
        source, destination = self.source, self.destination
        if self.proven or not destination.alive:
            return
        self._check(job)
        rng = self.world.rng
        pages = read or [list(source.model.store[page]) for page in job.source_pages]
        for mine, theirs in zip(pages, job.destination_pages, strict=True):
            if error is None or rng.random() < 0.4:
                destination.model.store[theirs] = mine
            elif rng.random() < 0.5:
                destination.model.store[theirs] = [rng.getrandbits(60) for _ in mine]

    def _check(self, job: CopyPages) -> None:
        source, destination = self.source, self.destination
        granted = destination.core.granted_pages(source.id, job.xfer)
        if not set(job.destination_pages) <= set(granted):
            raise Violation(
                f"{source.id} writes pages {job.destination_pages} of {destination.id} under transfer {job.xfer}, "
                f"which grants {granted}"
            )
        if not source.alive:
            return
        for page in job.source_pages:
            if source.core.page_state(page) not in (PageState.RUNNING, PageState.LANDED):
                raise Violation(f"{source.id} page {page} is {source.core.page_state(page).name} while a copy reads it")

    # ------------------------------------------------------------------------------------------------------------ ends

    def lose(self, relink: bool) -> None:
        """The link breaks. Both ends learn of the end of the stream; the destination waits for proof."""
        if self.lost:
            return
        self.lost = True
        self.relink = relink
        if self.world.tracing:
            self.world.say(f"link {self.source.id} -> {self.destination.id} is lost")
        self.world.at(self.back.cut(2.0), self._source_learns)
        end = self.onward.cut(2.0)
        if self.source.trouble.premature_proof:
            self.world.at(end, lambda: self.destination.post(lambda: self.destination.core.source_lost(self.source.id)))

    def _source_learns(self) -> None:
        source, peer = self.source, self.destination.id
        if source.out.get(peer) is self:
            del source.out[peer]
        if source.alive:
            source.post(self._source_told)
        else:
            self.source_knows = True
            self.prove()

    def _source_told(self) -> None:
        self.source.core.destination_lost(self.destination.id)
        self.source_knows = True
        self.prove()

    def prove(self) -> None:
        """When no copy can arrive any more the destination is told, and the two may meet again.

        Not before it has seen the end of the stream, nor, for a living source, before the mover has reported all jobs.
        """
        if not self.lost or self.proven or (self.source.alive and (self.jobs or not self.source_knows)):
            return
        earliest = max(self.onward.cut_at, self.world.now)
        self.world.at(earliest + 0.1 + self.world.delay(4.0), self._prove)

    def _prove(self) -> None:
        if self.proven:
            return
        self.proven = True
        source, destination = self.source, self.destination
        if destination.into.get(source.id) is self:
            del destination.into[source.id]
        destination.post(lambda: destination.core.source_lost(source.id))
        if self.relink and source.alive and destination.alive:
            self.world.after(0.1 + self.world.delay(2.0), self._again)

    def _again(self) -> None:
        if self.source.alive and self.destination.alive:
            Link(self.world, self.source, self.destination)
