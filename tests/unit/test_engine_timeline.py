"""What a worker remembers of requests: chunks, copies, waits, runs of decode steps; and what it counts of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.test_core import EOS, LAYOUT, Bench, request

from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine import timeline
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import CopyPages, ToPeer
from slipstream.engine.metrics import WorkerMetrics
from slipstream.engine.timeline import Watcher
from slipstream.engine.tracing import stages_of
from slipstream.telemetry import clock
from slipstream.transfer.job import CopyTimes


class Watched(Bench):
    """A core with a watcher."""

    def __init__(self, pages: int = 33, **settings: object) -> None:
        super().__init__(pages, **settings)
        self.metrics = WorkerMetrics()
        self.watcher = Watcher(self.metrics)
        numbers = {"chunk_tokens": 8, "max_sequences": 4, "max_model_len": 64, **settings}
        config = EngineConfig(**numbers)  # type: ignore[arg-type]
        self.core = EngineCore(LAYOUT, pages, config, (EOS,), headroom_tokens=4, observer=self.watcher)
        self.records: list[timeline.Record] = []
        self.watcher.on_end = self.records.append

    def events(self, name: str = "r") -> list[dict[str, Any]]:
        return [event for chapter in self.watcher.chapter(name) for event in chapter["events"]]

    def names(self, name: str = "r") -> list[str]:
        return [event["name"] for event in self.events(name)]


class Pair:
    """A source and a destination, whose messages and copies arrive at once, the copies after what `wire_s` says."""

    def __init__(self) -> None:
        self.p, self.d = Watched(), Watched()

    def pump(self) -> None:
        """Delivers until nothing is left to deliver or to compute."""
        busy = True
        while busy:
            busy = self._turn(self.p, self.d, "d") | self._turn(self.d, self.p, "p")

    def _turn(self, one: Watched, other: Watched, peer: str) -> bool:
        plan = one.core.schedule()
        effects = one.core.take_effects()
        if plan is not None:
            one.settle(plan)  # takes the effects of the step itself, so they are taken from its lists below
        copies, messages = one.copies, one.peer
        one.copies, one.peer = [], []
        for effect in effects:
            if isinstance(effect, ToPeer):
                messages.insert(0, effect.message)
            elif isinstance(effect, CopyPages):
                copies.insert(0, effect)
        for copy in copies:
            moment = clock.now()
            times = CopyTimes(moment - 0.003, moment - 0.002, moment, len(copy.source_pages), 1000, "shm")
            one.watcher.timed(times)
            one.core.copies_done(peer, copy.xfer, len(copy.source_pages))
        for message in messages:
            if one is self.p:
                other.core.from_source("p", message)
            else:
                other.core.from_destination("d", message)
        return plan is not None or bool(messages) or bool(copies)


def test_a_local_request_is_queued_computed_in_chunks_and_decoded() -> None:
    bench = Watched()
    bench.core.submit(request(prompt=10, max_tokens=5), "router", None)
    bench.run()
    assert bench.names() == ["queued", "prefill_chunk", "prefill_chunk", "first_token", "decode_step"]
    queued, first, second, token, run = bench.events()
    assert queued["attributes"] == {"cached_tokens": 0}
    assert (first["attributes"]["tokens"], second["attributes"]["tokens"]) == (8, 2)
    assert (first["attributes"]["from"], second["attributes"]["from"]) == (0, 8)
    assert run["attributes"]["tokens"] == 4
    assert queued["start"] <= first["start"] <= second["start"] <= token["start"] <= run["start"]
    (chapter,) = bench.watcher.chapter("r")
    assert (chapter["attempt"], chapter["outcome"]) == (0, "finished")


def test_a_request_that_is_still_here_is_told_so_far() -> None:
    bench = Watched()
    bench.core.submit(request(prompt=10, max_tokens=50), "router", None)
    for _ in range(5):
        bench.step()
    (chapter,) = bench.watcher.chapter("r")
    assert chapter["outcome"] == ""
    assert bench.names()[-1] == "decode_step"
    assert bench.events()[-1]["attributes"]["tokens"] == 3


def test_decode_steps_are_merged_in_runs_and_none_is_lost() -> None:
    bench = Watched(max_model_len=128)
    bench.core.submit(request(prompt=4, max_tokens=41), "router", None)
    bench.run()
    runs = [event["attributes"] for event in bench.events() if event["name"] == "decode_step"]
    assert [run["tokens"] for run in runs] == [16, 16, 8]
    assert all(run["batch"] == 1 for run in runs)


def test_a_step_with_another_s_prompt_in_it_stands_apart() -> None:
    bench = Watched()
    bench.core.submit(request(prompt=4, max_tokens=9), "router", None)
    for _ in range(4):
        bench.step()
    bench.core.submit(request("other", prompt=6, start=40), "router", None)
    bench.run()
    runs = [event["attributes"] for event in bench.events() if event["name"] == "decode_step"]
    assert [run.get("prompt_tokens_of_others", 0) for run in runs] == [0, 6, 0]
    assert sum(run["tokens"] for run in runs) == 8


def test_steps_that_are_forgotten_leave_one_run_with_the_right_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "STEPS", 4)
    bench = Watched()
    bench.core.submit(request(prompt=4, max_tokens=20), "router", None)
    bench.run()
    (run,) = [event for event in bench.events() if event["name"] == "decode_step"]
    assert run["attributes"] == {"steps": 19, "tokens": 19}


def test_a_handoff_is_told_by_both_sides() -> None:
    pair = Pair()
    pair.p.core.submit(request(prompt=18, max_tokens=4), "router", "d")
    pair.pump()
    p, d = pair.p.names(), pair.d.names()
    assert [name for name in p if name != "copy_chunk"][:2] == ["queued", "offer"]
    assert p.count("prefill_chunk") == 3
    assert p.count("copy_chunk") >= 2
    assert p[-1] == "commit"
    assert [name for name in d if name != "decode_step"] == ["grant", "commit", "queued"]
    assert d[-1] == "decode_step"
    assert sum(e["attributes"]["tokens"] for e in pair.d.events() if e["name"] == "decode_step") == 3
    copy = next(event for event in pair.p.events() if event["name"] == "copy_chunk")
    assert copy["duration_s"] == pytest.approx(0.002)
    assert copy["attributes"]["queued_s"] == pytest.approx(0.001)
    assert copy["attributes"]["bytes_per_second"] == pytest.approx(500_000)
    assert pair.p.watcher.chapter("r")[0]["outcome"] == "handed_over"
    metrics = pair.p.metrics
    assert metrics.handoffs["source"] == pair.d.metrics.handoffs["destination"] == 1
    assert metrics.transfer_bytes["shm"] == 1000 * p.count("copy_chunk")
    assert metrics.requests_ended["handed_over"] == pair.d.metrics.requests_ended["finished"] == 1


def test_stages_for_traces_follow_each_other_over_both_workers() -> None:
    pair = Pair()
    pair.p.core.submit(request(prompt=18, max_tokens=4), "router", "d")
    pair.pump()
    source = {name: (start, end) for name, start, end, _ in stages_of(pair.p.records[0])}
    destination = {name: (start, end) for name, start, end, _ in stages_of(pair.d.records[0])}
    assert list(source) == ["queue", "prefill", "kv_transfer"]
    assert list(destination) == ["decode"]
    assert source["queue"][1] == source["prefill"][0]
    assert source["prefill"][1] <= source["kv_transfer"][1]
    assert all(start <= end for start, end in [*source.values(), *destination.values()])
    local = Watched()
    local.core.submit(request(), "router", None)
    local.run()
    assert [stage[0] for stage in stages_of(local.records[0])] == ["queue", "prefill", "decode"]


def test_a_refused_offer_is_a_failed_handoff_with_its_reason() -> None:
    pair = Pair()
    pair.d.core.drain()
    pair.p.core.submit(request(prompt=10), "router", "d")
    pair.pump()
    assert [e["attributes"].get("refused") for e in pair.p.events() if e["name"] == "offer"] == ["no_workers"]
    assert pair.p.metrics.handoff_failures["no_workers"] == 1
    assert pair.d.watcher.chapter("r")[0]["outcome"] == "no_workers"


def test_what_is_refused_or_aborted_is_remembered_with_its_end() -> None:
    bench = Watched(max_waiting=1)
    bench.core.submit(request("one"), "router", None)
    bench.core.submit(request("two"), "router", None)
    assert bench.watcher.chapter("two")[0]["outcome"] == "queue_full"
    bench.step()
    bench.core.abort("one", 0)
    assert bench.watcher.chapter("one")[0]["outcome"] == "client_closed_request"
    assert bench.metrics.requests_ended["queue_full"] == 1


def test_preemptions_are_counted_and_the_second_wait_is_shown() -> None:
    bench = Watched(pages=9, max_model_len=28, prefix_cache=False)
    for name in ("a", "b"):
        bench.core.submit(request(name, prompt=8, max_tokens=18, start=20 if name == "b" else 10), "router", None)
    bench.run()
    assert bench.metrics.preemptions.total == bench.core.preemptions > 0
    again = [
        e for name in "ab" for e in bench.events(name) if e["name"] == "queued" and e["attributes"].get("preempted")
    ]
    assert len(again) == bench.core.preemptions
    for name in "ab":
        decoded = sum(e["attributes"]["tokens"] for e in bench.events(name) if e["name"] == "decode_step")
        sampled = sum(e["name"] == "queued" for e in bench.events(name))  # each pass samples one behind its prompt
        assert decoded + sampled == 18


def test_a_failed_step_is_counted_and_leaves_no_trace_in_the_ring() -> None:
    bench = Watched()
    bench.core.submit(request(), "router", None)
    plan = bench.plan()
    assert plan is not None
    bench.core.step_failed(plan, "broken")
    assert bench.metrics.retried.total == 1
    bench.run()
    assert bench.watcher.chapter("r")[0]["outcome"] == "finished"


def test_the_past_is_bounded_in_requests_and_in_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "RECENT", 3)
    bench = Watched()
    for number in range(5):
        bench.core.submit(request(f"r{number}"), "router", None)
        bench.run()
    assert [bool(bench.watcher.chapter(f"r{number}")) for number in range(5)] == [False, False, True, True, True]
    monkeypatch.setattr(timeline, "NOTES", 8)
    bench.core.submit(request("last"), "router", None)
    bench.run()
    assert not bench.watcher.chapter("r3")
    assert bench.watcher.chapter("last")
    monkeypatch.setattr(timeline, "NOTES_EACH", 2)
    bench.core.submit(request("short"), "router", None)
    bench.run()
    assert bench.names("short")[:2] == ["queued", "prefill_chunk"]
    assert len([name for name in bench.names("short") if name != "decode_step"]) == 2


def test_both_attempts_of_a_request_are_told() -> None:
    bench = Watched()
    bench.core.submit(request(max_tokens=4), "router", None)
    bench.step()
    bench.core.submit(request(max_tokens=4, attempt=1), "router", None)
    bench.run()
    assert [(c["attempt"], c["outcome"]) for c in bench.watcher.chapter("r")] == [(0, "superseded"), (1, "finished")]


def test_stages_count_every_sequence_once() -> None:
    bench = Watched(max_sequences=2)
    for number in range(4):
        bench.core.submit(request(f"r{number}", prompt=6, max_tokens=20, start=10 * number + 3), "router", None)
    for _ in range(3):
        bench.step()
    stages = bench.core.stages()
    assert sum(stages.values()) == 4
    assert stages["decoding"] + stages["prefilling"] == 2
    assert isinstance(bench.core.status(), wire.Status)


def test_the_decode_rate_is_that_of_the_last_second_and_none_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 100.0
    monkeypatch.setattr(timeline, "now", lambda: moment)
    watcher = Watcher(WorkerMetrics())
    sequences: list[Any] = [type("Sequence", (), {"identity": (str(n), 0)}) for n in range(3)]
    rate = watcher._decode_rate

    def step(number: int, seconds: float) -> None:
        nonlocal moment
        watcher.planned(number, sequences, ())
        assert rate() == before
        moment += seconds
        watcher.settled(number, sequences, ())

    before = 0.0
    for number in range(30):
        step(number, 0.1)
        before = rate()
        assert before == pytest.approx(min(30, 3 * (number + 1)))
    moment += 0.5
    assert rate() == pytest.approx(15)
    moment += 0.5
    assert rate() == 0
    moment += 60
    before = 0.0  # nothing was decoded in the second before a step begins, however long it takes
    step(30, 4.0)
    assert rate() == pytest.approx(3 / 4)
    before = rate()
    step(31, 4.0)  # and during the next one it is what it was
