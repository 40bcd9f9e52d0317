"""What a start spends its time on."""

from __future__ import annotations

import time


class Laps:
    """A stopwatch from its making on: `lap(name)` ends a part, and `str()` tells them all."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.parts[name] = self.parts.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"{self._last - self._started:.1f} s ({parts})"
