"""The engine on a GPU: every kernel against its twin in torch, and the runner of graphs against the plain one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
pytest.importorskip("triton", reason="needs triton (extra: gpu)")

from tests.unit.kernel_checks import CHECKS  # noqa: E402
from tests.unit.test_kernels_runner import SETTINGS, answers  # noqa: E402
from tests.unit.tiny_models import (  # noqa: E402
    LogitsProbe,
    make_plan,
    new_row,
    shuffled_tables,
    tiny_model,
)

from slipstream.config import EngineConfig  # noqa: E402
from slipstream.run.cuda.runner import CudaRunner  # noqa: E402
from slipstream.run.engine_model import OpenedModel, open_model  # noqa: E402
from slipstream.run.runner import Runner  # noqa: E402
from slipstream.types import SamplingParams  # noqa: E402

PAGES = 129


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_computes_what_its_twin_does(check: str, dtype: torch.dtype):
    if check == "prefill_gathered" and dtype == torch.float32:
        pytest.skip("the engine leaves prompts in float32 in their pages")
    CHECKS[check](torch.device("cuda:0"), dtype)


def opened_model(folder: Path, architecture: str, dtype: str) -> OpenedModel:
    tiny_model(folder, architecture, head_dim=32, hidden_size=192, num_attention_heads=6, num_key_value_heads=2)
    config = EngineConfig(model=str(folder), device="cuda:0", dtype=dtype, page_tokens=8, max_model_len=1024)  # type: ignore[arg-type]
    return open_model(config)


def runners(opened: OpenedModel) -> tuple[Runner, CudaRunner]:
    memories = [torch.zeros(PAGES * opened.layout.page_bytes, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
    fast = opened.runner(memories[0], 8)
    assert isinstance(fast, CudaRunner)
    return Runner(opened.model, opened.layout, memories[1], 8), fast


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_graphs_and_kernels_answer_like_plain_torch(architecture: str, tmp_path: Path):
    plain, fast = runners(opened_model(tmp_path, architecture, "float32"))
    greedy = [s for s in SETTINGS if s.temperature == 0 and not s.penalized]
    for settings in (SETTINGS, greedy):
        found, wanted = answers(fast, settings), answers(plain, settings)
        assert [row for row in found if isinstance(row[0], int)] == [row for row in wanted if isinstance(row[0], int)]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_in_bfloat16_are_those_of_plain_torch(architecture: str, batch: int, tmp_path: Path):
    plain, fast = runners(opened_model(tmp_path, architecture, "bfloat16"))
    probe = LogitsProbe(plain)
    tables, rng = shuffled_tables(batch, 12, PAGES), np.random.default_rng(1)
    rows = [new_row(row, SamplingParams(temperature=0.0)) for row in range(batch)]
    parts = [(row, rng.integers(3, 250, 30 + row).tolist(), 0, tables[row]) for row in range(batch)]
    for runner in (plain, fast):
        runner.execute(make_plan(parts, new_rows=rows))
    for _ in range(8):
        parts = [(row, rng.integers(3, 250, 1).tolist(), at + len(fed), table) for row, fed, at, table in parts]
        plan = make_plan(parts)
        for runner in (plain, fast):
            runner.execute(plan)
        wanted, found = probe.last, fast._graphs.logits(batch).float()
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
