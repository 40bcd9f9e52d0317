"""The engine on a GPU: every kernel against its twin in torch, and the runner of graphs against the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
pytest.importorskip("triton", reason="needs triton (extra: gpu)")

from tests.unit import sampling_checks  # noqa: E402
from tests.unit.kernel_checks import CHECKS  # noqa: E402
from tests.unit.served import random_requests, serve  # noqa: E402
from tests.unit.test_kernels_runner import GREEDY, SETTINGS, answers  # noqa: E402
from tests.unit.tiny_models import (  # noqa: E402
    LogitsProbe,
    make_plan,
    new_row,
    shuffled_tables,
    tiny_model,
)

from slipstream.config import EngineConfig  # noqa: E402
from slipstream.engine.plan import FROM_DEVICE  # noqa: E402
from slipstream.run.attention import PagedPool  # noqa: E402
from slipstream.run.cuda import backends  # noqa: E402
from slipstream.run.cuda.inputs import MixedInputs  # noqa: E402
from slipstream.run.cuda.kernels.ops import TritonOps  # noqa: E402
from slipstream.run.cuda.memory import dry_run, largest_step  # noqa: E402
from slipstream.run.cuda.pieces import piece_bytes  # noqa: E402
from slipstream.run.cuda.runner import CudaRunner  # noqa: E402
from slipstream.run.engine_model import OpenedModel, open_model  # noqa: E402
from slipstream.run.runner import Runner  # noqa: E402
from slipstream.types import SamplingParams  # noqa: E402

PAGES = 129


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_computes_what_its_twin_does(check: str, dtype: torch.dtype):
    if check.endswith("gathered") and dtype == torch.float32:
        pytest.skip("the engine leaves prompts in float32 in their pages")
    CHECKS[check](torch.device("cuda:0"), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("check", sampling_checks.CHECKS)
def test_a_sampling_kernel_draws_what_its_twin_does(check: str, dtype: torch.dtype):
    sampling_checks.CHECKS[check](torch.device("cuda:0"), dtype)


def opened_model(folder: Path, architecture: str, dtype: str, head_dim: int = 32, **settings: Any) -> OpenedModel:
    sizes = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}
    tiny_model(folder, architecture, head_dim=head_dim, **sizes)
    common: dict[str, Any] = {"device": "cuda:0", "dtype": dtype, "page_tokens": 8, "max_model_len": 1024}
    common["prompt_graphs"] = settings.pop("prompt_graphs", False)
    return open_model(EngineConfig(model=str(folder), **common, **settings))


def runners(opened: OpenedModel) -> tuple[Runner, CudaRunner]:
    memories = [torch.zeros(PAGES * opened.layout.page_bytes, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
    fast = opened.runner(memories[0], 8)
    assert isinstance(fast, CudaRunner)
    return Runner(opened.model, opened.layout, memories[1], 8), fast


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_graphs_and_kernels_answer_like_plain_torch(architecture: str, tmp_path: Path):
    plain, fast = runners(opened_model(tmp_path, architecture, "float32"))
    for settings in (SETTINGS, GREEDY):
        found, wanted = answers(fast, settings), answers(plain, settings)
        assert [row for row in found if isinstance(row[0], int)] == [row for row in wanted if isinstance(row[0], int)]


@pytest.mark.parametrize(
    ("head_dim", "settings"),
    [(32, {}), (64, {"kv_dtype": "fp8"}), (128, {"attention_backend": "triton"}), (128, {"kv_dtype": "fp8"})],
)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_in_bfloat16_are_those_of_plain_torch(
    architecture: str, batch: int, head_dim: int, settings: dict[str, Any], tmp_path: Path
):
    plain, fast = runners(opened_model(tmp_path, architecture, "bfloat16", head_dim, **settings))
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


@pytest.mark.parametrize("pages", [PAGES, 22])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_two_steps_under_way_answer_like_plain_torch(architecture: str, pages: int, tmp_path: Path):
    plain, fast = runners(opened_model(tmp_path, architecture, "float32"))
    requests = random_requests(60, seed=pages)
    wanted, found = serve(plain, requests, pages=PAGES), serve(fast, requests, pages=pages)
    assert (found.tokens, found.ends) == (wanted.tokens, wanted.ends)
    assert found.likely == wanted.likely
    assert found.ahead > 10
    assert (found.preemptions > 0) == (pages < PAGES)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_prompt_graphs_answer_like_plain_torch(architecture: str, tmp_path: Path):
    plain, fast = runners(opened_model(tmp_path, architecture, "float32", prompt_graphs=True))
    assert fast._pieces.sizes[-1] == 2048
    for settings in (SETTINGS, GREEDY):
        found, wanted = answers(fast, settings), answers(plain, settings)
        assert [row for row in found if isinstance(row[0], int)] == [row for row in wanted if isinstance(row[0], int)]


@pytest.mark.parametrize("pages", [PAGES, 22])
def test_two_steps_of_prompt_graphs_under_way_answer_like_plain_torch(pages: int, tmp_path: Path):
    plain, fast = runners(opened_model(tmp_path, "qwen2", "float32", prompt_graphs=True))
    requests = random_requests(60, seed=pages)
    wanted, found = serve(plain, requests, pages=PAGES), serve(fast, requests, pages=pages)
    assert (found.tokens, found.ends, found.likely) == (wanted.tokens, wanted.ends, wanted.likely)


@pytest.mark.parametrize(("head_dim", "settings"), [(32, {}), (64, {"kv_dtype": "fp8"}), (64, {}), (128, {})])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logits_of_prompt_graphs_in_bfloat16_are_those_of_plain_torch(
    architecture: str, head_dim: int, settings: dict[str, Any], tmp_path: Path
):
    """Sizes at their edges, with and without sequences that decode beside, and beyond the largest."""
    opened = opened_model(tmp_path, architecture, "bfloat16", head_dim, prompt_graphs=True, **settings)
    plain, fast = runners(opened)
    probes = [LogitsProbe(plain)]
    tables, rng = shuffled_tables(4, 30, PAGES), np.random.default_rng(1)
    rows = [new_row(row, SamplingParams(temperature=0.0)) for row in range(4)]
    parts = [(row, rng.integers(3, 250, 20 + row).tolist(), 0, tables[row]) for row in range(2)]
    for runner in (plain, fast):
        runner.execute(make_plan(parts, new_rows=rows))
    for count in (1, 62, 63, 125, 126, 127, 200):
        decodes = [(row, [5 + row], 20 + row, tables[row]) for row in range(2)]
        chunk = (2, rng.integers(3, 250, count).tolist(), 0, tables[2])
        second = (3, rng.integers(3, 250, 2).tolist(), 0, tables[3])
        for parts in ([*decodes, chunk, second], [chunk, second]):
            plan = make_plan(parts)
            plain.execute(plan)
            wanted = probes[0].last
            fast.execute(plan)
            found = probes[0].last  # the model is the same, and so is the probe
            assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_prompt_graphs_take_no_more_memory_than_is_reckoned(tmp_path: Path):
    opened = opened_model(tmp_path, "llama", "bfloat16", prompt_graphs=True)
    _, fast = runners(opened)
    pieces = fast._pieces
    print(f"{pieces.capture_s:.2f} s, {pieces.taken_bytes / 2**20:.1f} MiB")
    workspace = 64 << 20  # of cuBLAS on the runner's stream, which any step would need
    assert pieces.taken_bytes <= piece_bytes(opened.model.config, 2, opened.prompt_rows) + workspace


def test_a_step_is_launched_while_the_one_before_computes(tmp_path: Path):
    """Counted by events, not timed: the second launch returns before the first step is done."""
    _, fast = runners(opened_model(tmp_path, "llama", "float32"))
    table = shuffled_tables(1, 12, PAGES)[0]
    fast.execute(make_plan([(0, [5, 6, 7], 0, table)], new_rows=[new_row(0)]))
    plans = [make_plan([(0, [FROM_DEVICE], 3 + step, table)]) for step in range(3)]
    fast.execute(plans[0])
    with torch.cuda.stream(fast._stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
    fast.launch(plans[1])
    fast.launch(plans[2])
    assert not any(launched.done.query() for launched in fast._launched)
    tokens = [fast.collect().token_ids[0] for _ in range(2)]
    assert all(token >= 0 for token in tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_graph_says_which_rows_have_no_finite_logits(temperature: float, tmp_path: Path):
    _, fast = runners(opened_model(tmp_path, "llama", "bfloat16"))
    rows = [new_row(row, SamplingParams(temperature=temperature)) for row in range(3)]
    assert (fast.execute(make_plan([(r, [5 + r], 0, [1 + r]) for r in range(3)], new_rows=rows)).token_ids >= 0).all()
    fast.pool.layer(0)[2, :, 1] = float("nan")
    torch.cuda.synchronize()
    tokens = fast.execute(make_plan([(row, [5], 1, [1 + row]) for row in range(3)])).token_ids
    assert (tokens < 0).tolist() == [False, True, False]
    tokens = fast.execute(make_plan([(row, [FROM_DEVICE], 2, [1 + row]) for row in range(3)])).token_ids
    assert (tokens < 0).tolist() == [False, True, False]


def test_the_largest_step_fits_where_the_dry_run_says(tmp_path: Path):
    opened = opened_model(tmp_path, "llama", "bfloat16")
    taken = dry_run(opened.model, opened.layout, 1000, 8, 1024)
    assert 0 < taken < 2 << 30
    torch.cuda.empty_cache()
    memory = torch.zeros(PAGES * opened.layout.page_bytes, dtype=torch.uint8, device="cuda:0")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner = CudaRunner(opened.model, opened.layout, memory, 8, opened.layout.pages_for(1024), capture=False)
    runner.execute(largest_step(1000, 8, 1024, opened.layout))
    assert torch.cuda.max_memory_allocated() - before <= taken


def test_flashinfer_attends_like_the_kernels(tmp_path: Path):
    pytest.importorskip("flashinfer", reason="needs flashinfer (extra: flashinfer)")
    opened = opened_model(tmp_path, "llama", "bfloat16", 128)
    memory = torch.zeros(PAGES * opened.layout.page_bytes, dtype=torch.uint8, device="cuda:0")
    pool = PagedPool(memory, opened.layout, torch.bfloat16)
    reason = backends.why_not_flashinfer(opened.model.config, pool)
    if reason or not backends._compiled(opened.model.config, pool):
        pytest.skip(reason or "its kernels are not compiled")
    tables, rng = shuffled_tables(3, 40, PAGES), np.random.default_rng(1)
    parts = [(0, [5] * 290, 0, tables[0]), (1, [5] * 70, 100, tables[1]), (2, [5] * 2, 15, tables[2])]
    step = MixedInputs(8, opened.layout.kv_heads, opened.device).fill(make_plan(parts))
    config, layer = opened.model.config, opened.model.layers[1]
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.from_numpy(rng.standard_normal((362, width))).to(opened.device, torch.bfloat16)
    memory.view(torch.bfloat16).normal_()
    ops = TritonOps(config, pool, opened.model.rotary, 8, pdl=True)
    found = []
    for prompts in (None, backends.FlashInferPrompts(config, pool)):
        ops.prompts = prompts
        out = torch.full((362, config.heads * config.head_dim), 1e4, dtype=torch.bfloat16, device=opened.device)
        found.append(ops.prefill_attention(layer, qkv.clone(), out, step).float())
    assert (found[0] - found[1]).abs().max() < 0.03 * found[0].abs().max()
