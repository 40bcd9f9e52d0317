"""The mooncake transfer engine (extra `mooncake`), peer to peer: RDMA where there is a NIC, else its TCP.

The source keeps one engine for all its peers, each of whom is a thread; a destination makes an engine for each source,
whose name it hands out at its gate (`gate.py`). A copy is a sequence of batched calls that return when the bytes are in
place; the calling thread spins meanwhile, which is the package's way.

The package lets environment variables choose its one transport, by their presence, and falls from one to another
without a word. Here the choice is made first (`choose`), from the same variables in the same order, logged, and pinned
where the package would slide: without an RDMA device that can carry data it is told to use TCP, where a build with
NVLink would else take a transport that this machine may not have. What the chosen one cannot move is refused.

A batch that is too long for the queues of its TCP is refused in part, while the rest runs on after the call has
returned. So calls are kept short, and when one fails, the ticket fails only after the destination has taken its engine
down (`package`): until then its memory is not free.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec

from slipstream.errors import RouteUnavailable, TransferError
from slipstream.transfer.route import usable_nics
from slipstream.transfer.transports.base import Context, Exports, Region, Runs
from slipstream.transfer.transports.nixl import import_first
from slipstream.transfer.transports.package import PackageTransport
from slipstream.transfer.transports.tcp import reachable

logger = logging.getLogger(__name__)

REQUESTS = 1000  # a call; its TCP keeps 1,024 queued and as many pending for a peer, and refuses what is beyond
_HANDSHAKE = "P2PHANDSHAKE"


class Choice(NamedTuple):
    """The transport that the package will use, and whether it has to be told so."""

    transport: str
    force_tcp: bool
    why: str


class MooncakePlace(msgspec.Struct, frozen=True):
    """What a landing's description says: the engine's name, the pool's address, the transport it runs."""

    segment: str
    address: int
    transport: str


def choose(environment: Mapping[str, str], flags: Mapping[str, bool], nics: list[str], kind: str) -> Choice:
    """What the package would do in this environment, made explicit. `flags` are its SUPPORT_ constants.

    Raises RouteUnavailable when the chosen transport cannot move memory of this kind.
    """
    if "MC_FORCE_TCP" in environment:
        choice = Choice("tcp", False, "MC_FORCE_TCP is set")
    elif flags.get("SUPPORT_INTRA_NVLINK") and "MC_INTRANODE_NVLINK" in environment:
        choice = Choice("nvlink_intra", False, "MC_INTRANODE_NVLINK is set")
    elif flags.get("SUPPORT_MNNVL") and "MC_FORCE_MNNVL" in environment:
        choice = Choice("nvlink", False, "MC_FORCE_MNNVL is set")
    elif nics:
        choice = Choice("rdma", False, f"RDMA devices: {', '.join(nics)}")
    else:
        choice = Choice("tcp", True, "no RDMA device here can carry data")
    if kind == "cpu" and choice.transport.startswith("nvlink"):
        raise RouteUnavailable(f"mooncake would use {choice.transport} ({choice.why}), which moves memory of GPUs only")
    if kind == "cuda" and not flags.get("SUPPORT_CUDA"):
        raise RouteUnavailable("this build of mooncake has no CUDA: it would hand addresses of the GPU to the system")
    return choice


class MooncakeLanding:
    """An engine with the region registered. Raises RouteUnavailable."""

    def __init__(self, module: Any, host: str, region: Region, choice: Choice, nics: str) -> None:
        if choice.force_tcp:
            os.environ["MC_FORCE_TCP"] = "1"
        self._region = region
        self.engine: Any = module.TransferEngine()
        protocol = choice.transport if choice.transport in ("tcp", "rdma") else "rdma"
        code = self.engine.initialize(reachable(host), _HANDSHAKE, protocol, nics)
        if code:
            raise RouteUnavailable(f"mooncake's engine does not start over {choice.transport} (code {code})")
        code = self.engine.register_memory(region.address, region.bytes)
        if code:
            raise RouteUnavailable(f"mooncake cannot register the pool for {choice.transport} (code {code})")
        segment = f"{reachable(host)}:{self.engine.get_rpc_port()}"
        self.description = msgspec.msgpack.encode(MooncakePlace(segment, region.address, choice.transport))

    def close(self) -> None:
        code = self.engine.unregister_memory(self._region.address)
        if code:
            logger.warning("mooncake does not give the pool back (code %s)", code)
        self.engine = None  # its end closes its connections and stops its threads


class MooncakeEngine:
    """The source's engine."""

    def __init__(self, memory: MooncakeLanding, region: Region, transport: str) -> None:
        self._memory, self._region, self._transport = memory, region, transport

    def reach(self, description: bytes, exports: Exports) -> MooncakePlace:
        place = msgspec.msgpack.decode(description, type=MooncakePlace)
        if place.transport != self._transport:
            raise RouteUnavailable(
                f"mooncake runs {self._transport} here and {place.transport} at the peer, and has one for all peers: "
                "give both workers the same environment and the same kind of NIC"
            )
        return place

    def start(self, there: MooncakePlace, runs: Runs) -> None:
        here = (runs.source + self._region.address).tolist()
        to = (runs.destination + there.address).tolist()
        sizes = runs.length.tolist()
        for first in range(0, len(sizes), REQUESTS):
            part = slice(first, first + REQUESTS)
            code = self._memory.engine.batch_transfer_sync_write(there.segment, here[part], to[part], sizes[part])
            if code:
                raise TransferError(f"mooncake reports that a batch of {len(sizes[part])} copies failed (code {code})")

    def finished(self, there: MooncakePlace, job: None) -> bool:
        return True

    def give_up(self, there: MooncakePlace, job: None) -> None:
        pass

    def leave(self, there: MooncakePlace) -> None:
        pass

    def close(self) -> None:
        self._memory.close()


class MooncakeTransport(PackageTransport):
    """mooncake between pools that its transport serves. Raises RouteUnavailable without the package, or when the
    transport that it would choose cannot move this rank's memory."""

    name: ClassVar[str] = "mooncake"

    def __init__(self, context: Context) -> None:
        self._module = import_first(("mooncake.engine",))
        flags = {name: bool(getattr(self._module, name)) for name in dir(self._module) if name.startswith("SUPPORT_")}
        self._nics = context.config.rdma_nics
        nics = self._nics.split(",") if self._nics else usable_nics()
        self.choice = choose(os.environ, flags, nics, context.region.kind)
        logger.info("mooncake uses %s: %s", self.choice.transport, self.choice.why)
        self._making = threading.Lock()
        super().__init__(context)

    def _make_engine(self) -> MooncakeEngine:
        return MooncakeEngine(self._make_landing(), self.region, self.choice.transport)

    def _make_landing(self) -> MooncakeLanding:
        with self._making:
            return MooncakeLanding(self._module, self.host, self.region, self.choice, self._nics)

    def shutdown(self) -> None:
        super().shutdown()
        if isinstance(self._engine, MooncakeEngine):
            self._engine.close()


def create(context: Context) -> MooncakeTransport:
    return MooncakeTransport(context)
