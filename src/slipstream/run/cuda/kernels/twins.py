"""The kernels' twins: the same operations in plain torch, one sequence at a time where sequences matter.

Slow, and clear: tests compare the kernels with them, and run the GPU's forward pass and its bookkeeping on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.model.layers import Linear, RMSNorm, Rotary
from slipstream.model.llama import DecoderLayer
from slipstream.run.attention import PagedPool
from slipstream.run.cuda.inputs import DecodeColumns, MixedColumns


class TorchOps:
    """`ops.Ops` over one pool, on any device and in any dtype."""

    def __init__(self, pool: PagedPool, rotary: Rotary) -> None:
        self.pool, self.rotary = pool, rotary

    def rms_norm(self, x: Tensor, norm: RMSNorm, out: Tensor) -> Tensor:
        return out.copy_(norm(x))

    def project(self, x: Tensor, linear: Linear, out: Tensor, norm: RMSNorm | None = None) -> Tensor:
        return out.copy_(linear(x if norm is None else norm(x)))

    def add_project(self, x: Tensor, linear: Linear, out: Tensor) -> Tensor:
        return out.copy_(linear.add_to(out, x))

    def gated(self, x: Tensor, gate_up: Linear, out: Tensor, norm: RMSNorm) -> Tensor:
        gate, up = gate_up(norm(x)).chunk(2, -1)
        return out.copy_(F.silu(gate) * up)

    def decode_attention(self, layer: DecoderLayer, qkv: Tensor, out: Tensor, step: DecodeColumns) -> Tensor:
        width, sequences = int(step.width_at[0]), qkv.shape[0]
        tables = step.tables[: sequences * width].view(sequences, width)
        for index, length in enumerate(step.lengths.tolist()):
            row = slice(index, index + 1)
            out[row] = self._attend(layer, qkv[row], tables[index].long(), length)
        return out

    def prefill_attention(self, layer: DecoderLayer, qkv: Tensor, out: Tensor, step: MixedColumns) -> Tensor:
        tables = step.tables.view(-1, step.width)
        starts = step.query_start.tolist()
        for index, length in enumerate(step.lengths.tolist()):
            rows = slice(starts[index], starts[index + 1])
            out[rows] = self._attend(layer, qkv[rows], tables[index].long(), length)
        return out

    def step_attention(self, qkv: Tensor, out: Tensor, step: MixedColumns) -> Callable[[DecoderLayer], None]:
        decodes = step.decodes

        def attend(layer: DecoderLayer) -> None:
            if step.decode is not None:
                self.decode_attention(layer, qkv[:decodes], out[:decodes], step.decode)
            if step.longest:
                self.prefill_attention(layer, qkv[decodes:], out[decodes:], step)

        return attend

    def _attend(self, layer: DecoderLayer, qkv: Tensor, table: Tensor, length: int) -> Tensor:
        """The last tokens of one sequence of `length` tokens."""
        dim, page_tokens = self.pool.layout.head_dim, self.pool.layout.page_tokens
        heads = torch.arange(layer.kv_heads, device=qkv.device)
        blocks = ((table[:, None] * layer.kv_heads + heads) * self.pool.layout.layers + layer.index) * 2  # of keys
        query, key, value = qkv.view(len(qkv), -1, dim).split([layer.heads, layer.kv_heads, layer.kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        positions = torch.arange(length - len(qkv), length, device=qkv.device)
        angles = self.rotary.angles(positions)
        query, key = self.rotary.rotate(query, angles), self.rotary.rotate(key, angles)
        rows = blocks[positions // page_tokens] * page_tokens + (positions % page_tokens)[:, None]
        self.pool.write(rows.flatten(), key.reshape(-1, dim))
        self.pool.write((rows + page_tokens).flatten(), value.reshape(-1, dim))
        used = blocks[: self.pool.layout.pages_for(length)].t()  # [heads, pages]
        found = self.pool.gather(torch.stack([used, used + 1]).flatten())
        keys, values = found.view(2, layer.kv_heads, -1, dim)[:, :, :length].unbind(0)
        seen = torch.arange(length, device=qkv.device)[None, :] <= positions[:, None]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(len(qkv), -1)
