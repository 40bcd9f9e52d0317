"""Wakes a thread that sleeps on file descriptors.

A bell is an eventfd: readable from `ring` until `hush`, however often it was rung. Transports put theirs into the epoll
set that their `fileno` returns; other threads ring it to make the mover poll.
"""

from __future__ import annotations

import contextlib
import os


class Bell:
    """Ring from any thread; hush in the one that sleeps. A closed bell is silent."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
