"""Links between processes: what any thread sends arrives whole, in order, or ends the link."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream import stream, wire
from slipstream.stream import Link

WAIT_S = 20.0
decoder = wire.Decoder(wire.ToRouter)


def failed(thread: int, number: int, size: int) -> wire.Failed:
    """Message `number` of a thread, of about `size` bytes."""
    body = random.Random(thread << 32 | number).randbytes(size // 2).hex()
    return wire.Failed(request=f"{thread}:{number}", attempt=0, code="x", message=body, retriable=True)


class Ends:
    """A listening port; `open` gives a link to it and the link, or the plain socket, at its end."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._links: list[Link] = []
        self._sockets: list[socket.socket] = []

    async def link(self) -> Link:
        self._links.append(await Link.connect(self.address, decoder))
        return self._links[-1]

    async def plain(self) -> tuple[Link, socket.socket]:
        loop = asyncio.get_running_loop()
        link = await self.link()
        there, _ = await loop.sock_accept(self._listener)
        there.setblocking(False)
        self._sockets.append(there)
        return link, there

    async def open(self) -> tuple[Link, Link]:
        link, there = await self.plain()
        self._sockets.remove(there)
        reader, writer = await asyncio.open_connection(sock=there)
        self._links.append(Link(reader, writer, decoder, "there"))
        return link, self._links[-1]

    def close(self) -> None:
        self._listener.close()
        for sock in self._sockets:
            sock.close()
        for link in self._links:
            link.abort()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()
    await asyncio.sleep(0)


async def messages(link: Link, count: int = 1 << 30) -> list[Any]:
    """The next `count`, or all up to the end."""
    found: list[Any] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count and (message := await link.receive()) is not None:
            found.append(message)
    return found


def with_room(link: Link, message: wire.Message) -> None:
    """Sends when little waits, so that the end of the link has little to send, however busy the machine is."""
    while link._unsent_bytes > 1 << 20 and not link.closing:
        time.sleep(0.001)
    link.send(message)


async def in_threads(*work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(work)) as pool:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(pool, one) for one in work))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(
        st.lists(st.sampled_from([0, 40, 5_000, 300_000, 3_000_000]), min_size=1, max_size=12), min_size=2, max_size=4
    ),
    pause=st.sampled_from([0.0, 0.01]),
)
def test_frames_of_several_threads_arrive_whole_and_each_threads_in_order(sizes: list[list[int]], pause: float) -> None:
    async def run() -> None:
        ends = Ends()
        here, there = await ends.open()

        def send(thread: int) -> None:
            for number, size in enumerate(sizes[thread]):
                here.send(failed(thread, number, size))

        senders = asyncio.ensure_future(in_threads(*(lambda t=t: send(t) for t in range(len(sizes)))))
        await asyncio.sleep(pause)  # what has been sent until then waits
        came = await messages(there, sum(map(len, sizes)))
        await senders
        for thread, expected in enumerate(sizes):
            mine = [message for message in came if message.request.startswith(f"{thread}:")]
            assert mine == [failed(thread, number, size) for number, size in enumerate(expected)]
        ends.close()
        await asyncio.sleep(0)

    asyncio.run(run())


@pytest.mark.parametrize("size", [40, 3_000_000])
async def test_messages_of_one_call_arrive_one_by_one_and_in_order_and_between_those_of_others(
    ends: Ends, size: int
) -> None:
    here, there = await ends.open()
    sent = [failed(0, number, size) for number in range(7)]
    here.send(sent[0])
    here.send(*sent[1:5])
    here.send()
    here.send(*sent[5:])
    assert await messages(there, 7) == sent


async def test_of_messages_of_one_call_one_too_long_ends_the_link_with_none_of_them_sent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = await ends.open()
    monkeypatch.setattr(wire, "MAX_FRAME", 1000)
    here.send(failed(0, 0, 10))
    here.send(failed(0, 1, 10), failed(0, 2, 2000), failed(0, 3, 10))
    assert await messages(there) == [failed(0, 0, 10)]
    assert await messages(here) == []
    assert "longer than a frame" in here.lost_because


