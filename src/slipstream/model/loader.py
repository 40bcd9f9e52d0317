"""Fills a model with the weights of its files.

The model is allocated once, in its final dtype, device and order in memory; then each tensor of the files is read,
converted and copied into its place, so that no more than a few megabytes exist twice. A tensor-parallel rank reads only
its part. Before anything is read the names and shapes of the files are compared with what the config asks for, and the
memory with what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.kv.pool import in_words
from slipstream.model.config import ModelConfig
from slipstream.model.files import ModelFiles
from slipstream.model.gguf import ROPE_FACTORS, GGUFFile, hf_name, interleaved_heads
from slipstream.model.llama import Llama
from slipstream.model.shard import Part, Shard

Progress = Callable[[int, int], None]
SAFETENSORS_DTYPES = {"F32", "F16", "BF16", "F64"}
DUMMY_SEED = 0
DUMMY_STOCK = 1 << 23
PACK_SHARE = 0.2  # of the memory that is free after loading, at most, goes to second copies of weights


class Weights(Protocol):
    """The tensors of a model's files, by Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def copy(self, name: str, into: Tensor, part: Part | None = None) -> None:
        """Reads one tensor, or a part of it, and writes it, converted, into a tensor of the same shape."""
        ...


def load(
    files: ModelFiles,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    free_bytes: int | None = None,
    dummy: bool = False,
    shard: Shard | None = None,
) -> Llama:
    """Builds the model, or a shard of it, and loads its weights. `config` is the whole model's.

    `progress(done, total)` is called with bytes of the loaded weights as they come. `free_bytes` is what the device
    has; None skips the check. `dummy` fills the weights at random instead, the same on every worker and however many
    ranks share them.

    Raises ModelError when memory is too little, a tensor is missing, unexpected or of another shape.
    """
    shard = shard or Shard(config)
    needed = shard.parameters * dtype.itemsize
    if free_bytes is not None and needed > free_bytes:
        raise ModelError(
            f"the weights need {in_words(needed)} as {str(dtype).removeprefix('torch.')} on {device}, but only "
            f"{in_words(free_bytes)} are free. Use a smaller model, a shorter dtype or another device."
        )
    if dummy:
        model = Llama(config, dtype=dtype, device=device, shard=shard)
        _fill_at_random(model, _meta_tensors(config), progress)
        _pack(model, free_bytes, needed)
        return model
    weights = GGUFWeights(files.weights[0], config) if files.kind == "gguf" else SafetensorsWeights(files.weights)
    wanted = {name: tuple(tensor.shape) for name, tensor in _meta_tensors(config).items()}
    _compare(files.name, weights.shapes(), wanted)
    model = Llama(config, dtype=dtype, device=device, shard=shard)
    targets = model.tensors()
    total, done = sum(tensor.numel() * dtype.itemsize for tensor in targets.values()), 0
    for name, target in targets.items():
        weights.copy(name, target, model.part(name))
        done += target.numel() * dtype.itemsize
        if progress is not None:
            progress(done, total)
    if isinstance(weights, GGUFWeights):
        model.rotary.set_factors(weights.rope_factors())
    _pack(model, free_bytes, needed)
    return model


def _pack(model: Llama, free_bytes: int | None, needed: int) -> None:
    """Gives wide linears of a CPU model their second copy, as far as memory is plentiful."""
    room = float("inf") if free_bytes is None else (free_bytes - needed) * PACK_SHARE
    for linear in model.wide_linears():
        room -= linear.weight.nbytes
        if room < 0:
            break
        linear.pack()


def _meta_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """The model's tensors without their memory."""
    small = msgspec.structs.replace(config, max_position=1)
    return Llama(small, dtype=torch.bfloat16, device=torch.device("meta")).tensors()


