"""Reads GGUF files: the header in one pass, tensors one by one, dequantised to float32.

The header (metadata and the table of tensors) is parsed here, in a tenth of the time that the `gguf` package's reader
takes for a vocabulary of 50,000 tokens; what the package is used for is its table of quantisation types and its
dequantisation. Layout of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names and shapes come
out as those of a Hugging Face checkpoint, so that one loader serves both. The converter interleaves the two halves of
each rotary head in the query and key rows of Llama models; this is undone here. No torch.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ModelError
from slipstream.model.config import SUPPORTED, ModelConfig, RopeConfig, RopeKind, divided, yarn_mscale

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CHUNK_ELEMENTS = 4 << 20

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file: `shape` is row-major (outermost first), `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GGUFFile:
    """A GGUF file's metadata and tensors; the data stay in the file until they are read.

    Raises ModelError when the file is damaged, truncated, of another version, or one part of a split model.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise ModelError(f"{path} is damaged or truncated ({error}); download it again.") from None
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(f"{path} is one part of a split GGUF; merge the parts with `llama-gguf-split --merge`.")

    def _parse(self) -> None:
        header = _Cursor(self._data.data)
        magic, version, tensors, pairs = header.unpack("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ModelError(f"{self.path} is no little-endian GGUF file of version 2 or 3 (version {version}).")
        for _ in range(pairs):
            key = header.text()
            self.metadata[key] = header.value(header.unpack("<I")[0])
        found = []
        for _ in range(tensors):
            name = header.text()
            dims = header.unpack("<I")[0]
            shape = header.unpack(f"<{dims}Q")[::-1]
            kind, offset = header.unpack("<IQ")
            found.append((name, shape, kind, offset))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-header.at // alignment) * alignment
        self.tensors = {n: GGUFTensor(n, shape, kind, start + offset) for n, shape, kind, offset in found}

    def rows(
        self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields (first row, rows) of one tensor as float32, a few million elements at a time.

        `rows` and `columns` (first, end) name a part of it; its rows count from 0. Nothing else is read, but for the
        rest of the quantisation blocks that columns begin and end in.

        Raises ModelError for a quantisation that the installed `gguf` package cannot read.
        """
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            quantization = GGMLQuantizationType(tensor.type)
            block, block_bytes = GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {tensor.type}.") from None
        width = tensor.shape[-1]
        row_bytes = width // block * block_bytes
        count = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        if tensor.offset + count * row_bytes > len(self._data):
            raise ModelError(f"{self.path} ends inside tensor {name}; download it again.")
        raw = self._data[tensor.offset : tensor.offset + count * row_bytes].reshape(count, row_bytes)
        if rows is not None:
            raw = raw[slice(*rows)]
        left, right = columns or (0, width)
        skipped = left // block
        raw = raw[:, skipped * block_bytes : -(-right // block) * block_bytes]
        step = max(1, CHUNK_ELEMENTS // (right - left))
        for first in range(0, len(raw), step):
            try:
                values = dequantize(np.ascontiguousarray(raw[first : first + step]), quantization)
            except NotImplementedError:
                raise ModelError(f"{self.path}: tensor {name} is {quantization.name}, which cannot be read.") from None
            values = values[:, left - skipped * block : right - skipped * block]
            yield first, values if values.flags.writeable else values.copy()

    def read(self, name: str) -> NDArray[np.float32]:
        """One whole tensor as float32."""
        return np.concatenate([rows for _, rows in self.rows(name)]).reshape(self.tensors[name].shape)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def text(self) -> str:
        (length,) = self.unpack("<Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise IndexError("a text reaches beyond the end")
        return str(self.data[start : self.at], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.unpack("<" + SCALARS[kind])[0]
        element, count = self.unpack("<IQ")
        if element in (STRING, ARRAY):
            return [self.value(element) for _ in range(count)]
        return list(self.unpack(f"<{count}{SCALARS[element]}"))


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that no supported model has."""
    block = BLOCK.fullmatch(name)
    stem, _, kind = (block[2] if block else name).rpartition(".")
    if stem not in TENSOR_NAMES:
        return None
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{TENSOR_NAMES[stem]}.{kind}"


def interleaved_heads(config: ModelConfig, name: str) -> int:
    """Number of heads whose rows the converter interleaved in this tensor (its Hugging Face name), 0 for none."""
    if config.architecture != "llama":
        return 0
    if ".q_proj." in name:
        return config.heads
    return config.kv_heads if ".k_proj." in name else 0


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config that a GGUF file's metadata and tensor names describe."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture", "none named")
    if architecture not in ("llama", "qwen2", "qwen3") or metadata.get(f"{architecture}.expert_count"):
        experts = " with experts" if metadata.get(f"{architecture}.expert_count") else ""
        raise ModelError(f"architecture {architecture}{experts} is not supported; supported: {SUPPORTED}.")

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ModelError(f"{file.path}: the metadata lack {architecture}.{name}.")
        if isinstance(value, list):
            raise ModelError(f"{file.path}: {architecture}.{name} differs between layers, which is not supported.")
        return value

    def number(name: str, default: Any = None) -> int:
        value = field(name, default)
        if type(value) is not int:
            raise ModelError(f"{file.path}: {architecture}.{name} is {value!r}, but an integer is needed.")
        return value

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", 0) or divided(hidden, heads, str(file.path))
    if field("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path}: partial rotary embedding is not supported.")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing; the file holds no whole model.")
    rope = _rope(architecture, field, metadata, file)
    return ModelConfig(
        architecture=architecture,
        layers=number("block_count"),
        hidden=hidden,
        intermediate=number("feed_forward_length"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=file.tensors["token_embd.weight"].shape[0],
        max_position=rope.reach(number("context_length")),
        norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied="output.weight" not in file.tensors,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=_eos_ids(metadata),
    )


def _rope(architecture: str, field: Any, metadata: dict[str, Any], file: GGUFFile) -> RopeConfig:
    theta = float(field("rope.freq_base", 10000.0))
    named = field("rope.scaling.type", "none")
    kinds: dict[str, RopeKind] = {"none": "default", "linear": "linear", "yarn": "yarn"}
    if named not in kinds:
        raise ModelError(f"{file.path}: rope scaling {named!r} is not supported; supported: {', '.join(kinds)}.")
    if named == "none" and f"{architecture}.rope.scale_linear" in metadata:  # the older spelling
        named = "linear"
    factor = float(field("rope.scaling.factor", field("rope.scale_linear", 1.0)))
    if kinds[named] != "yarn":
        return RopeConfig(kind=kinds[named], theta=theta, factor=factor)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=int(field("rope.scaling.original_context_length", field("context_length"))),
        attention_factor=yarn_mscale(factor),
    )


def _eos_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
    found: list[Any] = []
    for key in keys:
        value = metadata.get(f"tokenizer.ggml.{key}")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int for token in ids):
            raise ModelError(f"tokenizer.ggml.{key} is {value!r}, but a token id or a list of token ids is needed.")
        found += ids
    return tuple(dict.fromkeys(found))
