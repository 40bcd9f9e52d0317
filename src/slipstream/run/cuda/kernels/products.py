"""Small operations, and matrix products with one row, as Triton kernels.

A product with one row streams its weights from memory and little else, so whatever else a layer does is done on the
way: `one_row` takes the RMS norm of its input, adds bias and residual, and applies SiLU(gate) * up. The norm costs
nothing: x * gain is multiplied, the squares of x are summed beside it, and the sum is divided by their mean's root at
the end.

Products with a few more rows are `hopper_products.few_rows`'s where that runs, and cuBLAS's otherwise (see
docs/performance.md); `rms_norm` and `silu_mul` stand between the latter, and cuBLAS adds the residual. The twins in
plain torch are in `twins`.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]


@triton.jit
def rms_norm(x, gain, out, size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < size
    values = tl.load(x + row * size + at, mask=live, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    values = values * tl.load(gain + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, values.to(out.dtype.element_ty), mask=live)


@triton.jit
def silu_mul(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # gate_up [rows, 2 * size] to out [rows, size]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=live, other=0.0).to(tl.float32)
    values = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + at, values.to(out.dtype.element_ty), mask=live)


@triton.jit
def one_row(
    x,
    gain,
    weight,
    bias,
    out,
    outputs,
    inputs,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    # x [inputs], weight [outputs (twice when GATED: gate, then up), inputs], out [outputs]; ADD: out += product.
    # EVEN: ROWS divides outputs and BLOCK divides inputs.
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = n < outputs
    k = tl.arange(0, BLOCK)
    lines = weight + n[:, None].to(tl.int64) * inputs
    second = outputs.to(tl.int64) * inputs
    if PDL:
        gdc_launch_dependents()
    # The first tile of weights is on its way before the kernel in front of this one has ended, each other one before
    # the tile in front of it is used.
    reach = live[:, None] & (k < inputs)[None, :]
    w = tl.load(lines + k[None, :]) if EVEN else tl.load(lines + k[None, :], mask=reach, other=0.0)
    u = w
    if GATED:
        u = (
            tl.load(lines + second + k[None, :])
            if EVEN
            else tl.load(lines + second + k[None, :], mask=reach, other=0.0)
        )
    if PDL:
        gdc_wait()
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    ups = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    last = (tl.cdiv(inputs, BLOCK) - 1) * BLOCK
    for start in range(0, last, BLOCK):
        at = start + BLOCK + k
        next_w = w
        next_u = u
        if EVEN:
            next_w = tl.load(lines + at[None, :])
            if GATED:
                next_u = tl.load(lines + second + at[None, :])
        else:
            reach = live[:, None] & (at < inputs)[None, :]
            next_w = tl.load(lines + at[None, :], mask=reach, other=0.0)
            if GATED:
                next_u = tl.load(lines + second + at[None, :], mask=reach, other=0.0)
        values = tl.load(x + start + k).to(tl.float32)
        if NORM:
            squares += values * values
            values = values * tl.load(gain + start + k).to(tl.float32)
        sums += w.to(tl.float32) * values[None, :]
        if GATED:
            ups += u.to(tl.float32) * values[None, :]
        w = next_w
        u = next_u
    at = last + k
    values = tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32)
    if NORM:
        squares += values * values
        values = values * tl.load(gain + at, mask=at < inputs, other=0.0).to(tl.float32)
    sums += w.to(tl.float32) * values[None, :]
    if GATED:
        ups += u.to(tl.float32) * values[None, :]
    result = tl.sum(sums, 1)
    power = 1.0
    if NORM:
        power = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        result = result * power
    if BIAS:
        result += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 1)
        if NORM:
            up = up * power
        if BIAS:
            up += tl.load(bias + outputs + n, mask=live, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * up
    if ADD:
        result += tl.load(out + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=live)
