"""How much device memory steps need beside weights and pool: taken into account before the pool takes the rest."""

from __future__ import annotations

from slipstream.model.config import ModelConfig
from slipstream.run.cuda.ops import LAID_OUT_BYTES

SAMPLING_BYTES = 32  # for each logit that is sampled: float32 copies, float64 weights and their sums


def step_bytes(config: ModelConfig, item_bytes: int, tokens: int, sequences: int) -> int:
    """The most that one step of `tokens` tokens, `sequences` of them sampled, holds at once."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    numbers = 2 * config.hidden + qkv + config.heads * config.head_dim + 3 * config.intermediate
    logits = sequences * config.vocab * (2 * item_bytes + SAMPLING_BYTES)
    return tokens * numbers * item_bytes + logits + LAID_OUT_BYTES
