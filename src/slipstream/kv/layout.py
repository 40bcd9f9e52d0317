"""The order of bytes in a KV pool, and the only place that knows it.

A page is one contiguous block: head, layer, K/V, token, dim. One layer of the pool is a strided view
[pages, heads, 2, tokens, dim] with unit last stride, and what two ranks with different head ranges share of a page is
one contiguous run of heads.
"""

from __future__ import annotations

import hashlib

import msgspec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    def head_bytes(self) -> int:
        """Bytes of one head of one page."""
        return self.layers * 2 * self.page_tokens * self.head_dim * ITEM_BYTES[self.dtype]

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
