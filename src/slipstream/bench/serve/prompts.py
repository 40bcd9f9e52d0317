"""Prompts of a wanted number of tokens, and the bodies of the requests that carry them.

Where a server takes token ids, a prompt is a list of random ids and its length is exact. Elsewhere it is a text of
common short words, one token each in the vocabularies of large models; how many words make how many tokens, and what a
chat template adds, is taken from the server's own usage (`Target.words_for`).

The ids come from a salt and the names of blocks, so that equal names are equal prefixes; the salt is another one for
each run, so that a server's prefix cache knows nothing of what an earlier run has sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from slipstream.bench.serve.target import Target
from slipstream.bench.serve.words import WORDS
from slipstream.bench.serve.work import Item

OWN = 1 << 62  # names of blocks that belong to one prompt alone start here


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: the server's default, or this temperature."""

    temperature: float | None = 0.0


class PromptMaker:
    """Makes the bodies of one run. `salt` is part of every prompt."""

    def __init__(self, target: Target, salt: int, sampling: Sampling) -> None:
        self._target = target
        self._salt = salt & ((1 << 63) - 1)
        self._sampling = sampling
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def ids(self, item: Item, number: int) -> np.ndarray:
        """The token ids of the run's request number `number`."""
        parts, missing = [], item.input
        for name in item.blocks:
            if missing <= 0:
                break
            block = self._block(name, item.block_tokens)[:missing]
            parts.append(block)
            missing -= len(block)
        if missing > 0:
            parts.append(self._made(OWN + number, missing))
        return np.concatenate(parts)

    def text(self, item: Item, number: int) -> str:
        """A text of about `item.input` tokens by the server's count."""
        if item.text:
            return item.text
        wanted = Item(self._target.words_for(item.input), item.output, item.blocks, item.block_tokens)
        return " ".join(WORDS[i % len(WORDS)] for i in self.ids(wanted, number).tolist())

    def body(self, item: Item, number: int) -> bytes:
        """The JSON of a streaming request."""
        target = self._target
        fields: dict[str, Any] = {"model": target.model, "stream": True}
        if target.api == "chat":
            fields["messages"] = [{"role": "user", "content": self.text(item, number)}]
        elif target.takes_ids and not item.text:
            fields["prompt"] = self.ids(item, number).tolist()
        else:
            fields["prompt"] = self.text(item, number)
        return msgspec.json.encode({**fields, **answer_fields(target, item.output, self._sampling)})

    def _block(self, name: int, tokens: int) -> np.ndarray:
        found = self._blocks.get((name, tokens))
        if found is None:
            found = self._blocks[name, tokens] = self._made(name, tokens)
        return found

    def _made(self, name: int, tokens: int) -> np.ndarray:
        low, high = self._target.ids
        return np.random.default_rng((self._salt, name)).integers(low, high, tokens)


def answer_fields(target: Target, output: int, sampling: Sampling) -> dict[str, Any]:
    """The fields that ask for `output` tokens, as exactly as the server can be asked."""
    fields: dict[str, Any] = {target.limit_field: output}
    if sampling.temperature is not None:
        fields["temperature"] = sampling.temperature
    if target.takes_ignore_eos:
        fields["ignore_eos"] = True
    elif target.takes_min_tokens:  # not beside ignore_eos: it keeps engines from planning a step ahead of its tokens
        fields["min_tokens"] = output
    if target.usage != "none":
        options = {"include_usage": True}
        if target.usage == "every":
            options["continuous_usage_stats"] = True
        fields["stream_options"] = options
    if target.takes_token_ids:
        fields["return_token_ids"] = True
    return fields
