"""How the contexts of a decode step are divided among the programs of its attention.

A step's attention has a fixed number of programs a KV head (`shapes.decode_programs`), as captured graphs want it.
Which part of which sequence each of them reads is decided on the host for every step, from the lengths: the parts are
as nearly equal as that number of programs allows, so that one long context among short ones is read by many programs
instead of being waited for. `Shares` are those numbers; the kernel (`kernels.decode`) finds the tokens of its part
from them and from the length on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.run.cuda.kernels import shapes

SHARE_BITS = 8  # of a program's number: the part's place within its sequence; its sequence stands above
NOBODY = -1  # a program that has nothing to do
TRIES = 24  # lengths of a part that are looked at, between the shortest that could do and the longest sequence


class Shares(NamedTuple):
    """`programs` [programs]: sequence << SHARE_BITS | part, the parts of a sequence one behind the other, or NOBODY.
    `parts` [sequences]: how many each sequence has."""

    programs: NDArray[np.int32]
    parts: NDArray[np.int32]


NO_SHARES = Shares(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))  # of a step in which nobody decodes


def shared_out(contexts: NDArray[np.int64], kv_heads: int, size: int) -> Shares:
    """Those of a step of `size` sequences, of which the first have so many tokens each, the new one included; the
    others, which fill the step up, have one token."""
    tile = shapes.decode_shape(size * kv_heads)[1]
    room = shapes.decode_programs(size, kv_heads)
    tiles = np.ones(size, dtype=np.int64)
    tiles[: len(contexts)] = np.maximum(1, -(-(np.asarray(contexts) - 1) // tile))
    parts = parts_of(tiles, room)
    sequence = np.repeat(np.arange(size), parts)
    starts = np.cumsum(parts) - parts
    programs = np.full(room, NOBODY, dtype=np.int32)
    programs[: len(sequence)] = sequence << SHARE_BITS | np.arange(len(sequence)) - starts[sequence]
    return Shares(programs, parts.astype(np.int32))


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
