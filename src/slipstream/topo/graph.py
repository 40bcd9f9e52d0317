"""The machine as data: what `probe` and `read` produce and everything else works on.

A `Machine` is a frozen value that goes to JSON and back unchanged, so that a saved snapshot, a recorded tree and the
running system are the same thing to whoever ranks paths or draws them. Three kinds of "nothing" are kept apart:
None is "not shown" (the source does not say), "" and () are "shown to be absent", and a reason says why.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Literal

import msgspec

from slipstream.topo.levels import SELF, UNKNOWN

Usable = Literal["roce", "ib", "maybe-roce", "unknown", "no"]
FORMAT = "slipstream-topology-1"


class Finding(msgspec.Struct, frozen=True):
    """One thing worth saying: `code` is stable, `text` is for people."""

    code: str
    text: str


class Gid(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a port's GID table. `value` is the IPv6 form written out; `version` is the RoCE type."""

    index: int
    value: str
    version: Literal["v1", "v2"] | None = None
    netdev: str | None = None

    @property
    def kind(self) -> Literal["empty", "link-local", "ipv4", "ipv6"]:
        address = ipaddress.IPv6Address(self.value)
        if int(address) == 0:
            return "empty"
        if address.ipv4_mapped is not None:
            return "ipv4"
        return "link-local" if address.is_link_local else "ipv6"

    @property
    def address(self) -> str:
        address = ipaddress.IPv6Address(self.value)
        return str(address.ipv4_mapped or address)


