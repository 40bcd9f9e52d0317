"""All requests under way, and what happens to each when something happens to a worker.

`submit` places a request at once if a pair of workers can take it, else it waits for the fleet to change, for up to
`worker_wait_s`. From then on it lives by messages: tokens, Adopted, Failed, the end of a link. Whatever ends an attempt
early comes through `_continue`, which gives the request to other workers with what the client already has, or answers
with the error when it has been continued often enough. Whatever ends a request comes through `_end`.

A request with two workers is abandoned at both when one of them fails it, and Abort names the attempt, so that a
handoff that was under way can end in either worker and is dropped there. A worker that adopts a request which is not
expected of it any more is told Abort too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from slipstream import wire
from slipstream.config import RouterConfig
from slipstream.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    NoWorkers,
    PeerLost,
    QueueFull,
    RequestError,
    RouteUnavailable,
    TransferError,
    WorkerLost,
    request_error,
)
from slipstream.router.assign import Assignment
from slipstream.router.fleet import Fleet
from slipstream.router.journal import Journal
from slipstream.router.life import Life, Sink, Verdict
from slipstream.router.metrics import RouterMetrics
from slipstream.router.place import Avoid, Placement, Prompt
from slipstream.router.remote import RemoteWorker
from slipstream.telemetry.trace import Spans
from slipstream.types import FinishReason, Request, Tokens

logger = logging.getLogger(__name__)

PEER_TROUBLE = {WorkerLost.code, PeerLost.code, TransferError.code, RouteUnavailable.code}


class Lives:
    """The table of requests under way. Used from one event loop only; `closed` refuses everything new."""

    def __init__(self, fleet: Fleet, config: RouterConfig, metrics: RouterMetrics, spans: Spans | None = None) -> None:
        self.closed = False
        self.journal = Journal(spans)
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._assign = Assignment(fleet, config, metrics)
        self._lives: dict[str, Life] = {}
        self._waiting: dict[str, Life] = {}
        self._holding: dict[str, Life] = {}  # those with held tokens
        self._leaving: list[RemoteWorker] = []

    # ------------------------------------------------------------------------------------------ from the front

    def submit(self, request: Request, sink: Sink) -> None:
        """Raises RequestError when the request cannot be taken; from then on the sink is told."""
        if self.closed:
            raise NoWorkers("the server is shutting down; send the request again in a moment")
        if len(self._lives) >= self._config.max_queue:
            raise QueueFull(
                f"{len(self._lives)} requests are under way, as many as this server admits (max_queue="
                f"{self._config.max_queue}); try again later"
            )
        if request.id in self._lives:
            raise InvalidRequest(f"request id {request.id!r} is in use by a request that is under way; choose another")
        if problem := self._assign.too_long(request):
            raise problem
        life = Life(request, sink, time.monotonic(), self.journal.begin(request))
        if not self._assign.place(life):
            if self._config.worker_wait_s <= 0:
                raise self._assign.no_workers()
            self._wait(life)
        self._lives[request.id] = life
        life.deadline = asyncio.get_running_loop().call_later(self._config.request_timeout_s, self._expired, life)

    def abort(self, request_id: str, finish: FinishReason | None = None) -> None:
        """Ends a request without an answer, or with the one it has if it is finished; an unknown id is ignored."""
        life = self._lives.get(request_id)
        if life is not None:
            self._abandon(life)
            self._end(life)
            counter = self._metrics.aborted if finish is None else self._metrics.finished.labels(finish)
            counter.inc()

    # ------------------------------------------------------------------------------------------ from workers

    def tokens(self, worker: RemoteWorker, t: Tokens) -> None:
        life = self._lives.get(t.request)
        if life is None or life.attempt != t.attempt:
            self._metrics.stale_tokens.inc()
            return
        verdict = life.receive(t, worker.id)
        if verdict is Verdict.DELIVER:
            if life.charged:
                self._assign.discharge_prefill(life)
            self._deliver(life, t)
            if life.held:
                self._release_held(life)
        elif verdict is Verdict.HELD:
            self._hold(life)
        elif verdict is Verdict.GAP:
            self._gap(life, t.index)
        else:
            logger.debug("%s: tokens of %s ignored: %s", worker.label, t.request, verdict.name)

    def adopted(self, worker: RemoteWorker, message: wire.Adopted) -> None:
        life = self._lives.get(message.request)
        if life is None or life.attempt != message.attempt or life.decode != worker.id:
            worker.send(wire.Abort(request=message.request, attempt=message.attempt))
            return
        life.adopt()
        self._assign.discharge_prefill(life)

    def failed(self, worker: RemoteWorker, message: wire.Failed) -> None:
        life = self._lives.get(message.request)
        if life is None or life.attempt != message.attempt or worker.id not in (life.prefill, life.decode):
            return
        if life.owner != worker.id and life.stage == "decode":
            logger.debug("%s failed %s after handing it over: %s", worker.label, life.request.id, message.message)
            return
        of_peer = message.code in PEER_TROUBLE
        error = lost("decode", life) if of_peer else request_error(message.code, message.message)
        if not message.retriable:
            self._abandon(life, but=worker.id)
            self._fail(life, error)
            return
        text = "%s failed %s: %s (%s)"
        logger.warning(text, worker.label, life.request.id, message.message, message.code, extra=_named(life))
        avoid = life.avoid.but_worker(worker.id)
        if worker.id != life.decode and of_peer:
            avoid = life.avoid.but(life.prefill, life.decode)
            self._assign.suspect(life.decode)
        elif worker.id != life.decode and message.code == NoWorkers.code and worker.state != "draining":
            avoid = life.avoid.but_worker(life.decode)  # it takes nothing more; its own word of that is under way
        self._continue(life, error, message.code, avoid=avoid, but=worker.id)

    def pong(self, worker: RemoteWorker, n: int) -> None:
        """Everything that the worker sent before this Pong is here."""
        for life in list(self._holding.values()):
            if life.prefill == worker.id and n >= life.gap_ping:
                self._gap(life, life.held[0].index)
        if self._assign.cleared(worker.id, n):
            self.dispatch()

    def worker_up(self, worker: RemoteWorker) -> None:
        """The same process may have been linked before: what it had then is not wanted any more."""
        process, aborts = worker.left_behind
        worker.left_behind = ("", [])
        for abort in aborts if process == worker.id else ():
            worker.send(abort)

    def worker_down(self, worker: RemoteWorker) -> None:
        self._assign.forget(worker.id)
        touched = [life for life in self._lives.values() if worker.id in (life.prefill, life.decode)]
        aborts = [wire.Abort(request=life.request.id, attempt=life.attempt) for life in touched]
        worker.left_behind = (worker.id, aborts)
        for life in touched:
            if worker.id not in (life.prefill, life.decode):
                continue  # ended or moved on by what became of one before it
            if life.owner != worker.id and life.stage == "decode" and not life.held:
                life.prefill = ""  # the decode worker has it; that its first token is missing would show later
                continue
            role = "prefill" if worker.id == life.prefill else "decode"
            self._continue(life, lost(role, life), WorkerLost.code, avoid=life.avoid, but=worker.id)
        self._let_go()

    def leave(self, worker: RemoteWorker) -> None:
        """Gives the worker nothing new, and takes it out of the fleet when it has nothing of ours left."""
        worker.leaving = True
        self._leaving.append(worker)
        self._let_go()

    # ------------------------------------------------------------------------------------------ placing

    def dispatch(self) -> None:
        """Places what waits, in order of arrival. A pair that can take one can take any: the first failure ends it."""
        for life in list(self._waiting.values()):
            if self._waiting.get(life.request.id) is life and not self._stop_waiting(life):
                return

    def _wait(self, life: Life) -> None:
        self._waiting[life.request.id] = life
        loop = asyncio.get_running_loop()
        life.patience = loop.call_later(self._config.worker_wait_s, self._out_of_patience, life)

    def _stop_waiting(self, life: Life, *, last_chance: bool = False) -> bool:
        """Places one that waits, if that is possible now."""
        if not self._assign.place(life, last_chance=last_chance):
            return False
        del self._waiting[life.request.id]
        if life.patience is not None:
            life.patience.cancel()
        return True

    def _out_of_patience(self, life: Life) -> None:
        if not self._stop_waiting(life, last_chance=True):
            nobody = f"no other could go on with it within {self._config.worker_wait_s:g} s, which --worker-wait-s sets"
            self._fail(life, _final(life.lost, nobody) if life.lost else self._assign.no_workers())

    # ------------------------------------------------------------------------------------------ tokens, slow path

    def _deliver(self, life: Life, t: Tokens) -> None:
        if not life.entry.first:
            life.entry.spoke()
        if t.cached_tokens:
            self._metrics.prefix_hit_tokens.inc(t.cached_tokens)
        if t.finish is not None:
            self._end(life)
            self._metrics.finished.labels(t.finish).inc()
        try:
            life.sink.tokens(t)
        except Exception:  # the edge to the front: one client's trouble must not end a worker's link for all others
            logger.exception("the receiver of %s failed; the request is aborted", t.request)
            self.abort(t.request)

    def _hold(self, life: Life) -> None:
        """The decode worker is ahead. The prefill worker's answer to a Ping follows the tokens that are missing."""
        if len(life.held) > 1:
            return
        self._assign.discharge_prefill(life)
        prefill = self._fleet.by_id(life.prefill)
        if prefill is None:
            self._continue(life, lost("prefill", life), WorkerLost.code, avoid=life.avoid)
            return
        self._holding[life.request.id] = life
        life.gap_ping = prefill.ping()

    def _release_held(self, life: Life) -> None:
        while life.stage != "ended" and (t := life.next_held()) is not None:
            if life.receive(t, life.decode) is Verdict.DELIVER:
                self._deliver(life, t)
        if not life.held:
            self._holding.pop(life.request.id, None)

    def _gap(self, life: Life, index: int) -> None:
        have = len(life.delivered)
        text = "%s: tokens %d to %d never came; the request ends"
        logger.error(text, life.request.id, have, index - 1, extra=_named(life))
        self._abandon(life)
        self._fail(
            life,
            EngineFailure(f"tokens {have} to {index - 1} of the answer were lost between the workers and the router"),
        )

    # ------------------------------------------------------------------------------------------ ends

    def _continue(self, life: Life, error: RequestError, cause: str, *, avoid: Avoid, but: str = "") -> None:
        """The attempt is over without a finish: gives the request to other workers, or answers with `error`."""
        self._abandon(life, but=but)
        self._release(life)
        if life.resubmissions >= self._config.resubmissions:
            already = f"it had been given to others {life.resubmissions} times before, which --resubmissions sets"
            self._fail(life, _final(error, already))
            return
        if len(life.delivered) >= life.request.sampling.max_tokens:
            self._deliver(life, Tokens(life.request.id, life.attempt, len(life.delivered), [], finish="length"))
            return
        life.again()
        life.avoid = avoid
        life.lost = error
        life.entry.resubmitted(cause, len(life.delivered))
        self._metrics.resubmissions.labels(cause).inc()
        text = "%s continues elsewhere behind %d tokens, attempt %d"
        logger.info(text, life.request.id, len(life.delivered), life.entry.attempts, extra=_named(life))
        if not self._assign.place(life):
            self._wait(life)

    def _abandon(self, life: Life, but: str = "") -> None:
        """Abort for this attempt to the workers that may have it, except `but`, which has said that it has not."""
        for worker_id in {life.prefill, life.decode} - {but, ""}:
            worker = self._fleet.by_id(worker_id)
            if worker is not None:
                worker.send(wire.Abort(request=life.request.id, attempt=life.attempt))

    def _release(self, life: Life) -> None:
        """Takes the request off its workers' standings and out of the present attempt."""
        self._assign.discharge(life)
        self._holding.pop(life.request.id, None)
        life.withdraw()
        if self._leaving:
            self._let_go()

    def _fail(self, life: Life, error: RequestError) -> None:
        self._end(life)
        self._metrics.failures.labels(error.code).inc()
        try:
            life.sink.error(error)
        except Exception:  # as in _deliver; there is nothing left to abort
            logger.exception("the receiver of %s failed at its error %s", life.request.id, error.code)

    def _expired(self, life: Life) -> None:
        self._abandon(life)
        seconds = self._config.request_timeout_s
        self._fail(life, DeadlineExceeded(f"the request took longer than {seconds:g} s (request_timeout_s)"))

    def _end(self, life: Life) -> None:
        self._release(life)
        life.stage = "ended"
        self._lives.pop(life.request.id, None)
        self._waiting.pop(life.request.id, None)
        for timer in (life.deadline, life.patience):
            if timer is not None:
                timer.cancel()

    def _let_go(self) -> None:
        """Takes out leaving workers that have nothing of ours left."""
        for worker in list(self._leaving):
            if not self.at(worker.id):
                self._leaving.remove(worker)
                self._fleet.forget(worker)

    # ------------------------------------------------------------------------------------------ questions

    def placement(self) -> Placement | None:
        """Where a short request would go now; None when no pair of workers could take it."""
        return self._assign.choose(Prompt([0]))

    def at(self, worker_id: str) -> int:
        """Requests under way at this worker."""
        return sum(worker_id in (life.prefill, life.decode) for life in self._lives.values()) if worker_id else 0

    def stages(self) -> dict[str, int]:
        """Requests under way, by stage."""
        found = {"waiting": 0, "prefill": 0, "handoff": 0, "decode": 0}
        for life in self._lives.values():
            found[life.stage] += 1
        return found

    def load(self) -> dict[str, int]:
        """Requests under way, each once: `queued` here or, as far as their prefill workers have reported, there."""
        at = Counter(life.prefill for life in self._lives.values() if life.stage == "prefill")
        queued = sum(life.stage == "waiting" for life in self._lives.values())
        for worker_id, count in at.items():
            worker = self._fleet.by_id(worker_id)
            if worker is not None and worker.status is not None:
                queued += min(count, worker.status.waiting)
        return {"queued": queued, "running": len(self._lives) - queued}

    def under_way(self) -> list[Life]:
        return list(self._lives.values())

    def leftovers(self) -> list[str]:
        """What is remembered of requests that are not under way, or not in the stage for it."""
        problems = [
            f"{name} is in the queue but not waiting" for name in self._waiting if not self._is(name, "waiting")
        ]
        problems += [f"{name} is held but not decoding" for name in self._holding if not self._is(name, "decode")]
        return problems

    def _is(self, request_id: str, stage: str) -> bool:
        life = self._lives.get(request_id)
        return life is not None and life.stage == stage

    def close(self) -> None:
        """Ends everything under way with an error; nothing is taken from now on."""
        self.closed = True
        for life in list(self._lives.values()):
            if life.stage != "ended":
                self._abandon(life)
                self._fail(life, NoWorkers("the server is shutting down; send the request again in a moment"))


def _named(life: Life) -> dict[str, object]:
    """What a program finds a request's log lines by; attempts are counted as in its timeline, from 1."""
    return {"request": life.request.id, "attempt": life.entry.attempts}


def lost(role: str, life: Life) -> WorkerLost:
    return WorkerLost(f"the {role} worker of this request was lost after {len(life.delivered)} tokens")


def _final(error: RequestError, why: str) -> RequestError:
    """What the client is told when `why` the loss of a worker is the end of its request."""
    return WorkerLost(f"{error.message}, and {why}; send it again") if isinstance(error, WorkerLost) else error