def _compare(name: str, found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    missing = [tensor for tensor in wanted if tensor not in found]
    if missing:
        raise ModelError(f"{name} lacks {len(missing)} of {len(wanted)} tensors: {_some(missing)}.")
    for tensor, shape in wanted.items():
        if found[tensor] != shape:
            raise ModelError(
                f"{name}: tensor {tensor} has the shape {list(found[tensor])}, but the config asks for {list(shape)}."
            )
    unexpected = [tensor for tensor in found if tensor not in wanted and not _harmless(tensor)]
    if unexpected:
        raise ModelError(
            f"{name} holds {len(unexpected)} tensors that its architecture does not have: {_some(unexpected)}; "
            "answers would be wrong without them."
        )


def _harmless(tensor: str) -> bool:
    """Tables that can be computed, and the copy of tied embeddings that some files carry."""
    return tensor == "lm_head.weight" or tensor.endswith(("rotary_emb.inv_freq", "masked_bias", "attn.bias"))


def _some(names: Iterable[str], most: int = 4) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _fill_at_random(model: Llama, whole: dict[str, Tensor], progress: Progress | None) -> None:
    """Normal numbers from one stock, taken at other places for each piece, since drawing all takes minutes a model.

    `whole` has the shapes of the whole model, whose numbers a shard gets its part of.
    """
    tensors = model.tensors()
    stock = torch.empty(DUMMY_STOCK).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(DUMMY_SEED))
    kind = next(iter(tensors.values()))
    stock = stock.to(kind.device, kind.dtype)
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    for index, (name, full) in enumerate(whole.items()):
        tensor = tensors.get(name)
        if tensor is None:  # a bias that another rank adds
            continue
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            _fill_from(stock, index, full, tensor, model.part(name))
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)


def _fill_from(stock: Tensor, index: int, full: Tensor, into: Tensor, part: Part | None) -> None:
    """Fills a tensor, or the part of it that is held here, from the stock. `full` has its whole shape."""
    row = full.numel() // len(full)
    rows = max(1, DUMMY_STOCK // 2 // row)
    held = part if part is not None and part.dim == 0 else Part(0, 0, len(full))
    for count in range(held.first // rows, -(-held.end // rows)):
        begin, end = max(held.first, count * rows), min(held.end, (count + 1) * rows)
        first = (index * 7919 + count * 104729) % (DUMMY_STOCK // 2) + (begin - count * rows) * row
        piece = stock[first : first + (end - begin) * row].view(end - begin, *full.shape[1:])
        if part is not None and part.dim == 1:
            piece = part.of(piece)
        into[begin - held.first : end - held.first].copy_(piece)


class SafetensorsWeights:
    """The tensors of one or several safetensors files, memory-mapped."""

    def __init__(self, paths: Iterable[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, safe_open] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read as safetensors ({error}); download it again.") from None
            for name in file.keys():  # noqa: SIM118 (a handle, not a dict)
                self._files[name] = file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, file in self._files.items():
            part = file.get_slice(name)
            if part.get_dtype() not in SAFETENSORS_DTYPES:
                raise ModelError(
                    f"tensor {name} has the dtype {part.get_dtype()}; quantised safetensors are not supported, "
                    "use the unquantised model or a GGUF file."
                )
            found[name] = tuple(part.get_shape())
        return found

    def copy(self, name: str, into: Tensor, part: Part | None = None) -> None:
        file = self._files[name]
        if part is None:
            into.copy_(file.get_tensor(name))
            return
        kept = slice(part.first, part.end)
        whole = file.get_slice(name)
        into.copy_(whole[kept] if part.dim == 0 else whole[:, kept])


class GGUFWeights:
    """The tensors of a GGUF file, dequantised as they are read."""

    def __init__(self, path: str, config: ModelConfig) -> None:
        self.file, self.config = GGUFFile(path), config
        self._names = {
            hf_name(name) or name: name for name in self.file.tensors if name != ROPE_FACTORS and _used(name)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.file.tensors[source].shape for name, source in self._names.items()}

    def copy(self, name: str, into: Tensor, part: Part | None = None) -> None:
        source = self._names[name]
        if into.dim() == 1:
            whole = torch.from_numpy(self.file.read(source))
            held = whole if part is None else part.of(whole)
            into.copy_(self._in_order(held) if interleaved_heads(self.config, name) else held)
            return
        rows = (part.first, part.end) if part is not None and part.dim == 0 else None
        columns = (part.first, part.end) if part is not None and part.dim == 1 else None
        pieces = self.file.rows(source, rows=rows, columns=columns)
        if interleaved_heads(self.config, name):
            into.copy_(self._in_order(torch.cat([torch.from_numpy(piece) for _, piece in pieces])))
            return
        for first, piece in pieces:
            into[first : first + len(piece)].copy_(torch.from_numpy(piece))

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows of whole heads, which the converter has interleaved."""
        pairs = rows.unflatten(0, (-1, self.config.head_dim // 2, 2))
        return pairs.transpose(1, 2).reshape(rows.shape)

    def rope_factors(self) -> Tensor | None:
        """What divides the rotary frequencies, [head_dim / 2]; None when the file says nothing."""
        if ROPE_FACTORS not in self.file.tensors:
            return None
        return torch.from_numpy(self.file.read(ROPE_FACTORS))


def _used(name: str) -> bool:
    """Tensors that only describe what the metadata say as well are left out."""
    return not name.endswith((".attn_rot_embd", ".rope_freqs.weight"))
