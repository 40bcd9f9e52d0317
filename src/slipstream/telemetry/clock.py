"""One clock for the processes of a machine, and an estimate for those of others.

All times that a process notes are `time.monotonic()`, which on one running machine is one clock for all processes
(CLOCK_MONOTONIC on Linux, counted from boot): nothing has to be aligned. `machine_clock` names that clock, so that two
processes can see whether they share it. For another machine the reader asks a few times what the clock shows there; of
the answer with the shortest round trip it takes the middle of the trip as the moment of reading, so the error is at
most half of that trip: well under a millisecond within a rack.
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

now = time.monotonic


def machine_clock() -> str:
    """The name of this machine's monotonic clock: another after a reboot, and in another time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = platform.node()
    try:
        offsets = Path("/proc/self/timens_offsets").read_text().split()
    except OSError:
        offsets = []
    moved = any(word.strip("-0") for word in offsets[1::3] + offsets[2::3])
    return f"{boot}+{' '.join(offsets)}" if moved else boot


def unix_of(moment: float) -> float:
    """The time of day, in seconds since 1970, at a moment of `now()`."""
    return time.time() - (now() - moment)


@dataclass(frozen=True, slots=True)
class Offset:
    """Adding `seconds` to a time of the other clock gives that of ours, give or take `error`."""

    seconds: float = 0.0
    error: float = 0.0


SAME = Offset()


def estimate(readings: list[tuple[float, float, float]]) -> Offset:
    """From (ours when asked, theirs, ours when answered), at least one: that of the shortest trip."""
    asked, theirs, answered = min(readings, key=lambda reading: reading[2] - reading[0])
    return Offset((asked + answered) / 2 - theirs, (answered - asked) / 2)
