"""What the transfer agent works on: jobs, routes, and the memory that preflights look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.transfer.copies import HeadMove, PageLists, PageMap
from slipstream.transfer.transports.base import Exports, Region, Remote, Runs


@dataclass(slots=True, eq=False)
class Behind:
    """A step that the device has been given, for copies that shall start when it is done.

    `event` is the device's, which happens then; `seen` when the host saw the end of the step (`time.monotonic`), 0
    before. `awaited`: whether a copy was ever told to wait for it.
    """

    event: Any
    seen: float = 0.0
    awaited: bool = False


@dataclass(slots=True, eq=False)
class CopyTimes:
    """When a job was handed over, begun and ended (`time.monotonic`; 0 is not yet), and what it moved over what.

    A job that waits on the device for a step has not begun before that was over.
    """

    submitted: float
    begun: float = 0.0
    ended: float = 0.0
    pages: int = 0
    bytes: int = 0
    transport: str = ""

    def end(self, now: float, after: Behind | None) -> None:
        """The job is over, which waited for `after`."""
        self.ended = now
        if after is not None:
            over = min(after.seen or now, now)
            self.submitted, self.begun = max(self.submitted, over), max(self.begun, over)


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """Copy `source_pages[i]` of this rank to `destination_pages[i]` of `peer`, on all ranks that share heads.

    `after` is the step that the source pages will be complete behind, on the device; None when they are. The agent
    fills `times` in, for whoever gives them.
    """

    peer: str
    xfer: int
    source_pages: Sequence[int] | NDArray[np.integer[Any]]
    destination_pages: Sequence[int] | NDArray[np.integer[Any]]
    after: Behind | None = None
    times: CopyTimes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """An opened way from this rank to one rank of a peer. `moves` are the heads it carries, `maps` where they lie."""

    peer: str
    transport: str
    exports: Exports
    remote: Remote
    moves: tuple[HeadMove, ...]
    maps: tuple[PageMap, ...]


class ProbeMemory(Protocol):
    """How a preflight reads and writes the probe area; device pools bring their own. Offsets count in the region."""

    def read(self, offset: int, size: int) -> NDArray[np.uint8]: ...

    def write(self, offset: int, data: NDArray[np.uint8]) -> None: ...


class HostMemory:
    def __init__(self, region: Region) -> None:
        if region.array is None:
            raise ValueError("a region that the CPU cannot address needs a ProbeMemory of its own")
        self._array = region.array

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        return self._array[offset : offset + size].copy()

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        self._array[offset : offset + len(data)] = data


def runs_of(job: CopyJob, route: Route, pages: int) -> Runs:
    """All heads of a route, as the runs of one ticket. `pages` are what the source's pool has.

    Raises ValueError on pages that do not exist.
    """
    lists = PageLists(job.source_pages, job.destination_pages, (pages, route.exports.pages))
    parts = [where.runs(lists) for where in route.maps]
    if len(parts) == 1:
        return parts[0]
    return Runs(
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.destination for part in parts]),
        np.concatenate([part.length for part in parts]),
    )
