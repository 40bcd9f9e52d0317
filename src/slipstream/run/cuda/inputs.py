"""The numbers of a step on their way to the device: one buffer, filled in place, one copy.

All of a step's token ids, positions, lengths and block tables are int32 in one pinned buffer with a twin on the device,
and what sampling has to know of each row lies among them. Each column begins at a multiple of four numbers, so that
kernels see the same alignment every time. Of decode steps the layout is fixed, because captured graphs know the
addresses; only the width of the block tables varies, and is part of the data.

Two steps may be under way: the pinned buffer of one may still be read while that of the next is filled, so there are
two that take turns. The device's is one: its stream brings the next step's numbers behind the step that reads the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.plan import IntArray, StepPlan, scratch_plan
from slipstream.run.cuda.kernels.shapes import decode_programs
from slipstream.run.cuda.kernels.shares import NONE, NUMBERS, Division
from slipstream.run.sampler import DRAW_COLUMNS, DrawColumns

ALIGNED = 4
DRAW_KINDS = (torch.float32, torch.int32, torch.float32, torch.float64, torch.float64)  # of DrawColumns
HOST_KINDS = (np.float32, np.int32, np.float32, np.float64, np.float64)
ROW_BLOCK = 128  # tokens at a multiple of which a sequence begins when sequences are laid out


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


class StagedInts:
    """`capacity` int32 on the device, and two buffers for them on the host, pinned where there is a GPU.

    `turn` gives the one to fill next, whose last step has to have been collected; `send` copies the first of it.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._pinned = [torch.zeros(capacity, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)

    def turn(self) -> NDArray[np.int32]:
        self._pinned.reverse()
        return self._pinned[0].numpy()

    def send(self, count: int) -> None:
        self.device[:count].copy_(self._pinned[0][:count], non_blocking=True)


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """One new token a sequence. `width_at` [1] holds the width of `tables` [sequences, width], flat.

    `shares` [programs * NUMBERS] is how attention is divided, as `shares.Division` does it.
    """

    token_ids: Tensor  # [sequences]; negative: the last token of the row, until `TokenOps.feed` has put it there
    lengths: Tensor  # [sequences], the new token included
    tables: Tensor
    width_at: Tensor
    rows: Tensor  # [sequences]
    shares: Tensor

    def first(self, sequences: int) -> DecodeColumns:
        some = self.token_ids[:sequences], self.lengths[:sequences], self.tables, self.width_at
        return DecodeColumns(*some, self.rows[:sequences], self.shares)


class DecodeInputs:
    """The columns of decode steps of up to `sequences` sequences and `max_pages` pages each, at fixed addresses.

    `columns` and `how` are on the device. Sequences that fill a step up to a size of a graph have the row `spare`.
    Until the first plan there is nothing for any program to do.
    """

    def __init__(self, sequences: int, max_pages: int, kv_heads: int, device: torch.device, spare: int = 0) -> None:
        self.room = room = aligned(sequences)
        self.spare, self._division = spare, Division(kv_heads)
        programs = max(decode_programs(size, kv_heads) for size in range(1, sequences + 1))
        self._shares_at = ALIGNED + 10 * room
        self._tables_at = self._shares_at + aligned(NUMBERS * programs)
        self._staged = StagedInts(self._tables_at + aligned(sequences * max_pages), device)
        ints = self._staged.device
        ids, lengths, rows, *settings = ints[ALIGNED : self._shares_at].split([room] * 6 + [2 * room] * 2)
        shares, tables = ints[self._shares_at : self._tables_at], ints[self._tables_at :]
        self.columns = DecodeColumns(ids, lengths, tables, ints[:1], rows, shares)
        self.how = DrawColumns(*(part.view(kind) for part, kind in zip(settings, DRAW_KINDS, strict=True)))

    def fill(self, plan: StepPlan, size: int, how: DrawColumns | None = None) -> None:
        """Sends a plan of one token a sequence, padded to `size` with sequences of one token in the scratch page.

        Without `how` the most likely tokens are drawn.
        """
        host, room, count = self._staged.turn(), self.room, plan.sequences
        width = plan.block_tables.shape[1]
        host[0] = width
        values = plan.token_ids, plan.context_lens, plan.rows
        for number, (column, filling) in enumerate(zip(values, (0, 1, self.spare), strict=True)):
            start = ALIGNED + number * room
            host[start : start + count] = column
            host[start + count : start + size] = filling
        shares = self._division.of(plan.context_lens, size)
        host[self._shares_at : self._shares_at + shares.size] = shares.reshape(-1)
        settings = host[ALIGNED + 3 * room : self._shares_at]
        settings[:size] = 0  # temperatures, as float32
        if how is not None:
            for name, kind, start in zip(DRAW_COLUMNS, HOST_KINDS, (0, 1, 2, 3, 5), strict=True):
                settings[start * room :].view(kind)[:count] = getattr(how, name)
        end = self._tables_at + size * width
        tables = host[self._tables_at : end].reshape(size, width)
        tables[:count] = plan.block_tables
        tables[count:] = 0
        self._staged.send(end)


@dataclass(frozen=True, slots=True)
class HostChunks:
    """The chunks of a step on the host, for schedules that are made there."""

    query_start: IntArray  # [chunks + 1] within the chunk tokens
    lengths: IntArray  # [chunks]
    tables: IntArray  # [chunks, width]


@dataclass(frozen=True, slots=True)
class MixedColumns:
    """A step of `decodes` sequences with one new token each, first, and of chunks of prompts behind them."""

    token_ids: Tensor  # [tokens], or more: zeros behind them
    decode: DecodeColumns | None
    positions: Tensor  # [chunk tokens]
    pages: Tensor  # [chunk tokens] where each token's keys and values go
    query_start: Tensor  # [chunks + 1] within the chunk tokens
    lengths: Tensor  # [chunks]
    starts: Tensor  # [chunks] where each sequence begins when all are laid out one behind the other
    tables: Tensor  # [chunks * width]
    width: int
    decodes: int
    longest: int  # new tokens of the longest chunk; 0 when there is none
    longest_context: int  # and all tokens of the longest sequence with a chunk
    laid_out: int  # rows of all sequences with chunks, each rounded up to ROW_BLOCK
    chunks: HostChunks


class MixedInputs:
    """The columns of any step. The buffers grow when a step needs more than the largest before it."""

    def __init__(self, page_tokens: int, kv_heads: int, device: torch.device) -> None:
        self.page_tokens, self.device = page_tokens, device
        self._division = Division(kv_heads)
        self._staged = StagedInts(1 << 12, device)

    def fill(self, plan: StepPlan, room: int = 0) -> MixedColumns:
        """Sends a plan; to its token ids, and to nothing else, zeros are added up to `room` of them."""
        counts = np.diff(plan.query_start)
        decodes = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
        chunk_counts = counts[decodes:]
        width = plan.block_tables.shape[1]
        sequence = np.repeat(np.arange(decodes, plan.sequences), chunk_counts)
        positions = plan.positions[decodes:]
        contexts = plan.context_lens[decodes:]
        ends = np.cumsum(-(-contexts // ROW_BLOCK) * ROW_BLOCK)
        shares = self._division.of(plan.context_lens[:decodes], decodes) if decodes else NONE
        columns: list[NDArray[Any]] = [
            np.concatenate([plan.token_ids, np.zeros(max(0, room - len(plan.token_ids)), dtype=np.int64)]),
            np.array([width]),
            plan.context_lens[:decodes],
            plan.block_tables[:decodes].reshape(-1),
            plan.rows[:decodes],
            shares.reshape(-1),
            positions,
            plan.block_tables[sequence, positions // self.page_tokens],
            plan.query_start[decodes:] - decodes,
            contexts,
            np.concatenate([[0], ends[:-1]]) if len(ends) else ends,
            plan.block_tables[decodes:].reshape(-1),
        ]
        ids, width_at, decode_lengths, decode_tables, rows, parts, *chunks = self._send(columns)
        some = decode_lengths, decode_tables, width_at, rows, parts
        decode = DecodeColumns(ids[:decodes], *some) if decodes else None
        return MixedColumns(
            ids,
            decode,
            *chunks,
            width=width,
            decodes=decodes,
            longest=int(chunk_counts.max(initial=0)),
            longest_context=int(contexts.max(initial=0)),
            laid_out=int(ends[-1]) if len(ends) else 0,
            chunks=HostChunks(plan.query_start[decodes:] - decodes, contexts, plan.block_tables[decodes:]),
        )

    def _send(self, columns: list[NDArray[Any]]) -> list[Tensor]:
        starts = np.cumsum([0] + [aligned(len(column)) for column in columns])
        if starts[-1] > self._staged.capacity:
            self._staged = StagedInts(2 * int(starts[-1]), self.device)
        host = self._staged.turn()
        for start, column in zip(starts, columns, strict=False):
            host[start : start + len(column)] = column
        self._staged.send(int(starts[-1]))
        ints = self._staged.device
        return [ints[start : start + len(column)] for start, column in zip(starts, columns, strict=False)]


def scratch_prompt(tokens: int, page_tokens: int) -> StepPlan:
    """A prompt that computes in the scratch page and whose sequence nobody knows."""
    return scratch_plan([(0, 0, tokens)], page_tokens, sample=False)
