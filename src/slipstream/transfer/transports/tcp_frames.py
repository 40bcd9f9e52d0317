"""What travels on a stream of the tcp transport. All integers are little-endian.

    greeting   magic, token, length of the agent's name, name           answer: the magic again, or the end
    piece      sequence number, number of runs, bytes in all; one (offset, length) pair a run; the bytes
    answer     sequence number, length of a text, text                  no text: every byte of the piece is in place

The receiver reads the bytes of a piece straight into its memory, after it has checked the runs against its bounds. It
answers a piece it cannot take with a text and ends the stream. It ends a stream only when it has stopped writing, so
that the end of the stream tells the sender that nothing more of it can arrive.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence

MAGIC = b"slipkv\x00\x01"
GREETING = struct.Struct("<8s16sH")
PIECE = struct.Struct("<QIQ")
ANSWER = struct.Struct("<QH")
MAX_NAME = 256
MAX_RUNS = 1000  # one piece is one sendmsg: its vectors, the header and the table stay below IOV_MAX (1024)
MAX_PIECE = 1 << 30
LOOPBACK_BUFFER = 512 << 10


def tune(sock: socket.socket) -> None:
    """Sets up a connected stream.

    On loopback there is no delay that buffers would have to bridge: small ones leave the bytes in the processor's cache
    between the two copies (64 MiB in pages of 512 KiB on two busy cores: 3.7 to 4.3 GB/s at best against 1.8 to 2.2
    with those that the kernel grows). Elsewhere the kernel knows better.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if ipaddress.ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER)


def receive_exactly(sock: socket.socket, buffer: memoryview) -> bool:
    """Fills the buffer; False when the stream ends before."""
    while len(buffer):
        count = sock.recv_into(buffer, 0, socket.MSG_WAITALL)
        if count == 0:
            return False
        buffer = buffer[count:]
    return True


def receive_vectors(sock: socket.socket, vectors: Sequence[memoryview]) -> bool:
    """Fills all buffers in as few calls as possible; False when the stream ends before."""
    left = list(vectors)
    while left:
        count = sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            return False
        left = behind(left, count)
    return True


def send_vectors(sock: socket.socket, vectors: Sequence[memoryview]) -> None:
    """Sends all buffers. Raises OSError."""
    left = list(vectors)
    while left:
        left = behind(left, sock.sendmsg(left))


def behind(vectors: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them behind the first `count` bytes."""
    for index, vector in enumerate(vectors):
        if count < len(vector):
            return [vector[count:], *vectors[index + 1 :]]
        count -= len(vector)
    return []
