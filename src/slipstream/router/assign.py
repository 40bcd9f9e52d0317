"""Gives requests to workers: chooses, charges the standings, submits; and takes the charges back.

After a Failed that speaks of the other worker of the pair, that worker is suspected until it answers a Ping: either its
Pong or the end of its link follows at once, and no request is sent into the grave of a worker whose death its peer has
seen first.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from slipstream import wire
from slipstream.config import RouterConfig
from slipstream.errors import ContextTooLong, NoWorkers
from slipstream.router.fleet import Fleet
from slipstream.router.life import Life
from slipstream.router.metrics import RouterMetrics
from slipstream.router.place import NOTHING_TO_AVOID, Avoid, Placement, Prompt, place
from slipstream.router.remote import RemoteWorker
from slipstream.types import Request, Role

logger = logging.getLogger(__name__)

HELP_SAID_S = 60.0  # a log line about helping decode workers at most so often
TOLD_PROBLEMS = 2  # of pairs that cannot be made, in a refusal


class Assignment:
    """The placing of one router's requests. What is charged to a standing is in `Life.charged` and `Life.decode`."""

    def __init__(self, fleet: Fleet, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._strict = config.strict_roles
        self._metrics = metrics
        self._suspects: dict[str, int] = {}  # worker id -> the ping that clears it
        self._borrowing: set[Role] = set()
        self._turns = 0
        self._help_said = -HELP_SAID_S

    # ------------------------------------------------------------------------------------------ giving

    def choose(self, prompt: Prompt, avoid: Avoid = NOTHING_TO_AVOID, *, last_chance: bool = False) -> Placement | None:
        """The best pair now; None when there is none. At its last chance a request need not wait for a role to come."""
        standings, now = self._fleet.standings(), time.monotonic()
        for standing in standings:
            standing.reckon(now)
            standing.usable = standing.usable and standing.id not in self._suspects
        borrow = {
            role: not self._strict and (last_chance or self._fleet.may_borrow(role)) for role in ("prefill", "decode")
        }
        return place(
            prompt,
            standings,
            self._fleet.can_meet,
            seconds_per_byte=self._fleet.seconds_per_byte,
            borrow_prefill=borrow["prefill"],
            borrow_decode=borrow["decode"],
            help_out=not self._strict,
            avoid=avoid,
        )

    def place(self, life: Life, *, last_chance: bool = False) -> bool:
        """Submits a request to the best pair; False when there is none."""
        placement = self.choose(life.prompt(), life.avoid, last_chance=last_chance)
        if placement is None:
            return False
        p, d = self._fleet.by_id(placement.prefill), self._fleet.by_id(placement.decode)
        assert p is not None
        assert d is not None
        life.begin(placement)
        p.send(wire.Submit(request=life.submission(), decode_at=None if placement.local else d.wire_address))
        tokens = len(life.request.prompt_ids) + len(life.delivered)
        life.entry.placed(placement, tokens, p, d, len(self._fleet.linked()))
        self._count(life, placement, p, d)  # behind the sending: what cannot be sent leaves no charge
        self._charge(placement, p, d)
        return True

    def _charge(self, placement: Placement, p: RemoteWorker, d: RemoteWorker) -> None:
        assert p.standing is not None
        assert d.standing is not None
        self._turns += 1
        p.standing.charge(placement.to_compute, time.monotonic())
        p.standing.keys.promise(placement.keys)
        d.standing.expect(local=placement.local)
        p.standing.chosen = d.standing.chosen = self._turns

    def _count(self, life: Life, placement: Placement, p: RemoteWorker, d: RemoteWorker) -> None:
        self._metrics.placements.labels(p.label, d.label).inc()
        if life.resubmissions == 0:
            self._metrics.queue_wait.observe(time.monotonic() - life.since)
            self._metrics.prompt_tokens.inc(len(life.request.prompt_ids))
        role = placement.borrowed
        if role is not None:
            self._metrics.borrowed.labels(role).inc()
            if role not in self._borrowing:
                logger.warning("no %s worker is usable: %s does that work too until one is back", role, p.label)
                self._borrowing.add(role)
        elif placement.helping:
            self._metrics.borrowed.labels("prefill").inc()
            self._say_help(p)
        elif self._borrowing:
            logger.info("workers of every role are usable again; nothing is borrowed any more")
            self._borrowing.clear()

    def _say_help(self, helper: RemoteWorker) -> None:
        now = time.monotonic()
        if now - self._help_said >= HELP_SAID_S:
            self._help_said = now
            queued = sum(s.queued for s in self._fleet.standings() if s.may_prefill())
            logger.info(
                "%d prompt tokens wait at the prefill workers: %s computes prompts too (not with strict_roles)",
                queued,
                helper.label,
            )

    # ------------------------------------------------------------------------------------------ taking back

    def discharge_prefill(self, life: Life) -> None:
        """Its prompt is computed, or will not be."""
        if life.charged:
            worker = self._fleet.by_id(life.prefill)
            if worker is not None and worker.standing is not None:
                worker.standing.discharge(life.charged, time.monotonic())
                worker.standing.keys.settle(life.placement.keys if life.placement else ())
            life.charged = 0
            decoder = self._fleet.by_id(life.decode)
            if decoder is not None and decoder.standing is not None and life.prefill != life.decode:
                decoder.standing.came()

    def discharge(self, life: Life) -> None:
        """It leaves its workers."""
        self.discharge_prefill(life)
        worker = self._fleet.by_id(life.decode)
        if worker is not None and worker.standing is not None:
            worker.standing.sequences -= 1

    # ------------------------------------------------------------------------------------------ suspects

    def suspect(self, worker_id: str) -> None:
        worker = self._fleet.by_id(worker_id)
        if worker is not None and worker_id not in self._suspects:
            self._suspects[worker_id] = worker.ping()

    def cleared(self, worker_id: str, ping: int) -> bool:
        """Whether this answered ping ends a suspicion."""
        if self._suspects.get(worker_id, ping + 1) > ping:
            return False
        del self._suspects[worker_id]
        return True

    def forget(self, worker_id: str) -> None:
        self._suspects.pop(worker_id, None)

    # ------------------------------------------------------------------------------------------ refusals

    def too_long(self, request: Request) -> ContextTooLong | None:
        lengths = [w.info.max_model_len for w in self._fleet.linked() if w.info is not None and w.usable]
        prompt, answer = len(request.prompt_ids), request.sampling.max_tokens
        if not lengths or prompt + answer <= min(lengths):
            return None
        return ContextTooLong(
            f"the prompt has {prompt} tokens and max_tokens is {answer}, together {prompt + answer}; this model's "
            f"context is {min(lengths)} tokens here. Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )

    def no_workers(self) -> NoWorkers:
        found = Counter((w.role, w.state) for w in self._fleet.workers.values())
        seen = ", ".join(f"{count} {role} {state}" for (role, state), count in sorted(found.items())) or "none"
        why = "".join(f" {problem.rstrip('.')}." for problem in self._fleet.problems()[:TOLD_PROBLEMS])
        return NoWorkers(
            f"no pair of workers can serve this request now. Registered workers: {seen}.{why} Try again in a moment; "
            "the operator finds the reasons in the log and under /workers."
        )
