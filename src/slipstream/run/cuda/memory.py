"""How much device memory steps need beside weights and pool: taken into account before the pool takes the rest.

One rank alone tries it: a step as large as any, over a pool of one page, with everything asked of every row. Ranks that
would have to compute together cannot before they have met, and reckon.
"""

from __future__ import annotations

import gc
import logging

import numpy as np
import torch

from slipstream.engine.plan import NewRow, StepPlan
from slipstream.errors import PoolTooSmall
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import in_words
from slipstream.model.config import ModelConfig
from slipstream.model.llama import Llama
from slipstream.run.cuda.inputs import ROW_BLOCK
from slipstream.run.cuda.kernels.ops import LAID_OUT_BYTES
from slipstream.run.runner import PROMPT_LOGPROB_ROWS
from slipstream.types import SamplingParams

logger = logging.getLogger(__name__)

SAMPLING_BYTES = 32  # for each logit that is sampled: float32 copies, and what penalties count
MARGIN = 1.05  # of what was tried: memory is handed out in blocks


def step_bytes(config: ModelConfig, item_bytes: int, tokens: int, sequences: int) -> int:
    """The most that one step of `tokens` tokens, `sequences` of them sampled, holds at once."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    numbers = 2 * config.hidden + qkv + config.heads * config.head_dim + 3 * config.intermediate
    logits = sequences * config.vocab * (2 * item_bytes + SAMPLING_BYTES)
    return tokens * numbers * item_bytes + logits + LAID_OUT_BYTES


def dry_run(model: Llama, layout: KVLayout, tokens: int, sequences: int, context: int) -> int:
    """Bytes that the largest step took, see `largest_step`. Those of graphs are not among them.

    Raises PoolTooSmall when it does not even fit beside the weights.
    """
    from slipstream.run.cuda.runner import CudaRunner

    device = model.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    plan = largest_step(tokens, sequences, context, layout)
    try:
        memory = torch.zeros(layout.page_bytes, dtype=torch.uint8, device=device)
        runner = CudaRunner(model, layout, memory, sequences, plan.block_tables.shape[1], capture=False)
        runner.execute(plan)
    except torch.OutOfMemoryError as error:
        raise PoolTooSmall(
            f"after the weights {in_words(free)} are free on {device}, too little for a step of {tokens} tokens "
            f"and {sequences} sequences; lower --chunk-tokens or --max-sequences, or use a smaller model."
        ) from error
    taken = torch.cuda.max_memory_allocated(device) - before
    del runner, memory
    gc.collect()
    torch.cuda.empty_cache()
    logger.info("a step of %d tokens and %d sequences takes %.0f MiB", tokens, sequences, taken / 2**20)
    return int(taken * MARGIN)


def largest_step(tokens: int, sequences: int, context: int, layout: KVLayout) -> StepPlan:
    """As much as one step can hold, in the scratch page: as many prompts as bring `tokens` tokens, each with as much
    of its `context` as is laid out for attention, and for the rest of `sequences` one token each. Every row asks for
    everything: penalties, cuts, log-probabilities."""
    everything = SamplingParams(
        seed=1, top_p=0.9, top_k=50, presence_penalty=0.1, repetition_penalty=1.1, logprobs=20, prompt_logprobs=20
    )
    prompts = min(sequences, -(-tokens // context))
    decodes = sequences - prompts
    chunk = min(context, (tokens - decodes) // prompts)
    room = LAID_OUT_BYTES // (layout.token_bytes // layout.layers) // prompts // ROW_BLOCK * ROW_BLOCK
    whole = max(chunk, min(context, room))
    targets = np.full(chunk, -1, dtype=np.int64)
    targets[:PROMPT_LOGPROB_ROWS] = 0
    counts = np.array([1] * decodes + [chunk] * prompts)
    positions = [np.zeros(decodes, dtype=np.int64), *([np.arange(whole - chunk, whole)] * prompts)]
    return StepPlan(
        step=0,
        token_ids=np.zeros(int(counts.sum()), dtype=np.int64),
        positions=np.concatenate(positions),
        query_start=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=np.array([1] * decodes + [whole] * prompts),
        block_tables=np.zeros((sequences, layout.pages_for(whole)), dtype=np.int64),
        rows=np.arange(sequences),
        sample=np.ones(sequences, dtype=np.bool_),
        new_rows=[NewRow(row, everything, [0], [0], (), 1) for row in range(sequences)],
        prompt_logprobs={sequences - 1: targets},
    )
