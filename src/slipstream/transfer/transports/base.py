"""The contract of a transport: five verbs, and the few nouns they speak of.

    export   describe my memory so that a peer can reach it
    open     reach a peer's memory from its description
    write    put runs of my memory into the peer's; returns a ticket at once
    poll     which tickets are done, or failed as a whole
    close    end it; afterwards no write of mine is in flight

A transport is driven by one thread at a time: the mover, which sleeps on the transport's `fileno` and polls when that
is readable, and while it sleeps whoever submits a short job (`inline_bytes`). Only `export`, `admit` and `cut_off` may
be called from elsewhere, and `open` when `open_blocks` says so. A transport never retries, never falls back and never
chooses: `transfer.route` does. A ticket owns its source and destination memory until it is done or failed; a failed
ticket is reported only when nothing of it can still arrive.

A module of a transport has a function `create(context: Context) -> Transport`, which raises RouteUnavailable when the
transport cannot be used by this process at all; `transfer.transports.load` finds it by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.config import TransferConfig

if TYPE_CHECKING:
    from slipstream.transfer.transports.local import Neighbourhood

MemoryKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Region:
    """One rank's KV memory as its transports see it: `bytes` bytes at `address`.

    Pages lie at multiples of `page_bytes` from the start; `probe_offset` is the start of the area behind the pages
    that preflights may write. `array` is the memory as numpy bytes for kind "cpu", else None; `fd` is the file that
    backs it when it can be mapped by others. `device` is "cpu" or the UUID of the GPU. `stream` is what has to be
    waited for before a read, on devices.
    """

    kind: MemoryKind
    address: int
    bytes: int
    page_bytes: int
    pages: int
    probe_offset: int
    device: str = "cpu"
    device_index: int = -1
    fd: int | None = None
    array: NDArray[np.uint8] | None = None


class Description(msgspec.Struct, frozen=True):
    """How one transport reaches one region: `detail` is the transport's own, msgpack-encoded."""

    transport: str
    detail: bytes


class Exports(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells its peers: where it is, how large its memory is, and one description a transport."""

    rank: int
    first_head: int
    heads: int
    kind: str
    device: str
    bytes: int
    page_bytes: int
    pages: int
    probe_offset: int
    probe_bytes: int
    machine: str  # equal for processes of one running kernel (its boot id); what they share, opening proves
    process: str  # unique a process
    agent: str  # unique a transfer agent: the name under which this rank opens the memory of others
    descriptions: list[Description]
    refused: dict[str, str] = {}  # transports that this rank does not offer, and why
    rdma: bool = False  # whether it offers a transport that uses RDMA, and has a device that can carry data


class Extent(NamedTuple):
    """What who made a list of runs has seen of all of them: they are not empty, begin at 0 or later, and end at
    `source_end` and `destination_end` at the latest; offsets and lengths are multiples of `unit`."""

    source_end: int
    destination_end: int
    unit: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs to copy: columns of equal length, offsets from the start of either region. `extent` saves a transport
    a look at each of them, where it is known."""

    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    length: NDArray[np.int64]
    extent: Extent | None = field(default=None, kw_only=True)

    @property
    def total(self) -> int:
        if self.length.strides == (0,):
            return int(self.length[0]) * len(self.length) if len(self.length) else 0
        return int(self.length.sum())


def repeated(number: int, count: int) -> NDArray[np.int64]:
    """A column of one number, which cannot be written to: 8 bytes, however long it is."""
    return np.ndarray((count,), np.int64, number.to_bytes(8, sys.byteorder, signed=True), 0, (0,))


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a ticket: `error` is None when every byte is visible to the peer."""

    ticket: int
    error: str | None = None


class Remote(Protocol):
    """An opened peer region. `bytes` bounds every write."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Context:
    """What a transport is made from.

    `agent` is the unique name of the transfer agent, `host` the address to listen on, `neighbours` the regions of this
    process that may reach each other directly, None when there are none.
    """

    region: Region
    config: TransferConfig
    agent: str
    host: str
    neighbours: Neighbourhood | None = None


def inline_bytes(transport: Transport) -> int:
    """Jobs of up to so many bytes may be started by any thread that the mover's work is left to: `write` (and a `poll`)
    is then over sooner than a thread wakes. A transport's class says so in `inline_bytes`; by default none may."""
    return int(getattr(transport, "inline_bytes", 0))


def copies_in_poll(transport: Transport) -> bool:
    """Whether `poll` is what moves the bytes, so that who has started a short write had better call it too. A class
    says so in `copies_in_poll`; by default they move by themselves, and asking at once is too early."""
    return bool(getattr(transport, "copies_in_poll", False))


def ripen(transports: Iterable[Transport], event: Any) -> None:
    """An event that writes may wait for has happened: tells those transports that want to know, by their `ripe`."""
    for transport in transports:
        if awaits_events(transport):
            transport.ripe(event)


def awaits_events(transport: Transport) -> TypeGuard[AwaitsEvents]:
    """Whether its writes wait for events on the device, so that it wants to be told of them."""
    return hasattr(transport, "ripe")


class AwaitsEvents(Protocol):
    def ripe(self, after: Any) -> None:
        """An event that writes may wait for has happened."""


class Transport(Protocol):
    """One way to move bytes. Raises RouteUnavailable from `open` with the reason when it cannot serve the pair.

    `open_blocks`: opening waits for the peer, so it is called from a helper thread (one at a time) and not from the
    mover, which has other peers to serve.
    """

    name: ClassVar[str]
    open_blocks: ClassVar[bool]

    def export(self) -> bytes:
        """The detail of a Description."""
        ...

    def admit(self, agent: str) -> None:
        """From now on the agent of this name (`Exports.agent`) may open my memory; nobody else may."""
        ...

    def cut_off(self, agent: str) -> Future[None]:
        """Ends what `admit` began; done when it is proven that no write of this agent can still arrive.

        What is proof depends on the transport; a lapse of time never is. Cancelled by `shutdown`.
        """
        ...

    def fileno(self) -> int:
        """A descriptor that is readable whenever `poll` has something to do or to say."""
        ...

    def open(self, exports: Exports, detail: bytes) -> Remote: ...

    def write(self, remote: Remote, runs: Runs, after: Any = None) -> int:
        """Starts the copy and returns its ticket. `after` is a device event that the source data are ready behind.

        Raises ValueError when a run leaves either region, PeerLost when the remote is known to be gone: nothing is
        written then.
        """
        ...

    def poll(self) -> list[Completion]: ...

    def close(self, remote: Remote) -> None:
        """Ends this remote; its tickets come back from `poll`, failed, when nothing of them is in flight."""
        ...

    def shutdown(self) -> None:
        """Closes all remotes, cuts off all peers, ends all threads. Returns when that is so."""
        ...
