"""The forward pass of a step on a GPU: the layers of `model.llama` over `Ops`.

Differs from `Llama.forward` in what is fused, not in what is computed: the residual stream is updated in place, norms
are taken on the way into the products behind them, and attention rotates and writes keys by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.model.layers import Linear
from slipstream.model.llama import Llama
from slipstream.run.cuda.inputs import DecodeColumns, MixedColumns
from slipstream.run.cuda.kernels.ops import Ops


class Scratch:
    """The activations of decode steps, at fixed addresses, for up to `rows` rows."""

    def __init__(self, model: Llama, rows: int) -> None:
        config = model.config
        place = {"dtype": model.dtype, "device": model.device}
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.x = torch.empty(rows, config.hidden, **place)
        self.qkv = torch.empty(rows, width, **place)
        self.attended = torch.empty(rows, config.heads * config.head_dim, **place)
        self.activated = torch.empty(rows, config.intermediate, **place)
        self.logits = torch.empty(rows, config.vocab, **place)
        self.part = torch.empty(rows, model.shard.vocab.size, **place) if model.shard.size > 1 else self.logits


def add_sum(model: Llama, ops: Ops, part: Tensor, linear: Linear, x: Tensor) -> None:
    """x += linear(part), where every rank has a part of the features."""
    add_part(model, ops, part, linear, x)
    model.parallel.reduce(x)


def add_part(model: Llama, ops: Ops, part: Tensor, linear: Linear, x: Tensor) -> None:
    """What this rank has of that sum; rank 0 alone brings what is in x already."""
    if model.parallel.rank == 0:
        ops.add_project(part, linear, x)
    else:
        ops.project(part, linear, x)


def decode(model: Llama, ops: Ops, step: DecodeColumns, scratch: Scratch) -> None:
    """Logits of the sequences of `step`, into the first rows of `scratch`."""
    rows = len(step.token_ids)
    x, qkv, attended = scratch.x[:rows], scratch.qkv[:rows], scratch.attended[:rows]
    activated, logits = scratch.activated[:rows], scratch.logits[:rows]
    torch.index_select(model.embedding, 0, step.token_ids, out=x)
    for layer in model.layers:
        ops.project(x, layer.qkv, qkv, layer.input_norm)
        ops.decode_attention(layer, qkv, attended, step)
        add_sum(model, ops, attended, layer.output, x)
        ops.gated(x, layer.gate_up, activated, layer.mlp_norm)
        add_sum(model, ops, activated, layer.down, x)
    if model.shard.size == 1:
        ops.project(x, model.head, logits, model.norm)
    else:
        part = ops.project(x, model.head, scratch.part[:rows], model.norm)
        logits.copy_(model.gathered(part))


def mixed(model: Llama, ops: Ops, step: MixedColumns, layers: int | None = None) -> Tensor:
    """The residual stream [tokens, hidden] behind the last layer: the final norm is left to those who need a row.

    `layers`: only the first so many are computed, for trying what all of them need.
    """
    config = model.config
    tokens, decodes = len(step.token_ids), step.decodes
    x = model.embedding.index_select(0, step.token_ids)
    qkv = x.new_empty(tokens, (config.heads + 2 * config.kv_heads) * config.head_dim)
    attended = x.new_empty(tokens, config.heads * config.head_dim)
    activated = x.new_empty(tokens, config.intermediate)
    for layer in model.layers[:layers]:
        ops.project(x, layer.qkv, qkv, layer.input_norm)
        if step.decode is not None:
            ops.decode_attention(layer, qkv[:decodes], attended[:decodes], step.decode)
        if step.longest:
            ops.prefill_attention(layer, qkv[decodes:], attended[decodes:], step)
        add_sum(model, ops, attended, layer.output, x)
        ops.gated(x, layer.gate_up, activated, layer.mlp_norm)
        add_sum(model, ops, activated, layer.down, x)
    return x
