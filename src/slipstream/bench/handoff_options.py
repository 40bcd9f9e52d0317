"""What the handoff benchmark asks of its workers, for both sides of the process boundary; needs no torch."""

from __future__ import annotations

import msgspec

from slipstream.config import TransferConfig
from slipstream.kv.layout import KVLayout


class HandoffOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What both workers are: `tokens` in the pool, where it lies, and how long a prompt computes."""

    role: str = "both"
    memory: str = "cpu"
    tokens: int = 8192
    page_tokens: int = 16
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    chunk_tokens: int = 16384
    max_sequences: int = 128
    compute_ms: float = 0.0
    awake: bool = True
    transfer: TransferConfig = TransferConfig()

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            page_tokens=self.page_tokens,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            total_kv_heads=self.kv_heads,
            model="bench",
        )
