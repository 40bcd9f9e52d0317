"""The watch of a worker: what is taken for a hang, what is not, and what is said and done about one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.unit.test_core import request
from tests.unit.test_loop import PATIENCE_S, Work
from tests.unit.tiny_models import make_plan, new_row
from tests.unread import nobody_reads

from slipstream.engine.guard import Guard, Hung
from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.engine.watch import SLACK, Allowance, Pulse, UnderWay, Watch, stacks, step_in_words, work
from slipstream.errors import PeerLost
from slipstream.lifeline import HUNG, ended_how


class Seen:
    """A watch of one source, looked through by hand once a second."""

    def __init__(self, source: Callable[[], UnderWay | None], limit_s: float = 10.0) -> None:
        self.hangs: list[tuple[str, float]] = []
        self.watch = Watch(limit_s, {"it": source}, lambda what, seconds: self.hangs.append((what, seconds)))

    def look(self, times: int) -> list[tuple[str, float]]:
        for _ in range(times):
            if not self.watch.look(1.0):
                break
        return self.hangs


def test_what_keeps_its_mark_beyond_the_limit_hangs_and_is_told_once() -> None:
    seen = Seen(lambda: UnderWay(7, lambda: "step 7"))
    assert seen.look(11) == []
    assert seen.watch.age("it") == 10.0
    assert seen.look(1) == [("step 7", 11.0)]


def test_what_gets_on_is_not_hung_however_long_it_goes_on() -> None:
    steps = iter(range(10_000))
    seen = Seen(lambda: UnderWay(next(steps) // 9, lambda: "steps"))
    assert seen.look(1000) == []


def test_idle_is_not_hung_and_forgets_what_was() -> None:
    now: list[UnderWay | None] = [UnderWay(1, lambda: "a step")]
    seen = Seen(lambda: now[0])
    seen.look(9)
    now[0] = None
    assert seen.look(1000) == []
    assert seen.watch.age("it") == 0.0
    now[0] = UnderWay(1, lambda: "a step")
    assert seen.look(11) == []


def test_a_step_may_take_longer_by_its_allowance() -> None:
    seen = Seen(lambda: UnderWay(1, lambda: "a large step", more_s=30.0))
    assert seen.look(41) == []
    assert len(seen.look(1)) == 1


def test_a_source_that_raises_is_logged_once_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> UnderWay | None:
        raise ZeroDivisionError

    hangs: list[str] = []
    sources = {"broken": broken, "it": lambda: UnderWay(1, broken_words)}
    watch = Watch(10.0, sources, lambda what, seconds: hangs.append(what), on_look=broken)
    assert all(watch.look(1.0) for _ in range(11))
    assert not watch.look(1.0)
    assert hangs == ["it has not got on"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert all(name in "\n".join(said) for name in ("at: broken;", "at every look;", "the words for it;"))


def broken_words() -> str:
    raise ZeroDivisionError


def test_an_end_that_raises_is_tried_again_and_no_alarm_is_put_off_any_more(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[int] = []
    calls: list[float] = []

    def on_hang(what: str, seconds: float) -> None:
        calls.append(seconds)
        if len(calls) == 1:
            raise RuntimeError("no thread can be started")

    watch = Watch(10.0, {"it": lambda: UnderWay(1, lambda: "it")}, on_hang, on_look=lambda: looks.append(1))
    assert all(watch.look(1.0) for _ in range(12))
    assert not watch.look(1.0)
    assert calls == [11.0, 12.0]
    assert len(looks) == 12
    assert "no thread can be started" in caplog.text


def test_a_watch_that_was_held_up_as_a_whole_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    watch = Watch(8.0, {}, lambda what, seconds: None)
    ended = threading.Event()

    def look(passed_s: float) -> bool:
        looks.append(passed_s)
        ended.set()
        return False

    monkeypatch.setattr(watch, "look", look)
    clock = iter([0.0, 3600.0])
    monkeypatch.setattr("slipstream.engine.watch.time.monotonic", lambda: next(clock, 3600.0))
    watch.start()
    assert ended.wait(PATIENCE_S)
    watch.stop()
    assert looks == [2.0]


# ------------------------------------------------------------------------------------------------- signs of life


def test_a_thread_that_answers_is_alive_and_one_that_does_not_hangs() -> None:
    asked: list[Callable[[], None]] = []
    seen = Seen(Pulse("the mover does not answer", asked.append))
    for _ in range(50):
        seen.look(3)
        asked.pop()()
    assert seen.hangs == []
    seen.look(12)
    assert [what for what, _ in seen.hangs] == ["the mover does not answer"]
    assert len(asked) == 1, "it is asked once, and waited for"


def test_a_thread_that_has_ended_in_order_is_not_hung() -> None:
    def ask(answer: Callable[[], None]) -> None:
        raise PeerLost("the transfer agent of this worker is closed")

    assert Seen(Pulse("the mover does not answer", ask)).look(100) == []


# ------------------------------------------------------------------------------------------------- allowances


def chunk(tokens: int, context: int | None = None) -> StepPlan:
    """A prompt's chunk at the end of `context` tokens."""
    plan = make_plan([(0, list(range(5, 5 + tokens)), 0, [3])], new_rows=[new_row(0)], step=1)
    return plan if context is None else StepPlan(**{**_fields(plan), "context_lens": np.array([context])})


