"""Shapes of programs: how much of the work one of them takes at a time, as `scripts/gpu_shapes.py` measured it.

And where a product is the kernels' own business rather than cuBLAS's. The kernels are right with other shapes too.
"""

from __future__ import annotations

import torch

DECODE_PROGRAMS = 512  # measured on an H200: more splits than fill the chip so far cost more than they hide,
LARGE_PROGRAMS = 256  # and of those that take 128 tokens at a time, one of which fills a multiprocessor, fewer do so
SPARE_PROGRAMS = 256  # for parts of long sequences, where there are so many that each has a program of its own
MOST_SPLITS = 64
MOST_ROWS = 64  # of `few_rows`
LEAST_ROOM = 16  # rows that the kernel is compiled for at least: 8 are hardly faster, and one more to compile
WIDE = 1 << 16  # outputs of a product that only the head of a model has

# One number of rows for each kernel that products have, whatever their weights: one row, the three rooms of `few_rows`
# (its shapes and `few_rows_pay` change between these rooms and nowhere else), and more, which are cuBLAS's.
KINDS_OF_ROWS = (1, LEAST_ROOM, 2 * LEAST_ROOM, MOST_ROWS, MOST_ROWS + 1)


def decode_shape(pairs: int) -> tuple[int, int, int, int]:
    """(programs that share the context of one sequence and KV head when all are of one length, tokens they take at a
    time, their warps, and stages), for `pairs` of these."""
    if pairs >= 384:
        return 1, 64, 4, 3
    if pairs <= 32:
        return min(MOST_SPLITS, LARGE_PROGRAMS // pairs), 128, 4, 3
    return max(2, DECODE_PROGRAMS // pairs), 64, 2, 2


def decode_programs(sequences: int, kv_heads: int) -> int:
    """Programs a KV head that attention of decoding has for so many sequences, whatever their lengths."""
    splits = decode_shape(sequences * kv_heads)[0]
    return sequences * splits if splits > 1 else sequences + -(-SPARE_PROGRAMS // kv_heads)


def one_row_shape(outputs: int, inputs: int, gated: bool) -> tuple[int, int, int]:
    """(outputs, inputs at a time, warps) of a program of a product with one row: the best of seven on an H200."""
    if gated:
        return 8, 256, 4
    if inputs >= 2 * outputs:
        return (8, 512, 8) if inputs % 512 == 0 else (2, 1024, 4)
    return 4, 512, 4


def few_rows_pay(outputs: int, inputs: int, rows: int, *, add: bool, gated: bool) -> bool:
    """Whether `few_rows` is faster than cuBLAS, and with one row than `products.one_row`: measured on an H200."""
    if inputs % 8:  # the copy engine wants rows at multiples of 16 bytes
        return False
    if rows == 1:
        return not gated and outputs >= WIDE
    return rows <= 32 or (rows <= MOST_ROWS and not add)


def few_rows_shape(outputs: int, inputs: int, rows: int, gated: bool) -> tuple[int, int, int, int]:
    """(outputs, inputs at a time, stages, shares of the inner dimension) of a program of `few_rows`."""
    if gated:
        return (64, 128, 2, 1) if inputs <= 2048 else (64, 128, 4, 1)
    if outputs >= WIDE:
        return 128, 128, 3, 1
    tiles = -(-outputs // 64)
    programs, least = (256, 2048) if rows <= 16 else (128, 2560)
    splits = max(1, min(programs // tiles, inputs // least))
    return (64, 128, 6, splits) if splits > 1 and inputs >= 8192 else (64, 256, 3, splits)


def paged_shape(dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(query rows, tokens, warps, stages) of a program of prefill attention through the block table."""
    if dtype == torch.float32 or dim > 128:
        return 32, 32, 4, 2
    return 64, 64, 4, 2


def gathered_shape() -> tuple[int, int, int, int]:
    """Likewise over sequences that are laid out."""
    return 64, 64, 4, 3


def prompt_shape(dim: int) -> tuple[int, int]:
    """(tokens of a tile, stages) of a program of `attend`."""
    return (128, 2) if dim == 128 else (128, 4)
