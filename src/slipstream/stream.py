"""One framed, ordered message link over TCP, for asyncio.

`send` never waits: messages queue in the transport's buffer, and a peer that does not read is cut off when the buffer
passes its bound, because a queue that grows without end is a loss that nobody has been told of yet. `receive` returns
None at the end of the stream, whatever ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import msgspec

from slipstream import wire

logger = logging.getLogger(__name__)

MAX_BUFFERED = 512 << 20


class Link:
    """One connection. Used from one event loop only."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: wire.Decoder, label: str = ""
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self.label = label
        self.lost_because = ""
        self.farewell: wire.Goodbye | None = None  # of the other side, when it ended the link on purpose
        sock = writer.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    async def connect(cls, address: str, decoder: wire.Decoder, *, timeout_s: float = 5.0) -> Link:
        """Opens a link to "host:port". Raises OSError or TimeoutError."""
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(timeout_s):  # not wait_for, which may swallow a cancellation (Python 3.11)
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        return cls(reader, writer, decoder, address)

    @property
    def closing(self) -> bool:
        return self._writer.is_closing()

    def send(self, message: wire.Message) -> None:
        """Queues a message; does nothing on a link that is closing (its reader will report the end)."""
        if self._writer.is_closing():
            return
        self._writer.write(wire.encode(message))
        if self._writer.transport.get_write_buffer_size() > MAX_BUFFERED:
            self.lost_because = f"{self.label} does not read its messages"
            logger.error("%s; closing the link", self.lost_because)
            self._writer.transport.abort()

    async def receive(self) -> wire.Message | None:
        """The next message, or None when the link has ended; `lost_because` then says why."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > wire.MAX_FRAME:
                raise ValueError(f"frame of {size} bytes")
            message = self._decoder(await self._reader.readexactly(size))
            if not isinstance(message, wire.Goodbye):
                return message
            self.farewell = message
            self.lost_because = self.lost_because or f"{self.label} said goodbye: {message.reason}"
        except (asyncio.IncompleteReadError, OSError) as error:
            self.lost_because = self.lost_because or f"{self.label} closed the connection ({type(error).__name__})"
        except (msgspec.MsgspecError, ValueError) as error:
            self.lost_because = f"{self.label} does not speak this protocol: {error}"
            logger.error("%s; closing the link", self.lost_because)
        self._writer.close()
        return None

    def close(self, reason: str = "", *, dismissed: bool = False) -> None:
        """Sends what is queued and, with a `reason`, a Goodbye that gives it; then ends the link."""
        if reason:
            self.send(wire.Goodbye(reason=reason, dismissed=dismissed))
        self._writer.close()

    def abort(self) -> None:
        """Ends the link at once; what is queued is lost."""
        self._writer.transport.abort()

    async def drain(self) -> None:
        """Waits until the peer has taken most of what is queued."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
