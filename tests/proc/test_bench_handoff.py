"""The benchmark of whole handoffs, on the host's memory: two workers without a model, this process their router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from slipstream.bench.handoff import (
    ACTS,
    PARTS,
    BenchFailed,
    Event,
    HandoffRow,
    command,
    line,
    measure,
    parse_cases,
    run,
)
from slipstream.bench.handoff_worker import HandoffOptions
from slipstream.config import TransferConfig
from slipstream.errors import ConfigError

OPTIONS = HandoffOptions(tokens=4096, layers=2, kv_heads=2, head_dim=16)


def test_handoffs_alone_and_together_are_timed_part_by_part(tmp_path: Path):
    said: list[HandoffRow] = []
    rows = asyncio.run(run(OPTIONS, ("cpu", "cpu"), [(100, 1, 3), (64, 8, 2)], tmp_path, said.append))
    assert rows == said
    alone, together = rows
    assert (alone.tokens, alone.under_way, together.under_way) == (100, 1, 8)
    assert alone.megabytes == pytest.approx(100 * 2 * 2 * 2 * 16 * 2 / 1e6)
    assert 0 < alone.best_ms <= alone.whole_ms <= alone.p90_ms
    assert all(part >= 0 for part in alone.parts_ms.values())
    assert set(alone.parts_ms) == set(PARTS)
    assert "offer comes" in line(alone)
    assert sum(alone.by["commit"].values()) == 3
    assert alone.link_ms is not None
    assert alone.link_ms > 0
    assert together.parts_ms == {}


def test_a_worker_that_cannot_start_is_reported_with_its_words(tmp_path: Path):
    options = HandoffOptions(tokens=64, transfer=TransferConfig(transport="cuda_ipc"))
    with pytest.raises(BenchFailed, match="cuda_ipc"):
        asyncio.run(run(options, ("cpu", "cpu"), [(32, 1, 1)], tmp_path, lambda row: None))


def test_cases_are_read_with_their_defaults():
    assert parse_cases("1024,64x8,32x4x2") == [(1024, 1, 30), (64, 8, 30), (32, 4, 2)]


def test_exposed_is_what_comes_behind_the_last_chunk_of_the_prompt():
    source = [("offer", 0, 1.0), ("computing", 32, 1.0), ("computed", 32, 2.0), ("computing", 64, 2.0)]
    source += [("grant", 0, 1.1), ("copies", 0, 2.1), ("computed", 64, 3.0), ("copied", 0, 3.2), ("commit", 0, 3.3)]
    target = [("accepted", 0, 3.4), ("computing", 65, 3.5), ("computed", 65, 3.6)]
    row = measure([[noted(source), noted(target)]], 64, 1, 1000)
    assert row.exposed_ms == pytest.approx(500)
    assert row.whole_ms == pytest.approx(2500)


def test_the_parts_of_a_handoff_lie_end_to_end_and_say_who_did_them():
    source = [("offer", 1, 0.0), ("heard grant", 1, 0.3), ("begun", 1, 0.4), ("queued", 1, 0.5)]
    source += [("computing", 64, 0.0), ("computed", 64, 0.0), ("copied", 1, 1.0), ("commit", 1, 1.1)]
    target = [("heard offer", 1, 0.1), ("grant", 1, 0.2), ("heard commit", 1, 1.3), ("planned", 65, 1.4)]
    target += [("computing", 65, 1.6), ("planned", 66, 1.7), ("computing", 66, 1.8)]
    row = measure([[noted(source, "mover"), noted(target, "io")]] * 3, 64, 1, 10_000_000, rate_gbps=2.0)
    assert sum(row.parts_ms.values()) == pytest.approx(row.whole_ms) == pytest.approx(1600)
    assert row.parts_ms["copies done"] == pytest.approx(500)
    assert row.link_ms == pytest.approx(320)
    assert row.by == {act: {"io" if act in ("grant", "planned") else "mover": 3} for act in ACTS}
    assert "begun by mover 3" in line(row)
    assert "the bytes alone 320.000" in line(row)


def test_copies_have_begun_with_the_first_and_are_queued_with_the_last():
    source = [("offer", 1, 0.0), ("heard grant", 1, 0.3), ("begun", 1, 0.4), ("queued", 1, 0.7)]
    source += [("begun", 1, 0.8), ("queued", 1, 0.9), ("computed", 64, 0.0), ("copied", 1, 1.0), ("commit", 1, 1.1)]
    target = [("heard offer", 1, 0.1), ("grant", 1, 0.2), ("heard commit", 1, 1.3), ("planned", 65, 1.4)]
    target += [("computing", 65, 1.6)]
    row = measure([[noted(source), noted(target)]], 64, 1, 1000)
    assert row.parts_ms["copies begun"] == pytest.approx(100)
    assert row.parts_ms["copies queued"] == pytest.approx(500)
    assert sum(row.parts_ms.values()) == pytest.approx(row.whole_ms)


def noted(events: list[tuple[str, int, float]], thread: str = "loop") -> list[Event]:
    return [(name, number, at, thread) for name, number, at in events]


def test_a_transport_of_gpus_between_cpus_is_refused_before_workers_start() -> None:
    result = CliRunner().invoke(command, ["--transport", "cuda_ipc", "--memory", "cpu,cpu"])
    assert isinstance(result.exception, ConfigError)  # which the command line ends with code 2
    assert "cuda_ipc moves memory of GPUs" in str(result.exception)


def test_cases_that_are_none_are_refused() -> None:
    for text in ("many", "0", "1x2x3x4", "1024x"):
        with pytest.raises(ConfigError, match="TOKENS"):
            parse_cases(text)
