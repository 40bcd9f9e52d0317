"""How far a model is loaded: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from rich import progress
from rich.console import Console

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0


def _log(model: str, percent: int) -> None:
    logger.info("loading %s: %d %%", model, percent)


class Loading:
    """Called with the bytes that are loaded and those of the whole model, for one model after the other.

    Where standard error is no terminal, `say` gets the model and how many percent of it are there.
    """

    def __init__(self, model: str, say: Callable[[str, int], None] = _log) -> None:
        self._model = model
        self._say = say
        self._said_at = time.monotonic()
        self._bar = progress.Progress(transient=True, console=Console(stderr=True)) if sys.stderr.isatty() else None
        self._task = progress.TaskID(0)

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._draw(self._bar, done, total)
            return
        now = time.monotonic()
        if total > 0 and now - self._said_at >= INTERVAL_S:
            self._said_at = now
            self._say(self._model, 100 * done // total)

    def _draw(self, bar: progress.Progress, done: int, total: int) -> None:
        if not bar.tasks:
            self._task = bar.add_task(f"loading {self._model}", total=total)
            bar.start()
        bar.update(self._task, completed=done)
        if done >= total:
            bar.stop()
