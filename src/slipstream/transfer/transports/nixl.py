"""The nixl package (extra `nixl`), with its UCX back-end: the way to RDMA and to other machines.

The source keeps one nixl agent for all its peers; a destination makes one for each source (`gate.Landing`), whose
metadata it hands out at its gate, and whose end takes back what the metadata opened. A copy of whole pages picks them
by number from two lists of descriptors that are prepared when the peer is opened (0.04 us a page); runs of other
lengths, as between workers of unequal tensor parallelism, get lists of their own (0.2 us a run). nixl's own thread
makes progress; requests are looked at with growing pauses by the remote's thread, since the package has nothing to
sleep on. A WRITE is done when UCX has flushed it, which is when the bytes are visible at the destination.

UCX chooses the way by itself: RDMA where there is a NIC, CUDA IPC, process_vm_writev or sockets else. `rdma_nics`
limits it to the NICs named. The host's memory on one machine is written by process_vm_writev inside the call that
starts a transfer.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.errors import RouteUnavailable, TransferError
from slipstream.transfer.transports.base import Context, Exports, Region, Runs
from slipstream.transfer.transports.package import PackageTransport, memory_of

logger = logging.getLogger(__name__)

MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
BACKEND = "UCX"
DESCRIPTORS = 16384  # of one request; more are several requests, so that no call takes long


class NixlPlace(msgspec.Struct, frozen=True):
    """What a landing's description says."""

    metadata: bytes
    address: int
    kind: str
    device: int


class _Memory:
    """A nixl agent of its own, with the region registered. Raises RouteUnavailable."""

    def __init__(self, api: Any, name: str, region: Region) -> None:
        self._kind, self.device = memory_of(region)
        self.mem = "VRAM" if self._kind == "cuda" else "DRAM"
        try:
            config = api.nixl_agent_config(enable_prog_thread=True, enable_listen_thread=False, backends=[BACKEND])
            self.agent: Any = api.nixl_agent(name, config)
            if BACKEND not in self.agent.backends:
                raise RouteUnavailable(f"the nixl package has no {BACKEND} back-end")
            if self.mem + "_SEG" not in self.agent.get_backend_mem_types(BACKEND):
                raise RouteUnavailable(f"nixl's {BACKEND} back-end was built without memory of kind {self.mem}")
            self._registered = self.agent.register_memory(
                [(region.address, region.bytes, self.device, "pool")], self.mem, [BACKEND]
            )
        except Exception as error:  # the package's errors have no common ancestor
            raise _unavailable("nixl cannot register the pool", error) from error

    def close(self) -> None:
        try:
            self.agent.deregister_memory(self._registered, [BACKEND])
        except Exception as error:  # as above
            logger.warning("nixl does not give the pool back: %s", error)
        self._registered = None
        self.agent.agent = None  # the package's own object, whose end closes its connections


class NixlLanding:
    def __init__(self, api: Any, name: str, region: Region) -> None:
        self._memory = _Memory(api, name, region)
        metadata = self._memory.agent.get_agent_metadata()
        place = NixlPlace(metadata, region.address, self._memory.mem, self._memory.device)
        self.description = msgspec.msgpack.encode(place)

    def close(self) -> None:
        self._memory.close()


class _There:
    """A peer: its nixl name, and the prepared lists of all pages here and there, where they have one size."""

    def __init__(self, name: str, place: NixlPlace, page_bytes: int, lists: tuple[Any, Any] | None) -> None:
        self.name, self.place, self.page_bytes, self.lists = name, place, page_bytes, lists


