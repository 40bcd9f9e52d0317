"""Supervision of real, but trivial, child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.launch.supervise import (
    LONGEST_LOOK_S,
    ChildSpec,
    GaveUp,
    RestartPolicy,
    Silences,
    State,
    Supervisor,
)

FAST = RestartPolicy(max_failures=3, quick_s=30.0, first_s=0.01, longest_s=0.05)
LONG_LIVED = "import time; print('hello', flush=True); time.sleep(60)"


class Recorder:
    """A supervisor, and the lines that its children printed."""

    def __init__(self, policy: RestartPolicy = FAST) -> None:
        self.lines: list[tuple[str, str]] = []
        self.supervisor = Supervisor(lambda name, text: self.lines.append((name, text)), policy)

    def start(self, name: str, code: str):
        return self.supervisor.start(ChildSpec(name, [sys.executable, "-c", code], dict(os.environ)))

    def until(self, condition: Callable[[], bool], limit_s: float = 100.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; lines so far: {self.lines}"
            self.supervisor.poll(0.05)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.supervisor.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_lines_of_children_arrive_in_order_under_their_names(recorder: Recorder):
    recorder.start("a", "import time; print('one'); print('two', flush=True); time.sleep(60)")
    recorder.start("b", "import sys, time; print('oops', file=sys.stderr, flush=True); time.sleep(60)")
    recorder.until(lambda: len(recorder.lines) == 3)
    assert [text for name, text in recorder.lines if name == "a"] == ["one", "two"]
    assert [text for name, text in recorder.lines if name == "b"] == ["oops"]


def test_a_killed_child_is_started_again_with_a_new_pid(recorder: Recorder):
    child = recorder.start("w", LONG_LIVED)
    recorder.until(lambda: ("w", "hello") in recorder.lines)
    first = child.pid
    os.kill(first, signal.SIGKILL)
    recorder.until(lambda: recorder.lines.count(("w", "hello")) == 2)
    assert child.running
    assert child.pid != first
    assert child.starts == 2


def test_quick_failures_in_a_row_end_with_the_last_lines(recorder: Recorder):
    recorder.start("w", "import os; print('the disk is on fire', flush=True); os.abort()")
    with pytest.raises(GaveUp) as caught:
        recorder.until(lambda: False)
    assert caught.value.child == "w"
    assert "3 times in a row" in caught.value.message
    assert "SIGABRT" in caught.value.message
    assert "the disk is on fire" in caught.value.message


def test_a_refusal_before_the_child_was_up_is_final_and_repeats_its_sentence(recorder: Recorder):
    child = recorder.start("w", "import sys; print('error: no such model', file=sys.stderr); sys.exit(2)")
    with pytest.raises(GaveUp) as caught:
        recorder.until(lambda: False)
    assert caught.value.exit_code == 2
    assert caught.value.message == "w: no such model"
    assert child.starts == 1


def test_what_several_children_refuse_is_told_once_and_another_refusal_too(recorder: Recorder):
    refusal = "import sys; print('error: no such model', file=sys.stderr, flush=True); {}; sys.exit(2)"
    wait = "import time; time.sleep(60)"
    others = [recorder.start(name, refusal.format(wait)) for name in ("a", "b")]
    others.append(recorder.start("c", refusal.format(wait).replace("model", "port")))
    recorder.until(lambda: all(child.refused for child in others))
    recorder.start("d", refusal.format("pass"))
    with pytest.raises(GaveUp, match="d: no such model"):
        recorder.until(lambda: False)
    assert recorder.lines == []
    recorder.supervisor.stop(["a", "b", "c"], 30.0)
    assert recorder.lines == [("c", "error: no such port")]


def test_a_refusal_of_one_that_has_served_is_a_line_as_any_other(recorder: Recorder):
    child = recorder.start("w", "import sys, time; time.sleep(0.5); sys.exit('error: the port is gone')")
    child.up = True
    recorder.until(lambda: child.starts == 2)
    assert ("w", "error: the port is gone") in recorder.lines


def test_a_traceback_at_start_is_final_and_shows_the_last_lines(recorder: Recorder):
    recorder.start("w", "raise ValueError('surprise')")
    with pytest.raises(GaveUp, match="ValueError: surprise"):
        recorder.until(lambda: False)


def test_a_setup_failure_after_the_child_was_up_is_tried_again(recorder: Recorder):
    child = recorder.start("w", "import sys, time; print('x', flush=True); time.sleep(0.2); sys.exit(1)")
    child.up = True
    recorder.until(lambda: child.starts == 2)


def test_a_child_that_has_served_is_started_again_for_ever(recorder: Recorder):
    child = recorder.start("w", "import os; os.abort()")
    child.up = True
    recorder.until(lambda: child.starts > 2 * FAST.max_failures)
    assert child.failures > FAST.max_failures


SHOWS_ITS_STACKS = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1)
def where_it_hangs():
    print("there", flush=True)
    time.sleep(60)
where_it_hangs()
"""


