"""Shards of a model: each rank loads its part alone, and the ranks together compute what the whole model computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tests.unit.test_model_gguf import WIDE, write
from tests.unit.tiny_models import make_plan, make_runner, new_row, reference, save, shuffled_tables
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.model.config import read_config
from slipstream.model.files import ModelFiles, locate
from slipstream.model.llama import Llama
from slipstream.model.loader import load
from slipstream.model.shard import Shard
from slipstream.run.cuda.kernels.twins import TorchOps
from slipstream.run.cuda.runner import CudaRunner
from slipstream.run.runner import Runner

TOLERANCE = 2e-5

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, a vocabulary that does not divide": ("llama", {"vocab_size": 317}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, odd vocabulary": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 311}),
    "qwen3": ("qwen3", {}),
}


class Threads:
    """The ranks of one model as threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.shared: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60.0)

    def exchange(self, rank: int, x: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.shared[rank] = x
        self.barrier.wait()
        whole = combine(self.shared)
        self.barrier.wait()
        return whole


class ThreadRank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.size = threads, rank, threads.size

    def reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self.threads.exchange(self.rank, x, lambda parts: torch.stack(parts).sum(0)))

    def gather(self, x: Tensor) -> Tensor:
        return self.threads.exchange(self.rank, x, torch.stack)


def shards_of(files: ModelFiles, size: int, *, dummy: bool = False) -> list[Llama]:
    config = read_config(files)
    place = torch.device("cpu"), torch.float32
    models = [load(files, config, *place, dummy=dummy, shard=Shard(config, rank, size)) for rank in range(size)]
    threads = Threads(size)
    if size > 1:
        for rank, model in enumerate(models):
            model.parallel = ThreadRank(threads, rank)
    return models


def runner_of(model: Llama) -> Runner:
    shard = model.shard
    layout = shard.whole.layout(8, "float32", shard.size, shard.rank)
    memory = torch.empty(64 * layout.page_bytes, dtype=torch.uint8)
    memory.view(torch.float32).fill_(1e4)
    return Runner(model, layout, memory, 8)


def twin_of(model: Llama) -> Runner:
    """The runner of GPUs over the twins of its kernels."""
    plain = runner_of(model)
    ops = TorchOps(plain.pool, plain.model.rotary)
    return CudaRunner(model, plain.layout, plain.pool.values.view(torch.uint8), 8, 20, ops=ops)


def outcomes(
    models: list[Llama], seed: int = 1, make: Callable[[Llama], Runner] = runner_of
) -> list[tuple[list[int], Tensor, Tensor]]:
    """Of each rank: the tokens of a prompt in chunks with greedy decoding behind it, its logits, its pool."""
    tokens = np.random.default_rng(seed).integers(2, 160, 43).tolist()
    table = shuffled_tables(1, 7, 64)[0]

    def run(model: Llama) -> tuple[list[int], Tensor, Tensor]:
        runner = make(model)
        seen: list[Tensor] = []
        plain = model.logits
        model.logits = lambda hidden: seen.append(plain(hidden)) or seen[-1].clone()  # type: ignore[method-assign]
        known, start, rows = list(tokens), 0, [new_row(0)]
        for size in (13, 1, 20, 9, 1, 1, 1, 1, 1):
            part = known[start : start + size]
            outcome = runner.execute(make_plan([(0, part, start, table)], new_rows=rows))
            start, rows = start + size, []
            if start == len(known):
                known.append(int(outcome.token_ids[0]))
        return known, torch.cat([*seen, torch.empty(0, model.config.vocab)]), runner.pool.values

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(run, models))


@pytest.fixture(scope="module", params=list(CASES))
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    architecture, changes = CASES[request.param]
    return locate(str(save(reference(architecture, **changes), tmp_path_factory.mktemp("model"))))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_compute_what_the_whole_model_computes(files: ModelFiles, size: int) -> None:
    ((tokens, logits, pool),) = outcomes(shards_of(files, 1))
    ranks = outcomes(shards_of(files, size))
    whole_layout = runner_of(shards_of(files, 1)[0]).layout
    whole_pages = pool.view(64, *whole_layout.page_shape)
    for rank, (found_tokens, found, found_pool) in enumerate(ranks):
        assert found_tokens == tokens
        assert (found - logits).abs().max() < TOLERANCE * logits.abs().max()
        assert torch.equal(found, ranks[0][1]), "every rank has to sample from the same numbers"
        layout = read_config(files).layout(8, "float32", size, rank)
        held = found_pool.view(64, *layout.page_shape)
        wanted = whole_pages[:, layout.first_head : layout.first_head + layout.kv_heads]
        assert torch.allclose(held, wanted, atol=1e-4), "pages hold this rank's heads of the whole model's"


