"""Placement on a virtual clock: what the router's choices do to latencies.

An engine here is nothing but step times (`Card`). It steps for as long as it has work: each step decodes one token of
every sequence and computes up to CHUNK_TOKENS of the prompts that wait, in order of arrival, or `Card.beside_tokens`
while sequences decode there. A step is planned shortly before the one in front of it ends, as the engine does it
(`engine/ahead.py`), so what comes later waits for the one after. Requests are placed by `slipstream.router.place.place`
on standings that are charged and discharged as the router does it, `MESSAGE_S` late, and told of pace and load every
`STATUS_S`, as workers do it. A handed-over request decodes when its last pages have come. Nothing else is modelled: no
pages, no prefixes, no faults.

    python -m tests.sim.placement       prints the table of docs/routing.md

The cards are made of figures measured on H200s; `tests/sim/__init__.py` is empty, so nothing here runs elsewhere.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream import wire
from slipstream.engine.ahead import SHARE, SLACK_S
from slipstream.engine.pace import Pace
from slipstream.router.place import KnownKeys, Placement, Prompt, Standing, place
from slipstream.types import Role

CHUNK_TOKENS = 8192
TIGHT_S = 0.0065
STATUS_S = 0.05
MESSAGE_S = 0.001  # worker to router, router to worker
FRONT_S = 0.002  # client to router and back, both together


@dataclass(frozen=True)
class Card:
    """Step times of one model on one card.

    `decode_s` is a step of one sequence, `row_s` what each adds (keys and values of a few thousand tokens are read). A
    step with prompts takes `launch_s` and its tokens at `tokens_per_s`; one beside sequences `mixed_s`, `mixed_token_s`
    for each token, and their rows. `prompt_host_s` and `mixed_host_s` are what the host needs for such steps, at least,
    and `mixed_row_s` for each sequence in it; steps the host is behind vary by `jitter` (log-normal).
    """

    decode_s: float
    row_s: float
    tokens_per_s: float
    mixed_s: float
    mixed_token_s: float
    prompt_host_s: float
    mixed_host_s: float
    mixed_row_s: float = 0.0
    beside_tokens: int = 512
    launch_s: float = 0.001
    jitter: float = 0.15
    handoff_s: float = 0.003
    handoff_token_s: float = 0.5e-6

    def step_s(self, rows: int, tokens: int, rng: np.random.Generator) -> float:
        if not tokens:
            return self.decode_s + rows * self.row_s
        alone = self.launch_s + tokens / self.tokens_per_s
        device = max(alone, self.mixed_s + tokens * self.mixed_token_s) + rows * self.row_s if rows else alone
        host = self.mixed_host_s + rows * self.mixed_row_s if rows else self.prompt_host_s
        return max(device, host * float(np.exp(self.jitter * rng.standard_normal())))


# Where mixed steps and small prompts wait for the host, as before there were graphs for them.
LARGE_HOST = Card(0.00445, 160e-6, 39_500, 0.001, 25e-6, 0.020, 0.019, 300e-6)
SMALL_HOST = Card(0.00138, 15e-6, 180_000, 0.001, 5e-6, 0.026, 0.019, 300e-6)
# As measured since (`engine.chunks` tells the mixed ones at start).
LARGE = Card(0.0043, 120e-6, 43_500, 0.0048, 15e-6, 0.004, 0.004, beside_tokens=256, jitter=0.05)
SMALL = Card(0.0013, 15e-6, 180_000, 0.0018, 6e-6, 0.004, 0.0042, beside_tokens=384, jitter=0.05)


@dataclass
class Job:
    """One request; `times` are those of its tokens, `put` where it was placed."""

    due: float
    prompt: int
    answer: int
    times: list[float] = field(default_factory=list)
    placement: Placement | None = None
    computed: int = 0
    charged: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due + FRONT_S

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


@dataclass
class Step:
    rows: list[Job]
    chunks: list[tuple[Job, int]]


class Engine:
    """One worker: its standing, its prompts, its decoding sequences, its pace."""

    def __init__(self, name: str, role: Role, card: Card, seed: int) -> None:
        self.standing = Standing(
            id=name, role=role, fingerprint="f", page_tokens=16, max_sequences=256, pages_total=1 << 20,
            pages_free=1 << 20, keys=KnownKeys(1),
        )  # fmt: skip
        self.card = card
        self.inbox: list[tuple[str, Job]] = []
        self.prompts: deque[Job] = deque()
        self.decoding: list[Job] = []
        self.pace = Pace()
        self.rng = np.random.default_rng(seed)
        self.next: Step | None = None
        self.busy = False
        self.busy_s = {"prompts": 0.0, "mixed": 0.0, "decodes": 0.0}

    def receive(self) -> None:
        for kind, job in self.inbox:
            self.prompts.append(job) if kind == "prompt" else self.decoding.append(job)
        self.inbox.clear()

    def plan(self, under_way: Step | None) -> Step | None:
        """The step after `under_way`, on the assumption that it does what it should."""
        ahead = {id(job): count for job, count in under_way.chunks} if under_way else {}
        ending = {id(job) for job in under_way.rows if len(job.times) + 1 >= job.answer} if under_way else set()
        rows = [job for job in self.decoding if id(job) not in ending]
        rows += [
            job for job, count in (under_way.chunks if under_way else [])
            if job.placement and job.placement.local and job.computed + count == job.prompt
        ]  # fmt: skip
        budget = max(16, (self.card.beside_tokens if rows else CHUNK_TOKENS) - len(rows))
        chunks = []
        for job in self.prompts:
            count = min(budget, job.prompt - job.computed - ahead.get(id(job), 0))
            if budget == 0:
                break
            if count:
                chunks.append((job, count))
                budget -= count
        return Step(rows, chunks) if rows or chunks else None

    def status(self) -> wire.Status:
        status = wire.Status(
            waiting=0, running=len(self.prompts) + len(self.decoding), handing_off=0, pages_free=1 << 20,
            pages_cached=0, pages_total=1 << 20, waiting_tokens=0,
        )  # fmt: skip
        self.pace.tell(status)
        return status


class World:
    """Runs jobs over engines; `run` returns them finished."""

    def __init__(self, engines: Sequence[Engine], *, meet: bool, help_out: bool) -> None:
        self._meet, self._help_out = meet, help_out
        self._engines = {engine.standing.id: engine for engine in engines}
        self._events: list[tuple[float, int, str, object]] = []
        self._count = 0
        self._turn = 0
        self._left = 0

    def run(self, jobs: Sequence[Job]) -> Sequence[Job]:
        for job in jobs:
            self._at(job.due, "arrive", job)
        self._left = len(jobs)
        self._at(0.0, "report", None)
        while self._events and self._left:
            now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(now, what)
        return jobs

    def _can_meet(self, prefill: str, decode: str) -> bool:
        return self._meet and self._engines[prefill].standing.role != "decode"

    def _at(self, when: float, kind: str, what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, kind, what))

    def _report(self, now: float, _: None) -> None:
        for engine in self._engines.values():
            self._at(now + MESSAGE_S, "tell", (engine, engine.status()))
        self._at(now + STATUS_S, "report", None)

    def _tell(self, now: float, what: tuple[Engine, wire.Status]) -> None:
        what[0].standing.update(what[1])

    def _arrive(self, now: float, job: Job) -> None:
        standings = [engine.standing for engine in self._engines.values()]
        for standing in standings:
            standing.reckon(now)
        placement = place(Prompt(range(job.prompt)), standings, self._can_meet, help_out=self._help_out)
        assert placement is not None
        job.placement = placement
        self._turn += 1
        p, d = self._engines[placement.prefill], self._engines[placement.decode]
        p.standing.charge(placement.to_compute, now)
        d.standing.expect(local=p is d)
        p.standing.chosen = d.standing.chosen = self._turn
        self._at(now + MESSAGE_S, "submit", job)

    def _submit(self, now: float, job: Job) -> None:
        assert job.placement is not None
        engine = self._engines[job.placement.prefill]
        engine.inbox.append(("prompt", job))
        self._wake(now, engine)

    def _wake(self, now: float, engine: Engine) -> None:
        if engine.busy:
            return
        step = engine.next
        if step is None:
            engine.receive()
            step = engine.plan(None)
        if step is None:
            return
        engine.busy = True
        tokens = sum(count for _, count in step.chunks)
        length = engine.card.step_s(len(step.rows), tokens, engine.rng)
        engine.pace.step(len(step.rows), tokens, length)
        engine.busy_s["decodes" if not tokens else "mixed" if step.rows else "prompts"] += length
        host_s = engine.card.mixed_host_s if tokens and step.rows else engine.card.launch_s
        self._at(now + max(0.0, (1.0 - SHARE) * length - SLACK_S - host_s), "ahead", (engine, step))
        self._at(now + length, "settle", (engine, step))

    def _ahead(self, now: float, what: tuple[Engine, Step]) -> None:
        engine, step = what
        engine.receive()
        engine.next = engine.plan(step)

    def _settle(self, now: float, what: tuple[Engine, Step]) -> None:
        engine, step = what
        for job in step.rows:
            job.times.append(now)
            if len(job.times) >= job.answer:
                engine.decoding.remove(job)
                self._left -= 1
                self._at(now + MESSAGE_S, "ended", job)
        for job, count in step.chunks:
            job.computed += count
            if job.computed == job.prompt:
                engine.prompts.remove(job)
                self._first(now, job, engine)
        engine.busy = False
        self._wake(now, engine)

    def _first(self, now: float, job: Job, engine: Engine) -> None:
        assert job.placement is not None
        job.times.append(now)
        self._at(now + MESSAGE_S, "computed", job)
        if job.placement.local:
            engine.decoding.append(job)
        else:
            self._at(now + engine.card.handoff_s + job.prompt * engine.card.handoff_token_s, "adopt", job)

    def _adopt(self, now: float, job: Job) -> None:
        assert job.placement is not None
        engine = self._engines[job.placement.decode]
        engine.inbox.append(("decode", job))
        self._wake(now, engine)

    def _computed(self, now: float, job: Job) -> None:
        """The router has the first token."""
        assert job.placement is not None
        self._engines[job.placement.prefill].standing.discharge(job.placement.to_compute, now)
        if not job.placement.local:
            self._engines[job.placement.decode].standing.came()

    def _ended(self, now: float, job: Job) -> None:
        assert job.placement is not None
        self._engines[job.placement.decode].standing.sequences -= 1


def jobs(rate: float, seconds: float, prompt: tuple[int, int], answer: tuple[int, int], seed: int) -> list[Job]:
    """Poisson arrivals with evenly drawn lengths."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    prompts = rng.integers(prompt[0], prompt[1] + 1, len(due))
    answers = rng.integers(answer[0], answer[1] + 1, len(due))
    return [Job(float(t), int(p), int(a)) for t, p, a in zip(due, prompts, answers, strict=True)]


