"""What a model is, in numbers: read from config.json or from GGUF metadata, before any weight is touched.

Routers, planners and workers read it alike, so there is no torch here. A config that is not fully understood is
refused with the field at fault: a model that runs with a wrong rope is worse than one that does not run.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.errors import ConfigError, ModelError, PoolTooSmall
from slipstream.kv.layout import ITEM_BYTES, KVLayout, head_range
from slipstream.model.files import ModelFiles, read_json

RopeKind = Literal["default", "linear", "llama3", "yarn"]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
LARGEST = (1 << 31) - 1  # bound of every size
SUPPORTED = "llama, mistral (without sliding window), qwen2, qwen3"


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. Which numbers count depends on `kind`; `original_max_position` is the context that
    the unscaled model was trained on (llama3, yarn). `attention_factor` scales cos and sin (yarn)."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def reach(self, max_position: int) -> int:
        """The longest context, given the config's; some YaRN configs still state the one before scaling."""
        if self.kind == "yarn" and self.original_max_position == max_position:
            return int(self.factor * max_position)
        return max_position


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only transformer.

    Sizes are the whole model's, not a rank's. `eos_ids` are all ids that end an answer. `weights_digest` tells two
    models of one shape apart; with it `identity` names what decides the content of a KV page.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    dtype: str = "bfloat16"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    weights_digest: str = ""

    @property
    def identity(self) -> str:
        """Architecture and a digest of all that decides activations; equal on every machine with the same model."""
        shape = msgspec.structs.replace(self, eos_ids=(), bos_id=None, dtype="")
        digest = hashlib.blake2b(msgspec.json.encode(shape, order="sorted"), digest_size=8).hexdigest()
        return f"{self.architecture}-{digest}"

    @property
    def parameters(self) -> int:
        """Number of weights that are kept in memory."""
        heads = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = self.hidden * heads + self.heads * self.head_dim * self.hidden + 3 * self.hidden * self.intermediate
        layer += 2 * self.hidden + heads * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer += self.hidden * self.output_bias + (2 * self.intermediate + self.hidden) * self.mlp_bias
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    def layout(self, page_tokens: int, dtype: str, tp_size: int = 1, rank: int = 0) -> KVLayout:
        """The pages of one rank; with more ranks than KV heads, neighbours hold the same one.

        Raises ModelError when the KV heads cannot be divided among `tp_size` ranks.
        """
        if dtype not in ITEM_BYTES:
            raise ModelError(f"KV dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}.")
        try:
            heads = head_range(self.kv_heads, tp_size, rank)
        except ValueError:
            raise ModelError(
                f"{self.kv_heads} KV heads cannot be divided among {tp_size} ranks (rank {rank}); use a "
                "tensor-parallel size that divides them or that they divide."
            ) from None
        return KVLayout(
            page_tokens=page_tokens,
            layers=self.layers,
            kv_heads=heads.size,
            head_dim=self.head_dim,
            dtype=dtype,
            total_kv_heads=self.kv_heads,
            first_head=heads.first,
            model=self.identity,
        )


def read_config(files: ModelFiles) -> ModelConfig:
    """Reads a model's config with the digest of its weights. Raises ModelError for what is not supported."""
    if files.kind == "gguf":
        from slipstream.model.gguf import GGUFFile, config_from_gguf

        config = config_from_gguf(GGUFFile(files.weights[0]))
    else:
        config = _from_folder(Path(files.folder))
    _check(config)
    return msgspec.structs.replace(config, weights_digest=files.digest())


def refuse_indivisible(config: ModelConfig, size: int) -> None:
    """Raises ConfigError, with the sizes that would do, when `size` ranks cannot share this model."""
    if _divides(config, size):
        return
    possible = [other for other in range(1, config.heads + 1) if _divides(config, other)]
    raise ConfigError(
        f"a model with {config.heads} heads, {config.kv_heads} KV heads and an intermediate width of "
        f"{config.intermediate} cannot be divided among {size} ranks; --tp may be "
        f"{', '.join(map(str, possible))} for it."
    )


