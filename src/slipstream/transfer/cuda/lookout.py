"""When to look whether copies of a GPU are done, for a mover that sleeps in between.

A copy tells nobody that it is done; somebody has to look. Looking all the time takes a core and the interpreter's lock
from the threads that serve, and sleeping takes as long as this machine needs to wake a thread. So each copy has a
moment when it should be done, by its size, the measured rate, and how the last ones kept to that; the lookout wakes the
mover shortly before, by as much as it is usually woken late, has it look again at once for some tens of microseconds
around that moment, and then at growing intervals. A copy that waits for a step has no such moment before the step is
over (`ripe`). Whoever tells of that has a step to settle, and looks when that is done: the mover would be in the way,
two threads that take the interpreter's lock from each other, so for that long it sleeps.

`alarm` and `bell` are what the mover sleeps on. Whoever has the mover's turn calls. No call takes longer for the number
of copies under way.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Container

from slipstream.transfer.cuda.alarm import Alarm
from slipstream.transfer.transports.bell import Bell

_AWAKE_S = 60e-6  # around the moment when a copy is due the mover looks again at once: falling asleep costs as much
_SOONEST_S = 20e-6  # later, between two looks
_LATEST_S = 1e-3
_LEISURE_S = 60e-6  # later, at most, a copy is looked for that has several times as much behind it for the link to move
_DROWSY_S = 300e-6  # most that is allowed for waking up late
_HOPE = 0.97  # of the expected time: looking a little early shows when a copy ends, and so when the next ones will
_FRESH_S = 200e-6  # a copy that was seen under way so long ago at most has ended now
_LEAST_PACE, _MOST_PACE = 0.5, 4.0
_SOONER = 0.9  # of the time until the first look, when that found the copy done: it may have been for a while
_UNTOLD_S = 20e-3  # between looks at copies that wait for a step: should nobody tell that it is over
_SETTLING_S = 400e-6  # after a step is over, in which its copies are left to who settles it
_ALIKE = 4.0  # copies whose sizes differ by less keep one pace
_SAME_S = 10e-6  # an alarm that is set for so little earlier or later stays


class Due:
    """A copy under way: `at` is when it should be done, the others before it considered; inf while it waits."""

    __slots__ = ("_lookout", "_plan", "alone", "began", "ended", "expected")

    def __init__(self, lookout: Lookout, at: float, began: float, expected: float, alone: bool) -> None:
        self._lookout = lookout
        self.ended = False
        self.set(at, began, alone)
        self.expected = expected

    def set(self, at: float, began: float, alone: bool) -> None:
        self._plan, self.began, self.alone = at - self._lookout.shift, began, alone

    @property
    def at(self) -> float:
        return self._plan + self._lookout.shift


class Lookout:
    """`clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.alarm, self.bell = Alarm(), Bell()
        self.shift = 0.0  # by how much copies have ended later than planned; moves all that are under way
        self._clock = clock
        self._lane_due = 0.0  # when the last copy under way should end
        self._looked = 0.0  # when one was last seen to be under way
        self._set_for = 0.0  # when the alarm is due; 0 when it is not set
        self._drowsy = 0.0  # how late this machine wakes a thread that has slept, as seen lately
        self._pace: dict[int, float] = {}  # of copies that had the link for themselves, by size: taken / expected
        self._timed: deque[Due] = deque()  # as they should end; some of them have
        self._waiting = 0
        self._settling = 0.0  # until when somebody who settles a step looks by himself

    def started(self, began: float, expected: float) -> Due:
        """A copy has been queued that should take so many seconds once those before it are done."""
        due = Due(self, math.inf, began, expected, alone=False)
        self._plan(due, began)
        return due

    def waiting(self, began: float, expected: float) -> Due:
        """A copy has been queued that will take so many seconds when what it waits for has happened."""
        self._waiting += 1
        return Due(self, math.inf, began, expected, alone=False)

    def ripe(self, copy: Due) -> None:
        """What a copy waited for has just happened."""
        now = self._clock()
        self._waiting -= 1
        self._settling = now + _SETTLING_S
        self._plan(copy, now)

    def _plan(self, copy: Due, began: float) -> None:
        alone = self._lane_due <= began
        pace = self._pace.get(_class(copy.expected), 1.0) if alone else 1.0
        self._lane_due = max(self._lane_due, began) + _HOPE * pace * copy.expected
        copy.set(self._lane_due, began, alone)
        self._timed.append(copy)

    def under_way(self) -> None:
        """Somebody has looked, and a copy was not done."""
        self._looked = self._clock()

    def done(self, copy: Due) -> None:
        """Moves what is expected of those behind by as much as this one ended early or late, where that is known."""
        copy.ended = True
        if copy.at == math.inf:
            self._waiting -= 1
            return
        now = self._clock()
        shift = now - copy.at
        if shift > 0 and now - self._looked > _FRESH_S:
            return
        self.shift += shift
        self._lane_due += shift
        if copy.alone:
            kind = _class(copy.expected)
            known = self._pace.get(kind, 1.0)
            taken = (now - copy.began) / copy.expected
            if self._looked < copy.began:
                taken *= _SOONER
            taken = min(max(taken, _LEAST_PACE), _MOST_PACE)
            self._pace[kind] = known + (taken - known) / 4

    def woken(self, ready: Container[int]) -> None:
        """Silences what has woken the mover, of the descriptors that are `ready`; learns how late a sleeping one is
        woken."""
        if self.bell.fileno() in ready:
            self.bell.hush()
        if self.alarm.fileno() in ready:
            self.alarm.hush()
            if self._set_for:
                late = max(self._clock() - self._set_for, 0.0)
                self._drowsy += (min(late, _DROWSY_S) - self._drowsy) / 4
                self._set_for = 0.0

    def look_again(self) -> None:
        """Sets the next look: when the first copy is due, then at intervals that grow with its lateness. The more is
        under way behind it the fewer looks it gets, each of which takes the interpreter's lock."""
        timed = self._timed
        while timed and timed[0].ended:
            timed.popleft()
        if not timed and not self._waiting:
            self._lane_due = 0.0
            if self._set_for:
                self.alarm.cancel()
                self._set_for = 0.0
            return
        now = self._clock()
        late = now - timed[0].at if timed else -math.inf
        behind = self._lane_due - timed[0].at if timed else 0.0  # seconds of work for the link
        leisure = min(max(behind / 2 - _LEISURE_S, 0.0), _LEISURE_S)
        sleep = min(-late - _AWAKE_S / 2 - self._drowsy + leisure, _UNTOLD_S)
        if late > _AWAKE_S:
            sleep = min(max(late / 4, _SOONEST_S), _LATEST_S)
        sleep = max(sleep, leisure / 2, self._settling - now)
        if sleep < _SOONEST_S:
            self.bell.ring()
        elif not self._set_for or abs(now + sleep - self._set_for) > _SAME_S:
            self.alarm.set(sleep)
            self._set_for = now + sleep

    def close(self) -> None:
        self.alarm.close()
        self.bell.close()


def _class(expected: float) -> int:
    """Sizes alike: 0 up to a microsecond, then one more each time that a copy takes _ALIKE times as long."""
    kind, edge = 0, 1e-6
    while expected > edge:
        kind, edge = kind + 1, edge * _ALIKE
    return kind
