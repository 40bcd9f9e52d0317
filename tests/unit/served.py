"""Random requests served by a core and a runner without threads: for comparing what runners answer."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import ToRouter
from slipstream.engine.plan import FROM_DEVICE, StepPlan
from slipstream.run.runner import Runner
from slipstream.types import Request, SamplingParams, Tokens

EOS = (1,)


@dataclass
class Served:
    """Answers by request: everything that was said of it, and how it ended."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    likely: dict[str, list[list[int]]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    ahead: int = 0  # of them, steps that held tokens which the host did not know
    preemptions: int = 0

    def hear(self, news: Tokens) -> None:
        self.tokens.setdefault(news.request, []).extend(news.token_ids)
        for one in [*(news.prompt_logprobs or []), *(news.logprobs or [])]:
            if one is not None:
                self.logprobs.setdefault(news.request, []).append(one.logprob)
                self.likely.setdefault(news.request, []).append(one.top_ids)
        if news.finish is not None:
            self.ends[news.request] = news.finish


def random_requests(count: int, seed: int, vocab: int = 250) -> list[tuple[int, Request]]:
    """(step at which it comes, request): prompts that share beginnings, every kind of sampling."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, vocab) for _ in range(40)]
    found = []
    for number in range(count):
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 4, 12, 25)),
            temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
            top_k=rng.choice((0, 0, 5, 60)),
            top_p=rng.choice((1.0, 0.9, 0.5)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            seed=rng.getrandbits(64),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=tuple(rng.sample(range(3, vocab), 25)) if rng.random() < 0.5 else (),
            min_tokens=rng.choice((0, 0, 0, 5)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)),
            logit_bias={rng.randrange(vocab): 2.0} if rng.random() < 0.15 else {},
            logprobs=rng.choice((None, None, None, 0, 3)),
            prompt_logprobs=1 if rng.random() < 0.1 else None,
        )
        prompt = stem[: rng.choice((0, 8, 24, 40))] + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 30))]
        found.append((rng.randrange(60), Request(id=f"r{number}", prompt_ids=prompt, sampling=sampling)))
    return found


def serve(runner: Runner, requests: list[tuple[int, Request]], *, pages: int, depth: int | None = None) -> Served:
    """Serves all with the steps under way that the runner takes, or fewer."""
    layout, depth, served = runner.layout, depth or runner.depth, Served()
    numbers = EngineConfig(page_tokens=layout.page_tokens, chunk_tokens=24, max_sequences=8, max_model_len=160)
    core = EngineCore(layout, pages, numbers, EOS, headroom_tokens=4)
    under_way: deque[StepPlan] = deque()
    waiting = sorted(requests, key=lambda item: item[0])
    while waiting or under_way or not core.idle:
        while waiting and (waiting[0][0] <= served.steps or core.idle):
            core.submit(waiting.pop(0)[1], "router", None)
        plan = core.schedule()
        if plan is not None:
            served.steps += 1
            served.ahead += bool((plan.token_ids == FROM_DEVICE).any())
            runner.launch(plan)
            under_way.append(plan)
        if under_way and (plan is None or len(under_way) == depth):
            core.settle(under_way.popleft(), runner.collect())
        for effect in core.take_effects():
            assert isinstance(effect, ToRouter)
            assert isinstance(effect.message, wire.StepOutput), effect
            for news in effect.message.tokens:
                served.hear(news)
    assert core.audit().settled
    served.preemptions = core.preemptions
    return served
