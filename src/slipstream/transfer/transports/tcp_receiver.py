"""The receiving half of the tcp transport: a listener, and a thread a stream that reads into the pool.

A stream belongs to the agent that its greeting names, which must know the token and be admitted. `cut_off` ends the
streams of one agent and is done when their threads have stopped, which this process can prove by itself, whatever state
the other side is in.

Into a pool of the CPU the bytes are read in place and answered at once. For a GPU's they are read into pinned slots,
and a piece is answered when its copy to the device has ended, while the next ones are being read.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import socket
import threading
import time
from concurrent.futures import Future
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import TransferError
from slipstream.transfer.copies import split
from slipstream.transfer.staging import PIECE_RUNS, Staging, StagingMaker
from slipstream.transfer.transports.base import Runs
from slipstream.transfer.transports.tcp_frames import (
    ANSWER,
    GREETING,
    MAGIC,
    MAX_NAME,
    MAX_PIECE,
    MAX_RUNS,
    PIECE,
    receive_exactly,
    receive_vectors,
    tune,
)

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
GREETING_S = 5.0
STAGING_SLOTS = 4  # a stream, where the pool is a GPU's
STAGING_SLOT_BYTES = 4 << 20
RETRY_S = 0.1  # after a failed accept (no descriptors left), which would fail again at once


class Incoming:
    """One accepted stream; `agent` is empty until it has greeted."""

    def __init__(self, sock: socket.socket, label: str) -> None:
        self.sock, self.label = sock, label
        self.agent = ""

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Listener:
    """Streams of admitted agents, each with a thread in `attend`. Raises OSError when it cannot listen there."""

    def __init__(self, host: str, port: int) -> None:
        self.token = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._admitted: set[str] = set()
        self._incoming: dict[Incoming, threading.Thread] = {}
        self._leaving: dict[str, list[Future[None]]] = {}
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="slipstream-tcp-accept", daemon=True)
        self._thread.start()

    def attend(self, stream: Incoming) -> None:
        """Serves one stream, until either side has ended it; returns when nothing of it can still arrive.

        May raise OSError, ValueError or TransferError, which is logged.
        """
        raise NotImplementedError

    def dismiss(self, stream: Incoming) -> None:
        """Makes `attend` return soon."""
        stream.end()

    def admit(self, agent: str) -> None:
        with self._lock:
            self._admitted.add(agent)

    def cut_off(self, agent: str) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._admitted.discard(agent)
            streams = [stream for stream in self._incoming if stream.agent == agent]
            if not streams:
                future.set_result(None)
                return future
            self._leaving.setdefault(agent, []).append(future)
        for stream in streams:
            self.dismiss(stream)
        return future

    def close(self) -> None:
        """Ends listener and streams; returns when no thread writes any more."""
        with self._lock:
            self._closing = True
            threads = dict(self._incoming)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for stream in threads:
            stream.end()
        for thread in threads.values():
            thread.join()

    # ------------------------------------------------------------------------------------------- threads

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    logger.warning("cannot accept a tcp transfer stream: %s", error)
                    time.sleep(RETRY_S)
                continue
            stream = Incoming(sock, f"{address[0]}:{address[1]}")
            thread = threading.Thread(target=self._serve, args=(stream,), name="slipstream-tcp-in", daemon=True)
            with self._lock:
                strangers = sum(not other.agent for other in self._incoming)
                taken = not self._closing and strangers < MAX_STRANGERS
                if taken:
                    self._incoming[stream] = thread
                    thread.start()
            if not taken:
                sock.close()

    def _serve(self, stream: Incoming) -> None:
        try:
            if self._greet(stream):
                self.attend(stream)
        except (OSError, ValueError, TransferError) as error:
            if stream.agent and not self._closing:
                logger.warning("transfer stream from %s ended: %s", stream.label, error)
        finally:
            stream.sock.close()
            with self._lock:
                del self._incoming[stream]
                last = all(other.agent != stream.agent for other in self._incoming)
                done = self._leaving.pop(stream.agent, []) if last else []
            for future in done:
                future.set_result(None)

    def _greet(self, stream: Incoming) -> bool:
        sock = stream.sock
        sock.settimeout(GREETING_S)
        head = memoryview(bytearray(GREETING.size))
        if not receive_exactly(sock, head):
            return False
        magic, token, size = GREETING.unpack(head)
        if magic != MAGIC or size > MAX_NAME:
            logger.warning("closed a connection from %s: it does not speak the tcp transfer protocol", stream.label)
            return False
        name = memoryview(bytearray(size))
        if not receive_exactly(sock, name):
            return False
        agent = bytes(name).decode(errors="replace")
        with self._lock:
            known = hmac.compare_digest(token, self.token)
            if known and agent in self._admitted:
                stream.agent = agent
        if not stream.agent:
            reason = f"agent {agent!r} is not admitted" if known else "the token is wrong"
            logger.warning("refused a tcp transfer stream from %s: %s", stream.label, reason)
            return False
        sock.settimeout(None)
        tune(sock)
        sock.sendall(MAGIC)
        return True


class _Sink(Protocol):
    """Where the bytes of a stream go. `busy` while pieces that were taken are not in place; `flush` waits for them."""

    size: int
    busy: bool

    def take(self, sock: socket.socket, table: NDArray[np.int64]) -> bool:
        """Reads the bytes of one piece; False when the stream ends before."""
        ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _PoolSink:
    """A pool of the CPU: the system writes the bytes to their places."""

    busy = False

    def __init__(self, memory: memoryview) -> None:
        self.size = len(memory)
        self._memory = memory

    def take(self, sock: socket.socket, table: NDArray[np.int64]) -> bool:
        memory = self._memory
        return receive_vectors(sock, [memory[at : at + size] for at, size in table.tolist()])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _StagedSink:
    """A GPU's pool: the bytes are read into pinned slots, from where they are copied on."""

    def __init__(self, staging: Staging, size: int) -> None:
        self.size = size
        self.busy = False
        self._staging = staging

    def take(self, sock: socket.socket, table: NDArray[np.int64]) -> bool:
        destination, length = np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
        self.busy = True
        for part in split(Runs(destination, destination, length), self._staging.slot_bytes, PIECE_RUNS):
            try:
                with self._staging.into(part) as room:
                    if not receive_exactly(sock, room.data.cast("B")):
                        raise EOFError
            except EOFError:
                return False
        return True

    def flush(self) -> None:
        self._staging.flush()
        self.busy = False

    def close(self) -> None:
        self._staging.close()


