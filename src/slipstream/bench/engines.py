"""What a transfer benchmark drives: slipstream's transports, the raw copy, and other packages called directly.

Both processes of a pair make the same engine. Each tells the other its `hello`; `meet` completes the connection. The
source then runs batches: `plan` brings a batch's page lists into the form that the engine's call takes (outside the
measured time), `start` begins it and returns at once where the engine can do that, `finish` waits for the oldest that
was started. A direction is "push" (my pages into the peer's) or "pull".
"""

from __future__ import annotations

import importlib
import os
import secrets
import select
from collections import deque
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.bench.pools import BenchPool, move
from slipstream.config import TransferConfig
from slipstream.errors import RouteUnavailable, TransferError
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.route import machine_id, process_id
from slipstream.transfer.transports import load
from slipstream.transfer.transports.base import Context, Description, Exports, Runs

Direction = Literal["push", "pull"]
Pages = NDArray[np.int64]


class Engine(Protocol):
    """One side of a pair. Raises RouteUnavailable when it cannot be used here, with the reason."""

    directions: tuple[Direction, ...]
    depth: int  # 1 when only one batch can be under way, more when several can

    def hello(self) -> bytes: ...

    def meet(self, peer: bytes) -> None: ...

    def fileno(self) -> int:
        """What to watch while this side only answers, -1 for nothing; when it is readable `serve` is called."""
        ...

    def serve(self) -> None: ...

    def plan(self, direction: Direction, page: int, mine: Pages, theirs: Pages) -> Any:
        """A batch; what is prepared once for a page size is done here too."""
        ...

    def start(self, batch: Any) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class SlipstreamEngine:
    """A transport of slipstream, driven as the mover drives it: asleep on its descriptor, then polled."""

    depth = 4

    def __init__(self, transport: str, pool: BenchPool, config: TransferConfig) -> None:
        self._pool = pool
        self._agent = secrets.token_hex(8)
        self._transport: Any = load(transport, Context(pool.region, config, self._agent, "127.0.0.1"))
        self.directions: tuple[Direction, ...] = ("push", "pull") if hasattr(self._transport, "read") else ("push",)
        self._waiting: deque[int] = deque()
        self._done: dict[int, str | None] = {}

    def hello(self) -> bytes:
        region = self._pool.region
        return msgspec.msgpack.encode(
            Exports(
                rank=0,
                first_head=0,
                heads=1,
                kind=region.kind,
                device=region.device,
                bytes=region.bytes,
                page_bytes=region.page_bytes,
                pages=region.pages,
                probe_offset=region.probe_offset,
                probe_bytes=region.bytes - region.probe_offset,
                machine=machine_id(),
                process=process_id(),
                agent=self._agent,
                descriptions=[Description(self._transport.name, self._transport.export())],
            )
        )

    def meet(self, peer: bytes) -> None:
        self._exports = msgspec.msgpack.decode(peer, type=Exports)
        self._transport.admit(self._exports.agent)

    def connect(self) -> None:
        """Opens the peer's memory; only the source does."""
        self._remote = self._transport.open(self._exports, self._exports.descriptions[0].detail)

    @property
    def remote_address(self) -> int:
        return self._remote.address

    def fileno(self) -> int:
        return self._transport.fileno()

    def serve(self) -> None:
        for completion in self._transport.poll():
            self._done[completion.ticket] = completion.error

    def plan(self, direction: Direction, page: int, mine: Pages, theirs: Pages) -> Any:
        source, destination = (mine, theirs) if direction == "push" else (theirs, mine)
        verb = self._transport.write if direction == "push" else self._transport.read
        return verb, Runs(source * page, destination * page, np.broadcast_to(np.int64(page), (len(source),)))

    def start(self, batch: Any) -> None:
        verb, runs = batch
        self._waiting.append(verb(self._remote, runs))

    def finish(self) -> None:
        ticket = self._waiting.popleft()
        while ticket not in self._done:
            select.select([self._transport.fileno()], [], [], 1.0)
            self.serve()
        error = self._done.pop(ticket)
        if error:
            raise TransferError(error)

    def close(self) -> None:
        if hasattr(self, "_remote"):
            self._transport.close(self._remote)
        self._transport.shutdown()


