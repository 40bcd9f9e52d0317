"""The ranks of one worker talk: sums and gatherings between their processes, on CPUs.

All ranks of a worker are processes of one machine. On CPUs they exchange numbers through memory that all have mapped:
each rank writes its own into its slot, says so to every other over a socket of that pair, hears the same from them, and
adds up all slots in the order of ranks, so that the sums are equal to the bit everywhere. There are two slots a rank,
used in turn: who hears the words of one exchange knows that everybody is done with the one before. A tensor larger than
a slot is exchanged in pieces.

The words carry a checksum of what is exchanged, so that ranks which have lost step with each other notice. A socket
ends with the process at its other end: then every exchange fails at once, as it does when a rank is silent too long.

Measured (`bench/ranks.py`, 2 cores under a load of 7, 2 ranks): a sum of 8 KiB takes 0.17 ms this way (one in ten 0.25
or more) and 0.43 ms by gloo (1.0), which hands every message through threads of its own. On GPUs ranks use NCCL
(`parallel_nccl`).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.model.shard import Parallel

SLOT_BYTES = 1 << 20
SILENT_S = 60.0  # that one exchange may take: others may still be computing, but in step with us
WORD_BYTES = 4


class Group(Parallel, Protocol):
    """The ranks of a worker, joined. `exchanges` counts what has been exchanged: equal on all ranks that are in step.

    `abort` may be called from any thread: exchanges under way and all later ones fail.
    """

    exchanges: int

    def abort(self) -> None: ...

    def close(self) -> None: ...


class OutOfStep(SlipstreamError):
    """The ranks of a worker cannot exchange numbers any more."""

    code = "out_of_step"


class Meeting:
    """What joins the ranks of a worker on one machine, made by rank 0 before the others are started.

    `fds(rank)` are the descriptors that a rank needs: the memory, then a socket to each other rank, in their order.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = os.memfd_create("slipstream-exchange", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, 2 * size * SLOT_BYTES)
        self._sockets: dict[tuple[int, int], socket.socket] = {}
        for one, other in itertools.combinations(range(size), 2):
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sockets[one, other], self._sockets[other, one] = pair

    def fds(self, rank: int) -> list[int]:
        others = [self._sockets[rank, other].fileno() for other in range(self.size) if other != rank]
        return [self._memory, *others]

    def take(self, rank: int) -> list[int]:
        """Descriptors like `fds`, for this process: they stay when the meeting is closed."""
        return [os.dup(fd) for fd in self.fds(rank)]

    def close(self) -> None:
        """Lets go of all descriptors, so that the end of a process ends its sockets. May be called twice."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
        for sock in self._sockets.values():
            sock.close()


class MemoryGroup:
    """Rank `rank` of a meeting, on a CPU. Takes over the descriptors. Used by one thread, but for `abort`."""

    def __init__(self, fds: Sequence[int], rank: int, *, silent_s: float = SILENT_S) -> None:
        memory, *sockets = fds
        self.rank, self.size = rank, len(sockets) + 1
        self.exchanges = 0
        self._silent_s = silent_s
        self._map = mmap.mmap(memory, 2 * self.size * SLOT_BYTES)
        os.close(memory)
        self._slots = torch.frombuffer(self._map, dtype=torch.uint8).view(2, self.size, SLOT_BYTES)
        self._others = [socket.socket(fileno=fd) for fd in sockets]
        for sock in self._others:
            sock.settimeout(silent_s)

    def reduce(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        most = SLOT_BYTES // x.element_size()
        for first in range(0, flat.numel(), most):
            piece = flat[first : first + most]
            self._exchange(piece, lambda slots, piece=piece: torch.sum(slots, 0, out=piece))
        return x

    def gather(self, x: Tensor) -> Tensor:
        whole = x.new_empty(self.size, *x.shape)
        flat, out = x.reshape(-1), whole.view(self.size, -1)
        most = SLOT_BYTES // x.element_size()
        for first in range(0, flat.numel(), most):
            piece = out[:, first : first + most]
            self._exchange(flat[first : first + most], piece.copy_)
        return whole

    def _exchange(self, mine: Tensor, take: Callable[[Tensor], object]) -> None:
        size = mine.numel() * mine.element_size()
        slots = self._slots[self.exchanges & 1, :, :size].view(mine.dtype)
        slots[self.rank].copy_(mine)
        word = zlib.crc32(b"%d %d %d" % (self.exchanges, size, mine.element_size())).to_bytes(WORD_BYTES, "little")
        self.exchanges += 1
        try:
            for other in self._others:
                other.send(word)
            heard = [other.recv(WORD_BYTES) for other in self._others]
        except TimeoutError:
            raise OutOfStep(f"another rank of this worker has been silent for {self._silent_s:.0f} s") from None
        except OSError as error:
            raise OutOfStep(f"another rank of this worker is gone ({error.strerror or error})") from error
        for words in heard:
            if words != word:
                raise OutOfStep(
                    "another rank of this worker is gone" if not words else "the ranks of this worker are out of step"
                )
        take(slots)

    def abort(self) -> None:
        for sock in self._others:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._others:
            sock.close()
        self._slots = torch.empty(0)
        with contextlib.suppress(BufferError):
            self._map.close()


def rank_devices(device: str, size: int) -> list[str]:
    """The device of each rank, from what `--device` says: one for all (`cpu`), a kind (`auto`, `cuda`), or a list.

    A list may be short: `cuda:0,1`, `cuda:0-3`. Raises ConfigError when it does not name one device for each rank.
    """
    if device in ("auto", "cuda") and size > 1:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device == "auto" and not count:
            return ["cpu"] * size
        if count < size:
            raise ConfigError(f"--tp {size} needs {size} GPUs, {count} are visible; give fewer ranks, or --device cpu.")
        return [f"cuda:{index}" for index in range(size)]
    named = _listed(device)
    if named == ["cpu"]:
        return named * size
    if len(named) != size:
        raise ConfigError(
            f"--device {device} names {len(named)} device(s) for {size} rank(s); give one for each rank, for example "
            f"--tp 2 --device cuda:0,cuda:1, or --device cpu for all."
        )
    if len({*named} - {"cpu"}) != len([name for name in named if name != "cpu"]):
        raise ConfigError(f"--device {device} names a GPU twice; each rank needs a GPU of its own.")
    if size > 1 and "cpu" in named and {*named} != {"cpu"}:
        raise ConfigError(f"--device {device}: the ranks of one worker are all on GPUs or all on the CPU.")
    return named


def _listed(device: str) -> list[str]:
    names: list[str] = []
    for part in (part.strip() for part in device.split(",")):
        numbers = re.fullmatch(r"(?:cuda:)?(\d+)(?:-(\d+))?", part)
        if numbers is None or (part.isdigit() and not names):
            names.append(part)
        else:
            names += [f"cuda:{index}" for index in range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)]
    return names
