"""Hands file descriptors to other processes of this machine, and knows when these processes are gone.

The exporter of memory keeps a door: an abstract unix socket under a random name (nothing of it ever lies in a file
system, so nothing is left behind by a kill), which a peer learns from the exporter's description, with a token. A peer
that is admitted and knocks with the token gets the exporter's payload and descriptors in one message, which works
across PID namespaces; the connection then stays open and silent.

Its end is the proof that the peer writes no more. A peer unmaps the memory before it closes the connection. A peer
that is killed is torn down by the kernel thread by thread, and each thread leaves its address space (exit_mm) before
it lets go of its files (exit_files, kernel/exit.c do_exit): when the last reference to the connection goes, no thread
of that process can execute a store any more. A child that was forked holds both, mapping and connection, or neither.
Shutting down our half (`cut_off`) asks a living peer to do this; a stopped one (SIGSTOP) cannot, and there is no proof
until it has.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.transfer.transports.bell import Bell

logger = logging.getLogger(__name__)

MAX_MESSAGE = 64 << 10
MAX_STRANGERS = 64
RETRY_S = 0.1  # after a failed accept (no descriptors left), which would fail again at once


class Address(msgspec.Struct, frozen=True):
    """Where to knock. `name` is an abstract socket name without its leading zero byte."""

    name: str
    token: bytes


class Door:
    """Serves one payload and its descriptors to the agents that are admitted. Has a thread of its own.

    Raises RouteUnavailable where there are no abstract unix sockets (anything but Linux).
    """

    def __init__(self, payload: bytes, fds: Sequence[int]) -> None:
        if not sys.platform.startswith("linux"):
            raise RouteUnavailable("abstract unix sockets exist on Linux only")
        self.address = Address(f"slipstream-{secrets.token_hex(12)}", secrets.token_bytes(16))
        self._payload, self._fds = payload, list(fds)
        self._lock = threading.Lock()
        self._admitted: set[str] = set()
        self._inside: dict[
            int, tuple[socket.socket, str]
        ] = {}  # descriptor -> (connection, agent; "" before it knocked)
        self._leaving: dict[str, list[Future[None]]] = {}
        self._closing = False
        self._bell = Bell()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address.name)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="slipstream-door", daemon=True)
        self._thread.start()

    def admit(self, agent: str) -> None:
        with self._lock:
            self._admitted.add(agent)

    def cut_off(self, agent: str) -> Future[None]:
        """Admits this agent no more; done when none of its connections is open."""
        future: Future[None] = Future()
        with self._lock:
            self._admitted.discard(agent)
            inside = [connection for connection, name in self._inside.values() if name == agent]
            if self._closing:
                future.cancel()
            elif inside:
                self._leaving.setdefault(agent, []).append(future)
                for connection in inside:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)
            else:
                future.set_result(None)
        return future

    def close(self) -> None:
        """Ends the thread and all connections. Waiting `cut_off`s are cancelled: nothing was proven."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._bell.ring()
        self._thread.join()
        self._bell.close()

    # ------------------------------------------------------------------------------------------- its thread

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while not self._closing:
            for fd, _ in poll.poll():
                if fd == self._listener.fileno():
                    self._enter(poll)
                elif fd in self._inside:
                    self._hear(poll, fd)
        self._listener.close()
        with self._lock:
            waiting = [future for futures in self._leaving.values() for future in futures]
            for connection, _ in self._inside.values():
                connection.close()
        for future in waiting:
            future.cancel()

    def _enter(self, poll: select.poll) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            logger.warning("cannot accept a peer that wants this worker's memory: %s", error)
            time.sleep(RETRY_S)
            return
        connection.setblocking(False)
        with self._lock:
            strangers = [fd for fd, (_, name) in self._inside.items() if not name]
            self._inside[connection.fileno()] = (connection, "")
        poll.register(connection, select.POLLIN)
        if len(strangers) >= MAX_STRANGERS:
            self._leave(poll, strangers[0])

    def _hear(self, poll: select.poll, fd: int) -> None:
        connection, name = self._inside[fd]
        try:
            message = connection.recv(MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message and not name and self._answer(fd, connection, message):
            return
        self._leave(poll, fd)

    def _answer(self, fd: int, connection: socket.socket, message: bytes) -> bool:
        token, agent = message[:16], message[16:].decode(errors="replace")
        known = self._opens(token)
        with self._lock:
            welcome = known and agent in self._admitted
            if welcome:
                self._inside[fd] = (connection, agent)
        with contextlib.suppress(OSError):
            if welcome:
                socket.send_fds(connection, [b"\0" + self._payload], self._goods(token, agent))
            else:
                reason = f"agent {agent!r} is not admitted" if known else "the token is wrong"
                logger.warning("refused a process that wants this worker's memory: %s", reason)
                connection.send(b"\1" + reason.encode())
        return welcome

    def _opens(self, token: bytes) -> bool:
        return hmac.compare_digest(token, self.address.token)

    def _goods(self, token: bytes, agent: str) -> Sequence[int]:
        """The descriptors that a welcome agent gets for its token."""
        return self._fds

    def _leave(self, poll: select.poll, fd: int) -> None:
        poll.unregister(fd)
        with self._lock:
            connection, agent = self._inside.pop(fd)
            done: list[Future[None]] = []
            if agent not in {name for _, name in self._inside.values()}:
                done = self._leaving.pop(agent, [])
        connection.close()
        for future in done:
            future.set_result(None)


def knock(address: Address, agent: str, timeout_s: float = 2.0) -> tuple[socket.socket, bytes, list[int]]:
    """The connection to keep open as long as the memory is used, the payload, and the descriptors.

    Raises RouteUnavailable when there is no such door here (another machine, another network namespace, a process that
    has ended) or it does not open to us, PeerLost when its keeper does not answer.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    try:
        try:
            connection.connect("\0" + address.name)
        except OSError as error:
            raise RouteUnavailable(
                f"the peer's socket cannot be opened from here ({error.strerror or error}): it has ended, or runs on "
                "another machine or in another network namespace"
            ) from error
        try:
            connection.send(address.token + agent.encode())
            message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 16)
        except OSError as error:
            raise PeerLost(f"the peer does not hand out its memory: {error}") from error
        if message[:1] != b"\0":
            for fd in fds:
                socket.close(fd)
            raise RouteUnavailable(f"the peer refused: {message[1:].decode(errors='replace') or 'it closed the door'}")
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return connection, message[1:], fds
