"""Steps that hold prompts as graphs with attention between them, over the kernels' twins; launches that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.served import random_requests, serve
from tests.unit.test_kernels_runner import PAGES, SETTINGS, answers
from tests.unit.test_model_shard import CASES, outcomes, runner_of, shards_of
from tests.unit.tiny_models import (
    LogitsProbe,
    load_model,
    make_plan,
    make_runner,
    new_row,
    reference,
    save,
    shuffled_tables,
    tiny_model,
)
from torch import Tensor

from slipstream.engine.plan import FROM_DEVICE
from slipstream.model.files import locate
from slipstream.model.llama import Llama
from slipstream.run.cuda.kernels.launches import Call, Prepared, Tensors
from slipstream.run.cuda.kernels.twins import TorchOps
from slipstream.run.cuda.memory import largest_step
from slipstream.run.cuda.pieces import MOST_ROWS, PieceGraphs, piece_bytes, piece_sizes
from slipstream.run.cuda.runner import CudaRunner
from slipstream.run.runner import Runner
from slipstream.types import SamplingParams

ROWS = 128  # of the largest pieces here


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), request.param)


def graph_runner(
    model: Llama, *, pages: int = PAGES, rows: int = 8, max_pages: int = 40, graphs: bool = True
) -> CudaRunner:
    """The runner of GPUs over the twins; what no step has written in its blocks is not finite."""
    plain = make_runner(model, pages=pages)
    ops = TorchOps(plain.pool, model.rotary)
    memory = plain.pool.values.view(torch.uint8)
    runner = CudaRunner(model, plain.layout, memory, rows, max_pages, ops=ops, prompt_graphs=graphs, prompt_rows=ROWS)
    with torch.inference_mode():
        for block in blocks(runner):
            block.fill_(float("nan"))
    return runner


def blocks(runner: CudaRunner) -> tuple[Tensor, Tensor, Tensor]:
    pieces = runner._pieces
    return pieces._x, pieces._qkv, pieces._attended


class Counted:
    """Counts the steps of each size that ran in pieces."""

    def __init__(self, runner: CudaRunner) -> None:
        self.sizes: list[int] = []
        forward = runner._pieces.forward

        def counted(step: Any, tokens: int) -> Tensor:
            self.sizes.append(len(step.token_ids))
            return forward(step, tokens)

        runner._pieces.forward = counted  # type: ignore[method-assign]


def test_prompts_in_pieces_answer_like_the_plain_runner(folder: Path):
    wanted = answers(make_runner(load_model(folder), pages=PAGES), SETTINGS)
    runner = graph_runner(load_model(folder))
    counted = Counted(runner)
    assert answers(runner, SETTINGS) == wanted
    assert counted.sizes == [128, 64, 64]  # 67 tokens of prompts, then two chunks beside four that decode


def test_pieces_are_off_unless_asked_for(folder: Path):
    model = load_model(folder)
    plain = make_runner(model, pages=PAGES)
    ops = TorchOps(plain.pool, model.rotary)
    runner = CudaRunner(model, plain.layout, plain.pool.values.view(torch.uint8), 8, 20, ops=ops)
    assert runner._pieces.sizes == []
    assert runner._pieces.size(1) == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pages", [PAGES, 22])
def test_random_requests_are_answered_alike(folder: Path, pages: int, depth: int):
    requests = random_requests(24, seed=pages + depth)
    wanted = serve(make_runner(load_model(folder), pages=PAGES), requests, pages=pages)
    runner = graph_runner(load_model(folder))
    counted = Counted(runner)
    found = serve(runner, requests, pages=pages, depth=depth)
    assert (found.tokens, found.ends, found.likely) == (wanted.tokens, wanted.ends, wanted.likely)
    for name, values in found.logprobs.items():
        assert values == pytest.approx(wanted.logprobs[name], abs=1e-3)
    assert len(counted.sizes) > 10
    assert (found.ahead > 5) == (depth == 2)


def random_parts(rng: np.random.Generator, tokens: int) -> list[tuple[int, list[int], int, list[int]]]:
    """`tokens` new ones: a few sequences that decode, and chunks with and without earlier tokens behind them."""
    decodes = int(rng.integers(0, 4))
    cuts = np.sort(rng.choice(np.arange(1, tokens - decodes), 2, replace=False))
    counts = [1] * decodes + np.diff([0, *cuts.tolist(), tokens - decodes]).tolist()
    tables = shuffled_tables(len(counts), 40, 320, seed=int(rng.integers(1 << 30)))
    earlier = [0 if row >= decodes and rng.random() < 0.5 else int(rng.integers(1, 100)) for row in range(len(counts))]
    return [(row, rng.integers(3, 250, count).tolist(), earlier[row], tables[row]) for row, count in enumerate(counts)]


@pytest.mark.parametrize("tokens", [8, 63, 64, 65, 127, 128, 129, 200])
def test_steps_at_the_edges_of_sizes_are_computed_alike(folder: Path, tokens: int):
    """Everything that a step leaves behind: tokens, logits, log-probabilities of a prompt, and the pool."""
    plain = make_runner(load_model(folder), pages=320)
    fast, eager = (graph_runner(load_model(folder), pages=320, graphs=graphs) for graphs in (True, False))
    noise = torch.randn(plain.pool.values.shape, generator=torch.Generator().manual_seed(3))
    counted, rng = Counted(fast), np.random.default_rng(tokens)
    rows = [new_row(row, SamplingParams(temperature=0.0, prompt_logprobs=1)) for row in range(8)]
    probes = [LogitsProbe(runner) for runner in (plain, fast)]
    for step in range(4):
        for runner in (plain, fast, eager):  # they differ in what they leave in pages behind a sequence
            runner.pool.values.copy_(noise)
        for probe in probes:
            probe.seen.clear()
        parts = random_parts(rng, tokens)
        last = len(parts) - 1
        targets = {last: np.array([*parts[last][1][1:], -1])}
        plan = make_plan(parts, new_rows=rows if step == 0 else [], prompt_logprobs=targets)
        wanted, found = plain.execute(plan), fast.execute(plan)
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        assert torch.allclose(probes[1].seen[0], probes[0].seen[0], atol=1e-3)
        pairs = zip(found.prompt_logprobs[last], wanted.prompt_logprobs[last], strict=True)
        for one, other in pairs:
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        eager.execute(plan)
        assert torch.allclose(fast.pool.values, eager.pool.values, atol=1e-4)
    size = next((size for size in (64, 128) if size >= tokens), 0)
    assert counted.sizes == ([size] * 4 if size else [])


def test_padding_rows_reach_no_page_and_no_other_row(folder: Path):
    runner = graph_runner(load_model(folder))
    table = shuffled_tables(1, 4, PAGES)[0]
    before = runner.pool.values.view(PAGES, -1).clone()
    outcome = runner.execute(make_plan([(0, [5] * 20, 0, table)], new_rows=[new_row(0)]))
    assert outcome.token_ids[0] >= 0
    changed = (runner.pool.values.view(PAGES, -1) != before).any(1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(table[:3])
    assert runner.pool.values.isfinite().all()
    assert blocks(runner)[2][20:64].isnan().all(), "attention has left the padding alone"


def test_a_sequence_that_is_not_finite_spoils_no_other(folder: Path):
    runner, plain = graph_runner(load_model(folder)), make_runner(load_model(folder), pages=PAGES)
    tables = shuffled_tables(3, 8, PAGES)
    rows = [new_row(row) for row in range(3)]
    first = make_plan([(row, [7 + row] * 12, 0, tables[row]) for row in range(3)], new_rows=rows)
    for each in (runner, plain):
        each.execute(first)
        each.pool.layer(0)[tables[1][0]] = float("nan")
    second = make_plan([(row, [9] * 5, 12, tables[row]) for row in range(3)])
    tokens = runner.execute(second).token_ids
    assert tokens.tolist() == plain.execute(second).token_ids.tolist()
    assert (tokens < 0).tolist() == [False, True, False]
    third = make_plan([(2, [5, 6, 7], 17, tables[2]), (0, [4, 3], 17, tables[0])])
    assert runner.execute(third).token_ids.tolist() == plain.execute(third).token_ids.tolist()


def test_a_chunk_beside_tokens_that_only_the_device_knows(folder: Path):
    known, ahead = graph_runner(load_model(folder)), graph_runner(load_model(folder))
    tables = shuffled_tables(3, 8, PAGES)
    first = make_plan([(row, [7 + row] * 9, 0, tables[row]) for row in (0, 1)], new_rows=[new_row(0), new_row(1)])
    tokens = known.execute(first).token_ids.tolist()
    ahead.launch(first)

    def second(fed: list[int]) -> Any:
        parts = [(row, [fed[row]], 9, tables[row]) for row in (0, 1)]
        return make_plan([*parts, (2, [8] * 30, 0, tables[2])], new_rows=[new_row(2)])

    wanted = known.execute(second(tokens)).token_ids.tolist()
    ahead.launch(second([FROM_DEVICE, FROM_DEVICE]))
    assert ahead.collect().token_ids.tolist() == tokens
    assert ahead.collect().token_ids.tolist() == wanted


def test_the_largest_step_in_pieces_asks_everything_of_every_row(folder: Path):
    runner = graph_runner(load_model(folder), rows=6)
    counted = Counted(runner)
    outcome = runner.execute(largest_step(80, 6, 100, runner.layout))
    assert counted.sizes == [128]
    assert (outcome.token_ids >= -1).all()
    assert len(outcome.prompt_logprobs[5]) == 75


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_answer_alike_in_pieces(case: str, size: int, tmp_path: Path):
    architecture, changes = CASES[case]
    files = locate(str(save(reference(architecture, **changes), tmp_path)))
    ((tokens, _, _),) = outcomes(shards_of(files, 1))

    def in_pieces(model: Llama) -> Runner:
        plain = runner_of(model)
        ops = TorchOps(plain.pool, model.rotary)
        memory = plain.pool.values.view(torch.uint8)
        return CudaRunner(model, plain.layout, memory, 8, 20, ops=ops, prompt_graphs=True, prompt_rows=ROWS)

    for found, _, _ in outcomes(shards_of(files, size), make=in_pieces):
        assert found == tokens


def test_sizes_waste_little_and_reach_the_most():
    for most in (1, 64, 65, 300, 512, 513, 1000, MOST_ROWS):
        sizes = piece_sizes(most)
        assert sizes[-1] >= most
        assert sizes[-1] - most < 128
        for tokens in range(1, most + 1, 7):
            size = next(size for size in sizes if size >= tokens)
            assert size - tokens < (64 if tokens <= 512 else 128)


def test_what_pieces_take_is_reckoned(folder: Path):
    model = load_model(folder)
    runner = graph_runner(model)
    kept = sum(block.numel() * block.element_size() for block in blocks(runner))
    passing = ROWS * 3 * model.config.intermediate * 4
    assert kept + passing < piece_bytes(model.config, 4, ROWS) < kept + passing + (8 << 20)
    assert isinstance(runner._pieces, PieceGraphs)
    assert piece_bytes(model.config, 4, 2048) > piece_bytes(model.config, 4, 512)


# ------------------------------------------------------------------------------------------------------- kept launches


class Compiled:
    def __init__(self, log: list[Any], number: int) -> None:
        self.log, self.number = log, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self.log.append((self.number, grid, args, stream))


class Kernel:
    """Answers as Triton's kernels do: a launch returns what was compiled for it."""

    arg_names = ("x", "keys", "count", "tile", "deep")

    def __init__(self, *, compiles: bool = True) -> None:
        self.plain: list[Any] = []
        self.direct: list[Any] = []
        self.compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Any:
            self.plain.append((grid, args, constants))
            return Compiled(self.direct, len(self.plain)) if self.compiles else None

        return launch


