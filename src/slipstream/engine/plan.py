"""A step as data: what the scheduler wants computed, and what came of it.

Columns, not objects, so that a plan is cheap to send to other ranks and to lay out on a device. All arrays are
numpy; S is the number of sequences in the step, T the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.types import Logprob, SamplingParams

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

FROM_DEVICE = -1  # in place of a token id that the step before sampled and only the device knows


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that the runner has not seen: its sampling state lives in `row` until that is freed.

    `prompt_ids` and `output_ids` are what penalties count; both are empty unless `sampling.penalized`.
    """

    row: int
    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    eos_ids: tuple[int, ...]  # banned until min_tokens are reached, together with stop_token_ids
    outputs: int  # tokens generated so far, also when output_ids is empty


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over the new tokens of S sequences.

    Sequence i owns tokens query_start[i] to query_start[i+1] of the columns; its KV including these tokens is
    context_lens[i] tokens long and lies in the pages of block_tables[i] (padded with page 0, the scratch page).
    Where `sample[i]`, one token is drawn from the logits of its last token.

    A token id of FROM_DEVICE is the one that the step before drew for this sequence's row, for a plan that is made
    before that step has been collected. Runners of depth 1 never see it.
    """

    step: int
    token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    query_start: IntArray  # [S + 1]
    context_lens: IntArray  # [S]
    block_tables: IntArray  # [S, pages]
    rows: IntArray  # [S] sampling row of each sequence
    sample: BoolArray  # [S]
    new_rows: list[NewRow] = field(default_factory=list)  # take effect before the step
    freed_rows: list[int] = field(default_factory=list)  # likewise, before new_rows
    prompt_logprobs: dict[int, IntArray] = field(
        default_factory=dict
    )  # sequence index -> the token after each of its T tokens (-1: none)

    @property
    def sequences(self) -> int:
        return len(self.rows)

    @property
    def decodes(self) -> int:
        """Sequences that have one token in it; the tokens of the others are pieces of prompts."""
        return int((self.query_start[1:] - self.query_start[:-1] == 1).sum())


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step produced, in the order of its plan.

    A token of -1 where the plan says `sample` means that the model's logits for this sequence are not finite: it has
    failed, the others have not.
    """

    step: int
    token_ids: IntArray  # [S]; -1 where nothing was or could be sampled
    logprobs: list[Logprob | None]  # [S]; None unless asked for
    prompt_logprobs: dict[int, list[Logprob | None]] = field(default_factory=dict)


Part = tuple[int, int, int]  # of one sequence in a step: its row, the position of its first token, its tokens


def scratch_plan(
    parts: list[Part],
    page_tokens: int,
    first_token: int = 0,
    *,
    step: int = 0,
    sample: bool = True,
    new_rows: list[NewRow] | None = None,
    freed_rows: list[int] | None = None,
    telling: Iterable[int] = (),
) -> StepPlan:
    """A step of zeros in the scratch page, but for the first token of all, of sequences that nobody knows.

    `telling`: the sequences whose prompts' log-probabilities are asked for.
    """
    counts = np.array([tokens for _, _, tokens in parts], dtype=np.int64)
    ends = np.array([first + tokens for _, first, tokens in parts], dtype=np.int64)
    token_ids = np.zeros(int(counts.sum()), dtype=np.int64)
    token_ids[:1] = first_token
    positions = [np.arange(first, first + tokens, dtype=np.int64) for _, first, tokens in parts]
    return StepPlan(
        step=step,
        token_ids=token_ids,
        positions=np.concatenate([*positions, np.zeros(0, dtype=np.int64)]),
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        context_lens=ends,
        block_tables=np.zeros((len(parts), -(-int(ends.max(initial=1)) // page_tokens)), dtype=np.int64),
        rows=np.array([row for row, _, _ in parts], dtype=np.int64),
        sample=np.full(len(parts), sample),
        new_rows=new_rows or [],
        freed_rows=freed_rows or [],
        prompt_logprobs={index: np.zeros(parts[index][2], dtype=np.int64) for index in telling},
    )


def probe_plan(failed: StepPlan) -> StepPlan:
    """A step that no input can spoil: one token in the scratch page, sampled. For asking a device whether it works.

    It borrows a row of the failed plan, whose state the next plan says again.
    """
    row = int(failed.rows[0])
    new = NewRow(row, SamplingParams(), [], [], (), 0)
    return scratch_plan([(row, 0, 1)], 1, step=failed.step, new_rows=[new])
