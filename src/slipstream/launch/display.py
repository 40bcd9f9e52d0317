"""What a person sees of a cluster: its processes while they start, their log lines afterwards.

On a terminal the start is a table with one row a process and the last thing that it said; everywhere else, and with
log level debug, all lines are printed as they come, behind the name of the process. With JSON logs the lines of
children are passed on as they are, and what is not JSON (a traceback of the interpreter) is put into an object.

Whoever does not read it holds up nobody (outlet.py).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream import outlet
from slipstream.config import LogFormat

LOG_LINE = re.compile(r"^[\d:.]{12} (warning |error |critical )?([\w.]+): ")
LOADING = re.compile(r"^loading (.*): (\d+) %$")
PASSED_OVER = re.compile(r"^(route to .*?)(; not \w+: .*)$")
COLOURS = ("cyan", "magenta", "green", "yellow", "blue")


class Display:
    """Prints lines of children on standard error; `ready` ends the table, `close` whatever is left of it."""

    def __init__(self, names: Iterable[str], log_format: LogFormat, *, table: bool, console: Console | None = None):
        self._console = console or Console(file=outlet.to(sys.stderr), highlight=False, soft_wrap=True)
        self._json = log_format == "json"
        self._names = list(names)
        self._width = max((len(name) for name in self._names), default=0)
        self._last: dict[str, str] = dict.fromkeys(self._names, "starting")
        self._began = time.monotonic()
        self._live: Live | None = None
        if table and self._console.is_terminal and not self._json:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def line(self, name: str, text: str) -> None:
        """A line that the child `name` has printed."""
        if self._json:
            outlet.to(sys.stderr).write((text if text.startswith("{") else _as_json(name, text)) + "\n")
        elif self._live is not None:
            self._last[name] = _message(text)
        else:
            self._console.print(self._prefix(name), Text(text), sep="", end="\n")

    def banner(self, text: str) -> None:
        """On standard output, in order with all else."""
        outlet.to(sys.stdout).write(text + "\n")

    def ready(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    close = ready

    def _prefix(self, name: str) -> Text:
        colour = COLOURS[self._names.index(name) % len(COLOURS)] if name in self._names else "white"
        return Text(f"{name:<{self._width}} | ", style=colour)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in self._names:
            table.add_row(Text(name, style="bold"), _shown(self._last[name]))
        table.add_row(Text(""), Text(f"{time.monotonic() - self._began:.0f} s", style="dim"))
        return table


def _shown(message: str) -> RenderableType:
    """The last thing that a process said; how far it has loaded is a bar."""
    loading = LOADING.match(message)
    if loading is None:
        return Text(message, overflow="ellipsis", no_wrap=True)
    percent = int(loading[2])
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(f"loading {loading[1]}"), ProgressBar(total=100, completed=percent, width=30), Text(f"{percent} %")
    )
    return bar


def _as_json(name: str, text: str) -> str:
    event = {"time": round(time.time(), 6), "level": "info", "process": name, "logger": "output", "message": text}
    return msgspec.json.encode(event).decode()


def _message(text: str) -> str:
    """A log line without its clock and, unless it is a warning or worse, without its logger.

    A route comes without the reasons against others, which the banner gives as far as they matter.
    """
    return PASSED_OVER.sub(r"\1", LOG_LINE.sub(lambda match: f"{match[1]}{match[2]}: " if match[1] else "", text))
