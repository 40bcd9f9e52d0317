"""Processes that stop and do not end: what is under way continues elsewhere within a bound, and they are started again.

What the clients saw is printed (pytest -s), with the longest time any of them waited.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.proc.load import body_of, check_texts, every_page_is_free, under_load
from tests.proc.programs import Program, Server, alive, serving, until
from tests.proc.test_rank_faults import followers
from tests.unit.tiny_models import tiny_model

from slipstream.lifeline import HUNG

SILENCE_S = 4
STEP_TIMEOUT_S = 3
pytestmark = pytest.mark.timeout(240)
Cluster = tuple[Program, Server]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tiny_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, num_hidden_layers=6)
    return str(path)


@pytest.fixture(scope="module")
def cluster(model: str) -> Iterator[Cluster]:
    options = ("--served-model-name", "tiny", "--max-sequences", "16", "--chunk-tokens", "64")
    with serving(*options, "--worker-silence-s", str(SILENCE_S), model=model) as (program, server, _):
        yield program, server


@pytest.fixture(scope="module")
def ranks(model: str) -> Iterator[Cluster]:
    """Its prefill worker has two ranks."""
    options = ("--served-model-name", "tiny", "--max-sequences", "16", "--chunk-tokens", "64", "--dtype", "float32")
    workers = ("--prefill", "tp2@cpu", "--decode", "cpu", "--step-timeout-s", str(STEP_TIMEOUT_S))
    with serving(*workers, *options, model=model) as (program, server, _):
        yield program, server


# ------------------------------------------------------------------------------------------------- whole workers


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_worker_that_is_stopped_for_good_costs_no_request_and_is_started_again(cluster: Cluster, victim: str) -> None:
    program, server = cluster
    old = until(lambda: server.pids().get(victim), "it is there")

    def back() -> bool:
        return server.pids().get(victim, old) != old and len(server.pids()) == 2

    seen = under_load(server, lambda: os.kill(old, signal.SIGSTOP), back, f"{victim} is back")
    assert seen.wrong == []
    assert seen.broken == []
    assert seen.refused == []
    check_texts(server, seen)
    every_page_is_free(server)
    assert not alive(old)
    assert f"{victim} (pid {old}) has answered nothing for {2 * SILENCE_S} s" in program.output
    assert re.search(rf"{victim} lost: it has answered none of {SILENCE_S} heartbeats", program.output)


def test_a_worker_that_goes_on_in_time_is_linked_again_and_answers(cluster: Cluster) -> None:
    _, server = cluster
    pid = until(lambda: server.pids().get("decode-0"), "it is there")

    def given_up() -> bool:
        return any(w["state"] == "silent" for w in server.get("/workers")[1]["workers"])

    def stop_for_a_while() -> None:
        os.kill(pid, signal.SIGSTOP)
        until(given_up, "the router gives it up")
        os.kill(pid, signal.SIGCONT)

    seen = under_load(server, stop_for_a_while, lambda: server.pids().get("decode-0") == pid, "the same one is back")
    assert (seen.wrong, seen.broken, seen.refused) == ([], [], [])
    check_texts(server, seen)
    every_page_is_free(server)


def test_a_router_that_is_stopped_for_good_is_started_again(cluster: Cluster) -> None:
    program, server = cluster
    old = int(program.says(r"(?m)^router +front +(\d+)")[1])
    os.kill(old, signal.SIGSTOP)
    until(lambda: f"router (pid {old}) has answered nothing for {2 * SILENCE_S} s" in program.output, "it is noticed")
    until(lambda: not alive(old) and server.ready() and len(server.pids()) == 2, "another one serves")
    assert server.post("/v1/completions", body_of(1))[0] == 200


# ------------------------------------------------------------------------------------------------- ranks


def test_a_rank_that_is_stopped_under_load_ends_its_worker_which_says_which_and_comes_back(ranks: Cluster) -> None:
    program, server = ranks
    old = until(lambda: server.pids().get("prefill-0"), "it is there")
    (follower,) = followers(old)
    said = len(program.output)

    def back() -> bool:
        return server.pids().get("prefill-0", old) != old

    seen = under_load(server, lambda: os.kill(follower, signal.SIGSTOP), back, "prefill-0 is back")
    assert (seen.wrong, seen.broken, seen.refused) == ([], [], [])
    check_texts(server, seen)
    every_page_is_free(server)
    assert not alive(old)
    assert not alive(follower)
    log = program.output[said:]
    (line,) = re.findall(r"this worker hangs: .*", log)
    assert re.search(r"(prefill|decode|mixed) step \d+ \(\d+ sequences, \d+ tokens\) has not ended", line)
    assert f"rank 1 (pid {follower}, stopped by a signal) has not " in line or "begun it and not ended it" in line
    assert f"--step-timeout-s {STEP_TIMEOUT_S}" in line
    assert "where the threads of this worker are" in log
    assert "slipstream-loop" in log
    assert f"prefill-0 (pid {old}) ended with exit code {HUNG}: it hung" in log


def test_a_rank_that_is_stopped_while_nothing_is_asked_of_it_is_noticed_too(ranks: Cluster) -> None:
    program, server = ranks
    old = until(lambda: server.pids().get("prefill-0"), "it is there")
    (follower,) = followers(old)
    os.kill(follower, signal.SIGSTOP)
    until(
        lambda: f"rank 1 (pid {follower}, stopped by a signal) has not shown a sign of life" in program.output,
        "it is noticed",
    )
    until(lambda: server.pids().get("prefill-0", old) != old, "it is back")
    assert not alive(follower)


def test_ranks_that_have_nothing_to_do_for_longer_than_a_step_may_take_are_left_alone(ranks: Cluster) -> None:
    program, server = ranks
    before = until(lambda: server.pids() if len(server.pids()) == 2 else None, "both are there")
    said = len(program.output)
    time.sleep(2 * STEP_TIMEOUT_S)
    assert server.pids() == before
    assert "hangs" not in program.output[said:]
    assert server.post("/v1/completions", body_of(1))[0] == 200
