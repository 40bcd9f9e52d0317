"""Launches that are kept, against Triton's own: what they tell apart, and what reaches the driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (extra: gpu)")

from slipstream.run.cuda.kernels.launches import variant

CASES = ["laid out by Hopper's kernels", "pages out of step, codes, norms of heads"]
CHECK = """
import sys
from tests.unit.launch_checks import check
print(check(*sys.argv[1:]))
"""


def arguments() -> list[Any]:
    """All sorts, at every border that Triton knows of."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Swizzled
    from triton.tools.tensor_descriptor import TensorDescriptor

    borders = (0, 1, 2, 15, 16, 17, (1 << 31) - 16, (1 << 31) - 1, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63)
    found: list[Any] = [*borders, *(-number for number in borders[:-1]), 0.0, 1.0, 2.5, True, False, None]
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn):
        memory = torch.zeros(64, 64, dtype=kind)
        found += [memory, memory.flatten()[8:], memory.flatten()[1:], memory.flatten()[3:7]]
    for kind, block in product((torch.bfloat16, torch.float16), ([16, 64], [64, 64])):
        memory = torch.zeros(128, 64, dtype=kind)
        found.append(TensorDescriptor.from_tensor(memory, block))
        name = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[kind]
        for layout in (gl.NVMMASharedLayout.get_default_for(block, name), gl.NVMMASharedLayout(32, 16, 2)):
            found.append(Swizzled.from_tensor(memory, block, layout))
    return found


def test_what_triton_compiles_differently_is_told_apart():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    given = arguments()
    for specialize in (True, False):
        known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        for value in given:
            found = native_specialize_impl(backend, value, False, specialize, True)
            before, other = known.setdefault(variant(value), (found, value))
            assert found == before, f"{value!r} is compiled for as {found}, {other!r} as {before}"
    assert len(known) > 30


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_a_kept_launch_gives_the_driver_what_a_plain_one_gives_it(case: str, tmp_path: Path):
    if shutil.which("gcc") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("needs gcc and Python's headers, as Triton's launchers do")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", CHECK, str(tmp_path), case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 50
