"""The GPU's runner without a GPU: its forward pass, padding and bookkeeping over the kernels' twins in plain torch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.served import random_requests, serve
from tests.unit.tiny_models import load_model, make_plan, make_runner, new_row, shuffled_tables, tiny_model

from slipstream.config import EngineConfig
from slipstream.engine.plan import FROM_DEVICE
from slipstream.run.cuda.graphs import graph_sizes
from slipstream.run.cuda.inputs import DecodeInputs, MixedInputs
from slipstream.run.cuda.kernels.ops import LAID_OUT_BYTES
from slipstream.run.cuda.kernels.shapes import decode_shape
from slipstream.run.cuda.kernels.twins import TorchOps
from slipstream.run.cuda.memory import largest_step, step_bytes
from slipstream.run.cuda.runner import CudaRunner, wants_more
from slipstream.run.device import CONTEXT_BYTES, GPU_RESERVE_BYTES, pool_pages
from slipstream.run.runner import Runner
from slipstream.run.sampler import DrawTable
from slipstream.types import SamplingParams

PAGES = 129
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(seed=5, top_p=0.9, top_k=40),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, min_tokens=3),
    SamplingParams(temperature=0.0),
]
GREEDY = [s for s in SETTINGS if s.temperature == 0 and not s.penalized]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), request.param)


def twin_runner(folder: Path, rows: int = 8, max_pages: int = 20, *, capture: bool = True) -> CudaRunner:
    plain = make_runner(load_model(folder), pages=PAGES)
    ops = TorchOps(plain.pool, plain.model.rotary)
    memory = plain.pool.values.view(torch.uint8)
    return CudaRunner(plain.model, plain.layout, memory, rows, max_pages, ops=ops, capture=capture)


def answers(runner: Runner, settings: list[SamplingParams], steps: int = 12) -> list[list[int]]:
    """Prompts of several lengths, one of them computed in two chunks beside decoding ones; then decode steps."""
    rng, count = np.random.default_rng(0), len(settings)
    tables = shuffled_tables(count, 12, PAGES)
    lengths = [*(17, 40, 1, 9)[: count - 1], 30]
    prompts = [rng.integers(3, 250, length).tolist() for length in lengths]
    rows = [new_row(row, params, prompt_ids=prompts[row]) for row, params in enumerate(settings)]
    late = count - 1
    parts = [(row, prompts[row], 0, tables[row]) for row in range(late)]
    found, targets = [], {1: np.array([*prompts[1][1:], -1])}
    for step in range(steps):
        sample = [True] * len(parts)
        if step == 2:
            parts.append((late, prompts[late][:13], 0, tables[late]))
            sample = [True] * late + [False]
        plan = make_plan(parts, sample=sample, new_rows=rows[: late if step == 0 else 0], prompt_logprobs=targets)
        if step == 2:
            plan.new_rows.append(rows[late])
        outcome = runner.execute(plan)
        found.append(outcome.token_ids.tolist())
        if targets:
            values = [item.logprob for item in outcome.prompt_logprobs[1] if item is not None]
            assert len(values) == len(prompts[1]) - 1
            found.append([round(value, 3) for value in values])
        assert [item is not None for item in outcome.logprobs] == [settings[p[0]].logprobs is not None for p in parts]
        targets = {}
        following = [
            (row, [int(token)], first + len(fed), table)
            for (row, fed, first, table), token in zip(parts, outcome.token_ids, strict=True)
        ]
        if step == 2:
            following[late] = (late, prompts[late][13:], 13, tables[late])
        parts = following
    return found


def test_the_runner_of_gpus_answers_like_the_plain_one(folder: Path):
    for settings in (SETTINGS, GREEDY):
        wanted = answers(make_runner(load_model(folder), pages=PAGES), settings)
        assert answers(twin_runner(folder), settings) == wanted


@pytest.mark.parametrize("pages", [PAGES, 14])
def test_two_steps_under_way_answer_like_one(folder: Path, pages: int):
    requests = random_requests(40, seed=pages)
    wanted = serve(make_runner(load_model(folder), pages=PAGES), requests, pages=pages)
    found = serve(twin_runner(folder), requests, pages=pages)
    assert (found.tokens, found.ends) == (wanted.tokens, wanted.ends)
    assert found.likely == wanted.likely
    assert found.logprobs.keys() == wanted.logprobs.keys()
    for name, values in found.logprobs.items():
        assert values == pytest.approx(wanted.logprobs[name], abs=1e-3)
    assert len(found.ends) == len(requests)
    assert found.ahead > 10
    assert wanted.ahead == 0
    assert (found.preemptions > 0) == (pages < PAGES)


def test_a_step_that_raises_is_known_when_it_is_collected(folder: Path):
    runner = twin_runner(folder)
    runner.launch(make_plan([(0, [5], 0, [1])], new_rows=[new_row(0)]))
    runner.launch(make_plan([(1, [5], 0, [PAGES])], new_rows=[new_row(1)]))  # a page that is not there
    assert runner.collect().token_ids[0] >= 0
    with pytest.raises(IndexError):
        runner.collect()
    runner.launch(make_plan([(0, [FROM_DEVICE], 1, [1])]))
    assert runner.collect().token_ids[0] >= 0


def test_no_more_than_two_steps_are_under_way(folder: Path):
    runner = twin_runner(folder)
    plan = make_plan([(0, [5], 0, [1])], new_rows=[new_row(0)])
    runner.launch(plan)
    runner.launch(plan)
    with pytest.raises(AssertionError, match="under way already"):
        runner.launch(plan)


def test_a_step_takes_the_tokens_of_the_step_before_from_the_device(folder: Path):
    known, ahead = twin_runner(folder), twin_runner(folder)
    tables = shuffled_tables(3, 8, PAGES)
    first = make_plan(
        [(row, [7 + row, 8, 9], 0, tables[row]) for row in range(3)], new_rows=[new_row(row) for row in range(3)]
    )
    tokens = known.execute(first).token_ids.tolist()
    ahead.launch(first)
    order, expected = (2, 0, 1), [tokens]
    for length in range(3, 9):
        fed = dict(zip(order if length > 3 else (0, 1, 2), expected[-1], strict=True))
        expected.append(known.execute(make_plan([(r, [fed[r]], length, tables[r]) for r in order])).token_ids.tolist())
        ahead.launch(make_plan([(row, [FROM_DEVICE], length, tables[row]) for row in order]))
        assert ahead.collect().token_ids.tolist() == expected[-2]
    assert ahead.collect().token_ids.tolist() == expected[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_graph_says_which_rows_have_no_finite_logits(folder: Path, temperature: float):
    runner = twin_runner(folder)
    params = SamplingParams(temperature=temperature)
    plan = make_plan(
        [(row, [5 + row], 0, [1 + row]) for row in range(3)], new_rows=[new_row(r, params) for r in range(3)]
    )
    assert (runner.execute(plan).token_ids >= 0).all()
    runner.pool.layer(0)[2, :, 1] = float("nan")
    tokens = runner.execute(make_plan([(row, [5], 1, [1 + row]) for row in range(3)])).token_ids
    assert (tokens < 0).tolist() == [False, True, False]
    runner.launch(make_plan([(row, [FROM_DEVICE], 2, [1 + row]) for row in range(3)]))
    assert (runner.collect().token_ids < 0).tolist() == [False, True, False]


def test_padding_touches_nothing_but_the_scratch_page(folder: Path):
    runner = twin_runner(folder, rows=5)
    tables = shuffled_tables(3, 2, PAGES)
    plan = make_plan(
        [(row, [7, 8, 9], 0, tables[row]) for row in range(3)], new_rows=[new_row(row) for row in range(3)]
    )
    runner.execute(plan)
    before = runner.pool.layer(0).clone()
    runner.execute(make_plan([(row, [5], 3, tables[row]) for row in range(3)]))  # a graph of four
    changed = (runner.pool.layer(0) != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted([0, *(table[0] for table in tables)])


def test_the_largest_step_asks_everything_of_every_row(folder: Path):
    runner = twin_runner(folder, rows=6)
    plan = largest_step(80, 6, 100, runner.layout)
    assert (len(plan.token_ids), plan.sequences, plan.block_tables.max()) == (80, 6, 0)
    outcome = runner.execute(plan)
    assert (outcome.token_ids >= -1).all()
    assert len(outcome.prompt_logprobs[5]) == 75
    several = largest_step(80, 6, 30, runner.layout)
    assert several.context_lens.tolist() == [1, 1, 1, 30, 30, 30]
    assert 75 <= len(several.token_ids) <= 80
    assert several.positions.max() == 29
    assert (runner.execute(several).token_ids >= -1).all()


def test_without_graphs_every_step_is_computed_kernel_by_kernel(folder: Path):
    wanted = answers(twin_runner(folder), SETTINGS)
    assert answers(twin_runner(folder, capture=False), SETTINGS) == wanted


def test_a_step_without_tokens_only_settles_rows(folder: Path):
    runner = twin_runner(folder)
    plan = make_plan([(0, [5], 0, [1])], new_rows=[new_row(0)])
    runner.execute(plan)
    empty = make_plan([(0, [5], 0, [1])], freed_rows=[0])
    empty = type(empty)(
        **{**{f: getattr(empty, f) for f in empty.__slots__}, "token_ids": np.array([], dtype=np.int64)}
    )
    assert runner.execute(empty).token_ids.tolist() == [-1]
    with pytest.raises(IndexError):
        runner.sampler.params(0)


def test_graph_sizes_grow_by_a_quarter_and_end_at_the_most():
    for most in (1, 3, 64, 100, 256, 1000, 4096):
        sizes = graph_sizes(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        assert all(b <= max(1.5 * a, a + 4) for a, b in pairwise(sizes))


def test_splits_fill_the_chip_and_no_more():
    for pairs in (1, 2, 8, 64, 191, 192, 2048):
        splits, tile, warps, _ = decode_shape(pairs)
        assert 1 <= splits <= 64
        assert splits <= 2 or splits * pairs <= 512
        assert (tile, warps) in ((64, 2), (64, 4), (128, 4))
    assert decode_shape(2)[0] == 64
    assert decode_shape(512)[0] == 1


def test_only_rows_that_want_their_logits_changed_or_told_need_more_than_a_draw():
    assert not wants_more(SamplingParams(temperature=0.0))
    assert not wants_more(SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7))
    assert wants_more(SamplingParams(temperature=0.0, logprobs=0))
    assert wants_more(SamplingParams(min_tokens=1))
    assert wants_more(SamplingParams(logit_bias={3: 1.0}))
    assert wants_more(SamplingParams(presence_penalty=0.1))


def test_columns_of_steps_arrive_where_kernels_look():
    device = torch.device("cpu")
    parts = [(0, [5], 20, [1, 2, 3]), (1, [6], 3, [4]), (2, [7, 8, 9], 6, [5, 6]), (3, [1], 0, [9])]
    step = MixedInputs(8, 2, device).fill(make_plan(parts))
    assert step.decodes == 2
    assert step.decode is not None
    assert step.decode.lengths.tolist() == [21, 4]
    assert step.decode.tables.tolist() == [1, 2, 3, 4, 0, 0]
    assert step.decode.shares[: 3 * 4].tolist() == [0, 0, 1, 21, 1, 0, 1, 4, 0, 0, 0, 0]
    assert int(step.decode.width_at[0]) == step.width == 3
    assert step.token_ids.tolist() == [5, 6, 7, 8, 9, 1]
    assert step.pages.tolist() == [5, 5, 6, 9]
    assert step.positions.tolist() == [6, 7, 8, 0]
    assert step.query_start.tolist() == [0, 3, 4]
    assert step.lengths.tolist() == [9, 1]
    assert step.longest == 3
    inputs = DecodeInputs(6, 4, 2, device, spare=9)
    table = DrawTable(2, 50)
    table.set(1, SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.25, seed=3))
    how = table.columns(np.array([0, 1]), np.array([21, 4]))
    inputs.fill(make_plan(parts[:2]), 4, how)
    columns = inputs.columns.first(4)
    assert columns.token_ids.tolist() == [5, 6, 0, 0]
    assert columns.rows.tolist() == [0, 1, 9, 9]
    assert inputs.how.temperature[:4].tolist() == [0.0, 0.5, 0.0, 0.0]
    assert inputs.how.top_k[:2].tolist() == [0, 7]
    assert inputs.how.log_min_p[:2].exp().tolist() == pytest.approx([0.0, 0.25])
    assert inputs.how.top_p[:2].tolist() == [1.0, 0.9]
    assert inputs.how.noise[:2].tolist() == how.noise.tolist()
    assert columns.lengths.tolist() == [21, 4, 1, 1]
    assert columns.shares[: 5 * 4].tolist() == [0, 0, 1, 21, 1, 0, 1, 4, 2, 0, 1, 1, 3, 0, 1, 1, 0, 0, 0, 0]
    assert columns.tables[: 4 * 3].tolist() == [1, 2, 3, 4] + [0] * 8


def test_room_is_left_for_the_largest_step(monkeypatch: pytest.MonkeyPatch, folder: Path):
    config = load_model(folder).config
    layout = config.layout(16, "bfloat16")
    needed = step_bytes(config, 2, 8192, 256)
    assert needed > step_bytes(config, 2, 512, 256) > step_bytes(config, 2, 512, 1) > LAID_OUT_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 100 << 30))
    engine, gpu = EngineConfig(mem_fraction=0.999), torch.device("cuda", 0)
    left = (100 << 30) - pool_pages(engine, layout, gpu, needed) * layout.page_bytes
    assert needed + GPU_RESERVE_BYTES <= left < needed + GPU_RESERVE_BYTES + layout.page_bytes
    modest = EngineConfig(mem_fraction=0.5)
    assert pool_pages(modest, layout, gpu, needed) == ((50 << 30) - CONTEXT_BYTES) // layout.page_bytes


def test_a_worker_gets_its_share_of_a_gpu_whatever_the_other_there_has_taken(
    monkeypatch: pytest.MonkeyPatch, folder: Path
):
    layout, gpu = load_model(folder).config.layout(16, "bfloat16"), torch.device("cuda", 0)
    share = EngineConfig(mem_fraction=0.44)
    found = []
    for free in (100, 56, 53):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free << 30, 100 << 30))
        found.append(pool_pages(share, layout, gpu))
    assert found == [((44 << 30) - CONTEXT_BYTES) // layout.page_bytes] * 3
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 << 30, 100 << 30))
    assert pool_pages(share, layout, gpu) == ((20 << 30) - GPU_RESERVE_BYTES) // layout.page_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (56 << 30, 100 << 30))
    leaving = ((44 << 30) - CONTEXT_BYTES - (3 << 30)) // layout.page_bytes  # room for the steps of one of two
    assert pool_pages(share, layout, gpu, 3 << 30) == leaving
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 << 30)  # weights
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (85 << 30, 100 << 30))
    assert pool_pages(share, layout, gpu) == ((29 << 30) - CONTEXT_BYTES) // layout.page_bytes
