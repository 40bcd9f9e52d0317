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
import threading
import time
from types import FrameType

from slipstream import garbage, outlet
from slipstream.config import EngineConfig, ObserveConfig, TransferConfig, WorkerConfig
from slipstream.launch.limits import raise_open_files
from slipstream.launch.loading import Loading

logger = logging.getLogger(__name__)

ENGINE_FAILED = 70  # exit code: not the command's fault, so starting it again may help
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
        worker.start(Loading(engine.model))
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
