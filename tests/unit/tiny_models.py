"""Tiny random models for tests: made by transformers, saved into a folder, and steps to run them with.

Small enough to build and run in milliseconds, large enough that heads, groups and pages differ in number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.engine.plan import NewRow, StepPlan
from slipstream.kv.layout import KVLayout
from slipstream.model.config import read_config
from slipstream.model.files import locate
from slipstream.model.llama import Llama
from slipstream.model.loader import load
from slipstream.run.runner import Runner
from slipstream.types import SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GREEDY = SamplingParams(temperature=0.0)


def reference(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A random float32 model of transformers, with biases and norms that matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **{**SIZES, "tie_word_embeddings": False, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        spread = 0.3 if "norm" in name or name.endswith("bias") else 0.08
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=spread)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def tiny_model(
    folder: Path, architecture: str = "llama", *, tokenizer: bool = False, seed: int = 0, **changes: Any
) -> Path:
    """A folder with a random model of 4096 positions, and with a byte-level tokenizer and chat template if asked."""
    save(reference(architecture, seed, **{"max_position_embeddings": 4096, **changes}), folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """<s> 0, </s> 1, <pad> 2, then the 256 bytes: every text has tokens and every token below 259 a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bare = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    fast.save_pretrained(folder)


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of one whole prompt."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def load_model(name: Path | str, dtype: torch.dtype = torch.float32) -> Llama:
    files = locate(str(name))
    return load(files, read_config(files), torch.device("cpu"), dtype)


def make_runner(model: Llama, *, page_tokens: int = 8, pages: int = 64, rows: int = 8) -> Runner:
    """A runner over a pool full of numbers that would be noticed if they were read."""
    layout: KVLayout = model.config.layout(page_tokens, str(model.dtype).removeprefix("torch."))
    memory = torch.empty(pages * layout.page_bytes, dtype=torch.uint8)
    memory.view(model.dtype).fill_(1e4)
    return Runner(model, layout, memory, rows)


def make_plan(
    parts: list[tuple[int, list[int], int, list[int]]],
    *,
    sample: list[bool] | None = None,
    new_rows: list[NewRow] | None = None,
    freed_rows: list[int] | None = None,
    prompt_logprobs: dict[int, Any] | None = None,
    step: int = 0,
) -> StepPlan:
    """A plan of sequences given as (row, new token ids, position of the first, page table)."""
    lengths = [len(tokens) for _, tokens, _, _ in parts]
    tables = np.zeros((len(parts), max(len(table) for _, _, _, table in parts)), dtype=np.int64)
    for index, (_, _, _, table) in enumerate(parts):
        tables[index, : len(table)] = table
    positions = [np.arange(first, first + len(tokens)) for _, tokens, first, _ in parts]
    return StepPlan(
        step=step,
        token_ids=np.array([token for _, tokens, _, _ in parts for token in tokens], dtype=np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        context_lens=np.array([first + len(tokens) for _, tokens, first, _ in parts], dtype=np.int64),
        block_tables=tables,
        rows=np.array([row for row, _, _, _ in parts], dtype=np.int64),
        sample=np.array(sample if sample is not None else [True] * len(parts)),
        new_rows=new_rows or [],
        freed_rows=freed_rows or [],
        prompt_logprobs=prompt_logprobs or {},
    )


def new_row(row: int, sampling: SamplingParams = GREEDY, **changes: Any) -> NewRow:
    given: dict[str, Any] = {"prompt_ids": [], "output_ids": [], "eos_ids": (1,), "outputs": 0, **changes}
    return NewRow(row=row, sampling=sampling, **given)


def shuffled_tables(sequences: int, each: int, pages: int, seed: int = 0) -> list[list[int]]:
    """Page tables in random order, page 0 left out."""
    order = np.random.default_rng(seed).permutation(np.arange(1, pages))[: sequences * each]
    return order.reshape(sequences, each).tolist()


class LogitsProbe:
    """Keeps the logits that a runner's model produces, step by step."""

    def __init__(self, runner: Runner) -> None:
        self.seen: list[torch.Tensor] = []
        plain = runner.model.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            found = plain(hidden)
            self.seen.append(found.clone())
            return found

        runner.model.logits = logits  # type: ignore[method-assign]

    @property
    def last(self) -> torch.Tensor:
        return self.seen[-1]
