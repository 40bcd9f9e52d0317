"""What a worker computes on, and opening a model the way a worker does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.unit.tiny_models import make_plan, new_row, reference, save, tiny_model

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, ModelError, PoolTooSmall
from slipstream.run import device as devices
from slipstream.run.device import place, pool_pages, resolve_device, resolve_dtype
from slipstream.run.engine_model import open_model

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_devices_that_are_not_there_are_refused():
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    for name in ("cuda", "cuda:3"):
        with pytest.raises(ConfigError, match="does not exist here"):
            resolve_device(name)
    with pytest.raises(ConfigError, match="no GPU GPU-12345678-1234-1234-1234-123456789abc is visible"):
        resolve_device("GPU-12345678-1234-1234-1234-123456789abc")
    with pytest.raises(ConfigError, match="'tpu' is not known; give auto, cpu, cuda"):
        resolve_device("tpu")


def test_dtype_follows_what_the_processor_multiplies_fast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(devices, "_has_amx", lambda: False)
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda", 0)) == torch.bfloat16
    with caplog.at_level(logging.WARNING):
        assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert "bfloat16 is slow on this CPU" in caplog.text
    monkeypatch.setattr(devices, "_has_amx", lambda: True)
    assert resolve_dtype("auto", CPU) == torch.bfloat16


@pytest.mark.usefixtures("no_gpu")
def test_threads_are_those_given_or_all_that_may_be_used():
    assert place(EngineConfig(threads=3)).threads == 3
    assert place(EngineConfig()).threads == len(devices.usable_cores())


def layout_of(tmp_path: Path, page_tokens: int = 16):
    from slipstream.model.config import read_config
    from slipstream.model.files import locate

    return read_config(locate(str(save(reference("llama"), tmp_path)))).layout(page_tokens, "float32")


def test_the_pool_is_as_large_as_asked_or_modest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    layout = layout_of(tmp_path)
    assert pool_pages(EngineConfig(kv_tokens=1000), layout, CPU) == 63 + 1
    monkeypatch.setattr(devices, "available_bytes", lambda: None)
    assert pool_pages(EngineConfig(), layout, CPU) == devices.CPU_POOL_TOKENS // 16 + 1
    assert pool_pages(EngineConfig(max_model_len=100_000), layout, CPU) == 100_000 // 16 + 1
    monkeypatch.setattr(devices, "available_bytes", lambda: 40 * layout.page_bytes)
    assert pool_pages(EngineConfig(), layout, CPU) == 10
    monkeypatch.setattr(devices, "available_bytes", lambda: 5 * layout.page_bytes)
    with pytest.raises(PoolTooSmall, match="too little for a KV pool: one page of 16 tokens takes"):
        pool_pages(EngineConfig(), layout, CPU)


@pytest.mark.usefixtures("no_gpu")
def test_opening_a_model_gives_all_that_a_worker_needs(tmp_path: Path):
    folder = tiny_model(tmp_path / "tiny-llama")
    seen: list[tuple[int, int]] = []
    engine = EngineConfig(model=str(folder), kv_tokens=256, page_tokens=8, dtype="float32", threads=1)
    opened = open_model(engine, lambda done, total: seen.append((done, total)))
    assert opened.served_name == "tiny-llama"
    assert opened.layout.model == opened.config.identity
    assert seen[-1][0] == seen[-1][1] > 0
    pool = opened.allocate_pool(probe_bytes=4096)
    assert pool.region.pages == 33
    assert opened.max_model_len(33) == 256
    runner = opened.runner(pool.region, 4)
    outcome = runner.execute(make_plan([(0, [5, 6, 7], 0, [3])], new_rows=[new_row(0)]))
    assert outcome.token_ids[0] >= 0
    assert pool.region.array is not None
    written = pool.region.array.reshape(-1)[3 * opened.layout.page_bytes : 4 * opened.layout.page_bytes]
    assert written.any()
    assert not pool.region.array[: 3 * opened.layout.page_bytes].any()
    pool.close()


@pytest.mark.usefixtures("no_gpu")
def test_the_longest_request_is_bounded_by_model_pool_and_user(tmp_path: Path):
    folder = save(reference("llama"), tmp_path)
    engine = EngineConfig(model=str(folder), dtype="float32", load_format="dummy", threads=1)
    opened = open_model(engine)
    assert opened.max_model_len(10_000) == 512
    assert opened.max_model_len(5) == 64
    asked = open_model(EngineConfig(model=str(folder), dtype="float32", max_model_len=100, threads=1))
    assert asked.max_model_len(10_000) == 100
    with pytest.raises(PoolTooSmall, match="max_model_len 100 does not fit into the KV pool of 64 tokens"):
        asked.max_model_len(5)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("wish", "error", "words"),
    [
        ({"max_model_len": 600}, ConfigError, "max_model_len 600 exceeds the 512 positions"),
        ({"max_model_len": 1}, ConfigError, "max_model_len 1 leaves no room for an answer"),
        ({"max_model_len": 100, "kv_tokens": 50}, PoolTooSmall, "does not fit into the KV pool of 64 tokens"),
        ({"kv_tokens": 1 << 40}, PoolTooSmall, r"needs [\d,.]+ GiB, [\d,.]+ [GM]iB are free on cpu before any weight"),
    ],
)
def test_a_context_or_a_pool_that_cannot_be_is_refused_before_a_weight_is_read(tmp_path: Path, wish, error, words):
    folder = save(reference("llama"), tmp_path)
    read: list[int] = []
    engine = EngineConfig(model=str(folder), dtype="float32", threads=1, **wish)
    with pytest.raises(error, match=words):
        open_model(engine, lambda done, total: read.append(done))
    assert read == []


@pytest.mark.usefixtures("no_gpu")
def test_two_models_of_one_shape_do_not_exchange_pages(tmp_path: Path):
    first, second = (tiny_model(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    fingerprints = {
        open_model(EngineConfig(model=str(folder), dtype="float32", threads=1)).layout.fingerprint
        for folder in (first, first, second)
    }
    assert len(fingerprints) == 2


@pytest.mark.usefixtures("no_gpu")
def test_what_is_wrong_with_a_model_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = save(reference("llama"), tmp_path)
    monkeypatch.setattr("slipstream.run.engine_model.free_bytes", lambda device: 1 << 20)
    opened = open_model(EngineConfig(model=str(folder), dtype="float32", threads=1))
    assert opened.model.config.layers == 3
    monkeypatch.setattr("slipstream.run.engine_model.free_bytes", lambda device: 1 << 16)
    with pytest.raises(ModelError, match="iB are free"):
        open_model(EngineConfig(model=str(folder), dtype="float32", threads=1))