class RawCopy:
    """The least that a copy can cost: one memcpy of the whole batch, contiguous, between the same two memories.

    On GPUs one call of the copy engine into the mapped pool; on the host one memmove into memory of the same process.
    """

    directions: tuple[Direction, ...] = ("push", "pull")
    depth = 1

    def __init__(self, pool: BenchPool, config: TransferConfig) -> None:
        self._pool = pool
        self._cuda = SlipstreamEngine("cuda_ipc", pool, config) if pool.region.kind == "cuda" else None

    def hello(self) -> bytes:
        return self._cuda.hello() if self._cuda else b""

    def meet(self, peer: bytes) -> None:
        if self._cuda:
            self._cuda.meet(peer)

    def connect(self) -> None:
        if self._cuda:
            self._cuda.connect()
            self._device = Device(self._pool.region.device)
            self._device.use()
            self._stream, self._event = self._device.stream(), self._device.event()
        else:
            self._other = np.zeros(self._pool.bytes, np.uint8)

    def fileno(self) -> int:
        return self._cuda.fileno() if self._cuda else -1

    def serve(self) -> None:
        if self._cuda:
            self._cuda.serve()

    def plan(self, direction: Direction, page: int, mine: Pages, theirs: Pages) -> Any:
        here = self._pool.region.address + int(mine[0]) * page
        there = self._cuda.remote_address if self._cuda else int(self._other.ctypes.data)
        there += int(theirs[0]) * page
        return *((there, here) if direction == "push" else (here, there)), page * len(mine)

    def start(self, batch: Any) -> None:
        if self._cuda is None:
            move(*batch)
            return
        destination, source, size = batch
        self._device.copy(destination, source, size, self._stream)
        self._device.record(self._event, self._stream)

    def finish(self) -> None:
        while self._cuda is not None and not self._device.is_done(self._event):
            pass

    def close(self) -> None:
        if self._cuda:
            self._cuda.close()


class PageMoves(RawCopy):
    """A memmove a page, inside one process: the bound of whatever copies scattered pages of the host's memory once."""

    def plan(self, direction: Direction, page: int, mine: Pages, theirs: Pages) -> Any:
        here = mine * page + self._pool.region.address
        there = theirs * page + int(self._other.ctypes.data)
        to, origin = (there, here) if direction == "push" else (here, there)
        return [(destination, source, page) for destination, source in zip(to.tolist(), origin.tolist(), strict=True)]

    def start(self, batch: Any) -> None:
        for one in batch:
            move(*one)


class NixlEngine:
    """The nixl package with its UCX back-end, prepared descriptor lists and indices."""

    directions: tuple[Direction, ...] = ("push", "pull")
    depth = 1

    def __init__(self, pool: BenchPool, config: TransferConfig) -> None:
        api = _import_first("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
        self._pool = pool
        self._kind = "VRAM" if pool.region.kind == "cuda" else "DRAM"
        threads = int(os.environ.get("SLIPSTREAM_BENCH_NIXL_THREADS", "0"))
        settings = api.nixl_agent_config(
            enable_prog_thread=True, enable_listen_thread=False, num_threads=threads, backends=["UCX"]
        )
        self._agent: Any = api.nixl_agent(f"bench-{secrets.token_hex(4)}", settings)
        region = (pool.region.address, pool.region.bytes, max(pool.region.device_index, 0), "pool")
        self._registered = self._agent.register_memory([region], self._kind)
        self._lists: dict[int, tuple[Any, Any]] = {}

    def hello(self) -> bytes:
        region = self._pool.region
        metadata: bytes = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode((metadata, region.address, self._pool.bytes, max(region.device_index, 0)))

    def meet(self, peer: bytes) -> None:
        metadata, self._there, self._size, self._device = msgspec.msgpack.decode(peer)
        name = self._agent.add_remote_agent(metadata)
        self._name = name.decode() if isinstance(name, bytes) else name

    def connect(self) -> None:
        self._agent.make_connection(self._name)

    def fileno(self) -> int:
        return -1

    def serve(self) -> None:
        pass

    def plan(self, direction: Direction, page: int, mine: Pages, theirs: Pages) -> Any:
        if page not in self._lists:
            region = self._pool.region
            local = _descriptors(region.address, self._pool.bytes, page, max(region.device_index, 0))
            remote = _descriptors(self._there, self._size, page, self._device)
            self._lists[page] = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, self._kind),
                self._agent.prep_xfer_dlist(self._name, remote, self._kind),
            )
        here, there = self._lists[page]
        verb = "WRITE" if direction == "push" else "READ"
        return verb, here, mine.astype(np.int32), there, theirs.astype(np.int32), b""

    def start(self, batch: Any) -> None:
        self._handle = self._agent.make_prepped_xfer(*batch)
        self._state = self._agent.transfer(self._handle)

    def finish(self) -> None:
        while self._state == "PROC":
            self._state = self._agent.check_xfer_state(self._handle)
        self._agent.release_xfer_handle(self._handle)
        if self._state != "DONE":
            raise TransferError(f"nixl reports {self._state}")

    def close(self) -> None:
        for lists in self._lists.values():
            for prepared in lists:
                self._agent.release_dlist_handle(prepared)
        self._agent.deregister_memory(self._registered)


