"""The choice of an attention backend: obeyed, or refused with the reason, before weights are read."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from tests.unit.tiny_models import load_model, reference, save

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.run.attention import PagedPool
from slipstream.run.cuda import backends
from slipstream.run.cuda.kernels.twins import TorchOps
from slipstream.run.cuda.runner import CudaRunner, why_not
from slipstream.run.engine_model import open_model
from slipstream.run.runner import Runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("llama"), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("wanted", ["triton", "flashinfer"])
def test_kernels_of_gpus_are_refused_on_a_cpu(folder: Path, wanted: str):
    engine = EngineConfig(model=str(folder), device="cpu", threads=1, attention_backend=wanted)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"{wanted}.*needs an NVIDIA GPU.*auto or torch"):
        open_model(engine)


@pytest.mark.parametrize("wanted", ["auto", "torch"])
def test_a_cpu_attends_in_torch(folder: Path, wanted: str):
    opened = open_model(EngineConfig(model=str(folder), device="cpu", threads=1, attention_backend=wanted))  # type: ignore[arg-type]
    runner = opened.runner(torch.zeros(8 * opened.layout.page_bytes, dtype=torch.uint8), 2)
    assert runner.attention == "torch"


def pool(folder: Path, kv_dtype: str, dtype: torch.dtype) -> tuple[PagedPool, Runner]:
    model = load_model(folder, dtype)
    layout = model.config.layout(8, kv_dtype)
    memory = torch.zeros(8 * layout.page_bytes, dtype=torch.uint8)
    return PagedPool(memory, layout, dtype), Runner(model, layout, memory, 2)


def test_flashinfer_says_what_it_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch):
    config = load_model(folder).config

    def reason(capability: tuple[int, int], kv_dtype: str, dtype: torch.dtype) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return backends.why_not_flashinfer(config, pool(folder, kv_dtype, dtype)[0])

    assert "9.0" in reason((10, 0), "bfloat16", torch.bfloat16)
    assert "bfloat16 and float16 KV" in reason((9, 0), "fp8", torch.bfloat16)
    assert "bfloat16 and float16 KV" in reason((9, 0), "float32", torch.float32)
    assert "heads of 16" in reason((9, 0), "bfloat16", torch.bfloat16)


def test_the_kernels_say_what_a_card_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    model = load_model(folder)

    def reason(capability: tuple[int, int], kv_dtype: str) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return why_not(model, model.config.layout(8, kv_dtype))

    assert "8.0 or newer" in reason((7, 5), "float16")
    assert "fp8 from compute capability 8.9" in reason((8, 0), "fp8")
    for capability, kv_dtype in (((8, 0), "bfloat16"), ((8, 9), "fp8"), ((9, 0), "fp8")):
        assert "heads of 16" in reason(capability, kv_dtype)  # the next thing that it looks at


class Ops(TorchOps):
    prompts = None


def test_what_was_asked_for_is_obeyed_or_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    one, plain = pool(folder, "bfloat16", torch.bfloat16)
    ops = Ops(one, plain.model.rotary)
    monkeypatch.setattr(backends, "why_not_flashinfer", lambda config, pool: "it is not there")
    assert backends.settle("auto", ops, plain.model) == "triton"  # type: ignore[arg-type]
    assert backends.settle("triton", ops, plain.model) == "triton"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"flashinfer.*it is not there.*auto or triton"):
        backends.settle("flashinfer", ops, plain.model)  # type: ignore[arg-type]
    monkeypatch.setattr(backends, "why_not_flashinfer", lambda config, pool: "")
    monkeypatch.setattr(backends, "_compiled", lambda config, pool: False)
    assert backends.settle("auto", ops, plain.model) == "triton"  # type: ignore[arg-type]


def times(values: dict[str, float]) -> object:
    found = iter(values.values())
    return lambda call: next(found)


@pytest.mark.parametrize(("triton", "flashinfer", "best"), [(1.0, 2.0, "triton"), (2.0, 1.0, "flashinfer")])
def test_the_faster_one_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, triton: float, flashinfer: float, best: str
):
    one, plain = pool(folder, "bfloat16", torch.bfloat16)
    ops = Ops(one, plain.model.rotary)
    made = object()
    monkeypatch.setattr(backends, "why_not_flashinfer", lambda config, pool: "")
    monkeypatch.setattr(backends, "_compiled", lambda config, pool: True)
    monkeypatch.setattr(backends, "FlashInferPrompts", lambda config, pool: made)
    monkeypatch.setattr(backends, "_milliseconds", times({"triton": triton, "flashinfer": flashinfer}))
    assert backends.settle("auto", ops, plain.model) == best  # type: ignore[arg-type]
    assert ops.prompts is (made if best == "flashinfer" else None)


def test_a_package_that_fails_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch):
    one, plain = pool(folder, "bfloat16", torch.bfloat16)
    ops = Ops(one, plain.model.rotary)

    def broken(config: object, pool: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(backends, "why_not_flashinfer", lambda config, pool: "")
    monkeypatch.setattr(backends, "_compiled", lambda config, pool: True)
    monkeypatch.setattr(backends, "FlashInferPrompts", broken)
    assert backends.settle("auto", ops, plain.model) == "triton"  # type: ignore[arg-type]
    assert ops.prompts is None


def test_the_runner_of_gpus_names_its_backend(folder: Path):
    one, plain = pool(folder, "float32", torch.float32)
    runner = CudaRunner(plain.model, plain.layout, one.values.view(torch.uint8), 2, 4, ops=Ops(one, plain.model.rotary))
    assert runner.attention == "triton"
