"""The kernels of the GPU engine without a GPU: their numbers under Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton (extra: gpu)")

CHECK = """
import sys
import torch
from tests.unit.kernel_checks import CHECKS
CHECKS[sys.argv[1]](torch.device("cpu"), {"float32": torch.float32, "float16": torch.float16}[sys.argv[2]])
print("equal")
"""


IN_FLOAT32 = [
    "small",
    "products",
    "decode",
    "decode_long",
    "decode_split",
    "decode_normed",
    "prefill",
    "prefill_gathered",
    "fp8",
    "fp8_gathered",
    "step",
    "step_fp8",
]
IN_FLOAT16 = ["products", "decode", "prefill_gathered", "fp8"]
CASES = [(check, "float32") for check in IN_FLOAT32] + [(check, "float16") for check in IN_FLOAT16]


@pytest.mark.parametrize(("check", "dtype"), CASES)
def test_a_kernel_computes_what_its_twin_does(check: str, dtype: str):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHECK, check, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr[-3000:]


def _ptx(name: str, pointers: int, scalars: dict[str, str], constants: dict[str, object], warps: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slipstream.run.cuda.kernels import decode, prefill, products

    function = next(found for module in (decode, prefill, products) if (found := getattr(module, name, None)))
    names = function.arg_names
    types = dict.fromkeys(names[:pointers], "*bf16")
    types.update(dict.fromkeys(constants, "constexpr"))
    types.update(scalars)
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n][0] in "*i"}
    source = ASTSource(function, {n: types[n] for n in names}, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 3, "launch_pdl": bool(constants.get("PDL"))}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


PAGES = {"PAGE": 16, "SPAN": 16 * 128, "FP8": False}
NORMED = {"NORM": True, "BIAS": False, "ADD": False, "GATED": True}


def test_a_product_of_one_row_fetches_weights_before_it_waits():
    scalars = {"outputs": "i32", "inputs": "i32", "eps": "fp32"}
    ptx = _ptx("one_row", 5, scalars, {**NORMED, "ROWS": 8, "BLOCK": 256, "EVEN": True, "PDL": True}, 4)
    loads, waits = ptx.index("ld.global"), ptx.index("griddepcontrol.wait")
    assert loads < waits < ptx.rindex("ld.global")
    assert "ld.global.v4.b32" in ptx or "ld.global.L1::no_allocate.v4" in ptx or ".v2.b64" in ptx


def test_attention_of_prompts_uses_the_tensor_cores_of_hopper():
    scalars = {"query_start": "*i32", "lengths": "*i32", "tables": "*i32", "width": "i32", "scale": "fp32"}
    scalars |= {"page_stride": "i64", "head_stride": "i64"}
    shape = {"HEADS": 12, "GROUP": 6, "DIM": 128, **PAGES, "ROWS": 128, "TILE": 64, "PRECISION": "tf32"}
    assert "wgmma" in _ptx("prefill_attention", 3, scalars, shape, 8)


def test_attention_of_decoding_compiles_for_hopper():
    scalars = {"partial": "*fp32", "weights": "*fp32", "arrived": "*i32", "tables": "*i32"}
    scalars |= {"width_at": "*i32", "scale": "fp32", "eps": "fp32", "programs": "i32"}
    scalars |= {"shares": "*i32", "page_stride": "i64", "head_stride": "i64"}
    shape = {
        "HEADS": 12,
        "GROUP": 6,
        "ROWS": 16,
        "HALF": 64,
        **PAGES,
        "TILE": 64,
        "AHEAD": True,
        "SHARE_NUMBERS": 4,
        "PLACES": 64,
    }
    shape |= {"MEMBERS": 8, "QK_NORM": False}
    ptx = _ptx("decode_attention", 10, scalars, {**shape, "PRECISION": "tf32", "PDL": True}, 4)
    assert "mma" in ptx
    assert "griddepcontrol.wait" in ptx


def _gluon(name: str, types: dict[str, str], constants: dict[str, object], **options: object) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from slipstream.run.cuda.kernels import hopper

    function = next(found for module in hopper.modules().values() if (found := getattr(module, name, None)))
    names = function.arg_names
    signature = {n: types.get(n, "i32") if n not in constants else "constexpr" for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
    given = {(names.index(n),): value for n, value in constants.items()}
    source = GluonASTSource(function, signature, constexprs=given, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options}).asm["ptx"]


def _descriptor(rows: int, columns: int) -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"


@pytest.mark.parametrize(("gated", "split"), [(True, False), (False, True)])
def test_a_product_of_few_rows_fetches_weights_before_it_waits(gated: bool, split: bool):
    types = {"weights": _descriptor(64, 128), "x": _descriptor(32, 128), "bias": "*bf16", "out": "*bf16"}
    types |= {"partial": "*fp32", "arrived": "*i32"}
    flags = {"STAGES": 4, "BIAS": True, "ADD": not gated, "GATED": gated, "SPLIT": split, "PDL": True}
    ptx = _gluon("few_rows", types, flags, launch_pdl=True)
    fetches, waits = ptx.index("cp.async.bulk.tensor"), ptx.index("griddepcontrol.wait")
    assert fetches < waits < ptx.index("wgmma.mma_async")
    assert ("atom.global.gpu.acq_rel" in ptx) == split


@pytest.mark.parametrize(("dim", "tile", "stages"), [(128, 128, 2), (64, 128, 4)])
def test_attention_of_prompts_gives_each_group_of_warps_its_part(dim: int, tile: int, stages: int):
    types = {"query": _descriptor(64, dim), "keys": _descriptor(tile, dim), "values": _descriptor(tile, dim)}
    types |= {"out": "*bf16", "query_start": "*i32", "lengths": "*i32", "starts": "*i32", "scale": "fp32"}
    ptx = _gluon("attend", types, {"HEADS": 12, "GROUP": 6, "STAGES": stages}, maxnreg=168)
    assert re.search(r"setmaxnreg.inc.sync.aligned.u32\s+240", ptx)
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in ptx


class Noted:
    """Stands for all kernels of a module: writes down what is to be compiled, and launches nothing."""

    def __init__(self, seen: set[str], name: str = "") -> None:
        self._seen, self._name = seen, name

    def __getattr__(self, name: str) -> Noted:
        return Noted(self._seen, name)

    def warmup(self, *arguments: object, grid: tuple[int, ...], **constants: object) -> None:
        assert all(size > 0 for size in grid)
        self._seen.add(self._name)


def test_what_steps_need_is_compiled_ahead_and_not_launched():
    import torch
    from tests.unit.kernel_checks import Twins, config, random_model

    from slipstream.run.cuda.prepare import compile_ahead
    from slipstream.run.cuda.sampling import TritonTokens

    seen: set[str] = set()
    both = Twins(random_model(config(tied=True), torch.device("cpu"), torch.float32))
    tokens = TritonTokens(64, both.model.config.vocab, torch.float32, torch.device("cpu"))
    before = both.pools[0].values.clone()
    both.kernels.modules = {name: Noted(seen) for name in both.kernels.modules}
    tokens.kernels = Noted(seen)
    compile_ahead(both.kernels, tokens, both.model, [1, 2, 64], sequences=64, context=4096)
    of_layers = {"rms_norm", "silu_mul", "one_row", "decode_attention", "rotate_and_write", "prefill_attention"}
    assert seen == of_layers | {"feed", "survey", "weigh", "pick"}
    assert isinstance(both.kernels.modules["products"], Noted)
    assert isinstance(tokens.kernels, Noted)
    assert torch.equal(both.pools[0].values, before)
