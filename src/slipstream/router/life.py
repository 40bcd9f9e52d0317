"""One request's life at the router, and the numbering of its tokens. Pure: no sockets, no clock.

    waiting   no pair of workers can take it now
    prefill   submitted to its prefill worker, which owns it; no token yet
    handoff   the first token is here; the prefill worker owns it until the decode worker says Adopted
    decode    the decode worker owns it (a local request is here from its first token on)
    ended     its sink has had the finish, an error, or was taken away by an abort

A worker that is lost leads back to `waiting` with `attempt` one higher and `delivered` kept: the next worker continues
behind the tokens that the client has.

Tokens are numbered from 0 by output index. They come over two links, from the prefill and from the decode worker, so
that the second token may overtake the first: it is held until the first one is here, or until it is clear that the
first one will not come. Within one link nothing can be overtaken, so there a missing number is a fault. What was
delivered already is cut off, whoever repeats it.
"""

from __future__ import annotations

import enum
from typing import Literal, Protocol

import msgspec

from slipstream.errors import RequestError
from slipstream.router.journal import Entry
from slipstream.router.place import NOTHING_TO_AVOID, Avoid, Placement, Prompt
from slipstream.types import Request, Tokens

Stage = Literal["waiting", "prefill", "handoff", "decode", "ended"]


class Sink(Protocol):
    """Where a request's tokens go. Called on the event loop; must not wait.

    `tokens` is called with non-repeating, gapless numbers; the last call of a sink is either a Tokens with `finish` or
    an `error`, never both, and there is none after it. After `Router.abort` there is no call at all.
    """

    def tokens(self, t: Tokens) -> None: ...

    def error(self, e: RequestError) -> None: ...


class Verdict(enum.Enum):
    """What `Life.receive` made of a message."""

    DELIVER = enum.auto()  # in order, cut to what is new; counted as delivered
    REPEATED = enum.auto()  # nothing new in it
    HELD = enum.auto()  # from the decode worker, ahead of what the prefill worker has yet to say
    GAP = enum.auto()  # tokens before it are missing for good
    STRANGER = enum.auto()  # from a worker that this attempt was not given to


class Life:
    """The state of one request. `prefill`, `decode` and `owner` are worker ids, "" while it waits."""

    __slots__ = (
        "attempt", "avoid", "charged", "deadline", "decode", "delivered", "entry", "gap_ping", "held", "introduced",
        "lost", "owner", "patience", "placement", "prefill", "request", "resubmissions", "since", "sink", "speaker",
        "stage",
    )  # fmt: skip

    def __init__(self, request: Request, sink: Sink, now: float, entry: Entry | None = None) -> None:
        self.request = request
        self.entry = entry or Entry(request)
        self.sink = sink
        self.since = now
        self.stage: Stage = "waiting"
        self.attempt = request.attempt
        self.resubmissions = 0
        self.delivered = list(request.output_ids)
        self.held: list[Tokens] = []
        self.gap_ping = 0
        self.placement: Placement | None = None
        self.prefill = ""
        self.decode = ""
        self.owner = ""
        self.speaker = ""  # whose tokens come next; the decode worker from its first token in order on
        self.charged = 0  # prompt tokens that its prefill worker's standing carries for it
        self.introduced = False  # the client has had the cached tokens and prompt log-probabilities
        self.avoid: Avoid = NOTHING_TO_AVOID
        self.lost: RequestError | None = None  # why the last attempt ended, for the answer if there is no other
        self.deadline: Cancellable | None = None
        self.patience: Cancellable | None = None

    # ------------------------------------------------------------------------------------------ transitions

    def prompt(self) -> Prompt:
        """What is to be computed, for placing it."""
        tokens = self.request.prompt_ids + self.delivered if self.delivered else self.request.prompt_ids
        return Prompt(tokens, self.request.cache_salt)

    def submission(self) -> Request:
        """The request as its next worker gets it."""
        if self.attempt == self.request.attempt:
            return self.request
        return msgspec.structs.replace(self.request, output_ids=list(self.delivered), attempt=self.attempt)

    def begin(self, placement: Placement) -> None:
        """Placed: the prefill worker owns it."""
        self.placement = placement
        self.prefill = self.owner = self.speaker = placement.prefill
        self.decode = placement.decode
        self.charged = placement.to_compute
        self.stage = "prefill"

    def adopt(self) -> None:
        """The decode worker owns it."""
        self.owner = self.decode
        self.stage = "decode"

    def withdraw(self) -> None:
        """The attempt is over; what comes of it from now on is stale once `attempt` has grown or the life is gone."""
        self.placement = None
        self.prefill = self.decode = self.owner = self.speaker = ""
        self.held.clear()
        self.stage = "waiting"

    def again(self) -> None:
        self.attempt += 1
        self.resubmissions += 1

    # ------------------------------------------------------------------------------------------ tokens

    def receive(self, t: Tokens, source: str) -> Verdict:
        """Judges tokens of the present attempt and, if they are to be delivered, counts and trims them."""
        ahead = t.index - len(self.delivered)
        if ahead != 0 or source != self.speaker:
            verdict = self._out_of_turn(t, source, ahead)
            if verdict is not Verdict.DELIVER:
                return verdict
        self.delivered.extend(t.token_ids)
        if self.stage == "prefill":
            self.stage = "decode" if self.prefill == self.decode else "handoff"
        if t.cached_tokens is not None or t.prompt_logprobs is not None:
            self._introduce(t)
        return Verdict.DELIVER

    def next_held(self) -> Tokens | None:
        """The next held message that is in order now, not yet judged; None when there is none."""
        if self.held and self.held[0].index <= len(self.delivered):
            return self.held.pop(0)
        return None

    def _out_of_turn(self, t: Tokens, source: str, ahead: int) -> Verdict:
        """Tokens that are not simply the next ones of the one who speaks."""
        if source != self.decode and source != self.speaker:
            return Verdict.STRANGER
        if source == self.decode != self.owner:
            self.adopt()
        if ahead > 0:
            follows = not self.held or t.index == self.held[-1].index + len(self.held[-1].token_ids)
            if source == self.speaker or not follows:
                return Verdict.GAP
            self.held.append(t)
            return Verdict.HELD
        if ahead < 0 and not cut_front(t, -ahead):
            return Verdict.REPEATED
        self.speaker = source
        return Verdict.DELIVER

    def _introduce(self, t: Tokens) -> None:
        """Cached tokens and prompt log-probabilities belong to the request's first message, not to each attempt's."""
        if self.introduced:
            t.cached_tokens = None
            t.prompt_logprobs = None
        self.introduced = True


class Cancellable(Protocol):
    """A timer."""

    def cancel(self) -> None: ...


def cut_front(t: Tokens, count: int) -> bool:
    """Takes the first `count` tokens off; False when nothing is left to say."""
    t.index += min(count, len(t.token_ids))
    t.token_ids = t.token_ids[count:]
    if t.logprobs is not None:
        t.logprobs = t.logprobs[count:]
    return bool(t.token_ids) or t.finish is not None
