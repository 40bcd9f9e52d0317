"""Paged attention in plain torch, for CPUs and as the reference for kernels.

The KV pool is block-major, [pages, heads, layers, 2, tokens, dim] (see `kv.layout`), so the keys of one head, layer and
page are one block of tokens x dim numbers, and so are the values behind them. A step writes its new keys and values row
by row, then gathers the blocks of each sequence, head by head, into contiguous [heads, context, dim] and runs torch's
attention over them. Sequences with one new token of similar length are gathered and computed together; a chunk of a
prompt is computed alone, without any gathering when nothing lies before it. Where blocks and rows lie is worked out
once a step, for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.plan import StepPlan
from slipstream.kv.layout import SCALE_BYTES, KVLayout
from slipstream.run.quantize import CODE, SCALE, dequantize, quantize

GROUP_SLACK_TOKENS = 64  # decoding sequences that differ by less are padded to one length
GROUP_SLACK_SHARE = 0.125  # or by less than this share of the longest
GROUP_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}  # gathered at once at most, a layer: on a CPU what its caches hold


class PagedPool:
    """A KV pool as attention sees it, in numbers of `dtype`.

    `memory` is the pool's pages as bytes on any device, `values` views them as numbers (as bytes when the pool holds
    fp8 codes with scales). A block is (page, head, layer, key or value); a row is a token of a block.
    """

    def __init__(self, memory: Tensor, layout: KVLayout, dtype: torch.dtype) -> None:
        pages = memory.numel() // layout.page_bytes
        self.layout, self.pages = layout, pages
        self.device, self.dtype = memory.device, dtype
        self.quantized = layout.dtype in SCALE_BYTES
        self.values = memory[: pages * layout.page_bytes].view(torch.uint8 if self.quantized else dtype)
        self.blocks = self.values.view(-1, layout.block_bytes // self.values.itemsize)
        self._gathered = torch.empty(0, self.blocks.shape[1], dtype=self.values.dtype, device=memory.device)
        if self.quantized:
            self._codes, self._scales = self._parts(self.blocks)
        else:
            self._rows = self.values.view(-1, layout.head_dim)

    def _parts(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Views of blocks [n, bytes]: codes [n, tokens, dim] as bytes, scales [n, tokens]."""
        tokens, dim = self.layout.page_tokens, self.layout.head_dim
        codes, scales = blocks.split([tokens * dim, tokens * SCALE.itemsize], 1)
        return codes.unflatten(1, (tokens, dim)), scales.view(SCALE)

    def write(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Stores numbers [n, dim] in rows [n]; returns what a reader will find there."""
        if not self.quantized:
            self._rows.index_copy_(0, rows, numbers)
            return numbers
        codes, scales = quantize(numbers)
        at = rows // self.layout.page_tokens, rows % self.layout.page_tokens
        self._codes[at] = codes.view(torch.uint8)
        self._scales[at] = scales
        return dequantize(codes, scales, numbers.dtype)

    def clear(self, pages: NDArray[np.int64]) -> None:
        """Zeroes whole pages, so that nothing that is not finite lies behind the tokens that are written next."""
        if len(pages):
            self.values.view(self.pages, -1).index_fill_(0, self.tensor(pages), 0)

    def gather(self, blocks: Tensor) -> Tensor:
        """The blocks as rows of one tensor [n, tokens * dim], valid until the next call: fresh memory would cost more
        than the copy."""
        if len(self._gathered) < len(blocks):
            self._gathered = self.blocks.new_empty(len(blocks) + len(blocks) // 4, self.blocks.shape[1])
        found = torch.index_select(self.blocks, 0, blocks, out=self._gathered[: len(blocks)])
        return self._read(found).flatten(1) if self.quantized else found

    def _read(self, blocks: Tensor) -> Tensor:
        codes, scales = self._parts(blocks)
        return dequantize(codes.view(CODE), scales, self.dtype)

    def layer(self, layer: int) -> Tensor:
        """[pages, heads, 2, tokens, dim] of one layer: a strided view, or a copy of what fp8 codes stand for."""
        shape = (self.pages, *self.layout.page_shape)
        if not self.quantized:
            return self.values.view(shape)[:, :, layer]
        return self._read(self.blocks).view(shape)[:, :, layer]

    def key_blocks(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index in `blocks` of layer 0's keys of pages [...], as [..., heads]. Values follow at +1, layers at +2."""
        heads = np.arange(self.layout.kv_heads)
        return (pages[..., None] * self.layout.kv_heads + heads) * (2 * self.layout.layers)

    def tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, gathered to one length."""

    tokens: Tensor | None  # [sequences] their tokens in the step; None when these are all tokens in order
    blocks: Tensor  # [2 * sequences * heads * pages] of layer 0
    sequences: int
    length: int
    mask: Tensor | None  # [sequences, 1, 1, length] added to the scores; None when all are of this length


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens [first, last) of one sequence, behind `length` - (last - first) earlier ones."""

    first: int
    last: int
    length: int
    blocks: Tensor | None  # [2 * heads * pages] of layer 0; None when nothing lies before
    mask: Tensor | None  # [last - first, length]


class StepAttention:
    """The attention of one step: implements `model.layers.Attention` over the sequences of one plan."""

    def __init__(self, pool: PagedPool, plan: StepPlan) -> None:
        self.pool = pool
        layout = pool.layout
        new = np.diff(plan.query_start)
        sequence = np.repeat(np.arange(plan.sequences), new)
        pages = plan.block_tables[sequence, plan.positions // layout.page_tokens]
        rows = pool.key_blocks(pages) * layout.page_tokens + (plan.positions % layout.page_tokens)[:, None]
        block = layout.page_tokens
        layers = np.arange(layout.layers)[:, None] * (2 * block)
        pool.clear(_begun(pages, plan.positions % block, block))
        self._key_rows = pool.tensor(rows.reshape(1, -1) + layers).unbind(0)
        self._value_rows = pool.tensor(rows.reshape(1, -1) + layers + block).unbind(0)
        self._groups = [self._group(plan, part) for part in self._grouped(plan, np.flatnonzero(new == 1))]
        self._chunks = [self._chunk(plan, int(index)) for index in np.flatnonzero(new > 1)]
        self._decodes_all = len(self._groups) == 1 and self._groups[0].tokens is None

    def _grouped(self, plan: StepPlan, sequences: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Cuts decoding sequences into groups of similar length, each in the order of the plan."""
        lengths = plan.context_lens[sequences]
        order = np.argsort(-lengths, kind="stable")
        most = GROUP_BYTES[self.pool.device.type] * self.pool.layout.layers // self.pool.layout.token_bytes
        groups: list[NDArray[np.int64]] = []
        start = 0
        for index in range(1, len(order) + 1):
            longest = lengths[order[start]]
            if index < len(order):
                close = longest - lengths[order[index]] <= max(GROUP_SLACK_TOKENS, GROUP_SLACK_SHARE * longest)
                if close and (index - start + 1) * longest <= most:
                    continue
            groups.append(np.sort(sequences[order[start:index]]))
            start = index
        return groups

    def _gathered(self, plan: StepPlan, sequences: NDArray[np.int64], length: int) -> Tensor:
        """Blocks of layer 0 for [2, sequences, heads, pages]."""
        tables = plan.block_tables[sequences, : self.pool.layout.pages_for(length)]
        keys = self.pool.key_blocks(tables).transpose(0, 2, 1)
        return self.pool.tensor(np.stack([keys, keys + 1]).reshape(-1))

    def _group(self, plan: StepPlan, sequences: NDArray[np.int64]) -> DecodeGroup:
        lengths = plan.context_lens[sequences]
        longest = int(lengths.max())
        mask = None
        if (lengths != longest).any():
            hidden = self.pool.tensor(np.arange(longest)[None, :] >= lengths[:, None])
            mask = torch.zeros(hidden.shape, dtype=self.pool.dtype, device=self.pool.device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        tokens = plan.query_start[sequences]
        in_order = len(tokens) == len(plan.token_ids) and bool((np.diff(tokens) == 1).all())
        return DecodeGroup(
            tokens=None if in_order else self.pool.tensor(tokens),
            blocks=self._gathered(plan, sequences, longest),
            sequences=len(sequences),
            length=longest,
            mask=mask,
        )

    def _chunk(self, plan: StepPlan, sequence: int) -> Chunk:
        first, last = (int(edge) for edge in plan.query_start[sequence : sequence + 2])
        length = int(plan.context_lens[sequence])
        if length == last - first:
            return Chunk(first, last, length, None, None)
        mask = torch.full((last - first, length), float("-inf"), dtype=self.pool.dtype, device=self.pool.device)
        mask = mask.triu_(length - (last - first) + 1)
        return Chunk(first, last, length, self._gathered(plan, np.array([sequence]), length), mask)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dim = self.pool.layout.head_dim
        key = self.pool.write(self._key_rows[layer], key.reshape(-1, dim)).view(key.shape)
        value = self.pool.write(self._value_rows[layer], value.reshape(-1, dim)).view(value.shape)
        if self._decodes_all:
            return self._decode(layer, query, self._groups[0])
        out = query.new_empty(query.shape[0], query.shape[1] * dim)
        for group in self._groups:
            if group.tokens is None:
                return self._decode(layer, query, group)
            out.index_copy_(0, group.tokens, self._decode(layer, query.index_select(0, group.tokens), group))
        for chunk in self._chunks:
            part = slice(chunk.first, chunk.last)
            out[part] = self._prefill(layer, query[part], key[part], value[part], chunk)
        return out

    def _keys_values(self, layer: int, blocks: Tensor, sequences: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, heads, length, dim] of gathered blocks."""
        layout = self.pool.layout
        shape = (2, sequences, layout.kv_heads, -1, layout.head_dim)
        gathered = self.pool.gather(blocks + 2 * layer if layer else blocks).view(shape)
        return gathered[0, :, :, :length], gathered[1, :, :, :length]

    def _decode(self, layer: int, query: Tensor, group: DecodeGroup) -> Tensor:
        """query [sequences, heads, dim]; the query heads of one KV head are handled as rows of one small matrix."""
        keys, values = self._keys_values(layer, group.blocks, group.sequences, group.length)
        rows = query.reshape(group.sequences, self.pool.layout.kv_heads, -1, self.pool.layout.head_dim)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask)
        return out.reshape(group.sequences, -1)

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, chunk: Chunk) -> Tensor:
        if chunk.blocks is None:
            keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        else:
            keys, values = self._keys_values(layer, chunk.blocks, 1, chunk.length)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(query.shape[0], -1)


def _begun(pages: NDArray[np.int64], slots: NDArray[np.int64], page_tokens: int) -> NDArray[np.int64]:
    """Of the pages that tokens are written to, in their slots, those that get their first token and not their last.

    Sequences of different lengths are computed together under a mask, and a number that is not finite, which a sequence
    that has failed may have left behind, would reach those it is hidden from.
    """
    first = pages[slots == 0]
    return np.setdiff1d(first, pages[slots == page_tokens - 1]) if len(first) else first
