"""A step as data: what the scheduler wants computed, and what came of it.

Columns, not objects, so that a plan is cheap to send to other ranks and to lay out on a device. All arrays are
numpy; S is the number of sequences in the step, T the number of tokens.
"""

from __future__ import annotations

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


def probe_plan(failed: StepPlan) -> StepPlan:
    """A step that no input can spoil: one token in the scratch page, sampled. For asking a device whether it works.

    It borrows a row of the failed plan, whose state the next plan says again.
    """
    row = int(failed.rows[0])
    zero: IntArray = np.zeros(1, dtype=np.int64)
    return StepPlan(
        step=failed.step,
        token_ids=zero,
        positions=zero,
        query_start=np.array([0, 1]),
        context_lens=np.array([1]),
        block_tables=np.zeros((1, 1), dtype=np.int64),
        rows=np.array([row]),
        sample=np.ones(1, dtype=np.bool_),
        new_rows=[NewRow(row, SamplingParams(), [], [], (), 0)],
    )
