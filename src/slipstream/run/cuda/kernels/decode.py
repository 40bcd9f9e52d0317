"""Attention of decoding, one new token a sequence, over the block-major KV pool.

`decode_attention` takes the raw projections of the step, rotates the query and the new key, writes key and value into
their page, and attends over the earlier tokens, all query heads of one KV head together. While sequences are too few to
fill the chip, and where one is much longer than others, the earlier tokens are divided among several programs, and the
last of them to be done merges the shares of all. Each program reads on the device which share of which sequence is its
own and how long that is (`kernels.shares` decides it for each step), so that a captured CUDA graph stays right when
lengths and block tables change.

The pool of one layer is given by the address of its first key, the strides of a page and a head in elements, and PAGE
tokens of 2 * HALF numbers each; values lie SPAN elements behind their keys. FP8: the elements are codes (`codes`). The
twin in plain torch is in `twins`.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]

from slipstream.run.cuda.kernels.codes import _code, _power, _scale


@triton.jit
def _fetch(
    heads_at,
    table,
    token,
    known,
    page_stride,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    FP8: tl.constexpr,
    KIND: tl.constexpr,
):
    # Both halves of the keys, and the values, of a tile of tokens of one KV head, in KIND; keys are to be scaled.
    half = tl.arange(0, HALF)
    dim = tl.arange(0, 2 * HALF)
    page = tl.load(table + token // PAGE, mask=known, other=0).to(tl.int64)
    block = heads_at + page * page_stride
    keys = (block + (token % PAGE) * (2 * HALF))[:, None]
    low = tl.load(keys + half[None, :], mask=known[:, None], other=0.0)
    high = tl.load(keys + HALF + half[None, :], mask=known[:, None], other=0.0)
    values = tl.load(keys + SPAN + dim[None, :], mask=known[:, None], other=0.0)
    if FP8:
        key_scale = _scale(block, token % PAGE, known, PAGE * 2 * HALF)
        value_scale = _scale(block + SPAN, token % PAGE, known, PAGE * 2 * HALF)
        values = values.to(KIND) * value_scale.to(KIND)[:, None]
        return low.to(KIND), high.to(KIND), values, key_scale
    else:
        return low, high, values, known.to(tl.float32)


@triton.jit
def _fold(
    query_low,
    query_high,
    low,
    high,
    values,
    key_scale,
    known,
    top,
    total,
    sums,
    scale,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The running softmax, a tile further: largest score, sum of shares, and sum of values by share.
    scores = tl.dot(query_low, tl.trans(low), input_precision=PRECISION)
    scores = tl.dot(query_high, tl.trans(high), scores, input_precision=PRECISION) * scale
    if FP8:
        scores = scores * key_scale[None, :]
    scores = tl.where(known[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    share = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    sums = tl.dot(share.to(values.dtype), values, sums * fade[:, None], input_precision=PRECISION)
    return higher, total * fade + tl.sum(share, 1), sums


@triton.jit(do_not_specialize=["scale", "programs"])
def decode_attention(
    qkv,
    query_gain,
    key_gain,
    out,
    partial,
    weights,
    arrived,
    pool,
    cosines,
    sines,
    tables,
    width_at,
    shares,
    scale,
    eps,
    page_stride,
    head_stride,
    programs,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    SHARE_NUMBERS: tl.constexpr,
    PLACES: tl.constexpr,
    MEMBERS: tl.constexpr,
    QK_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # qkv [sequences, (HEADS + 2 * KV heads) * DIM]; out [sequences, HEADS * DIM]; scale includes log2(e).
    # partial [HEADS, programs, DIM] and weights [HEADS, programs], float32, and arrived [sequences, KV heads], zero
    # before and after, serve sequences of several parts; these are at most PLACES, GROUP is at most MEMBERS.
    DIM: tl.constexpr = 2 * HALF
    KV_HEADS: tl.constexpr = HEADS // GROUP
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    share = shares + program * SHARE_NUMBERS
    sequence = tl.load(share)
    split = tl.load(share + 1)
    splits = tl.load(share + 2)
    length = tl.load(share + 3)
    width = tl.load(width_at)
    if length == 0:
        return
    position = length - 1
    half = tl.arange(0, HALF)
    dim = tl.arange(0, DIM)
    row = tl.arange(0, ROWS)
    live = row < GROUP
    head = kv_head * GROUP + row
    cosine = tl.load(cosines + position.to(tl.int64) * DIM + half).to(tl.float32)
    sine = tl.load(sines + position.to(tl.int64) * DIM + HALF + half).to(tl.float32)
    tiles = tl.cdiv(position, TILE)
    each = tl.cdiv(tiles, splits)
    first = split * each
    last = tl.minimum(first + each, tiles)
    table = tables + sequence.to(tl.int64) * width
    heads_at = pool + kv_head.to(tl.int64) * head_stride
    # The pool does not depend on the kernel in front of this one: the first tile is fetched while that ends, unless
    # there are so many programs that those registers are worth more.
    first_token = first * TILE + tl.arange(0, TILE)
    first_known = (first_token < position) & (first < last)
    if AHEAD:
        first_low, first_high, first_values, first_scale = _fetch(
            heads_at, table, first_token, first_known, page_stride, HALF, PAGE, SPAN, FP8, qkv.dtype.element_ty
        )
    if PDL:
        gdc_wait()
    if (split > 0) & (first >= tiles):
        return

    start = qkv + sequence.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    at = start + head[:, None] * DIM + half[None, :]
    low = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
    at = start + (HEADS + kv_head) * DIM + half
    key_low = tl.load(at).to(tl.float32)
    key_high = tl.load(at + HALF).to(tl.float32)
    value = tl.load(start + (HEADS + KV_HEADS + kv_head) * DIM + dim)
    kind = value.dtype
    if QK_NORM:
        power = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)
        low = (low * power[:, None] * tl.load(query_gain + half).to(tl.float32)[None, :]).to(kind).to(tl.float32)
        high = (high * power[:, None] * tl.load(query_gain + HALF + half).to(tl.float32)[None, :]).to(kind)
        high = high.to(tl.float32)
        power = tl.rsqrt((tl.sum(key_low * key_low, 0) + tl.sum(key_high * key_high, 0)) / DIM + eps)
        key_low = (key_low * power * tl.load(key_gain + half).to(tl.float32)).to(kind).to(tl.float32)
        key_high = (key_high * power * tl.load(key_gain + HALF + half).to(tl.float32)).to(kind).to(tl.float32)
    query_low = (low * cosine[None, :] - high * sine[None, :]).to(kind)
    query_high = (high * cosine[None, :] + low * sine[None, :]).to(kind)
    new_low = (key_low * cosine - key_high * sine).to(kind)
    new_high = (key_high * cosine + key_low * sine).to(kind)
    key_power = 1.0
    value_power = 1.0
    key_code_low = new_low
    key_code_high = new_high
    code = value
    if FP8:
        largest = tl.maximum(tl.max(tl.abs(new_low.to(tl.float32)), 0), tl.max(tl.abs(new_high.to(tl.float32)), 0))
        key_power = _power(largest)
        value_power = _power(tl.max(tl.abs(value.to(tl.float32)), 0))
        key_code_low = _code(new_low, key_power, pool.dtype.element_ty)
        key_code_high = _code(new_high, key_power, pool.dtype.element_ty)
        code = _code(value, value_power, pool.dtype.element_ty)
        new_low = (key_code_low.to(tl.float32) * key_power).to(kind)
        new_high = (key_code_high.to(tl.float32) * key_power).to(kind)
        value = (code.to(tl.float32) * value_power).to(kind)

    top = tl.sum(query_low.to(tl.float32) * new_low.to(tl.float32)[None, :], 1)
    top = (top + tl.sum(query_high.to(tl.float32) * new_high.to(tl.float32)[None, :], 1)) * scale
    if split == 0:  # the new token is its business alone
        page = tl.load(table + position // PAGE).to(tl.int64)
        block = heads_at + page * page_stride
        write = block + (position % PAGE) * DIM
        tl.store(write + half, key_code_low)
        tl.store(write + HALF + half, key_code_high)
        tl.store(write + SPAN + dim, code)
        if FP8:
            scales = (block + PAGE * DIM).to(tl.pointer_type(tl.bfloat16)) + position % PAGE
            tl.store(scales, key_power)
            scales = (block + SPAN + PAGE * DIM).to(tl.pointer_type(tl.bfloat16)) + position % PAGE
            tl.store(scales, value_power)
    newest = split == 0
    top = tl.where(newest, top, float("-inf"))
    total = tl.where(newest, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32) + tl.where(newest, value.to(tl.float32), 0.0)[None, :]
    if AHEAD:
        top, total, sums = _fold(
            query_low,
            query_high,
            first_low,  # pyright: ignore[reportPossiblyUnboundVariable]
            first_high,  # pyright: ignore[reportPossiblyUnboundVariable]
            first_values,  # pyright: ignore[reportPossiblyUnboundVariable]
            first_scale,  # pyright: ignore[reportPossiblyUnboundVariable]
            first_known,
            top,
            total,
            sums,
            scale,
            FP8,
            PRECISION,
        )
        first += 1
    for tile in range(first, last):
        token = tile * TILE + tl.arange(0, TILE)
        known = token < position
        low_keys, high_keys, values, key_scale = _fetch(
            heads_at, table, token, known, page_stride, HALF, PAGE, SPAN, FP8, qkv.dtype.element_ty
        )
        top, total, sums = _fold(
            query_low,
            query_high,
            low_keys,
            high_keys,
            values,
            key_scale,
            known,
            top,
            total,
            sums,
            scale,
            FP8,
            PRECISION,
        )
    sums = sums / total[:, None]
    busy = tl.maximum(tl.cdiv(tiles, tl.maximum(each, 1)), 1)
    if busy == 1:
        result = out + (sequence.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
        tl.store(result, sums.to(out.dtype.element_ty), mask=live[:, None])
    else:
        base = head * programs + program
        tl.store(weights + base, top + tl.log2(total), mask=live)
        tl.store(partial + base[:, None].to(tl.int64) * DIM + dim[None, :], sums, mask=live[:, None])
        # The last program of a sequence and KV head to arrive merges the shares of all, head by head.
        counter = arrived + sequence * KV_HEADS + kv_head
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == busy - 1:
            tl.store(counter, 0)
            first_part = kv_head * GROUP * programs + program - split
            to = out + (sequence.to(tl.int64) * HEADS + kv_head * GROUP) * DIM
            if busy <= 8:
                _merge(partial, weights, to, first_part, busy, programs, GROUP, MEMBERS, 8, DIM)
            else:
                _merge(partial, weights, to, first_part, busy, programs, GROUP, MEMBERS, PLACES, DIM)


@triton.jit
def _merge(
    partial,
    weights,
    to,
    first_part,
    busy,
    programs,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    PLACES: tl.constexpr,
    DIM: tl.constexpr,
):
    # `to` [GROUP, DIM]. Shares were written by other multiprocessors, so none may come from this one's own cache.
    member = tl.arange(0, MEMBERS)
    dim = tl.arange(0, DIM)
    live = member < GROUP
    base = first_part + member * programs
    place = tl.arange(0, PLACES)
    weight = tl.load(
        weights + base[:, None] + place[None, :],
        mask=live[:, None] & (place < busy)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top = tl.where(live, tl.max(weight, 1), 0.0)
    total = tl.where(live, tl.sum(tl.exp2(weight - top[:, None]), 1), 1.0)
    sums = tl.zeros([MEMBERS, DIM], tl.float32)
    for start in range(0, busy, 8):
        for offset in tl.static_range(8):
            one = base + start + offset
            known = live & (start + offset < busy)
            share = tl.exp2(tl.load(weights + one, mask=known, other=float("-inf"), cache_modifier=".cg") - top)
            part = partial + one[:, None].to(tl.int64) * DIM + dim[None, :]
            sums += tl.load(part, mask=known[:, None], other=0.0, cache_modifier=".cg") * share[:, None]
    at = to + member[:, None] * DIM + dim[None, :]
    tl.store(at, (sums / total[:, None]).to(to.dtype.element_ty), mask=live[:, None])
