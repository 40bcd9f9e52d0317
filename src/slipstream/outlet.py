"""Output that nobody waits for: what is written goes into memory, and one thread hands it to the descriptor.

A pipe that nobody reads, a stopped `serve`, a terminal after Ctrl-S: whoever writes there waits until somebody reads,
with whatever he holds. So `take_stderr` puts a stream in the place of standard error, and `to` gives one for another,
which only the writer's thread waits for. All of a process go through the same thread, so that their order stays.

What waits is bounded. When it is full, lines are left out, and counted; as soon as half of it has been read the next
line is preceded by one that says how many. `drain` waits for what is there already, for a bounded time; logging does so
at the end of the process (logs.py), and whoever ends it by `os._exit` does so himself.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TextIO, cast

MOST_WAITING = 8192  # writes
DRAIN_S = 1.0

_Item = tuple[int, bytes] | threading.Event  # what is written where, or a sign that all before it is


class _Writer:
    """The thread of this process that waits for readers."""

    def __init__(self) -> None:
        self.note: Callable[[int], str] = left_out
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lost = 0
        self._lost_at = 2
        self._lock = threading.RLock()  # handlers of signals write as well
        threading.Thread(target=self._run, args=(self._waiting,), name="slipstream-output", daemon=True).start()

    def put(self, fd: int, text: str, encoding: str) -> None:
        with self._lock:
            if self._waiting.qsize() >= (MOST_WAITING // 2 if self._lost else MOST_WAITING):
                self._lost, self._lost_at = self._lost + text.count("\n"), fd
                return
            self._tell_lost()
            self._waiting.put((fd, text.encode(encoding, "backslashreplace")))

    def drain(self, seconds: float) -> bool:
        done = threading.Event()
        with self._lock:
            self._tell_lost()
            self._waiting.put(done)
        return done.wait(seconds)

    def _tell_lost(self) -> None:
        if self._lost:
            self._waiting.put((self._lost_at, f"{self.note(self._lost)}\n".encode()))
            self._lost = 0

    @staticmethod
    def _run(waiting: queue.SimpleQueue[_Item]) -> None:
        while True:
            item = waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            with contextlib.suppress(OSError):  # the reader is gone for good
                _write(*item)


def _write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # somebody who shares it has made it so
            select.select([], [fd], [])


_writer: _Writer | None = None


def _the_writer() -> _Writer:
    global _writer
    if _writer is None:
        _writer = _Writer()
    return _writer


class Outlet(io.TextIOBase):
    """A text stream that never waits, in front of a descriptor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream  # its descriptor stays open
        self._fd = stream.fileno()
        self._encoding = stream.encoding
        self._writer = _the_writer()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._encoding

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "backslashreplace"

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"text is written here, not {type(text).__name__}")
        if text:
            self._writer.put(self._fd, text, self._encoding)
        return len(text)

    def flush(self) -> None:
        """Nothing: see `drain`."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)


def to(stream: TextIO) -> TextIO:
    """A stream to where `stream` goes that never waits; itself when it is one, or has no descriptor to wait for."""
    try:
        return stream if isinstance(stream, Outlet) else cast(TextIO, Outlet(stream))
    except (OSError, AttributeError):  # in memory; or there is none
        return stream


def take_stderr(note: Callable[[int], str]) -> TextIO:
    """From now on nothing in Python waits for the reader of standard error. `note(n)` says that n lines are missing.

    Only an error that ends the process does, for DRAIN_S at most: it shall not be among the lines that are left out.
    """
    if sys.stderr is sys.__stderr__:
        sys.stderr = to(sys.stderr)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _last_words
    _the_writer().note = note
    return sys.stderr


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    drain()
    sys.__excepthook__(kind, error, trace)


def drain(seconds: float = DRAIN_S) -> bool:
    """Waits until all that has been written so far is out; False when nobody has read it in that time."""
    return _writer is None or _writer.drain(seconds)


def left_out(lines: int) -> str:
    return f"{lines} lines were left out: nobody read the log"


def never_waiting(fd: int) -> int | None:
    """A descriptor to where `fd` goes for native code, which does not wait either: what finds no room is lost.

    None where there is no such thing. Whether a descriptor waits is shared with other processes, so this one is opened
    anew, which the system does for pipes and terminals, and not for sockets, nor for those of another user.
    """
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