def test_a_child_that_hangs_shows_where_and_is_killed_and_started_again(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
):
    child = recorder.start("a", SHOWS_ITS_STACKS)
    recorder.until(lambda: ("a", "there") in recorder.lines)
    child.up, before = True, child.pid
    recorder.supervisor.end("a", "has answered nothing for 60 s")
    recorder.until(lambda: child.running and child.pid != before)
    assert not alive(before)
    assert any("in where_it_hangs" in text for _, text in recorder.lines)
    assert f"a (pid {before}) was killed because it has answered nothing for 60 s; starting it again" in caplog.text
    assert "out of memory" not in caplog.text


def test_a_stopped_child_is_killed_with_what_it_has_started(recorder: Recorder):
    child = recorder.start(
        "a",
        "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)",
    )
    recorder.until(lambda: bool(recorder.lines))
    grandchild = int(recorder.lines[0][1])
    os.kill(child.pid, signal.SIGSTOP)
    before = child.pid
    recorder.supervisor.end("a", "has answered nothing for 60 s")
    recorder.until(lambda: child.pid != before and not alive(before) and not alive(grandchild))


def test_a_worker_that_says_that_it_hung_is_started_again_and_the_exit_code_explained(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
):
    child = recorder.start("a", "import os; os._exit(71)")
    recorder.until(lambda: child.starts > 1)
    assert "ended with exit code 71: it hung, and says above where; starting it again" in caplog.text


def test_silence_is_counted_by_looks_so_that_being_held_up_oneself_is_nobodys(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("slipstream.launch.supervise.time.monotonic", lambda: now[0])
    silences, who = Silences(), ("a", 7)
    assert silences.look({who}) == {who: 0.0}
    now[0] += 4.0
    assert silences.look({who}) == {who: 4.0}
    now[0] += 3600.0
    assert silences.look({who}) == {who: 4.0 + LONGEST_LOOK_S}
    assert silences.look(set()) == {}
    now[0] += 4.0
    assert silences.look({who}) == {who: 0.0}, "one that has answered meanwhile begins anew"
    assert silences.look({("a", 8)}) == {("a", 8): 0.0}, "as does its successor"


def test_stop_asks_first_and_kills_what_does_not_end(recorder: Recorder):
    polite = recorder.start("polite", LONG_LIVED)
    deaf = recorder.start(
        "deaf", "import signal, time; signal.signal(15, signal.SIG_IGN); print('hello', flush=True); time.sleep(60)"
    )
    recorder.until(lambda: len(recorder.lines) == 2)
    recorder.supervisor.stop(["polite", "deaf"], grace_s=2.0)  # a busy machine takes its time even for the polite one
    assert polite.process is not None
    assert deaf.process is not None
    assert polite.process.returncode == -signal.SIGTERM
    assert deaf.process.returncode == -signal.SIGKILL
    assert {child.state for child in (polite, deaf)} == {State.ENDED}


@pytest.mark.parametrize("asked", [True, False])
def test_a_kill_is_a_warning_unless_it_was_asked_for(recorder: Recorder, caplog: pytest.LogCaptureFixture, asked: bool):
    caplog.set_level("INFO")
    recorder.start(
        "deaf", "import signal, time; signal.signal(15, signal.SIG_IGN); print('hello', flush=True); time.sleep(60)"
    )
    recorder.until(lambda: bool(recorder.lines))
    recorder.supervisor.stop(["deaf"], grace_s=60.0 if asked else 0.0, hurry=lambda: asked)
    (record,) = caplog.records
    words = ("INFO", "is killed at once, as was asked for") if asked else ("WARNING", "did not end in time")
    assert record.levelname == words[0]
    assert words[1] in record.getMessage()


def test_nothing_is_started_again_while_stopping(recorder: Recorder):
    first, second = recorder.start("first", LONG_LIVED), recorder.start("second", LONG_LIVED)
    recorder.until(lambda: len(recorder.lines) == 2)
    recorder.supervisor.stop(["first"], grace_s=5.0)
    os.kill(second.pid, signal.SIGKILL)
    for _ in range(5):
        recorder.supervisor.poll(0.05)
    assert (first.starts, second.starts) == (1, 1)


def test_pauses_double_up_to_the_longest():
    policy = RestartPolicy(first_s=0.1, longest_s=1.0)
    assert [policy.pause(failures) for failures in (1, 2, 3, 4, 5, 6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


CHILD = """
import sys, time
from slipstream.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""

PARENT = """
import os, sys
from slipstream.launch.supervise import ChildSpec, Supervisor
supervisor = Supervisor(lambda name, text: print(child.pid, flush=True))
fd = str(supervisor.lifeline_fd)
child = supervisor.start(ChildSpec("w", [sys.executable, "-c", sys.argv[1], fd], dict(os.environ)))
while True:
    supervisor.poll(1.0)
"""


@pytest.mark.parametrize("without", ["nothing", "kernel signal"])
def test_a_child_ends_when_its_parent_is_killed(without: str):
    child_code = textwrap.dedent(CHILD)
    if without == "kernel signal":  # as on systems that have none: the pipe alone must do
        child_code = "import sys; sys.platform = 'elsewhere'\n" + child_code
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT), child_code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
