"""The copy kernels without a GPU: compiled for Hopper, and run by Triton's interpreter over host memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton (extra: gpu)")

from slipstream.transfer.cuda import kernel

ADDRESS = [["tt.divisibility", 16]]


@pytest.mark.parametrize(("length", "tile"), [(1024, 32768), (8192, 32768), (1 << 20, 32768), (3000 * 16, 16384)])
def test_the_kernel_for_equal_runs_moves_16_bytes_a_lane(length: int, tile: int):
    rows, columns, _ = kernel.equal_tile(length, tile)
    names = ["source_at", "destination_at", "lists_at", "runs", "pairs", "chunks"]
    signature = dict(zip(names, ["i64"] * 3 + ["i32"] * 3, strict=True))
    ptx = _compile(kernel.move_equal, signature, {"ROWS": rows, "COLUMNS": columns})
    wide = re.findall(r"(?:ld|st)\.global[\w.:]*\.v2\.b64", ptx)
    assert len(wide) == 2 * tile // (256 * 16)
    assert not re.findall(r"(?:ld|st)\.global[\w.:]*evict_first[\w.:]*cache_hint\.b(?:64|32|8) ", ptx)


def test_the_kernel_for_any_runs_compiles_with_a_wide_path():
    signature = {"source_at": "i64", "destination_at": "i64", "lists_at": "i64", "runs": "i32"}
    ptx = _compile(kernel.move_any, signature, {"WORDS": 4096, "BYTES": 1024})
    assert re.search(r"ld\.global[\w.:]*\.v2\.b64", ptx)
    assert re.search(r"st\.global\.b8", ptx)


def _compile(function: object, signature: dict[str, str], constants: dict[str, int]) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(function, types, constexprs=constants, attrs={(row,): ADDRESS for row in range(3)})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]


@pytest.mark.parametrize("length", [16, 48, 1024, 4096, 8192, 48 << 10, 1 << 16])
def test_a_tile_holds_whole_short_runs_or_a_part_of_a_long_one(length: int):
    rows, columns, chunks = kernel.equal_tile(length, 32 << 10)
    assert rows * columns * 8 == 32 << 10
    assert rows == 1 or chunks == 1
    assert (chunks - 1) * columns * 8 < length <= chunks * columns * 8


INTERPRETED = """
import ctypes
import numpy as np
from slipstream.transfer.cuda import kernel
from slipstream.transfer.cuda.lists import kernel_lists
from slipstream.transfer.cuda.plan import WORD, survey
from slipstream.transfer.transports.base import Runs

def block(size, seed):
    raw = np.random.default_rng(seed).integers(0, 256, size + 256, dtype=np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size]

def check(runs, size, tile):
    source, destination = block(size, 1), block(size, 2)
    want = destination.copy()
    for s, d, n in zip(runs.source.tolist(), runs.destination.tolist(), runs.length.tolist()):
        want[d : d + n] = source[s : s + n]
    at = source.ctypes.data, destination.ctypes.data
    kinds = set()
    for part in kernel_lists(*at, runs, survey(runs, size, size)):
        lists, count = np.empty(part.bytes, np.uint8), len(part.runs.length)
        part.write(lists)
        kinds.add(bool(part.length))
        if part.length:
            rows, width, chunks = kernel.equal_tile(part.length, tile)
            numbers = lists.ctypes.data, count, part.length // WORD, chunks
            kernel.move_equal[(3,)](*at, *numbers, rows, width)
        else:
            kernel.move_any[(3,)](*at, lists.ctypes.data, count, tile // 8, 256)
    assert (destination == want).all(), runs
    return kinds

random = np.random.default_rng(7)
for length, tile in ((16, 256), (48, 512), (256, 256), (1040, 512), (4096, 1024)):
    count = 11
    places = [random.permutation(2 * count)[:count].astype(np.int64) * length for _ in range(2)]
    runs = Runs(*places, np.full(count, length, np.int64))
    assert check(runs, 2 * count * length, tile) == {True}
for trial in range(6):
    count = 9
    length = random.integers(1, 700, count)
    step = [random.integers(0, 3, count) * (16 if trial % 2 else 1) for _ in range(2)]
    if trial % 2:
        length = length // 16 * 16 + random.integers(0, 2, count) * 5 + 16
    ends = [np.cumsum(length + s + (-(length + s) % 16 if trial % 2 else 0)) for s in step]
    runs = Runs(*[np.concatenate(([0], e[:-1])).astype(np.int64) for e in ends], length.astype(np.int64))
    assert check(runs, int(max(e[-1] for e in ends)) + 1024, 512) == {False}
print("all equal")
"""


def test_both_kernels_move_exactly_the_bytes_of_the_runs():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout == "all equal\n", done.stderr[-3000:]
