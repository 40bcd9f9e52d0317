"""The orders of a rank other than rank 0: when it launches steps, collects them, and copies."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from slipstream.engine.plan import StepOutcome, StepPlan, scratch_plan
from slipstream.ranks import codec
from slipstream.ranks.control import StepFailed
from slipstream.ranks.follower import Orders

STOP = b"".join(codec.encode_stop())


def step(number: int) -> bytes:
    return b"".join(codec.encode_plan(scratch_plan([(0, 0, 1)], 16, step=number)))


def copy_behind(number: int) -> bytes:
    return b"".join(codec.encode_copy(codec.CopyOrder(1, "peer", 1, number, 1), [1], [2]))


class Rank:
    """Follows `script`: orders, None where none comes in time, and numbers of steps that end then on the device.

    `done` says in words what was launched, collected, copied, in order. It is an error to wait for a step that the
    script never ends. Steps of `failing` raise.
    """

    depth = 2

    def __init__(self, *script: bytes | int | None, failing: tuple[int, ...] = ()) -> None:
        self._script = deque(script)
        self._failing = failing
        self._launched: deque[int] = deque()
        self._over: set[int] = set()
        self.done: list[str] = []
        self.said: list[Any] = []
        Orders(self, self, self, self._copy, lambda: 0).follow()  # type: ignore[arg-type]

    def get(self, timeout_s: float | None = None) -> bytes | None:
        while isinstance(what := self._script.popleft(), int):
            self._over.add(what)
        assert what is not None or timeout_s is not None, "it sleeps for good although a step is under way"
        return what

    def begin(self, step: int) -> None: ...

    def end(self, step: int) -> None: ...

    def send(self, message: Any) -> None:
        self.said.append(message)

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan.step)
        self.done.append(f"launch {plan.step}")

    def ended(self) -> bool:
        return self._launched[0] in self._over

    def collect(self) -> StepOutcome:
        number = self._launched.popleft()
        self.done.append(f"collect {number}" if number in self._over else f"wait for {number}")
        if number in self._failing:
            raise RuntimeError("the kernel failed")
        return StepOutcome(number, np.zeros(1, dtype=np.int64), [None])

    def _copy(self, order: codec.CopyOrder, source: Any, destination: Any) -> None:
        self.done.append(f"copy behind {order.after}")


def test_a_step_that_is_ordered_late_is_launched_while_the_one_before_is_computed() -> None:
    rank = Rank(step(1), None, None, step(2), 1, None, None, step(3), 2, 3, STOP)
    assert rank.done == ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]


def test_what_has_ended_is_collected_when_no_order_comes() -> None:
    assert Rank(step(1), step(2), 1, 2, None, STOP).done == ["launch 1", "launch 2", "collect 1", "collect 2"]


def test_no_more_is_launched_than_the_device_takes() -> None:
    rank = Rank(step(1), step(2), step(3), STOP)
    assert rank.done == ["launch 1", "launch 2", "wait for 1", "launch 3", "wait for 2", "wait for 3"]


@pytest.mark.parametrize("after", [1, 2])
def test_a_copy_waits_for_its_step_and_for_no_later_one(after: int) -> None:
    rank = Rank(step(1), step(2), copy_behind(after), 1, 2, STOP)
    before = [f"wait for {number}" for number in range(1, after + 1)]
    assert rank.done[2 : 3 + after] == [*before, f"copy behind {after}"]


def test_a_step_that_has_failed_is_reported_when_no_order_comes() -> None:
    rank = Rank(step(1), step(2), 1, None, 2, None, STOP, failing=(1,))
    assert [(type(said), said.step) for said in rank.said] == [(StepFailed, 1)]
    assert rank.done == ["launch 1", "launch 2", "collect 1", "collect 2"]
