"""A ring of shared slots between two processes, for pools that cannot both be mapped: those of GPUs.

    source pool --fetch--> slot --store--> destination pool

The destination makes a ring for each source that opens one: a memory file, and a pair of connected sockets, of which
the source gets one end. Both map the file and pin it where their pool is a GPU's. The source packs a piece into a free
slot and writes the table of its runs behind it; when the bytes are there it says so, and the destination unpacks them,
while the next slots are being filled. It answers when the bytes of a piece are in place, which frees the slot; a ticket
is done when all its pieces are answered. Each end is one thread.

A source never reaches the destination's pool, so the end of the destination's thread is the proof that nothing of it
can arrive any more, whatever state the source is in; the thread ends when either side closes its socket, after its own
copies. The source's tickets fail when the destination has ended the stream, and its own copies out of the pool too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.transfer.copies import check_bounds, split
from slipstream.transfer.staging import StagingMaker
from slipstream.transfer.transports.base import Completion, Runs
from slipstream.transfer.transports.bell import Bell

logger = logging.getLogger(__name__)

FILLED = struct.Struct("<QIIQ")  # source to destination: sequence number, slot, runs, bytes in all
EMPTIED = struct.Struct("<Q")  # back: sequence number, then a text; without one the bytes are in place
READY = 0  # the sequence number of the destination's first word
MAX_WORD = 4096
LEAST_PIECE = 1 << 20
READY_S = 20.0  # a first use compiles kernels
ABANDON_S = 1.0


class RingShape(msgspec.Struct, frozen=True):
    """`slots` slots of `slot_bytes` bytes; behind them, for each, a table of `runs` (destination offset, length).

    A piece costs both threads about 0.1 ms beside its copies, so slots are large: with 4 MiB two H200 reach 21 GB/s,
    with 16 MiB 37 and 43 with several writes under way (docs/transfer.md).
    """

    slots: int = 8
    slot_bytes: int = 16 << 20
    runs: int = 16384

    @property
    def data_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def bytes(self) -> int:
        return self.data_bytes + self.slots * self.runs * 16

    def piece_bytes(self, total: int) -> int:
        """How large the pieces of a write are: what a piece costs beside its bytes asks for large ones, but the two
        copies of a small write should overlap too."""
        return max(min(total // 4, self.slot_bytes), min(LEAST_PIECE, self.slot_bytes))


class _Mapping:
    """The ring in this process's address space. It goes with the last view of it."""

    def __init__(self, fd: int, shape: RingShape) -> None:
        self._map = mmap.mmap(fd, shape.bytes)
        whole = np.frombuffer(self._map, np.uint8)
        self.data = whole[: shape.data_bytes]
        self.tables = whole[shape.data_bytes :].view(np.int64).reshape(shape.slots, shape.runs, 2)


