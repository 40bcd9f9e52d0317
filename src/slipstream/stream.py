"""One framed, ordered message link over TCP, for asyncio, that any thread may send on.

`send` never waits, and goes to the socket at once where the socket takes it: a thread that has something to say does
not have to wake the one of the event loop for that. What the socket does not take queues, behind it everything that is
sent later, and the event loop writes it; a peer that does not read is cut off when the queue passes its bound, because
a queue that grows without end is a loss that nobody has been told of yet.

`receive` returns None at the end of the stream, whatever ended it. Where messages should not wait for a task to be
scheduled, `divert` has them handed to a function as they come, all that came together in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from slipstream import wire

logger = logging.getLogger(__name__)

MAX_BUFFERED = 512 << 20
MAX_UNREAD = 4096  # messages that nobody has asked for yet, before the peer has to wait

Take = Callable[[Sequence[wire.Message]], Sequence[wire.Message]]


class Link(asyncio.Protocol):
    """One connection. All methods but `send` are for the event loop that made it.

    Takes the connection over from `reader` and `writer`, which are not to be used any more.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: wire.Decoder, label: str = ""
    ) -> None:
        self._writer = writer
        self._decoder = decoder
        self.label = label
        self.lost_because = ""
        self.farewell: wire.Goodbye | None = None  # of the other side, when it ended the link on purpose
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, writer.transport)
        self._came = bytearray()  # of a frame that is not complete
        self._wanted = 4  # bytes of it that have to be there before it is worth a look
        self._messages: deque[wire.Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._take: Take | None = None
        self._over = False  # nothing comes any more
        self._held_up = False  # the peer has to wait until somebody receives
        self._lock = threading.Lock()  # of all below
        self._closing = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._socket = _own_descriptor(writer)
        self._transport.set_protocol(self)
        self._transport.resume_reading()  # the reader stops it when much has come for it
        already = bytes(getattr(reader, "_buffer", b""))  # in the same breath as the connection: hardly ever anything
        if already:
            self.data_received(already)
        if self._transport.is_closing() or getattr(reader, "_eof", False):
            self._transport.abort()
            self.connection_lost(None)

    @classmethod
    async def connect(cls, address: str, decoder: wire.Decoder, *, timeout_s: float = 5.0) -> Link:
        """Opens a link to "host:port". Raises OSError or TimeoutError."""
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(timeout_s):  # not wait_for, which may swallow a cancellation (Python 3.11)
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        return cls(reader, writer, decoder, address)

    @property
    def closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    # ---------------------------------------------------------------------------------------------- out

    def send(self, *messages: wire.Message) -> None:
        """Sends or queues messages; does nothing on a link that is closing (its reader will report the end).

        From any thread; messages of one thread, and of threads that take turns, keep their order. Those of one call go
        to the socket together, for which it takes hardly longer than for one. A message that cannot be sent ends the
        link, so that nothing arrives behind a gap.
        """
        self._send(messages, last=False)

    def _send(self, messages: Sequence[wire.Message], *, last: bool) -> None:
        """As `send`; with `last` nothing goes out behind these messages, whoever else sends at that moment."""
        if self._closing:
            return
        frames = [wire.encode(message) for message in messages]
        with self._lock:
            if self._closing or self._socket is None:
                return
            problem = self._put(self._socket, frames)
            self._closing = last or bool(problem)
            if not problem:
                return
            self.lost_because = self.lost_because or problem
        logger.error("%s; closing the link", problem)
        self._soon(self._transport.abort)

    def _put(self, to: socket.socket, frames: list[bytes]) -> str:
        """With the lock: sends what the socket takes, and queues the rest. Returns why that is impossible, if it is."""
        longest = max(map(len, frames), default=0)
        if longest > wire.MAX_FRAME + 4:
            return f"a message of {longest} bytes for {self.label} is longer than a frame, {wire.MAX_FRAME} bytes"
        frame = memoryview(frames[0] if len(frames) == 1 else b"".join(frames))
        idle = not self._unsent
        if idle:
            try:
                frame = frame[to.send(frame) :]
            except (BlockingIOError, InterruptedError):
                pass
            except ConnectionError:
                return ""  # the reader hears of that end, behind what has come before it
            except OSError as error:
                return f"sending to {self.label} failed: {error.strerror or error}"
            if not frame:
                return ""
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        if self._unsent_bytes > MAX_BUFFERED:
            return f"{self.label} does not read its messages: {self._unsent_bytes} bytes wait, {MAX_BUFFERED} may"
        if idle:
            self._soon(self._watch)  # behind the append: it may run before this line is over
        return ""

    def _soon(self, what: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(what)

    def _watch(self) -> None:
        """Has what is queued written as the socket takes it."""
        with self._lock:
            if self._socket is not None and self._unsent:
                self._loop.add_writer(self._socket.fileno(), self._flush)

    def _flush(self) -> None:
        broken = False
        with self._lock:
            if self._socket is None:
                return
            try:
                while self._unsent:
                    sent = self._socket.send(self._unsent[0])
                    self._unsent_bytes -= sent
                    if sent < len(self._unsent[0]):
                        self._unsent[0] = self._unsent[0][sent:]
                    else:
                        self._unsent.popleft()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                broken = not isinstance(error, ConnectionError)
                self._forget_unsent()
            self._loop.remove_writer(self._socket.fileno())
            closing = self._closing
        if broken:
            self._transport.abort()
        elif closing:
            self._transport.close()

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def close(self, reason: str = "", *, dismissed: bool = False) -> None:
        """Sends what is queued and, with a `reason`, a Goodbye that gives it; then ends the link."""
        if reason:
            self._send([wire.Goodbye(reason=reason, dismissed=dismissed)], last=True)
        with self._lock:
            self._closing = True
            left = bool(self._unsent)
        if left:
            self._transport.pause_reading()
        else:
            self._transport.close()

    def abort(self) -> None:
        """Ends the link at once; what is queued is lost."""
        self._transport.abort()

    def cut(self) -> None:
        """Ends the connection at once, from any thread, also when that of the event loop is stuck."""
        mine = self._socket
        if mine is not None:
            with contextlib.suppress(OSError):
                mine.shutdown(socket.SHUT_RDWR)

    # ---------------------------------------------------------------------------------------------- in

    async def receive(self) -> wire.Message | None:
        """The next message, or None when the link has ended; `lost_because` then says why."""
        while not self._messages:
            if self._over:
                return None
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        if self._held_up and len(self._messages) <= MAX_UNREAD // 2:
            self._held_up = False
            self._transport.resume_reading()
        return message

    def divert(self, take: Take) -> None:
        """From now on `take(messages)` gets what arrives, at once; `receive` what it returns, and the end.

        `take` must not wait. What it raises ends the link; here it is raised too.
        """
        self._take = take
        if self._messages:
            here, self._messages = self._messages, deque()
            try:
                self._messages.extend(take(here))
            except BaseException:
                self.abort()
                raise

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol."""
        came = self._came
        if self._over:
            return
        if len(came) + len(data) < self._wanted:
            came += data
            return
        if came:
            data = bytes(came + data)
            came.clear()
        start, self._wanted = 0, 4
        messages: list[wire.Message] = []
        try:
            while len(data) - start >= self._wanted:
                size = int.from_bytes(data[start : start + 4], "little")
                if size > wire.MAX_FRAME:
                    raise ValueError(f"frame of {size} bytes")
                if len(data) - start < size + 4:
                    self._wanted = size + 4
                    break
                messages.append(self._decoder(data[start + 4 : start + 4 + size]))
                start += 4 + size
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._arrived(messages)
            self._end(f"{self.label} does not speak this protocol: {error}")
            logger.error("%s; closing the link", self.lost_because)
            self.close()
            return
        came += data[start:]
        self._arrived(messages)

    def _arrived(self, messages: list[wire.Message]) -> None:
        last = messages[-1] if messages else None
        if isinstance(last, wire.Goodbye):
            messages.pop()
        if messages:
            self._messages.extend(messages if self._take is None else self._take(messages))
        if isinstance(last, wire.Goodbye):
            self.farewell = last
            self._end(f"{self.label} said goodbye: {last.reason}")
            self.close()
        if len(self._messages) > MAX_UNREAD and not self._over and not self._held_up:
            self._held_up = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio.Protocol."""
        self._end(f"{self.label} closed the connection ({'end of stream' if exc is None else type(exc).__name__})")
        with self._lock:
            self._closing = True
            if self._socket is not None:
                with contextlib.suppress(OSError, ValueError, RuntimeError):
                    self._loop.remove_writer(self._socket.fileno())
                self._socket.close()
            self._socket = None
            self._forget_unsent()

    def _end(self, reason: str) -> None:
        self._over = True
        self.lost_because = self.lost_because or reason
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _own_descriptor(writer: asyncio.StreamWriter) -> socket.socket | None:
    """A descriptor of the connection that stays ours, whatever the transport does with its own; None: it has ended."""
    theirs = writer.get_extra_info("socket")
    if theirs is None or theirs.fileno() < 0:
        return None
    mine = socket.socket(fileno=os.dup(theirs.fileno()))
    mine.setblocking(False)
    if mine.family in (socket.AF_INET, socket.AF_INET6):
        mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return mine
