"""Keeps child processes running, and ends them.

One thread owns everything here: `Supervisor.poll` takes the next event, which is a line that a child printed, the end
of a child, or the time to start one again. Two small threads a child feed these events: one reads its output, one
waits for its end.

A child that ends on its own is started again after a pause that doubles with every failure that follows soon after a
start. For a child that was never `up` two kinds of end are final, and `poll` raises GaveUp for them: `max_failures`
such failures in a row, and an exit with code 1 or 2, which is how a command says that its settings, its model or its
memory are wrong, so that trying again would only repeat it. One that has served is started again for ever: the others
go on meanwhile, and one sick child must not end them.

A child that lives and answers nobody is killed by whoever notices (`end`), which makes an end like any other of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from slipstream.errors import SetupError
from slipstream.lifeline import Lifeline, ended_how

logger = logging.getLogger(__name__)

KEPT_LINES = 30
STACKS_S = 1.0  # for a child that hangs to print where its threads are
LONGEST_LOOK_S = 10.0  # what the time between two looks at the silent counts at most
SETUP_EXIT_CODES = (1, 2)
REFUSAL = "error: "  # how the sentence begins with which a command of ours ends
OutputLine = Callable[[str, str], None]


@dataclass(frozen=True)
class ChildSpec:
    """How to start one child. `fds` are inherited under the same numbers."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    fds: Sequence[int] = ()


@dataclass(frozen=True)
class RestartPolicy:
    """`quick_s`: an end this soon after the start counts as a failure. Pauses double from `first_s` to `longest_s`."""

    max_failures: int = 5
    quick_s: float = 30.0
    first_s: float = 0.1
    longest_s: float = 10.0

    def pause(self, failures: int) -> float:
        """Seconds to wait before the start that follows this many failures in a row."""
        return min(self.longest_s, self.first_s * 2.0 ** max(0, failures - 1))


class State(Enum):
    RUNNING = "running"
    WAITING = "waiting"  # dead, and to be started again
    ENDED = "ended"


@dataclass
class Child:
    """One child over all its lives. Set by whoever knows, cleared by each start: `up`, it serves; `heard`, it has
    answered in this life."""

    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    state: State = State.ENDED
    started_at: float = 0.0
    starts: int = 0
    failures: int = 0
    up: bool = False
    heard: bool = False
    was_up: bool = False
    start_again_at: float = 0.0
    killed_because: str = ""
    refused: str = ""  # the sentence of this life in which it refuses to start, as long as nobody has been told
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def running(self) -> bool:
        return self.state is State.RUNNING

    @property
    def age_s(self) -> float:
        """Seconds since its latest start."""
        return time.monotonic() - self.started_at


class GaveUp(SetupError):
    """A child cannot be kept running. `child` is its name, `exit_code` what its command ended with."""

    code = "gave_up"

    def __init__(self, message: str, child: str, exit_code: int) -> None:
        super().__init__(message)
        self.child = child
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Line:
    child: Child
    text: str


@dataclass(frozen=True)
class _End:
    child: Child
    process: subprocess.Popen[bytes]


class Silences:
    """For how long children have been silent, by what is said of them at each look.

    Time in which this process was itself held up is nobody's silence: a gap between two looks counts
    `LONGEST_LOOK_S` at most.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._since: dict[tuple[str, int], float] = {}  # (child, pid) -> seconds

    def look(self, silent: set[tuple[str, int]]) -> dict[tuple[str, int], float]:
        """`silent` are those (name, pid) that answer nobody now; returns for how many seconds each has been that."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        self._since = {who: self._since[who] + passed if who in self._since else 0.0 for who in silent}
        return dict(self._since)


def _reason(refusal: str) -> str:
    """The same for children that refuse for the same reason: each has measured its own numbers."""
    return re.sub(r"\d[\d.,]*", "#", refusal)


