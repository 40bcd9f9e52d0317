"""Steps of every kind, computed before a worker says that it is ready, by the thread that will compute all others.

Much is made when it is first used: modules that numpy imports inside its functions, a thread's handles and workspaces
of a library, compute threads, kernels that a driver loads when they are first launched, pinned buffers, memory of an
allocator. Whatever is left for a request makes the first one slow, so a rehearsal takes the way of requests: a piece of
a prompt that goes on, its end behind it, a token behind that while both are under way, prompts beside a sequence that
decodes, and sequences that ask for all that a sampler can do. It lies in the scratch page and in rows that are free
again at the end. The core hears nothing of it, and so nobody else does: no metrics, no timeline, no prefix.

What it does not try are sizes; a runner of GPUs does that by itself (`CudaRunner.warm_up`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Protocol

from slipstream.engine.plan import FROM_DEVICE, NewRow, StepOutcome, StepPlan, scratch_plan
from slipstream.types import SamplingParams

CHUNK, TAIL = 20, 3  # tokens of the first piece of a prompt, and of its end: few, for a CPU

# What sequences ask for, one each: the most likely token, one of all, one of some, and everything else.
ASKED = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(
        seed=3,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 0.5},
        min_tokens=2,
        logprobs=2,
        prompt_logprobs=1,
    ),
)


class Runner(Protocol):
    @property
    def depth(self) -> int: ...
    def launch(self, plan: StepPlan) -> None: ...
    def collect(self) -> StepOutcome: ...


def rehearse(
    runner: Runner, *, page_tokens: int, max_sequences: int, max_tokens: int, eos_ids: tuple[int, ...] = ()
) -> int:
    """Has the runner compute a step of each kind; returns how many. Raises what a step raises, behind the last.

    `max_tokens` is the longest that a sequence may be.
    """
    under_way, failures = 0, list[Exception]()
    plans = deque(
        rehearsal(
            page_tokens=page_tokens,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            eos_ids=eos_ids,
            ahead=runner.depth > 1,
        )
    )
    steps = len(plans)
    while plans or under_way:
        if plans and under_way < runner.depth and not failures:
            runner.launch(plans.popleft())
            under_way += 1
            continue
        try:
            runner.collect()
        except Exception as error:
            failures.append(error)
            plans.clear()
        under_way -= 1
    if failures:
        raise failures[0]
    return steps


def rehearsal(
    *, page_tokens: int, max_sequences: int, max_tokens: int, eos_ids: tuple[int, ...] = (), ahead: bool = False
) -> list[StepPlan]:
    """The steps, in order, with negative numbers, which no other step has.

    `ahead`: a step may hold a token that the one before it draws. Where none may, one token alone is nothing else than
    one of several.
    """
    chunk = min(CHUNK, max_tokens - 4)
    tail = min(TAIL, max_tokens - chunk - 3)
    if chunk < 1:
        return []
    asked = ASKED[:max_sequences]
    new = [NewRow(row, params, [0] if params.penalized else [], [], eos_ids, 0) for row, params in enumerate(asked)]
    others = [(row, 0, tail) for row in range(1, len(asked))]
    last = len(others)  # in the step that these begin in: who wants to know how likely the prompt was
    telling = {last} if asked[-1].prompt_logprobs is not None else set[int]()
    plans = [
        scratch_plan([(0, 0, chunk)], page_tokens, sample=False, new_rows=new[:1]),
        scratch_plan([(0, chunk, tail)], page_tokens),
    ]
    at, known = chunk + tail, 0
    if ahead:
        plans.append(scratch_plan([(0, at, 1)], page_tokens, FROM_DEVICE))
        at, known = at + 1, FROM_DEVICE
    plans += [
        scratch_plan([(0, at, 1), *others], page_tokens, known, new_rows=new[1:], telling=telling),
        scratch_plan([(0, at + 1, 1), *((row, tail, 1) for row, _, _ in others)], page_tokens),
        scratch_plan([], page_tokens, freed_rows=list(range(len(asked)))),
    ]
    return [replace(plan, step=number - len(plans)) for number, plan in enumerate(plans)]
