"""The comparison with transformers, without a GPU: the runner of graphs over its twins, and the plain one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.tiny_models import tiny_model

from slipstream.config import EngineConfig
from slipstream.run.attention import PagedPool
from slipstream.run.cuda.kernels.twins import TorchOps
from slipstream.run.cuda.runner import CudaRunner
from slipstream.run.engine_model import OpenedModel, open_model

ASKED = [[5], [7, 8, 9], list(range(10, 27))]  # a prompt of one token is a step of the graph
ANSWER = 6


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    yield importlib.import_module("gpu_reference")
    for name in ("gpu_reference", "gpu_figures"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module", params=["mistral", "qwen3"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = tiny_model(tmp_path_factory.mktemp("model"), request.param)
    return open_model(EngineConfig(model=str(folder), device="cpu", threads=1, dtype="float32", max_model_len=64))


def of_graphs(opened: OpenedModel) -> Any:
    """The same model as a GPU runs it."""

    def runner(memory: torch.Tensor, sequences: int) -> CudaRunner:
        ops = TorchOps(PagedPool(memory, opened.layout, opened.model.dtype), opened.model.rotary)
        return CudaRunner(opened.model, opened.layout, memory, sequences, 8, ops=ops)

    return SimpleNamespace(layout=opened.layout, device=opened.device, runner=runner)


def test_both_runners_answer_as_transformers_does_with_its_logits(reference: Any, opened: OpenedModel) -> None:
    with torch.inference_mode():
        plain = reference.transformers_model(opened, opened.device)
    for one in (opened, of_graphs(opened)):
        answered = reference.Engine(one, ASKED, ANSWER).answers()
        assert [len(tokens) for tokens in answered.tokens] == [ANSWER] * len(ASKED)
        wanted = reference.reference_logits(plain, ASKED, answered, opened.device)
        assert reference.largest_difference(answered.logits, wanted) < 1e-4
        assert [logits.argmax(-1).tolist() for logits in wanted] == answered.tokens
