"""Placement on a virtual clock: what the router's choices do to latencies.

An engine here is nothing but step times. It steps for as long as it has work: each step decodes one token of every
sequence and computes up to `chunk_tokens` of the prompts that wait, in order of arrival, or `beside_tokens` while
sequences decode there. Requests are placed by `slipstream.router.place.place` on standings that are charged and
discharged as the router does it; a handed-over request decodes `HANDOFF_S` after its first token. Nothing else is
modelled: no pages, no prefixes.

    python -m tests.sim.placement       prints the table of docs/routing.md
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.router.place import KnownKeys, Placement, Prompt, Standing, place
from slipstream.types import Role

HANDOFF_S = 0.001


@dataclass(frozen=True)
class Card:
    """Step times of one model on one card. `floor_s` is a step with nothing but a few decodes."""

    floor_s: float
    row_s: float
    tokens_per_s: float
    launch_s: float = 0.0015

    def step_s(self, rows: int, tokens: int) -> float:
        compute = self.launch_s + tokens / self.tokens_per_s if tokens else 0.0
        return max(self.floor_s, compute) + rows * self.row_s


LARGE = Card(floor_s=0.0049, row_s=32e-6, tokens_per_s=44_000)  # 8B on an H200
SMALL = Card(floor_s=0.0014, row_s=14e-6, tokens_per_s=180_000)  # 1.5B


@dataclass
class Job:
    """One request; `times` are those of its tokens."""

    due: float
    prompt: int
    answer: int
    times: list[float] = field(default_factory=list)
    placement: Placement | None = None
    computed: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


class Engine:
    """One worker: its standing, its prompts, its decoding sequences."""

    def __init__(self, name: str, role: Role, card: Card, chunk_tokens: int, beside_tokens: int) -> None:
        self.standing = Standing(
            id=name, role=role, fingerprint="f", page_tokens=16, max_sequences=256, pages_total=1 << 20,
            pages_free=1 << 20, keys=KnownKeys(1),
        )  # fmt: skip
        self.card = card
        self.chunk_tokens, self.beside_tokens = chunk_tokens, beside_tokens
        self.prompts: deque[Job] = deque()
        self.decoding: list[Job] = []
        self.busy = False

    def plan(self) -> tuple[list[Job], list[tuple[Job, int]]]:
        budget = self.beside_tokens if self.decoding else self.chunk_tokens
        chunks = []
        for job in self.prompts:
            if budget == 0:
                break
            count = min(budget, job.prompt - job.computed)
            chunks.append((job, count))
            budget -= count
        return list(self.decoding), chunks


class World:
    """Runs jobs over engines; `run` returns them finished."""

    def __init__(self, engines: Sequence[Engine], *, meet: bool, help_out: bool) -> None:
        self._meet, self._help_out = meet, help_out
        self._engines = {engine.standing.id: engine for engine in engines}
        self._events: list[tuple[float, int, str, object]] = []
        self._count = 0
        self._turn = 0

    def run(self, jobs: Sequence[Job]) -> Sequence[Job]:
        for job in jobs:
            self._at(job.due, "arrive", job)
        while self._events:
            now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(now, what)
        return jobs

    def _can_meet(self, prefill: str, decode: str) -> bool:
        return self._meet and self._engines[prefill].standing.role != "decode"

    def _at(self, when: float, kind: str, what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, kind, what))

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
        d.standing.sequences += 1
        p.standing.chosen = d.standing.chosen = self._turn
        p.prompts.append(job)
        self._wake(now, p)

    def _wake(self, now: float, engine: Engine) -> None:
        if not engine.busy and (engine.prompts or engine.decoding):
            engine.busy = True
            rows, chunks = engine.plan()
            length = engine.card.step_s(len(rows), sum(count for _, count in chunks))
            self._at(now + length, "settle", (engine, rows, chunks))

    def _settle(self, now: float, what: tuple[Engine, list[Job], list[tuple[Job, int]]]) -> None:
        engine, rows, chunks = what
        for job in rows:
            self._token(now, job, engine)
        for job, count in chunks:
            job.computed += count
            if job.computed == job.prompt:
                engine.prompts.remove(job)
                self._first(now, job, engine)
        engine.busy = False
        self._wake(now, engine)

    def _first(self, now: float, job: Job, engine: Engine) -> None:
        assert job.placement is not None
        engine.standing.discharge(job.placement.to_compute, now)
        job.times.append(now)
        if job.placement.local:
            engine.decoding.append(job)
        else:
            self._at(now + HANDOFF_S, "adopt", job)

    def _adopt(self, now: float, job: Job) -> None:
        assert job.placement is not None
        engine = self._engines[job.placement.decode]
        engine.decoding.append(job)
        self._wake(now, engine)

    def _token(self, now: float, job: Job, engine: Engine) -> None:
        job.times.append(now)
        if len(job.times) >= job.answer:
            engine.decoding.remove(job)
            engine.standing.sequences -= 1


def jobs(rate: float, seconds: float, prompt: tuple[int, int], answer: tuple[int, int], seed: int) -> list[Job]:
    """Poisson arrivals with evenly drawn lengths."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    prompts = rng.integers(prompt[0], prompt[1] + 1, len(due))
    answers = rng.integers(answer[0], answer[1] + 1, len(due))
    return [Job(float(t), int(p), int(a)) for t, p, a in zip(due, prompts, answers, strict=True)]


@dataclass(frozen=True)
class Outcome:
    """Milliseconds: first token and gaps between tokens; share of jobs within (1 s, 10 ms) and (1 s, `tight_s`)."""

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


def simulate(
    roles: Sequence[Role],
    card: Card,
    chunks: tuple[int, int],
    load: Sequence[Job],
    tight_s: float,
    *,
    meet: bool = True,
    help_out: bool = True,
) -> Outcome:
    """Without `meet` everything stays where its prompt is; without `help_out` roles are kept."""
    engines = [Engine(f"{role}-{at}", role, card, *chunks) for at, role in enumerate(roles)]
    return Outcome.of(World(engines, meet=meet, help_out=help_out).run(load), tight_s)


def table() -> None:
    """Share of requests within (1 s, 10 ms) and, in parentheses, (1 s, 7 ms), by rate and arrangement."""
    apart: tuple[Role, ...] = ("prefill", "decode")
    both: tuple[Role, ...] = ("both", "both")
    for rate in (4, 8, 10, 12, 14):
        cells = [
            simulate(roles, LARGE, (chunk, chunk), jobs(rate, 60, (1024, 7168), (64, 256), 1), 0.007, **rest)
            for roles, chunk, rest in (
                (apart, 8192, {"help_out": False}), (apart, 8192, {}), (both, 512, {"meet": False}), (both, 512, {})
            )
        ]  # fmt: skip
        print(f"| {rate} | " + " | ".join(f"{cell.good:.2f} ({cell.tight:.2f})" for cell in cells) + " |")


if __name__ == "__main__":
    table()