class Receiver(Listener):
    """Writes into the pool of `maker` what admitted agents send. Raises OSError when it cannot listen there."""

    def __init__(self, maker: StagingMaker, host: str, port: int) -> None:
        self._maker = maker
        super().__init__(host, port)

    def attend(self, stream: Incoming) -> None:
        sock = stream.sock
        try:
            sink = self._sink()
        except TransferError as error:
            head = memoryview(bytearray(PIECE.size))
            if receive_exactly(sock, head):
                _refuse(sock, PIECE.unpack(head)[0], str(error))
            return
        try:
            self._receive(sock, sink)
        finally:
            sink.close()

    def _sink(self) -> _Sink:
        region = self._maker.region
        if region.array is not None:
            return _PoolSink(region.array.data.cast("B"))
        return _StagedSink(self._maker.staging(STAGING_SLOTS, STAGING_SLOT_BYTES), region.bytes)

    def _receive(self, sock: socket.socket, sink: _Sink) -> None:
        head = memoryview(bytearray(PIECE.size))
        table = np.empty((MAX_RUNS, 2), np.int64)
        waiting: list[int] = []  # pieces that were taken and not answered
        more = select.poll()
        more.register(sock, select.POLLIN)
        while receive_exactly(sock, head):
            sequence, count, total = PIECE.unpack(head)
            problem = "" if 0 < count <= MAX_RUNS and 0 < total <= MAX_PIECE else f"{count} runs, {total} bytes"
            runs = table[:count]
            if not problem:
                if not receive_exactly(sock, runs.data.cast("B")):
                    return
                problem = _problem(runs, total, sink.size)
            if problem:
                _refuse(sock, sequence, f"refused a piece that does not fit this pool: {problem}")
            try:
                if not sink.take(sock, runs):
                    return
                waiting.append(sequence)
                if sink.busy and len(waiting) < STAGING_SLOTS - 1 and more.poll(0):
                    continue
                sink.flush()
            except TransferError as error:
                _refuse(sock, waiting[0] if waiting else sequence, f"cannot write to its GPU: {error}")
            sock.sendall(b"".join(ANSWER.pack(number, 0) for number in waiting))
            waiting.clear()


def _refuse(sock: socket.socket, sequence: int, reason: str) -> NoReturn:
    text = reason.encode()
    sock.sendall(ANSWER.pack(sequence, len(text)) + text)
    raise ValueError(reason)


def _problem(runs: np.ndarray, total: int, size: int) -> str:
    if len(runs) == 1:  # a short write alone: some tens of microseconds are much of its time
        offset, length = runs[0].tolist()
        if offset >= 0 and 0 < length <= size - offset and length == total:
            return ""
    offsets, lengths = runs[:, 0], runs[:, 1]
    bad = np.flatnonzero((offsets < 0) | (lengths <= 0) | (lengths > size - offsets))
    if len(bad):
        return f"{int(lengths[bad[0]])} bytes at {int(offsets[bad[0]])} of {size}"
    if int(lengths.sum()) != total:
        return f"runs of {int(lengths.sum())} bytes announced as {total}"
    return ""
