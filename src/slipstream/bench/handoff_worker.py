"""A worker without a model, for measuring handoffs: `python -m slipstream.bench.handoff_worker OPTIONS`.

Everything but the computation is the worker that serves: its ports, links, engine loop, transfer agent and KV pool. A
step takes `compute_ms` when it holds a prompt and no time else; every token is the same. With `awake` a kernel that
only waits, on one multiprocessor, keeps a GPU at the clocks that it has when it serves. Lines of JSON on stdin ask:
"shuffle" (from now on pages are taken in random order, as after hours of serving), "events" (what happened since it
was last asked: name, transfer or tokens, seconds of the machine's monotonic clock, thread), "rates" (GB/s of the proven
routes), "end".
"""

from __future__ import annotations

import json
import logging
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from slipstream import wire
from slipstream.bench.handoff_options import HandoffOptions
from slipstream.config import EngineConfig, WorkerConfig
from slipstream.engine import worker as worker_module
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import CopyPages, Effect, ToPeer
from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.engine.worker import Worker
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.stream import Link
from slipstream.transfer.agent import TransferAgent
from slipstream.transfer.copies import HeadRange
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.job import CopyJob

TOKEN = 7
TICKS = 1.98e9  # of a GPU, a second: what the wait of a kernel is counted in


class Diary:
    """What happened when. Any thread writes."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[str, int, float, str]] = queue.SimpleQueue()

    def note(self, name: str, number: int, at: float | None = None) -> None:
        thread = threading.current_thread().name.removeprefix("slipstream-")
        self._events.put((name, number, time.monotonic() if at is None else at, thread))

    def take(self) -> list[tuple[str, int, float, str]]:
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        return found


class NullRunner:
    """Computes nothing; see `engine.loop.Runner`."""

    depth = 1
    attention = "none"

    def __init__(self, diary: Diary, compute_s: float) -> None:
        self._diary, self._compute_s = diary, compute_s
        self._plan: StepPlan | None = None

    def launch(self, plan: StepPlan) -> None:
        assert self._plan is None
        self._plan = plan
        for length in plan.context_lens.tolist():
            self._diary.note("computing", length)

    def behind(self) -> Any:
        return None

    def ended(self) -> bool:
        return True

    def collect(self) -> StepOutcome:
        plan, self._plan = self._plan, None
        assert plan is not None
        self._wait(plan)
        for length in plan.context_lens.tolist():
            self._diary.note("computed", length)
        tokens = np.where(plan.sample, TOKEN, -1).astype(np.int64)
        return StepOutcome(plan.step, tokens, [None] * plan.sequences)

    def _seconds(self, plan: StepPlan) -> float:
        return self._compute_s if len(plan.token_ids) > plan.sequences else 0.0

    def _wait(self, plan: StepPlan) -> None:
        if self._seconds(plan):
            time.sleep(self._seconds(plan))

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.launch(plan)
        return self.collect()


class NullDeviceRunner(NullRunner):
    """The same on a GPU: a kernel that only waits takes the time of a step, and copies can wait for its event."""

    def __init__(self, diary: Diary, compute_s: float, memory: str) -> None:
        import torch

        super().__init__(diary, compute_s)
        self._torch = torch
        self._index = Device(memory).index
        torch.cuda.set_device(self._index)
        self._stream = torch.cuda.Stream()
        self._event: Any = None

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        torch = self._torch
        torch.cuda.set_device(self._index)
        with torch.cuda.stream(self._stream):
            if self._seconds(plan):
                torch.cuda._sleep(int(self._seconds(plan) * TICKS))
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()

    def behind(self) -> Any:
        return self._event

    def _wait(self, plan: StepPlan) -> None:
        self._event.synchronize()


@dataclass
class NoModel:
    """What a worker asks of an opened model."""

    engine: EngineConfig
    options: HandoffOptions
    diary: Diary
    served_name: str = "bench"

    @property
    def config(self) -> Any:
        return SimpleNamespace(eos_ids=(), vocab=1 << 30)

    @property
    def layout(self) -> KVLayout:
        return self.options.layout

    @property
    def head_ranges(self) -> list[HeadRange]:
        return [HeadRange(0, self.options.kv_heads)]

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="cpu" if self.options.memory == "cpu" else "cuda")

    @property
    def device_name(self) -> str:
        return self.options.memory

    def allocate_pool(self, probe_bytes: int) -> Any:
        pages = self.layout.pages_for(self.options.tokens) + 1
        if self.options.memory == "cpu":
            return HostPool.allocate(self.layout, pages, probe_bytes)
        from slipstream.transfer.cuda.memory import DeviceMemory

        return DeviceMemory.allocate(self.layout, pages, probe_bytes, self.options.memory)

    def max_model_len(self, pages: int) -> int:
        return (pages - 1) * self.layout.page_tokens

    def runner(self, pool: Any, max_sequences: int) -> NullRunner:
        seconds = self.options.compute_ms / 1e3
        if self.options.memory == "cpu":
            return NullRunner(self.diary, seconds)
        return NullDeviceRunner(self.diary, seconds, self.options.memory)


def noting(diary: Diary) -> Callable[..., TransferAgent]:
    """A TransferAgent that notes when the copies of a job begin, are queued and have ended."""

    class Noting(TransferAgent):
        def _begin(self, job: CopyJob) -> None:
            diary.note("begun", job.xfer)
            super()._begin(job)
            diary.note("queued", job.xfer)

    def make(*arguments: Any, on_done: Callable[[CopyJob, str | None], None], **named: Any) -> TransferAgent:
        def done(job: CopyJob, error: str | None) -> None:
            diary.note("failed" if error else "copied", job.xfer)
            on_done(job, error)

        return Noting(*arguments, on_done=done, **named)

    return make


def note_arrivals(diary: Diary) -> None:
    """Has links of this process note when the bytes of a message of handoffs were there."""
    came = 0.0
    receive, arrived = Link.data_received, Link._arrived

    def data_received(link: Link, data: bytes) -> None:
        nonlocal came
        came = time.monotonic()
        receive(link, data)

    def noted(link: Link, messages: list[wire.Message]) -> None:
        for message in messages:
            if isinstance(message, (wire.Offer, wire.Grant, wire.Commit)):
                diary.note(f"heard {type(message).__name__.lower()}", message.xfer, came)
        arrived(link, messages)

    Link.data_received, Link._arrived = data_received, noted  # type: ignore[method-assign]


def keep_awake(memory: str) -> None:
    """Runs a kernel of one thread block that only waits, again and again, until the process ends."""
    import torch

    torch.cuda.set_device(Device(memory).index)
    stream = torch.cuda.Stream()

    def run() -> None:
        with torch.cuda.stream(stream):
            while True:
                torch.cuda._sleep(40_000_000)  # about 20 ms
                stream.synchronize()

    threading.Thread(target=run, name="bench-awake", daemon=True).start()


class HandoffWorker(Worker):
    """Notes what passes between its threads."""

    def __init__(self, options: HandoffOptions, diary: Diary) -> None:
        engine = EngineConfig(
            model="bench",
            page_tokens=options.page_tokens,
            chunk_tokens=options.chunk_tokens,
            max_sequences=options.max_sequences,
            prefix_cache=False,
        )
        super().__init__(engine, WorkerConfig(role=options.role), options.transfer, alone=True)  # type: ignore[arg-type]
        self._diary = diary

    def _deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, CopyPages):
                self._diary.note("copies", effect.xfer)
            elif isinstance(effect, ToPeer):
                self._diary.note(type(effect.message).__name__.lower(), getattr(effect.message, "xfer", -1))
        super()._deliver(effects)

    def start(self, progress: Any = None) -> None:
        super().start(progress)
        assert self._loop is not None
        core = self._loop.core
        schedule = core.schedule

        def noted() -> StepPlan | None:
            plan = schedule()
            for length in [] if plan is None else plan.context_lens.tolist():
                self._diary.note("planned", length)
            return plan

        core.schedule = noted  # type: ignore[method-assign]

    def rates(self) -> list[float]:
        assert self._server is not None
        return [report.gb_per_s for report in self._server.routes() if not report.error]

    def shuffle(self) -> None:
        """Has the engine take its free pages in random order from now on."""
        done = threading.Event()

        def mix(core: EngineCore) -> None:
            random.Random(1).shuffle(core._account._free)  # the bench alone wants a pool as after hours of serving
            done.set()

        assert self._loop is not None
        self._loop.post(mix)
        done.wait(10)


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=HandoffOptions)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    diary = Diary()
    note_arrivals(diary)
    worker_module.TransferAgent = noting(diary)  # type: ignore[assignment,misc]
    worker_module.open_model = lambda engine, *rest, **named: NoModel(engine, options, diary)  # type: ignore[assignment]
    worker = HandoffWorker(options, diary)
    worker.start()
    if options.awake and options.memory != "cpu":
        keep_awake(options.memory)
    print(json.dumps({"wire": worker.info.wire}), flush=True)
    for line in sys.stdin:
        verb = json.loads(line)
        answer: Any = {}
        if verb == "shuffle":
            worker.shuffle()
        elif verb == "events":
            answer = diary.take()
        elif verb == "rates":
            answer = worker.rates()
        elif verb == "end":
            break
        print(json.dumps(answer), flush=True)
    worker.stop()


if __name__ == "__main__":
    main()
