"""Transfers between two real processes: contents, and what the survivor knows when the other one is killed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.transfer.transports.base import Exports
from slipstream.transfer.transports.door import Address

HERE = Path(__file__).parent
WAIT_S = 30.0

_spec = importlib.util.spec_from_file_location("transfer_child", HERE / "transfer_child.py")
assert _spec is not None
assert _spec.loader is not None
transfer_child = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(transfer_child)
Node = transfer_child.Node


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
                self.process.wait(5)
                return
            self.kill()


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Any, Child]]]:
    made: list[Any] = []

    def start(transport: str, *, pages: int = 64, layers: int = 8) -> tuple[Any, Child]:
        """(node here, child there); either may use `transport` as a source and be reached by all of them."""
        child = Child(transport, pages, layers)
        made.append(child)
        node = Node(transport, pages, layers)
        made.append(node)
        return node, child

    yield start
    for one in made:
        one.close()


TRANSPORTS = ("shm", "tcp")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_page_lists_arrive_in_the_other_process(pair: Callable[..., tuple[Any, Child]], transport: str) -> None:
    here, there = pair(transport)
    there.call("admit", "S", here.exports())
    assert here.connect("D", there.call("exports")) == [transport]
    rng = np.random.default_rng(3)
    expected = there.call("read")
    for xfer in range(40):
        here.fill(xfer)
        count = int(rng.integers(1, 65))
        origin, to = rng.permutation(64)[:count].tolist(), rng.permutation(64)[:count].tolist()
        here.submit("D", xfer, origin, to)
        assert here.outcomes(1) == {xfer: None}
        expected[to] = here.pages[origin]
        if xfer % 8 == 7:
            assert np.array_equal(there.call("read"), expected)


def test_the_fake_transport_fails_some_copies_and_never_lies_about_the_rest(
    pair: Callable[..., tuple[Any, Child]],
) -> None:
    here, there = pair("fake")
    there.call("admit", "S", here.exports())
    assert here.connect("D", there.call("exports")) == ["fake"]
    here.fill(1)
    order = np.random.default_rng(1).permutation(64).tolist()
    for xfer in range(64):
        here.submit("D", xfer, [xfer], [order[xfer]])
    errors = here.outcomes(64)
    found = there.call("read")
    for xfer, error in errors.items():
        if error is None:
            assert np.array_equal(found[order[xfer]], here.pages[xfer])
        else:
            assert "lost a part" in error


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_directions_at_once(pair: Callable[..., tuple[Any, Child]], transport: str) -> None:
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


# ------------------------------------------------------------------------------------------------------- kill -9


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_destination_killed_in_the_middle_fails_all_jobs_with_a_reason(
    pair: Callable[..., tuple[Any, Child]], transport: str
) -> None:
    here, there = pair(transport, pages=256, layers=64)
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    here.fill(1)
    order = list(range(256))
    for xfer in range(200):
        here.submit("D", xfer, order, order[::-1])
    _, error = here.done.get(timeout=WAIT_S)  # of one of the first: several are under way at once
    assert error is None
    there.kill()
    errors = here.outcomes(199)
    assert errors[199] is not None
    assert any(word in errors[199] for word in ("has ended", "broke", "failed"))
    here.disconnect("D")
    here.submit("D", 500, [0], [0])
    assert here.outcomes(1) == {500: "there is no route to D"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_killed_in_the_middle_is_proven_gone_and_writes_no_more(
    pair: Callable[..., tuple[Any, Child]], transport: str
) -> None:
    here, there = pair(transport, pages=256, layers=64)
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.call("fill", 1)
    there.ask("write_for_ever", "D")
    written_within(here)
    there.kill()
    gone, _ = here.source_gone("S")
    assert gone
    here.pages[:] = 0  # reused at once
    time.sleep(0.2)
    assert not here.pages.any()


def test_a_stopped_source_over_shm_is_not_proven_gone_until_it_is(pair: Callable[..., tuple[Any, Child]]) -> None:
    here, there = pair("shm", pages=256, layers=64)
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.call("fill", 1)
    there.ask("write_for_ever", "D")
    written_within(here)
    there.stop()
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(here.source_gone, "S")
        wait([gone], 0.3)
        assert not gone.done()  # it could wake up in the middle of a memmove
        there.go_on()
        assert gone.result(WAIT_S)[0]
    here.pages[:] = 0
    time.sleep(0.2)
    assert not here.pages.any()


def test_a_stopped_source_over_tcp_is_cut_off_without_its_help(pair: Callable[..., tuple[Any, Child]]) -> None:
    here, there = pair("tcp", pages=256, layers=64)
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.call("fill", 1)
    there.ask("write_for_ever", "D")
    written_within(here)
    there.stop()
    assert here.source_gone("S")[0]
    here.pages[:] = 0
    there.go_on()
    time.sleep(0.2)
    assert not here.pages.any()


def test_a_stopped_source_over_shm_that_is_killed_is_proven_gone(pair: Callable[..., tuple[Any, Child]]) -> None:
    here, there = pair("shm")
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.stop()
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(here.source_gone, "S")
        wait([gone], 0.1)
        assert not gone.done()
        there.kill()
        assert gone.result(WAIT_S)[0]


def test_nothing_is_left_over_after_kill_9(pair: Callable[..., tuple[Any, Child]]) -> None:
    here, there = pair("shm")
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    here.admit("D", there.call("exports"))
    there.call("connect", "S", here.exports())
    doors = [door_of(here.exports()), door_of(there.call("exports"))]
    assert all(door in Path("/proc/net/unix").read_text() for door in doors)
    assert named_memory(there.process.pid) == []
    there.kill()
    here.disconnect("D")
    assert here.source_gone("D")[0]
    assert doors[1] not in Path("/proc/net/unix").read_text()
    here.close()
    assert doors[0] not in Path("/proc/net/unix").read_text()


def door_of(exports: bytes) -> str:
    details = {d.transport: d.detail for d in msgspec.msgpack.decode(exports, type=Exports).descriptions}
    return "@" + msgspec.msgpack.decode(details["shm"], type=Address).name


def named_memory(pid: int) -> list[str]:
    """Files that a process has open or mapped for writing and that have a name which could outlive it."""
    opened = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.append(os.readlink(fd))
    maps = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    opened += [columns[5] for columns in maps if len(columns) == 6 and columns[1].startswith("rw-s")]
    kept = ("/dev/shm/", "/tmp/", "/run/", "/var/")
    return [path for path in opened if path.startswith(kept) and not path.endswith(" (deleted)")]


def written_within(node: Any) -> None:
    """Waits until a copy has begun to arrive."""
    deadline = time.monotonic() + WAIT_S
    while not node.pages[-1].any():
        assert time.monotonic() < deadline
        time.sleep(0.005)
