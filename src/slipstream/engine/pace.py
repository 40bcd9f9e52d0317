"""How fast a worker's last steps were, by what was in them; the worker tells it in its Status.

Three kinds of step are kept apart: those that only decode, those that only compute prompts, and those that do both
(mixed), in which the sequences that decode wait for the prompts. A router cannot know these times, and they differ by
model, card and load; with them it can weigh what a prompt gains at a worker against what that worker's sequences lose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream import wire

AVERAGED_S = 2.0  # seconds of steps of one kind over which their average reaches
FORGOTTEN_S = 60.0  # seconds of other steps after which a kind is told no more: it may have been an exception
OUTLIER = 4.0  # a step so many times as long as the average is counted as this: compiling, a pause of the machine


@dataclass(slots=True)
class Kind:
    """Decayed sums over the steps of one kind."""

    seconds: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0
    idle_s: float = 0.0  # seconds of other steps since the last of this kind

    def add(self, tokens: int, seconds: float) -> None:
        """One more step; `tokens` are those of prompts."""
        if self.idle_s >= FORGOTTEN_S:
            self.seconds = self.tokens = self.steps = 0.0
        if self.steps:
            seconds = min(seconds, OUTLIER * self.seconds / self.steps)
        keep = math.exp(-seconds / AVERAGED_S)
        self.seconds = self.seconds * keep + seconds
        self.tokens = self.tokens * keep + tokens
        self.steps = self.steps * keep + 1.0
        self.idle_s = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 when unknown."""
        return self.tokens / self.seconds if self.seconds and self.idle_s < FORGOTTEN_S else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step; 0 when unknown."""
        return self.seconds / self.steps if self.steps and self.idle_s < FORGOTTEN_S else 0.0


class Pace:
    """Moving averages over the steps of one worker."""

    def __init__(self) -> None:
        self.prompts, self.mixed, self.decodes = Kind(), Kind(), Kind()

    def step(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step that took `seconds`: so many sequences decoded in it, so many tokens of prompts were computed."""
        if not prompt_tokens and not decodes:
            return
        this = self.decodes if not prompt_tokens else self.mixed if decodes else self.prompts
        for kind in (self.prompts, self.mixed, self.decodes):
            kind.idle_s += seconds
        this.add(prompt_tokens, seconds)

    def tell(self, status: wire.Status) -> None:
        status.prompt_rate, status.mixed_rate = self.prompts.rate, self.mixed.rate
        status.mixed_step_s, status.decode_step_s = self.mixed.step_s, self.decodes.step_s
