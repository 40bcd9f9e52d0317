"""Moves runs over several TCP streams a peer; works between any two machines.

A ticket is cut into pieces, which go over whatever stream is free (`tcp_sender.py`); the receiver (`tcp_receiver.py`)
reads each straight into its pool and answers. A ticket is done when all its pieces are answered, which is when all its
bytes are in place.

When one stream breaks, the remote is broken: no further piece is sent, the other streams are half-closed, and the
tickets fail when every stream has reached its end. The receiver ends a stream only when it has stopped writing, so
nothing of a failed ticket can arrive afterwards. `close` is for a peer whose link is over; a receiver that is not even
able to end its streams is then left behind after a moment: its own `cut_off` protects its memory, and ours is no longer
read.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from concurrent.futures import Future
from typing import Any, ClassVar

import msgspec

from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.transfer.copies import check_bounds
from slipstream.transfer.cuda.copier import Copier
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.staging import StagingMaker
from slipstream.transfer.transports.base import Completion, Context, Exports, Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.cuda_ipc import event_handle
from slipstream.transfer.transports.tcp_frames import (
    ANSWER,
    GREETING,
    MAGIC,
    receive_exactly,
    tune,
)
from slipstream.transfer.transports.tcp_receiver import Receiver
from slipstream.transfer.transports.tcp_sender import Stream, TcpRemote, Ticket

CONNECT_S = 2.0
ABANDON_S = 1.0


class Listening(msgspec.Struct, frozen=True):
    """Where a receiver listens, and its token."""

    host: str
    port: int
    token: bytes


class TcpTransport:
    """TCP between pools of any kind. Raises RouteUnavailable when this rank cannot listen or stage its memory."""

    name: ClassVar[str] = "tcp"
    open_blocks: ClassVar[bool] = True
    inline_bytes: ClassVar[int] = 1 << 20  # longer writes take time to cut

    def __init__(self, context: Context, device: Device | None = None, copiers: Any = Copier) -> None:
        self._region = context.region
        self._maker = StagingMaker(context.region, device, copiers)
        self._agent = context.agent
        self._streams = context.config.tcp_streams
        self._host = context.host
        self._numbers = itertools.count(1)
        self._remotes: list[TcpRemote] = []
        self._by_fd: dict[int, tuple[TcpRemote, Stream]] = {}
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
        socks: list[socket.socket] = []
        try:
            for _ in range(TcpRemote.connections(self._streams, self._region.array is not None)):
                socks.append(connect(peer, self._agent))
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        remote = TcpRemote(exports.bytes, f"{peer.host}:{peer.port}", socks, self._maker, self._bell)
        self._remotes.append(remote)
        self._threads = [other for other in self._threads if other.is_alive()] + remote.start()
        for stream in remote.streams:
            self._by_fd[stream.sock.fileno()] = (remote, stream)
            self._epoll.register(stream.sock, select.EPOLLIN | select.EPOLLRDHUP)
        return remote

    def write(self, remote: TcpRemote, runs: Runs, after: Any = None) -> int:
        """`after`, where this rank's pool is a GPU's: a torch.cuda.Event, or the handle of an event."""
        if after is not None and self._region.kind == "cpu":
            raise ValueError("tcp sends memory of the CPU, which no device event stands before")
        if remote.broken:
            raise PeerLost(remote.broken)
        check_bounds(runs, self._region.bytes, remote.bytes)
        ticket = Ticket(next(self._numbers), runs.total, after, event_handle(after))
        remote.write(ticket, runs)
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

    # ------------------------------------------------------------------------------------------- the mover

    def _hear(self, remote: TcpRemote, stream: Stream, done: list[Completion]) -> None:
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

    def _answered(self, remote: TcpRemote, stream: Stream, sequence: int, text: str, done: list[Completion]) -> None:
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

    def _ended(self, remote: TcpRemote, stream: Stream) -> None:
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