@pytest.mark.parametrize("size", [2, 4])
def test_the_runner_of_gpus_computes_the_same_on_several_ranks(files: ModelFiles, size: int) -> None:
    ((tokens, _, _),) = outcomes(shards_of(files, 1))
    for found, _, _ in outcomes(shards_of(files, size), make=twin_of):
        assert found == tokens


@pytest.mark.parametrize("size", [2, 4])
def test_each_weight_of_a_shard_is_its_part_of_the_whole(files: ModelFiles, size: int) -> None:
    (whole,) = shards_of(files, 1)
    everything = whole.tensors()
    held: dict[str, int] = dict.fromkeys(everything, 0)
    for model in shards_of(files, size):
        for name, tensor in model.tensors().items():
            part = model.part(name)
            assert torch.equal(tensor, everything[name] if part is None else part.of(everything[name])), name
            held[name] += tensor.numel()
    replicated = ("embed_tokens", "norm", "k_proj", "v_proj")
    for name, count in held.items():
        assert count == everything[name].numel() or any(word in name for word in replicated), name


@pytest.mark.parametrize("size", [2, 4])
def test_random_weights_are_the_same_however_many_ranks_share_them(tmp_path: Path, size: int) -> None:
    changes = {"vocab_size": 4099, "attention_bias": True, "mlp_bias": True}
    files = locate(str(save(reference("llama", **changes), tmp_path)))
    (whole,) = shards_of(files, 1, dummy=True)
    everything = whole.tensors()
    for model in shards_of(files, size, dummy=True):
        for name, tensor in model.tensors().items():
            part = model.part(name)
            assert torch.equal(tensor, everything[name] if part is None else part.of(everything[name])), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("llama", GGMLQuantizationType.F32),
        ("llama", GGMLQuantizationType.Q8_0),  # blocks of 32 numbers, which columns of 64 respect
        ("llama", GGMLQuantizationType.Q4_K),  # blocks of 256, which they do not
        ("qwen2", GGMLQuantizationType.Q8_0),
    ],
)
def test_a_shard_of_a_gguf_file_is_its_part_of_the_whole(
    architecture: str, kind: GGMLQuantizationType, size: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", reference(architecture, **WIDE), kind)
    files = locate(str(path))
    (whole,) = shards_of(files, 1)
    everything = whole.tensors()
    for model in shards_of(files, size):
        for name, tensor in model.tensors().items():
            part = model.part(name)
            assert torch.equal(tensor, everything[name] if part is None else part.of(everything[name])), name


def test_a_shard_counts_its_parameters(files: ModelFiles) -> None:
    config = read_config(files)
    for size in (1, 2, 4):
        for model in shards_of(files, size):
            names = {id(tensor): tensor for tensor in model.tensors().values()}
            missing = 0 if model.shard.leads else config.layers * config.hidden * (config.output_bias + config.mlp_bias)
            assert model.shard.parameters - missing == sum(tensor.numel() for tensor in names.values())
    assert Shard(config).parameters == config.parameters


@pytest.mark.parametrize(
    ("changes", "size", "possible"),
    [
        ({}, 3, "1, 2, 4"),
        ({"heads": 9, "kv_heads": 3, "intermediate": 1536}, 2, "1, 3"),
        ({"heads": 12, "kv_heads": 2, "intermediate": 8960}, 3, "1, 2, 4"),
        ({"intermediate": 97}, 2, "1"),
        ({}, 8, "1, 2, 4"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(
    files: ModelFiles, changes: dict[str, int], size: int, possible: str
) -> None:
    whole = msgspec.structs.replace(read_config(files), heads=4, kv_heads=2, intermediate=96)
    with pytest.raises(ConfigError, match=f"--tp may be {possible} for it"):
        Shard(msgspec.structs.replace(whole, **changes), 0, size)


def test_the_whole_model_is_the_shard_of_one_rank(files: ModelFiles) -> None:
    (whole,) = shards_of(files, 1)
    assert whole.config == read_config(files)
    assert all(whole.part(name) is None for name in whole.tensors())
    make_runner(whole)
