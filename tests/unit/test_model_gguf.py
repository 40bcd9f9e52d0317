"""GGUF files, written with the `gguf` package: header, every quantisation, rotary order, rope factors, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from tests.unit.tiny_models import (
    LogitsProbe,
    load_model,
    make_plan,
    make_runner,
    new_row,
    reference,
    reference_logits,
    shuffled_tables,
)

from slipstream.errors import ModelError
from slipstream.model.config import read_config
from slipstream.model.files import locate
from slipstream.model.gguf import GGUFFile, config_from_gguf
from slipstream.model.loader import load

Q = GGMLQuantizationType
WIDE = {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8, "intermediate_size": 512, "num_hidden_layers": 2}
STEMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{STEMS[inner]}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to the query and key rows of Llama: the halves of a head alternate."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def deinterleave(weight: np.ndarray, heads: int) -> np.ndarray:
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def random_blocks(shape: tuple[int, ...], kind: Q, rng: np.random.Generator) -> np.ndarray:
    """Valid blocks of a type that the package can read but not write: random bits, small scales."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-4).tobytes(), dtype=np.uint8)
    if kind == Q.Q4_K:
        raw[:, 0:2] = raw[:, 2:4] = scale
    else:
        raw[:, -2:] = np.frombuffer(np.float16(3e-5).tobytes(), dtype=np.uint8)
    return raw.reshape(shape[0], -1)


