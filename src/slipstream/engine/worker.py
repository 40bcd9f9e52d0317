"""A worker: one model on one device or on several ranks, one scheduler, one KV pool a rank; three threads.

    IO thread      sockets: HTTP port, message port, links to routers and peers        engine/server.py
    loop thread    schedule, compute, settle, deliver                                   engine/loop.py
    mover thread   copies KV pages to peers                                             transfer/agent.py

The engine's core belongs to whichever of them has its turn (engine/loop.py): what the IO thread hears and what the
mover has finished is seen to there, and the answers leave from there, unless the loop thread is at it.

`start` opens the HTTP port, loads the model, makes the pool, has steps of every kind computed once
(engine/rehearsal.py) and opens the message port; `stop` drains and takes it all down. Nothing is process-wide, so that
two workers fit in one interpreter.

With tensor parallelism this is rank 0, the only one that decides and that others know. The other ranks are processes of
their own (`ranks.team`), which load at the same time and then follow its plans; when one of them ends, the worker does.

From when it is ready, a fourth thread watches that all of it gets on (engine/watch.py). A worker that hangs says where,
cuts its links and ends its ranks, and its process if that is its own: nothing less frees what a device holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec

from slipstream import garbage
from slipstream.config import EngineConfig, ObserveConfig, TransferConfig, WorkerConfig
from slipstream.engine.chunks import measured
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import CopyPages, Effect
from slipstream.engine.guard import Guard, Hung
from slipstream.engine.laps import Laps
from slipstream.engine.loop import EngineLoop, Runner
from slipstream.engine.metrics import WorkerMetrics
from slipstream.engine.plan import StepPlan
from slipstream.engine.rehearsal import rehearse
from slipstream.engine.server import WorkerServer
from slipstream.engine.timeline import Watcher
from slipstream.engine.tracing import WorkerTraces
from slipstream.engine.watch import Allowance
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.plain_http import base_url
from slipstream.ranks.control import Opened
from slipstream.ranks.copies import RankCopies
from slipstream.ranks.lead import LeadRunner
from slipstream.ranks.team import RankLost, Team
from slipstream.run.engine_model import OpenedModel, Pool, open_model
from slipstream.run.parallel import Group, rank_devices
from slipstream.telemetry.trace import open_tracing
from slipstream.transfer.agent import CopyJob, ProbeMemory, TransferAgent
from slipstream.transfer.job import CopyTimes
from slipstream.transfer.rank import Rank, RankHere
from slipstream.transfer.transports.local import Neighbourhood
from slipstream.version import __version__
from slipstream.wire import WorkerInfo

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

SIGNAL_CHECK_S = 0.1
FAILED_END_S = 20.0  # for the threads of a failed worker to end; one may be stuck in a device


class Worker:
    """One engine behind its two ports.

    `start` blocks until the worker can serve; it raises SetupError when it cannot (the message says why and what to
    do). `info` is set from then on. `wait` blocks until `stop` is called or the engine fails, and says which. Workers
    of one process that share `neighbours` reach each other's memory directly. `alone` says that the process is this
    worker's own: what it has when it is ready is set aside from garbage collection (`garbage`), and it ends with exit
    code HUNG when the worker hangs.
    """

    def __init__(
        self,
        engine: EngineConfig,
        worker: WorkerConfig,
        transfer: TransferConfig,
        *,
        neighbours: Neighbourhood | None = None,
        observe: ObserveConfig | None = None,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._engine = engine
        self._worker = worker
        self._transfer = transfer
        self._observe = observe or ObserveConfig()
        self._metrics = WorkerMetrics(self._observe.metrics_compat)
        self._watcher = Watcher(self._metrics)
        self._closing = contextlib.ExitStack()
        self._stuck: contextlib.ExitStack | None = None  # of a worker that hangs: never taken down
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._failed_at = 0.0
        self._silent = False  # the engine's word does not count any more: the ends of links say what there is to say
        self._server: WorkerServer | None = None
        self._loop: EngineLoop | None = None
        self._info: WorkerInfo | None = None
        self._neighbours = neighbours
        self._copies = RankCopies(self._copied)
        self._team: Team | None = None
        self._group: Group | None = None
        self._opened: list[Opened] = []  # by the other ranks
        self._allowance = Allowance("cpu")
        self._ways: dict[str, str] = {}  # peer -> the name of its routes, those of its latest link; the loop's

    @property
    def info(self) -> WorkerInfo:
        if self._info is None:
            raise RuntimeError("the worker has not started")
        return self._info

    # ---------------------------------------------------------------------------------------------- life

    def start(self, progress: Progress | None = None) -> None:
        """Raises RankLost, beside SetupError, when another rank ends before all can serve."""
        try:
            self._start(progress)
        except BaseException as error:
            lost = self._team.lost if self._team is not None else None
            self._closing.close()
            if lost is None or isinstance(error, RankLost):
                raise
            raise lost from error

    def _start(self, progress: Progress | None) -> None:
        config = self._worker
        self._trace()
        router = base_url(config.join, "a router's address for --join. Give http://HOST:PORT.") if config.join else ""
        self._server = server = self._listen()
        laps = Laps()
        devices = rank_devices(self._engine.device, self._engine.tp)
        self._team = team = self._start_others(devices)
        opened = open_model(msgspec.structs.replace(self._engine, device=devices[0]), progress)
        laps.lap("model")
        self._allowance = Allowance(opened.device.type)
        pool = self._allocate(opened)
        self._closing.callback(pool.close)
        laps.lap("KV pool")
        runner = self._join(opened, pool)
        laps.lap("kernels and graphs")
        agent = self._mover(opened, pool)
        max_model_len = opened.max_model_len(pool.region.pages)
        core = EngineCore(
            opened.layout,
            pool.region.pages,
            msgspec.structs.replace(opened.engine, max_model_len=max_model_len),
            opened.config.eos_ids,
            vocab=opened.config.vocab,
            observer=self._watcher,
        )
        self._loop = loop = EngineLoop(
            core,
            runner,
            deliver=self._deliver,
            on_step=self._stepped,
            on_failure=self._failed,
            on_end=agent.ripe,
            look=agent.look,
            rehearse=partial(self._rehearse, runner, core, opened),
        )
        self._copies.attach(agent, team, lambda: runner.collected if isinstance(runner, LeadRunner) else -1)
        names = [opened.device_name, *(other.device for other in self._opened)]
        ranks: list[Rank] = [RankHere(agent)]
        if team is not None:
            team.ready()
            ranks += team.ranks
        self._info = self._describe(opened, pool.region.pages, max_model_len, names, server, runner.attention)
        self._metrics.identify(self._info)
        self._metrics.failed = lambda: (loop.failed_steps, loop.failed_events)
        guard = Guard(
            self._engine.step_timeout_s, self._allowance, loop, agent, server, team, alone=self._alone,
            on_hang=self._hung,
        )  # fmt: skip
        self._metrics.step_age = guard.step_age
        self._closing.callback(guard.stop)  # behind the loop's end, which waits for the step that is under way
        server.watcher = self._watcher
        self._closing.callback(loop.stop)
        self._closing.callback(server.stop)  # first: links end while the engine and the mover can still answer
        loop.start()
        laps.lap("rehearsal")
        server.attach(
            self._info, ranks, self._transfer.transport, loop.post, self._take_way,
            oldest_copy=self._copies.oldest, copy_timeout_s=self._engine.step_timeout_s,
        )  # fmt: skip
        if team is not None and team.lost is not None:
            raise team.lost
        if self._alone:
            garbage.settled()
            laps.lap("garbage")
        server.state = "ready"
        guard.start()  # what comes before this may take long
        laps.lap("links")
        logger.info("ready after %s", laps)
        if router:
            server.join(router, config.api_key)

    def _listen(self) -> WorkerServer:
        config = self._worker
        try:
            server = WorkerServer(config.host, config.port, config.wire_port, config.heartbeat_s, self._metrics)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host} port {config.port or config.wire_port}: {error.strerror}. "
                "Choose another --port (0 takes a free one) or --host."
            ) from error
        self._closing.callback(server.stop)
        server.start()
        return server

    def _mover(self, opened: OpenedModel, pool: Pool) -> TransferAgent:
        agent = TransferAgent(
            pool.region,
            opened.layout,
            self._transfer,
            on_done=self._copies.here,
            ranks=opened.head_ranges,
            host=self._worker.host,
            neighbours=self._neighbours,
            memory=cast(ProbeMemory, pool) if pool.region.kind == "cuda" else None,
        )
        self._closing.callback(agent.close)
        return agent

    def _trace(self) -> None:
        """Has spans made of what the watcher remembers, if anybody wants them."""
        name = self._worker.name or f"worker-{self._worker.role}"
        spans = open_tracing(self._observe.otlp_endpoint, name)
        if spans is not None:
            traces = WorkerTraces(spans, lambda: (self.info.name, self.info.served_name))
            self._closing.callback(traces.close)
            self._watcher.on_end = traces.ended

    def _start_others(self, devices: list[str]) -> Team | None:
        """Starts ranks 1 and up, which load while this one does."""
        if len(devices) == 1:
            return None
        team = Team(
            self._engine,
            self._transfer,
            devices,
            host=self._worker.host,
            name=self._worker.name,
            on_copied=self._copies.elsewhere,
            on_lost=self._rank_lost,
        )
        self._closing.callback(team.close)
        return team

    def _allocate(self, opened: OpenedModel) -> Pool:
        """The pool of this rank: as many pages as every rank has room for."""
        probe_bytes = self._transfer.preflight_bytes
        if self._team is None:
            return opened.allocate_pool(probe_bytes)
        self._opened = self._team.opened()
        pages = min([opened.pool_pages, *(other.pages for other in self._opened)])
        return opened.allocate_pool(probe_bytes, pages)

    def _join(self, opened: OpenedModel, pool: Pool) -> Runner:
        """The runner of this worker, once its ranks have joined."""
        team = self._team
        if team is None:
            return opened.runner(pool.region, self._engine.max_sequences)
        nccl_id = b""
        if opened.device.type == "cuda":
            from slipstream.run.parallel_nccl import new_id

            nccl_id = new_id()
        team.proceed(pool.region.pages, nccl_id)
        fds = team.meeting.take(0)
        team.meeting.close()
        self._group = group = team.beside(lambda: opened.join(fds, nccl_id))
        self._closing.callback(group.close)
        if team.lost is not None:
            group.abort()
        runner = team.beside(lambda: opened.runner(pool.region, self._engine.max_sequences))
        return LeadRunner(runner, team, group)

    def _rank_lost(self, error: SlipstreamError) -> None:
        """Team's thread: another rank has ended, and this worker with it. Frees the loop thread if it waits for it."""
        logger.error("%s", error.message)
        self._ranks_gone(error.message)
        if self._info is not None:  # otherwise `start` raises it
            self._failed(error)

    def _ranks_gone(self, reason: str) -> None:
        """Frees whatever waits for the other ranks."""
        self._silent = True  # a copy that fails by this is no failure of its request, which goes on elsewhere
        assert self._team is not None
        for rank in range(1, self._team.size):
            self._copies.lost(rank, reason)
        if self._group is not None:
            self._group.abort()

    def _describe(
        self,
        opened: OpenedModel,
        pages: int,
        max_model_len: int,
        devices: list[str],
        server: WorkerServer,
        attention: str,
    ) -> WorkerInfo:
        config = self._worker
        host = advertised(config.host)
        http = f"http://{host}:{server.http_socket.getsockname()[1]}"
        return WorkerInfo(
            id=uuid.uuid4().hex[:12],
            name=config.name or f"{config.role}:{server.http_socket.getsockname()[1]}",
            role=config.role,
            wire=f"{host}:{server.wire_socket.getsockname()[1]}",
            http=http,
            model=self._engine.model,
            served_name=opened.served_name,
            fingerprint=opened.layout.fingerprint,
            fingerprint_text=opened.layout.fingerprint_text,
            weights=opened.layout.model,
            page_tokens=opened.layout.page_tokens,
            max_model_len=max_model_len,
            pages=pages,
            max_sequences=self._engine.max_sequences,
            devices=devices,
            tp_size=self._engine.tp,
            token_bytes=opened.layout.token_bytes,
            attention=attention,
            pid=os.getpid(),
            host=socket.gethostname(),
            version=__version__,
        )

    def wait(self) -> bool:
        """Blocks until the worker ends; True when it was stopped, False when its engine failed.

        Wakes now and then, because a signal that the kernel gives to another thread (of a device driver, for example)
        does not interrupt this one, and Python runs its handler here.
        """
        while not self._ended.wait(SIGNAL_CHECK_S):
            if self._failed_at and time.monotonic() - self._failed_at > FAILED_END_S:
                logger.error("this worker has failed and cannot be taken down in order; its process ends")
                break
        return self._failure is None

    def stop(self, drain_s: float = 0.0) -> None:
        """Finishes what is here for up to `drain_s` seconds, then ends all threads and frees the pool."""
        if self._loop is not None and self._server is not None and drain_s > 0 and self._failure is None:
            self._server.drain()
            deadline = time.monotonic() + drain_s
            while not self._idle() and time.monotonic() < deadline:
                time.sleep(0.02)
        self._closing.close()
        self._ended.set()

    def _idle(self) -> bool:
        """Asks the engine, between two of its steps, whether it has anything left to do."""
        assert self._loop is not None
        answer: list[bool] = []
        asked = threading.Event()

        def ask(core: EngineCore) -> None:
            answer.append(core.idle)
            asked.set()

        self._loop.post(ask)
        return asked.wait(5.0) and answer[0]

    def _failed(self, error: BaseException) -> None:
        """The engine is broken: cut all links, so that routers continue the requests elsewhere at once."""
        if self._failure is not None:
            return
        self._failure, self._failed_at = error, time.monotonic()
        assert self._server is not None
        self._server.state = f"failed: {error}"
        threading.Thread(target=self.stop, name="slipstream-fail", daemon=True).start()

    def _hung(self, error: Hung) -> None:
        """Watch's thread, in a process that others use too: links end; what is stuck stays, with all that it uses."""
        assert self._server is not None
        if self._team is not None:
            self._ranks_gone(error.message)
        self._stuck = self._closing.pop_all()
        self._closing.callback(self._server.stop)
        self._failed(error)

    # ---------------------------------------------------------------------------------------------- between threads

    def _rehearse(self, runner: Runner, core: EngineCore, opened: OpenedModel) -> None:
        """On the loop thread, before the first step."""
        page_tokens, max_tokens = opened.layout.page_tokens, min(core.max_model_len, opened.engine.chunk_tokens)
        rehearse(
            runner,
            page_tokens=page_tokens,
            max_sequences=self._engine.max_sequences,
            max_tokens=max_tokens,
            eos_ids=opened.config.eos_ids,
        )
        if opened.device.type != "cpu" and not self._engine.mixed_chunk_tokens and self._engine.max_sequences > 1:
            most, rows = opened.engine.mixed_chunk_tokens, self._engine.max_sequences
            core.limit_mixed(measured(runner, page_tokens=page_tokens, most=most, longest=max_tokens, rows=rows))

    def _stepped(self, plan: StepPlan, seconds: float) -> None:
        self._metrics.step(plan, seconds)
        self._allowance.learn(plan, seconds)

    def _deliver(self, effects: list[Effect]) -> None:
        """With the turn at the core: copies to the mover, messages to their links, each in order."""
        assert self._server is not None
        if self._silent:
            return
        jobs = [self._job(effect) for effect in effects if isinstance(effect, CopyPages)]
        if jobs:
            self._copies.submit(*jobs)
        self._server.deliver([effect for effect in effects if not isinstance(effect, CopyPages)] if jobs else effects)

    def _job(self, effect: CopyPages) -> CopyJob:
        after = effect.behind
        if after is not None:
            after.awaited = True  # before the look: the loop thread sets `seen` and looks at this
            after = None if after.seen else after
        return CopyJob(
            self._ways.get(effect.peer, effect.peer),
            effect.xfer,
            effect.source_pages,
            effect.destination_pages,
            after=after,
            times=CopyTimes(time.monotonic(), pages=len(effect.source_pages)),
        )

    def _take_way(self, peer: str, way: str) -> None:
        """With the turn at the core: from now on copies for this peer go over the routes of a new link."""
        self._ways[peer] = way

    def _copied(self, job: CopyJob, error: str | None) -> None:
        """Mover thread, or that of a rank: one job is over, on all ranks."""
        assert self._loop is not None
        if job.times is not None:
            job.times.end(time.monotonic(), job.after)
            job.times.bytes *= self._engine.tp  # counted on this rank; the others have as much

        def settle(core: EngineCore) -> None:
            self._watcher.timed(job.times)
            if error is None:
                core.copies_done(job.peer, job.xfer, len(job.source_pages))
            else:
                logger.warning("copy of transfer %d to %s failed: %s", job.xfer, job.peer, error)
                core.copies_failed(job.peer, job.xfer, error)

        self._loop.post(settle)

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def advertised(host: str) -> str:
    """The address that others should use for a worker listening on `host`."""
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostbyname(socket.gethostname())
    return f"[{host}]" if ":" in host else host