def layers_of(pool: Tensor, count: int, stride: int) -> list[Tensors]:
    return [Tensors.of(pool[layer * stride :]) for layer in range(count)]


def test_a_kernel_is_found_once_and_then_given_addresses():
    kernel, known, pool = Kernel(), {}, torch.zeros(64)
    x, of_layers = torch.zeros(8), layers_of(pool, 3, 16)
    for count in (5, 7):
        call = Call(kernel, (count, 1, 1), (x, pool, count), {"deep": True, "tile": 8}, {"num_warps": 4})
        prepared = Prepared(call, (1,), known, stream=77)
        for given in of_layers:
            prepared(given)
    ((grid, args, named),) = kernel.plain
    assert (grid, named) == ((5, 1, 1), {"deep": True, "tile": 8, "num_warps": 4})
    assert args[1].data_ptr() == pool.data_ptr()
    addresses = [given.addresses[0] for given in of_layers]
    assert addresses == [pool.data_ptr() + 64 * layer for layer in range(3)]
    wanted = [(1, (5, 1, 1), (x.data_ptr(), at, 5, 8, True), 77) for at in addresses[1:]]
    wanted += [(1, (7, 1, 1), (x.data_ptr(), at, 7, 8, True), 77) for at in addresses]
    assert kernel.direct == wanted