def write(path: Path, model: Any, kind: Q = Q.F32, extra: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """Writes a model of transformers as GGUF and puts the dequantised weights back into it."""
    config, rng = model.config, np.random.default_rng(0)
    architecture = config.model_type
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(["a", "ä", "<end>"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_bos_token_id(0)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(*(value if isinstance(value, tuple) else (value,)))
    weights = model.state_dict()
    for name, tensor in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(name.split("_proj")[0][-1], 0)
        mixed = heads if architecture == "llama" and "_proj" in name else 0
        values = tensor.numpy()
        values = interleave(values, mixed) if mixed else values
        raw = values
        if values.ndim == 2 and kind != Q.F32:
            raw = random_blocks(values.shape, kind, rng) if kind in (Q.Q4_K, Q.Q6_K) else quantize(values, kind)
            values = dequantize(raw, kind)
            weights[name].copy_(torch.from_numpy(deinterleave(values, mixed) if mixed else values))
        if kind == Q.F16 and raw.ndim == 2:
            raw = raw.view(np.float16) if raw.dtype == np.uint8 else raw
            writer.add_tensor(gguf_name(name), raw)
        else:
            writer.add_tensor(gguf_name(name), raw, raw_dtype=kind if raw.ndim == 2 and kind != Q.F32 else None)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_logits(path: Path, expected: Any) -> None:
    runner = make_runner(load_model(path))
    probe, tokens = LogitsProbe(runner), np.random.default_rng(2).integers(2, 320, 40).tolist()
    table = shuffled_tables(1, 5, 64)[0]
    runner.execute(make_plan([(0, tokens[:30], 0, table)], new_rows=[new_row(0)]))
    runner.execute(make_plan([(0, tokens[30:], 30, table)]))
    wanted = reference_logits(expected, tokens)[-1]
    assert (probe.last[0] - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    "kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q4_K, Q.Q6_K], ids=lambda kind: kind.name
)
def test_each_quantisation_gives_the_logits_of_its_dequantised_weights(kind: Q, tmp_path: Path):
    expected = reference("llama", tie_word_embeddings=True, **WIDE)
    assert_same_logits(write(tmp_path / "tiny.gguf", expected, kind), expected)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_each_architecture_is_read_untied_with_its_biases_and_norms(architecture: str, tmp_path: Path):
    changes = {"attention_bias": True} if architecture == "llama" else {}
    expected = reference(architecture, **changes)
    path = write(tmp_path / "tiny.gguf", expected)
    assert_same_logits(path, expected)
    config = read_config(locate(str(path)))
    assert (config.architecture, config.tied, config.qk_norm) == (architecture, False, architecture == "qwen3")
    assert (config.eos_ids, config.bos_id, config.vocab) == ((2, 7), 0, 320)


def test_rope_factors_in_the_file_are_honoured(tmp_path: Path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = reference("llama", rope_parameters=rope)
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = (plain / expected.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() == pytest.approx(8.0)
    assert_same_logits(write(tmp_path / "tiny.gguf", expected, extra={"rope_freqs.weight": factors}), expected)


def test_yarn_and_linear_scaling_come_from_the_metadata(tmp_path: Path):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    expected = reference("qwen2", rope_parameters=yarn)
    metadata = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 64}
    from gguf import RopeScalingType

    metadata["rope_scaling_type"] = RopeScalingType.YARN
    assert_same_logits(write(tmp_path / "yarn.gguf", expected, **metadata), expected)
    expected = reference("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5})
    metadata = {"rope_scaling_type": RopeScalingType.LINEAR, "rope_scaling_factor": 2.5}
    assert_same_logits(write(tmp_path / "linear.gguf", expected, **metadata), expected)


def test_the_header_agrees_with_the_package_that_wrote_it(tmp_path: Path):
    path = write(tmp_path / "tiny.gguf", reference("llama", **WIDE), Q.Q4_1)
    ours, theirs = GGUFFile(str(path)), GGUFReader(str(path))
    named = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == named
    assert ours.metadata["tokenizer.ggml.tokens"] == ["a", "ä", "<end>"]
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].offset == tensor.data_offset
        assert ours.tensors[tensor.name].shape == tuple(int(size) for size in tensor.shape[::-1])
        assert np.array_equal(ours.read(tensor.name), dequantize(tensor.data, tensor.tensor_type))


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = reference("llama", **WIDE)
    path = write(tmp_path / "tiny.gguf", expected, Q.Q8_0)
    monkeypatch.setattr("slipstream.model.gguf.CHUNK_ELEMENTS", 1000)
    assert len(list(GGUFFile(str(path)).rows("token_embd.weight"))) == 320 // (1000 // 256) + 1
    assert_same_logits(path, expected)


def test_damaged_files_are_refused(tmp_path: Path):
    path = write(tmp_path / "tiny.gguf", reference("llama"))
    whole = path.read_bytes()
    for size in (20, 200, 600):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="damaged or truncated"):
            GGUFFile(str(path))
    path.write_bytes(whole[: len(whole) - 1000])
    with pytest.raises(ModelError, match="ends inside tensor"):
        load_model(path)
    path.write_bytes(whole[:4] + b"\x09" + whole[5:])
    with pytest.raises(ModelError, match="version 9"):
        GGUFFile(str(path))


def test_unsupported_files_are_named(tmp_path: Path):
    path = write(tmp_path / "split.gguf", reference("llama"), uint16=("split.count", 3))
    with pytest.raises(ModelError, match="one part of a split GGUF"):
        GGUFFile(str(path))
    path = write(tmp_path / "experts.gguf", reference("llama"), expert_count=8)
    with pytest.raises(ModelError, match="llama with experts is not supported; supported: llama"):
        read_config(locate(str(path)))
    path = write(tmp_path / "partial.gguf", reference("llama"), rope_dimension_count=8)
    with pytest.raises(ModelError, match="partial rotary"):
        read_config(locate(str(path)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("llama.attention.head_count", 7, "cannot be divided among 7 attention heads"),
        ("llama.attention.head_count", 0, "cannot be divided among 0 attention heads"),
        ("llama.attention.head_count", "8", "head_count is '8', but an integer"),
        ("llama.block_count", 2.5, "block_count is 2.5, but an integer"),
        ("tokenizer.ggml.eos_token_id", "</s>", "eos_token_id is '</s>'"),
    ],
)
def test_numbers_of_a_gguf_that_fit_no_model_are_named(tmp_path: Path, name: str, value: Any, message: str):
    file = GGUFFile(str(write(tmp_path / "m.gguf", reference("llama"))))
    del file.metadata["llama.attention.key_length"]
    file.metadata[name] = value
    with pytest.raises(ModelError, match=message):
        config_from_gguf(file)


def test_missing_tensors_of_a_gguf_are_named(tmp_path: Path):
    writer_model = reference("llama")
    path = write(tmp_path / "tiny.gguf", writer_model, extra={"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)})
    files = locate(str(path))
    with pytest.raises(ModelError, match=r"tensors that its architecture does not have: blk.0.attn_sinks.weight"):
        load(files, read_config(files), torch.device("cpu"), torch.float32)
