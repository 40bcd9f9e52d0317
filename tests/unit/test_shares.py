"""How contexts of a decode step are divided among programs of its attention: all of them, evenly, in what there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.run.cuda.kernels.shapes import MOST_SPLITS, decode_programs, decode_shape
from slipstream.run.cuda.kernels.shares import NUMBERS, Division, parts_of

CONTEXTS = st.lists(st.integers(1, 131_072), min_size=1, max_size=256)


@given(contexts=CONTEXTS, filled=st.integers(0, 40), kv_heads=st.sampled_from([1, 2, 4, 8, 32]))
def test_each_part_of_each_sequence_is_one_programs(contexts: list[int], filled: int, kv_heads: int):
    size = len(contexts) + filled
    shares = Division(kv_heads).of(np.array(contexts), size)
    assert shares.shape == (decode_programs(size, kv_heads), NUMBERS)
    assert shares.dtype == np.int32
    lengths = contexts + [1] * filled
    parts = dict(shares[shares[:, 3] > 0][:, [0, 2]].tolist())
    assert sorted(parts) == list(range(size))
    assert 1 <= min(parts.values()) <= max(parts.values()) <= MOST_SPLITS
    wanted = [[one, part, parts[one], lengths[one]] for one in range(size) for part in range(parts[one])]
    assert shares[: len(wanted)].tolist() == wanted
    assert not shares[len(wanted) :].any()


@given(contexts=CONTEXTS, kv_heads=st.sampled_from([2, 8]))
def test_no_part_is_much_longer_than_the_shortest_that_could_do(contexts: list[int], kv_heads: int):
    tile = decode_shape(len(contexts) * kv_heads)[1]
    tiles = np.maximum(1, -(-(np.array(contexts) - 1) // tile))
    room = decode_programs(len(contexts), kv_heads)
    parts = parts_of(tiles, room)
    assert parts.sum() <= room
    longest = int((-(-tiles // parts)).max())
    best = next(each for each in range(1, 4096) if fits(tiles, each, room))
    assert longest <= max(best + 1, 1.4 * best)


def fits(tiles: np.ndarray, each: int, room: int) -> bool:
    parts = -(-tiles // each)
    return int(parts.sum()) <= room and int(parts.max()) <= MOST_SPLITS


@pytest.mark.parametrize(("count", "kv_heads", "parts"), [(1, 8, 8), (32, 8, 2), (256, 8, 1), (32, 2, 8), (256, 2, 1)])
def test_sequences_of_one_length_have_as_many_parts_as_fill_the_chip(count: int, kv_heads: int, parts: int):
    shares = Division(kv_heads).of(np.full(count, 1024), count)
    assert shares[shares[:, 3] > 0][:, 2].tolist() == [parts] * (count * parts)


def test_a_long_context_among_short_ones_is_read_by_many():
    contexts = np.array([300] * 17 + [8192])
    shares = Division(8).of(contexts, 20)
    parts = int(shares[shares[:, 0] == 17][0, 2])
    assert parts > 20
    assert -(-8192 // 64 // parts) <= 6  # tiles that are waited for; two parts would have 64


@given(contexts=st.lists(st.integers(1, 3000), min_size=1, max_size=40), steps=st.integers(1, 200))
def test_what_is_kept_from_step_to_step_changes_nothing(contexts: list[int], steps: int):
    division, lengths = Division(8), np.array(contexts)
    for grown in (0, 1, 2, steps, steps + 1):
        found = division.of(lengths + grown, len(contexts) + 1)
        assert np.array_equal(found, Division(8).of(lengths + grown, len(contexts) + 1))
        division.of(lengths[:1], 1)