def _fields(plan: StepPlan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


@pytest.mark.parametrize(
    ("device", "tokens", "context", "seconds"),
    [
        ("cpu", 512, 512, 154.0),  # 8 billion parameters in float32 on two cores, the first step of all
        ("cuda", 8192, 8192, 20.0),  # kernels are compiled for the first time
        ("cuda", 131072, 131072, 60.0),  # a prompt of 128k in one chunk
    ],
)
def test_an_honest_first_step_is_within_the_limit(device: str, tokens: int, context: int, seconds: float) -> None:
    assert 120.0 + Allowance(device).of(chunk(tokens, context)) > seconds


def test_a_machine_that_was_seen_to_be_fast_gets_little_more_than_the_limit() -> None:
    allowance = Allowance("cpu")
    for _ in range(3):
        allowance.learn(chunk(64), 0.064)
    assert allowance.of(chunk(512)) < 1.2 * SLACK * 0.512
    assert allowance.of(chunk(1)) < 0.1


def test_one_slow_step_does_not_make_a_slow_machine_of_a_fast_one() -> None:
    allowance = Allowance("cuda")
    allowance.learn(chunk(64), 30.0)  # compiles kernels
    allowance.learn(chunk(64), 0.01)
    assert allowance.of(chunk(8192)) < 60.0


def test_a_slow_but_honest_machine_is_learnt_to_be_slow() -> None:
    allowance = Allowance("cuda")
    allowance.learn(chunk(64), 64.0)
    assert allowance.of(chunk(512)) > 512.0


def test_attention_to_a_long_context_counts_as_work() -> None:
    assert work(chunk(512, 131072)) > 20 * work(chunk(512, 512))


# ------------------------------------------------------------------------------------------------- a loop


class _Server:
    """What a guard needs of a server."""

    def __init__(self) -> None:
        self.cut_because = self.said_before = ""
        self.log: Callable[[], str] = str

    def pulse(self, answer: Callable[[], None]) -> None:
        answer()

    def closing_route(self) -> str | None:
        return None

    def cut(self, reason: str) -> None:
        self.cut_because = reason
        self.said_before = self.log()


class Guarded:
    """A running loop with its guard."""

    def __init__(self, limit_s: float, depth: int = 1) -> None:
        self.work = Work(depth=depth)
        self.server = _Server()
        self.hung: list[Hung] = []
        self.told = threading.Event()
        self.guard = Guard(
            limit_s,
            Allowance("cuda"),
            self.work.loop,
            self.server,  # pyright: ignore[reportArgumentType]
            self.server,  # pyright: ignore[reportArgumentType]
            None,
            alone=False,
            on_hang=self._hangs,
        )

    def _hangs(self, error: Hung) -> None:
        self.hung.append(error)
        self.told.set()

    def start(self) -> None:
        self.work.loop.start()
        self.guard.start()


@pytest.mark.parametrize("blocked", ["collect", "launch"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_never_ends_is_named_and_its_links_are_cut(
    blocked: str, depth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = Guarded(0.5, depth)
    it.server.log = lambda: caplog.text
    let_go = threading.Event()
    honest = getattr(it.work.runner, blocked)

    def for_ever(*plan: StepPlan) -> StepOutcome:
        let_go.wait()
        return honest(*plan)

    monkeypatch.setattr(it.work.runner, blocked, for_ever)
    it.work.submit(request("a", 4))
    it.start()
    assert it.told.wait(PATIENCE_S)
    message = it.hung[0].message
    assert "prefill step 1 (1 sequences, 4 tokens) has not ended" in message
    assert it.server.cut_because == message
    assert "this worker hangs" not in it.server.said_before, "it speaks after it has acted"
    assert "--step-timeout-s 0.5" in caplog.text
    assert "slipstream-loop" in caplog.text, "the stacks name the thread that hangs"
    assert "in for_ever" in caplog.text
    assert it.guard.step_age() > 0.5
    let_go.set()
    it.work.loop.stop()
    it.guard.stop()


def test_a_turn_that_never_ends_is_named() -> None:
    it = Guarded(0.5)
    let_go = threading.Event()
    it.start()
    poster = threading.Thread(target=it.work.loop.post, args=(lambda core: let_go.wait(),))
    poster.start()
    assert it.told.wait(PATIENCE_S)
    assert "a turn of its scheduler has not ended" in it.hung[0].message
    let_go.set()
    poster.join()
    it.work.loop.stop()
    it.guard.stop()


def test_steps_that_end_within_the_limit_trip_nothing_nor_does_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Guarded(2.0)
    honest = it.work.runner.collect

    def slow() -> StepOutcome:
        time.sleep(0.4)
        return honest()

    monkeypatch.setattr(it.work.runner, "collect", slow)
    it.work.submit(request("a", 4, max_tokens=8))
    it.start()
    assert it.work.ends(1) == {"a": "length"}  # 3 s, more than the limit, in steps of less
    time.sleep(2.5)  # idle for longer than the limit
    it.work.submit(request("b", 4, max_tokens=2, start=50))
    assert it.work.ends(1) == {"b": "length"}
    assert it.hung == []
    it.work.loop.stop()
    it.guard.stop()
    assert it.guard.step_age() == 0.0


class _Mute:
    """Ranks that say where their threads are to nobody, and wait for that."""

    size = 2

    def __init__(self) -> None:
        self.ended = threading.Event()

    def signs(self) -> dict[int, Callable[[], int]]:
        return {}

    def show_stacks(self) -> None:
        assert self.ended.wait(PATIENCE_S)

    def kill(self) -> None:
        pass


def test_a_worker_that_cannot_say_that_it_hangs_ends_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    team, server, codes = _Mute(), _Server(), list[int]()
    monkeypatch.setattr("slipstream.engine.guard.END_S", 0.1)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), team.ended.set()))
    loop: Any = Work().loop
    parts: Any = (loop, server, server, team)
    guard = Guard(0.0, Allowance("cuda"), *parts, alone=True, on_hang=lambda error: None)
    guard._hung("its IO thread has not answered", 9.0)
    assert server.cut_because.startswith("its IO thread has not answered for 9 s")
    assert codes == [HUNG, HUNG], "the timer's, and its own when the ranks let it go on"


def test_without_a_limit_there_is_no_watch() -> None:
    it = Guarded(0.0)
    before = threading.active_count()
    it.guard.start()
    assert threading.active_count() == before
    it.guard.stop()


# ------------------------------------------------------------------------------------------------- the last resort

HOLDS_THE_INTERPRETER = """
import ctypes, threading
from slipstream.engine.watch import Alarm, Watch
alarm = Alarm(1.0)
Watch(0.8, {}, lambda what, seconds: None, on_look=alarm.put_off).start()
threading.Event().wait(1.5)
print("put off so far", flush=True)
def holds_the_interpreter():
    ctypes.PyDLL(None).sleep(60)
holds_the_interpreter()
"""


def test_a_process_whose_interpreter_is_kept_by_native_code_ends_and_shows_where() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_INTERPRETER], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.stdout == "put off so far\n"
    assert ended.returncode == -signal.SIGALRM
    assert "in holds_the_interpreter" in ended.stderr


