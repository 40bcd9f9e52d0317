"""One sequence on one worker: its tokens, how far its KV reaches, which pages hold it.

There is no prefill or decode mode: `computed` catches up with `tokens`, and when it has, the next token is sampled.
A sequence waits (it holds nothing), computes its tokens in chunks (PREFILL), then, from the plan of its last chunk on,
token by token (DECODE). With a
remote destination it stops after its first token and keeps its pages for the handoff (HANDOFF) until the destination
has accepted. An adopted one begins as LANDED: KV and pages are there, it only waits for a row. Preemption takes its
pages and sends it back to WAITING with all tokens so far; it then computes them again and goes on behind them.
"""

from __future__ import annotations

import enum
import struct

import numpy as np
from numpy.typing import NDArray

from slipstream.kv.pages import Reservation
from slipstream.kv.prefix import extend_keys
from slipstream.transfer.job import Behind
from slipstream.transfer.protocol import SourceHandoff
from slipstream.types import FinishReason, Logprob, Request, Tokens


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    HANDOFF = "handoff"
    LANDED = "landed"
    ENDED = "ended"


class Sequence:
    """State of one attempt of one request.

    `tokens` is the prompt and all known outputs, those of earlier attempts included; KV of the first `computed` tokens
    lies in `pages`, and that of the first `planned` will when the steps under way are settled (while it computes in
    chunks). `limit` is the number of tokens at which generation ends (max_tokens or max_model_len). `key` orders
    sequences by priority (lower first), then arrival; the last in this order is the youngest. `row` is the sampling
    row, -1 without one. `destination` is the peer to hand over to, None for a local one.
    """

    __slots__ = (
        "_ids",
        "arrival",
        "behind",
        "cached_tokens",
        "computed",
        "destination",
        "handoff",
        "in_flight",
        "key",
        "keys",
        "limit",
        "min_length",
        "page_ids",
        "pages",
        "passed_over",
        "phase",
        "planned",
        "prompt_logprobs",
        "prompt_tokens",
        "registered",
        "request",
        "reservation",
        "root",
        "router",
        "row",
        "spoke",
        "stops",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        router: str,
        destination: str | None,
        arrival: int,
        root: bytes,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        ids: NDArray[np.int64] | None = None,
        prompt: list[int] | None = None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.router = router
        self.destination = destination
        self.arrival = arrival
        self.key = (request.priority, arrival)
        self.root = root
        self.tokens = request.prompt_ids + request.output_ids if prompt is None else prompt
        if prompt is not None:
            prompt += request.output_ids
        self._ids = ids  # the first of `tokens`
        self.prompt_tokens = len(request.prompt_ids)
        self.limit = min(self.prompt_tokens + sampling.max_tokens, max_model_len)
        self.min_length = self.prompt_tokens + sampling.min_tokens
        self.stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))
        self.phase = Phase.WAITING
        self.computed = 0
        self.planned = 0
        self.pages: list[int] = []
        self.page_ids: NDArray[np.int64] | None = None  # `pages`, where somebody has them as an array
        self.reservation: Reservation | None = None  # of `pages`, while it is LANDED
        self.keys: list[bytes] = []
        self.registered = 0  # pages offered to the prefix index, from the first on
        self.row = -1
        self.handoff: SourceHandoff | None = None
        self.behind: Behind | None = None  # the last step that computes it, where copies can wait for that
        self.in_flight = 0  # steps under way that compute it
        self.spoke = False  # a Tokens message of this attempt has gone out
        self.cached_tokens = -1  # prefix hit of the first admission; -1 before it
        self.prompt_logprobs: list[Logprob | None] | None = None
        self.passed_over = 0

    @property
    def identity(self) -> tuple[str, int]:
        return (self.request.id, self.request.attempt)

    @property
    def outputs(self) -> int:
        """Tokens generated so far, over all attempts."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and not self.spoke

    @property
    def needs_host(self) -> bool:
        """Whether its next token cannot be sampled before the host knows the last."""
        sampling = self.request.sampling
        special = sampling.penalized or bool(sampling.logit_bias) or sampling.logprobs is not None
        return special or sampling.min_tokens > 0

    @property
    def copying(self) -> bool:
        """Whether a peer has granted pages for it, or copies of its pages may be running: it cannot be preempted."""
        return self.handoff is not None and self.handoff.pins_source

    @property
    def ends_with_next_token(self) -> bool:
        return len(self.tokens) + 1 >= self.limit

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """`tokens[begin:end]`; kept from call to call, since a prompt is looked at several times. Raises OverflowError
        when one of `tokens` is not a 64-bit number."""
        known = self._ids
        if known is None:
            known = self._ids = _numbers(self.tokens)
        elif len(known) < end:
            known = self._ids = np.concatenate((known, _numbers(self.tokens[len(known) :])))
        return known[begin:end]

    def extend_keys(self, page_tokens: int) -> list[bytes]:
        """Block keys of all full pages of the tokens so far; only new ones are computed."""
        full = len(self.tokens) // page_tokens
        if full > len(self.keys):
            known = self._ids is not None and len(self._ids) >= full * page_tokens
            tokens = self.ids(0, full * page_tokens) if known or not self.keys else self.tokens
            extend_keys(self.keys, tokens, page_tokens, self.root)
        return self.keys

    def message(self, index: int, finish: FinishReason | None = None, logprob: Logprob | None = None) -> Tokens:
        """The news of `tokens[index:]`; the first of an attempt brings prefix hit and prompt logprobs."""
        new = self.tokens[index:]
        message = Tokens(
            request=self.request.id,
            attempt=self.request.attempt,
            index=index - self.prompt_tokens,
            token_ids=new,
            finish=finish,
            logprobs=None if logprob is None else [logprob],
            stop_token=new[-1] if finish == "stop" else None,
        )
        if not self.spoke:
            self.spoke = True
            message.cached_tokens = max(0, self.cached_tokens)
            message.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return message

    def occupy(self) -> None:
        """What was reserved for it is running from now on, or let go."""
        if self.reservation is not None:
            self.reservation.run()
            self.reservation = None

    def reset(self) -> None:
        """Back to nothing computed; the caller has dropped the pages."""
        self.pages = []
        self.behind = None
        self.computed = self.planned = 0
        self.registered = 0
        self.prompt_logprobs = None
        self.page_ids = None
        self.occupy()
        self.phase = Phase.WAITING

    def __repr__(self) -> str:
        name = f"{self.request.id}#{self.request.attempt}"
        return f"Sequence({name} {self.phase.value} {self.computed}/{len(self.tokens)} of {self.limit})"


def _numbers(tokens: list[int]) -> NDArray[np.int64]:
    """Takes half the time of numpy's own way."""
    try:
        return np.frombuffer(struct.pack(f"<{len(tokens)}q", *tokens), dtype="<i8")
    except struct.error as error:
        raise OverflowError(f"not a token id: {error}") from error
