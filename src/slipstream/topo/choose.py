"""Ranks the paths between GPUs and from each GPU to the network, with reasons.

A ranking is a proposal: it says what should be tried first and why, and `transfer.route` proves it with real bytes.
What is refused is kept with all its reasons. Ties are broken by PCI address and load, never by name, so that renaming
devices renames the answer and nothing else, and a port that cannot be used changes no choice at all.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from slipstream.topo import levels
from slipstream.topo.graph import Finding, Gpu, Machine, Nic, Port

Way = Literal["nvlink", "pcie-peer", "host-memory", "rdma-loopback", "tcp"]
_TRANSPORTS: dict[Way, str] = {
    "nvlink": "cuda_ipc",
    "pcie-peer": "cuda_ipc",
    "host-memory": "shm",
    "rdma-loopback": "nixl",
    "tcp": "tcp",
}
_NEAR = ("PIX", "PXB")
_FIXABLE = {"no-netdev", "no-gid"}
_PEER_WORDS = {
    "CNS": "the chipset does not support peer access",
    "GNS": "the GPUs do not support peer access",
    "TNS": "the topology does not support peer access",
    "NS": "peer access is not supported",
    "DR": "peer access is disabled by a driver setting",
    "U": "NVML cannot tell whether peer access works",
}


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """One way between two GPUs. `possible` None: nothing speaks against it, a test has to prove it. `gbps` is the
    ceiling one way in GB/s, None when it is not known."""

    way: Way
    transport: str
    possible: bool | None
    level: str = ""
    gbps: float | None = None
    reasons: tuple[Finding, ...] = ()


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Ranked ways between two GPUs, best first; impossible ones are last, with reasons."""

    a: str
    b: str
    paths: tuple[Path, ...]

    @property
    def best(self) -> Path:
        return self.paths[0]