def test_it_ends_as_well_when_nobody_reads_what_it_shows() -> None:
    with nobody_reads() as full:
        program = HOLDS_THE_INTERPRETER.replace("print(", "str(").replace(", flush=True", "")
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, timeout=50, check=False)
    assert ended.returncode == -signal.SIGALRM


CLOSES_ITS_ALARM = """
import time
from slipstream.engine.watch import Alarm
alarm = Alarm(0.2)
alarm.put_off()
alarm.close()
alarm.put_off()
time.sleep(0.6)
print("alive")
"""


def test_an_alarm_that_has_rung_is_reported_with_all_that_it_may_mean() -> None:
    """The timer runs on while the process is stopped: nobody can tell afterwards."""
    said = ended_how(-signal.SIGALRM)
    assert said.startswith("was ended by SIGALRM: it was stopped by a signal for too long, or hung in native code")


def test_an_alarm_that_is_closed_rings_no_more() -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSES_ITS_ALARM], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "alive\n")


def test_stacks_name_threads_and_functions() -> None:
    waiting, let_go = threading.Event(), threading.Event()

    def a_place_to_wait() -> None:
        waiting.set()
        let_go.wait()

    thread = threading.Thread(target=a_place_to_wait, name="slipstream-somewhere")
    thread.start()
    waiting.wait()
    text = stacks()
    let_go.set()
    thread.join()
    assert "thread slipstream-somewhere" in text
    assert "in a_place_to_wait" in text


def test_a_step_in_words_says_kind_sequences_and_tokens() -> None:
    mixed = make_plan([(0, [5], 3, [3]), (1, [5, 6, 7], 0, [4])], new_rows=[new_row(0), new_row(1)], step=9)
    assert step_in_words(mixed) == "mixed step 9 (2 sequences, 4 tokens)"
    assert step_in_words(chunk(4)) == "prefill step 1 (1 sequences, 4 tokens)"
