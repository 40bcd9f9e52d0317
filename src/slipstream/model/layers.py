"""The building blocks of the models: linear, norm, rotary embedding, and what attention has to offer.

Written for inference on flat tokens: activations are [tokens, features], sequences exist only inside the attention
object. Weights are plain tensors, filled in place by the loader.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.model.config import ModelConfig, RopeConfig


class Attention(Protocol):
    """Writes the new keys and values of one layer into the KV pool and attends over each token's whole context.

    query [tokens, heads, dim], key and value [tokens, kv_heads, dim]; returns [tokens, heads * dim]. Rows of one
    sequence are adjacent and in order.
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class Linear:
    """y = x W^T + b, with W [outputs, inputs].

    Products with one row stream W from memory, so on a CPU in float32 the longer of its two sides lies innermost: that
    streams at 20 GB/s and more, the other order at 13. Products with several rows of a much longer side gain from a
    second copy in oneDNN's blocked order (`pack`): up to 2.4 times at 4 rows. Figures: `bench/cpu_linear.py`.
    """

    __slots__ = ("_packed", "bias", "transposed", "weight")

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cpu" and dtype == torch.float32 and outputs >= inputs:
            self.weight = torch.empty(inputs, outputs, dtype=dtype, device=device).t()
        else:
            self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.transposed = self.weight.t()
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None

    @property
    def packable(self) -> bool:
        """Whether a second copy would be used."""
        wide = self.weight.shape[0] >= 2 * self.weight.shape[1]
        return wide and self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and has_onednn()

    def pack(self) -> None:
        """Makes the second copy of the loaded weight."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None and x.shape[0] > 1:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        if self.bias is None:
            return torch.mm(x, self.transposed)
        return torch.addmm(self.bias, x, self.transposed)

    def part_of(self, whole: Tensor) -> None:
        """Takes these rows of another weight, a view, instead of a weight of its own."""
        self.weight, self.transposed = whole, whole.t()

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b in one pass."""
        y = torch.addmm(residual, x, self.transposed)
        return y if self.bias is None else y.add_(self.bias)


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's linear with weights in its own order."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * w over the last dimension."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.shape, self.eps = (size,), eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Radians a position for each of the dim / 2 pairs of a head, float32.

    Sources: linear, https://arxiv.org/abs/2306.15595; YaRN, https://arxiv.org/abs/2309.00071 section 3.2; llama3, the
    reference code of Llama 3.1.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * plain / (2 * math.pi)  # over the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return plain * keep + plain / rope.factor * (1.0 - keep)
    if rope.kind == "yarn":
        low, high = (_yarn_pair(rope, dim, beta) for beta in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
        keep = 1.0 - ramp.clamp(0.0, 1.0)
        return plain * keep + plain / rope.factor * (1.0 - keep)
    return plain


def _yarn_pair(rope: RopeConfig, dim: int, turns: float) -> float:
    """Index of the pair that makes `turns` full turns over the original context."""
    return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


class Rotary:
    """Rotates the two halves of each head by an angle that grows with the position.

    The tables of cos and sin cover `config.max_position` positions. `factors` divides the frequencies [dim / 2], as
    GGUF files of Llama 3.1 ask for.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.half = config.head_dim // 2
        self.cos = self.sin = torch.empty(0)
        self.set_factors(None)

    def set_factors(self, factors: Tensor | None) -> None:
        frequencies = inverse_frequencies(self.config.rope, self.config.head_dim)
        if factors is not None:
            frequencies = frequencies / factors
        angles = torch.outer(torch.arange(self.config.max_position, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        scale = self.config.rope.attention_factor
        self.cos = (torch.cat([cos, cos], -1) * scale).to(self.device, self.dtype)
        self.sin = (torch.cat([-sin, sin], -1) * scale).to(self.device, self.dtype)  # signs of the rotated halves

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions [tokens], each [tokens, 1, dim], for `rotate`."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(0, positions).unsqueeze(1)

    def rotate(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [tokens, heads, dim] rotated, as a new tensor."""
        return (x * angles[0]).addcmul_(x.roll(self.half, -1), angles[1])
