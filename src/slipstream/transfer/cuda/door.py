"""A door to GPU memory: who has left it may still have copies under way, until its process has ended.

For memory of the CPU the end of the connection proves that the peer writes no more (`transports.door`). Copies of a GPU
run without the process that queued them. A peer that lives waits for them before it closes the connection. A peer that
is killed cannot; its files are closed one by one, this connection among them, and the driver stops its copies when the
files of the driver's are released. That happens in the kernel's do_exit before the process is reported as ended, so
the end of the process, seen on a pidfd, is the proof: this door waits for it wherever a connection ended because its
process is exiting.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence

from slipstream.transfer.transports.door import Door

_PF_EXITING = 0x4  # include/linux/sched.h
_FLAGS_FIELD = 6  # of /proc/PID/stat, counted from behind the command's closing parenthesis


class ProcessDoor(Door):
    """A Door whose `cut_off` is done only when the peer has closed the connection alive, or its process has ended."""

    def __init__(self, payload: bytes, fds: Sequence[int]) -> None:
        self._processes: dict[int, tuple[int, int]] = {}  # connection's descriptor -> (process id, pidfd)
        self._dying: set[int] = set()  # pidfds that stand in for their connections
        super().__init__(payload, fds)

    def _answer(self, fd: int, connection: socket.socket, message: bytes) -> bool:
        pid = _peer_process(connection)
        if pid == 0:
            with contextlib.suppress(OSError):
                connection.send(b"\1it runs in another PID namespace, where the end of your process cannot be seen")
            return False
        welcome = super()._answer(fd, connection, message)
        if welcome:
            with contextlib.suppress(OSError):  # it has ended already
                self._processes[fd] = (pid, os.pidfd_open(pid))
        return welcome

    def _leave(self, poll: select.poll, fd: int) -> None:
        pid, pidfd = self._processes.pop(fd, (0, -1))
        if pidfd >= 0 and is_exiting(pid):
            poll.unregister(fd)
            with self._lock:
                self._inside[pidfd] = self._inside.pop(fd)
            self._dying.add(pidfd)
            poll.register(pidfd, select.POLLIN)
            return
        super()._leave(poll, fd)
        if pidfd >= 0:
            os.close(pidfd)

    def _hear(self, poll: select.poll, fd: int) -> None:
        if fd not in self._dying:
            super()._hear(poll, fd)
            return
        super()._leave(poll, fd)  # readable: the process has ended
        self._dying.discard(fd)
        os.close(fd)

    def close(self) -> None:
        super().close()
        for _, pidfd in self._processes.values():
            os.close(pidfd)
        for pidfd in self._dying:
            os.close(pidfd)
        self._processes.clear()
        self._dying.clear()


def _peer_process(connection: socket.socket) -> int:
    """The process id behind a connection; 0 when it belongs to a PID namespace that is not visible from here."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", raw)[0]


def is_exiting(pid: int) -> bool:
    """Whether the process is being torn down but not yet gone. A process that is gone, or unknown here, is not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)
