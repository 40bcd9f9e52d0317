"""What the engine core tells whoever watches it: one call for each thing that happens to a request.

The core has no clock and keeps no history. An observer adds both: the timeline of recent requests and the counters of
`/metrics` are made of these calls. They come on the loop thread, in the order in which things happen, between two
steps or within one; an observer notes and returns. It must not wait, change what it is given, or raise.

A request is told as `submitted`, or `adopted` where a peer has committed it, and ends with `ended` or `handed_over`;
one that is refused at once gets `failed` alone. Steps are told once each, not once a token: `planned`, then `settled`
or `step_failed` with the same lists. A sequence decodes from its `sampled` or `seated` on, a token a step.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import TYPE_CHECKING, Protocol

from slipstream import wire

if TYPE_CHECKING:
    from slipstream.engine.incoming import Arrival
    from slipstream.engine.sequence import Sequence

Chunks = List[tuple["Sequence", int]]
"""Sequences whose prompt is computed in a step, with the tokens of each."""


class Observer(Protocol):
    """Everything that can happen to a request on one worker."""

    # here
    def submitted(self, sequence: Sequence) -> None:
        """A router has sent it; it waits, unless `failed` or `ended` follows at once."""
        ...

    def admitted(self, sequence: Sequence) -> None:
        """It has its pages; the first `computed` tokens came from the prefix cache."""
        ...

    def planned(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None:
        """The step is about to be computed."""
        ...

    def settled(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None:
        """The step has been computed; its tokens are told to the routers next."""
        ...

    def step_failed(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None:
        """The step has failed; its sequences are computed again, one by one."""
        ...

    def sampled(self, sequence: Sequence) -> None:
        """All its tokens were computed, and the next has been sampled: the first, unless it was computed again."""
        ...

    def preempted(self, sequence: Sequence) -> None:
        """It gives up its pages and waits again."""
        ...

    def failed(self, sequence: Sequence, code: str, message: str) -> None:
        """The router is told that it cannot go on here."""
        ...

    def ended(self, sequence: Sequence, code: str) -> None:
        """It is over here: `finished`, or the code of what ended it."""
        ...

    # as a source
    def offered(self, sequence: Sequence) -> None:
        """Its destination is told what will come; `handoff` is set."""
        ...

    def answered(self, sequence: Sequence, message: wire.Message) -> None:
        """Grant, Defer, Refuse, Accepted or Revoke of the destination, before it takes effect."""
        ...

    def copying(self, sequence: Sequence, pages: int) -> None:
        """A copy of so many pages is handed to the mover."""
        ...

    def copied(self, sequence: Sequence, failure: str | None) -> None:
        """The oldest or another of its copies has ended."""
        ...

    def committed(self, sequence: Sequence) -> None:
        """All is copied; the destination is told to take over."""
        ...

    def handed_over(self, sequence: Sequence) -> None:
        """The destination has taken over."""
        ...

    def handoff_failed(self, sequence: Sequence, code: str, message: str) -> None:
        """The handoff has ended for this reason; `failed` follows where the router is still to be told."""
        ...

    # as a destination
    def offer_came(self, arrival: Arrival) -> None:
        """A peer offers a request. `arrival.note` is the observer's own."""
        ...

    def replied(self, arrival: Arrival, message: wire.Message) -> None:
        """Grant, Defer, Refuse, Accepted or Revoke is sent to the source."""
        ...

    def adopted(self, sequence: Sequence, arrival: Arrival, commit: wire.Commit) -> None:
        """The peer has committed: the request is here, its KV is in place, it waits for a row."""
        ...

    def seated(self, sequence: Sequence) -> None:
        """An adopted one has its row and decodes from the next step on."""
        ...


class NoObserver:
    """Watches nothing."""

    def submitted(self, sequence: Sequence) -> None: ...
    def admitted(self, sequence: Sequence) -> None: ...
    def planned(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None: ...
    def settled(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None: ...
    def step_failed(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None: ...
    def sampled(self, sequence: Sequence) -> None: ...
    def preempted(self, sequence: Sequence) -> None: ...
    def failed(self, sequence: Sequence, code: str, message: str) -> None: ...
    def ended(self, sequence: Sequence, code: str) -> None: ...
    def offered(self, sequence: Sequence) -> None: ...
    def answered(self, sequence: Sequence, message: wire.Message) -> None: ...
    def copying(self, sequence: Sequence, pages: int) -> None: ...
    def copied(self, sequence: Sequence, failure: str | None) -> None: ...
    def committed(self, sequence: Sequence) -> None: ...
    def handed_over(self, sequence: Sequence) -> None: ...
    def handoff_failed(self, sequence: Sequence, code: str, message: str) -> None: ...
    def offer_came(self, arrival: Arrival) -> None: ...
    def replied(self, arrival: Arrival, message: wire.Message) -> None: ...
    def adopted(self, sequence: Sequence, arrival: Arrival, commit: wire.Commit) -> None: ...
    def seated(self, sequence: Sequence) -> None: ...
