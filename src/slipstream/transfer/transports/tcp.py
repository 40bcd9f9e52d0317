"""Moves runs over several TCP streams a peer; works between any two machines.

A ticket is cut into pieces. Each stream has a thread that takes the next piece of that peer, whichever ticket it
belongs to, and sends it from the pool's memory in one system call; the receiver (`tcp_receiver.py`) reads it straight
into its pool and answers. A ticket is done when all its pieces are answered, which is when all its bytes are in place.
A GPU's pool is not reached by sockets: there each sending thread brings its piece to pinned slots, and sends one while
the next ones are being filled; the receiver does the reverse (`transfer.staging`).

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

from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.transfer.copies import check_bounds, split
from slipstream.transfer.cuda.copier import Copier
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.staging import Staging, StagingMaker
from slipstream.transfer.transports.base import Completion, Context, Exports, Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.cuda_ipc import event_handle
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
from slipstream.transfer.transports.tcp_receiver import STAGING_SLOT_BYTES, STAGING_SLOTS, Receiver

LEAST_PIECE = 256 << 10
LARGEST_PIECE = 4 << 20
LARGEST_STAGED = 32 << 20  # what a thread brings out of a GPU and sends in one go, in pieces of a slot
CONNECT_S = 2.0
ABANDON_S = 1.0


class Listening(msgspec.Struct, frozen=True):
    """Where a receiver listens, and its token."""

    host: str
    port: int
    token: bytes


class _Ticket:
    """`left` bytes of it are not answered. `after`, behind whose `event` the source is ready, is kept alive with it."""

    def __init__(self, number: int, left: int, after: Any, event: int | None) -> None:
        self.number, self.left, self.after, self.event = number, left, after, event


class _Stream:
    """One connection and its sending thread. `sending` and `unanswered` are guarded by the remote's lock."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sending = False
        self.ended = False
        self.unanswered: deque[tuple[int, int, _Ticket]] = deque()  # sequence number, bytes, ticket
        self.inbox = b""

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
    """TCP between pools of any kind. Raises RouteUnavailable when this rank cannot listen or stage its memory."""

    name: ClassVar[str] = "tcp"
    open_blocks: ClassVar[bool] = True

    def __init__(self, context: Context, device: Device | None = None, copiers: Any = Copier) -> None:
        array = context.region.array
        self._memory = array.data.cast("B") if array is not None else None
        self._region = context.region
        self._maker = StagingMaker(context.region, device, copiers)
        self._agent = context.agent
        self._streams = context.config.tcp_streams
        self._host = context.host
        self._numbers = itertools.count(1)
        self._sequence = itertools.count(1)
        self._remotes: list[TcpRemote] = []
        self._by_fd: dict[int, tuple[TcpRemote, _Stream]] = {}
        self._threads: list[threading.Thread] = []
        try:
            self._receiver = Receiver(self._maker, context.host, context.config.tcp_port)
        except OSError as error:
            raise RouteUnavailable(
                f"cannot listen on {context.host} port {context.config.tcp_port}: {error.strerror or error}"
            ) from error
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)

    # ------------------------------------------------------------------------------------------- as an exporter

    def export(self) -> bytes:
        return msgspec.msgpack.encode(Listening(reachable(self._host), self._receiver.port, self._receiver.token))

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
                streams.append(_Stream(connect(peer, self._agent)))
        except BaseException:
            for stream in streams:
                stream.sock.close()
            raise
        remote = TcpRemote(exports.bytes, f"{peer.host}:{peer.port}", streams)
        self._remotes.append(remote)
        for stream in streams:
            self._by_fd[stream.sock.fileno()] = (remote, stream)
            thread = threading.Thread(target=self._send, args=(remote, stream), name="slipstream-tcp-out", daemon=True)
            thread.start()
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            self._epoll.register(stream.sock, select.EPOLLIN | select.EPOLLRDHUP)
        return remote

    def write(self, remote: TcpRemote, runs: Runs, after: Any = None) -> int:
        """`after`, where this rank's pool is a GPU's: a torch.cuda.Event, or the handle of an event."""
        if after is not None and self._region.kind == "cpu":
            raise ValueError("tcp sends memory of the CPU, which no device event stands before")
        if remote.broken:
            raise PeerLost(remote.broken)
        check_bounds(runs, self._region.bytes, remote.bytes)
        total = runs.total
        share = max(-(-total // len(remote.streams)), LEAST_PIECE)
        if self._memory is None:
            pieces = split(runs, min(share, LARGEST_STAGED), len(runs.length))
        else:
            pieces = split(runs, min(share, LARGEST_PIECE), MAX_RUNS)
        ticket = _Ticket(next(self._numbers), total, after, event_handle(after))
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
            if remote.abandon is not None:
                remote.abandon.cancel()
        for thread in self._threads:  # those of remotes that are gone too: none may outlive the pool it reads
            thread.join()
        for remote in self._remotes:
            for stream in remote.streams:
                stream.sock.close()
        self._receiver.close()
        self._epoll.close()
        self._bell.close()

    # ------------------------------------------------------------------------------------------- sending threads

    def _send(self, remote: TcpRemote, stream: _Stream) -> None:
        staging: Staging | None = None
        try:
            if self._memory is None:
                staging = self._maker.staging(STAGING_SLOTS, STAGING_SLOT_BYTES)
            while (item := remote.pieces.get()) is not None:
                with remote.lock:
                    if remote.broken:
                        return
                    stream.sending = True
                if staging is None:
                    self._send_in_place(remote, stream, *item)
                else:
                    self._send_staged(remote, stream, staging, *item)
                stream.sending = False
        except OSError as error:
            remote.stop(f"sending to {remote.label} failed: {error.strerror or error}")
        except (TransferError, ValueError) as error:
            remote.stop(f"the GPU's memory cannot be sent: {error}")
        finally:
            if staging is not None:
                staging.close()
            stream.sending = False
            if remote.broken:
                self._bell.ring()

    def _send_in_place(self, remote: TcpRemote, stream: _Stream, ticket: _Ticket, piece: Runs) -> None:
        memory = self._memory
        assert memory is not None
        columns = zip(piece.source.tolist(), piece.length.tolist(), strict=True)
        self._send_piece(remote, stream, ticket, piece, [memory[at : at + size] for at, size in columns])

    def _send_staged(self, remote: TcpRemote, stream: _Stream, staging: Staging, ticket: _Ticket, runs: Runs) -> None:
        with contextlib.closing(staging.out(runs, ticket.event, MAX_RUNS)) as pieces:
            for piece, packed in pieces:
                if remote.broken:
                    return
                self._send_piece(remote, stream, ticket, piece, [packed.data.cast("B")])

    def _send_piece(
        self, remote: TcpRemote, stream: _Stream, ticket: _Ticket, piece: Runs, vectors: list[memoryview]
    ) -> None:
        sequence, total = next(self._sequence), piece.total
        with remote.lock:
            stream.unanswered.append((sequence, total, ticket))
        table = np.stack((piece.destination, piece.length), axis=1)
        head = PIECE.pack(sequence, len(piece.length), total) + table.tobytes()
        send_vectors(stream.sock, [memoryview(head), *vectors])

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
            expected, size, ticket = stream.unanswered[0] if stream.unanswered else (0, 0, None)
            if sequence == expected and not text:
                stream.unanswered.popleft()
        if sequence != expected or text or ticket is None:
            remote.stop(f"{remote.label}: {text or 'answered a piece that was not sent'}")
            return
        ticket.left -= size
        if ticket.left == 0 and remote.tickets.pop(ticket.number, None) is not None:
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


def connect(peer: Listening, agent: str) -> socket.socket:
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


def reachable(host: str) -> str:
    """The address to give to others; a wildcard stands for this machine's own name."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def create(context: Context) -> TcpTransport:
    return TcpTransport(context)
