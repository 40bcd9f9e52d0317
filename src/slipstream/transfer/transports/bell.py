"""Wakes a thread that sleeps on file descriptors.

A bell is an eventfd: readable from `ring` until `hush`, however often it was rung. Transports put theirs into the epoll
set that their `fileno` returns; other threads ring it to make the mover poll.
"""

from __future__ import annotations

import contextlib
import os
import threading


class Bell:
    """Ring from any thread; hush in the one that sleeps. A closed bell is silent.

    `ring` and `close` exclude each other: the number of a closed descriptor may belong to a socket the next moment, and
    what is rung would be bytes in its stream.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def ring(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
