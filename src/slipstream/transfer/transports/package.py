"""What the transports over other projects' packages (`nixl`, `mooncake`) share.

A destination keeps a gate (`gate.py`) and hands out a landing to each source. At the source each remote has a thread,
which starts copies and looks after them with growing pauses; the mover listens to the gates and so knows of a peer's
death at once, whatever a call into the package is doing. When a remote ends, its thread gives the copies under way a
moment, leaves the gate, and waits for the destination's end before the tickets fail: then nothing of them can arrive. A
peer that neither leaves nor dies is left behind after a moment, since the link to it is over and its own `cut_off`
protects its memory; so is a call into the package that does not return, whose peer then keeps its memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol

import msgspec

from slipstream.errors import ConfigError, MissingExtra, PeerLost, RouteUnavailable, TransferError
from slipstream.transfer.copies import check_bounds
from slipstream.transfer.cuda.runtime import CudaError, Device
from slipstream.transfer.route import machine_id
from slipstream.transfer.transports.base import Completion, Context, Exports, Region, Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.cuda_ipc import event_handle
from slipstream.transfer.transports.gate import Caller, Gate, Landing, pid_namespace, receive_frame, send_frame, watch
from slipstream.transfer.transports.tcp import Listening, connect, reachable

LANDING_S = 30.0  # to make an agent and register the memory
ABANDON_S = 1.0
STUCK_S = 3.0  # a call into the package that does not return is left behind
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3


class Engine(Protocol):
    """The source's side of a package. `reach` and `leave` are for one peer; a job is what `start` gave.

    Used by several threads at once. Raises RouteUnavailable from `reach`, TransferError from the others.
    """

    def reach(self, description: bytes, exports: Exports) -> Any: ...

    def start(self, there: Any, runs: Runs) -> Any:
        """Starts a copy; may wait for its end."""
        ...

    def finished(self, there: Any, job: Any) -> bool:
        """Whether every byte of a started copy is visible at the destination."""
        ...

    def give_up(self, there: Any, job: Any) -> None:
        """Cancels a copy as far as that is possible."""
        ...

    def leave(self, there: Any) -> None: ...


class PackageRemote:
    """A peer's memory behind its gate. `ended` says why nothing more is started, once that is so."""

    def __init__(self, size: int, label: str, sock: socket.socket, there: Any) -> None:
        self.bytes, self.label, self.sock, self.there = size, label, sock, there
        self.ended = ""
        self.gone = threading.Event()  # the destination's end was heard
        self.lock = threading.Lock()
        self.work: queue.SimpleQueue[tuple[int, Runs, Any, int | None] | None] = queue.SimpleQueue()
        self.tickets: set[int] = set()
        self.stuck: threading.Timer | None = None  # once it has ended
        self.left = False  # whether its thread is done with the socket


