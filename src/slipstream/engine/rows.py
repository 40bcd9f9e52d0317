"""Sampling rows, and the columns of a step plan.

A sequence that computes has a row: a slot in the runner's sampling state and in the arrays here, which mirror what
decoding needs of it (length, last token, block table). So the plan of a decode step is a few indexed reads, however
many sequences there are; only chunks of prompts are laid out one by one.

A plan may be made while the step before is being computed. So a row's length counts the tokens that are being sampled
as well (`pending`), and its last token is FROM_DEVICE until the step that samples it has been settled.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from slipstream.engine.plan import FROM_DEVICE, BoolArray, IntArray, NewRow, StepPlan
from slipstream.engine.sequence import Sequence

ONE = np.ones(1, dtype=np.int64)  # numpy takes longer for a number


class RowTable:
    """`rows` rows whose block tables are `max_pages` wide."""

    def __init__(self, rows: int, max_pages: int, page_tokens: int, eos_ids: tuple[int, ...]) -> None:
        self.length: IntArray = np.zeros(rows, dtype=np.int64)  # tokens of the sequence, pending ones included
        self.last_token: IntArray = np.zeros(rows, dtype=np.int64)  # FROM_DEVICE while it is pending
        self.pending: IntArray = np.zeros(rows, dtype=np.int64)  # tokens that steps under way will sample
        self._room: IntArray = np.zeros(rows, dtype=np.int64)  # tokens that its pages hold
        self._page_count = [0] * rows
        self._yes: BoolArray = np.ones(rows, dtype=np.bool_)
        self._numbers: IntArray = np.arange(rows + 1)
        self._limit: IntArray = np.zeros(rows, dtype=np.int64)
        self._ahead: BoolArray = np.zeros(rows, dtype=np.bool_)  # may be planned before its last token is known
        self._tables: IntArray = np.zeros((rows, max_pages), dtype=np.int64)
        self._page_tokens = page_tokens
        self._eos_ids = eos_ids
        self._free = list(range(rows - 1, -1, -1))
        self._holders: dict[int, Sequence] = {}
        self._new: dict[int, Sequence] = {}  # the runner has not heard of them
        self._freed: list[int] = []
        self._doubtful: set[int] = set()  # rows among the new ones that the runner may have heard of

    @property
    def free(self) -> int:
        return len(self._free)

    def assign(self, sequence: Sequence) -> None:
        """Gives the sequence a row and writes its tokens and pages into it."""
        row = self._free.pop()
        sequence.row = row
        before, count = self._page_count[row], len(sequence.pages)
        self._page_count[row] = count
        if before > count:
            self._tables[row, count:before] = 0
        self._tables[row, :count] = sequence.pages if sequence.page_ids is None else sequence.page_ids
        sequence.page_ids = None
        self._room[row] = count * self._page_tokens
        self._limit[row] = sequence.limit
        self._ahead[row] = not sequence.needs_host
        self._new[row] = self._holders[row] = sequence
        self.rewind(sequence)

    def rewind(self, sequence: Sequence) -> None:
        """Nothing of the sequence is under way (any more): its tokens are those that are known."""
        row = sequence.row
        self.pending[row] = 0
        self.length[row] = len(sequence.tokens)
        self.last_token[row] = sequence.tokens[-1]

    def release(self, sequence: Sequence) -> None:
        """Takes the row back; the runner hears of it with the next plan, if it has heard of the row at all."""
        row, sequence.row = sequence.row, -1
        if row < 0:
            return
        self._free.append(row)
        del self._holders[row]
        if self._new.pop(row, None) is None or row in self._doubtful:
            self._freed.append(row)

    def retell(self, plan: StepPlan) -> None:
        """The runner may not have heard what this plan said of rows, or have counted tokens that nobody got: the next
        plan says it again, of all rows in this one."""
        rows = [*(new.row for new in plan.new_rows), *plan.rows.tolist()]
        self._new |= {row: self._holders[row] for row in rows if row in self._holders}
        self._doubtful = set(self._new)
        self._freed = sorted({*self._freed, *plan.freed_rows})

    def add_page(self, sequence: Sequence, page: int) -> None:
        row = sequence.row
        sequence.pages.append(page)
        self._tables[row, self._page_count[row]] = page
        self._page_count[row] += 1
        self._room[row] += self._page_tokens

    def settle(self, rows: IntArray, tokens: IntArray) -> None:
        """The oldest step under way has sampled `tokens` for `rows`."""
        self.pending[rows] -= 1
        self.last_token[rows] = np.where(self.pending[rows] == 0, tokens, FROM_DEVICE)

    def ready(self, rows: IntArray) -> BoolArray:
        """Which of `rows` can decode now: those whose tokens are known, and those that go on whatever they are."""
        return (self.pending[rows] == 0) | (self._ahead[rows] & (self.length[rows] < self._limit[rows]))

    def lacking_page(self, rows: IntArray) -> list[int]:
        """At which places of `rows` there is one that has no page for its last token yet."""
        return (self.length[rows] > self._room[rows]).nonzero()[0].tolist()

    def plan(self, step: int, decode_rows: IntArray, chunks: list[tuple[Sequence, int]]) -> StepPlan:
        """Columns of a step: one token for each of `decode_rows`, then (sequence, number of tokens) of the chunks.

        From now on what the step samples is pending.
        """
        new_rows = [self._new_row(sequence) for sequence in self._new.values()]
        freed, self._freed = self._freed, []
        self._new.clear()
        self._doubtful.clear()
        contexts = self.length[decode_rows]
        tokens, positions, rows = self.last_token[decode_rows], contexts - ONE, decode_rows
        query_start = self._numbers[: len(rows) + 1].copy()
        sample, sampled = self._yes[: len(rows)].copy(), rows
        used = max(contexts.tolist(), default=0)
        if chunks:
            ends = [s.planned + n for s, n in chunks]
            spans = [(s, s.planned, end) for (s, _), end in zip(chunks, ends, strict=True)]
            tokens = np.concatenate((tokens, *(s.ids(begin, end) for s, begin, end in spans)))
            positions = np.concatenate((positions, *(np.arange(begin, end) for _, begin, end in spans)))
            rows = _append(rows, [s.row for s, _ in chunks])
            contexts = _append(contexts, ends)
            query_start = _append(query_start, list(accumulate((n for _, n in chunks), initial=len(decode_rows)))[1:])
            used = max(used, *ends)
            done = np.asarray([end == len(s.tokens) for s, _, end in spans], dtype=np.bool_)
            sample = np.concatenate((sample, done))
            sampled = rows[sample]
        tables = self._tables[rows, : -(-used // self._page_tokens)]
        for i in range(len(decode_rows), len(rows)):
            tables[i, -(-int(contexts[i]) // self._page_tokens) :] = 0  # pages that later chunks will fill
        self.length[sampled] += ONE
        self.pending[sampled] += ONE
        self.last_token[sampled] = FROM_DEVICE
        return StepPlan(
            step=step,
            token_ids=tokens,
            positions=positions,
            query_start=query_start,
            context_lens=contexts,
            block_tables=tables,
            rows=rows,
            sample=sample,
            new_rows=new_rows,
            freed_rows=freed,
            prompt_logprobs=_targets(chunks, len(decode_rows)) if chunks else {},
        )

    def _new_row(self, sequence: Sequence) -> NewRow:
        sampling = sequence.request.sampling
        prompt = sequence.prompt_tokens
        return NewRow(
            row=sequence.row,
            sampling=sampling,
            prompt_ids=sequence.tokens[:prompt] if sampling.penalized else [],
            output_ids=sequence.tokens[prompt:] if sampling.penalized else [],
            eos_ids=() if sampling.ignore_eos else self._eos_ids,
            outputs=sequence.outputs,
        )


def _append(column: IntArray, values: list[int]) -> IntArray:
    return np.concatenate((column, np.asarray(values, dtype=np.int64)))


def _targets(chunks: list[tuple[Sequence, int]], first: int) -> dict[int, IntArray]:
    """Where prompt logprobs are wanted: the prompt token behind each token of the chunk, -1 behind the last."""
    targets: dict[int, IntArray] = {}
    for i, (sequence, count) in enumerate(chunks):
        if not sequence.wants_prompt_logprobs:
            continue
        begin = sequence.planned + 1
        following = sequence.tokens[begin : min(begin + count, sequence.prompt_tokens)]
        column = np.full(count, -1, dtype=np.int64)
        column[: len(following)] = following
        targets[first + i] = column
    return targets