class RankedNic(msgspec.Struct, frozen=True, kw_only=True):
    """A port that a GPU may use. `direct` says whether the NIC may reach GPU memory (None: not known); `gbps` is its
    ceiling in GB/s."""

    nic: str
    port: int
    level: str
    direct: bool | None
    proven: bool
    front_end: bool
    gbps: float | None = None
    gid_index: int | None = None
    reasons: tuple[Finding, ...] = ()


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    nic: str
    port: int | None
    reasons: tuple[Finding, ...]


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's ranked ports; empty when none can be used."""

    gpu: str
    ranked: tuple[RankedNic, ...]

    @property
    def best(self) -> RankedNic | None:
        return self.ranked[0] if self.ranked else None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to use on one machine, what was refused, and what would improve it."""

    pairs: tuple[Pair, ...]
    networks: tuple[Network, ...]
    refused: tuple[Refused, ...]
    handoff: str
    advice: tuple[Finding, ...]


def plan(machine: Machine) -> Plan:
    """Ranks everything on `machine`."""
    pairs = tuple(pair(machine, a, b) for i, a in enumerate(machine.gpus) for b in machine.gpus[i + 1 :])
    networks = _networks(machine)
    return Plan(
        pairs=pairs,
        networks=networks,
        refused=refused(machine),
        handoff=_handoff(machine, pairs),
        advice=_advice(machine, networks),
    )


def pair(machine: Machine, a: Gpu, b: Gpu) -> Pair:
    """Ways between two GPUs. Symmetric: the same ways in the same order for (b, a)."""
    level = machine.level(a.name, b.name)
    paths = [
        _nvlink(machine, a, b, level),
        _pcie(machine, a, b, level),
        _host_memory(machine),
        _loopback(machine, a, b),
        Path(way="tcp", transport="tcp", possible=True, reasons=(Finding("staged", "staged through host memory"),)),
    ]

    def rank(path: Path) -> tuple[bool, int]:
        place = ("nvlink", "pcie-peer", "host-memory", "rdma-loopback", "tcp").index(path.way) * 2
        doubtful_peer = path.way == "pcie-peer" and path.possible is None and path.level not in _NEAR
        return path.possible is False, place + 3 if doubtful_peer else place

    return Pair(a=a.name, b=b.name, paths=tuple(sorted(paths, key=rank)))


def _peer_problems(machine: Machine, a: Gpu, b: Gpu) -> list[Finding]:
    problems = []
    said = {machine.peer_access.get(x.name, {}).get(y.name) for x, y in ((a, b), (b, a))}
    for word in sorted(word for word in said if word and word != "OK"):
        problems.append(Finding("no-peer-access", _PEER_WORDS.get(word, f"peer status {word}")))
    for gpu in sorted((a, b), key=lambda gpu: gpu.index):
        if gpu.mig:
            problems.append(Finding("mig", f"{gpu.name} is split by MIG: no peer access"))
        if gpu.virtual:
            problems.append(Finding("virtual-gpu", f"{gpu.name} is a virtual GPU: no peer access"))
        if gpu.xids:
            problems.append(Finding("xid", f"{gpu.name} reported Xid {', '.join(map(str, gpu.xids))}: reset it first"))
    return problems


def _peer_known(machine: Machine, a: Gpu, b: Gpu) -> bool:
    return all(machine.peer_access.get(x.name, {}).get(y.name) == "OK" for x, y in ((a, b), (b, a)))


def _nvlink(machine: Machine, a: Gpu, b: Gpu, level: str) -> Path:
    links = levels.nvlinks(level)
    reasons = _peer_problems(machine, a, b)
    for gpu in sorted((a, b), key=lambda gpu: gpu.index):
        if gpu.fabric and gpu.fabric.healthy is False:
            reasons.append(Finding("fabric", f"{gpu.name} is not on the NVLink fabric ({gpu.fabric.state})"))
        if gpu.nvlinks and gpu.nvlinks.active == 0:
            reasons.append(Finding("links-inactive", f"all NVLinks of {gpu.name} are inactive"))
    if not links:
        hidden = not machine.nvlink_shown or level == levels.UNKNOWN
        text = "this source does not show NVLink for the pair" if hidden else f"no NVLink between them (level {level})"
        reasons.append(Finding("nvlink-not-shown" if hidden else "no-nvlink", text))
    possible = False if reasons else True if _peer_known(machine, a, b) else None
    rates = {gpu.nvlinks.gbps_per_link for gpu in (a, b) if gpu.nvlinks and gpu.nvlinks.gbps_per_link}
    return Path(
        way="nvlink",
        transport=_TRANSPORTS["nvlink"],
        possible=possible,
        level=level,
        gbps=links * min(rates) if links and rates else None,
        reasons=tuple(reasons) or (Finding("nvlink", f"{links} NVLinks"),),
    )


def _pcie(machine: Machine, a: Gpu, b: Gpu, level: str) -> Path:
    reasons = _peer_problems(machine, a, b)
    known = _peer_known(machine, a, b)
    if levels.nvlinks(level):
        return Path(
            way="pcie-peer",
            transport=_TRANSPORTS["pcie-peer"],
            possible=False,
            level=level,
            reasons=(*reasons, Finding("nvlink-instead", "peer copies of this pair go over NVLink")),
        )
    rates = [gpu.pcie_gbps for gpu in (a, b) if gpu.pcie_gbps]
    notes = []
    if level not in _NEAR:
        notes.append(
            Finding("root-complex", f"level {level}: copies pass the root complex, writes beat reads; measure")
        )
    if not known and not reasons:
        notes.append(Finding("peer-not-shown", "peer access is not shown: a copy with a pattern has to prove it"))
    return Path(
        way="pcie-peer",
        transport=_TRANSPORTS["pcie-peer"],
        possible=False if reasons else True if known else None,
        level=level,
        gbps=min(rates) / 8 if rates else None,
        reasons=(*reasons, *notes),
    )


def _host_memory(machine: Machine) -> Path:
    notes = [Finding("staged", "staged through shared pinned host memory: works everywhere")]
    if machine.memlock_bytes is not None and machine.memlock_bytes < 1 << 30:
        limit = f"memlock is {machine.memlock_bytes >> 10} KiB"
        notes.append(Finding("memlock", f"{limit}: raise it to pin a pool (--ulimit memlock=-1)"))
    return Path(way="host-memory", transport=_TRANSPORTS["host-memory"], possible=True, reasons=tuple(notes))


def _loopback(machine: Machine, a: Gpu, b: Gpu) -> Path:
    usable = [(nic, port) for nic, port in machine.ports() if port.carries]
    if not usable:
        reason = Finding("no-usable-nic", "no network port can be used")
        return Path(way="rdma-loopback", transport=_TRANSPORTS["rdma-loopback"], possible=False, reasons=(reason,))

    def rank(item: tuple[Nic, Port]) -> tuple:
        nic, port = item
        far = max(levels.order(machine.level(gpu.name, nic.name)) for gpu in (a, b))
        return port.usable == "maybe-roce", port.front_end, far, -(_gbps(nic, port) or 0), _place(machine, nic)

    nic, port = min(usable, key=rank)
    level = max((machine.level(gpu.name, nic.name) for gpu in (a, b)), key=levels.order)
    return Path(
        way="rdma-loopback",
        transport=_TRANSPORTS["rdma-loopback"],
        possible=None,
        level=level,
        gbps=_gbps(nic, port),
        reasons=(Finding("shares-the-wire", f"through {nic.name}, which real traffic needs"),),
    )


def _networks(machine: Machine) -> tuple[Network, ...]:
    """Ports by GPU; of equal ports the one that fewer GPUs were given comes first."""
    load: dict[tuple[str, int], int] = {}
    found: dict[str, Network] = {}
    for gpu in sorted(machine.gpus, key=lambda gpu: (gpu.pci, gpu.index)):
        ranked = _rank(machine, gpu, load)
        found[gpu.name] = Network(gpu=gpu.name, ranked=ranked)
        if ranked:
            key = (ranked[0].nic, ranked[0].port)
            load[key] = load.get(key, 0) + 1
    return tuple(found[gpu.name] for gpu in machine.gpus)


def _rank(machine: Machine, gpu: Gpu, load: dict[tuple[str, int], int]) -> tuple[RankedNic, ...]:
    def key(item: tuple[Nic, Port]) -> tuple:
        nic, port = item
        below = levels.parts_below(gpu.path, nic.path) if gpu.path and nic.path else 0
        return (
            port.usable == "maybe-roce",
            port.front_end,
            levels.order(machine.level(gpu.name, nic.name)),
            below,
            -(_gbps(nic, port) or 0),
            load.get((nic.name, port.number), 0),
            _place(machine, nic),
            port.number,
        )

    usable = sorted(((nic, port) for nic, port in machine.ports() if port.carries), key=key)
    return tuple(_ranked(machine, gpu, nic, port) for nic, port in usable)


def _ranked(machine: Machine, gpu: Gpu, nic: Nic, port: Port) -> RankedNic:
    level = machine.level(gpu.name, nic.name)
    direct = False if gpu.virtual else machine.gpudirect.possible
    notes = [*port.reasons, *port.cautions]
    if direct is False:
        notes.append(Finding("staged", "no GPUDirect here (no peermem, no dma-buf): staged through host memory"))
    elif levels.order(level) >= levels.order("PHB"):
        notes.append(Finding("root-complex", f"{level}: also direct, through the root complex; writes beat reads"))
    return RankedNic(
        nic=nic.name,
        port=port.number,
        level=level,
        direct=direct,
        proven=port.usable in ("roce", "ib"),
        front_end=port.front_end,
        gbps=_gbps(nic, port),
        gid_index=port.gid_index,
        reasons=tuple(notes),
    )


def refused(machine: Machine) -> tuple[Refused, ...]:
    """Every port that no GPU may use, with all its reasons; a device without shown ports counts as one."""
    out = []
    for nic in machine.nics:
        if not nic.ports:
            reason = Finding("not-shown", "its ports are not shown: read `rdma link` or /sys/class/infiniband")
            out.append(Refused(nic=nic.name, port=None, reasons=(reason,)))
        for port in nic.ports:
            if not port.carries:
                out.append(Refused(nic=nic.name, port=port.number, reasons=port.reasons))
    return tuple(out)


def _gbps(nic: Nic, port: Port) -> float | None:
    """Ceiling in GB/s: the smaller of what the port names and what its PCIe link carries."""
    rates = [rate for rate in (port.rate_gbps, nic.pcie_gbps) if rate]
    return min(rates) / 8 if rates else None


def _place(machine: Machine, nic: Nic) -> tuple[str, int]:
    return nic.pci, next(i for i, other in enumerate(machine.nics) if other is nic)


def _handoff(machine: Machine, pairs: tuple[Pair, ...]) -> str:
    """One sentence: what the KV handoff inside this machine should use."""
    if not machine.gpus:
        return "No GPU shown: workers on one machine share host memory (shm)."
    if not pairs:
        return "One GPU: no handoff between GPUs inside this machine."
    best = {pair.best.way for pair in pairs}
    by_nvlink = sum(pair.best.way == "nvlink" for pair in pairs)
    if best == {"nvlink"}:
        rates = {pair.best.gbps for pair in pairs if pair.best.gbps}
        speed = f", {min(rates):.0f} GB/s one way at most" if rates else ""
        return f"NVLink between all GPUs ({_span(pairs)}{speed}): use cuda_ipc, no NIC needed."
    if by_nvlink:
        linked = ", ".join(f"{pair.a}-{pair.b}" for pair in pairs if pair.best.way == "nvlink")
        return f"NVLink joins {by_nvlink} of {len(pairs)} pairs ({linked}): place prefill and decode along them."
    names = {"pcie-peer": "peer copies over PCIe (cuda_ipc)", "host-memory": "shared host memory (shm)"}
    return f"No NVLink shown: use {', or '.join(names.get(way, way) for way in sorted(best, reverse=True))}."


def _span(pairs: tuple[Pair, ...]) -> str:
    found = sorted({pair.best.level for pair in pairs}, key=levels.nvlinks)
    return " to ".join(dict.fromkeys((found[0], found[-1])))


def _advice(machine: Machine, networks: tuple[Network, ...]) -> tuple[Finding, ...]:
    """What would give a GPU a nearer port: ports that are up and only lack a network device or an address."""
    fixable = [
        (nic, port)
        for nic, port in machine.ports()
        if port.active and not port.carries and {reason.code for reason in port.reasons} <= _FIXABLE
    ]
    advice = []
    for network in networks:
        now = levels.order(network.best.level) if network.best else levels.order("SYS") + 1
        better = [
            nic
            for nic, _ in fixable
            if levels.order(machine.level(network.gpu, nic.name)) < min(now, levels.order("NODE"))
        ]
        if better:
            nic = min(
                better, key=lambda nic: (levels.order(machine.level(network.gpu, nic.name)), _place(machine, nic))
            )
            level = machine.level(network.gpu, nic.name)
            text = f"give {nic.name} a network device and an address: {network.gpu} gets a {level} rail"
            advice.append(Finding("address-missing", text))
    if machine.nics_hidden:
        text = f"{machine.nics_hidden} NICs are not in the table: run slipstream topo on the machine to choose one"
        advice.append(Finding("nics-hidden", text))
    return tuple(advice)
