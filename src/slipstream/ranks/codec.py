"""Orders of rank 0 as bytes: step plans and copies, as they travel to the other ranks of a worker.

An order is a short header in msgpack and columns behind it. Columns are int32 on the way, which holds every token id,
position and page, and int64 again when they arrive. A test compares the fields here with those of `StepPlan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.engine.plan import IntArray, NewRow, StepPlan

COLUMNS = ("token_ids", "positions", "query_start", "context_lens", "block_tables", "rows")
HEADER = 4  # bytes that say how long the header is


class PlanOrder(msgspec.Struct, frozen=True, tag="plan"):
    """Execute a step. `checked` is an earlier step and the checksum of the tokens that rank 0 has sampled in it."""

    step: int
    lengths: list[int]  # of the columns, in their order
    width: int  # of the block tables
    new_rows: list[NewRow]
    freed_rows: list[int]
    prompt_logprobs: dict[int, int]  # sequence -> length of its column, behind the others in this order
    checked: tuple[int, int] | None


class CopyOrder(msgspec.Struct, frozen=True, tag="copy"):
    """Copy pages to a peer once step `after` is computed; the answer names `job`."""

    job: int
    peer: str
    xfer: int
    after: int
    pages: int


class StopOrder(msgspec.Struct, frozen=True, tag="stop"):
    """Collect what is under way and end."""


Header = PlanOrder | CopyOrder | StopOrder
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_plan(plan: StepPlan, checked: tuple[int, int] | None = None) -> list[bytes]:
    """The parts of a plan's order, to be written one behind the other."""
    columns = [np.asarray(getattr(plan, name)) for name in COLUMNS]
    targets = list(plan.prompt_logprobs.items())
    header = PlanOrder(
        step=plan.step,
        lengths=[column.size for column in columns],
        width=plan.block_tables.shape[1],
        new_rows=plan.new_rows,
        freed_rows=plan.freed_rows,
        prompt_logprobs={index: len(column) for index, column in targets},
        checked=checked,
    )
    parts = [_int32(column) for column in (*columns, *(column for _, column in targets))]
    return [*_head(header), *parts, np.ascontiguousarray(plan.sample, dtype=np.bool_).tobytes()]


def encode_copy(order: CopyOrder, source_pages: Sequence[int], destination_pages: Sequence[int]) -> list[bytes]:
    return [*_head(order), _int32(np.asarray(source_pages)), _int32(np.asarray(destination_pages))]


def encode_stop() -> list[bytes]:
    return _head(StopOrder())


def _head(header: Header) -> list[bytes]:
    body = _encoder.encode(header)
    return [len(body).to_bytes(HEADER, "little"), body]


def _int32(column: NDArray[Any]) -> bytes:
    return column.astype(np.int32).tobytes()


def decode(order: bytes) -> tuple[Header, Any]:
    """The header, and with it the StepPlan or the lists (source pages, destination pages).

    Raises ValueError or msgspec.MsgspecError on anything that this module has not written.
    """
    at = HEADER + int.from_bytes(order[:HEADER], "little")
    header = _decoder.decode(order[HEADER:at])
    match header:
        case PlanOrder():
            return header, _plan(header, order, at)
        case CopyOrder():
            pages = np.frombuffer(order, np.int32, 2 * header.pages, at)
            return header, (pages[: header.pages], pages[header.pages :])
        case StopOrder():
            return header, None


def _plan(header: PlanOrder, order: bytes, at: int) -> StepPlan:
    lengths = [*header.lengths, *header.prompt_logprobs.values()]
    numbers: IntArray = np.frombuffer(order, np.int32, sum(lengths), at).astype(np.int64)
    ends = list(itertools.accumulate(lengths))
    columns = [numbers[end - length : end] for length, end in zip(lengths, ends, strict=True)]
    named = dict(zip(COLUMNS, columns, strict=False))
    named["block_tables"] = named["block_tables"].reshape(-1, header.width)
    targets = columns[len(COLUMNS) :]
    return StepPlan(
        step=header.step,
        sample=np.frombuffer(order, np.bool_, len(named["rows"]), at + 4 * len(numbers)).copy(),
        new_rows=header.new_rows,
        freed_rows=header.freed_rows,
        prompt_logprobs=dict(zip(header.prompt_logprobs, targets, strict=True)),
        **named,
    )