class Eager:
    """An event loop that has run what it is handed before the hand-over returns."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_soon_threadsafe(self, what: Callable[[], object]) -> None:
        begun = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (begun.set(), what()))
        begun.wait(WAIT_S)
        threading.Event().wait(0.05)


async def test_what_the_socket_did_not_take_is_written_however_fast_the_event_loop_is(ends: Ends) -> None:
    here, there = await ends.open()
    here._loop = Eager(here._loop)  # type: ignore[assignment]
    sent = [failed(0, number, 20_000_000) for number in range(2)]
    await in_threads(lambda: [here.send(message) for message in sent])
    assert await messages(there, 2) == sent


async def test_closing_sends_what_is_queued_and_the_goodbye_behind_it(ends: Ends) -> None:
    here, there = await ends.open()
    sent = [failed(0, number, 4_000_000) for number in range(3)]
    for message in sent:
        here.send(message)
    here.close("done")
    here.send(failed(0, 9, 0))
    assert await messages(there) == sent
    assert there.farewell == wire.Goodbye(reason="done")
    assert await messages(here) == []
    here.send(failed(0, 10, 0))


class ThenOnce:
    """A lock; the first who lets go of it has something else happen before he goes on."""

    def __init__(self, lock: threading.Lock, then: Callable[[], object]) -> None:
        self._lock, self._then = lock, [then]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        while self._then:
            self._then.pop()()


async def test_nothing_goes_out_behind_the_goodbye(ends: Ends) -> None:
    here, there = await ends.open()
    here._lock = ThenOnce(here._lock, lambda: here.send(failed(0, 9, 0)))  # type: ignore[assignment,arg-type]
    here.close("enough")
    assert await messages(there) == []
    assert there.farewell == wire.Goodbye(reason="enough")


async def test_a_close_while_threads_send_cuts_between_two_messages(ends: Ends) -> None:
    here, there = await ends.open()
    stop = threading.Event()
    counts = [0, 0]

    def send(thread: int) -> None:
        while not stop.is_set():
            with_room(here, failed(thread, counts[thread], 2000))
            counts[thread] += 1

    senders = asyncio.ensure_future(in_threads(lambda: send(0), lambda: send(1)))
    came = await messages(there, 20)
    here.close("enough")
    came += await messages(there)
    stop.set()
    await senders
    assert there.farewell is not None
    for thread in (0, 1):
        numbers = [message.request for message in came if message.request.startswith(f"{thread}:")]
        assert numbers == [f"{thread}:{number}" for number in range(len(numbers))]
        assert len(numbers) <= counts[thread]


async def test_a_peer_that_dies_while_threads_send_is_seen_by_the_reader_alone(ends: Ends) -> None:
    here, there = await ends.plain()
    last = wire.encode(failed(7, 0, 100))
    there.sendall(last)
    stop = threading.Event()

    def send(thread: int) -> None:
        number = 0
        while not stop.is_set():
            with_room(here, failed(thread, number, 50_000))
            number += 1

    senders = asyncio.ensure_future(in_threads(lambda: send(0), lambda: send(1)))
    await asyncio.sleep(0.05)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # its end is a reset
    there.close()
    came = await messages(here)
    stop.set()
    await senders
    assert came in ([failed(7, 0, 100)], [])
    assert "closed the connection" in here.lost_because
    assert here.closing


async def test_what_a_peer_said_before_its_end_is_heard_though_sending_to_it_fails(ends: Ends) -> None:
    here, there = await ends.plain()
    here._transport.pause_reading()  # as when more has come than anybody has asked for
    there.sendall(wire.encode(failed(1, 1, 100)) + wire.encode(wire.Goodbye(reason="leaving", dismissed=True)))
    there.close()
    for number in range(5):
        here.send(failed(0, number, 100))
        await asyncio.sleep(0.01)
    here._transport.resume_reading()
    assert await messages(here) == [failed(1, 1, 100)]
    assert here.farewell == wire.Goodbye(reason="leaving", dismissed=True)


async def test_a_message_longer_than_a_frame_ends_the_link_and_says_so(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = await ends.open()
    monkeypatch.setattr(wire, "MAX_FRAME", 10_000)
    with caplog.at_level(logging.ERROR):
        here.send(failed(0, 0, 1000))
        await in_threads(lambda: here.send(failed(0, 1, 20_000)))
        here.send(failed(0, 2, 1000))
    assert await messages(there) == [failed(0, 0, 1000)]
    assert await messages(here) == []
    assert "longer than a frame, 10000 bytes" in here.lost_because
    assert len(caplog.records) == 1


async def test_a_peer_that_does_not_read_is_cut_off_once_and_nothing_more_is_kept(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "MAX_BUFFERED", 20_000_000)
    here, _ = await ends.plain()

    def send(thread: int) -> None:
        for number in range(100):
            here.send(failed(thread, number, 1_000_000))

    with caplog.at_level(logging.ERROR):
        await in_threads(*(lambda thread=thread: send(thread) for thread in range(3)))
        assert await messages(here) == []
    assert "does not read its messages" in here.lost_because
    assert len(caplog.records) == 1
    assert here._unsent_bytes == 0


class Failing:
    """A socket whose sends fail from the given one on, as when the system has no memory for them."""

    def __init__(self, sock: socket.socket, after: int) -> None:
        self._sock, self._left = sock, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: memoryview) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return self._sock.send(data)


@pytest.mark.parametrize("size", [100, 20_000_000])
async def test_a_send_that_the_system_refuses_ends_the_link_instead_of_leaving_a_gap(ends: Ends, size: int) -> None:
    here, there = await ends.open()
    assert here._socket is not None
    here._socket = Failing(here._socket, 1)  # type: ignore[assignment]
    await in_threads(lambda: here.send(failed(0, 0, size)))
    await in_threads(lambda: here.send(failed(0, 1, size)))
    came = await messages(there)
    assert came == [failed(0, 0, size)][: len(came)]
    assert await messages(here) == []
    assert here.closing


async def test_much_that_has_come_before_the_link_is_made_stops_nothing(ends: Ends) -> None:
    sent = [failed(0, number, 200_000) for number in range(8)]
    accepted: asyncio.Queue[Link] = asyncio.Queue()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        accepted.put_nowait(Link(reader, writer, decoder, "early"))

    server = await asyncio.start_server(late, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    data = b"".join(wire.encode(message) for message in sent)
    await asyncio.gather(asyncio.to_thread(client.sendall, data), asyncio.sleep(0.1))
    async with asyncio.timeout(WAIT_S):
        link = await accepted.get()
    assert await messages(link, 8) == sent
    client.close()
    assert await messages(link) == []
    server.close()


@pytest.mark.parametrize("early", [True, False])
async def test_what_raises_at_a_message_ends_the_link(ends: Ends, early: bool) -> None:
    here, there = await ends.open()

    def take(_: object) -> Any:
        raise ArithmeticError("no")

    if early:
        there.send(failed(0, 0, 10))
        await asyncio.sleep(0.1)
        with pytest.raises(ArithmeticError):
            here.divert(take)
    else:
        here.divert(take)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        there.send(failed(0, 0, 10))
    assert await messages(here) == []
    assert await messages(there) == []


async def test_bytes_come_in_any_pieces(ends: Ends) -> None:
    here, there = await ends.plain()
    sent = [failed(0, number, size) for number, size in enumerate([0, 300, 7, 2000])]
    data = b"".join(wire.encode(message) for message in sent)
    for at in range(0, len(data), 613):
        there.sendall(data[at : at + 613])
        await asyncio.sleep(0.002)
    assert await messages(here, 4) == sent


@pytest.mark.parametrize(
    "nonsense",
    [
        (wire.MAX_FRAME + 1).to_bytes(4, "little"),
        b"\x04\x00\x00\x00" + b"\xc1" * 4,
        (100_000).to_bytes(4, "little") + b"\x91" * 100_000,
        (100_004).to_bytes(4, "little") + b"\x82\xa1x" + b"\x91" * 100_001,
    ],
    ids=["too long", "no msgpack", "nested lists", "nested under an unknown key"],
)
async def test_nonsense_ends_the_link(ends: Ends, nonsense: bytes) -> None:
    here, there = await ends.plain()
    there.sendall(nonsense)
    assert await messages(here) == []
    assert "does not speak this protocol" in here.lost_because


def test_a_link_of_an_event_loop_that_has_ended_takes_messages_in_silence() -> None:
    async def connect() -> tuple[Link, Ends]:
        ends = Ends()
        return (await ends.plain())[0], ends

    loop = asyncio.new_event_loop()
    link, ends = loop.run_until_complete(connect())
    loop.close()
    for number in range(3):
        link.send(failed(0, number, 10_000_000))
    assert link._unsent_bytes > 0
    link._socket.close()  # type: ignore[union-attr]
    ends._links.clear()
    ends.close()
