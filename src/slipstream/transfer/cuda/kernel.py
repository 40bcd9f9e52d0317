"""Moves any number of runs of bytes with one launch.

Two kernels. `move_equal` moves runs of one length that is a multiple of 16 bytes, at offsets that are too: KV pages, or
the same heads of each. A program moves a tile at a time: some whole short runs, or a part of a long one; the tile is as
large as its registers allow, since what keeps a link busy is the number of bytes that are under way. It fetches the
offsets of its next tile before it waits for the data of this one. `move_any` moves runs of any lengths at any offsets,
16 bytes at a time where both ends allow it and the rest byte by byte.

Addresses are integers: a peer's pool is mapped here, and the launcher would refuse a tensor of another device. The
number of programs is a setting (`launcher.CopySettings`): more of them fill the link, fewer leave room for the model.

GPUs with a bulk copy unit use `bulk.cu` for what is aligned. Imported when a kernel of these is first needed: needs
triton.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit(do_not_specialize=["runs", "pairs", "chunks"])
def move_equal(source_at, destination_at, lists_at, runs, pairs, chunks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # lists_at: `runs` source offsets, then as many destination offsets, int64, in bytes, multiples of 16.
    # pairs: 16-byte words of a run. A tile is ROWS runs of COLUMNS 8-byte words; `chunks` tiles in a row make a run.
    source = source_at.to(tl.pointer_type(tl.int64))
    destination = destination_at.to(tl.pointer_type(tl.int64))
    offsets = lists_at.to(tl.pointer_type(tl.int64))
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    words = pairs * 2
    tiles = tl.cdiv(runs, ROWS) * chunks
    tile = tl.program_id(0)
    run = (tile // chunks) * ROWS + row
    from_byte = tl.load(offsets + run, mask=run < runs, other=0)
    to_byte = tl.load(offsets + runs + run, mask=run < runs, other=0)
    while tile < tiles:
        following = tile + tl.num_programs(0)
        next_run = (following // chunks) * ROWS + row
        next_from = tl.load(offsets + next_run, mask=next_run < runs, other=0)
        next_to = tl.load(offsets + runs + next_run, mask=next_run < runs, other=0)
        within = (tile % chunks) * COLUMNS + column
        live = (run < runs)[:, None] & (within < words)[None, :]
        from_word, to_word = from_byte // 8, to_byte // 8
        # A base that comes as an integer has no known alignment; said here, a lane moves 16 bytes and not 8.
        reading = tl.multiple_of(source + from_word[:, None] + within[None, :], (1, 16))
        writing = tl.multiple_of(destination + to_word[:, None] + within[None, :], (1, 16))
        data = tl.load(reading, mask=live, eviction_policy="evict_first")
        tl.store(writing, data, mask=live, eviction_policy="evict_first")
        run, from_byte, to_byte, tile = next_run, next_from, next_to, following


@triton.jit(do_not_specialize=["runs"])
def move_any(source_at, destination_at, lists_at, runs, WORDS: tl.constexpr, BYTES: tl.constexpr):
    # lists_at: `runs` source offsets, then as many destination offsets, then lengths, int64, in bytes.
    columns = lists_at.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, WORDS)
    small = tl.arange(0, BYTES)
    tail = tl.arange(0, 16)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        source = source_at + tl.load(columns + run)
        destination = destination_at + tl.load(columns + runs + run)
        length = tl.load(columns + 2 * runs + run)
        source_bytes = source.to(tl.pointer_type(tl.uint8))
        destination_bytes = destination.to(tl.pointer_type(tl.uint8))
        if ((source | destination) & 15) == 0:
            source_words = source.to(tl.pointer_type(tl.int64))
            destination_words = destination.to(tl.pointer_type(tl.int64))
            words = (length // 16) * 2
            for start in range(0, words, WORDS):
                live = start + lane < words
                reading = tl.multiple_of(source_words + start + lane, 16)
                writing = tl.multiple_of(destination_words + start + lane, 16)
                data = tl.load(reading, mask=live, eviction_policy="evict_first")
                tl.store(writing, data, mask=live, eviction_policy="evict_first")
            rest = words * 8 + tail
            byte = tl.load(source_bytes + rest, mask=rest < length)
            tl.store(destination_bytes + rest, byte, mask=rest < length)
        else:
            for start in range(0, length, BYTES):
                live = start + small < length
                data = tl.load(source_bytes + start + small, mask=live)
                tl.store(destination_bytes + start + small, data, mask=live)


def equal_tile(length: int, tile_bytes: int) -> tuple[int, int, int]:
    """(ROWS, COLUMNS, chunks) for runs of `length` bytes: whole runs side by side, or one run in several tiles."""
    columns = min(triton.next_power_of_2(max(length, 16)), tile_bytes) // 8
    rows = tile_bytes // 8 // columns
    return rows, columns, -(-length // (columns * 8))
