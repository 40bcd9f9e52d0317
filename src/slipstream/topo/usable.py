"""Whether an RDMA port can carry data, with every reason when it cannot.

Distance comes second: most failures in the field are ports that are near and dead. `judge` looks at one device with
what its source shows and leaves what is not shown open ("maybe-roce", "unknown"); `judge_all` also compares the
devices of a machine, which tells front-end ports and management functions from data rails. Nothing here opens a
device: the last word belongs to a registration and a checked transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from slipstream.topo import gids as gid_tables
from slipstream.topo.graph import Finding, Nic, Port, Usable

NO_LID = 65535  # what a port shows that never got a LID
_LINK_DOWNED_CEILING = 255  # the counter has eight bits and stops there
_SLOW_PARTS = {"MT4117": 25, "MT4118": 25, "MT4103": 40}  # Gb/s classes below today's rails
_CLOUD_BOARD = "MSF"  # board ids of one cloud's accelerated-networking functions
_FRONT_END_RATIO = 0.5


@dataclass(frozen=True)
class Surroundings:
    """What the rest of the machine says about its ports.

    `software_drivers` are loaded soft-RDMA modules; `hardware_drivers` tells whether any hardware one is there too
    (None: not shown). `default_route_netdevs` carry the default route. `allow_software` is for tests of RDMA without
    a card.
    """

    software_drivers: frozenset[str] = frozenset()
    hardware_drivers: bool | None = None
    default_route_netdevs: frozenset[str] = frozenset()
    allow_software: bool = False


NOWHERE = Surroundings()


def judge_all(nics: Sequence[Nic], around: Surroundings = NOWHERE) -> tuple[Nic, ...]:
    """All devices with their verdicts; order and names are kept."""
    marked = _mark_management(nics)
    judged = [
        msgspec.structs.replace(nic, ports=tuple(judge(nic, port, around) for port in nic.ports)) for nic in marked
    ]
    return _compare(judged, around)


def judge(nic: Nic, port: Port, around: Surroundings = NOWHERE) -> Port:
    """`port` of `nic` with usable, reasons, cautions and gid_index filled in."""
    reasons = [*_device_reasons(nic, port, around), *_link_reasons(port)]
    cautions = _cautions(nic, port)
    verdict: Usable = "no" if reasons else "unknown"
    gid_index = None
    if not reasons and port.layer == "InfiniBand":
        verdict, more = _judge_infiniband(port)
        reasons += more
    elif port.layer == "Ethernet":
        roce, gid_index, more, notes = _judge_ethernet(port)
        cautions += notes
        reasons += more
        if verdict != "no":
            verdict = roce
    return msgspec.structs.replace(
        port,
        usable=verdict,
        gid_index=gid_index,
        front_end=False,
        reasons=tuple(reasons),
        cautions=tuple(cautions),
    )


def _device_reasons(nic: Nic, port: Port, around: Surroundings) -> list[Finding]:
    reasons = []
    if nic.openable is False:
        reasons.append(Finding("failed-to-open", "listed, but it cannot be opened: removed, or not passed in"))
    if nic.device_file == "":
        reasons.append(Finding("no-device-file", "no uverbs file here: pass /dev/infiniband into the container"))
    elif nic.device_file_open is False:
        reasons.append(Finding("no-permission", f"{nic.device_file} cannot be opened for reading and writing"))
    software = nic.software or (around.software_drivers and around.hardware_drivers is False)
    if software and not around.allow_software:
        name = next(iter(sorted(around.software_drivers)), "a software driver")
        reasons.append(Finding("software-device", f"not hardware: the device belongs to {name}, whatever its name"))
    if nic.management_only:
        reasons.append(Finding("management-device", "management function of a card, not a data port"))
    if nic.board.startswith(_CLOUD_BOARD) and port.layer == "Ethernet":
        reasons.append(Finding("cloud-front-end", "the cloud's accelerated network function, not the compute fabric"))
    return reasons


def _link_reasons(port: Port) -> list[Finding]:
    reasons = []
    if port.phys == "DISABLED":
        reasons.append(Finding("port-disabled", "port is switched off (DISABLED)"))
    elif port.phys == "POLLING":
        reasons.append(Finding("port-polling", "POLLING: no partner on the cable (cable, transceiver or far port)"))
    elif port.phys not in (None, "LINK_UP", "NOP"):
        reasons.append(Finding("port-not-linked", f"physical state {port.phys}"))
    if port.state == "INIT":
        reasons.append(Finding("port-init", "INIT: no subnet manager has brought the port up"))
    elif port.state not in (None, "ACTIVE"):
        reasons.append(Finding("port-down", f"port is {port.state}, not ACTIVE"))
    if port.layer == "Ethernet" and port.netdev_state == "DOWN":
        reasons.append(Finding("netdev-down", f"network device {port.netdev} is down"))
    if reasons and port.layer == "InfiniBand" and port.lid == NO_LID:
        reasons.append(Finding("no-lid", "LID 65535: the port never got one from a subnet manager"))
    return reasons


def _judge_infiniband(port: Port) -> tuple[Usable, list[Finding]]:
    if not port.active:
        what = "the state of the network device (IP over IB) says nothing of verbs use" if port.netdev else "not shown"
        return "unknown", [Finding("state-not-shown", f"port state is not shown: {what}; read the port state")]
    reasons = []
    if port.lid in (0, NO_LID):
        reasons.append(Finding("no-lid", f"LID {port.lid}: no subnet manager has configured the port"))
    if port.sm_lid in (0, NO_LID):
        reasons.append(Finding("no-subnet-manager", f"SM LID {port.sm_lid}: no subnet manager seen"))
    return ("no" if reasons else "ib"), reasons


def _judge_ethernet(port: Port) -> tuple[Usable, int | None, list[Finding], list[Finding]]:
    """Verdict, GID index, reasons and cautions of a RoCE port whose link is not known to be bad."""
    reasons: list[Finding] = []
    cautions: list[Finding] = []
    gid = gid_tables.choose(port.gids, port.netdev) if port.gids is not None else None
    if port.netdev == "":
        reasons.append(Finding("no-netdev", "no network device in this namespace: RoCE needs one"))
    if port.gids is not None and gid is None:
        reasons.append(Finding("no-gid", "GID table is empty: RoCE needs an address"))
    if reasons:
        reporting_gap = port.active and port.phys == "NOP" and port.gids is None
        return ("unknown" if reporting_gap else "no"), None, reasons, cautions
    if gid is not None:
        cautions += _gid_cautions(port, gid.index)
        if gid.kind == "link-local" or gid.version == "v1":
            what = "link-local" if gid.kind == "link-local" else "RoCE v1"
            reasons.append(Finding("gid-not-routable", f"only {what} GIDs: fine on one subnet at most"))
            return "maybe-roce", gid.index, reasons, cautions
        return "roce", gid.index, reasons, cautions
    if port.state is not None and not port.active:
        return "no", None, reasons, cautions
    if not port.active and port.netdev_state != "UP":
        return "unknown", None, [Finding("state-not-shown", "port state is not shown")], cautions
    reasons.append(Finding("gid-not-shown", "no GID is shown: check the table before use"))
    return ("roce" if port.netdev and port.active else "maybe-roce"), None, reasons, cautions


def _gid_cautions(port: Port, chosen: int) -> list[Finding]:
    notes = []
    gids = [gid for gid in port.gids or () if gid.kind != "empty"]
    entry = next(gid for gid in gids if gid.index == chosen)
    if any(gid_tables.is_overlay(gid.netdev) and gid.index < chosen for gid in gids):
        notes.append(Finding("overlay-gid-skipped", f"earlier entries belong to an overlay network; use {chosen}"))
    if gid_tables.is_overlay(entry.netdev):
        notes.append(Finding("overlay-gid", f"GID {chosen} belongs to the overlay device {entry.netdev}"))
    if chosen != 3:
        notes.append(Finding("gid-index", f"the right GID index is {chosen}: a fixed index 3 fails here"))
    return notes


def _cautions(nic: Nic, port: Port) -> list[Finding]:
    notes = []
    if port.active_mtu is not None and port.active_mtu <= 1024 and port.active and port.layer == "Ethernet":
        notes.append(Finding("small-mtu", f"active MTU {port.active_mtu}: works, slower; raise the device MTU to 9000"))
    if nic.part in _SLOW_PARTS:
        notes.append(Finding("slow-card", f"{_SLOW_PARTS[nic.part]}G class card: rank it behind faster ones"))
    if nic.name.startswith("irdma"):
        notes.append(Finding("irdma-mode", "Intel irdma: check RoCE v2 or iWARP mode, and GPU memory registration"))
    if nic.node_guid and not nic.node_guid.strip("0x:"):
        notes.append(Finding("zero-guid", "node GUID is all zero: subnet managers refuse it; the host must set one"))
    if port.link_downed is not None and port.link_downed >= _LINK_DOWNED_CEILING:
        notes.append(Finding("link-downed-saturated", "link_downed is at its ceiling of 255: watch this port"))
    if port.phys == "POLLING" and port.lid not in (None, 0, NO_LID):
        notes.append(Finding("stale-lid", f"LID {port.lid} is left over from before"))
    if not port.active and port.rate_gbps is not None and port.rate_gbps <= 10:
        notes.append(Finding("rate-of-dead-port", f"rate {port.rate_gbps:g} is what a dead port shows, not its speed"))
    return notes


def _mark_management(nics: Sequence[Nic]) -> list[Nic]:
    """A device with several ports that shares its PCI function with a data device manages the card's switch."""
    per_function = Counter(nic.pci for nic in nics if nic.pci)

    def is_management(nic: Nic) -> bool:
        return bool(nic.pci) and per_function[nic.pci] > 1 and len(nic.ports) > 1

    return [msgspec.structs.replace(nic, management_only=True) if is_management(nic) else nic for nic in nics]


