"""One worker as a process: the main thread of `slipstream worker`.

Before torch is loaded, threads that wait for work are told to sleep instead of spin, because on one machine several
workers share the cores, and the garbage collector to let the start alone. Then the worker starts, says how its loading
goes, and this thread waits for its end or a signal. The first SIGINT or SIGTERM drains, the second ends at once. A
worker that hangs ends this process itself, with exit code 71 (`lifeline.HUNG`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from types import FrameType

from rich import progress
from rich.console import Console

from slipstream import garbage, outlet
from slipstream.config import EngineConfig, ObserveConfig, TransferConfig, WorkerConfig
from slipstream.launch.limits import raise_open_files

logger = logging.getLogger(__name__)

ENGINE_FAILED = 70  # exit code: not the command's fault, so starting it again may help
PROGRESS_INTERVAL_S = 2.0
PASSIVE_WAITING = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_worker(
    engine: EngineConfig,
    config: WorkerConfig,
    transfer: TransferConfig,
    drain_s: float,
    observe: ObserveConfig | None = None,
) -> int:
    """Runs a worker until it is told to end; returns the exit code. Raises SetupError when it cannot start."""
    raise_open_files()
    for variable, value in PASSIVE_WAITING.items():
        os.environ.setdefault(variable, value)
    if engine.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(engine.threads))
    signal.signal(signal.SIGINT, _end_now)
    signal.signal(signal.SIGTERM, _end_now)

    garbage.starting()
    from slipstream.engine.worker import Worker  # loads torch
    from slipstream.ranks.team import RankLost

    worker = Worker(engine, config, transfer, observe=observe, alone=True)
    started = time.monotonic()
    logger.info("loading %s", engine.model)
    try:
        worker.start(_Progress(engine.model))
    except RankLost as error:
        logger.error("%s", error.message)
        return ENGINE_FAILED
    _stop_on_signals(worker, drain_s)
    info = worker.info
    logger.info(
        "%s is ready after %.1f s: role %s, %s, %s on %s, KV pool of %d tokens in pages of %d",
        info.name,
        time.monotonic() - started,
        info.role,
        info.http,
        info.served_name,
        ", ".join(info.devices),
        (info.pages - 1) * info.page_tokens,  # one page is scratch
        info.page_tokens,
    )
    code = 0 if worker.wait() else ENGINE_FAILED
    if engine.tp > 1:
        logging.shutdown()
        os._exit(code)  # threads of a device's library may wait for what nobody takes down any more
    return code


def _end_now(number: int, frame: FrameType | None) -> None:
    # While the model loads there is nothing to finish and nothing that outlives the process.
    outlet.drain()
    os._exit(128 + number)


def _stop_on_signals(worker: object, drain_s: float) -> None:
    from slipstream.engine.worker import Worker

    assert isinstance(worker, Worker)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, _end_now)
        signal.signal(signal.SIGTERM, _end_now)
        logger.info("%s: finishing what is under way (at most %g s)", signal.Signals(number).name, drain_s)
        threading.Thread(target=worker.stop, args=(drain_s,), name="slipstream-stop").start()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


class _Progress:
    """How far loading is: a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._said_at = time.monotonic()
        self._bar = progress.Progress(transient=True, console=Console(stderr=True)) if sys.stderr.isatty() else None
        self._task = progress.TaskID(0)

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._draw(self._bar, done, total)
            return
        now = time.monotonic()
        if total > 0 and now - self._said_at >= PROGRESS_INTERVAL_S:
            self._said_at = now
            logger.info("loading %s: %d %%", self._model, 100 * done // total)

    def _draw(self, bar: progress.Progress, done: int, total: int) -> None:
        if not bar.tasks:
            self._task = bar.add_task(f"loading {self._model}", total=total)
            bar.start()
        bar.update(self._task, completed=done)
        if done >= total:
            bar.stop()
