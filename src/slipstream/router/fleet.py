"""The registry of workers: who is here, in which role, who can hand over to whom.

A worker comes in by URL, from the configuration, from an operator, or from a worker that joins; each URL is looked
after by one `RemoteWorker`. When a link opens, the fleet judges whether the worker may join (same model as the rest,
not the same process under another URL) and tells the workers that may prefill which decode workers there are (Meet), so
that links and preflights are done before a request needs them. From the routes that come back in Status it knows which
pairs have met. A pair whose KV layouts differ is refused here, with both layouts in the log and in the worker's view,
not at the first request.

One task beats once a second: it pings each worker, judges silence, and lets time-dependent decisions be made again. A
worker that is slow to answer keeps what it has; one that answers nothing for `silence_s` is taken for lost, because
nobody waits for ever. Should it come back, it is linked again, and told to forget what it had.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Protocol

from slipstream import wire
from slipstream.errors import ConfigError, LayoutMismatch
from slipstream.router.fetch import normalize
from slipstream.router.place import Standing
from slipstream.router.remote import RemoteWorker
from slipstream.types import Role

logger = logging.getLogger(__name__)

MEET_GRACE_S = 2.0  # how long requests wait for a pair's first route before the pair is tried without one
LOST_AFTER = 3  # missed heartbeats after which a worker on another machine is lost
FORGET_S = 60.0  # after which a worker that joined by itself, and is gone without a word, is waited for no longer
UNHEALTHY_AFTER = 5  # missed heartbeats after which a linked worker gets nothing new


class FleetEvents(Protocol):
    """What the owner of a fleet is told; all on the event loop."""

    def worker_up(self, worker: RemoteWorker) -> None: ...

    def worker_down(self, worker: RemoteWorker, reason: str) -> None: ...

    def worker_message(self, worker: RemoteWorker, message: wire.Message) -> None:
        """Any message but Status."""
        ...

    def fleet_changed(self) -> None:
        """What can be placed where may have changed."""
        ...


class Fleet:
    """All registered workers of one router. Used from one event loop only.

    `patience_s` is how long after the first worker the fleet waits for a role that nobody has had yet before workers
    of the other role are borrowed for it. `silence_s` is how long a linked worker may answer nothing; 0 is for ever.
    """

    def __init__(
        self,
        router_id: str,
        events: FleetEvents,
        *,
        patience_s: float,
        heartbeat_s: float = 1.0,
        silence_s: float = 0.0,
    ) -> None:
        self.router_id = router_id
        self.workers: dict[str, RemoteWorker] = {}  # by URL
        self.served_name = ""
        self._events = events
        self._patience_s = patience_s
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._silent_after = math.ceil(silence_s / heartbeat_s)
        self._by_id: dict[str, RemoteWorker] = {}
        self._roles_seen: set[Role] = set()
        self._first_up: float | None = None
        self._refused_pairs: set[tuple[str, str]] = set()  # already logged
        self._beat: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------ who is registered

    def start(self) -> None:
        self._beat = asyncio.create_task(self._beat_forever(), name="router heartbeat")

    async def stop(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
            self._beat = None
        for worker in list(self.workers.values()):
            self.forget(worker, "the router ends", dismissed=False)
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def add(self, url: str, role: Role | None = None, *, joins: bool = False) -> RemoteWorker:
        """Registers a URL, or wakes the one that is registered; a role given now replaces an earlier one's lack.

        One that `joins` asks for this itself, again and again until it is linked, so that it need not be waited for
        when it is gone.

        Raises ConfigError when `url` is no address, or is registered for another role.
        """
        url = normalize(url)
        worker = self.workers.get(url)
        if worker is None:
            worker = self.workers[url] = RemoteWorker(url, role, self.router_id, self)
            worker.joins = joins
            worker.start()
        elif role is not None and worker.wanted_role not in (role, None):
            raise ConfigError(
                f"{url} is registered as {worker.wanted_role} already and cannot be added as {role}. "
                "Remove it first, or use role=both."
            )
        else:
            worker.joins = worker.joins and joins
            worker.retry_now()
        worker.seen = time.monotonic()
        return worker

    def find(self, url_or_id: str) -> RemoteWorker:
        """The worker with this URL, id or name, a linked one first. Raises ConfigError when there is none."""
        for worker in sorted(self.workers.values(), key=lambda worker: worker.link is None):
            if url_or_id in (worker.url, worker.id, worker.url.removeprefix("http://"), worker.label):
                return worker
        known = ", ".join(f"{w.label} ({w.url})" for w in self.workers.values()) or "none"
        raise ConfigError(f"no worker {url_or_id!r} is registered. Registered are: {known}.")

    def forget(
        self, worker: RemoteWorker, reason: str = "it was removed from the router", *, dismissed: bool = True
    ) -> None:
        """Takes a worker out at once; requests that are there are told through `worker_down`.

        A `dismissed` one is told to stay away until it is added again.
        """
        if self.workers.pop(worker.url, None) is None:
            return
        worker.leaving = True
        task = asyncio.create_task(worker.stop(reason, dismissed=dismissed))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def by_id(self, worker_id: str) -> RemoteWorker | None:
        """The linked worker with this id."""
        return self._by_id.get(worker_id)

    def name_of(self, peer: str) -> str:
        """The name of a linked worker, however a peer calls it; `peer` itself when it is not known."""
        for worker in self._by_id.values():
            if peer in names_of(worker):
                return worker.label
        return peer

    def linked(self) -> list[RemoteWorker]:
        return list(self._by_id.values())

    # ------------------------------------------------------------------------------------------ who can serve

    def standings(self) -> list[Standing]:
        """Of all linked workers, with `usable` brought up to date."""
        found = []
        for worker in self._by_id.values():
            if worker.standing is not None:
                worker.standing.usable = worker.usable
                found.append(worker.standing)
        return found

    def can_meet(self, prefill: str, decode: str) -> bool:
        """Whether KV can travel from one worker to another: same layout, and a route that works.

        A pair that has been told to meet but has not reported is given `MEET_GRACE_S`; then it is tried as it is.
        """
        p, d = self._by_id.get(prefill), self._by_id.get(decode)
        if p is None or d is None or layout_problem(p, d):
            return False
        if reports := routes_to(p, d):
            return not any(report.error for report in reports)
        met = p.met.get(d.wire_address)
        return met is not None and time.monotonic() - met >= MEET_GRACE_S

    def seconds_per_byte(self, prefill: str, decode: str) -> float:
        """What the preflight of the slowest rank pair measured; 0 when nothing is known."""
        p, d = self._by_id.get(prefill), self._by_id.get(decode)
        rates = [r.gb_per_s for r in routes_to(p, d) if r.gb_per_s > 0] if p and d else []
        return 1e-9 / min(rates) if rates else 0.0

    def may_borrow(self, role: Role) -> bool:
        """Whether the absence of `role` is a loss or a choice, and not just a start that is under way."""
        if role in self._roles_seen or "both" in self._roles_seen:
            return True
        return self._first_up is not None and time.monotonic() - self._first_up >= self._patience_s

    def problems_of(self, worker: RemoteWorker) -> list[str]:
        """Why `worker` cannot hand over to, or take over from, other linked workers; one sentence each."""
        problems = []
        for other in self._by_id.values():
            for p, d in ((worker, other), (other, worker)):
                if p is d or p.link is None or p.role == "decode" or d.role == "prefill":
                    continue
                if problem := layout_problem(p, d):
                    problems.append(problem)
                for report in routes_to(p, d):
                    if report.error:
                        problems.append(f"no route from {p.label} to {d.label}: {report.error}")
        return problems

    def problems(self) -> list[str]:
        """Those of all linked workers, each once."""
        return list(dict.fromkeys(problem for worker in self._by_id.values() for problem in self.problems_of(worker)))

    # ------------------------------------------------------------------------------------------ from RemoteWorker

    def admit(self, worker: RemoteWorker, info: wire.WorkerInfo) -> str | None:
        twin = self._by_id.get(info.id)
        if twin is not None and twin is not worker:
            return f"it is the same process as {twin.url}, which is registered already; remove one of the two URLs"
        others = [w for w in self._by_id.values() if w is not worker]
        other = next((w.info for w in others if w.info and w.info.weights != info.weights), None)
        if other is not None and info.served_name == self.served_name:
            return (
                f"it serves other weights than {other.name} under the same name {info.served_name!r} "
                f"({info.weights} and {other.weights}), and answers would depend on the worker. Start it with the "
                "same model."
            )
        if others and info.served_name != self.served_name:
            return (
                f"it serves the model {info.served_name!r}; this router's workers serve {self.served_name!r}. "
                "A router serves one model: start the worker with that model (or --served-model-name), or use another "
                "router."
            )
        return None

    def up(self, worker: RemoteWorker) -> None:
        assert worker.info is not None
        self._by_id[worker.id] = worker
        self._forget_former(worker)
        self.served_name = worker.info.served_name
        self._roles_seen.add(worker.role)
        self._first_up = self._first_up or time.monotonic()
        logger.info(
            "%s linked: %s, role %s, %s, pid %d on %s",
            worker.label, worker.url, worker.role, ", ".join(worker.info.devices), worker.info.pid, worker.info.host,
        )  # fmt: skip
        self._refuse_pairs(worker)
        self._events.worker_up(worker)
        self.introduce()
        self._events.fleet_changed()

    def down(self, worker: RemoteWorker, reason: str) -> None:
        self._by_id.pop(worker.id, None)
        worker.seen = time.monotonic()
        if worker.leaving or worker.said_goodbye:
            logger.info("%s left: %s", worker.label, reason)
        else:
            logger.warning("%s lost: %s", worker.label, reason)
        self._refused_pairs = {pair for pair in self._refused_pairs if worker.id not in pair}
        self._events.worker_down(worker, reason)
        self.introduce()
        self._events.fleet_changed()

    def left(self, worker: RemoteWorker) -> None:
        """One that had joined by itself will come back by itself; one that was named here is waited for."""
        if worker.joins:
            self.forget(worker)

    def _forget_silent(self) -> None:
        """Takes out those that joined by themselves and have ended without a word: at that address nobody may ever be
        again, and if the same worker is, it joins again."""
        for worker in list(self.workers.values()):
            gone = time.monotonic() - worker.seen
            kept = worker.silent and worker.same_machine  # `serve` kills it
            mute = worker.unanswered_s > 0 and (worker.info is None or worker.same_machine)  # and may become that
            patience = FORGET_S + 3 * self._silence_s * mute
            if worker.joins and worker.link is None and gone > patience and not kept:
                text = "%s at %s has been gone for %.0f s; it is forgotten until it joins again"
                logger.info(text, worker.name, worker.url, gone)
                self.forget(worker)

    def _forget_former(self, worker: RemoteWorker) -> None:
        """Takes out what a process joined with that came back elsewhere under its name."""
        for other in list(self.workers.values()):
            if other is not worker and other.link is None and other.joins and other.label == worker.label:
                logger.info("%s is back as %s; %s is forgotten", worker.label, worker.url, other.url)
                self.forget(other)

    def message(self, worker: RemoteWorker, message: wire.Message) -> None:
        if type(message) is wire.Status:
            self._status(worker, message)
        else:
            self._events.worker_message(worker, message)

    def changed(self, worker: RemoteWorker) -> None:
        self._events.fleet_changed()

    # ------------------------------------------------------------------------------------------ inside

    def introduce(self) -> None:
        """Sends Meet to each worker that may prefill and whose set of possible decode workers has changed."""
        decodes = [w for w in self._by_id.values() if w.role != "prefill" and w.state in ("live", "unhealthy")]
        now = time.monotonic()
        for p in self._by_id.values():
            if p.role == "decode":
                continue
            peers = {d.wire_address for d in decodes if d is not p and not layout_problem(p, d)}
            changed = peers != p.met.keys()
            p.met = {address: p.met.get(address, now) for address in peers}
            if changed:
                p.send(wire.Meet(peers=sorted(peers)))

    def _status(self, worker: RemoteWorker, status: wire.Status) -> None:
        before = worker.status
        worker.status = status
        if worker.standing is not None:
            worker.standing.update(status)
        routes: dict[str, list[wire.RouteReport]] = {}
        for report in status.routes:
            routes.setdefault(report.peer, []).append(report)
        news = routes != worker.routes or (before is not None and before.draining) != status.draining
        worker.routes = routes
        if news:
            self.introduce()
            self._events.fleet_changed()

    def _refuse_pairs(self, new: RemoteWorker) -> None:
        for other in self._by_id.values():
            for p, d in ((new, other), (other, new)):
                pair = (p.id, d.id)
                if p is d or pair in self._refused_pairs or p.role == "decode" or d.role == "prefill":
                    continue
                if problem := layout_problem(p, d):
                    self._refused_pairs.add(pair)
                    logger.error("%s", LayoutMismatch(problem))

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for worker in list(self._by_id.values()):
                worker.beat(UNHEALTHY_AFTER, LOST_AFTER, self._silent_after)
            for worker in self.workers.values():
                worker.silent |= 0 < self._silence_s <= worker.unanswered_s
            self._forget_silent()
            self._events.fleet_changed()


def layout_problem(p: RemoteWorker, d: RemoteWorker) -> str:
    """Why the KV of p means nothing to d; "" when it does."""
    if p.info is None or d.info is None or p.info.fingerprint == d.info.fingerprint:
        return ""
    return (
        f"KV layout differs: {p.label} has {p.info.fingerprint_text}; {d.label} has {d.info.fingerprint_text}. "
        "They cannot hand over requests to each other. Start both with the same model, --page-tokens and --dtype."
    )


def names_of(worker: RemoteWorker) -> list[str]:
    """What a peer may call this worker in its route reports."""
    return [worker.id, worker.wire_address, worker.label]


def routes_to(p: RemoteWorker, d: RemoteWorker) -> list[wire.RouteReport]:
    for name in names_of(d):
        if found := p.routes.get(name):
            return found
    return []
