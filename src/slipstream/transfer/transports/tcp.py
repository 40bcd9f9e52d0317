"""Moves runs over several TCP streams a peer; works between any two machines.

A ticket is cut into pieces. Each stream has a thread that takes the next piece of that peer, whichever ticket it
belongs to, and sends it from the pool's memory in one system call; the receiver (`tcp_receiver.py`) reads it straight
into its pool and answers. A ticket is done when all its pieces are answered, which is when all its bytes are in place.

When one stream breaks, the remote is broken: no further piece is sent, the other streams are half-closed, and the
tickets fail when every stream has reached its end. The receiver ends a stream only when it has stopped writing, so
nothing of a failed ticket can arrive afterwards. `close` is for a peer whose link is over; a receiver that is not even
able to end its streams is then left behind after a moment: its own `cut_off` protects its memory, and ours is no longer
read.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import select
import socket
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, ClassVar

import msgspec
import numpy as np

from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.transfer.copies import check_bounds, split
from slipstream.transfer.transports.base import Completion, Context, Exports, Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.memory import host_array
from slipstream.transfer.transports.tcp_frames import (
    ANSWER,
    GREETING,
    MAGIC,
    MAX_RUNS,
    PIECE,
    receive_exactly,
    send_vectors,
    tune,
)
from slipstream.transfer.transports.tcp_receiver import Receiver

LEAST_PIECE = 256 << 10
LARGEST_PIECE = 4 << 20
CONNECT_S = 2.0
ABANDON_S = 1.0


class Listening(msgspec.Struct, frozen=True):
    """Where a receiver listens, and its token."""

    host: str
    port: int
    token: bytes


class _Ticket:
    def __init__(self, number: int, pieces: int) -> None:
        self.number, self.unanswered = number, pieces


class _Stream:
    """One connection and its sending thread. `sending` and `unanswered` are guarded by the remote's lock."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sending = False
        self.ended = False
        self.unanswered: deque[tuple[int, _Ticket]] = deque()
        self.inbox = b""
        self.thread: threading.Thread | None = None

    def finish(self) -> None:
        """No more from our side; the other side answers with the end of the stream when it has stopped writing."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)


class TcpRemote:
    """A peer's pool behind its streams. `broken` says why nothing more is sent, once that is so."""

    def __init__(self, size: int, label: str, streams: list[_Stream]) -> None:
        self.bytes = size
        self.label = label
        self.streams = streams
        self.broken = ""
        self.lock = threading.Lock()
        self.pieces: queue.SimpleQueue[tuple[_Ticket, Runs] | None] = queue.SimpleQueue()
        self.tickets: dict[int, _Ticket] = {}
        self.abandon: threading.Timer | None = None
        self.abandoned = False

    def stop(self, reason: str) -> None:
        """Sends no more; the tickets fail later, when all streams have ended."""
        with self.lock:
            if self.broken:
                return
            self.broken = reason
        for stream in self.streams:
            self.pieces.put(None)
            stream.finish()

    @property
    def over(self) -> bool:
        """Whether nothing of this remote is in flight in either direction."""
        with self.lock:
            return bool(self.broken) and all(s.ended and not s.sending for s in self.streams)


