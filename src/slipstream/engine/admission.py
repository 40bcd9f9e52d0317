"""Who may take pages next: waiting sequences and the offers of peers, one queue in the order of priority and arrival.

New work is admitted while it leaves head-room for the growth of what is here; see `scheduler` for the order and for who
may pass whom. When nothing here will free pages by itself, those that only wait for a grant give up theirs.
"""

from __future__ import annotations

from slipstream import wire
from slipstream.engine.incoming import Arrival, Incoming
from slipstream.engine.outgoing import Outgoing
from slipstream.engine.scheduler import Claim, Scheduler, Verdict
from slipstream.engine.sequence import Sequence
from slipstream.kv.pages import PageAccount
from slipstream.kv.prefix import Changes


class Admission:
    """The queue of one worker. `serve` is called in the middle of making a step, between its decodes and its chunks."""

    def __init__(self, account: PageAccount, scheduler: Scheduler, incoming: Incoming, outgoing: Outgoing) -> None:
        self._account = account
        self._scheduler = scheduler
        self._incoming = incoming
        self._outgoing = outgoing
        self._futile: tuple[int, int, bool] | None = None  # where `serve` found nothing more to do
        self._headroom = 0  # during `serve`: what sequences here will need soon

    def serve(self, *, busy: bool) -> None:
        """Serves waiting sequences and offers, as far as pages, rows and tokens go. `busy`: a step is under way."""
        scheduler, incoming = self._scheduler, self._incoming
        if not incoming.deferred and (not scheduler.waiting or scheduler.spent):
            return  # nobody can begin, and nobody take pages from who waits
        if self._futile == self._room():
            return
        self._headroom = scheduler.headroom()
        settled = scheduler.admit(scheduler.claims(incoming.candidates()), self.attempt)
        if incoming.deferred and self._alone:
            if busy:
                settled = False  # pages of ended sequences come back with the step
            else:
                first = incoming.deferred[0]
                scheduler.reclaim(lambda: incoming.try_grant(first) is not Verdict.NO_PAGES)
        incoming.defer_rest()
        self._futile = self._room() if settled else None

    def attempt(self, claim: Claim) -> Verdict:
        if isinstance(claim, Arrival):
            return self._incoming.try_grant(claim)
        assert isinstance(claim, Sequence)
        verdict = self._scheduler.admit_waiting(claim)
        if verdict is not Verdict.TAKEN:
            return verdict
        if claim.destination is None:
            self._headroom += self._scheduler.growth(len(claim.tokens), claim.limit, len(claim.pages))
        elif not claim.ends_with_next_token:
            self._outgoing.offer(claim)
            self._outgoing.progress(claim)  # a prefix that is here already can be copied at once
        return verdict

    def fits(self, cost: int, growth: int) -> bool:
        """Whether new work may take `cost` pages: beside the head-room of what is here, unless nothing is.

        For those that `serve` tries.
        """
        headroom = 0 if self._alone else self._headroom + self._incoming.headroom + growth
        return cost + headroom <= self._account.available

    @property
    def _alone(self) -> bool:
        """Whether nothing here will free pages by itself, so that head-room would be kept for nobody."""
        return not self._scheduler.moving and not self._incoming.granted

    def _room(self) -> tuple[int, int, bool]:
        """Changes when `serve` may find more than before."""
        return self._account.releases, self._scheduler.arrivals, self._alone

    def status(self, draining: bool, changes: Changes) -> wire.Status:
        """How much is here and how much waits, and the block keys that entered or left the prefix cache."""
        scheduler = self._scheduler
        return wire.Status(
            waiting=len(scheduler.waiting) + len(self._incoming.deferred),
            running=scheduler.running,
            handing_off=len(scheduler.handing_off) + self._incoming.granted,
            waiting_tokens=scheduler.waiting_tokens,
            pages_free=self._account.free,
            pages_cached=self._account.cached,
            pages_total=self._account.total,
            draining=draining,
            added=changes.added,
            removed=changes.removed,
            reset=changes.reset,
        )
