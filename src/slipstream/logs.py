"""Log lines: one line an event, for people or for programs.

A process calls `set_up` once, at its edge. Text lines are `12:34:56.789 warning router: message`; JSON lines carry
`time` (seconds since 1970), `level`, `process`, `logger`, `message`, and whatever the caller put into `extra`. A
message or traceback of several lines stays one line in JSON and is indented in text, so that a line that does not
begin with a time always belongs to the one above.

Whatever a request can cause, many can: of one and the same message (its text before the values are put in) at most
`LINES_A_SECOND` lines are printed a second, and the next one says how many were left out. At level debug all are.

Nobody who logs waits for whoever reads the log (outlet.py); the end of the process does, for a second at most, and
the error that ends it for one more.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import time
from typing import Any, TextIO

import msgspec

from slipstream import outlet
from slipstream.config import LogFormat

LINES_A_SECOND = 20
MOST_MESSAGES = 1000  # that are kept apart

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class TextFormatter(logging.Formatter):
    """For people: time, level unless it is info, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else record.levelname.lower() + " "
        name = record.name.removeprefix("slipstream.")
        lines = record.getMessage().splitlines() or [""]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        return f"{clock}.{int(record.msecs):03d} {level}{name}: " + "\n    ".join(lines)


class JsonFormatter(logging.Formatter):
    """For programs: one JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        event.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        return msgspec.json.encode(event, enc_hook=str).decode()


class _Bounded(logging.Filter):
    """Lets at most LINES_A_SECOND records of the same message through in any second of the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, str], tuple[int, int, int]] = {}  # second, lines in it, lines left out since

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg))
        second = int(record.created)
        at, lines, left_out = self._counts.get(key, (second, 0, 0))
        if at != second:
            lines = 0
        if lines >= LINES_A_SECOND:
            self._counts[key] = (second, lines, left_out + 1)
            return False
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} like this were left out)"
            record.args = ()
        if len(self._counts) >= MOST_MESSAGES:
            self._counts.clear()
        self._counts[key] = (second, lines + 1, 0)
        return True


class _Handler(logging.StreamHandler[TextIO]):
    """Closed by logging at the end of the process, when the last lines have still to come out."""

    def close(self) -> None:
        outlet.drain()
        super().close()


def _worth_saying(record: logging.LogRecord) -> bool:
    """Ours as their level says; of libraries, warnings and worse."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] == "slipstream"


def set_up(level: str, log_format: LogFormat, process: str, stream: TextIO | None = None) -> None:
    """Sends all log records of this process from `level` on to `stream` (standard error unless given).

    SIGUSR1 prints where all threads are.

    Libraries speak up from warning on; only with `level` debug all is heard that they have been told to say.
    """
    formatter = JsonFormatter(process) if log_format == "json" else TextFormatter()

    def note(lines: int) -> str:
        message = outlet.left_out(lines)
        return formatter.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None))

    handler = _Handler(stream or outlet.take_stderr(note))
    handler.setFormatter(formatter)
    if level != "debug":
        handler.addFilter(_worth_saying)
        handler.addFilter(_Bounded())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("slipstream").setLevel(level.upper())
    logging.captureWarnings(True)
    if hasattr(signal, "SIGUSR1") and stream is None:
        faulthandler.register(signal.SIGUSR1, file=_for_stacks(), all_threads=True)


def _for_stacks() -> int | TextIO:
    """Where the interpreter's own handler of a signal writes; standard error as it is where nothing better is."""
    try:
        fd = outlet.never_waiting(sys.stderr.fileno())
    except OSError:
        fd = None
    return sys.stderr if fd is None else fd
