"""The order of bytes in a KV pool, and the only place that knows it.

A page is one contiguous block: head, layer, K/V, token, dim. One layer of the pool is a strided view
[pages, heads, 2, tokens, dim] with unit last stride, and what two ranks with different head ranges share of a page is
one contiguous run of heads.

Keys and values of dtype `fp8` are e4m3 numbers of one byte; the [tokens, dim] of a block are followed by [tokens]
scales, bfloat16 powers of two: what a number is worth is its code times its token's scale (see `run.quantize`).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
SCALE_BYTES = {"fp8": 2}  # behind the numbers of a block, for each of its tokens


class HeadRange(NamedTuple):
    """The KV heads that one rank holds. Ranks of one worker may hold the same heads (more ranks than heads)."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


def head_range(total_kv_heads: int, tp_size: int, rank: int) -> HeadRange:
    """The heads of `rank` of `tp_size`: an equal share, or one head replicated where there are more ranks than heads.

    Raises ValueError when neither divides the other.
    """
    if not 0 <= rank < tp_size:
        raise ValueError(f"rank {rank} is not one of {tp_size}")
    if total_kv_heads % tp_size == 0:
        count = total_kv_heads // tp_size
        return HeadRange(rank * count, count)
    if tp_size % total_kv_heads == 0:
        return HeadRange(rank * total_kv_heads // tp_size, 1)
    raise ValueError(f"{total_kv_heads} KV heads cannot be shared by {tp_size} ranks; one must divide the other")


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of the pages of one rank. `kv_heads` are this rank's; `total_kv_heads` are the model's."""

    page_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    total_kv_heads: int
    first_head: int = 0
    model: str = ""  # what else decides a page's content: name and digest of the weights' config

    @property
    def block_bytes(self) -> int:
        """Bytes of the keys, or the values, of one head and layer of one page."""
        return self.page_tokens * (self.head_dim * ITEM_BYTES[self.dtype] + SCALE_BYTES.get(self.dtype, 0))

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one page."""
        return self.layers * 2 * self.block_bytes

    @property
    def page_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_tokens

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """(heads, layers, 2, tokens, dim)"""
        return (self.kv_heads, self.layers, 2, self.page_tokens, self.head_dim)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one possibly in part."""
        return -(-tokens // self.page_tokens)

    @property
    def fingerprint_text(self) -> str:
        """What must agree between two workers that exchange pages, in words. Head ranges may differ."""
        return (
            f"model={self.model} layers={self.layers} kv_heads={self.total_kv_heads} head_dim={self.head_dim} "
            f"kv_dtype={self.dtype} page_tokens={self.page_tokens}"
        )

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self.fingerprint_text.encode(), digest_size=8).hexdigest()
