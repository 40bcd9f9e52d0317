"""Wakes the mover when a copy should be done, so that nobody spins on an event.

CUDA can tell a thread that an event has happened only by making it wait, or by a callback that would need the
interpreter lock while other threads hold it and wait for the GPU. So the mover sleeps until the copy is expected to be
done, by its size and the measured rate, and then looks, at growing intervals. The alarm is a timerfd: a descriptor that
is readable from the moment it is due.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK and TFD_CLOEXEC have these values


class _Spec(ctypes.Structure):
    """struct itimerspec of timerfd_settime(2)."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Alarm:
    """Set it, sleep on `fileno`, hush it. Raises OSError where there is no timerfd."""

    def __init__(self) -> None:
        # By PyDLL: these calls are over before another thread could take the interpreter's lock, and to give it away
        # would make the caller wait for it.
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._spec = _Spec()
        self._at = ctypes.byref(self._spec)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, seconds: float) -> None:
        """Due in `seconds`, at least a microsecond; replaces what was set before."""
        self._set(max(int(seconds * 1e9), 1000))

    def cancel(self) -> None:
        """Not due before it is set again."""
        self._set(0)

    def _set(self, nanoseconds: int) -> None:
        self._spec.value_s, self._spec.value_ns = divmod(nanoseconds, 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, 0, self._at, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def hush(self) -> None:
        """No longer due."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