@pytest.mark.parametrize(
    "change", ["alignment of a layer", "alignment", "one", "sixteen", "constant", "option", "type"]
)
def test_what_a_kernel_is_compiled_for_is_looked_up_anew(change: str):
    kernel, known, pool = Kernel(), {}, torch.zeros(64)
    x = torch.zeros(16)

    def run(x: Tensor = x, count: int = 5, tile: int = 8, warps: int = 4, at: int = 0) -> None:
        call = Call(kernel, (1, 1, 1), (x, pool, count), {"tile": tile, "deep": False}, {"num_warps": warps})
        Prepared(call, (1,), known, stream=0)(Tensors.of(pool[at:]))

    changed: dict[str, dict[str, Any]] = {
        "alignment of a layer": {"at": 1},
        "alignment": {"x": x[1:]},
        "one": {"count": 1},
        "sixteen": {"count": 32},
        "constant": {"tile": 16},
        "option": {"warps": 8},
        "type": {"x": x.double()},
    }
    run()
    run()
    assert len(kernel.plain) == 1
    run(**changed[change])
    assert len(kernel.plain) == 2
    run()
    run(**changed[change])
    assert len(kernel.plain) == 2
    assert [number for number, *_ in kernel.direct] == [1, 1, 2]


def test_where_nothing_is_compiled_every_launch_is_a_plain_one():
    kernel, pool = Kernel(compiles=False), torch.zeros(64)
    call = Call(kernel, (1, 1, 1), (torch.zeros(4), pool, 5), {"tile": 8, "deep": False})
    prepared = Prepared(call, (1,), {}, stream=0)
    for given in layers_of(pool, 3, 16):
        prepared(given)
    assert [args[1].data_ptr() - pool.data_ptr() for _, args, _ in kernel.plain] == [0, 64, 128]
    assert kernel.direct == []