def _compare(nics: Sequence[Nic], around: Surroundings) -> tuple[Nic, ...]:
    """Marks front-end ports: legs of a shared bond, the default route, an Ethernet bond among InfiniBand rails, or
    much slower than the rest."""
    carrying = [port for nic in nics for port in nic.ports if port.carries]
    netdevs = Counter(port.netdev for port in carrying if port.netdev)
    fastest = max((port.rate_gbps or 0 for port in carrying), default=0)
    rails = any(port.layer == "InfiniBand" for port in carrying)

    def marked(nic: Nic, port: Port) -> Port:
        notes: list[Finding] = []
        if not port.carries:
            return port
        if port.netdev and netdevs[port.netdev] > 1:
            notes.append(Finding("shared-bond", f"{port.netdev} has several legs here: a front-end bond, not a rail"))
        if port.netdev in around.default_route_netdevs and len(carrying) > 1:
            notes.append(Finding("default-route", f"{port.netdev} carries the default route: front-end network"))
        if rails and port.layer == "Ethernet":
            notes.append(Finding("other-fabric", "Ethernet beside InfiniBand rails: another fabric, do not mix"))
        if port.rate_gbps and port.rate_gbps < fastest * _FRONT_END_RATIO:
            notes.append(Finding("slower", f"{port.rate_gbps:g} Gb/s where others have {fastest:g}"))
        if not notes:
            return port
        return msgspec.structs.replace(port, front_end=True, cautions=(*port.cautions, *notes))

    return tuple(msgspec.structs.replace(nic, ports=tuple(marked(nic, port) for port in nic.ports)) for nic in nics)


def count(ports: Iterable[Port]) -> tuple[int, int, int]:
    """(ports, active, proven usable or only their GID not shown)."""
    listed = list(ports)
    return len(listed), sum(port.active for port in listed), sum(port.carries for port in listed)
