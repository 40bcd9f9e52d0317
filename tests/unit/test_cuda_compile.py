"""All kernels of a model compiled for the GPU they are meant for, without one: they fit into it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from slipstream.transfer.cuda import bulk
from slipstream.transfer.cuda.bulk import SOURCE, BulkShape

SHARED_BYTES = 227 << 10  # that a program may have on Hopper and on data center GPUs since
REGISTERS = 64 << 10  # of a multiprocessor
MOST_STACK = 64  # bytes a thread: a few numbers that no loop asks for
OF_LAYERS = {"rms_norm", "silu_mul", "one_row", "few_rows", "decode_attention", "rotate_and_write"}
OF_PROMPTS = {"gather_pages", "attend", "prefill_attention"}
OF_SAMPLING = {"feed", "survey", "weigh", "pick"}
BULK_SHAPES = [BulkShape(), BulkShape(4, 8, 4096, 6), BulkShape(8, 2, 8192, 1)]


@pytest.mark.timeout(300)
def test_all_kernels_of_a_model_fit_a_hopper(tmp_path: Path):
    """Qwen2.5-1.5B's in bfloat16; `python -m tests.unit.compile_checks` compiles those of others."""
    pytest.importorskip("triton", reason="needs triton (extra: gpu)")
    if shutil.which("gcc") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("needs gcc and Python's headers, as Triton's launchers do")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tests.unit.compile_checks", str(tmp_path), "qwen-1.5b", "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name for name, *_ in found} == OF_LAYERS | OF_PROMPTS | OF_SAMPLING
    for name, threads, registers, stack, shared, _ in found:
        assert shared <= SHARED_BYTES, f"{name} takes {shared} bytes of shared memory"
        assert threads * registers <= REGISTERS, f"{name}: {registers} registers for each of {threads} threads"
        assert stack <= MOST_STACK, f"{name}: {stack} bytes a thread do not fit into {registers} registers"


@pytest.mark.parametrize("shape", BULK_SHAPES)
@pytest.mark.parametrize("target", ["sm_90", "sm_90a", "sm_100", "sm_120"])
def test_the_bulk_kernel_compiles_for_all_that_it_is_for(target: str, shape: BulkShape, tmp_path: Path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    given = [f"-D{name.upper()}={value}" for name, value in shape._asdict().items()]
    command = ["nvcc", "-cubin", f"-arch={target}", "--std=c++17", "-Xptxas", "-v", *given]
    command += ["-o", str(tmp_path / "bulk.cubin"), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr
    static = int(done.stderr.split(" bytes smem")[0].split()[-1])
    assert static + shape.shared_bytes <= SHARED_BYTES


def test_the_bulk_kernel_compiles_as_a_worker_compiles_it():
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings (extra: gpu)")
    try:
        code = bulk.compiled((9, 0), BulkShape())
    except bulk.Unavailable as error:
        pytest.skip(str(error))
    assert code.startswith(b"\x7fELF")
    assert b"move_bulk" in code
