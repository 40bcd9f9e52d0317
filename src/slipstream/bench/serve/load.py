"""Sends requests when they are due, whatever is still unanswered: an open loop.

All bodies are made before the first request is due. One task waits for the next due time (the last millisecond by
going round the event loop, since timers are only that exact) and starts a request; nothing ever waits for an answer
before sending the next request, so a slow server meets the same load as a fast one, and its delay shows in the
latencies. Latencies count from the time when a request was due. How much later than that its bytes were written is the
generator's own lateness, kept beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.bench.serve.client import Client
from slipstream.bench.serve.stream import Stream
from slipstream.bench.serve.work import Item

SPIN_S = 0.0015
LAG_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to be sent `due_s` after the start. Warm-up requests are not `measured`."""

    due_s: float
    item: Item
    payload: bytes
    measured: bool = True


@dataclass(slots=True)
class Sample:
    """A request that was sent, or should have been; `due` is on the clock of the stream's times."""

    planned: Planned
    due: float
    stream: Stream = field(default_factory=Stream)

    @property
    def ok(self) -> bool:
        return not self.stream.problem

    @property
    def output_tokens(self) -> int:
        told = self.stream.output_tokens
        return self.stream.counted if told is None else told

    @property
    def lateness_s(self) -> float:
        return max(0.0, self.stream.sent - self.due) if self.stream.sent else 0.0

    @property
    def ttft_s(self) -> float:
        return self.stream.times[0] - self.due

    @property
    def e2e_s(self) -> float:
        return self.stream.times[-1] - self.due

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token behind the first one; None for answers of a single event."""
        times, later = self.stream.times, self.output_tokens - 1
        return (times[-1] - times[0]) / later if len(times) > 1 and later > 0 else None


@dataclass(slots=True)
class LoadResult:
    """What one load gave.

    `begin` and `end` of its window, in which requests arrive, are on the clock of the samples. `client_cpu` is this
    process's processor time within it as a share of one core, `lag_s` how late the event loop got to a timer at most.
    """

    samples: list[Sample]
    begin: float
    end: float
    client_cpu: float
    lag_s: float
    open_at_end: int
    connections: int


@dataclass(slots=True)
class Progress:
    """Counts for whoever draws; `last_s` is when the last request is due."""

    total: int = 0
    sent: int = 0
    finished: int = 0
    failed: int = 0
    elapsed_s: float = 0.0
    last_s: float = 0.0


async def run_load(
    client: Client,
    plan: Sequence[Planned],
    *,
    window_s: float,
    timeout_s: float,
    drain_s: float,
    show: Callable[[Progress], None] = lambda progress: None,
) -> LoadResult:
    """Sends the plan, which is in order of `due_s`, and waits for the answers.

    The window begins when the first measured request is due and is `window_s` long, or to the last due time if that is
    longer.
    An answer that takes longer than `timeout_s`, or is not there `drain_s` after the last request was due, is an error.
    """
    raise_file_limit()
    progress = Progress(total=len(plan), last_s=plan[-1].due_s)
    first = next((planned.due_s for planned in plan if planned.measured), 0.0)
    running: set[asyncio.Task[None]] = set()
    samples: list[Sample] = []
    watch = Watch()
    with quiet_collector():
        start = time.perf_counter() + 0.02
        watching = asyncio.create_task(_watch(watch, start, progress, show))
        for planned in plan:
            await _until(start + planned.due_s)
            if planned.measured and not watch.began:
                watch.begin()
            sample = Sample(planned, start + planned.due_s)
            samples.append(sample)
            task = asyncio.create_task(_one(client, sample, timeout_s, progress))
            running.add(task)
            task.add_done_callback(running.discard)
            progress.sent += 1
        end = max(start + plan[-1].due_s, start + first + window_s)
        await _until(end)
        cpu, left = watch.cpu(), len(running)
        await _drain(running, drain_s)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    show(progress)
    return LoadResult(samples, start + first, end, cpu, watch.lag_s, left, client.connected)


async def _one(client: Client, sample: Sample, timeout_s: float, progress: Progress) -> None:
    await client.exchange(sample.planned.payload, sample.stream, timeout_s)
    progress.finished += 1
    progress.failed += not sample.ok


async def _until(when: float) -> None:
    left = when - time.perf_counter()
    if left > SPIN_S:
        await asyncio.sleep(left - SPIN_S)
    while time.perf_counter() < when:  # noqa: ASYNC110  no event says that it is time
        await asyncio.sleep(0)


async def _drain(running: set[asyncio.Task[None]], drain_s: float) -> None:
    if running:
        _, left = await asyncio.wait(set(running), timeout=drain_s)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class Watch:
    """The client's own processor time and delays, from `begin` on."""

    def __init__(self) -> None:
        self.began = 0.0
        self.lag_s = 0.0
        self._cpu = 0.0

    def begin(self) -> None:
        self.began, self._cpu, self.lag_s = time.perf_counter(), time.process_time(), 0.0

    def cpu(self) -> float:
        return (time.process_time() - self._cpu) / max(1e-3, time.perf_counter() - self.began) if self.began else 0.0


async def _watch(watch: Watch, start: float, progress: Progress, show: Callable[[Progress], None]) -> None:
    shown = 0.0
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_EVERY_S)
        now = time.perf_counter()
        watch.lag_s = max(watch.lag_s, now - before - LAG_EVERY_S)
        if now - shown > 0.25:
            shown = now
            progress.elapsed_s = now - start
            show(progress)


@contextlib.contextmanager
def quiet_collector():
    """No full garbage collections while times are taken: they would hold up every stream at once."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def raise_file_limit() -> None:
    """As many open files as the system lets this process have: a stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