def _descriptors(address: int, size: int, page: int, device: int) -> NDArray[np.uint64]:
    rows = np.empty((size // page, 3), np.uint64)
    rows[:, 0] = np.uint64(address) + np.arange(size // page, dtype=np.uint64) * np.uint64(page)
    rows[:, 1], rows[:, 2] = page, device
    return rows


class MooncakeEngine:
    """The mooncake transfer engine, batched calls. Its TCP path refuses long batches, so there they are cut."""

    directions: tuple[Direction, ...] = ("push", "pull")
    depth = 1
    _TCP_REQUESTS = 1000

    def __init__(self, pool: BenchPool, config: TransferConfig) -> None:
        module = _import_first("mooncake.engine")
        self._pool = pool
        self._engine: Any = module.TransferEngine()
        protocol = "tcp" if pool.region.kind == "cpu" else "rdma"  # on GPUs the environment decides, not this name
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, ""):
            raise RouteUnavailable("mooncake's TransferEngine.initialize failed")
        if self._engine.register_memory(pool.region.address, pool.region.bytes):
            raise RouteUnavailable("mooncake's register_memory failed")
        self._most = self._TCP_REQUESTS if "MC_FORCE_TCP" in os.environ else 1 << 30

    def hello(self) -> bytes:
        return msgspec.msgpack.encode((f"127.0.0.1:{self._engine.get_rpc_port()}", self._pool.region.address))

    def meet(self, peer: bytes) -> None:
        self._name, self._there = msgspec.msgpack.decode(peer)

    def connect(self) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def serve(self) -> None:
        pass

    def plan(self, direction: Direction, page: int, mine: Pages, theirs: Pages) -> Any:
        verb = "batch_transfer_sync_" + ("write" if direction == "push" else "read")
        here = (mine * page + self._pool.region.address).astype(np.uint64)
        there = (theirs * page + self._there).astype(np.uint64)
        sizes = np.full(len(mine), page, np.uint64)
        call = getattr(self._engine, verb + "_arrays", None)
        if call is None:
            return getattr(self._engine, verb), here.tolist(), there.tolist(), sizes.tolist()
        return call, here, there, sizes

    def start(self, batch: Any) -> None:
        call, here, there, sizes = batch
        for start in range(0, len(sizes), self._most):
            part = slice(start, start + self._most)
            code = call(self._name, here[part], there[part], sizes[part])
            if code:
                raise TransferError(f"mooncake returned {code} for a batch of {len(sizes[part])} requests")

    def finish(self) -> None:
        pass  # the call has waited

    def close(self) -> None:
        self._engine.unregister_memory(self._pool.region.address)


def _import_first(*names: str) -> Any:
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise RouteUnavailable(f"not installed, or does not load ({'; '.join(reasons)})")


class EngineKind(msgspec.Struct, frozen=True):
    """How an engine is chosen: its driver, the environment of its processes, the memory that it is meant for, and the
    transport of slipstream that it drives where that has another name."""

    driver: str
    memory: tuple[str, ...]
    environment: dict[str, str] = {}
    transport: str = ""


_NIXL_GPU = {"NIXL_UCX_SGL_ENABLE": "0", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}


ENGINES: dict[str, EngineKind] = {
    "raw": EngineKind("raw", ("cpu", "cuda")),
    "memmove": EngineKind("memmove", ("cpu",)),
    "cuda_ipc": EngineKind("slipstream", ("cuda",)),
    "shm": EngineKind("slipstream", ("cpu", "cuda")),
    "tcp": EngineKind("slipstream", ("cpu", "cuda")),
    "nixl": EngineKind("nixl", ("cpu", "cuda"), {"NIXL_UCX_SGL_ENABLE": "0"}),
    "nixl-best": EngineKind(
        "nixl",
        ("cuda",),
        {**_NIXL_GPU, "SLIPSTREAM_BENCH_NIXL_THREADS": "4"},
    ),
    "nixl-sgl": EngineKind("nixl", ("cuda",), {"NIXL_UCX_SGL_ENABLE": "1", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}),
    "nixl-tcp": EngineKind("nixl", ("cpu",), {"NIXL_UCX_SGL_ENABLE": "0", "UCX_TLS": "tcp,self"}),
    "mooncake": EngineKind("mooncake", ("cuda",), {"MC_INTRANODE_NVLINK": "1"}),
    "mooncake-tcp": EngineKind("mooncake", ("cpu", "cuda"), {"MC_FORCE_TCP": "1"}),
    "transport-nixl": EngineKind("slipstream", ("cpu", "cuda"), _NIXL_GPU, "nixl"),
    "transport-mooncake": EngineKind("slipstream", ("cuda",), {"MC_INTRANODE_NVLINK": "1"}, "mooncake"),
}
"""What can be measured. The environments are what each package needs to take its fastest path on one machine. Names
that begin with `transport-` are the packages behind slipstream's transports of these names, not called directly."""


def make_engine(name: str, pool: BenchPool, config: TransferConfig) -> Any:
    driver = ENGINES[name].driver
    if driver == "slipstream":
        return SlipstreamEngine(ENGINES[name].transport or name, pool, config)
    drivers = {"raw": RawCopy, "memmove": PageMoves, "nixl": NixlEngine, "mooncake": MooncakeEngine}
    return drivers[driver](pool, config)