def refuse_length(config: ModelConfig, wanted: int, pool_tokens: int, model: str) -> None:
    """Refuses a `max_model_len` that cannot be had of `model`; 0 asks for none, and `pool_tokens` 0 is not known yet.

    Raises ConfigError for more than the model has or for too little to answer anything, PoolTooSmall for more than
    the pool has.
    """
    if wanted == 1:
        raise ConfigError(
            "max_model_len 1 leaves no room for an answer: prompt and answer have at least one token each; "
            "raise --max-model-len to 2 or more."
        )
    if wanted > config.max_position:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the {config.max_position} positions of {model}; lower --max-model-len."
        )
    if pool_tokens and wanted > pool_tokens:
        raise PoolTooSmall(
            f"max_model_len {wanted} does not fit into the KV pool of {pool_tokens} tokens; "
            f"lower --max-model-len or raise --kv-tokens to at least {wanted}."
        )


def _divides(config: ModelConfig, size: int) -> bool:
    heads = size >= 1 and config.heads % size == 0 and config.intermediate % size == 0
    return heads and (config.kv_heads % size == 0 or size % config.kv_heads == 0)


def _check(config: ModelConfig) -> None:
    for field in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "max_position"):
        value = getattr(config, field)
        if type(value) is not int or not 0 < value <= LARGEST:
            raise ModelError(f"the model's config gives {field}={value!r}; it must be an integer from 1 to {LARGEST}.")
    if config.heads % config.kv_heads:
        raise ModelError(f"the model's {config.heads} heads are no multiple of its {config.kv_heads} KV heads.")
    if config.head_dim % 2:
        raise ModelError(f"the model's head_dim {config.head_dim} is odd; rotary embedding needs pairs.")
    if not isinstance(config.norm_eps, int | float) or not 0.0 < config.norm_eps < 1.0:
        raise ModelError(f"the model's config gives norm_eps={config.norm_eps!r}; it must be between 0 and 1.")
    for field in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if not 0.0 < getattr(config.rope, field) < math.inf:
            raise ModelError(f"the model's rope gives {field}={getattr(config.rope, field)!r}; it must be positive.")


def divided(hidden: int, heads: int, source: str) -> int:
    """The size of a head where the config does not state it. Raises ModelError."""
    if heads <= 0 or hidden <= 0 or hidden % heads:
        raise ModelError(
            f"{source}: a hidden size of {hidden} cannot be divided among {heads} attention heads; "
            "correct these numbers or state the size of a head."
        )
    return hidden // heads