class Port(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One port of an RDMA device, and the verdict on it.

    `state` and `phys` are the words of the verbs library without prefixes (ACTIVE, DOWN, INIT, ARMED; LINK_UP,
    DISABLED, POLLING, NOP...). `rate_gbps` is the rate that the port names, in Gb/s. `netdev` is "" when the port
    has no network device here; `gids` is () when the table is empty. `reasons` say why `usable` is "no" or not yet
    proven, all of them; `cautions` do not forbid the port. `gid_index` is the entry to use.
    """

    number: int
    state: str | None = None
    phys: str | None = None
    layer: Literal["InfiniBand", "Ethernet"] | None = None
    rate_gbps: float | None = None
    lid: int | None = None
    sm_lid: int | None = None
    active_mtu: int | None = None
    netdev: str | None = None
    netdev_state: str | None = None
    gids: tuple[Gid, ...] | None = None
    link_downed: int | None = None
    usable: Usable = "unknown"
    gid_index: int | None = None
    front_end: bool = False
    reasons: tuple[Finding, ...] = ()
    cautions: tuple[Finding, ...] = ()

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def carries(self) -> bool:
        """Whether data may be planned over it: proven, or active and only its GID not shown."""
        return self.usable in ("roce", "ib", "maybe-roce")

    @property
    def gid(self) -> Gid | None:
        return next((gid for gid in self.gids or () if gid.index == self.gid_index), None)


class Nic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An RDMA device. `pci` is its address, `path` its real path in sysfs; `part` is the vendor's (MT4129).

    `software` is True for rxe and siw. `device_file` is its uverbs file: "" when it is missing here, None when it
    was not looked at. `pcie_gbps` is the ceiling that its PCIe link sets, in Gb/s.
    """

    name: str
    ports: tuple[Port, ...] = ()
    label: str = ""
    pci: str = ""
    path: str = ""
    numa: int | None = None
    part: str = ""
    board: str = ""
    firmware: str = ""
    node_guid: str = ""
    driver: str = ""
    virtual_function: bool | None = None
    software: bool | None = None
    management_only: bool = False
    device_file: str | None = None
    device_file_open: bool | None = None
    openable: bool | None = None
    pcie_gbps: float | None = None

    @property
    def usable(self) -> bool:
        return any(port.carries for port in self.ports)

    @property
    def best_port(self) -> Port | None:
        """The port to use: the first proven one, else the first that is only not proven."""
        usable = [port for port in self.ports if port.carries]
        return min(usable, key=lambda port: port.usable == "maybe-roce", default=None)


class NvLinks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The NVLinks of one GPU. `gbps_per_link` is one way, in GB/s; counts are None when the text leaves them out."""

    active: int | None = None
    inactive: int | None = None
    inactive_links: tuple[int, ...] = ()
    seen_links: tuple[int, ...] = ()
    gbps_per_link: float | None = None
    to_switch: bool | None = None


class Fabric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU's place in the NVSwitch fabric. `healthy` None: no fabric to be part of."""

    state: str
    status: str = ""
    healthy: bool | None = None
    clique: str = ""
    cluster: str = ""
    health: tuple[str, ...] = ()


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU. `index` is NVML's (PCI order), whatever CUDA_VISIBLE_DEVICES says; `memory_node` is the NUMA node
    that its own memory forms on coherent machines, which has no CPUs."""

    index: int
    model: str = ""
    uuid: str = ""
    pci: str = ""
    path: str = ""
    numa: int | None = None
    cpus: str = ""
    cpus_trusted: bool = True
    memory_node: int | None = None
    memory_bytes: int | None = None
    nvlinks: NvLinks | None = None
    fabric: Fabric | None = None
    mig: bool | None = None
    virtual: bool | None = None
    pcie_gbps: float | None = None
    xids: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"GPU{self.index}"


class Bridge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of the PCI tree that is no endpoint: a host bridge, a root port, or a switch port."""

    address: str
    kind: Literal["host-bridge", "root-port", "upstream-port", "downstream-port", "bridge"]
    parent: str = ""
    numa: int | None = None


class NumaNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A NUMA node; `cpus` is "" for a node that is only memory (a GPU's, or a CXL device's)."""

    id: int
    cpus: str = ""
    memory_bytes: int | None = None


class GpuDirect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a NIC may reach GPU memory. Each flag is None when nothing shows it; a registration is the final word."""

    peermem: bool | None = None
    peermem_bound: bool | None = None
    dma_buf: bool | None = None
    gdrcopy: bool | None = None
    storage: bool | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def possible(self) -> bool | None:
        if self.peermem_bound or self.dma_buf or (self.peermem and self.peermem_bound is None):
            return True
        return None if self.peermem is None or self.dma_buf is None else False


class _Head(msgspec.Struct):
    format: str


class Machine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT):
    """One machine. `levels[a][b]` holds the level of a pair once, under either name; ask with `level`.

    `peer_access[a][b]` is NVML's word for copies from a to b ("OK", "GNS", "CNS"...). `nvlink_shown` is False when
    the source cannot show NVLink (the PCIe-only form of the matrix): then a PCIe level is no proof against it.
    """

    source: str = ""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    nics_hidden: int = 0
    bridges: tuple[Bridge, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    levels: dict[str, dict[str, str]] = {}
    peer_access: dict[str, dict[str, str]] = {}
    nvlink_shown: bool = True
    gpudirect: GpuDirect = GpuDirect()
    driver: str = ""
    kernel: str = ""
    memlock_bytes: int | None = None
    warnings: tuple[Finding, ...] = ()

    def level(self, a: str, b: str) -> str:
        """Level between two devices by name ("GPU0", "mlx5_4"); "?" when it is not known. Symmetric."""
        if a == b:
            return SELF
        return self.levels.get(a, {}).get(b) or self.levels.get(b, {}).get(a) or UNKNOWN

    def gpu(self, name: str) -> Gpu:
        return next(gpu for gpu in self.gpus if gpu.name == name)

    def nic(self, name: str) -> Nic:
        return next(nic for nic in self.nics if nic.name == name)

    def ports(self) -> Iterator[tuple[Nic, Port]]:
        for nic in self.nics:
            for port in nic.ports:
                yield nic, port

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @staticmethod
    def from_json(data: bytes | str) -> Machine:
        """Raises msgspec.ValidationError (or DecodeError) when `data` is no snapshot of this format."""
        msgspec.json.decode(data, type=_Head)  # the tag alone may be missing
        return msgspec.json.decode(data, type=Machine)
