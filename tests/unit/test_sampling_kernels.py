"""Sampling kernels without a GPU: their tokens under Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton (extra: gpu)")

CHECK = """
import sys
import torch
from tests.unit.sampling_checks import CHECKS
CHECKS[sys.argv[1]](torch.device("cpu"), {"float32": torch.float32, "float16": torch.float16}[sys.argv[2]])
print("equal")
"""


@pytest.mark.parametrize(
    ("check", "dtype"),
    [
        ("fed", "float32"),
        ("first_of_equal", "float16"),
        ("unsound", "float16"),
        ("likely", "float32"),
        ("likely", "float16"),
        ("flat", "float32"),
        ("equal", "float16"),
    ],
)
def test_a_kernel_draws_what_its_twin_does(check: str, dtype: str):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHECK, check, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr[-3000:]


LOGITS = {"logits": "*bf16", "row_stride": "i64", "vocab": "i32", "pieces": "i32"}
CUTS = {"temperatures": "*fp32", "top_ks": "*i32", "log_min_ps": "*fp32", "top_ps": "*fp64"}
FOUND = {
    "tops": "*fp32",
    "places": "*i32",
    "masses": "*fp64",
    "bounds": "*fp32",
    "likely": "*bf16",
    "likely_ids": "*i32",
}
SHAPE = {"PIECE": 4096, "PIECES": 64, "LISTED": 128}


@pytest.mark.parametrize(
    ("name", "types", "constants", "warps"),
    [
        ("feed", {"token_ids": "*i32", "rows": "*i32", "last": "*i32", "count": "i32"}, {"BLOCK": 256}, 2),
        ("survey", LOGITS, {"PIECE": 4096}, 4),
        ("weigh", LOGITS | CUTS, SHAPE, 4),
        (
            "pick",
            LOGITS | CUTS | {"noises": "*fp64", "chosen": "*i64", "rows": "*i32", "last": "*i32"},
            {**SHAPE, "BLOCK": 8192, "KEEP": True},
            16,
        ),
    ],
)
def test_sampling_compiles_for_hopper(name: str, types: dict[str, str], constants: dict[str, object], warps: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slipstream.run.cuda.kernels import sampling

    function = getattr(sampling, name)
    known = {**FOUND, **types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(function, {n: known[n] for n in function.arg_names}, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.metadata.shared < 200 << 10