class RingInlet:
    """The destination's end: makes the ring and unpacks what arrives, on a thread of its own.

    `fd` and `theirs` are for the source, and closed by `handed_over`. `ended` is done when nothing of this ring can
    still arrive in the pool.
    """

    def __init__(self, agent: str, maker: StagingMaker, shape: RingShape) -> None:
        self.agent = agent
        self.ended: Future[None] = Future()
        self.fd = os.memfd_create("slipstream-ring")
        os.ftruncate(self.fd, shape.bytes)
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._maker, self._shape = maker, shape
        self._ring: _Mapping | None = _Mapping(self.fd, shape)
        self._storing: deque[tuple[int, Any]] = deque()
        self._thread = threading.Thread(target=self._run, name="slipstream-ring-in", daemon=True)
        self._thread.start()

    def handed_over(self) -> None:
        os.close(self.fd)
        self.theirs.close()

    def end(self) -> None:
        """Takes no more. Any thread may ask for it, at any time."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except (OSError, ValueError, TransferError) as error:
            logger.warning("a shared ring of agent %s ended: %s", self.agent, error)
        finally:
            self._ring = None
            self._ours.close()
            self.ended.set_result(None)

    def _serve(self) -> None:
        assert self._ring is not None
        shape = self._shape
        with self._maker.near():
            self._ring.data[:] = 0
        try:
            stager = self._maker.stager(shape.slots, shape.slot_bytes, self._ring.data)
        except RouteUnavailable as error:
            self._say(READY, error.message)
            return
        sequence = READY
        try:
            self._say(READY)
            while word := self._next(stager):
                sequence, slot, count, total = FILLED.unpack(word)
                runs = self._table(slot, count, total)
                self._storing.append((sequence, stager.store(runs, stager.slots[slot])))
        except (ValueError, TransferError) as error:
            self._say(sequence, f"its memory could not be written: {error}")
            raise
        finally:
            for _, copy in self._storing:
                with contextlib.suppress(TransferError):
                    stager.wait(copy)
            self._storing.clear()
            stager.close()

    def _next(self, stager: Any) -> bytes:
        """The next word of the source; until it comes, waits for copies and answers. Empty at the end."""
        while self._storing:
            try:
                return self._ours.recv(MAX_WORD, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sequence, copy = self._storing.popleft()
                stager.wait(copy)
                self._say(sequence)
        return self._ours.recv(MAX_WORD)

    def _table(self, slot: int, count: int, total: int) -> Runs:
        """The runs of a slot, in memory of our own, checked as far as the stager does not."""
        assert self._ring is not None
        if slot >= self._shape.slots or not 0 < count <= self._shape.runs:
            raise ValueError(f"slot {slot} with {count} runs is not one of this ring")
        table = self._ring.tables[slot, :count].copy()
        destination, length = np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
        if int(length.sum()) != total or total > self._shape.slot_bytes:
            raise ValueError(f"{count} runs of {int(length.sum())} bytes were announced as {total}")
        return Runs(destination, destination, length)

    def _say(self, sequence: int, text: str = "") -> None:
        with contextlib.suppress(OSError):  # the source has gone; the next read says so
            self._ours.send(EMPTIED.pack(sequence) + text.encode()[: MAX_WORD - EMPTIED.size])


class _Ticket:
    """What is left of a write. `after` is kept alive until its copies have been queued."""

    def __init__(self, number: int, runs: Runs, pieces: Iterator[Runs], after: Any, event: int | None) -> None:
        self.number, self.pieces, self.after, self.event = number, pieces, after, event
        self.left = runs.total


class RingOutlet:
    """The source's end of one ring, opened with the descriptors that the destination handed out.

    `write` and `stop` are the mover's; `finished` is called on the outlet's thread. Raises RouteUnavailable when either
    side cannot stage its memory.
    """

    def __init__(
        self, fds: list[int], maker: StagingMaker, shape: RingShape, size: int, finished: Callable[[Completion], None]
    ) -> None:
        self.bytes = size
        self.ended = ""  # why, once it takes no more
        self._maker, self._shape, self._finished = maker, shape, finished
        try:
            if len(fds) != 2 or os.fstat(fds[0]).st_size != shape.bytes:
                raise RouteUnavailable(f"the peer handed out {len(fds)} descriptors that are no ring of this shape")
            self._ring: _Mapping | None = _Mapping(fds[0], shape)
            self._socket = socket.socket(fileno=os.dup(fds[1]))
        finally:
            for fd in fds:
                os.close(fd)
        self._bell = Bell()
        self._lock = threading.Lock()
        self._waiting: deque[_Ticket] = deque()
        self._tickets: dict[int, _Ticket] = {}
        self._free = list(range(shape.slots))
        self._fetching: deque[tuple[int, _Ticket, Runs, Any]] = deque()
        self._sent: deque[tuple[int, int, int, _Ticket]] = deque()  # sequence, slot, bytes, ticket
        self._sequences = itertools.count(READY + 1)
        self._heard_end = False
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="slipstream-ring-out", daemon=True)
        self._thread.start()
        try:
            self._ready.result(2 * READY_S)
        except (RouteUnavailable, TimeoutError) as error:
            self.stop("the route was not opened")
            self.join()
            raise RouteUnavailable(str(error) or "the ring was not ready in time") from error

    def write(self, number: int, runs: Runs, after: Any, event: int | None) -> None:
        """Raises PeerLost when the ring has ended, ValueError when a run leaves either region."""
        check_bounds(runs, self._maker.region.bytes, self.bytes)
        pieces = split(runs, self._shape.piece_bytes(runs.total), self._shape.runs)
        ticket = _Ticket(number, runs, pieces, after, event)
        with self._lock:
            if self.ended:
                raise PeerLost(self.ended)
            self._tickets[number] = ticket
            self._waiting.append(ticket)
            self._bell.ring()

    def stop(self, reason: str) -> None:
        """Sends no more; what is unfinished fails when nothing of it is under way."""
        with self._lock:
            self.ended = self.ended or reason
            self._bell.ring()

    def join(self) -> None:
        self._thread.join()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------------------- its thread

    def _run(self) -> None:
        stager: Any = None
        try:
            stager = self._prepare()
            self._serve(stager)
        except RouteUnavailable as error:
            self._ready.set_exception(error)
        except (OSError, ValueError, TransferError) as error:
            self.stop(f"the copy to the shared ring failed: {error}")
        finally:
            self.stop("the ring has ended")
            for *_, copy in self._fetching:
                with contextlib.suppress(TransferError):
                    stager.wait(copy)
            self._fetching.clear()
            self._part()
            if stager:
                stager.close()
            self._ring = None
            self._socket.close()
            with self._lock:
                failed = list(self._tickets)
                self._tickets.clear()
                self._bell.close()
            for number in failed:
                self._finished(Completion(number, self.ended))

    def _prepare(self) -> Any:
        assert self._ring is not None
        stager = self._maker.stager(self._shape.slots, self._shape.slot_bytes, self._ring.data)
        self._socket.settimeout(READY_S)
        try:
            word = self._socket.recv(MAX_WORD)
        except OSError as error:
            stager.close()
            raise RouteUnavailable(f"the peer did not get its side of the ring ready: {error}") from error
        if word != EMPTIED.pack(READY):
            stager.close()
            text = word[EMPTIED.size :].decode(errors="replace")
            raise RouteUnavailable(f"at the peer: {text or 'it closed the ring'}")
        self._socket.setblocking(False)
        self._ready.set_result(None)
        return stager

    def _serve(self, stager: Any) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        while not self.ended:
            busy = bool(self._fetching or (self._waiting and self._free))
            poll.poll(0 if busy else None)
            self._bell.hush()
            self._hear()
            while self._free and not self.ended and self._fetch(stager):
                pass
            if self._fetching:
                self._announce(stager)

    def _fetch(self, stager: Any) -> bool:
        """Starts packing the next piece; False when there is none."""
        while self._waiting:
            ticket = self._waiting[0]
            piece = next(ticket.pieces, None)
            if piece is None:
                self._waiting.popleft()
                ticket.after = None
                continue
            slot = self._free.pop()
            self._fetching.append((slot, ticket, piece, stager.fetch(piece, stager.slots[slot], ticket.event)))
            return True
        return False

    def _announce(self, stager: Any) -> None:
        """Waits for the oldest piece and tells the destination."""
        assert self._ring is not None
        slot, ticket, piece, copy = self._fetching.popleft()
        stager.wait(copy)
        count, total = len(piece.length), piece.total
        table = self._ring.tables[slot]
        table[:count, 0], table[:count, 1] = piece.destination, piece.length
        sequence = next(self._sequences)
        self._sent.append((sequence, slot, total, ticket))
        with contextlib.suppress(OSError):  # the peer has gone; the next read says so
            self._socket.send(FILLED.pack(sequence, slot, count, total))

    def _hear(self) -> None:
        while True:
            try:
                word = self._socket.recv(MAX_WORD)
            except BlockingIOError:
                return
            except OSError:
                word = b""
            if not word:
                self._heard_end = True
                self.stop("the peer's process has ended or has cut this worker off")
                return
            (sequence,) = EMPTIED.unpack_from(word)
            text = word[EMPTIED.size :].decode(errors="replace")
            expected, slot, total, ticket = self._sent[0] if self._sent else (-1, 0, 0, None)
            if text or sequence != expected or ticket is None:
                self.stop(f"the peer says: {text}" if text else "the peer answered a piece that was not sent")
                return
            self._sent.popleft()
            self._free.append(slot)
            ticket.left -= total
            if ticket.left == 0:
                with self._lock:
                    del self._tickets[ticket.number]
                self._finished(Completion(ticket.number))

    def _part(self) -> None:
        """No more from our side; the other side ends when its copies have. One that cannot is left behind."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + ABANDON_S
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._heard_end and (left := deadline - time.monotonic()) > 0:
            if not poll.poll(left * 1000):
                return
            try:
                self._heard_end = not self._socket.recv(MAX_WORD)
            except BlockingIOError:
                continue
            except OSError:
                return
