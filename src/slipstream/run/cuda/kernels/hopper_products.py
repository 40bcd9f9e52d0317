"""Products of few rows on Hopper, written in Triton's lower language, Gluon.

`few_rows` is a product with up to 64 rows, as decode steps have: it streams weights and little else. The tensor copy
engine fetches tiles of weights several steps ahead, and the first of them before the kernel in front has ended, so
that memory does not rest between kernels. Weights are the left side (their rows fill the matrix units' 64), the few
rows of x the right one. Where outputs are too few to fill the chip the inner dimension is divided among programs; the
last of them to arrive adds up the shares, always in the same order.

It does not run under Triton's interpreter; tests compile it for Hopper anywhere and compare numbers on a GPU.
"""

from __future__ import annotations

from triton.experimental import gluon  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon.language.nvidia.hopper import (  # pyright: ignore[reportMissingImports]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]


@gluon.jit
def _fetch_weights(weights, tiles, ready, step, slot, first, second, BYTES: gl.constexpr, GATED: gl.constexpr, live):
    # Announces all bytes of a step, also those of x, and begins to fetch its weights.
    K: gl.constexpr = weights.block_type.shape[1]
    mbarrier.expect(ready.index(slot), BYTES, pred=live)
    tma.async_copy_global_to_shared(weights, [first, step * K], ready.index(slot), tiles.index(slot), pred=live)
    if GATED:
        STAGES: gl.constexpr = tiles.type.shape[0] // 2
        tma.async_copy_global_to_shared(
            weights, [second, step * K], ready.index(slot), tiles.index(STAGES + slot), pred=live
        )


@gluon.jit
def _finish(sums, ups, bias, out, rows, outputs, first, BIAS: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr):
    # Bias, SiLU and residual; sums and ups [N, R] become out [rows, outputs].
    N: gl.constexpr = sums.shape[0]
    R: gl.constexpr = sums.shape[1]
    n = first + gl.arange(0, N, gl.SliceLayout(1, sums.type.layout))
    row = gl.arange(0, R, gl.SliceLayout(0, sums.type.layout))
    known = n < outputs
    if BIAS:
        sums += gl.load(bias + n, mask=known, other=0.0).to(gl.float32)[:, None]
        if GATED:
            ups += gl.load(bias + outputs + n, mask=known, other=0.0).to(gl.float32)[:, None]
    if GATED:
        sums = sums / (1.0 + gl.exp(-sums)) * ups
    at = out + row[None, :] * outputs + n[:, None]
    live = known[:, None] & (row < rows)[None, :]
    if ADD:
        sums += gl.load(at, mask=live, other=0.0).to(gl.float32)
    gl.store(at, sums.to(out.dtype.element_ty), mask=live)


@gluon.jit(do_not_specialize=["rows", "splits"])
def few_rows(
    weights,
    x,
    bias,
    out,
    partial,
    arrived,
    rows,
    outputs,
    inputs,
    splits,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    GATED: gl.constexpr,
    SPLIT: gl.constexpr,
    PDL: gl.constexpr,
):
    # weights [outputs (twice when GATED: gate, then up), inputs] in blocks of [N, K]; x [rows, inputs] in blocks of
    # [R, K]; out [rows, outputs], ADD: out += product. partial [tiles, splits, 1 or 2, N, R] and arrived [tiles], all
    # zero before and after.
    N: gl.constexpr = weights.block_type.shape[0]
    K: gl.constexpr = weights.block_type.shape[1]
    R: gl.constexpr = x.block_type.shape[0]
    PARTS: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = PARTS * weights.block_type.nbytes + x.block_type.nbytes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    if PDL:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first = tile * N
    second = outputs + first
    each = gl.cdiv(gl.cdiv(inputs, K), splits)
    begin = split * each
    steps = gl.minimum(begin + each, gl.cdiv(inputs, K)) - begin
    tiles = gl.allocate_shared_memory(weights.dtype, [PARTS * STAGES, N, K], weights.layout)
    given = gl.allocate_shared_memory(x.dtype, [STAGES, R, K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for ahead in gl.static_range(STAGES):
        mbarrier.init(ready.index(ahead), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for ahead in gl.static_range(STAGES):
        _fetch_weights(weights, tiles, ready, begin + ahead, ahead, first, second, BYTES, GATED, ahead < steps)
    if PDL:
        gdc_wait()
    for ahead in gl.static_range(STAGES):
        at = (begin + ahead) * K
        tma.async_copy_global_to_shared(x, [0, at], ready.index(ahead), given.index(ahead), pred=ahead < steps)
    sums = gl.zeros([N, R], gl.float32, layout)
    ups = gl.zeros([N, R], gl.float32, layout)
    for step in range(0, steps):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        right = given.index(slot).permute((1, 0))
        sums = warpgroup_mma(tiles.index(slot), right, sums, is_async=True)
        if GATED:
            ups = warpgroup_mma(tiles.index(STAGES + slot), right, ups, is_async=True)
            sums, ups = warpgroup_mma_wait(0, deps=(sums, ups))
        else:
            sums = warpgroup_mma_wait(0, deps=(sums,))
        more = step + STAGES < steps
        gl.thread_barrier()
        coming = begin + step + STAGES
        _fetch_weights(weights, tiles, ready, coming, slot, first, second, BYTES, GATED, more)
        tma.async_copy_global_to_shared(x, [0, coming * K], ready.index(slot), given.index(slot), pred=more)

    if not SPLIT:
        _finish(sums, ups, bias, out, rows, outputs, first, BIAS, ADD, GATED)
    else:
        within = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None] * R
        within += gl.arange(0, R, gl.SliceLayout(0, layout))[None, :]
        shares = partial + tile * splits * (PARTS * N * R)
        gl.store(shares + split * (PARTS * N * R) + within, sums)
        if GATED:
            gl.store(shares + split * (PARTS * N * R) + N * R + within, ups)
        gl.thread_barrier()
        if gl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            gl.store(arrived + tile, 0)
            sums = gl.zeros([N, R], gl.float32, layout)
            ups = gl.zeros([N, R], gl.float32, layout)
            for other in range(0, splits):
                sums += gl.load(shares + other * (PARTS * N * R) + within, cache_modifier=".cg")
                if GATED:
                    ups += gl.load(shares + other * (PARTS * N * R) + N * R + within, cache_modifier=".cg")
            _finish(sums, ups, bias, out, rows, outputs, first, BIAS, ADD, GATED)
