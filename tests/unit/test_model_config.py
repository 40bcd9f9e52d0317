"""Configs from config.json and GGUF metadata: both spellings of rope, ends of sequence, refusals, identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.errors import ModelError
from slipstream.model.config import ModelConfig, RopeConfig, read_config
from slipstream.model.files import locate

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "eos_token_id": 5,
    "bos_token_id": 1,
}


def write(folder: Path, others: dict[str, Any] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    values = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    for name, content in (others or {}).items():
        (folder / name).write_text(json.dumps(content))
    return folder


def config_of(folder: Path, others: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return read_config(locate(str(write(folder, others, **changes)), need_weights=False))


def test_a_llama_config_is_read(tmp_path: Path):
    config = config_of(tmp_path)
    assert (config.architecture, config.layers, config.hidden, config.intermediate) == ("llama", 2, 128, 256)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab) == (8, 2, 16, 1000)
    assert (config.max_position, config.rope, config.eos_ids, config.bos_id) == (
        4096,
        RopeConfig(theta=500000.0),
        (5,),
        1,
    )
    assert [config.qkv_bias, config.output_bias, config.qk_norm, config.tied] == [False] * 4


def test_families_differ_in_biases_and_norms(tmp_path: Path):
    qwen2 = config_of(tmp_path, architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=4)
    assert (qwen2.architecture, qwen2.qkv_bias, qwen2.output_bias) == ("qwen2", True, False)
    qwen3 = config_of(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (qwen3.architecture, qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == ("qwen3", False, True, 32)
    biased = config_of(tmp_path, attention_bias=True)
    assert (biased.qkv_bias, biased.output_bias) == (True, True)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def test_rope_is_read_in_both_spellings(tmp_path: Path):
    old = config_of(tmp_path, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = config_of(tmp_path, rope_theta=..., rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3})
    assert old.rope == new.rope
    assert (old.rope.kind, old.rope.factor, old.rope.original_max_position) == ("llama3", 8.0, 1024)
    linear = config_of(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert (linear.rope.kind, linear.rope.factor) == ("linear", 4.0)


def test_yarn_stretches_the_context_of_configs_that_state_the_old_one(tmp_path: Path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = config_of(tmp_path, rope_scaling=yarn)
    assert (config.max_position, config.rope.attention_factor) == (16384, pytest.approx(1.13863, abs=1e-5))
    assert config_of(tmp_path, rope_scaling=yarn, max_position_embeddings=16384).max_position == 16384


def test_ends_of_sequence_come_from_all_files(tmp_path: Path):
    tokenizer = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"42": {"content": "<|im_end|>"}}}
    others = {"generation_config.json": {"eos_token_id": [6, 5]}, "tokenizer_config.json": tokenizer}
    assert config_of(tmp_path, others).eos_ids == (5, 6, 42)
    others["tokenizer_config.json"] = {"eos_token": {"content": "</s>"}}
    others["tokenizer.json"] = {"added_tokens": [{"id": 3, "content": "<s>"}, {"id": 9, "content": "</s>"}]}
    assert config_of(tmp_path, others, eos_token_id=None).eos_ids == (6, 5, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: llama, mistral"),
        ({"architectures": ..., "model_type": "mamba"}, "mamba is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, "sliding_window=512"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is None"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_key_value_heads": 3}, "8 heads are no multiple of its 3 KV heads"),
        ({"vocab_size": 0}, "vocab=0"),
        ({"vocab_size": 1 << 40}, "vocab=1099511627776"),
        ({"num_attention_heads": 0}, "128 cannot be divided among 0 attention heads"),
        ({"num_attention_heads": ...}, "num_attention_heads is None"),
        ({"num_attention_heads": 7}, "128 cannot be divided among 7 attention heads"),
        ({"num_attention_heads": 2.5}, "num_attention_heads is 2.5"),
        ({"num_attention_heads": -8}, "-8 attention heads"),
        ({"num_attention_heads": 0, "head_dim": 16}, "heads=0"),
        ({"num_key_value_heads": 0}, "kv_heads=0"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers is inf"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"rms_norm_eps": 0}, "norm_eps=0"),
        ({"rope_theta": 0}, "theta=0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, "embeddings is 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": "x"}}, "mscale is 'x'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [5, None]}, "eos_token_id is [5, None]"),
        ({"bos_token_id": 1.5}, "bos_token_id is 1.5"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ModelError) as caught:
        config_of(tmp_path, **changes)
    assert message in caught.value.message


def test_a_layout_divides_the_heads_among_ranks(tmp_path: Path):
    config = config_of(tmp_path)
    whole, second = config.layout(16, "float32"), config.layout(16, "float32", 2, 1)
    assert (whole.kv_heads, whole.first_head, whole.layers, whole.head_dim) == (2, 0, 2, 16)
    assert (second.kv_heads, second.first_head, second.total_kv_heads) == (1, 1, 2)
    assert whole.fingerprint == second.fingerprint
    with pytest.raises(ModelError, match="cannot be divided among 3 ranks"):
        config.layout(16, "float32", 3)
    with pytest.raises(ModelError, match="int4"):
        config.layout(16, "int4")


def test_the_identity_follows_what_decides_the_content_of_pages(tmp_path: Path):
    config = config_of(tmp_path)
    assert config_of(tmp_path / "elsewhere").identity == config.identity
    assert config_of(tmp_path, eos_token_id=[5, 6]).identity == config.identity
    assert config_of(tmp_path, rope_theta=10000.0).identity != config.identity
    assert msgspec.structs.replace(config, weights_digest="other").identity != config.identity
    assert config.identity.startswith("llama-")


def test_parameters_are_counted(tmp_path: Path):
    config = config_of(tmp_path, tie_word_embeddings=True)
    layer = 128 * (8 + 4) * 16 + 8 * 16 * 128 + 3 * 128 * 256 + 2 * 128
    assert config.parameters == 2 * layer + 128 + 1000 * 128
