"""When the step behind the one that is being computed is planned."""

from __future__ import annotations

import pytest

from slipstream.engine.ahead import LEAST_SEEN, MOST_CAUTION, SHARE, SLACK_S, Ahead
from slipstream.engine.plan import StepPlan, scratch_plan


def decodes(count: int) -> StepPlan:
    return scratch_plan([(row, 20, 1) for row in range(count)], 16)


def prompt(tokens: int) -> StepPlan:
    return scratch_plan([(0, 0, tokens)], 16)


def mixed(count: int, tokens: int) -> StepPlan:
    return scratch_plan([*((row, 20, 1) for row in range(count)), (count, 0, tokens)], 16)


def learned(plan: StepPlan, *seconds: float, host_s: float = 0.0) -> Ahead:
    ahead = Ahead()
    for each in seconds:
        ahead.launched(plan, host_s)
        ahead.ended(plan, each, late=False)
    return ahead


def in_hand(seconds: float, host_s: float = 0.0, caution: float = 1.0) -> float:
    return SHARE * seconds + caution * (host_s + SLACK_S)


def test_the_next_step_is_planned_at_once_until_some_have_been_seen() -> None:
    ahead = learned(decodes(4), *[0.02] * (LEAST_SEEN - 1))
    assert ahead.due(decodes(4), 100.0) == 100.0
    ahead.ended(decodes(4), 0.02, late=False)
    assert ahead.due(decodes(4), 100.0) == pytest.approx(100.02 - in_hand(0.02))


def test_it_is_planned_before_the_end_by_what_the_host_takes() -> None:
    ahead = learned(decodes(4), *[0.02] * 5, host_s=0.003)
    assert ahead.due(decodes(4), 0.0) == pytest.approx(0.02 - in_hand(0.02, 0.003))


def test_short_steps_are_due_before_they_begin() -> None:
    assert learned(decodes(1), *[0.0005] * 5).due(decodes(1), 7.0) < 7.0


def test_a_pause_of_the_machine_is_not_taken_for_the_length_of_a_step() -> None:
    for seconds in ([2.0, 0.01, 0.01, 0.01], [0.01, 0.01, 0.01, 2.0]):
        assert learned(decodes(4), *seconds).due(decodes(4), 0.0) < 0.01


def test_a_pause_of_the_host_makes_the_step_behind_it_no_shorter_for_long() -> None:
    """The end of a step was seen late, so the next, which had begun long before, seems to have taken no time."""
    ahead = learned(decodes(4), *[0.01] * 5, 0.04, 1e-5, *[0.01] * 40)
    assert ahead.due(decodes(4), 0.0) == pytest.approx(0.01 - in_hand(0.01))


def test_steps_of_another_length_altogether_are_known_after_a_few() -> None:
    ahead = learned(decodes(4), *[0.032] * 5, *[0.002] * 4)
    assert ahead.due(decodes(4), 0.0) == pytest.approx(0.002 - in_hand(0.002))


def test_steps_that_grow_are_followed_and_steps_that_shrink_at_once() -> None:
    ahead = learned(decodes(4), *[0.01] * 5, *[0.02] * 60)
    assert ahead.due(decodes(4), 0.0) == pytest.approx(0.02 - in_hand(0.02), rel=0.05)
    ahead.ended(decodes(4), 0.01, late=False)
    assert ahead.due(decodes(4), 0.0) == pytest.approx(0.01 - in_hand(0.01))


def test_kinds_and_sizes_of_steps_are_kept_apart() -> None:
    ahead = learned(prompt(8000), *[0.2] * 5)
    assert ahead.due(prompt(500), 0.0) == 0.0
    assert ahead.due(mixed(3, 7997), 0.0) == 0.0
    assert ahead.due(decodes(3), 0.0) == 0.0


def test_a_smaller_step_of_the_kind_is_expected_to_be_shorter_and_a_larger_one_not_to_be_longer() -> None:
    ahead = learned(prompt(6000), *[0.18] * 5)
    assert ahead.due(prompt(5000), 0.0) == pytest.approx(0.15 - in_hand(0.15))
    assert ahead.due(prompt(8000), 0.0) == pytest.approx(0.18 - in_hand(0.18))


def test_a_late_step_makes_more_cautious_for_a_while() -> None:
    ahead = learned(decodes(4), *[0.05] * 5, host_s=0.001)
    ahead.ended(decodes(4), 0.05, late=True)
    assert ahead.due(decodes(4), 0.0) == pytest.approx(0.05 - in_hand(0.05, 0.001, 1.5))
    for _ in range(20):
        ahead.ended(decodes(4), 0.05, late=True)
    assert ahead.due(decodes(4), 0.0) == pytest.approx(0.05 - in_hand(0.05, 0.001, MOST_CAUTION))
    for _ in range(2000):
        ahead.ended(decodes(4), 0.05, late=False)
    assert ahead.due(decodes(4), 0.0) == pytest.approx(0.05 - in_hand(0.05, 0.001))
