"""On what terms a worker takes a request, and the words in which it refuses one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

from slipstream.engine.incoming import Arrival
from slipstream.engine.sequence import Sequence

INT32 = 1 << 31
CHUNK_TOKENS = 512  # where `chunk_tokens` is 0: enough to keep a CPU busy

TAIL_BYTES = 64 << 20  # of KV, a rank: NVLink moves it in less than 0.2 ms, and it takes a large model a good step


class EngineNumbers(Protocol):
    """What the core reads of `config.EngineConfig`; `max_model_len` 0 means what the pool holds, and
    `chunk_tokens` 0 CHUNK_TOKENS, and `mixed_chunk_tokens` 0 `chunk_tokens`."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def mixed_chunk_tokens(self) -> int: ...
    @property
    def max_sequences(self) -> int: ...
    @property
    def max_waiting(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def prefix_cache(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What a worker has: `pages` that can be held, `max_model_len` tokens a request, `max_waiting` requests queued."""

    page_tokens: int
    pages: int
    max_model_len: int
    max_waiting: int
    vocab: int | None = None  # number of token ids; None: whatever an int32 holds

    @property
    def token_ids(self) -> int:
        """How many there are."""
        return INT32 if self.vocab is None else self.vocab

    def foreign(self, sequence: Sequence) -> tuple[str, str] | None:
        """(error code, message) where the request holds token ids that the model does not have."""
        size = self.token_ids
        with contextlib.suppress(OverflowError):
            ids = sequence.ids(0, len(sequence.tokens))
            if ids.min(initial=0) >= 0 and ids.max(initial=0) < size:
                return None
        return self.refuse_id(next(token for token in sequence.tokens if not 0 <= token < size))

    def refuse_id(self, bad: int) -> tuple[str, str]:
        """(error code, message) about one that the model does not have."""
        size = self.token_ids
        return "invalid_value", f"token ids are 0 to {size - 1} here; {bad} was given. Send ids of the served model"

    def foreign_arrival(self, arrival: Arrival, sequence: Sequence) -> tuple[str, str] | None:
        """As `foreign`, of a prompt that has been read ahead, and the tokens behind it."""
        if arrival.ids is None:
            return self.foreign(sequence)
        if arrival.foreign is not None:
            return self.refuse_id(arrival.foreign)
        size = self.token_ids
        for token in sequence.request.output_ids:
            if not 0 <= token < size:
                return self.refuse_id(token)
        return None

    def refusal(self, sequence: Sequence, waiting: int, draining: bool) -> tuple[str, str] | None:
        """(error code, message) where the request cannot be taken, now or ever; None where it can."""
        tokens = len(sequence.tokens)
        if draining:
            return "no_workers", "this worker is draining and takes no more requests"
        if not sequence.request.prompt_ids:
            return "invalid_value", "the prompt has no tokens; give at least one"
        if (foreign := self.foreign(sequence)) is not None:
            return foreign
        if tokens >= self.max_model_len:
            return (
                "context_length_exceeded",
                f"the prompt has {tokens} tokens; with one to generate that is more than the {self.max_model_len} "
                "that this worker takes (--max-model-len)",
            )
        last = tokens if sequence.destination is not None else max(tokens, sequence.limit - 1)
        needed = -(-last // self.page_tokens)
        if needed > self.pages:
            return (
                "context_length_exceeded",
                f"{needed} KV pages of {self.page_tokens} tokens are needed for prompt and answer, this worker has "
                f"{self.pages}; lower max_tokens or start it with a larger --kv-tokens",
            )
        if waiting >= self.max_waiting:
            return "queue_full", f"{waiting} requests are waiting at this worker; retry later"
        return None
