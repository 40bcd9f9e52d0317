"""How many tokens a step computes where sequences decode beside prompts, when nobody has said: it is measured.

What is computed of a prompt beside sequences that decode is what these wait for between two tokens, so few are wanted.
But a step has costs of its own (all weights are read, the host launches every kernel), and the fewer tokens it has, the
slower prompts get. So the least is taken that computes prompts nearly as fast as many would: a large model that fills
the device with few tokens gets small pieces, a small one, for which the host is the limit, large ones.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Protocol

from slipstream.engine.plan import NewRow, Part, StepOutcome, StepPlan, scratch_plan
from slipstream.types import SamplingParams

logger = logging.getLogger(__name__)

SIZES = (128, 192, 256, 320, 384, 512)
WORTH = 0.7  # of the tokens a second of the largest, that a smaller one must reach
REPEATS = 3
FIRST_STEP = -1000  # a number that no other step has
GREEDY = SamplingParams(temperature=0.0)


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> StepOutcome: ...


def measured(runner: Runner, *, page_tokens: int, most: int, longest: int = SIZES[-1], rows: int = 2) -> int:
    """Tokens of a mixed step, at most `most`, decoding sequences included; `most` where that leaves no choice.

    Computes steps of one token and of prompts up to `longest`, as few as that allows, in the scratch page, in some of
    `rows` rows that are free before and behind it. Raises what they raise.
    """
    sizes = [size for size in SIZES if size <= most and size <= 1 + longest * (rows - 1)]
    if len(sizes) < 2:
        return most
    number = itertools.count(FIRST_STEP)
    used = range(len(_parts(sizes[-1], longest)))
    new = [NewRow(row, GREEDY, [], [], (), 0) for row in used]
    runner.execute(scratch_plan([(row, 0, 1) for row in used], page_tokens, step=next(number), new_rows=new))
    seconds = {size: _seconds(runner, page_tokens, _parts(size, longest), number) for size in sizes}
    runner.execute(scratch_plan([], page_tokens, step=next(number), freed_rows=list(used)))
    chosen = chosen_of(seconds)
    logger.info(
        "prompts beside sequences that decode: %d tokens a step, %.1f ms (%s); --mixed-chunk-tokens sets it",
        chosen,
        1e3 * seconds[chosen],
        ", ".join(f"{size}: {1e3 * seconds[size]:.1f}" for size in sizes if size != chosen),
    )
    return chosen


def chosen_of(seconds: dict[int, float]) -> int:
    """Of sizes and the seconds that steps of theirs take, the smallest that is worth it."""
    largest = max(seconds)
    least = WORTH * largest / seconds[largest]
    return min(size for size, each in seconds.items() if size / each >= least)


def _parts(size: int, longest: int) -> list[Part]:
    """A step of `size` tokens: one behind another, and beginnings of prompts."""
    prompts = [min(longest, size - 1 - first) for first in range(0, size - 1, longest)]
    return [(0, 1, 1), *((row, 0, tokens) for row, tokens in enumerate(prompts, 1))]


def _seconds(runner: Runner, page_tokens: int, parts: list[Part], number: Iterator[int]) -> float:
    times = []
    for _ in range(1 + REPEATS):
        plan = scratch_plan(parts, page_tokens, step=next(number))
        begun = time.perf_counter()
        runner.execute(plan)
        times.append(time.perf_counter() - begun)
    return min(times[1:])
