"""Keys and values of one byte: what they are worth, how large they are, and who may exchange them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.tiny_models import (
    LogitsProbe,
    load_model,
    make_plan,
    new_row,
    reference,
    reference_logits,
    save,
    shuffled_tables,
)

from slipstream.config import EngineConfig
from slipstream.kv.layout import KVLayout
from slipstream.model.llama import Llama
from slipstream.run.attention import PagedPool
from slipstream.run.cuda.kernels.twins import TorchOps
from slipstream.run.cuda.runner import CudaRunner
from slipstream.run.engine_model import open_model
from slipstream.run.quantize import dequantize, quantize, rounded
from slipstream.run.runner import Runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_keep_three_bits_whatever_their_size(dtype: torch.dtype):
    rows = torch.randn(2000, 64) * torch.logspace(-2, 2, 2000)[:, None]
    rows[:, 0] *= 40  # outliers, as some models have in their keys
    rows = rows.to(dtype)
    largest = rows.float().abs().amax(-1, keepdim=True)
    error = (rounded(rows).float() - rows.float()).abs()
    assert (error <= rows.float().abs() / 16 + largest * 2.0**-17).all()


def test_codes_and_scales_are_exact_in_bfloat16():
    codes, scales = quantize(torch.randn(500, 32) * torch.logspace(-6, 6, 500)[:, None])
    assert (dequantize(codes, scales, torch.bfloat16).float() == dequantize(codes, scales, torch.float32)).all()
    assert (torch.frexp(scales.float()).mantissa == 0.5).all()


def test_zeros_and_the_largest_numbers_stay_finite():
    rows = torch.tensor([[0.0] * 8, [3e38] * 8, [1e-38] * 8, [256.0, 255.9] * 4])
    assert rounded(rows).isfinite().all()
    assert (rounded(rows)[0] == 0).all()


def layout(dtype: str) -> KVLayout:
    return KVLayout(page_tokens=16, layers=4, kv_heads=2, head_dim=128, dtype=dtype, total_kv_heads=2, model="m")


def test_a_page_takes_half_and_a_scale_for_each_token():
    assert layout("fp8").page_bytes == layout("bfloat16").page_bytes // 2 + 2 * 4 * 2 * 16 * 2


def test_only_workers_of_one_kv_dtype_exchange_pages():
    assert layout("fp8").fingerprint != layout("bfloat16").fingerprint
    assert "kv_dtype=fp8" in layout("fp8").fingerprint_text


def test_a_pool_returns_what_was_written_and_touches_nothing_else():
    small = KVLayout(page_tokens=3, layers=2, kv_heads=2, head_dim=10, dtype="fp8", total_kv_heads=2)
    pool = PagedPool(torch.zeros(5 * small.page_bytes, dtype=torch.uint8), small, torch.float32)
    rows, numbers = torch.tensor([4, 0, 17]), torch.randn(3, 10)
    stored = pool.write(rows, numbers)
    assert torch.equal(stored, rounded(numbers))
    everything = pool.gather(torch.arange(5 * 2 * 2 * 2)).view(-1, 10)
    assert torch.equal(everything[rows], stored)
    everything[rows] = 0
    assert not everything.any()
    assert torch.equal(pool.layer(0)[0, 0, 1, 1], stored[0])  # row 4: page 0, head 0, layer 0, values, token 1


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference(request.param), tmp_path_factory.mktemp("model"))


def runner(model: Llama, *, twins: bool = False, pages: int = 64) -> Runner:
    pool_layout = model.config.layout(8, "fp8")
    memory = torch.full((pages * pool_layout.page_bytes,), 0x7E, dtype=torch.uint8)  # 448 times 8e37
    plain = Runner(model, pool_layout, memory, 8)
    if not twins:
        return plain
    return CudaRunner(model, pool_layout, memory, 8, 12, ops=TorchOps(plain.pool, model.rotary))


def logits(one: Runner, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """Of the last token, when the prompt is computed in chunks that end at `cuts`."""
    probe, table = LogitsProbe(one), shuffled_tables(1, 10, 64)[0]
    for first, last in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        new = [new_row(0)] if first == 0 else []
        one.execute(make_plan([(0, tokens[first:last], first, table)], new_rows=new))
    return probe.last[0]


def test_logits_are_close_and_the_same_for_every_way_to_cut_a_prompt(folder: Path):
    model = load_model(folder)
    tokens = np.random.default_rng(0).integers(3, 250, 70).tolist()
    whole = logits(runner(model), tokens, [])
    for cuts in ([33, 69], [8, 16, 64], [69]):
        again = logits(runner(model), tokens, cuts)
        assert (again - whole).abs().max() < 1e-3 * whole.abs().max()
    exact = model_logits(folder, tokens)
    assert (whole - exact).norm() < 0.08 * exact.norm()


def model_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return reference_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens)[-1]


def test_the_runner_of_gpus_computes_the_same_over_twins(folder: Path):
    model = load_model(folder)
    tokens = np.random.default_rng(1).integers(3, 250, 40).tolist()
    found = []
    for twins in (False, True):
        one, table = runner(model, twins=twins), shuffled_tables(1, 10, 64)[0]
        answer = [int(one.execute(make_plan([(0, tokens, 0, table)], new_rows=[new_row(0)])).token_ids[0])]
        for at in range(40, 60):
            answer.append(int(one.execute(make_plan([(0, answer[-1:], at, table)])).token_ids[0]))
        found.append(answer)
    assert found[0] == found[1]


def test_the_engine_takes_the_kv_dtype_from_its_config(folder: Path):
    config = EngineConfig(model=str(folder), device="cpu", threads=1, dtype="float32", kv_dtype="fp8")
    opened = open_model(config)
    assert opened.layout.dtype == "fp8"
    assert open_model(EngineConfig(model=str(folder), device="cpu", threads=1)).layout.dtype != "fp8"
