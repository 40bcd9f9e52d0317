"""Keys and values in one byte a number: e4m3 codes with one scale for each token, head, and key or value.

The scale is the power of two that brings the largest of a token's numbers to between 128 and 256 (the largest e4m3
number is 448). So no outlier of another token or head costs a token its precision, and codes times scale are exact in
bfloat16: every kernel, chunk and worker computes with the same numbers. The error of a number is at most 1/16 of
itself, or 2^-17 of the largest number of its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODE = torch.float8_e4m3fn
SCALE = torch.bfloat16
LEAST = 2.0**-100  # largest numbers below count as this


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [..., dim] of dtype CODE, scales [...] of dtype SCALE) of rows [..., dim]."""
    values = rows.float()
    largest = values.abs().amax(-1).clamp_min(LEAST)
    scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 8)
    return (values / scales.unsqueeze(-1)).to(CODE), scales.to(SCALE)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What the codes stand for, in `dtype`."""
    return codes.to(dtype) * scales.unsqueeze(-1).to(dtype)


def rounded(rows: Tensor) -> Tensor:
    """What is left of rows after they have been through the pool."""
    return dequantize(*quantize(rows), rows.dtype)
