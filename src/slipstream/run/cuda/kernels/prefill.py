"""Attention of prompts over the block-major KV pool.

`rotate_and_write` rotates queries in place and writes rotated keys and values into their pages. Then each token sees
its sequence up to itself, earlier chunks included: by `prefill_attention` through the block table, or, where the GPU
has tensor copies, `gather_pages` lays the sequences out first and `prefill_gathered` reads them (on Hopper
`hopper_prefill.attend` does).

The pool of one layer is given by the address of its first key, the strides of a page and a head in elements, and PAGE
tokens of DIM numbers each; values lie SPAN elements behind their keys. FP8: the elements are codes (`codes`). The twins
in plain torch are in `twins`.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from slipstream.run.cuda.kernels.codes import _code, _power, _scale


@triton.jit
def rotate_and_write(
    qkv,
    query_gain,
    key_gain,
    pool,
    cosines,
    sines,
    positions,
    pages,
    eps,
    page_stride,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    KV_PLACES: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    FP8: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    # One program a token; qkv [tokens, (HEADS + 2 * KV_HEADS) * DIM]. Query heads, then KV heads.
    DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0)
    position = tl.load(positions + token)
    page = tl.load(pages + token).to(tl.int64)
    half = tl.arange(0, HALF)
    cosine = tl.load(cosines + position.to(tl.int64) * DIM + half).to(tl.float32)[None, :]
    sine = tl.load(sines + position.to(tl.int64) * DIM + HALF + half).to(tl.float32)[None, :]
    start = qkv + token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    kind = qkv.dtype.element_ty

    head = tl.arange(0, PLACES)
    live = (head < HEADS)[:, None]
    at = start + head[:, None] * DIM + half[None, :]
    low = tl.load(at, mask=live, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    if QK_NORM:
        power = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        low = (low * power * tl.load(query_gain + half).to(tl.float32)[None, :]).to(kind).to(tl.float32)
        high = (high * power * tl.load(query_gain + HALF + half).to(tl.float32)[None, :]).to(kind).to(tl.float32)
    tl.store(at, (low * cosine - high * sine).to(kind), mask=live)
    tl.store(at + HALF, (high * cosine + low * sine).to(kind), mask=live)

    head = tl.arange(0, KV_PLACES)
    live = (head < KV_HEADS)[:, None]
    at = start + (HEADS + head)[:, None] * DIM + half[None, :]
    low = tl.load(at, mask=live, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    if QK_NORM:
        power = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        low = (low * power * tl.load(key_gain + half).to(tl.float32)[None, :]).to(kind).to(tl.float32)
        high = (high * power * tl.load(key_gain + HALF + half).to(tl.float32)[None, :]).to(kind).to(tl.float32)
    new_low = (low * cosine - high * sine).to(kind)
    new_high = (high * cosine + low * sine).to(kind)
    value_low = tl.load(at + KV_HEADS * DIM, mask=live, other=0.0)
    value_high = tl.load(at + KV_HEADS * DIM + HALF, mask=live, other=0.0)
    block = pool + page * page_stride + head[:, None].to(tl.int64) * head_stride
    if FP8:
        key_power = _power(_largest(new_low, new_high))
        value_power = _power(_largest(value_low, value_high))
        new_low = _code(new_low, key_power[:, None], pool.dtype.element_ty)
        new_high = _code(new_high, key_power[:, None], pool.dtype.element_ty)
        value_low = _code(value_low, value_power[:, None], pool.dtype.element_ty)
        value_high = _code(value_high, value_power[:, None], pool.dtype.element_ty)
        scales = (block + PAGE * DIM).to(tl.pointer_type(tl.bfloat16)) + position % PAGE
        tl.store(scales, key_power.to(tl.bfloat16)[:, None], mask=live)
        scales = (block + SPAN + PAGE * DIM).to(tl.pointer_type(tl.bfloat16)) + position % PAGE
        tl.store(scales, value_power.to(tl.bfloat16)[:, None], mask=live)
    write = block + (position % PAGE) * DIM + half[None, :]
    tl.store(write, new_low, mask=live)
    tl.store(write + HALF, new_high, mask=live)
    tl.store(write + SPAN, value_low, mask=live)
    tl.store(write + SPAN + HALF, value_high, mask=live)


@triton.jit
def _largest(low, high):
    return tl.maximum(tl.max(tl.abs(low.to(tl.float32)), 1), tl.max(tl.abs(high.to(tl.float32)), 1))


@triton.jit(do_not_specialize=["width", "scale"])
def prefill_attention(
    qkv,
    out,
    pool,
    query_start,
    lengths,
    tables,
    width,
    scale,
    page_stride,
    head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # qkv as `rotate_and_write` leaves it; query_start [sequences + 1]; lengths [sequences], new tokens included.
    KV_HEADS: tl.constexpr = HEADS // GROUP
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see most: they come first
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    if block * ROWS >= count:
        return
    length = tl.load(lengths + sequence)
    earlier = length - count
    row = block * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    live = (row < count)[:, None]
    at = (begin + row).to(tl.int64)
    query = tl.load(qkv + at[:, None] * WIDTH + head * DIM + dim[None, :], mask=live, other=0.0)
    kind = query.dtype
    table = tables + sequence.to(tl.int64) * width
    heads_at = pool + (head // GROUP).to(tl.int64) * head_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    whole = (earlier + block * ROWS + 1) // TILE  # tiles that every row sees all of
    end = tl.cdiv(tl.minimum(earlier + (block + 1) * ROWS, length), TILE)
    for tile in range(0, whole):
        token = tile * TILE + tl.arange(0, TILE)
        page = tl.load(table + token // PAGE).to(tl.int64)
        known = token < length
        at_page = heads_at + page * page_stride
        keys = at_page + (token % PAGE) * DIM
        k = tl.load(keys[:, None] + dim[None, :])
        scores = tl.dot(query, tl.trans(k.to(kind)), input_precision=PRECISION)
        if FP8:
            scores = scores * _scale(at_page, token % PAGE, known, PAGE * DIM)[None, :]
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        share = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(share, 1)
        sums = sums * fade[:, None]
        v = tl.load(keys[:, None] + SPAN + dim[None, :]).to(kind)
        if FP8:
            v = v * _scale(at_page + SPAN, token % PAGE, known, PAGE * DIM).to(kind)[:, None]
        sums = tl.dot(share.to(kind), v, sums, input_precision=PRECISION)
        top = higher
    for tile in range(whole, end):
        token = tile * TILE + tl.arange(0, TILE)
        known = token < length
        page = tl.load(table + token // PAGE, mask=known, other=0).to(tl.int64)
        at_page = heads_at + page * page_stride
        keys = at_page + (token % PAGE) * DIM
        k = tl.load(keys[:, None] + dim[None, :], mask=known[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k.to(kind)), input_precision=PRECISION) * scale
        if FP8:
            scores = scores * _scale(at_page, token % PAGE, known, PAGE * DIM)[None, :]
        scores = tl.where(token[None, :] <= earlier + row[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        share = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(share, 1)
        sums = sums * fade[:, None]
        v = tl.load(keys[:, None] + SPAN + dim[None, :], mask=known[:, None], other=0.0).to(kind)
        if FP8:
            v = v * _scale(at_page + SPAN, token % PAGE, known, PAGE * DIM).to(kind)[:, None]
        sums = tl.dot(share.to(kind), v, sums, input_precision=PRECISION)
        top = higher
    sums = sums / total[:, None]
    tl.store(out + at[:, None] * (HEADS * DIM) + head * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["width", "total"])
def gather_pages(
    pool,
    keys,
    values,
    starts,
    lengths,
    tables,
    width,
    total,
    page_stride,
    head_stride,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
):
    # keys and values [KV heads, total, DIM]: sequence s from row starts[s] on, zeros behind it up to a whole TILE.
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(lengths + sequence)
    if block * TILE >= length:
        return
    token = block * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, DIM)
    known = token < length
    page = tl.load(tables + sequence.to(tl.int64) * width + token // PAGE, mask=known, other=0).to(tl.int64)
    block = pool + kv_head.to(tl.int64) * head_stride + page * page_stride
    at = (block + (token % PAGE) * DIM)[:, None] + dim[None, :]
    kind = keys.dtype.element_ty
    k = tl.load(at, mask=known[:, None], other=0.0).to(kind)
    v = tl.load(at + SPAN, mask=known[:, None], other=0.0).to(kind)
    if FP8:
        k = k * _scale(block, token % PAGE, known, PAGE * DIM).to(kind)[:, None]
        v = v * _scale(block + SPAN, token % PAGE, known, PAGE * DIM).to(kind)[:, None]
    row = kv_head.to(tl.int64) * total + tl.load(starts + sequence) + token
    into = row[:, None] * DIM + dim[None, :]
    tl.store(keys + into, k)
    tl.store(values + into, v)


@triton.jit(do_not_specialize=["total", "scale"])
def prefill_gathered(
    qkv,
    out,
    keys,
    values,
    query_start,
    lengths,
    starts,
    total,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    # As `prefill_attention`, over what `gather_pages` made: `keys` and `values` are tensor descriptors of
    # [KV heads * total, DIM] with blocks of [TILE, DIM], which the copy engine of a multiprocessor fetches by itself.
    KV_HEADS: tl.constexpr = HEADS // GROUP
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    if block * ROWS >= count:
        return
    length = tl.load(lengths + sequence)
    base = (head // GROUP) * total + tl.load(starts + sequence)
    earlier = length - count
    row = block * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    live = (row < count)[:, None]
    at = (begin + row).to(tl.int64)
    query = tl.load(qkv + at[:, None] * WIDTH + head * DIM + dim[None, :], mask=live, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    shares = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    whole = (earlier + block * ROWS + 1) // TILE
    end = tl.cdiv(tl.minimum(earlier + (block + 1) * ROWS, length), TILE)
    for tile in range(0, whole):
        scores = tl.dot(query, keys.load([base + tile * TILE, 0]).T)
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        share = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(top - higher)
        shares = shares * fade + tl.sum(share, 1)
        sums = sums * fade[:, None]
        sums = tl.dot(share.to(query.dtype), values.load([base + tile * TILE, 0]), sums)
        top = higher
    for tile in range(whole, end):
        scores = tl.dot(query, keys.load([base + tile * TILE, 0]).T) * scale
        token = tile * TILE + tl.arange(0, TILE)
        scores = tl.where(token[None, :] <= earlier + row[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        share = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        shares = shares * fade + tl.sum(share, 1)
        sums = sums * fade[:, None]
        sums = tl.dot(share.to(query.dtype), values.load([base + tile * TILE, 0]), sums)
        top = higher
    sums = sums / shares[:, None]
    tl.store(out + at[:, None] * (HEADS * DIM) + head * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=live)
