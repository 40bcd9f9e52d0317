"""How long prompts and answers are, and which prompts begin alike.

A `Work` says for each seed what is to be sent; what stands in the prompts is made elsewhere.

    random         prompt and answer lengths drawn evenly from two ranges
    chat           conversations: prompts of about 1,000 tokens, answers of about 130
    code           completions in an editor: prompts of about 1,500 tokens, answers of about 13
    reasoning      short questions, answers of thousands of tokens
    trace          a file of lines {"timestamp": ms, "input_length", "output_length", "hash_ids"}
    conversations  a file of [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]

The lengths of the mixes are lognormal, cut to a range; their numbers are choices, documented in docs/benchmarking.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from slipstream.errors import ConfigError

TRACE_BLOCK = 512  # tokens that one hash_id of a trace stands for


@dataclass(frozen=True, slots=True)
class Item:
    """One request. `blocks` name the prompt's consecutive blocks of `block_tokens` tokens: equal names, equal tokens.
    What they do not cover is like no other prompt. `text`, when given, is the prompt. `at_s` is the trace's time."""

    input: int
    output: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK
    text: str = ""
    at_s: float | None = None


class Work(Protocol):
    """`describe` is a sentence for reports; `available` how many different items there are, None for any number."""

    @property
    def available(self) -> int | None: ...

    def describe(self) -> str: ...

    def items(self, count: int, rng: np.random.Generator) -> list[Item]: ...


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`, all alike."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Range:
        """`512-2048` or `512`. Raises ConfigError."""
        parts = text.replace(":", "-").split("-")
        if not 1 <= len(parts) <= 2 or not all(part.strip().isdigit() for part in parts):
            raise ConfigError(f"{flag} {text!r} is no number of tokens; write 512, or a range such as 512-2048.")
        low, high = int(parts[0]), int(parts[-1])
        if not 1 <= low <= high:
            raise ConfigError(f"{flag} {text!r} must go from at least 1 up, as in 512-2048.")
        return cls(low, high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Ranges:
    """Evenly drawn lengths. Each prompt begins with one of `groups` prefixes of `shared` tokens, if that is not 0."""

    input: Range
    output: Range
    shared: int = 0
    groups: int = 1

    available = None

    def describe(self) -> str:
        shared = f", the first {self.shared} of one of {self.groups} prefixes" if self.shared else ""
        return f"prompts of {self.input} tokens{shared}, answers of {self.output}"

    def items(self, count: int, rng: np.random.Generator) -> list[Item]:
        inputs = rng.integers(self.input.low, self.input.high + 1, count).tolist()
        outputs = rng.integers(self.output.low, self.output.high + 1, count).tolist()
        if not self.shared:
            return [Item(i, o) for i, o in zip(inputs, outputs, strict=True)]
        groups = rng.integers(0, self.groups, count).tolist()
        return [Item(i, o, (group,), min(self.shared, i)) for i, o, group in zip(inputs, outputs, groups, strict=True)]


@dataclass(frozen=True)
class Lognormal:
    """A lognormal length: `median`, standard deviation of its logarithm, and the range that it is cut to."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        drawn = np.exp(np.log(self.median) + self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), self.low, self.high).astype(int).tolist()

    def __str__(self) -> str:
        return f"median {self.median:g} (sigma {self.sigma:g}, {self.low} to {self.high})"


@dataclass(frozen=True)
class Mix:
    name: str
    input: Lognormal
    output: Lognormal

    available = None

    def describe(self) -> str:
        return f"{self.name}: prompts of {self.input} tokens, answers of {self.output}"

    def items(self, count: int, rng: np.random.Generator) -> list[Item]:
        inputs, outputs = self.input.draw(count, rng), self.output.draw(count, rng)
        return [Item(i, o) for i, o in zip(inputs, outputs, strict=True)]


MIXES = {
    "chat": Mix("chat", Lognormal(1020, 0.8, 16, 8192), Lognormal(129, 0.9, 4, 1024)),
    "code": Mix("code", Lognormal(1500, 0.9, 32, 8192), Lognormal(13, 1.1, 1, 512)),
    "reasoning": Mix("reasoning", Lognormal(220, 0.9, 16, 4096), Lognormal(2400, 0.8, 128, 16384)),
}


class TraceLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


@dataclass(frozen=True)
class Trace:
    """The first requests of a trace file, in its order, whatever the seed."""

    path: Path
    lines: tuple[TraceLine, ...]
    block_tokens: int

    @classmethod
    def load(cls, path: Path, block_tokens: int = TRACE_BLOCK) -> Trace:
        """Raises ConfigError, which names the line."""
        decode = msgspec.json.Decoder(TraceLine).decode
        lines = []
        for number, text in enumerate(_read(path).splitlines(), 1):
            if not text.strip():
                continue
            try:
                line = decode(text)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ConfigError(
                    f"{path}:{number} is no line of a trace: {error}. A line is an object with timestamp (ms), "
                    "input_length, output_length and hash_ids."
                ) from None
            if line.input_length < 1 or (lines and line.timestamp < lines[-1].timestamp):
                raise ConfigError(f"{path}:{number}: lengths must be above 0, and timestamps must not go back.")
            lines.append(line)
        if not lines:
            raise ConfigError(f"{path} holds no requests.")
        return cls(path, tuple(lines), block_tokens)

    @property
    def available(self) -> int | None:
        return len(self.lines)

    def describe(self) -> str:
        return f"trace {self.path.name} ({len(self.lines):,} requests, {self.block_tokens} tokens a hash_id)"

    def items(self, count: int, rng: np.random.Generator) -> list[Item]:
        return [
            Item(
                line.input_length,
                max(1, line.output_length),
                tuple(line.hash_ids),
                self.block_tokens,
                at_s=line.timestamp / 1e3,
            )
            for line in self.lines[:count]
        ]


@dataclass(frozen=True)
class Conversations:
    """First questions of real conversations, drawn anew for each seed; an answer is as long as the one in the file.

    Lengths in tokens are those of the characters over `characters_per_token`, which the server's own counts give.
    """

    path: Path
    turns: tuple[tuple[str, int], ...]  # question, characters of the answer
    characters_per_token: float = 4.0

    @classmethod
    def load(cls, path: Path) -> Conversations:
        """Raises ConfigError."""
        try:
            found = json.loads(_read(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        turns = [turn for entry in found if (turn := _first_turn(entry))] if isinstance(found, list) else []
        if not turns:
            raise ConfigError(
                f'{path} holds no conversations: it must be a list of {{"conversations": [{{"from": "human", "value": '
                '"..."}, {"from": "gpt", "value": "..."}]}.'
            )
        return cls(path, tuple(turns))

    @property
    def available(self) -> int | None:
        return len(self.turns)

    def describe(self) -> str:
        return f"conversations of {self.path.name} ({len(self.turns):,} first turns)"

    def items(self, count: int, rng: np.random.Generator) -> list[Item]:
        chosen = rng.permutation(len(self.turns))[:count]
        tokens = lambda characters: max(1, round(characters / self.characters_per_token))  # noqa: E731
        return [
            Item(tokens(len(question)), tokens(answer), text=question)
            for question, answer in (self.turns[at] for at in chosen)
        ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _first_turn(entry: object) -> tuple[str, int] | None:
    """(question, characters of the answer) of one conversation, None when it does not begin with such a pair."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    question, answer = (turn.get("value") for turn in turns[:2])
    if turns[0].get("from") not in ("human", "user") or not isinstance(question, str) or not isinstance(answer, str):
        return None
    return (question, len(answer)) if question.strip() and answer.strip() else None
