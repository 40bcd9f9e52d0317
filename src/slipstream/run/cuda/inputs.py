"""The integers of a step on their way to the device: one buffer, filled in place, one copy.

All of a step's token ids, positions, lengths and block tables are int32 in one pinned buffer with a twin on the device.
Each column begins at a multiple of four numbers, so that kernels see the same alignment every time. Of decode steps the
layout is fixed, because captured graphs know the addresses; only the width of the block tables varies, and is part of
the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.plan import IntArray, StepPlan

ALIGNED = 4
ROW_BLOCK = 128  # tokens at a multiple of which a sequence begins when sequences are laid out


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


class StagedInts:
    """`capacity` int32 on the host, pinned where there is a GPU, and on the device. `send` copies the first of them."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._pinned = torch.zeros(capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.host = self._pinned.numpy()
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)

    def send(self, count: int) -> None:
        self.device[:count].copy_(self._pinned[:count], non_blocking=True)


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """One new token a sequence. `width_at` [1] holds the width of `tables` [sequences, width], flat."""

    token_ids: Tensor  # [sequences]
    lengths: Tensor  # [sequences], the new token included
    tables: Tensor
    width_at: Tensor

    def first(self, sequences: int) -> DecodeColumns:
        return DecodeColumns(self.token_ids[:sequences], self.lengths[:sequences], self.tables, self.width_at)


class DecodeInputs:
    """The columns of decode steps of up to `sequences` sequences and `max_pages` pages each, at fixed addresses."""

    def __init__(self, sequences: int, max_pages: int, device: torch.device) -> None:
        self.room = aligned(sequences)
        self._tables_at = ALIGNED + 2 * self.room
        self._staged = StagedInts(self._tables_at + aligned(sequences * max_pages), device)
        ints = self._staged.device
        self.columns = DecodeColumns(
            token_ids=ints[ALIGNED : ALIGNED + self.room],
            lengths=ints[ALIGNED + self.room : self._tables_at],
            tables=ints[self._tables_at :],
            width_at=ints[:1],
        )

    def fill(self, plan: StepPlan, size: int) -> None:
        """Sends a plan of one token a sequence, padded to `size` with sequences of one token in the scratch page."""
        host, room, count = self._staged.host, self.room, plan.sequences
        width = plan.block_tables.shape[1]
        host[0] = width
        ids = host[ALIGNED : ALIGNED + size]
        ids[:count] = plan.token_ids
        ids[count:] = 0
        lengths = host[ALIGNED + room : ALIGNED + room + size]
        lengths[:count] = plan.context_lens
        lengths[count:] = 1
        end = self._tables_at + size * width
        tables = host[self._tables_at : end].reshape(size, width)
        tables[:count] = plan.block_tables
        tables[count:] = 0
        self._staged.send(end)


@dataclass(frozen=True, slots=True)
class MixedColumns:
    """A step of `decodes` sequences with one new token each, first, and of chunks of prompts behind them."""

    token_ids: Tensor  # [tokens]
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


class MixedInputs:
    """The columns of any step. The buffers grow when a step needs more than the largest before it."""

    def __init__(self, page_tokens: int, device: torch.device) -> None:
        self.page_tokens, self.device = page_tokens, device
        self._staged = StagedInts(1 << 12, device)

    def fill(self, plan: StepPlan) -> MixedColumns:
        counts = np.diff(plan.query_start)
        decodes = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
        chunk_counts = counts[decodes:]
        width = plan.block_tables.shape[1]
        sequence = np.repeat(np.arange(decodes, plan.sequences), chunk_counts)
        positions = plan.positions[decodes:]
        contexts = plan.context_lens[decodes:]
        ends = np.cumsum(-(-contexts // ROW_BLOCK) * ROW_BLOCK)
        columns: list[IntArray] = [
            plan.token_ids,
            np.array([width]),
            plan.context_lens[:decodes],
            plan.block_tables[:decodes].reshape(-1),
            positions,
            plan.block_tables[sequence, positions // self.page_tokens],
            plan.query_start[decodes:] - decodes,
            contexts,
            np.concatenate([[0], ends[:-1]]) if len(ends) else ends,
            plan.block_tables[decodes:].reshape(-1),
        ]
        ids, width_at, decode_lengths, decode_tables, *chunks = self._send(columns)
        decode = DecodeColumns(ids[:decodes], decode_lengths, decode_tables, width_at) if decodes else None
        return MixedColumns(
            ids,
            decode,
            *chunks,
            width=width,
            decodes=decodes,
            longest=int(chunk_counts.max(initial=0)),
            longest_context=int(contexts.max(initial=0)),
            laid_out=int(ends[-1]) if len(ends) else 0,
        )

    def _send(self, columns: list[IntArray]) -> list[Tensor]:
        starts = np.cumsum([0] + [aligned(len(column)) for column in columns])
        if starts[-1] > self._staged.capacity:
            self._staged = StagedInts(2 * int(starts[-1]), self.device)
        for start, column in zip(starts, columns, strict=False):
            self._staged.host[start : start + len(column)] = column
        self._staged.send(int(starts[-1]))
        ints = self._staged.device
        return [ints[start : start + len(column)] for start, column in zip(starts, columns, strict=False)]
