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
NONE: NDArray[np.int32] = np.zeros((0, NUMBERS), dtype=np.int32)  # of a step in which nobody decodes
NO_SEQUENCE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
TRIES = 24  # lengths of a part that are looked at, between the shortest that could do and the longest sequence


class Division:
    """Divides the contexts of one decode step after the other among programs, for `kv_heads` KV heads.

    From one step to the next lengths grow by one, and most of the time nothing else changes: how the last step of each
    size was divided is kept.
    """

    def __init__(self, kv_heads: int) -> None:
        self._kv_heads = kv_heads
        self._last: dict[int, tuple[bytes, NDArray[np.int32], NDArray[np.int64]]] = {}

    def of(self, contexts: NDArray[np.int64], size: int) -> NDArray[np.int32]:
        """[programs, NUMBERS] of a step of `size` sequences, of which the first have so many tokens each, the new one
        included; the others, which fill the step up, have one token. It stays as it is until the next of that size.

        The parts of a sequence are one behind the other. A program that has nothing to do has a sequence of no tokens.
        """
        tile = shapes.decode_shape(size * self._kv_heads)[1]
        lengths = np.ones(size, dtype=np.int64)
        lengths[: len(contexts)] = contexts
        tiles = np.maximum(1, (lengths + (tile - 2)) // tile)  # of what was there before the new token
        known, found, sequence = self._last.get(size, (b"", NONE, NO_SEQUENCE))
        if known != tiles.tobytes():
            found, sequence = shared_out(tiles, shapes.decode_programs(size, self._kv_heads))
            self._last[size] = tiles.tobytes(), found, sequence
        found[: len(sequence), 3] = lengths[sequence]
        return found


def shared_out(tiles: NDArray[np.int64], programs: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """[programs, NUMBERS], without the tokens, of sequences of so many tiles; and the sequence of each program."""
    parts = parts_of(tiles, programs)
    sequence = np.repeat(np.arange(len(tiles)), parts)
    found = np.zeros((programs, NUMBERS), dtype=np.int32)
    used = found[: len(sequence)]
    used[:, 0] = sequence
    used[:, 1] = np.arange(len(sequence)) - (np.cumsum(parts) - parts)[sequence]
    used[:, 2] = parts[sequence]
    return found, sequence


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
