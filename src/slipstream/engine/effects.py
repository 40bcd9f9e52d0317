"""What the engine core wants done outside: messages to send, pages to copy.

The loop takes the effects after each call and carries them out in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream import wire
from slipstream.transfer.job import Behind
from slipstream.types import Tokens


@dataclass(frozen=True, slots=True)
class ToRouter:
    """Send `message` to the router with this id; if its link is gone, call `EngineCore.router_lost`."""

    router: str
    message: wire.Message


@dataclass(frozen=True, slots=True)
class ToPeer:
    """Send `message` to a peer: over the link that we opened as source, or over the one that the peer opened."""

    peer: str
    as_source: bool
    message: wire.Message


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy our page source_pages[i] to the peer's page destination_pages[i], for all i, as one job.

    `behind` is the step that our pages will be complete with; None when they are. Every job is answered by exactly one
    `copies_done` or `copies_failed`, and not before nothing of it can still arrive: also when the peer's link is lost
    meanwhile.
    """

    peer: str
    xfer: int
    source_pages: list[int]
    destination_pages: list[int]
    behind: Behind | None = None


Effect = ToRouter | ToPeer | CopyPages


class Outbox:
    """Effects, those for routers first: a first token does not wait for the copies of its prompt.

    What goes to one router, and what goes to one peer, keeps the order in which it arose. The tokens of one step are
    batched by router.
    """

    def __init__(self) -> None:
        self._for_routers: list[Effect] = []
        self._for_peers: list[Effect] = []
        self._tokens: dict[str, list[Tokens]] = {}

    def router(self, router: str, message: wire.Message) -> None:
        self._flush_tokens()
        self._for_routers.append(ToRouter(router, message))

    def peer(self, peer: str, as_source: bool, message: wire.Message) -> None:
        self._for_peers.append(ToPeer(peer, as_source, message))

    def copy(self, job: CopyPages) -> None:
        self._for_peers.append(job)

    def tokens(self, router: str, tokens: Tokens) -> None:
        batch = self._tokens.get(router)
        if batch is None:
            batch = self._tokens[router] = []
        batch.append(tokens)

    def take(self) -> list[Effect]:
        self._flush_tokens()
        effects = self._for_routers + self._for_peers
        self._for_routers, self._for_peers = [], []
        return effects

    def _flush_tokens(self) -> None:
        for router, tokens in self._tokens.items():
            self._for_routers.append(ToRouter(router, wire.StepOutput(tokens=tokens)))
        self._tokens.clear()
