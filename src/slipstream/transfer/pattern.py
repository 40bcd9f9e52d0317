"""The bytes of a preflight: a pattern that both sides can make from a seed, and the way it is scattered.

The source fills an area with the pattern and copies its blocks in another order, so that a transport that ignores
offsets fails. The destination knows what has to lie where, and that the guard zones around must be as it left them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.transfer.transports.base import Runs

BLANK = 0xA5
GUARD = 64
BLOCKS = 16


def pattern(seed: int, size: int) -> NDArray[np.uint8]:
    """`size` bytes, the same for the same seed everywhere (PCG64's raw output is stable across numpy versions)."""
    return np.random.PCG64(seed).random_raw(-(-size // 8)).view(np.uint8)[:size]


def block_size(area: int, page_bytes: int) -> int:
    """Size of the blocks that an area is cut into: a page, unless fewer than BLOCKS would fit; a multiple of 64."""
    return max(64, min(page_bytes, area // BLOCKS) // 64 * 64)


def scatter(seed: int, size: int, block: int) -> Runs:
    """Runs inside an area of `size` bytes: block i goes to the i-th place of a seeded permutation.

    The last block may be short and stays where it is.
    """
    whole = size // block
    places = np.argsort(np.random.PCG64(seed + 1).random_raw(whole), kind="stable") if whole else np.zeros(0, np.int64)
    source = np.arange(whole, dtype=np.int64) * block
    destination = places.astype(np.int64) * block
    length = np.full(whole, block, np.int64)
    rest = size - whole * block
    if rest:
        tail = np.array([whole * block], np.int64)
        source, destination = np.concatenate((source, tail)), np.concatenate((destination, tail))
        length = np.append(length, rest)
    return Runs(source, destination, length)


def scattered(seed: int, size: int, block: int) -> NDArray[np.uint8]:
    """What the destination area must hold."""
    data, runs = pattern(seed, size), scatter(seed, size, block)
    area = np.empty(size, np.uint8)
    whole = size // block
    blocks = area[: whole * block].reshape(whole, block)
    blocks[runs.destination[:whole] // block] = data[: whole * block].reshape(whole, block)
    area[whole * block :] = data[whole * block :]
    return area


def check(found: NDArray[np.uint8], guards: int, seed: int, block: int) -> str:
    """What is wrong with an area that should hold the pattern between two guard zones; empty when nothing is."""
    size = len(found) - 2 * guards
    inside = found[guards : guards + size]
    wrong = np.flatnonzero(inside != scattered(seed, size, block))
    if len(wrong):
        never = int((inside[wrong] == BLANK).sum())
        return (
            f"{len(wrong)} of {size} bytes are wrong, the first at offset {int(wrong[0])} ({never} were never written)"
        )
    stray = int((found[:guards] != BLANK).sum() + (found[guards + size :] != BLANK).sum())
    return f"{stray} bytes outside the written area were changed" if stray else ""