class NixlEngine:
    """The source's agent. Calls are made one at a time: the agent is not told that several threads use it."""

    def __init__(self, api: Any, name: str, region: Region) -> None:
        self._region = region
        self._memory = _Memory(api, name, region)
        self._lock = threading.Lock()

    def reach(self, description: bytes, exports: Exports) -> _There:
        place = msgspec.msgpack.decode(description, type=NixlPlace)
        region, agent, page = self._region, self._memory.agent, exports.page_bytes
        lists = None
        try:
            with self._lock:
                name = agent.add_remote_agent(place.metadata)
                name = name.decode() if isinstance(name, bytes) else name
                agent.make_connection(name)
                if page == region.page_bytes:
                    here = _pages(region.address, region.pages, page, self._memory.device)
                    to = _pages(place.address, exports.pages, page, place.device)
                    lists = (
                        agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, self._memory.mem, [BACKEND]),
                        agent.prep_xfer_dlist(name, to, place.kind, [BACKEND]),
                    )
        except Exception as error:
            raise _unavailable("nixl cannot reach the peer", error) from error
        return _There(name, place, page, lists)

    def start(self, there: _There, runs: Runs) -> list[Any]:
        pages = _whole_pages(runs, there.page_bytes) if there.lists else None
        agent, handles = self._memory.agent, []
        count = len(runs.length) if pages is None else len(pages[0])
        for first in range(0, count, DESCRIPTORS):
            part = slice(first, first + DESCRIPTORS)
            try:
                with self._lock:
                    if pages is None or there.lists is None:
                        handles.append(self._request(there, runs, part))
                    else:
                        here, to = there.lists
                        handle = agent.make_prepped_xfer(
                            "WRITE", here, pages[0][part], to, pages[1][part], b"", [BACKEND]
                        )
                        handles.append(handle)
                    state = agent.transfer(handles[-1])
            except Exception as error:
                raise TransferError(f"nixl refuses a copy: {_words(error)}") from error
            if state == "ERR":
                raise TransferError("nixl reports that a copy failed at its start")
        return handles

    def _request(self, there: _There, runs: Runs, part: slice) -> Any:
        agent, place = self._memory.agent, there.place
        here = _rows(runs.source[part] + self._region.address, runs.length[part], self._memory.device)
        to = _rows(runs.destination[part] + place.address, runs.length[part], place.device)
        local, remote = agent.get_xfer_descs(here, self._memory.mem), agent.get_xfer_descs(to, place.kind)
        return agent.initialize_xfer("WRITE", local, remote, there.name, b"", [BACKEND])

    def finished(self, there: _There, job: list[Any]) -> bool:
        while job:
            try:
                with self._lock:
                    state = self._memory.agent.check_xfer_state(job[0])
                    if state == "DONE":
                        self._memory.agent.release_xfer_handle(job.pop(0))
            except Exception as error:
                raise TransferError(f"nixl reports that a copy failed: {_words(error)}") from error
            if state == "ERR":
                raise TransferError("nixl reports that a copy failed")
            if state != "DONE":
                return False
        return True

    def give_up(self, there: _There, job: list[Any]) -> None:
        for handle in job:
            try:
                with self._lock:
                    self._memory.agent.release_xfer_handle(handle)
            except Exception as error:
                logger.warning("nixl cannot cancel a copy: %s", _words(error))

    def leave(self, there: _There) -> None:
        try:
            with self._lock:
                for prepared in there.lists or ():
                    self._memory.agent.release_dlist_handle(prepared)
                self._memory.agent.remove_remote_agent(there.name)
        except Exception as error:
            raise TransferError(f"nixl cannot forget a peer: {_words(error)}") from error

    def close(self) -> None:
        self._memory.close()


class NixlTransport(PackageTransport):
    """nixl between pools of any kind that its UCX back-end serves. Raises RouteUnavailable without the package."""

    name: ClassVar[str] = "nixl"

    def __init__(self, context: Context) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self._api = import_first(MODULES)
        self._prefix = context.agent
        self._landings = 0
        if context.config.rdma_nics and "UCX_NET_DEVICES" not in os.environ:
            os.environ["UCX_NET_DEVICES"] = ",".join(
                nic if ":" in nic else f"{nic}:1" for nic in context.config.rdma_nics.split(",")
            )
        super().__init__(context)

    def _make_engine(self) -> NixlEngine:
        return NixlEngine(self._api, f"{self._prefix}-source", self.region)

    def _make_landing(self) -> NixlLanding:
        self._landings += 1
        return NixlLanding(self._api, f"{self._prefix}-{self._landings}", self.region)

    def shutdown(self) -> None:
        super().shutdown()
        if isinstance(self._engine, NixlEngine):
            self._engine.close()


def import_first(names: tuple[str, ...]) -> Any:
    """The first of these modules that can be imported. Raises RouteUnavailable with each one's reason."""
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                reasons.append(f"{name}: {error}")
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    package = names[0].partition(".")[0]
    if reasons:
        raise RouteUnavailable(f"the {package} package cannot be loaded: {'; '.join(reasons)}")
    raise RouteUnavailable(f"the {package} package is not installed: pip install 'slipstream[{package}]'")


def _rows(address: NDArray[np.int64], length: NDArray[np.int64], device: int) -> NDArray[np.uint64]:
    rows = np.empty((len(address), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = address, length, device
    return rows


def _pages(address: int, count: int, page: int, device: int) -> NDArray[np.uint64]:
    return _rows(address + np.arange(count, dtype=np.int64) * page, np.full(count, page, np.int64), device)


def _whole_pages(runs: Runs, page: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """(source, destination) numbers of the pages that runs consist of; None when they are not all whole pages."""
    if ((runs.source % page) | (runs.destination % page) | (runs.length % page)).any():
        return None
    each = runs.length // page
    inside = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
    columns = (np.repeat(column // page, each) + inside for column in (runs.source, runs.destination))
    source, destination = (column.astype(np.int32) for column in columns)
    return source, destination


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _unavailable(what: str, error: Exception) -> RouteUnavailable:
    return error if isinstance(error, RouteUnavailable) else RouteUnavailable(f"{what}: {_words(error)}")


def create(context: Context) -> NixlTransport:
    return NixlTransport(context)
