"""The benchmark of whole handoffs, on the host's memory: two workers without a model, this process their router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.bench.handoff import BenchFailed, HandoffRow, line, measure, parse_cases, run
from slipstream.bench.handoff_worker import HandoffOptions
from slipstream.config import TransferConfig

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
    assert set(alone.parts_ms) >= {"offer to grant", "copies to copied", "commit to accepted"}
    assert "offer to grant" in line(alone)
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
    row = measure([[source, target]], 64, 1, 1000)
    assert row.exposed_ms == pytest.approx(500)
    assert row.whole_ms == pytest.approx(2500)