class _Fields:
    """A JSON object whose fields are asked for by name and type, so that an error can name the field."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.source}: {name} is {value!r}, but a number is needed.")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not math.isfinite(value) or value != int(value):
            raise ModelError(f"{self.source}: {name} is {value!r}, but an integer is needed.")
        return int(value)

    def given(self, name: str) -> bool:
        return self.values.get(name) is not None

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)


def _from_folder(folder: Path) -> ModelConfig:
    values = read_json(folder / "config.json")
    architecture = _architecture(values)
    fields = _Fields(values, str(folder / "config.json"))
    _refuse_unsupported(values, architecture, fields)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias", False)
    max_position = fields.integer("max_position_embeddings", 2048)
    rope = _rope(values, fields, max_position)
    return ModelConfig(
        architecture=architecture,
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim") if fields.given("head_dim") else divided(hidden, heads, fields.source),
        vocab=fields.integer("vocab_size"),
        max_position=rope.reach(max_position),
        norm_eps=float(fields.number("rms_norm_eps", 1e-6)),
        rope=rope,
        qkv_bias=True if architecture == "qwen2" else attention_bias,
        output_bias=attention_bias and architecture in ("llama", "qwen3"),
        mlp_bias=fields.flag("mlp_bias", False) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        tied=fields.flag("tie_word_embeddings", False),
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32"),
        bos_id=next(iter(_ids(values, "bos_token_id", folder / "config.json")), None),
        eos_ids=_eos_ids(folder, values),
    )


def _architecture(values: dict[str, Any]) -> str:
    named = [str(name) for name in values.get("architectures") or []]
    for name in named:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not named and values.get("model_type") in ARCHITECTURES.values():
        return str(values["model_type"])
    found = ", ".join(named) or values.get("model_type") or "none named"
    raise ModelError(f"architecture {found} is not supported; supported: {SUPPORTED}.")


def _refuse_unsupported(values: dict[str, Any], architecture: str, fields: _Fields) -> None:
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{fields.source}: hidden_act {activation!r} is not supported; supported: 'silu'.")
    if quantization := values.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{fields.source}: the weights are quantised by {method!r}, which is not supported. "
            "Use the unquantised model or a GGUF file."
        )
    window = values.get("sliding_window") if architecture != "llama" else None
    used = values.get("use_sliding_window", architecture == "mistral")
    if window and used and window < fields.integer("max_position_embeddings", 2048):
        raise ModelError(f"{fields.source}: sliding window attention (sliding_window={window}) is not supported.")


def _rope(values: dict[str, Any], fields: _Fields, max_position: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"{fields.source}: rope parameters that differ between layers are not supported: {given!r}.")
    rope = _Fields(given, f"{fields.source}: rope parameters")
    theta = float(rope.number("rope_theta", fields.number("rope_theta", 10000.0)))
    if given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ModelError(f"{fields.source}: partial rotary embedding is not supported.")
    kind = given.get("rope_type", given.get("type", "default"))
    original = rope.integer("original_max_position_embeddings", max_position)
    if original <= 0:
        raise ModelError(f"{rope.source}: original_max_position_embeddings is {original}; it must be positive.")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=float(rope.number("factor")))
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=float(rope.number("factor")),
            original_max_position=original,
            low_freq_factor=float(rope.number("low_freq_factor")),
            high_freq_factor=float(rope.number("high_freq_factor")),
        )
    if kind == "yarn":
        factor = float(rope.number("factor", max_position / original))
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_max_position=original,
            beta_fast=float(rope.number("beta_fast", 32.0)),
            beta_slow=float(rope.number("beta_slow", 1.0)),
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    raise ModelError(f"{fields.source}: rope type {kind!r} is not supported; supported: default, linear, llama3, yarn.")


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """Growth of attention's temperature with the context's, section 3.4 of the YaRN paper (arXiv 2309.00071)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_attention_factor(rope: _Fields, factor: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return float(rope.number("attention_factor"))
    scale, scale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if scale > 0 and scale_all > 0:
        return yarn_mscale(factor, scale) / yarn_mscale(factor, scale_all)
    return yarn_mscale(factor)


def _ids(values: dict[str, Any], name: str, source: Path) -> list[int]:
    """One id, a list of them, or none. Raises ModelError for anything else."""
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int for item in ids):
        raise ModelError(f"{source}: {name} is {value!r}, but a token id or a list of token ids is needed.")
    return ids


def _eos_ids(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """All ids that config.json, generation_config.json or the tokenizer's own config call an end of sequence."""
    found = list(_ids(values, "eos_token_id", folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        found += _ids(read_json(generation), "eos_token_id", generation)
    if (folder / "tokenizer_config.json").is_file():
        found += _tokenizer_eos(folder, read_json(folder / "tokenizer_config.json"))
    return tuple(dict.fromkeys(found))


def _tokenizer_eos(folder: Path, tokenizer: dict[str, Any]) -> list[int]:
    token = tokenizer.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    for number, added in (tokenizer.get("added_tokens_decoder") or {}).items():
        if isinstance(added, dict) and added.get("content") == text:
            return [int(number)]
    if text and (folder / "tokenizer.json").is_file():
        added_tokens = read_json(folder / "tokenizer.json").get("added_tokens") or []
        return [int(added["id"]) for added in added_tokens if added.get("content") == text]
    return []
