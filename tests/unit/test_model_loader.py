"""Loading: shards, dtypes, progress, random weights, and one sentence for each thing that does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.tiny_models import load_model, reference, save

from slipstream.errors import ModelError
from slipstream.model.config import read_config
from slipstream.model.files import locate
from slipstream.model.loader import load

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(reference("qwen2"), tmp_path)


def load_from(folder: Path, **options: Any) -> Any:
    files = locate(str(folder), need_weights=not options.get("dummy", False))
    return load(files, read_config(files), CPU, torch.float32, **options)


def message_of(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_from(folder, **options)
    return caught.value.message


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_every_tensor_arrives_from_one_file_or_many(tmp_path: Path):
    model = reference("qwen3")
    whole, sharded = save(model, tmp_path / "whole"), save(model, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    weights = model.state_dict()
    for place in (whole, sharded):
        tensors = load_model(place).tensors()
        assert set(tensors) == set(weights)
        assert all(torch.equal(tensors[name], weights[name]) for name in weights)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_are_converted_on_the_way(folder: Path, stored: torch.dtype):
    path = folder / "model.safetensors"
    weights = {name: tensor.to(stored) for name, tensor in load_file(path).items()}
    save_file(weights, path)
    tensors = load_model(folder).tensors()
    assert all(torch.equal(tensors[name], weights[name].float()) for name in weights)
    assert load_model(folder, torch.bfloat16).embedding.dtype == torch.bfloat16


def test_progress_counts_bytes_up_to_the_whole(folder: Path):
    seen: list[tuple[int, int]] = []
    model = load_from(folder, progress=lambda done, total: seen.append((done, total)))
    total = model.config.parameters * 4
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_tied_model_keeps_one_copy_of_its_embeddings(tmp_path: Path):
    model = load_model(save(reference("llama", tie_word_embeddings=True), tmp_path))
    assert model.embedding.data_ptr() == model.head.weight.data_ptr()
    assert sum(tensor.numel() for tensor in model.tensors().values()) == model.config.parameters


def test_a_wrong_shape_names_the_tensor_and_both_shapes(folder: Path):
    change(folder, intermediate_size=128)
    assert "mlp.gate_proj.weight has the shape [96, 64], but the config asks for [128, 64]" in message_of(folder)


def test_missing_and_unexpected_tensors_are_named(folder: Path):
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "model.layers.0.self_attn.gate.weight": torch.zeros(3)}, path)
    assert "1 tensors that its architecture does not have: model.layers.0.self_attn.gate.weight" in message_of(folder)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file({**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}, path)
    assert "lacks 1 of 39 tensors: model.layers.2.mlp.up_proj.weight." in message_of(folder)


def test_too_little_memory_is_said_before_anything_is_read(folder: Path):
    (folder / "model.safetensors").write_bytes(b"not even looked at")
    text = message_of(folder, free_bytes=1000)
    assert re.search(r"the weights need [\d.]+ [KM]iB as float32 on cpu, but only [\d.]+ KiB are free", text)


def test_damaged_and_quantised_files_are_refused(folder: Path):
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"].to(torch.int8)}, path)
    assert "model.norm.weight has the dtype I8; quantised safetensors are not supported" in message_of(folder)
    path.write_bytes(path.read_bytes()[:5000])
    assert "cannot be read as safetensors" in message_of(folder)


def test_wide_weights_get_a_second_copy_only_where_memory_is_plentiful(folder: Path):
    plentiful = load_from(folder, free_bytes=None)
    needed = plentiful.config.parameters * 4
    tight = load_from(folder, free_bytes=needed + 1000)
    some = load_from(folder, free_bytes=needed + 5 * (plentiful.head.weight.nbytes + 1000))
    copies = [
        [linear._packed is not None for linear in (model.head, *(layer.gate_up for layer in model.layers))]
        for model in (plentiful, some, tight)
    ]
    assert copies == [[True] * 4, [True, False, False, False], [False] * 4]
    x = torch.randn(5, 64)
    assert torch.allclose(plentiful.head(x), tight.head(x), atol=1e-5)
    assert torch.allclose(
        plentiful.layers[0].gate_up(x), torch.nn.functional.linear(x, tight.layers[0].gate_up.weight), atol=1e-5
    )


def test_random_weights_are_the_same_everywhere_and_have_an_identity(folder: Path):
    (folder / "model.safetensors").unlink()
    first, second = load_from(folder, dummy=True), load_from(folder, dummy=True)
    assert all(torch.equal(a, b) for a, b in zip(first.tensors().values(), second.tensors().values(), strict=True))
    assert 0.01 < float(first.embedding.std()) < 0.03
    assert first.config.identity == second.config.identity
