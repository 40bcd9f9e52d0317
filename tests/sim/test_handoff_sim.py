"""A whole cluster under seeded trouble: 6,000 seeds, in shards of 500 that can run side by side. SIM_SHARDS=200 plays
100,000. Of the machines that are broken on purpose, the one that is hardest to see is seen at the 720th seed.

Each seed is a cluster of one to four workers, some requests, and a world of its own: delays, reordering between links,
lost links, dying and restarting workers and routers, failing copies and steps, forged messages, aborts. Its answers
are compared token for token with those of one undisturbed worker. See `cluster`, `router` and `model` for what is
checked on the way, and `scenario` for the checks at the end.
"""

from __future__ import annotations

import os

import pytest

from .model import Violation
from .mutants import MUTANTS, broken
from .scenario import Result, play

SHARDS = int(os.environ.get("SIM_SHARDS", "12"))
SEEDS_PER_SHARD = 500
SEEDS_PER_MUTANT = 1000


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_request_is_answered_once_and_rightly_and_all_pages_come_back(shard: int) -> None:
    total = Result()
    for seed in range(shard * SEEDS_PER_SHARD, (shard + 1) * SEEDS_PER_SHARD):
        total.add(play(seed))
    # the seeds are not all peaceful, and not all hopeless
    assert total.answered > 2 * SEEDS_PER_SHARD
    assert total.adoptions > SEEDS_PER_SHARD
    assert total.aborted > 0
    assert total.refused > 0
    assert total.preemptions > 0
    assert total.kills > 0
    assert total.losses > 0
    assert total.attempts > total.answered


def first_violation(**options: bool) -> str:
    """What the first seed that goes wrong has to say; empty when none does."""
    for seed in range(SEEDS_PER_MUTANT):
        try:
            play(seed, **options)
        except Violation as violation:
            return str(violation)
    return ""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_machine_is_caught(name: str) -> None:
    with broken(name):
        assert first_violation() != "", f"{SEEDS_PER_MUTANT} seeds did not notice that {name.replace('_', ' ')}"


def test_taking_a_lost_link_for_proof_is_caught() -> None:
    assert "writes pages" in first_violation(premature_proof=True)


def test_the_machines_are_whole_again_after_the_mutants() -> None:
    for name in MUTANTS:
        with broken(name):
            pass
    for seed in range(20):
        play(seed)


def test_a_failing_seed_says_how_to_replay_it() -> None:
    with broken("a_failed_copy_counts_as_done"):
        text = first_violation()
    seed = text.split()[1]
    assert text.startswith(f"seed {seed} at ")
    assert f"python -m tests.sim.replay {seed}" in text


def test_a_seed_plays_the_same_each_time() -> None:
    assert play(11) == play(11)