@dataclass(frozen=True)
class Outcome:
    """Milliseconds: first token and gaps between tokens; shares of jobs: within (1 s, 10 ms) and (1 s, `tight_s`), and
    computed and decoded in one place."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    good: float
    tight: float
    local: float

    @classmethod
    def of(cls, done: Sequence[Job], tight_s: float) -> Outcome:
        ttft = np.array([job.ttft for job in done])
        tpot = np.array([job.tpot for job in done])
        gaps = np.concatenate([np.diff(job.times) for job in done])
        return cls(
            ttft_p50=1e3 * float(np.percentile(ttft, 50)),
            ttft_p99=1e3 * float(np.percentile(ttft, 99)),
            itl_p50=1e3 * float(np.percentile(gaps, 50)),
            itl_p99=1e3 * float(np.percentile(gaps, 99)),
            good=float(((ttft <= 1) & (tpot <= 0.010)).mean()),
            tight=float(((ttft <= 1) & (tpot <= tight_s)).mean()),
            local=float(np.mean([job.placement is not None and job.placement.local for job in done])),
        )

    def __str__(self) -> str:
        return f"{self.ttft_p50:.0f} / {self.ttft_p99:.0f}, {self.itl_p50:.1f} / {self.itl_p99:.1f}"


def simulate(
    roles: Sequence[Role],
    card: Card,
    loads: Sequence[Sequence[Job]],
    tight_s: float,
    *,
    meet: bool = True,
    help_out: bool = True,
) -> Outcome:
    """All jobs of `loads`, each load with workers of its own. Without `meet` everything stays where its prompt is;
    without `help_out` roles are kept."""
    for number, load in enumerate(loads):
        engines = [Engine(f"{role}-{at}", role, card, seed=100 * number + at) for at, role in enumerate(roles)]
        World(engines, meet=meet, help_out=help_out).run(load)
    return Outcome.of([job for load in loads for job in load], tight_s)


ROWS = (
    ("8B", LARGE, ((1024, 7168), (64, 256)), (4, 8, 12)),
    ("1.5B", SMALL, ((512, 2048), (64, 256)), (8, 24, 48)),
)


APART: Sequence[Role] = ("prefill", "decode")
BOTH: Sequence[Role] = ("both", "both")


def table(seeds: Sequence[int] = (301, 302, 303)) -> None:
    """First token and gap between tokens, each p50 / p99 in ms, and the share within (1 s, 10 ms)."""
    for model, card, lengths, rates in ROWS:
        for rate in rates:
            cells = []
            for roles, rest in (
                (APART, {"help_out": False}), (APART, {}),
                (BOTH, {"meet": False}), (BOTH, {}),
            ):  # fmt: skip
                loads = [jobs(rate, 40, *lengths, seed) for seed in seeds]
                found = simulate(roles, card, loads, TIGHT_S, **rest)
                cells.append(f"{found} ({found.good:.2f})")
            print(f"| {model} | {rate} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    table()
