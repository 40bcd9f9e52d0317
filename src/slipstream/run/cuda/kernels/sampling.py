"""Sampling as Triton kernels, without sorting anything.

`feed` puts the tokens that only the device knows in their places before a step. Behind the logits come three kernels:
`survey` finds the largest logit of each piece of the vocabulary; `weigh` sums up the weights of each piece and, for
rows that are cut (top_k, top_p, min_p), lists its likely tokens; `pick` takes the token: the most likely, or that
at which the weights of the row, in the order of the vocabulary, reach the row's random share of their sum.

Where a row is cut, `pick` finds the least logit that stays by halving the range of values, moving each bound to a value
that is there, so that it ends at the exact one in some ten rounds. It looks through the list of likely tokens, a few
thousand at most: of each piece of the vocabulary those above a bound of its own, so that what lies above the highest of
these bounds is complete. Only if that is not enough it goes through the whole row each time.

Weights are exp((logit - largest) / temperature) in float32, their sums float64, as in `run.sampler`, whose function
`draw_tokens` is the twin in plain torch. A row depends on nothing but itself.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LIKELY = tl.constexpr(-16.0)  # scaled logits above it are listed: their weights are above 1e-7 of the largest
BOTTOM = tl.constexpr(-104.0)  # below it weights are 0 in float32


@triton.jit(do_not_specialize=["count"])
def feed(token_ids, rows, last, count, BLOCK: tl.constexpr):
    # token_ids [count]: where one is negative, the row's last takes its place.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    token = tl.load(token_ids + at, mask=live, other=0)
    row = tl.load(rows + at, mask=live, other=0)
    known = tl.maximum(tl.load(last + row, mask=live, other=0), 0)
    tl.store(token_ids + at, tl.where(token < 0, known, token), mask=live)


@triton.jit
def survey(logits, row_stride, tops, places, vocab, pieces, PIECE: tl.constexpr):
    # tops, places [rows, pieces]: the largest logit of each piece (infinite if one is no number) and where it is.
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    live = at < vocab
    values = tl.load(logits + row * row_stride + at, mask=live, other=float("-inf")).to(tl.float32)
    lost = tl.max((values != values).to(tl.int32), 0)
    values = tl.where(values == values, values, float("-inf"))
    top = tl.max(values, 0)
    place = tl.min(tl.where(values == top, at, vocab), 0)
    tl.store(tops + row * pieces + piece, tl.where(lost > 0, float("inf"), top))
    tl.store(places + row * pieces + piece, place)


@triton.jit
def _scaled(values, top, temperature):
    return tl.div_rn(values - top, tl.zeros_like(values) + temperature)


@triton.jit
def weigh(
    logits,
    row_stride,
    temperatures,
    top_ks,
    log_min_ps,
    top_ps,
    tops,
    masses,
    bounds,
    likely,
    likely_ids,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    LISTED: tl.constexpr,
):
    # masses [rows, pieces] float64: sums of weights. Of cut rows: likely [rows, pieces, LISTED] logits and likely_ids,
    # the rest of each piece's places filled with minus infinity; bounds [rows, pieces]: all scaled logits at or above
    # are listed.
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature <= 0.0:
        return
    number = tl.arange(0, PIECES)
    top = tl.max(tl.load(tops + row * pieces + number, mask=number < pieces, other=float("-inf")), 0)
    if (top == float("inf")) | (top == float("-inf")):
        return
    at = piece * PIECE + tl.arange(0, PIECE)
    live = at < vocab
    values = tl.load(logits + row * row_stride + at, mask=live, other=float("-inf")).to(tl.float32)
    scaled = _scaled(values, top, temperature)
    tl.store(masses + row * pieces + piece, tl.sum(tl.exp(scaled).to(tl.float64), 0))
    cut = (tl.load(top_ks + row) > 0) | (tl.load(top_ps + row) < 1.0) | (tl.load(log_min_ps + row) > float("-inf"))
    if cut:
        bound = LIKELY + 0.0 * temperature
        count = tl.sum((scaled >= bound).to(tl.int32), 0)
        if count > LISTED:
            low = bound
            bound = low * 0.0 + 1.0  # nothing, if too many are the largest
            for _ in range(10):
                middle = (low + tl.minimum(bound, 0.0)) * 0.5
                if tl.sum((scaled >= middle).to(tl.int32), 0) > LISTED:
                    low = middle
                else:
                    bound = middle
        kept = (scaled >= bound).to(tl.int32)
        count = tl.sum(kept, 0)
        place = tl.cumsum(kept, 0) - 1
        start = (row * pieces + piece) * LISTED
        fits = (kept > 0) & (place < LISTED)
        tl.store(likely + start + place, values.to(likely.dtype.element_ty), mask=fits)
        tl.store(likely_ids + start + place, at, mask=fits)
        slot = tl.arange(0, LISTED)
        empty = tl.zeros([LISTED], tl.float32) + float("-inf")
        tl.store(likely + start + slot, empty.to(likely.dtype.element_ty), mask=slot >= count)
        tl.store(bounds + row * pieces + piece, bound)


@triton.jit
def _above(values, size, top, temperature, floor, BLOCK: tl.constexpr):
    # Of the `size` logits: how many are at or above `floor` when scaled, their weights, the least of them, and the
    # largest below it.
    count = 0
    mass = tl.sum(tl.zeros([1], tl.float64), 0)
    least = 0.0
    most = float("-inf")
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(values + at, mask=at < size, other=float("-inf")).to(tl.float32)
        scaled = _scaled(found, top, temperature)
        above = scaled >= floor
        count += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.where(above, tl.exp(scaled), 0.0).to(tl.float64), 0)
        least = tl.minimum(least, tl.min(tl.where(above, scaled, 0.0), 0))
        most = tl.maximum(most, tl.max(tl.where(above, float("-inf"), scaled), 0))
    return count, mass, least, most


@triton.jit
def _floor(values, size, top, temperature, bound, top_k, top_p, total, BLOCK: tl.constexpr):
    # The least scaled logit that top_k and then top_p leave among those at or above `bound`.
    count, mass, least, most = _above(values, size, top, temperature, bound, BLOCK)
    floor = least
    target = top_p * total
    if top_k > 0:
        target = top_p * mass
    if (top_k > 0) & (count > top_k):
        high = 0.0
        beyond = 0
        heavier = mass * 0.0
        while floor < high:
            middle = floor + (high - floor) * 0.5
            middle = tl.where(middle > floor, middle, high)
            count, mass, least, most = _above(values, size, top, temperature, middle, BLOCK)
            if count >= top_k:
                floor = least
            else:
                high = most
                beyond = count
                heavier = mass
        # of equal logits at the floor only as many count as top_k leaves room for
        target = top_p * (heavier + (top_k - beyond).to(tl.float64) * tl.exp(floor).to(tl.float64))
    if top_p < 1.0:
        high = 0.0
        while floor < high:
            middle = floor + (high - floor) * 0.5
            middle = tl.where(middle > floor, middle, high)
            count, mass, least, most = _above(values, size, top, temperature, middle, BLOCK)
            if mass >= target:
                floor = least
            else:
                high = most
    return floor


@triton.jit
def _weights(values, at, size, top, temperature, floor):
    found = tl.load(values + at, mask=at < size, other=float("-inf")).to(tl.float32)
    scaled = _scaled(found, top, temperature)
    return tl.where(scaled >= floor, tl.exp(scaled), 0.0).to(tl.float64)


@triton.jit
def _first(values, size, top, temperature, floor, share, BLOCK: tl.constexpr):
    # The first place at which the weights of what stays reach their `share`.
    total = tl.sum(tl.zeros([1], tl.float64), 0)
    for start in range(0, size, BLOCK):
        total += tl.sum(_weights(values, start + tl.arange(0, BLOCK), size, top, temperature, floor), 0)
    goal = share * total
    reached = total * 0.0
    found = size
    behind = 0  # the last place with any weight, for a sum that rounding has left short
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weights = _weights(values, at, size, top, temperature, floor)
        sums = reached + tl.cumsum(weights, 0)
        found = tl.minimum(found, tl.min(tl.where((sums > goal) & (weights > 0.0), at, size), 0))
        behind = tl.maximum(behind, tl.max(tl.where(weights > 0.0, at, 0), 0))
        reached += tl.sum(weights, 0)
    return tl.minimum(found, behind)


@triton.jit
def pick(
    logits,
    row_stride,
    temperatures,
    top_ks,
    log_min_ps,
    top_ps,
    noises,
    tops,
    places,
    masses,
    bounds,
    likely,
    likely_ids,
    chosen,
    rows,
    last,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
):
    # chosen [rows] int64: a token, -1 where the logits are not finite; KEEP: also into last[rows[...]].
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PIECES)
    live = number < pieces
    all_tops = tl.load(tops + row * pieces + number, mask=live, other=float("-inf"))
    top = tl.max(all_tops, 0)
    temperature = tl.load(temperatures + row)
    token = tl.min(tl.load(places + row * pieces + number, mask=live & (all_tops == top), other=2147483647), 0)
    if (top == float("inf")) | (top == float("-inf")):
        token = -1
    elif temperature > 0.0:
        noise = tl.load(noises + row)
        top_k = tl.load(top_ks + row)
        log_min_p = tl.load(log_min_ps + row)
        top_p = tl.load(top_ps + row)
        mass = tl.load(masses + row * pieces + number, mask=live, other=0.0)
        line = logits + row * row_stride
        if (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")):
            total = tl.sum(mass, 0)
            bound = tl.max(tl.load(bounds + row * pieces + number, mask=live, other=LIKELY), 0)
            known = likely + row * pieces * LISTED
            slots = pieces * LISTED
            there, weight, _least, _most = _above(known, slots, top, temperature, bound, BLOCK)
            enough = there >= top_k
            if top_k == 0:
                enough = (top_p >= 1.0) | (weight >= top_p * total)
                enough = enough & ((top_p < 1.0) | (log_min_p >= bound))
            if enough & (there > 0):
                floor = _floor(known, slots, top, temperature, bound, top_k, top_p, total, BLOCK)
                floor = tl.maximum(floor, log_min_p)
                place = _first(known, slots, top, temperature, floor, noise, BLOCK)
                token = tl.load(likely_ids + row * slots + place)
            else:
                floor = _floor(line, vocab, top, temperature, BOTTOM, top_k, top_p, total, BLOCK)
                floor = tl.maximum(floor, log_min_p)
                token = _first(line, vocab, top, temperature, floor, noise, BLOCK)
        else:
            sums = tl.cumsum(mass, 0)
            goal = noise * tl.sum(mass, 0)
            last_piece = tl.max(tl.where(mass > 0.0, number, 0), 0)
            piece = tl.minimum(tl.min(tl.where((sums > goal) & (mass > 0.0), number, PIECES), 0), last_piece)
            before = tl.sum(tl.where(number < piece, mass, 0.0), 0)
            at = piece * PIECE + tl.arange(0, PIECE)
            weights = _weights(line, at, vocab, top, temperature, float("-inf"))
            reached = before + tl.cumsum(weights, 0)
            found = tl.min(tl.where((reached > goal) & (weights > 0.0), at, 2147483647), 0)
            token = tl.minimum(found, tl.max(tl.where(weights > 0.0, at, 0), 0))
    tl.store(chosen + row, token)
    if KEEP:
        tl.store(last + tl.load(rows + row), token)