class TcpTransport:
    """TCP between pools in the memory of CPUs."""

    name: ClassVar[str] = "tcp"
    open_blocks: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self._memory = host_array(context.region, "tcp").data.cast("B")
        self._agent = context.agent
        self._streams = context.config.tcp_streams
        self._host = context.host
        self._numbers = itertools.count(1)
        self._sequence = itertools.count(1)
        self._remotes: list[TcpRemote] = []
        self._by_fd: dict[int, tuple[TcpRemote, _Stream]] = {}
        try:
            self._receiver = Receiver(self._memory, context.host, context.config.tcp_port)
        except OSError as error:
            raise RouteUnavailable(
                f"cannot listen on {context.host} port {context.config.tcp_port}: {error.strerror or error}"
            ) from error
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)

    # ------------------------------------------------------------------------------------------- as an exporter

    def export(self) -> bytes:
        return msgspec.msgpack.encode(Listening(_reachable(self._host), self._receiver.port, self._receiver.token))

    def admit(self, agent: str) -> None:
        self._receiver.admit(agent)

    def cut_off(self, agent: str) -> Future[None]:
        return self._receiver.cut_off(agent)

    # ------------------------------------------------------------------------------------------- as an importer

    def fileno(self) -> int:
        return self._epoll.fileno()

    def open(self, exports: Exports, detail: bytes) -> TcpRemote:
        peer = msgspec.msgpack.decode(detail, type=Listening)
        streams: list[_Stream] = []
        try:
            for _ in range(self._streams):
                streams.append(_Stream(_connect(peer, self._agent)))
        except BaseException:
            for stream in streams:
                stream.sock.close()
            raise
        remote = TcpRemote(exports.bytes, f"{peer.host}:{peer.port}", streams)
        self._remotes.append(remote)
        for stream in streams:
            self._by_fd[stream.sock.fileno()] = (remote, stream)
            stream.thread = threading.Thread(
                target=self._send, args=(remote, stream), name="slipstream-tcp-out", daemon=True
            )
            stream.thread.start()
            self._epoll.register(stream.sock, select.EPOLLIN | select.EPOLLRDHUP)
        return remote

    def write(self, remote: TcpRemote, runs: Runs, after: Any = None) -> int:
        if after is not None:
            raise ValueError("tcp sends memory of the CPU, which no device event stands before")
        if remote.broken:
            raise PeerLost(remote.broken)
        check_bounds(runs, len(self._memory), remote.bytes)
        share = -(-runs.total // len(remote.streams))
        pieces = list(split(runs, min(max(share, LEAST_PIECE), LARGEST_PIECE), MAX_RUNS))
        ticket = _Ticket(next(self._numbers), len(pieces))
        remote.tickets[ticket.number] = ticket
        for piece in pieces:
            remote.pieces.put((ticket, piece))
        return ticket.number

    def poll(self) -> list[Completion]:
        done: list[Completion] = []
        for fd, _ in self._epoll.poll(0):
            if fd == self._bell.fileno():
                self._bell.hush()
            elif fd in self._by_fd:
                self._hear(*self._by_fd[fd], done)
        for remote in [remote for remote in self._remotes if remote.broken]:
            if remote.abandoned:
                self._leave_behind(remote)
            if remote.over:
                self._bury(remote, done)
        return done

    def close(self, remote: TcpRemote) -> None:
        if remote not in self._remotes or remote.abandon is not None:
            return
        remote.stop("the route was closed")
        remote.abandon = threading.Timer(ABANDON_S, self._abandon, (remote,))
        remote.abandon.daemon = True
        remote.abandon.start()

    def shutdown(self) -> None:
        for remote in self._remotes:
            remote.stop("the route was closed")
            self._leave_behind(remote)
            for stream in remote.streams:
                assert stream.thread is not None
                stream.thread.join()
                stream.sock.close()
            if remote.abandon is not None:
                remote.abandon.cancel()
        self._receiver.close()
        self._epoll.close()
        self._bell.close()

    # ------------------------------------------------------------------------------------------- sending threads

    def _send(self, remote: TcpRemote, stream: _Stream) -> None:
        while (item := remote.pieces.get()) is not None:
            ticket, piece = item
            sequence = next(self._sequence)
            with remote.lock:
                if remote.broken:
                    return
                stream.sending = True
                stream.unanswered.append((sequence, ticket))
            try:
                self._send_piece(stream.sock, sequence, piece)
            except OSError as error:
                remote.stop(f"sending to {remote.label} failed: {error.strerror or error}")
            with remote.lock:
                stream.sending = False
                broken = remote.broken
            if broken:
                self._bell.ring()
                return

    def _send_piece(self, sock: socket.socket, sequence: int, piece: Runs) -> None:
        memory = self._memory
        table = np.stack((piece.destination, piece.length), axis=1)
        head = PIECE.pack(sequence, len(piece.length), piece.total) + table.tobytes()
        columns = zip(piece.source.tolist(), piece.length.tolist(), strict=True)
        send_vectors(sock, [memoryview(head), *(memory[at : at + size] for at, size in columns)])

    # ------------------------------------------------------------------------------------------- the mover

    def _hear(self, remote: TcpRemote, stream: _Stream, done: list[Completion]) -> None:
        try:
            data = stream.sock.recv(64 << 10, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            remote.stop(f"the connection to {remote.label} broke: {error.strerror or error}")
            data = b""
        if not data:
            self._ended(remote, stream)
            return
        stream.inbox += data
        while len(stream.inbox) >= ANSWER.size:
            sequence, size = ANSWER.unpack_from(stream.inbox)
            if len(stream.inbox) < ANSWER.size + size:
                return
            text = stream.inbox[ANSWER.size : ANSWER.size + size].decode(errors="replace")
            stream.inbox = stream.inbox[ANSWER.size + size :]
            self._answered(remote, stream, sequence, text, done)

    def _answered(self, remote: TcpRemote, stream: _Stream, sequence: int, text: str, done: list[Completion]) -> None:
        with remote.lock:
            expected, ticket = stream.unanswered[0] if stream.unanswered else (0, None)
            if sequence == expected and not text:
                stream.unanswered.popleft()
        if sequence != expected or text or ticket is None:
            remote.stop(f"{remote.label}: {text or 'answered a piece that was not sent'}")
            return
        ticket.unanswered -= 1
        if ticket.unanswered == 0 and remote.tickets.pop(ticket.number, None) is not None:
            done.append(Completion(ticket.number))

    def _ended(self, remote: TcpRemote, stream: _Stream) -> None:
        if not stream.ended:
            stream.ended = True
            del self._by_fd[stream.sock.fileno()]
            self._epoll.unregister(stream.sock)
        remote.stop(f"{remote.label} closed the connection: its process has ended or has cut this worker off")

    def _bury(self, remote: TcpRemote, done: list[Completion]) -> None:
        done += [Completion(number, remote.broken) for number in remote.tickets]
        remote.tickets.clear()
        self._remotes.remove(remote)
        if remote.abandon is not None:
            remote.abandon.cancel()
        for stream in remote.streams:
            stream.sock.close()

    def _abandon(self, remote: TcpRemote) -> None:
        remote.abandoned = True
        self._bell.ring()

    def _leave_behind(self, remote: TcpRemote) -> None:
        """Resets what has not ended by itself: nothing that still waits here is sent, and no thread is held."""
        for stream in remote.streams:
            if not stream.ended:
                self._ended(remote, stream)
                with contextlib.suppress(OSError):
                    stream.sock.shutdown(socket.SHUT_RDWR)


def _connect(peer: Listening, agent: str) -> socket.socket:
    """One greeted stream. Raises RouteUnavailable with the reason."""
    where = f"{peer.host}:{peer.port}"
    try:
        sock = socket.create_connection((peer.host, peer.port), CONNECT_S)
    except OSError as error:
        raise RouteUnavailable(f"cannot connect to {where}: {error.strerror or error}") from error
    try:
        tune(sock)
        name = agent.encode()
        sock.sendall(GREETING.pack(MAGIC, peer.token, len(name)) + name)
        answer = memoryview(bytearray(len(MAGIC)))
        if not receive_exactly(sock, answer) or bytes(answer) != MAGIC:
            raise RouteUnavailable(f"{where} refused the connection: wrong token, or it does not know this worker")
    except OSError as error:
        sock.close()
        raise RouteUnavailable(f"{where} does not answer: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock


def _reachable(host: str) -> str:
    """The address to give to others; a wildcard stands for this machine's own name."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def create(context: Context) -> TcpTransport:
    return TcpTransport(context)
