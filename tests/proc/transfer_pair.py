"""Two processes that exchange pages: the test's own and a child's, and what tests of every transport do with them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
WAIT_S = 100.0


class Child:
    """The other process. `node.method(...)` is called there; `ask` sends only."""

    def __init__(self, transport: str, pages: int, layers: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "transfer_child.py", str(theirs.fileno()), transport, str(pages), str(layers)],
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())

    def ask(self, name: str, *arguments: Any) -> None:
        self._connection.send((name, arguments))

    def call(self, name: str, *arguments: Any) -> Any:
        self.ask(name, *arguments)
        ok, answer = self.receive()
        assert ok, answer
        return answer

    def receive(self) -> tuple[bool, Any]:
        assert self._connection.poll(WAIT_S)
        return self._connection.recv()

    def stop(self) -> None:
        """Returns when none of its threads runs."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        """Ends it in order, or by force when it is stopped or stuck."""
        self._connection.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                return
            self.kill()


Pair = Callable[..., tuple[Any, Child]]  # (node here, child there), for a transport


def joined(pair: Pair, transport: str, **size: int) -> tuple[Any, Child]:
    """`here` may write into `there`, which it calls D."""
    here, there = pair(transport, **size)
    there.call("admit", "S", here.exports())
    assert here.connect("D", there.call("exports")) == [transport.partition("@")[0]]
    return here, there


def written_to(pair: Pair, transport: str) -> tuple[Any, Child]:
    """`there` writes all pages of `here` again and again, and has begun to; `here` calls it S."""
    here, there = pair(transport, pages=256, layers=64)
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.call("fill", 1)
    there.ask("write_for_ever", "D")
    deadline = time.monotonic() + WAIT_S
    while not here.pages[-1].any():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return here, there


def random_lists_arrive(pair: Pair, transport: str, rounds: int) -> None:
    here, there = joined(pair, transport)
    rng = np.random.default_rng(3)
    expected = there.call("read")
    for xfer in range(rounds):
        here.fill(xfer)
        count = int(rng.integers(1, 65))
        origin, to = rng.permutation(64)[:count].tolist(), rng.permutation(64)[:count].tolist()
        here.submit("D", xfer, origin, to)
        assert here.outcomes(1) == {xfer: None}
        expected[to] = here.pages[origin]
        if xfer % 8 == 7 or xfer == rounds - 1:
            assert np.array_equal(there.call("read"), expected)


def both_directions_at_once(pair: Pair, transport: str) -> None:
    here, there = pair(transport)
    there.call("admit", "here", here.exports())
    here.admit("there", there.call("exports"))
    here.connect("there", there.call("exports"))
    there.call("connect", "here", here.exports())
    here.fill(1)
    there.call("fill", 2)
    sent, theirs = here.read(), there.call("read")
    there.ask("submit", "here", 1, list(range(32)), list(range(32, 64)))
    here.submit("there", 1, list(range(32)), list(range(32, 64)))
    assert here.outcomes(1) == {1: None}
    assert there.receive() == (True, None)
    assert there.call("outcomes", 1) == {1: None}
    assert np.array_equal(here.pages[32:], theirs[:32])
    assert np.array_equal(there.call("read")[32:], sent[:32])


def jobs_under_way(pair: Pair, transport: str, jobs: int) -> tuple[Any, Child]:
    """Of so many jobs of all pages, one has ended; the others are under way or wait."""
    here, there = joined(pair, transport, pages=256, layers=64)
    here.fill(1)
    order = list(range(256))
    for xfer in range(jobs):
        here.submit("D", xfer, order, order[::-1])
    _, error = here.done.get(timeout=WAIT_S)  # of one of the first: several are under way at once
    assert error is None
    return here, there


def a_killed_destination_fails_all_jobs(pair: Pair, transport: str, jobs: int, words: tuple[str, ...]) -> None:
    here, there = jobs_under_way(pair, transport, jobs)
    there.kill()
    errors = here.outcomes(jobs - 1)
    assert any(word in (errors[jobs - 1] or "") for word in words), errors[jobs - 1]
    here.disconnect("D")
    here.submit("D", 500, [0], [0])
    assert here.outcomes(1) == {500: "there is no route to D"}


def a_killed_source_is_proven_gone(pair: Pair, transport: str) -> None:
    here, there = written_to(pair, transport)
    there.kill()
    assert here.source_gone("S")[0]
    assert_stays_empty(here)


def a_stopped_source_is_waited_for(here: Any, there: Child, end: Callable[[], None]) -> None:
    """It could wake up in the middle of a write; `end` lets it go on or kills it."""
    there.stop()
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(here.source_gone, "S")
        wait([gone], 0.3)
        assert not gone.done()
        end()
        assert gone.result(WAIT_S)[0]


def a_stopped_source_is_cut_off_without_its_help(pair: Pair, transport: str) -> None:
    here, there = written_to(pair, transport)
    there.stop()
    assert here.source_gone("S")[0]
    assert_stays_empty(here, there.go_on)


def assert_stays_empty(here: Any, then: Callable[[], None] | None = None) -> None:
    """Its memory is used again at once, and nothing of the past arrives in it."""
    here.pages[:] = 0
    if then is not None:
        then()
    time.sleep(0.2)
    assert not here.pages.any()
