"""What placement does to latencies under load, on a virtual clock with the step times of an H200."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sim.placement import LARGE, SMALL, Card, Outcome, jobs, simulate

from slipstream.types import Role

APART: tuple[Role, ...] = ("prefill", "decode")
BOTH: tuple[Role, ...] = ("both", "both")
PROMPTS = ((1024, 7168), (64, 256))
SHORTER = ((512, 2048), (64, 256))
ANSWERS = ((64, 512), (256, 1024))


def outcome(
    roles: tuple[Role, ...],
    rate: float,
    lengths: Any = PROMPTS,
    card: Card = LARGE,
    tight_s: float = 0.007,
    **rest: Any,
) -> Outcome:
    load = jobs(rate, 25.0, *lengths, seed=1)
    return simulate(roles, card, rest.pop("chunks", (8192, 512)), load, tight_s, **rest)


def colocated(rate: float, lengths: Any = PROMPTS, card: Card = LARGE, tight_s: float = 0.007) -> Outcome:
    """Two workers that never hand over, with chunks of 512 tokens."""
    return outcome(BOTH, rate, lengths, card, tight_s, chunks=(512, 512), meet=False)


def test_a_saturated_prefill_worker_is_helped_by_the_decode_worker() -> None:
    for rate in (11.0, 13.0):
        strict, helped = outcome(APART, rate, help_out=False), outcome(APART, rate)
        assert helped.good > strict.good + 0.15
        assert helped.ttft_p99 < 0.7 * strict.ttft_p99
        assert helped.good >= colocated(rate).good


def test_workers_for_both_take_prompts_and_sequences_apart_when_prompts_disturb() -> None:
    for rate in (10.0, 12.0):
        placed, together = outcome(BOTH, rate), colocated(rate)
        assert placed.good >= 0.97 * max(together.good, outcome(APART, rate, help_out=False).good)
        assert placed.tight > 1.5 * together.tight
        assert placed.itl_p50 < 5.6


@pytest.mark.parametrize("roles", [APART, BOTH])
def test_tight_bounds_between_tokens_are_kept_under_many_prompts(roles: tuple[Role, ...]) -> None:
    assert outcome(roles, 72.0, SHORTER, SMALL, 0.0025).tight > 0.95


def test_at_low_load_nothing_is_lost_against_two_workers_that_stay_apart() -> None:
    for lengths, card, rate in ((PROMPTS, LARGE, 4.0), (SHORTER, SMALL, 24.0)):
        placed, together = outcome(BOTH, rate, lengths, card), colocated(rate, lengths, card)
        assert placed.ttft_p50 < 1.05 * together.ttft_p50
        assert placed.good == together.good == 1.0


def test_both_workers_decode_when_answers_are_the_work() -> None:
    placed, apart = outcome(BOTH, 24.0, ANSWERS), outcome(APART, 24.0, ANSWERS, help_out=False)
    assert placed.itl_p50 < 0.8 * apart.itl_p50
    assert placed.good == 1.0


def test_roles_are_kept_while_prefill_keeps_up() -> None:
    assert outcome(APART, 24.0, SHORTER, SMALL).local == 0.0
    assert outcome(APART, 12.0, ANSWERS).local == 0.0
