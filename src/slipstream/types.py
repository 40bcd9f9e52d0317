"""What all rooms speak of: a request, how to sample it, what comes back.

No torch and no sockets here; all structs travel as msgpack. Token positions count from 0 at the first prompt token;
output indices count from 0 at the first generated token.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "both"]
FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the next token is chosen. Validated where it enters (front, LLM); workers trust it.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 are off. The noise of the token at position p is
    a function of (`seed`, p) alone, so that another worker continues the same stream. Stop *strings* are matched by
    the front, which has the text; a worker only knows `stop_token_ids` and, unless `ignore_eos`, the model's
    end-of-sequence ids.

    `logprobs` is None for none, 0 for the chosen token only, k for the chosen and the k most likely ones; they are
    log-softmax of the raw logits, before penalties, temperature and truncation. `prompt_logprobs` likewise for each
    prompt token but the first.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalized(self) -> bool:
        """Whether the choice depends on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate.

    `id` is unique over all routers. `output_ids` is empty, except when a request is continued elsewhere after its
    worker was lost: then it holds the tokens that the client already has, and generation goes on behind them.
    `attempt` counts these continuations; a message about an earlier attempt is stale and ignored. Whatever people see
    (timelines, logs, traces) counts attempts from 1, the first placement. `trace` holds the W3C headers (`traceparent`,
    `tracestate`) of the trace that it belongs to, where there is one.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    output_ids: list[int] = []
    attempt: int = 0
    priority: int = 0
    cache_salt: str = ""
    trace: dict[str, str] = {}


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one chosen token and of the most likely alternatives, most likely first."""

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Tokens(msgspec.Struct, array_like=True, omit_defaults=True):
    """New tokens of one request, from its owner to the router that submitted it.

    `index` is the output index of `token_ids[0]`, so that order and completeness are checkable and a repeated token
    is recognised. `finish` is set on the last message of a request and on no other; `stop_token` is the id that
    stopped it (the last of `token_ids`), if one did. `cached_tokens` and `prompt_logprobs` come with the first
    message of an attempt.
    """

    request: str
    attempt: int
    index: int
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[Logprob] | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: list[Logprob | None] | None = None
