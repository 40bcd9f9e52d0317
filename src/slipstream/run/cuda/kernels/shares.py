"""How the contexts of a decode step are divided among the programs of its attention.

A step's attention has a fixed number of programs a KV head (`shapes.decode_programs`), as captured graphs want it.
Which part of which sequence each of them reads is decided on the host for every step, from the lengths: the parts are
as nearly equal as that number of programs allows, so that one long context among short ones is read by many programs
instead of being waited for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.run.cuda.kernels import shapes

NUMBERS = 4  # of a program: its sequence, the part that it reads, the parts there are, the tokens of the sequence
TRIES = 24  # lengths of a part that are looked at, between the shortest that could do and the longest sequence


def shared_out(contexts: NDArray[np.int64], kv_heads: int, size: int) -> NDArray[np.int32]:
    """[programs, NUMBERS] of a step of `size` sequences, of which the first have so many tokens each, the new one
    included; the others, which fill the step up, have one token.

    The parts of a sequence are one behind the other. A program that has nothing to do has a sequence of no tokens.
    """
    tile = shapes.decode_shape(size * kv_heads)[1]
    lengths = np.ones(size, dtype=np.int64)
    lengths[: len(contexts)] = contexts
    parts = parts_of(np.maximum(1, -(-(lengths - 1) // tile)), shapes.decode_programs(size, kv_heads))
    sequence = np.repeat(np.arange(size), parts)
    used = len(sequence)
    found = np.zeros((shapes.decode_programs(size, kv_heads), NUMBERS), dtype=np.int32)
    found[:used, 0] = sequence
    found[:used, 1] = np.arange(used) - (np.cumsum(parts) - parts)[sequence]
    found[:used, 2] = parts[sequence]
    found[:used, 3] = lengths[sequence]
    return found


def parts_of(tiles: NDArray[np.int64], programs: int) -> NDArray[np.int64]:
    """Parts of each sequence of so many tiles, at most `programs` together and `shapes.MOST_SPLITS` each, so that the
    longest part is about as short as that allows. `programs` are at least as many as sequences."""
    longest = int(tiles.max())
    least = max(-(-int(tiles.sum()) // programs), -(-longest // shapes.MOST_SPLITS))
    parts = -(-tiles // least)
    if int(parts.sum()) <= programs:
        return parts
    lengths = np.unique(np.geomspace(least, longest, TRIES).astype(np.int64))
    tried = -(-tiles[None, :] // lengths[:, None])
    fits = tried.sum(1) <= programs  # the last one does: a part a sequence
    return tried[int(fits.argmax())]
