"""The observer of a worker: the recent past of its requests, and what can be counted of it.

A request that is here has a Record: a few moments, and a short tuple for each chunk, copy and wait. Ended ones are kept
until `RECENT` newer ones have ended or the notes of all together pass `NOTES`. Steps are noted once each, whatever
they hold, in a ring of their own; the decode runs of a request are put together from it when somebody asks. So a
decoding token costs nothing here, and a step about a microsecond.

Written on the loop thread. `chapter` may be called on any other: what it reads only grows, and it reads copies.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from typing import Any

from slipstream import wire
from slipstream.engine.incoming import Arrival
from slipstream.engine.metrics import WorkerMetrics
from slipstream.engine.observe import Chunks
from slipstream.engine.sequence import Sequence
from slipstream.telemetry.clock import now
from slipstream.transfer.job import CopyTimes

RECENT = 512
NOTES = 100_000  # over all ended records; some 30 MB
NOTES_EACH = 4096
STEPS = 8192
RUN_STEPS = 16  # decode steps that are shown as one event
SITS_OUT = 2  # steps that a sequence may miss at the beginning of a run, where they overlap
RATE_S = 1.0

Note = tuple[float, float, str, dict[str, Any]]  # start, seconds, name, attributes
Step = tuple[float, float, int, int]  # start, end, sequences that decoded, prompt tokens


class Record:
    """One attempt of one request on this worker. Times are those of `telemetry.clock.now`; 0 means not yet."""

    __slots__ = (
        "admitted",
        "adopted",
        "arrived",
        "attempt",
        "cached_tokens",
        "committed",
        "copied_bytes",
        "deferred",
        "ended",
        "first",
        "handed_over",
        "id",
        "message",
        "notes",
        "offered",
        "outcome",
        "outputs",
        "peer",
        "preempted",
        "prefilled",
        "prompt_tokens",
        "running_since",
        "running_tokens",
        "runs",
        "trace",
        "transports",
        "waiting_since",
    )

    def __init__(self, request_id: str, attempt: int, arrived: float) -> None:
        self.id = request_id
        self.attempt = attempt
        self.arrived = self.waiting_since = arrived
        self.notes: list[Note] = []
        self.runs: list[tuple[float, float, int]] = []  # start, end, tokens decoded
        self.admitted = self.first = self.offered = self.committed = self.ended = self.running_since = 0.0
        self.prefilled = self.running_tokens = self.copied_bytes = self.prompt_tokens = self.outputs = 0
        self.cached_tokens = 0
        self.deferred = self.preempted = self.handed_over = self.adopted = False
        self.peer = self.outcome = self.message = ""
        self.transports: set[str] = set()
        self.trace: dict[str, str] = {}

    def note(self, start: float, end: float, name: str, attributes: dict[str, Any]) -> None:
        if len(self.notes) < NOTES_EACH:
            self.notes.append((start, end - start, name, attributes))


class Watcher:
    """Notes and counts what the core tells it; see `engine.observe.Observer`.

    `on_end`, where it is set, is given each record when its request has left, on the loop thread; it must not wait.
    """

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.on_end: Callable[[Record], None] | None = None
        self._metrics = metrics
        self._here: dict[tuple[str, int], Record] = {}
        self._past: OrderedDict[tuple[str, int], Record] = OrderedDict()
        self._past_notes = 0
        self._planned: dict[int, float] = {}
        self._settled_at = 0.0
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._times: CopyTimes | None = None
        metrics.decode_rate = self._decode_rate

    # ------------------------------------------------------------------------------------------ steps

    def planned(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None:
        self._planned[step] = now()

    def settled(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None:
        end = now()
        start = max(self._planned.pop(step, end), self._settled_at)  # a step may be planned while another computes
        self._settled_at = end
        prompt = 0
        for sequence, count in chunks:
            prompt += count
            record = self._here.get(sequence.identity)
            if record is not None:
                attributes = {"tokens": count, "from": record.prefilled, "step": step, "decoding": len(decodes)}
                record.prefilled += count
                record.note(start, end, "prefill_chunk", attributes)
        self._steps.append((start, end, len(decodes), prompt))
        if decodes:
            self._metrics.token_seconds.only().observe(end - start, len(decodes))

    def step_failed(self, step: int, decodes: List[Sequence], chunks: Chunks) -> None:
        self._planned.pop(step, None)
        self._metrics.retried.add(len(decodes) + len(chunks))

    # ------------------------------------------------------------------------------------------ here

    def submitted(self, sequence: Sequence) -> None:
        request = sequence.request
        record = Record(request.id, request.attempt, now())
        record.trace = request.trace
        record.prompt_tokens = sequence.prompt_tokens
        self._here[sequence.identity] = record

    def admitted(self, sequence: Sequence) -> None:
        record = self._here.get(sequence.identity)
        if record is None:
            return
        moment = now()
        attributes: dict[str, Any] = {"cached_tokens": sequence.computed}
        if record.preempted:
            attributes["preempted"] = True
        record.note(record.waiting_since, moment, "queued", attributes)
        record.prefilled = sequence.computed
        if not record.admitted:
            record.admitted = moment
            record.cached_tokens = sequence.computed
            self._metrics.queue_seconds.only().observe(moment - record.arrived)
            self._metrics.prompt_tokens.add(len(sequence.tokens))
            self._metrics.cached_tokens.add(sequence.computed)

    def sampled(self, sequence: Sequence) -> None:
        record = self._here.get(sequence.identity)
        if record is None:
            return
        moment = now()
        if not record.first:
            record.first = moment
            record.note(moment, moment, "first_token", {})
            self._metrics.prefill_seconds.only().observe(moment - record.admitted)
            self._metrics.first_token_seconds.only().observe(moment - record.arrived)
        if sequence.handoff is None:
            record.running_since, record.running_tokens = moment, sequence.outputs + 1

    def preempted(self, sequence: Sequence) -> None:
        self._metrics.preemptions.add()
        record = self._here.get(sequence.identity)
        if record is not None:
            self._close_run(record, sequence)
            record.preempted, record.waiting_since = True, now()

    def failed(self, sequence: Sequence, code: str, message: str) -> None:
        self._leave(sequence, code, message)

    def ended(self, sequence: Sequence, code: str) -> None:
        self._leave(sequence, code)

    # ------------------------------------------------------------------------------------------ as a source

    def offered(self, sequence: Sequence) -> None:
        record = self._here.get(sequence.identity)
        if record is not None:
            record.offered, record.deferred, record.peer = now(), False, sequence.destination or ""

    def answered(self, sequence: Sequence, message: wire.Message) -> None:
        record = self._here.get(sequence.identity)
        match message:
            case wire.Defer():
                self._metrics.deferred.add()
                if record is not None:
                    record.deferred = True
            case wire.Grant(skip_tokens=skip) if record is not None:
                moment = now()
                attributes = {"peer": record.peer, "deferred": record.deferred, "known_tokens": skip}
                record.note(record.offered, moment, "offer", attributes)
                self._metrics.grant_seconds.only().observe(moment - record.offered)
            case wire.Refuse(code=code) | wire.Revoke(code=code) if record is not None:
                record.note(record.offered, now(), "offer", {"peer": record.peer, "refused": code})
            case _:
                pass

    def copying(self, sequence: Sequence, pages: int) -> None:
        pass

    def timed(self, times: CopyTimes | None) -> None:
        """The times of the copy whose end the core is told of next."""
        self._times = times

    def copied(self, sequence: Sequence, failure: str | None) -> None:
        times, self._times = self._times, None
        if times is None:
            return
        handoff, metrics = sequence.handoff, self._metrics
        peer = handoff.peer if handoff is not None else ""
        transport = times.transport or "none"
        began = times.begun or times.ended
        seconds, waited = times.ended - began, max(0.0, began - times.submitted)
        attributes: dict[str, Any] = {"peer": peer, "transport": transport, "pages": times.pages, "queued_s": waited}
        record = self._here.get(sequence.identity)
        if failure is not None:
            attributes["failed"] = failure
            metrics.copy_failures.add(1, transport)
        else:
            attributes["bytes"] = times.bytes
            attributes["bytes_per_second"] = times.bytes / seconds if seconds > 0 else 0.0
            metrics.copies.add(1, transport)
            metrics.transfer_bytes.add(times.bytes, transport)
            metrics.copy_wire.observe(seconds, transport)
            metrics.copy_queue.observe(waited, transport)
            if seconds > 0:
                metrics.copy_rate.observe(times.bytes / seconds, transport)
        if record is not None:
            record.note(began, times.ended, "copy_chunk", attributes)
            record.copied_bytes += times.bytes
            record.transports.add(transport)

    def committed(self, sequence: Sequence) -> None:
        record = self._here.get(sequence.identity)
        if record is not None:
            record.committed = now()

    def handed_over(self, sequence: Sequence) -> None:
        record = self._here.get(sequence.identity)
        if record is None:
            return
        moment = now()
        record.note(record.committed, moment, "commit", {"peer": record.peer})
        record.handed_over = True
        self._metrics.handoffs.add(1, "source")
        self._metrics.handoff_bytes.only().observe(record.copied_bytes)
        self._metrics.handoff_seconds.only().observe(moment - record.first)
        self._leave(sequence, "handed_over")

    def handoff_failed(self, sequence: Sequence, code: str, message: str) -> None:
        self._metrics.handoff_failures.add(1, code)

    # ------------------------------------------------------------------------------------------ as a destination

    def offer_came(self, arrival: Arrival) -> None:
        offer = arrival.handoff.offer
        record = Record(offer.request, offer.attempt, now())
        record.peer = arrival.handoff.peer
        arrival.note = record

    def replied(self, arrival: Arrival, message: wire.Message) -> None:
        record = arrival.note
        if not isinstance(record, Record):
            return
        match message:
            case wire.Defer():
                record.deferred = True
            case wire.Grant(pages=pages, skip_tokens=skip):
                attributes = {
                    "peer": record.peer, "pages": len(pages), "known_tokens": skip, "deferred": record.deferred,
                }  # fmt: skip
                moment = now()
                record.note(record.arrived, moment, "grant", attributes)
                self._metrics.reserve_seconds.only().observe(moment - record.arrived)
            case wire.Refuse(code=code):
                record.note(record.arrived, now(), "grant", {"peer": record.peer, "refused": code})
                self._keep(record, code)
            case wire.Revoke(code=code):
                self._keep(record, code)
            case _:
                pass

    def adopted(self, sequence: Sequence, arrival: Arrival, commit: wire.Commit) -> None:
        record = arrival.note
        if not isinstance(record, Record):
            return
        moment = now()
        record.trace = sequence.request.trace
        record.prompt_tokens = sequence.prompt_tokens
        record.adopted = True
        record.admitted = record.waiting_since = moment
        record.note(moment, moment, "commit", {"peer": record.peer, "tokens": len(sequence.tokens)})
        self._here[sequence.identity] = record
        self._metrics.handoffs.add(1, "destination")

    def seated(self, sequence: Sequence) -> None:
        record = self._here.get(sequence.identity)
        if record is not None:
            moment = now()
            record.note(record.waiting_since, moment, "queued", {"landed": True})
            record.running_since, record.running_tokens = moment, sequence.outputs

    # ------------------------------------------------------------------------------------------ ends

    def _leave(self, sequence: Sequence, outcome: str, message: str = "") -> None:
        record = self._here.pop(sequence.identity, None)
        if record is not None:
            self._close_run(record, sequence)
            record.message = message
            record.outputs = sequence.outputs
            self._keep(record, outcome)

    def _keep(self, record: Record, outcome: str) -> None:
        record.outcome, record.ended = outcome, now()
        self._metrics.requests_ended.add(1, outcome)
        if record.admitted:
            self._metrics.inference_seconds.only().observe(record.ended - record.admitted)
        if record.runs:
            self._metrics.decode_seconds.only().observe(record.ended - record.runs[0][0])
        key = (record.id, record.attempt)
        before = self._past.pop(key, None)
        self._past[key] = record
        self._past_notes += len(record.notes) - (len(before.notes) if before is not None else 0)
        while len(self._past) > RECENT or (self._past_notes > NOTES and len(self._past) > 1):
            _, oldest = self._past.popitem(last=False)
            self._past_notes -= len(oldest.notes)
        if self.on_end is not None:
            self.on_end(record)

    @staticmethod
    def _close_run(record: Record, sequence: Sequence) -> None:
        if record.running_since:
            record.runs.append((record.running_since, now(), sequence.outputs - record.running_tokens))
            record.running_since = 0.0

    # ------------------------------------------------------------------------------------------ questions

    def chapter(self, request_id: str) -> list[dict[str, Any]]:
        """All attempts of a request that this worker remembers: `attempt`, `outcome` ("" while here) and `events` with
        `start` on this machine's clock."""
        found = []
        for table in (self._past, self._here):
            for (name, attempt), record in list(table.items()):
                if name == request_id:
                    events = [*list(record.notes), *self._decode_notes(record)]
                    events.sort(key=lambda event: event[0])
                    found.append(
                        {
                            "attempt": attempt,
                            "outcome": record.outcome,
                            "message": record.message,
                            "events": [
                                {"name": name, "start": start, "duration_s": seconds, "attributes": attributes}
                                for start, seconds, name, attributes in events
                            ],
                        }
                    )
        return found

    def _decode_notes(self, record: Record) -> Iterator[Note]:
        runs = list(record.runs)
        since = record.running_since
        if since:
            runs.append((since, now(), -1))
        if not runs:
            return
        steps = [step for step in list(self._steps) if step[2] and step[1] > runs[0][0]]
        for start, end, tokens in runs:
            inside = [step for step in steps if start < step[1] <= end]
            if tokens < 0:
                tokens = len(inside)
            if tokens <= len(inside) <= tokens + SITS_OUT:
                inside = inside[len(inside) - tokens :]
            else:  # steps that are forgotten, or that it paused in
                yield start, end - start, "decode_step", {"steps": tokens, "tokens": tokens}
                continue
            yield from _merged(inside)

    def _decode_rate(self) -> float:
        """Tokens decoded in the last `RATE_S` seconds, a second; while a step computes, in those before it began.

        A step counts by the part of it that lies there, so that steps longer than a second have their rate too.
        """
        under_way = min(list(self._planned.values()), default=None)
        end = now() if under_way is None else max(under_way, self._settled_at)
        tokens = 0.0
        for start, stop, decodes, _ in reversed(list(self._steps)):
            if stop <= end - RATE_S:
                break
            tokens += decodes * min(1.0, (stop - (end - RATE_S)) / max(stop - start, 1e-9))
        return tokens / RATE_S


def _merged(steps: list[Step]) -> Iterator[Note]:
    """Steps in runs of up to RUN_STEPS; one that also computed prompts of others begins a run of its own."""
    at = 0
    while at < len(steps):
        run = [steps[at]]
        while at + len(run) < len(steps) and len(run) < RUN_STEPS and bool(steps[at + len(run)][3]) == bool(run[0][3]):
            run.append(steps[at + len(run)])
        attributes = {
            "steps": len(run),
            "tokens": len(run),
            "longest_s": max(end - start for start, end, _, _ in run),
            "batch": max(decodes for _, _, decodes, _ in run),
        }
        if run[0][3]:
            attributes["prompt_tokens_of_others"] = sum(prompt for _, _, _, prompt in run)
        yield run[0][0], run[-1][1] - run[0][0], "decode_step", attributes
        at += len(run)