class Supervisor:
    """The children of this process. Use from one thread; `wake` may be called from anywhere, also a signal handler.

    `on_line(name, text)` gets every line of every child, standard output and standard error alike.
    """

    def __init__(self, on_line: OutputLine, policy: RestartPolicy | None = None) -> None:
        self._on_line = on_line
        self._policy = policy or RestartPolicy()
        self._events: queue.SimpleQueue[_Line | _End | None] = queue.SimpleQueue()
        self._lifeline = Lifeline()
        self._stopping = False
        self._refusals: set[str] = set()  # those that GaveUp has told of
        self.children: dict[str, Child] = {}

    @property
    def lifeline_fd(self) -> int:
        """To be named on the command line of children, which inherit it."""
        return self._lifeline.fd

    def wake(self) -> None:
        """Makes a waiting `poll` return now."""
        self._events.put(None)

    # ---------------------------------------------------------------------------------------------- starting

    def start(self, spec: ChildSpec) -> Child:
        child = self.children[spec.name] = Child(spec)
        self._spawn(child)
        return child

    def _spawn(self, child: Child) -> None:
        spec = child.spec
        logger.debug("starting %s: %s", spec.name, " ".join(spec.argv))
        child.last_lines.clear()
        # A session of its own, so that Ctrl-C in the terminal reaches the supervisor alone, which ends all in order.
        process = subprocess.Popen(
            list(spec.argv),
            env=dict(spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[*spec.fds, self._lifeline.fd],
            start_new_session=True,
        )
        child.process = process
        child.state = State.RUNNING
        child.started_at = time.monotonic()
        child.starts += 1
        child.up = child.heard = False
        child.killed_because = child.refused = ""
        reader = threading.Thread(target=self._read, args=(child, process), name=f"read-{spec.name}", daemon=True)
        reader.start()
        threading.Thread(
            target=self._wait, args=(child, process, reader), name=f"wait-{spec.name}", daemon=True
        ).start()

    def _read(self, child: Child, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._events.put(_Line(child, line.decode(errors="replace").rstrip("\r\n")))

    def _wait(self, child: Child, process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        process.wait()
        reader.join(1.0)  # the last lines come before the end; a grandchild that holds the pipe open is not waited for
        self._events.put(_End(child, process))

    # ---------------------------------------------------------------------------------------------- keeping

    def poll(self, timeout_s: float) -> None:
        """Handles what has happened, waiting for something to happen for at most `timeout_s`. Raises GaveUp."""
        deadline = time.monotonic() + timeout_s
        waiting = [child.start_again_at for child in self.children.values() if child.state is State.WAITING]
        self._take(max(0.0, min([deadline, *waiting]) - time.monotonic()))
        if self._stopping:
            return
        for child in self.children.values():
            if child.state is State.WAITING and time.monotonic() >= child.start_again_at:
                self._spawn(child)

    def _take(self, timeout_s: float) -> None:
        """The next event if one comes in time, and all that are there already."""
        with contextlib.suppress(queue.Empty):
            self._handle(self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait())
            while True:
                self._handle(self._events.get_nowait())

    def _handle(self, event: _Line | _End | None) -> None:
        if isinstance(event, _Line):
            child = event.child
            child.last_lines.append(event.text)
            if event.text.startswith(REFUSAL) and not (child.up or child.was_up or child.refused):
                child.refused = event.text  # told by GaveUp, once for all children that end for the same reason
            else:
                self._on_line(child.name, event.text)
        elif isinstance(event, _End) and event.process is event.child.process:
            self._ended(event.child, event.process.returncode)

    def _ended(self, child: Child, code: int) -> None:
        child.state = State.ENDED
        child.was_up = child.was_up or child.up
        if self._stopping:
            self._tell_refusal(child)
            return
        lived = time.monotonic() - child.started_at
        child.failures = child.failures + 1 if lived < self._policy.quick_s else 1
        if code in SETUP_EXIT_CODES and not child.was_up:
            self._refusals.add(_reason(child.refused))
            raise GaveUp(self._refusal(child, code), child.name, code)
        self._tell_refusal(child)
        if child.failures >= self._policy.max_failures and not child.was_up:
            message = f"{child.name} ended {child.failures} times in a row soon after its start; the last time it "
            raise GaveUp(message + ended_how(code) + self._last_words(child), child.name, 1)
        pause = self._policy.pause(child.failures)
        child.state = State.WAITING
        child.start_again_at = time.monotonic() + pause
        how = f"was killed because it {child.killed_because}" if child.killed_because else ended_how(code)
        logger.warning("%s (pid %d) %s; starting it again in %.1f s", child.name, child.pid, how, pause)

    def _tell_refusal(self, child: Child) -> None:
        if child.refused and _reason(child.refused) not in self._refusals:
            self._on_line(child.name, child.refused)

    def _refusal(self, child: Child, code: int) -> str:
        """The sentence of a command of ours that refused to start; the last lines where it has none."""
        for line in reversed(child.last_lines):
            if line.startswith(REFUSAL):
                return f"{child.name}: {line.removeprefix(REFUSAL)}"
        return f"{child.name} {ended_how(code)}{self._last_words(child)}"

    @staticmethod
    def _last_words(child: Child) -> str:
        lines = list(child.last_lines)[-10:]
        return ". Its last lines:" + "".join(f"\n    {line}" for line in lines) if lines else "; it printed nothing."

    # ---------------------------------------------------------------------------------------------- ending

    def end(self, name: str, why: str) -> None:
        """Kills a child that hangs, and all that it has started; it is started again like any that ends.

        `why` continues the sentence "it ...". What it prints of its threads meanwhile is its last word.
        """
        child = self.children[name]
        if not child.running or child.killed_because:
            return
        child.killed_because = why
        logger.error("%s (pid %d) %s; it is asked where its threads are, and killed", name, child.pid, why)
        self._signal(child, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_S
        while child.running and (left := deadline - time.monotonic()) > 0:
            self._take(left)
        if child.running:
            self._signal(child, signal.SIGKILL)

    def stop(self, names: Sequence[str], grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Asks these children to end, waits up to `grace_s` or until `hurry()`, then kills what is left.

        From the first call on nothing is started again.
        """
        self._stopping = True
        children = [self.children[name] for name in names if name in self.children]
        for child in children:
            if child.running:
                self._signal(child, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(child.running for child in children) and time.monotonic() < deadline and not hurry():
            self._take(min(0.2, max(0.001, deadline - time.monotonic())))
        asked = hurry()
        for child in children:
            if child.running:
                if asked:
                    logger.info("%s (pid %d) is killed at once, as was asked for", child.name, child.pid)
                else:
                    logger.warning("%s (pid %d) did not end in time; killing it", child.name, child.pid)
                self._signal(child, signal.SIGKILL)
        while any(child.running for child in children):
            self._take(0.2)

    def close(self) -> None:
        """Kills what still runs and lets go of the lifeline."""
        self.stop(list(self.children), 0.0)
        self._lifeline.close()

    def _signal(self, child: Child, number: signal.Signals) -> None:
        """To the child's whole session, so that helpers it may have started end with it when it is killed."""
        assert child.process is not None
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(child.process.pid, number)
            else:
                child.process.send_signal(number)
