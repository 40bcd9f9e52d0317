"""The sending half of the tcp transport: what goes to one peer, over which of its streams, and on which thread.

A write is cut into pieces. Each stream has a thread that takes the next piece, whichever ticket it belongs to, and
sends it from the pool's memory in one system call. A GPU's pool is not reached by sockets: there each thread brings its
piece to pinned slots, and sends one while the next ones are being filled.

A short write out of a pool of the CPU goes over a stream of its own, at once, on the thread that writes: it neither
waits for a thread to wake nor for the pieces of long ones. What the socket does not take of it, a thread sends on.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections import deque
from typing import Any

import numpy as np

from slipstream.errors import TransferError
from slipstream.transfer.copies import split
from slipstream.transfer.staging import Staging, StagingMaker
from slipstream.transfer.transports.base import Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.tcp_frames import MAX_RUNS, PIECE, behind, send_vectors
from slipstream.transfer.transports.tcp_receiver import STAGING_SLOT_BYTES, STAGING_SLOTS

EXPRESS_BYTES = 512 << 10  # about what a socket takes in one go, in a tenth of a millisecond (docs/transfer.md)
LEAST_PIECE = 256 << 10
LARGEST_PIECE = 4 << 20
LARGEST_STAGED = 32 << 20  # what a thread brings out of a GPU and sends in one go, in pieces of a slot


class Ticket:
    """`left` bytes of it are not answered. `after`, behind whose `event` the source is ready, is kept alive with it."""

    def __init__(self, number: int, left: int, after: Any, event: int | None) -> None:
        self.number, self.left, self.after, self.event = number, left, after, event


class Stream:
    """One connection. `sending` (a thread is at it), `waiting` (for a thread that sends the rest of a short write) and
    `unanswered` are guarded by the remote's lock."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sending = False
        self.waiting = False
        self.ended = False
        self.unanswered: deque[tuple[int, int, Ticket]] = deque()  # sequence number, bytes, ticket
        self.inbox = b""

    def finish(self) -> None:
        """No more from our side; the other side answers with the end of the stream when it has stopped writing."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)


Piece = tuple[Ticket, Runs]
Rest = list[memoryview]  # of a short write


class TcpRemote:
    """A peer's pool behind its streams. `broken` says why nothing more is sent, once that is so.

    `write` and `stop` are for any thread that has the mover's turn, `stop` also for the sending threads. `bell` is rung
    when one of these has ended a broken remote's last piece.
    """

    def __init__(self, size: int, label: str, socks: list[socket.socket], maker: StagingMaker, bell: Bell) -> None:
        self.bytes = size
        self.label = label
        self.streams = [Stream(sock) for sock in socks]
        self.broken = ""
        self.lock = threading.Lock()
        self.tickets: dict[int, Ticket] = {}
        self.abandon: threading.Timer | None = None
        self.abandoned = False
        array = maker.region.array
        self._memory = array.data.cast("B") if array is not None else None
        self._maker, self._bell = maker, bell
        self._express = self.streams[-1] if self._memory is not None else None
        self._lanes = [stream for stream in self.streams if stream is not self._express]
        self._pieces: queue.SimpleQueue[Piece | Rest | None] = queue.SimpleQueue()
        self._sequence = itertools.count(1)

    @staticmethod
    def connections(streams: int, in_place: bool) -> int:
        """How many connections a remote of so many streams has: one more for short writes, where there are any."""
        return streams + in_place

    def start(self) -> list[threading.Thread]:
        """The sending threads, which end when `broken`."""
        threads = [
            threading.Thread(target=self._run, args=(stream,), name="slipstream-tcp-out", daemon=True)
            for stream in self._lanes
        ]
        for thread in threads:
            thread.start()
        return threads

    def write(self, ticket: Ticket, runs: Runs) -> None:
        """Sends all of it, some time; its bytes are checked."""
        self.tickets[ticket.number] = ticket
        if ticket.left <= EXPRESS_BYTES and len(runs.length) <= MAX_RUNS and self._sent_at_once(ticket, runs):
            return
        share = max(-(-ticket.left // len(self._lanes)), LEAST_PIECE)
        if self._memory is None:
            pieces = split(runs, min(share, LARGEST_STAGED), len(runs.length))
        else:
            pieces = split(runs, min(share, LARGEST_PIECE), MAX_RUNS)
        for piece in pieces:
            self._pieces.put((ticket, piece))

    def stop(self, reason: str) -> None:
        """Sends no more; the tickets fail later, when all streams have ended."""
        with self.lock:
            if self.broken:
                return
            self.broken = reason
        for stream in self.streams:
            self._pieces.put(None)  # for each thread one, or more
            stream.finish()

    @property
    def over(self) -> bool:
        """Whether nothing of this remote is in flight in either direction."""
        with self.lock:
            return bool(self.broken) and all(s.ended and not s.sending for s in self.streams)

    # ------------------------------------------------------------------------------------------- short writes

    def _sent_at_once(self, ticket: Ticket, runs: Runs) -> bool:
        """False when the last short write has not gone yet."""
        express = self._express
        if express is None or express.waiting:
            return False
        left: Rest = self._vectors(express, ticket, runs, self._places(runs))
        try:
            left = behind(left, express.sock.sendmsg(left, [], socket.MSG_DONTWAIT))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._sending_failed(error)
            return True
        with self.lock:
            if left and not self.broken:
                express.waiting = True
                self._pieces.put(left)
        return True

    # ------------------------------------------------------------------------------------------- sending threads

    def _run(self, stream: Stream) -> None:
        staging: Staging | None = None
        try:
            if self._memory is None:
                staging = self._maker.staging(STAGING_SLOTS, STAGING_SLOT_BYTES)
            while (item := self._pieces.get()) is not None:
                at = self._express if isinstance(item, list) else stream
                assert at is not None
                with self.lock:
                    at.sending = not self.broken
                if not at.sending:
                    continue
                try:
                    if isinstance(item, list):
                        send_vectors(at.sock, item)
                    elif staging is None:
                        send_vectors(at.sock, self._vectors(at, *item, self._places(item[1])))
                    else:
                        self._send_staged(at, staging, *item)
                finally:
                    at.sending = at.waiting = False
        except OSError as error:
            self._sending_failed(error)
        except (TransferError, ValueError) as error:
            self.stop(f"the GPU's memory cannot be sent: {error}")
        finally:
            if staging is not None:
                staging.close()
            if self.broken:
                self._bell.ring()

    def _sending_failed(self, error: OSError) -> None:
        self.stop(f"sending to {self.label} failed: {error.strerror or error}")

    def _send_staged(self, stream: Stream, staging: Staging, ticket: Ticket, runs: Runs) -> None:
        with contextlib.closing(staging.out(runs, ticket.event, MAX_RUNS)) as pieces:
            for piece, packed in pieces:
                if self.broken:
                    return
                send_vectors(stream.sock, self._vectors(stream, ticket, piece, [packed.data.cast("B")]))

    def _places(self, piece: Runs) -> list[memoryview]:
        memory = self._memory
        assert memory is not None
        columns = zip(piece.source.tolist(), piece.length.tolist(), strict=True)
        return [memory[at : at + size] for at, size in columns]

    def _vectors(self, stream: Stream, ticket: Ticket, piece: Runs, places: list[memoryview]) -> list[memoryview]:
        """What goes out for a piece, of which an answer is expected from now on."""
        total = piece.total
        with self.lock:
            sequence = next(self._sequence)
            stream.unanswered.append((sequence, total, ticket))
        table = np.empty((len(piece.length), 2), np.int64)
        table[:, 0], table[:, 1] = piece.destination, piece.length
        head = PIECE.pack(sequence, len(piece.length), total) + table.tobytes()
        return [memoryview(head), *places]
