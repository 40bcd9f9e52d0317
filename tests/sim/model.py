"""A pretend model whose KV is a number for each token, kept in the pages of a worker.

The number of a token is made from the token, its position and the number before it, as read from the page where it
should be. The next token is a hash of all numbers of the context, as found in the pages of the block table. So a page
that was written too late, reused too early, skipped wrongly or never copied gives a wrong token, and the answer of a
cluster can be compared with `answer`, which needs no pages.
"""

from __future__ import annotations

import random

import numpy as np

from slipstream.engine.core import EngineCore
from slipstream.engine.plan import FROM_DEVICE, StepOutcome, StepPlan
from slipstream.kv.pages import PageState
from slipstream.types import FinishReason, Request, SamplingParams

EOS = 2
VOCABULARY = 7  # token ids EOS + 1 and up
UNSOUND = -1  # in place of a token: the model's logits are not finite
MASK = (1 << 61) - 1
COMMITTED = {PageState.RUNNING, PageState.LANDED}  # a landed page may be shared before its own sequence runs


class Violation(AssertionError):
    """An invariant does not hold."""


def number(token: int, position: int, before: int) -> int:
    return (token * 1_000_003 + position * 7_919 + before * 31 + 17) & MASK


def choose(numbers: list[int], sampling: SamplingParams) -> int:
    """The next token behind a context with these numbers; UNSOUND now and then for a request that asks for it."""
    drawn = hash(tuple(numbers)) % (VOCABULARY * 2)
    if drawn == 1 and sampling.min_p:
        return UNSOUND
    return EOS if drawn == 0 else EOS + 1 + drawn % VOCABULARY


def answer(request: Request, max_model_len: int) -> tuple[list[int], FinishReason | None]:
    """All tokens that a request must get, and how it must end; None when it fails behind them."""
    sampling = request.sampling
    numbers: list[int] = []
    before = 0
    for position, token in enumerate(request.prompt_ids):
        before = number(token, position, before)
        numbers.append(before)
    outputs: list[int] = []
    limit = min(sampling.max_tokens, max_model_len - len(request.prompt_ids))
    while True:
        token = choose(numbers, sampling)
        if token == UNSOUND:
            return outputs, None
        outputs.append(token)
        stops = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        if stops and len(outputs) > sampling.min_tokens:
            return outputs, "stop"
        if len(outputs) >= limit:
            return outputs, "length"
        before = number(token, len(numbers), before)
        numbers.append(before)


class PretendModel:
    """The page store of one worker and what executes its plans, up to `depth` of them before it is asked.

    Like a device it keeps the token that each row got last, for plans that were made before that was known.
    """

    def __init__(self, core: EngineCore, pages: int, page_tokens: int, rng: random.Random, depth: int) -> None:
        self._core = core
        self._page_tokens = page_tokens
        self._rng = rng
        self.store = [[rng.getrandbits(60) for _ in range(page_tokens)] for _ in range(pages)]
        self._depth = depth
        self._step = 0
        self._unsure = False
        self._rows: dict[int, SamplingParams] = {}  # those that are in use
        self._left: dict[int, int] = {}  # row -> tokens that its request may still get
        self._last: dict[int, int] = {}  # row -> the token that the step before drew for it

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Computes, checking that the plan is consistent and reads only what it may."""
        if plan.step <= self._step:
            raise Violation(f"step {plan.step} planned after step {self._step}")
        self._step = plan.step
        self._take_rows(plan)
        tokens = plan.token_ids.tolist()
        positions = plan.positions.tolist()
        starts = plan.query_start.tolist()
        contexts = plan.context_lens.tolist()
        tables = plan.block_tables.tolist()
        sample = plan.sample.tolist()
        rows = plan.rows.tolist()
        chosen = []
        written: set[int] = set()
        for i, context in enumerate(contexts):
            first, end = starts[i], starts[i + 1]
            table = tables[i][: -(-context // self._page_tokens)]
            if positions[first:end] != list(range(context - (end - first), context)):
                raise Violation(f"step {plan.step}: positions {positions[first:end]} end a context of {context}")
            self._check_pages(table, positions[first] // self._page_tokens, written)
            self._write(table, positions[first], self._known(rows[i], tokens[first:end]))
            chosen.append(choose(self.read(table, context), self._rows[rows[i]]) if sample[i] else -1)
        self._last = {row: token for row, token, drawn in zip(rows, chosen, sample, strict=True) if drawn}
        for row in self._last:
            self._left[row] -= 1
            if self._left[row] < 0:
                raise Violation(f"row {row}: goes on behind the last token of its request")
        return StepOutcome(plan.step, np.asarray(chosen, dtype=np.int64), [None] * len(chosen))

    def _known(self, row: int, tokens: list[int]) -> list[int]:
        """The tokens, with that of the step before where the host did not know it."""
        if FROM_DEVICE not in tokens:
            return tokens
        if tokens != [FROM_DEVICE] or self._depth < 2:
            raise Violation(f"row {row}: tokens {tokens} at depth {self._depth}")
        if row not in self._last:
            raise Violation(f"row {row}: its last token is taken from the step before, which drew none for it")
        if self._rows[row].min_tokens:
            raise Violation(f"row {row}: is scheduled ahead of a token that its sampling has to know")
        return [self._last[row]]

    def spoil(self, plan: StepPlan) -> None:
        """A step has failed half-way: what it should have written is anything."""
        for i, context in enumerate(plan.context_lens.tolist()):
            first = context - int(plan.query_start[i + 1] - plan.query_start[i])
            for position in range(first, context):
                page = int(plan.block_tables[i, position // self._page_tokens])
                self.store[page][position % self._page_tokens] = self._rng.getrandbits(60)

    def failed(self) -> None:
        """The last steps count as failed: what they said of rows may be said again."""
        self._unsure = True
        self._last.clear()

    def _take_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            if self._rows.pop(row, None) is None and not self._unsure:
                raise Violation(f"row {row} freed but unknown")
        for new in plan.new_rows:
            if new.row in self._rows and not self._unsure:
                raise Violation(f"row {new.row} given out twice")
            self._rows[new.row] = new.sampling
            self._left[new.row] = new.sampling.max_tokens - new.outputs
            self._last.pop(new.row, None)
        self._unsure = False
        rows = plan.rows.tolist()
        if len(set(rows)) != len(rows) or not set(rows) <= self._rows.keys():
            raise Violation(f"rows {rows} of the plan, {sorted(self._rows)} known")

    def _check_pages(self, table: list[int], first_written: int, written: set[int]) -> None:
        """Only committed pages are read, and no two sequences write to one page."""
        states = [self._core.page_state(page) for page in table]
        if 0 in table or not COMMITTED.issuperset(states):
            raise Violation(f"attends to pages {table} in states {[s.name for s in states]}")
        mine = table[first_written:]
        if not written.isdisjoint(mine):
            raise Violation(f"pages {sorted(written & set(mine))} are written by two sequences in one step")
        written.update(mine)

    def _write(self, table: list[int], position: int, tokens: list[int]) -> None:
        size, store = self._page_tokens, self.store
        before = store[table[(position - 1) // size]][(position - 1) % size] if position else 0
        for token in tokens:
            before = number(token, position, before)
            store[table[position // size]][position % size] = before
            position += 1

    def read(self, table: list[int], context: int) -> list[int]:
        numbers: list[int] = []
        for page in table:
            numbers += self.store[page]
        return numbers[:context]
