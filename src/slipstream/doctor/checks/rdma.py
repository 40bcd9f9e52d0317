"""RDMA devices: ports, addresses, and whether NICs reach GPU memory. All of it is absent on most machines."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from slipstream.doctor.case import Case, some
from slipstream.doctor.verdict import Remedy, Verdict, absent, check, fail, ok, unchecked, warn
from slipstream.topo import choose, levels
from slipstream.topo.graph import Nic, Port

_NONE = "no RDMA device on this machine"
_NO_PORT = "no usable RDMA port"
_FILES = ("container.rdma-files", "container.rdma-permission")
_NAME_VARIABLES = ("NCCL_IB_HCA", "UCX_NET_DEVICES", "MC_TE_FILTERS", "MC_MS_FILTERS", "NVSHMEM_HCA_LIST")
_INDEX_VARIABLES = ("NCCL_IB_GID_INDEX", "MC_GID_INDEX", "UCX_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX")


@check("rdma.usable", "RDMA ports that can carry data", causes=(*_FILES, "rdma.links", "rdma.addresses"))
def usable(case: Case) -> Verdict:
    if not case.hardware:
        soft = [nic.name for nic in case.machine.nics if nic.software]
        return absent(f"only software devices: {some(soft)}" if soft else _NONE)
    ports = sum(len(nic.ports) for nic in case.hardware)
    good = [f"{nic.name}/{port.number}" for nic, port in case.usable_ports]
    seen = f"{len(good)} of {ports} ports ({len(case.active_ports)} active)"
    if good:
        return ok(f"{seen}: {some(good)}")
    if not case.active_ports:
        return absent(f"{seen}; nothing is connected")
    reasons = list(dict.fromkeys(reason.text for _, port in case.active_ports for reason in port.reasons))
    return case.rdma_trouble(
        f"{seen}: {some(reasons, 3)}",
        wanted="one usable port",
        why="other machines are reached by TCP only",
        remedy="see slipstream topo for each port's reasons",
    )


@check("rdma.links", "Cables and links", causes=_FILES)
def links(case: Case) -> Verdict:
    if not case.hardware:
        return absent(_NONE)
    bad = [
        (nic, port)
        for nic in case.hardware
        for port in nic.ports
        if not port.active and port.phys in ("POLLING", "DISABLED") and not nic.virtual_function
    ]
    if not bad:
        return ok("no port is switched off or without a partner")
    seen = some([f"{nic.name}/{port.number} {port.phys}" for nic, port in bad])
    if case.active_ports:
        return ok(f"{len(case.active_ports)} active; not connected or switched off: {seen}")
    if not case.rdma_asked:
        return ok(f"nothing is connected: {seen}")
    return fail(
        seen,
        wanted="ACTIVE and LinkUp",
        why="no RDMA port has a link",
        remedy="POLLING: check cable, transceiver and the switch's port; DISABLED: switch the port on (ip link set up)",
    )


@check("rdma.subnet-manager", "A subnet manager has configured InfiniBand ports", causes=_FILES)
def subnet_manager(case: Case) -> Verdict:
    infiniband = [(nic, port) for nic in case.hardware for port in nic.ports if port.layer == "InfiniBand"]
    if not infiniband:
        return absent("no InfiniBand port")
    stuck = [
        (nic, port) for nic, port in infiniband if port.state == "INIT" or (port.active and port.lid in (0, 65535))
    ]
    if not stuck:
        return ok("no port waits for one")
    return case.rdma_trouble(
        some([f"{nic.name}/{port.number} {port.state}, LID {port.lid}" for nic, port in stuck]),
        wanted="ACTIVE with a LID",
        why="the link is up and nobody routes on it: these ports carry nothing",
        remedy="start opensm or the switch's subnet manager; for virtual functions set their GUIDs on the host",
    )


@check("rdma.addresses", "RoCE ports have addresses", causes=_FILES)
def addresses(case: Case) -> Verdict:
    roce = [(nic, port) for nic, port in case.active_ports if port.layer == "Ethernet"]
    if not roce:
        return absent("no active RoCE port")
    bare = [nic.name for nic, port in roce if {reason.code for reason in port.reasons} & {"no-gid", "no-netdev"}]
    if not bare:
        return ok(f"{len(roce)} active ports, each with a GID")
    gains = [finding.text for finding in case.plan.advice if finding.code == "address-missing"]
    return case.rdma_trouble(
        f"{some(bare)}: active, and no network device or no address in this namespace",
        wanted="a network device with an address, which gives the port its GID",
        why=gains[0] if gains else "RoCE cannot connect without a GID; such a port is near and dead",
        remedy=Remedy(
            host="ip addr add ... dev ... for the port's network device (ip link shows it)",
            container="--network=host, or move the device in (an RDMA-aware secondary network)",
            pod="hostNetwork: true, or a secondary network for the device (macvlan, SR-IOV)",
        ),
    )


@check("rdma.gid-kind", "Addresses that can be routed", causes=("rdma.addresses",))
def gid_kind(case: Case) -> Verdict:
    if not case.usable_ports:
        return absent(_NO_PORT)
    limited = {
        nic.name: reason.text
        for nic, port in case.usable_ports
        for reason in port.reasons
        if reason.code == "gid-not-routable"
    }
    if not limited:
        return ok("RoCE v2 with a routable address, or InfiniBand")
    return case.rdma_trouble(
        "; ".join(f"{name}: {why}" for name, why in limited.items()),
        wanted="a RoCE v2 GID of an IPv4 or global IPv6 address",
        why="it works on one subnet at most; a v1 end and a v2 end never understand each other (retry exceeded)",
        remedy="give the network device an IPv4 address; choose the v2 entry on both ends",
    )


@check("rdma.gid-index", "A fixed GID index exists on every device")
def gid_index(case: Case) -> Verdict:
    asked = [(name, value) for name, value in case.env(*_INDEX_VARIABLES) if value.isdigit()]
    roce = [(nic, port) for nic, port in case.usable_ports if port.gids]
    if not asked or not roce:
        return absent("no index is fixed" if not asked else _NO_PORT)
    name, value = asked[0]
    wrong = [_index_problem(nic, port, int(value)) for nic, port in roce]
    wrong = [text for text in wrong if text]
    if not wrong:
        return ok(f"{name}={value} is right everywhere")
    return fail(
        f"{name}={value}: {some(wrong)}",
        wanted="the v2 entry of a routable address, which has its own index on each device",
        why="the queue pair does not become ready, or one rail works and the next times out",
        remedy=f"unset {name}",
    )


def _index_problem(nic: Nic, port: Port, index: int) -> str:
    entry = next((gid for gid in port.gids or () if gid.index == index), None)
    if entry is None:
        return f"{nic.name} has no entry {index}" + (f" (use {port.gid_index})" if port.gid_index is not None else "")
    if entry.version == "v1":
        return f"{nic.name}: entry {index} is RoCE v1 (use {port.gid_index})"
    return ""


@check("rdma.gid-foreign", "GIDs belong to this network namespace", causes=("rdma.addresses",))
def gid_foreign(case: Case) -> Verdict:
    here = {address for found in case.system.addresses.values() for address in found}
    if not case.usable_ports or not here:
        return absent(_NO_PORT if here else "addresses are not shown")
    foreign, gone = [], []
    for nic, port in case.usable_ports:
        gid = port.gid
        if gid is None or gid.kind == "link-local" or port.layer != "Ethernet":
            continue
        if gid.netdev and gid.netdev not in case.system.addresses:
            gone.append(f"{nic.name} (entry {gid.index} of {gid.netdev})")
        elif str(ipaddress.ip_address(gid.address)) not in here:
            foreign.append(f"{nic.name} ({gid.address})")
    if not foreign and not gone:
        return ok("all of them")
    return case.rdma_trouble(
        some([*gone, *foreign]),
        wanted="GIDs of interfaces and addresses that exist here",
        why="the device is shared with the host or another container: its entry connects nowhere (No such device)",
        remedy=Remedy(
            host="choose entries of this namespace's interfaces only",
            container="--network=host, or give the container its own function of the card",
            pod="hostNetwork: true, or a secondary network that brings the device in",
        ),
    )


@check("rdma.mtu", "One MTU on all rails")
def mtu(case: Case) -> Verdict:
    if len(case.usable_ports) < 2:
        return absent("fewer than two usable RDMA ports")
    found: dict[str, str] = {}
    for nic, port in case.usable_ports:
        text = (
            case.system.tree.read(f"/sys/class/net/{port.netdev}/mtu") if port.netdev and not port.front_end else None
        )
        if text:
            found[nic.name] = text
    if len(set(found.values())) < 2:
        return ok(next(iter(found.values()), "not shown"))
    return case.rdma_trouble(
        some([f"{name} {value}" for name, value in found.items()]),
        wanted="the same on both ends of every rail",
        why="small messages pass and large ones stall where the MTU differs",
        remedy="ip link set ... mtu 9000 (or 4200) on all of them, and on the switch",
    )


@check("rdma.flapping", "Links that stay up")
def flapping(case: Case) -> Verdict:
    if not case.active_ports:
        return absent("no active RDMA port")
    counts = {nic.name: port.link_downed for nic, port in case.active_ports if port.link_downed is not None}
    if not counts:
        return unchecked("the ports show no link_downed counter")
    worst = {name: count for name, count in counts.items() if count >= 255}
    if not worst:
        return ok(f"link_downed at most {max(counts.values())} since the driver was loaded")
    return case.rdma_trouble(
        f"link_downed at its ceiling of 255: {some(sorted(worst))}",
        wanted="a counter that does not grow",
        why="a flapping link stalls every transfer for seconds",
        remedy="watch /sys/class/infiniband/*/ports/*/counters/link_downed; replace cable or optic if it flaps",
    )


@check("rdma.pcie", "PCIe carries what the port promises")
def pcie(case: Case) -> Verdict:
    slow = [
        f"{nic.name}: {port.rate_gbps:g} Gb/s port, {nic.pcie_gbps:.0f} Gb/s slot"
        for nic, port in case.usable_ports
        if port.rate_gbps and nic.pcie_gbps and nic.pcie_gbps < 0.9 * port.rate_gbps
    ]
    if not case.usable_ports:
        return absent(_NO_PORT)
    if not slow:
        return ok("no slot is slower than its port")
    return case.rdma_trouble(
        some(slow),
        wanted="a slot as fast as the port",
        why="the slot is the ceiling, whatever the port says",
        remedy="move or reseat the card; a link trained down shows in current_link_speed against max_link_speed",
    )


@check("rdma.names", "Configured device names exist and are active")
def names(case: Case) -> Verdict:
    asked = [(variable, name) for variable, value in case.env(*_NAME_VARIABLES) for name in device_names(value)]
    if not asked:
        return absent("no variable names devices")
    known = {nic.name: nic for nic in case.machine.nics}
    wrong = []
    for variable, name in asked:
        matching = [nic for key, nic in known.items() if key == name or key.startswith(name)]
        if not matching and name not in case.system.addresses:
            wrong.append(f"{variable} names {name}, which is not here{_meant(name, case.machine.nics)}")
        elif matching and not any(nic.usable for nic in matching):
            wrong.append(f"{variable} names {name}, which cannot be used{_meant(name, case.machine.nics)}")
    if not wrong:
        return ok(some([name for _, name in asked]))
    there = some([f"{nic.name} ({'usable' if nic.usable else 'not usable'})" for nic in known.values()])
    return fail(
        some(wrong),
        wanted=f"names from this machine: {there or 'there is no RDMA device'}",
        why="the library finds no device, and fails or goes over TCP without a word",
        remedy="correct or unset the variable; names differ between machines",
    )


def _meant(name: str, nics: Sequence[Nic]) -> str:
    """The device at the position that the number in a name is, where that is another device: nvidia-smi's matrix
    numbers its columns NIC0, NIC1 ... without a gap, and says below which device each is."""
    number = re.search(r"(\d+)$", name)
    ordered = sorted((nic.name for nic in nics), key=levels.natural)
    place = int(number.group(1)) if number else len(ordered)
    if place >= len(ordered) or ordered[place] == name:
        return ""
    return f" (NIC{place} of nvidia-smi's matrix is a position: the device there is {ordered[place]})"


def device_names(value: str) -> list[str]:
    """Device names of a filter such as "=mlx5_0:1,mlx5_1"; none of an exclusion."""
    if value.startswith("^"):
        return []
    return [part.split(":")[0] for part in re.split(r"[,;\s]+", value.lstrip("=")) if part and part != "all"]


@check("rdma.one-fabric", "Listed devices belong to one fabric")
def one_fabric(case: Case) -> Verdict:
    layers = {port.layer for _, port in case.usable_ports}
    if len(layers) < 2:
        return absent("one kind of port")
    listed = {name for _, value in case.env(*_NAME_VARIABLES) for name in device_names(value)}
    mixed = {port.layer for nic, port in case.usable_ports if nic.name in listed}
    if len(mixed) < 2:
        return ok("InfiniBand and Ethernet ports; slipstream ranks the Ethernet ones as front end")
    return fail(
        f"{some(sorted(listed))} are InfiniBand and Ethernet ports in one list",
        wanted="devices of one fabric in a list",
        why="ranks on different fabrics never reach each other: some pairs connect and others do not",
        remedy="list the InfiniBand rails only, or only the Ethernet ones",
    )


@check("rdma.peer-memory", "NICs reach GPU memory (GPUDirect)", causes=("gpu.driver",))
def peer_memory(case: Case) -> Verdict:
    if not case.usable_ports or not case.machine.gpus:
        return absent("no GPU and usable RDMA port together")
    direct = case.machine.gpudirect
    if direct.dma_buf:
        return ok("dma-buf (open kernel driver)" + (", nvidia_peermem too" if direct.peermem_bound else ""))
    if direct.peermem and direct.peermem_bound is not False:
        return ok("nvidia_peermem")
    if direct.peermem:
        return case.rdma_trouble(
            "nvidia_peermem is loaded and has not registered with the RDMA stack",
            wanted="nvidia_peermem among the users of ib_core, or dma-buf",
            why="libraries say `GPU Direct RDMA Disabled` although the module is there; KV is staged",
            remedy="reload it after the RDMA driver (modprobe -r nvidia_peermem; modprobe nvidia_peermem); reinstall "
            "the GPU driver when it was built before the RDMA stack; or use the open kernel driver with dma-buf",
        )
    if direct.peermem is None and direct.dma_buf is None:
        return unchecked("modules and driver are not shown here; --active registers real memory")
    if any(card.consumer for card in (case.system.driver.cards if case.system.driver else ())):
        return ok("GeForce boards do not offer it; KV is staged through pinned host memory")
    why_not = next((finding.text for finding in direct.findings if finding.code == "no-dma-buf"), "no dma-buf")
    return case.rdma_trouble(
        f"nvidia_peermem is not loaded; {why_not}",
        wanted="nvidia_peermem, or dma-buf (open kernel driver, kernel 5.12 or newer)",
        why="GPU memory cannot be registered with a NIC (Bad address): KV to other machines is staged through host "
        "memory",
        remedy=Remedy(
            host="modprobe nvidia_peermem, and a file in /etc/modules-load.d to keep it",
            container="modprobe nvidia_peermem on the host",
            pod="modprobe nvidia_peermem on the node, or set driver.rdma.enabled in the GPU operator",
        ),
    )


@check("rdma.distance", "A near NIC for each GPU")
def distance(case: Case) -> Verdict:
    networks = [network for network in case.plan.networks if network.best]
    if not networks:
        return absent("no GPU and usable RDMA port together")
    far = [f"{network.gpu} {network.best.level}" for network in networks if network.best and _is_far(network.best)]
    if not far:
        return ok("below the same PCIe switch as its GPU")
    asked = case.env("NCCL_NET_GDR_LEVEL")
    return ok(
        f"beyond a PCIe switch: {some(far, 8)}; still direct, but NCCL turns GPUDirect off there"
        + (f" (NCCL_NET_GDR_LEVEL={asked[0][1]})" if asked else " unless NCCL_NET_GDR_LEVEL says otherwise")
    )


def _is_far(best: choose.RankedNic) -> bool:
    return best.level not in ("PIX", "PXB")


@check("rdma.forced-off", "Settings that turn fast ways off")
def forced_off(case: Case) -> Verdict:
    asked = [
        f"{name}={value}"
        for name, value in case.env(
            "MC_FORCE_TCP", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_CUMEM_ENABLE"
        )
        if (value not in ("0", "false")) != (name == "NCCL_CUMEM_ENABLE")
    ]
    relevant = [text for text in asked if _matters(case, text)]
    if not relevant:
        return ok(some(asked) or "none set")
    return warn(
        some(relevant),
        wanted="unset, on a machine that has what they turn off",
        why="other engines and collectives then take a slower way without a word",
        remedy="unset them and let the preflight decide",
    )


def _matters(case: Case, text: str) -> bool:
    if text.startswith(("MC_FORCE_TCP", "NCCL_IB_DISABLE")):
        return bool(case.usable_ports)
    return text.startswith(("NCCL_P2P", "NCCL_SHM")) and case.way in ("nvlink", "pcie-peer")


CHECKS = (
    links,
    subnet_manager,
    addresses,
    usable,
    gid_kind,
    gid_index,
    gid_foreign,
    mtu,
    flapping,
    pcie,
    names,
    one_fabric,
    peer_memory,
    distance,
    forced_off,
)
