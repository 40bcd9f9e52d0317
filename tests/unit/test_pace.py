"""What a worker tells of its last steps."""

from __future__ import annotations

import pytest

from slipstream import wire
from slipstream.engine.pace import FORGOTTEN_S, Pace


def told(pace: Pace) -> tuple[float, float, float, float]:
    status = wire.Status(
        waiting=0, running=0, handing_off=0, waiting_tokens=0, pages_free=1, pages_cached=0, pages_total=1
    )
    pace.tell(status)
    return status.prompt_rate, status.mixed_rate, status.mixed_step_s, status.decode_step_s


def test_nothing_is_told_before_a_step() -> None:
    pace = Pace()
    pace.step(0, 0, 1.0)
    assert told(pace) == (0.0, 0.0, 0.0, 0.0)


def test_kinds_of_steps_are_kept_apart() -> None:
    pace = Pace()
    for _ in range(10):
        pace.step(0, 4000, 0.1)
        pace.step(8, 512, 0.016)
        pace.step(8, 0, 0.005)
    assert told(pace) == pytest.approx((40_000.0, 32_000.0, 0.016, 0.005))


def test_a_change_is_told_after_seconds_of_steps() -> None:
    pace = Pace()
    for _ in range(200):
        pace.step(1, 0, 0.01)
    for _ in range(400):
        pace.step(1, 0, 0.02)
    assert told(pace)[3] == pytest.approx(0.02, rel=0.05)


def test_one_long_step_does_not_spoil_the_average() -> None:
    pace = Pace()
    for _ in range(20):
        pace.step(8, 512, 0.016)
    pace.step(8, 512, 2.1)
    assert 0.016 < told(pace)[2] < 0.02


def test_a_kind_that_has_not_come_for_long_is_forgotten_until_it_comes_again() -> None:
    pace = Pace()
    pace.step(8, 512, 2.0)
    for _ in range(int(FORGOTTEN_S / 0.1) + 1):
        pace.step(8, 0, 0.1)
    assert told(pace)[:3] == (0.0, 0.0, 0.0)
    pace.step(8, 512, 0.016)
    assert told(pace)[1] == pytest.approx(32_000.0), "nothing is left of the exception"