class PackageTransport:
    """The verbs, over an Engine. A module of a package gives it `name`, `_make_engine` and `_make_landing`."""

    name: ClassVar[str] = ""
    open_blocks: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self.region, self._agent, self.host = context.region, context.agent, context.host
        self._device: Device | None = None
        if context.region.kind == "cuda":
            try:
                self._device = Device(context.region.device)
            except (MissingExtra, ConfigError, CudaError) as error:
                raise RouteUnavailable(error.message) from error
        self._engine: Engine | None = None
        self._numbers = itertools.count(1)
        self._remotes: dict[int, PackageRemote] = {}
        self._threads: list[threading.Thread] = []
        self._done: deque[Completion] = deque()
        try:
            self._gate = Gate(context.host, context.region.kind, self._land)
        except OSError as error:
            raise RouteUnavailable(f"cannot listen on {context.host}: {error.strerror or error}") from error
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)

    def _make_engine(self) -> Engine:
        """Raises RouteUnavailable. Called when the first peer is opened."""
        raise NotImplementedError

    def _make_landing(self) -> Landing:
        """Raises RouteUnavailable. Called on the gate's threads."""
        raise NotImplementedError

    def _land(self) -> Landing:
        self._use_device()
        return self._make_landing()

    def _use_device(self) -> None:
        """Packages look for memory of a GPU in the calling thread's context."""
        if self._device is not None:
            self._device.use()

    # ------------------------------------------------------------------------------------------- as an exporter

    def export(self) -> bytes:
        return msgspec.msgpack.encode(Listening(reachable(self.host), self._gate.port, self._gate.token))

    def admit(self, agent: str) -> None:
        self._gate.admit(agent)

    def cut_off(self, agent: str) -> Future[None]:
        return self._gate.cut_off(agent)

    # ------------------------------------------------------------------------------------------- as an importer

    def fileno(self) -> int:
        return self._epoll.fileno()

    def open(self, exports: Exports, detail: bytes) -> PackageRemote:
        peer = msgspec.msgpack.decode(detail, type=Listening)
        self._use_device()
        self._engine = self._engine or self._make_engine()
        sock = connect(peer, self._agent)
        try:
            watch(sock)
            caller = Caller(machine_id(), pid_namespace(), os.getpid(), self.region.kind)
            sock.settimeout(LANDING_S)
            send_frame(sock, 1, msgspec.msgpack.encode(caller))
            try:
                welcome, description = receive_frame(sock)
            except OSError as error:
                raise RouteUnavailable(f"{peer.host}:{peer.port} made no landing: {error}") from error
            if not welcome:
                raise RouteUnavailable(f"at the peer: {description.decode(errors='replace')}")
            there = self._engine.reach(description, exports)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        remote = PackageRemote(exports.bytes, f"{peer.host}:{peer.port}", sock, there)
        thread = threading.Thread(target=self._work, args=(remote,), name=f"slipstream-{self.name}", daemon=True)
        thread.start()
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        self._remotes[sock.fileno()] = remote
        self._epoll.register(sock, select.EPOLLIN | select.EPOLLRDHUP)
        return remote

    def write(self, remote: PackageRemote, runs: Runs, after: Any = None) -> int:
        """`after`, where this rank's pool is a GPU's: a torch.cuda.Event, or the handle of an event."""
        if after is not None and self.region.kind == "cpu":
            raise ValueError(f"{self.name} copies memory of the CPU, which no device event stands before")
        event = event_handle(after)
        check_bounds(runs, self.region.bytes, remote.bytes)
        with remote.lock:
            if remote.ended:
                raise PeerLost(remote.ended)
            ticket = next(self._numbers)
            remote.tickets.add(ticket)
            remote.work.put((ticket, runs, after, event))
        return ticket

    def poll(self) -> list[Completion]:
        for fd, _ in self._epoll.poll(0):
            if fd == self._bell.fileno():
                self._bell.hush()
            elif fd in self._remotes:
                self._hear(self._remotes[fd])
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self, remote: PackageRemote) -> None:
        self._stop(remote, "the route was closed")

    def shutdown(self) -> None:
        for remote in list(self._remotes.values()):
            self._stop(remote, "the route was closed")
        deadline = time.monotonic() + STUCK_S
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:
            self.poll()
            time.sleep(_LONGEST_PAUSE_S)
        for remote in self._remotes.values():
            if remote.stuck is not None:
                remote.stuck.cancel()
            remote.sock.close()
        self._gate.close()
        self._epoll.close()
        self._bell.close()

    # ------------------------------------------------------------------------------------------- ends

    def _hear(self, remote: PackageRemote) -> None:
        try:
            word = remote.sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word:
            self._stop(remote, f"{remote.label} has cut this worker off")
            return
        self._stop(remote, f"the process of {remote.label} has ended, or the way to it is broken")
        self._epoll.unregister(remote.sock)
        del self._remotes[remote.sock.fileno()]
        remote.gone.set()
        self._release(remote)

    def _release(self, remote: PackageRemote, left: bool = False) -> None:
        """Closes the socket when both the mover and the remote's thread are done with it."""
        with remote.lock:
            remote.left = remote.left or left
            if remote.left and remote.gone.is_set():
                remote.sock.close()

    def _stop(self, remote: PackageRemote, reason: str) -> None:
        """Starts no more; the remote's thread ends what is under way, and fails the rest."""
        with remote.lock:
            if remote.ended:
                return
            remote.stuck = threading.Timer(STUCK_S, self._fail, (remote,))
            remote.stuck.daemon = True
            remote.stuck.start()
            remote.ended = reason
        remote.work.put(None)

    def _fail(self, remote: PackageRemote) -> None:
        with remote.lock:
            failed = sorted(remote.tickets)
            remote.tickets.clear()
        self._done += [Completion(ticket, remote.ended) for ticket in failed]
        self._bell.ring()

    def _finish(self, remote: PackageRemote, ticket: int) -> None:
        with remote.lock:
            if ticket not in remote.tickets:
                return
            remote.tickets.remove(ticket)
        self._done.append(Completion(ticket))
        self._bell.ring()

    # ------------------------------------------------------------------------------------------- a remote's thread

    def _work(self, remote: PackageRemote) -> None:
        assert self._engine is not None
        engine = self._engine
        jobs: deque[tuple[int, Any]] = deque()
        try:
            self._use_device()
            self._copy(remote, engine, jobs)
        except TransferError as error:
            self._stop(remote, error.message)
        self._end_jobs(remote, engine, jobs)
        with contextlib.suppress(OSError):
            remote.sock.shutdown(socket.SHUT_WR)
        remote.gone.wait(ABANDON_S)
        assert remote.stuck is not None
        remote.stuck.cancel()
        self._fail(remote)
        with contextlib.suppress(TransferError):
            engine.leave(remote.there)
        self._release(remote, left=True)

    def _copy(self, remote: PackageRemote, engine: Engine, jobs: deque[tuple[int, Any]]) -> None:
        """Starts what is asked for and reports what has ended, until the remote has."""
        held: deque[tuple[int, Runs, Any, int | None]] = deque()  # behind an event that has not happened
        pause = _FIRST_PAUSE_S
        while not remote.ended:
            item = None
            with contextlib.suppress(queue.Empty):
                item = remote.work.get(timeout=pause if jobs or held else None)
            if item is not None:
                held.append(item)
            progress = False
            while held and not remote.ended and self._ready(held[0][3]):
                ticket, runs, _, _ = held.popleft()
                jobs.append((ticket, engine.start(remote.there, runs)))
                progress = True
            for _ in range(len(jobs)):
                ticket, job = jobs[0]
                if engine.finished(remote.there, job):
                    self._finish(remote, ticket)
                    progress = True
                    jobs.popleft()
                else:
                    jobs.rotate(-1)
            pause = _FIRST_PAUSE_S if progress or item else min(1.25 * pause, _LONGEST_PAUSE_S)

    def _ready(self, event: int | None) -> bool:
        return event is None or (self._device is not None and self._device.is_done(event))

    def _end_jobs(self, remote: PackageRemote, engine: Engine, jobs: deque[tuple[int, Any]]) -> None:
        """Waits a moment for what is under way, and gives up what has not ended by then."""
        deadline = time.monotonic() + ABANDON_S
        for _, job in jobs:
            try:
                while not engine.finished(remote.there, job):
                    if time.monotonic() > deadline or remote.gone.is_set():
                        engine.give_up(remote.there, job)
                        break
                    time.sleep(_LONGEST_PAUSE_S)
            except TransferError:
                continue
        jobs.clear()


def memory_of(region: Region) -> tuple[str, int]:
    """("cpu" or "cuda", number of the device) of a region."""
    return region.kind, max(region.device_index, 0)
