"""Short writes of the tcp transport, which go out on the thread that writes: whole, beside long ones, and never waiting
for a peer that does not read."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.unit.transfer_sides import WAIT_S, Side, join

from slipstream.config import TransferConfig
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.transports.tcp_sender import EXPRESS_BYTES, TcpRemote

LAYOUT = KVLayout(page_tokens=16, layers=4, kv_heads=2, head_dim=32, dtype="float32", total_kv_heads=2)  # 32 KiB
PAGES = 2048


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    made: list[Side] = []
    for _ in range(2):
        pool = HostPool.allocate(LAYOUT, PAGES, 64 << 10)
        done: Any = queue.Queue()
        config = TransferConfig(transport="tcp", tcp_streams=2)
        agent = TransferAgent(pool.region, LAYOUT, config, on_done=lambda job, error, done=done: done.put((job, error)))
        made.append(Side(agent, pool, pool.array, PAGES, done=done))
    join(*made)
    made[0].fill(4)
    yield made[0], made[1]
    for side in made:
        side.release()


def remote(side: Side) -> TcpRemote:
    (route,) = side.agent._routes.used("D") or ()
    assert isinstance(route.remote, TcpRemote)
    return route.remote


def test_short_writes_go_out_on_the_thread_that_submits(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = sides
    senders: list[str] = []
    real = TcpRemote._sent_at_once

    def noted(self: TcpRemote, *arguments: Any) -> bool:
        sent = real(self, *arguments)
        senders.append(threading.current_thread().name if sent else "queued")
        return sent

    monkeypatch.setattr(TcpRemote, "_sent_at_once", noted)
    for number in range(20):
        time.sleep(0.002)
        source.agent.submit(CopyJob("D", number, [number, number + 50], [number + 100, number]))
        assert source.outcomes(1) == {number: None}
        assert np.array_equal(destination.pages[[number + 100, number]], source.pages[[number, number + 50]])
    assert "MainThread" in senders
    assert "queued" not in senders


def test_short_writes_overtake_long_ones(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """While every sending thread stands still, short writes still arrive."""
    source, destination = sides
    go = threading.Event()
    real = TcpRemote._places

    def slow(self: TcpRemote, piece: Any) -> Any:
        if piece.total > EXPRESS_BYTES:
            assert go.wait(WAIT_S)
        return real(self, piece)

    monkeypatch.setattr(TcpRemote, "_places", slow)
    pages = list(range(1000))
    source.agent.submit(CopyJob("D", 1, pages, pages))
    for number in range(2, 12):
        source.agent.submit(CopyJob("D", number, [number], [number + 1500]))
        assert source.outcomes(1) == {number: None}
    go.set()
    assert source.outcomes(1) == {1: None}
    assert np.array_equal(destination.pages[pages], source.pages[pages])
    assert np.array_equal(destination.pages[1502:1512], source.pages[2:12])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Side, int], None]:
    """Has the socket of short writes take only so many bytes at once."""

    class Narrow:
        def __init__(self, sock: socket.socket, most: int) -> None:
            self._sock, self._most = sock, most

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

        def sendmsg(self, vectors: list[memoryview], *more: Any) -> int:
            if not more:
                return self._sock.sendmsg(vectors)
            if self._most == 0:
                raise BlockingIOError
            return self._sock.send(b"".join(vectors)[: self._most])

    def apply(side: Side, most: int) -> None:
        express = remote(side).streams[-1]
        monkeypatch.setattr(express, "sock", Narrow(express.sock, most))

    return apply


@pytest.mark.parametrize("most", [0, 1, 20, 5000, 40_000])
def test_what_the_socket_does_not_take_of_a_short_write_is_sent_on(
    sides: tuple[Side, Side], narrow: Callable[[Side, int], None], most: int
) -> None:
    source, destination = sides
    narrow(source, most)
    for number in range(60):
        source.agent.submit(CopyJob("D", number, [number, number + 60], [number + 200, number + 300]))
    assert source.outcomes(60) == dict.fromkeys(range(60))
    assert np.array_equal(destination.pages[200:260], source.pages[:60])
    assert np.array_equal(destination.pages[300:360], source.pages[60:120])


@pytest.mark.parametrize("ending", ["disconnect", "cut off"])
def test_a_peer_that_does_not_read_holds_no_thread_that_submits_and_fails_its_jobs(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    source, destination = sides
    go = threading.Event()

    def deaf(sock: Any, vectors: Any) -> bool:
        go.wait(WAIT_S)
        return False

    monkeypatch.setattr("slipstream.transfer.transports.tcp_receiver.receive_vectors", deaf)
    for number in range(400):  # 40 MB
        pages = [number, number + 500, number + 1000]
        source.agent.submit(CopyJob("D", number, pages, pages))
    assert source.done.empty()
    if ending == "cut off":
        threading.Timer(0.05, go.set).start()
        assert destination.agent.source_gone("S")
    else:
        source.agent.disconnect("D")
        go.set()
    errors = source.outcomes(400)
    assert len(errors) == 400
    assert all(errors.values())
    assert source.done.empty()
