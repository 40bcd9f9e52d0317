"""Attention of prompts on Hopper, written in Triton's lower language, Gluon.

`attend` reads sequences that `prefill.gather_pages` has laid out: one warp fetches keys and values, two groups of four
warps take 64 query rows each, and each group computes the scores of the next tile while it weighs the values of the
last. The masked tiles at the end of a row's context come first.

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


@gluon.jit
def _fetch_tiles(query, keys, values, buffers, barriers, span, STAGES: gl.constexpr):
    # The warp that fetches: both groups' queries, then tile after tile from the last to the first.
    queries, key_tiles, value_tiles = buffers
    query_ready, key_ready, value_ready, key_free, value_free = barriers
    at, column, base, end = span
    TILE: gl.constexpr = keys.block_type.shape[0]
    ROWS: gl.constexpr = query.block_type.shape[0]
    for group in gl.static_range(2):
        mbarrier.expect(query_ready.index(group), query.block_type.nbytes)
        tma.async_copy_global_to_shared(
            query, [at + group * ROWS, column], query_ready.index(group), queries.index(group)
        )
    for step in range(0, end):
        slot = step % STAGES
        free = ((step // STAGES) & 1) ^ 1
        token = base + (end - 1 - step) * TILE
        mbarrier.wait(key_free.index(slot), free)
        mbarrier.expect(key_ready.index(slot), keys.block_type.nbytes)
        tma.async_copy_global_to_shared(keys, [token, 0], key_ready.index(slot), key_tiles.index(slot))
        mbarrier.wait(value_free.index(slot), free)
        mbarrier.expect(value_ready.index(slot), values.block_type.nbytes)
        tma.async_copy_global_to_shared(values, [token, 0], value_ready.index(slot), value_tiles.index(slot))


@gluon.jit
def _weigh(scores, top, total, scale, first_token, position, MASKED: gl.constexpr):
    # One tile further in the running softmax: (shares, largest, sum, what earlier sums fade by).
    if MASKED:
        TILE: gl.constexpr = scores.shape[1]
        token = first_token + gl.arange(0, TILE, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(token[None, :] <= position[:, None], scores, float("-inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    zero = higher
    if MASKED:
        zero = gl.where(higher == float("-inf"), 0.0, higher)  # a row that saw nothing yet
    shares = gl.exp2(scores * scale - zero[:, None])
    fade = gl.exp2(top - zero)
    return shares, higher, total * fade + gl.sum(shares, 1), fade


@gluon.jit
def _one_further(
    step, end, base_position, query, key_tiles, value_tiles, barriers, shares, top, total, sums, scale,
    STAGES: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    # Scores of tile `step` while the values of the tile before are weighed by `shares`.
    _query_ready, key_ready, value_ready, key_free, value_free = barriers
    ROWS: gl.constexpr = query.type.shape[0]
    TILE: gl.constexpr = key_tiles.type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    slot = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(key_ready.index(slot), (step // STAGES) & 1)
    empty = gl.zeros([ROWS, TILE], gl.float32, layout)
    scores = warpgroup_mma(query, key_tiles.index(slot).permute((1, 0)), empty, use_acc=False, is_async=True)
    mbarrier.wait(value_ready.index(before), ((step - 1) // STAGES) & 1)
    sums = warpgroup_mma(shares, value_tiles.index(before), sums, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(key_free.index(slot), count=1)
    weighed, top, total, fade = _weigh(scores, top, total, scale, (end - 1 - step) * TILE, base_position, MASKED)
    sums, shares = warpgroup_mma_wait(0, deps=(sums, shares))
    mbarrier.arrive(value_free.index(before), count=1)
    wide: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    sums = sums * gl.convert_layout(fade, wide)[:, None]
    shares = gl.convert_layout(weighed.to(query.dtype), shares.type.layout)
    return shares, top, total, sums


@gluon.jit
def _attend_rows(
    GROUP_AT: gl.constexpr, out, buffers, barriers, span, sizes, scale, OUT_WIDTH: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    # One of the two groups of warps and its query rows.
    queries, key_tiles, value_tiles = buffers
    query_ready, key_ready, value_ready, key_free, _value_free = barriers
    at, column, _base, end = span
    row_at, count, earlier, whole = sizes
    ROWS: gl.constexpr = queries.type.shape[1]
    DIM: gl.constexpr = queries.type.shape[2]
    TILE: gl.constexpr = key_tiles.type.shape[1]
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    query = queries.index(GROUP_AT)
    row = row_at + GROUP_AT * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, narrow))
    position = earlier + row
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, narrow))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, narrow))
    sums = gl.zeros([ROWS, DIM], gl.float32, wide)
    mbarrier.wait(query_ready.index(GROUP_AT), 0)
    mbarrier.wait(key_ready.index(0), 0)
    empty = gl.zeros([ROWS, TILE], gl.float32, narrow)
    scores = warpgroup_mma(query, key_tiles.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(key_free.index(0), count=1)
    weighed, top, total, _fade = _weigh(scores, top, total, scale, (end - 1) * TILE, position, True)
    shares = gl.convert_layout(weighed.to(query.dtype), left)
    masked = gl.maximum(end - whole, 1)
    for step in range(1, masked):
        shares, top, total, sums = _one_further(
            step, end, position, query, key_tiles, value_tiles, barriers, shares, top, total, sums, scale, STAGES, True
        )
    for step in range(masked, end):
        shares, top, total, sums = _one_further(
            step, end, position, query, key_tiles, value_tiles, barriers, shares, top, total, sums, scale, STAGES, False
        )
    mbarrier.wait(value_ready.index((end - 1) % STAGES), ((end - 1) // STAGES) & 1)
    sums = warpgroup_mma(shares, value_tiles.index((end - 1) % STAGES), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    sums = sums / gl.convert_layout(total, gl.SliceLayout(1, wide))[:, None]
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    done = gl.convert_layout(sums.to(query.dtype), lines)
    line = GROUP_AT * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, lines))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, lines))
    to = out + (at + line).to(gl.int64)[:, None] * OUT_WIDTH + column + dim[None, :]
    gl.store(to, done, mask=(row_at + line < count)[:, None])


@gluon.jit
def _attend_first(out, buffers, barriers, span, sizes, scale, OUT_WIDTH: gl.constexpr, STAGES: gl.constexpr):
    _attend_rows(0, out, buffers, barriers, span, sizes, scale, OUT_WIDTH, STAGES)


@gluon.jit
def _attend_second(out, buffers, barriers, span, sizes, scale, OUT_WIDTH: gl.constexpr, STAGES: gl.constexpr):
    _attend_rows(1, out, buffers, barriers, span, sizes, scale, OUT_WIDTH, STAGES)


@gluon.jit(do_not_specialize=["total", "scale"])
def attend(
    query,
    keys,
    values,
    out,
    query_start,
    lengths,
    starts,
    total,
    scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    # As `prefill.prefill_gathered`; query is a descriptor of qkv in blocks of [64, DIM], keys and values in
    # blocks of [TILE, DIM]. A program: one head, twice 64 rows of one sequence.
    ROWS: gl.constexpr = query.block_type.shape[0]
    DIM: gl.constexpr = query.block_type.shape[1]
    TILE: gl.constexpr = keys.block_type.shape[0]
    head = gl.program_id(0)
    row_at = (gl.num_programs(1) - 1 - gl.program_id(1)) * (2 * ROWS)  # the last rows see most: they come first
    sequence = gl.program_id(2)
    begin = gl.load(query_start + sequence)
    count = gl.load(query_start + sequence + 1) - begin
    if row_at < count:
        length = gl.load(lengths + sequence)
        earlier = length - count
        whole = (earlier + row_at + 1) // TILE
        end = gl.cdiv(gl.minimum(earlier + row_at + 2 * ROWS, length), TILE)
        base = (head // GROUP) * total + gl.load(starts + sequence)
        queries = gl.allocate_shared_memory(query.dtype, [2, ROWS, DIM], query.layout)
        key_tiles = gl.allocate_shared_memory(keys.dtype, [STAGES, TILE, DIM], keys.layout)
        value_tiles = gl.allocate_shared_memory(values.dtype, [STAGES, TILE, DIM], values.layout)
        query_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(2):
            mbarrier.init(query_ready.index(slot), count=1)
        for slot in gl.static_range(STAGES):
            mbarrier.init(key_ready.index(slot), count=1)
            mbarrier.init(value_ready.index(slot), count=1)
            mbarrier.init(key_free.index(slot), count=2)
            mbarrier.init(value_free.index(slot), count=2)
        fence_async_shared()
        buffers = (queries, key_tiles, value_tiles)
        barriers = (query_ready, key_ready, value_ready, key_free, value_free)
        span = (begin + row_at, head * DIM, base, end)
        sizes = (row_at, count, earlier, whole)
        gl.warp_specialize(
            [
                (_attend_first, (out, buffers, barriers, span, sizes, scale, HEADS * DIM, STAGES)),
                (_attend_second, (out, buffers, barriers, span, sizes, scale, HEADS * DIM, STAGES)),
                (_fetch_tiles, (query, keys, values, buffers, barriers, span, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
