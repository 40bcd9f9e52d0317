"""The door to what another project's package writes into: admitted agents get a landing of their own.

nixl and mooncake do not ask who writes, and do not say when a peer can write no more. So each destination keeps a gate:
a listener for admitted agents, like that of tcp. Behind it, a source gets a landing, made for it alone: an agent or
engine of the package with this rank's memory registered. The connection stays open as long as the source writes, and
its words are few:

    source        1 + Caller, and its end: no copy of mine is under way any more
    destination   1 + description, 0 + text   or L: leave; and its end: the landing is gone, nothing can arrive

A landing is taken down when the source has left, or its process has ended. On one machine that end is waited for,
however long it takes, since packages there write into the destination's memory by themselves (process_vm_writev, CUDA
IPC); copies of a GPU outlive their process's files, so there the process itself has to be gone. A source on another
machine that does not leave within a second is ended with the landing: nothing reaches memory through an agent that is
no more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from slipstream.errors import TransferError
from slipstream.transfer.cuda.door import is_exiting
from slipstream.transfer.route import machine_id
from slipstream.transfer.transports.tcp_frames import receive_exactly
from slipstream.transfer.transports.tcp_receiver import Incoming, Listener

LEAVE_S = 1.0
_LEAVE = b"L"
_MAX_FRAME = 16 << 20


class Caller(msgspec.Struct, frozen=True):
    """Who opens a landing: its machine, PID namespace and process, and the kind of its memory."""

    machine: str
    namespace: str
    pid: int
    kind: str


class Landing(Protocol):
    """This rank's memory, reachable by one peer. `description` tells it how."""

    description: bytes

    def close(self) -> None:
        """Afterwards nothing written through this landing can arrive, but by what shares the peer's address space."""
        ...


class Gate(Listener):
    """Makes a landing for each admitted agent that asks, and takes it down when nothing can come any more."""

    def __init__(self, host: str, kind: str, make: Callable[[], Landing]) -> None:
        self._kind, self._make = kind, make
        self._far: set[Incoming] = set()
        super().__init__(host, 0)

    def attend(self, stream: Incoming) -> None:
        watch(stream.sock)
        caller = msgspec.msgpack.decode(receive_frame(stream.sock)[1], type=Caller)
        near = caller.machine == machine_id()
        visible = near and caller.namespace == pid_namespace()
        if near and not visible and "cuda" in (caller.kind, self._kind):
            send_frame(stream.sock, 0, b"it runs in another PID namespace, where the end of a process cannot be seen")
            return
        if not near:
            self._far.add(stream)
        pidfd = -1
        try:
            if visible:
                with contextlib.suppress(OSError):  # it has ended already
                    pidfd = os.pidfd_open(caller.pid)
            self._land(stream)
            if pidfd >= 0 and is_exiting(caller.pid):
                end = select.poll()
                end.register(pidfd, select.POLLIN)
                end.poll()
        finally:
            self._far.discard(stream)
            if pidfd >= 0:
                os.close(pidfd)

    def _land(self, stream: Incoming) -> None:
        """Keeps a landing as long as the source stays."""
        try:
            landing = self._make()
        except TransferError as error:
            send_frame(stream.sock, 0, error.message.encode())
            return
        try:
            send_frame(stream.sock, 1, landing.description)
            with contextlib.suppress(OSError):  # a reset is an end too
                while stream.sock.recv(4096):
                    pass
        finally:
            landing.close()

    def dismiss(self, stream: Incoming) -> None:
        with contextlib.suppress(OSError):
            stream.sock.send(_LEAVE, socket.MSG_DONTWAIT)
        if stream in self._far:
            timer = threading.Timer(LEAVE_S, stream.end)
            timer.daemon = True
            timer.start()

    def close(self) -> None:
        with self._lock:  # what has not been proven yet will not be
            waiting = [future for futures in self._leaving.values() for future in futures]
            self._leaving.clear()
        for future in waiting:
            future.cancel()
        super().close()


def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def watch(sock: socket.socket) -> None:
    """Makes a machine that is silent end the connection within seconds."""
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 5000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def send_frame(sock: socket.socket, word: int, payload: bytes) -> None:
    sock.sendall(bytes([word]) + len(payload).to_bytes(4, "little") + payload)


def receive_frame(sock: socket.socket) -> tuple[int, bytes]:
    """Raises OSError when the stream ends before, ValueError when it is no frame."""
    head = memoryview(bytearray(5))
    if not receive_exactly(sock, head):
        raise ConnectionError("it closed the connection")
    size = int.from_bytes(head[1:], "little")
    if size > _MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    payload = memoryview(bytearray(size))
    if not receive_exactly(sock, payload):
        raise ConnectionError("it closed the connection")
    return head[0], bytes(payload)
