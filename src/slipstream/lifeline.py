"""A child's tie to the process that started it: when the parent is gone, for whatever reason, so is the child.

The parent keeps the write end of a pipe and never writes; every child inherits the read end. The kernel closes the
write end with the parent, also after kill -9, and a thread of the child that waits for the end of the pipe ends the
child. On Linux the kernel is asked for a SIGKILL as well, which also reaches a child whose threads are all stuck in
native code. Children keep nothing that a kill would leave behind: their shared memory has no name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

HUNG = 71  # exit code of a process that has ended itself because it did not get on any more
EXPLAINED = {
    HUNG: ": it hung, and says above where",
    -signal.SIGKILL: " (out of memory?)",
    -signal.SIGALRM: ": it was stopped by a signal for too long, or hung in native code that kept its interpreter; its "
    "threads are listed above",
}

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Lifeline:
    """The parent's side. `fd` is the read end, to be passed to children; `close` lets go of both ends."""

    def __init__(self) -> None:
        self.fd, self._held = os.pipe()

    def close(self) -> None:
        for fd in (self.fd, self._held):
            with contextlib.suppress(OSError):
                os.close(fd)


def die_with_parent(fd: int) -> None:
    """The child's side: from now on this process ends with the holder of the other end of `fd`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A parent that ended before the call above is noticed here: its end of the pipe is closed already.
    threading.Thread(target=_wait_for_end, args=(fd,), name="slipstream-lifeline", daemon=True).start()


def _wait_for_end(fd: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(fd, 1):
            pass
    os.kill(os.getpid(), signal.SIGKILL)


def ended_how(code: int) -> str:
    """An exit code as words."""
    hint = EXPLAINED.get(code, "")
    if code >= 0:
        return f"ended with exit code {code}{hint}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}{hint}"
