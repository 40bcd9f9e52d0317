"""Keys and values as codes of 8 bits: what the kernels of attention do to write and to read them.

In an FP8 pool the elements are e4m3 codes, with a bfloat16 scale for each token behind the codes of its page
(`kv.layout`, `run.quantize`). Each of these is a part of other kernels, which find it among their module's names.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _scale(block, slot, known, TOKENS: tl.constexpr):
    # Scales of tokens of blocks of codes of TOKENS in all.
    return tl.load((block + TOKENS).to(tl.pointer_type(tl.bfloat16)) + slot, mask=known, other=0.0).to(tl.float32)


@triton.jit
def _power(largest):
    # The scale of a token with this largest number: as `run.quantize`.
    bits = tl.maximum(largest, 7.888609052210118e-31).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True) * 0.0078125


@triton.jit
def _code(values, power, CODE: tl.constexpr):
    # values / power as e4m3. Rounded to nearest, ties to even, before they are converted, which is exact then: also
    # under Triton's interpreter, whose own rounding to 8 bits is not.
    ratio = values.to(tl.float32) / power
    bits = ratio.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    tiny = (ratio + 24576.0) - 24576.0  # multiples of 2^-9, the least e4m3 knows
    return tl.where(tl.abs(ratio) < 0.015625, tiny, bits.to(tl.float32, bitcast=True)).to(CODE)
