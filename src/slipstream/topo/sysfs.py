"""Scans a tree (`tree.Tree`) for what the kernel shows without any GPU driver.

PCI paths and NUMA nodes, RDMA devices with ports, GIDs and network devices, loaded modules. Nothing is decided here:
what a file says becomes a field, what is missing stays None, and `usable` and `probe` draw the conclusions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slipstream.topo.graph import Bridge, Gid, Gpu, Nic, NumaNode, Port
from slipstream.topo.levels import natural
from slipstream.topo.read.fields import gid_value, layer, number, phys_state, port_state
from slipstream.topo.read.text import Notes
from slipstream.topo.tree import Tree

RDMA = "/sys/class/infiniband"
PCI = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0302", "0x0300")
_CHANNEL_ADAPTER = "1"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def rdma_devices(tree: Tree, notes: Notes) -> list[Nic]:
    """Every RDMA device in natural order, not yet judged."""
    names = sorted(tree.list(RDMA), key=natural)
    files = _device_files(tree)
    nets_recorded = any(tree.exists(f"{RDMA}/{name}/device/net") for name in names)
    return [_nic(tree, name, files, nets_recorded, notes) for name in names]


def _nic(tree: Tree, name: str, files: dict[str, str] | None, nets_recorded: bool, notes: Notes) -> Nic:
    base = f"{RDMA}/{name}"
    path = tree.real(f"{base}/device")
    in_pci = "/devices/pci" in path
    part = tree.read(f"{base}/hca_type") or ""
    device_file = None
    if files is not None:
        device_file = files.get(name, "")
        if device_file and not tree.exists(device_file):
            device_file = "" if tree.exists("/dev") else None
    node_type = (tree.read(f"{base}/node_type") or "").split(":")[0].strip()
    return Nic(
        name=name,
        ports=tuple(
            _port(tree, name, int(index), nets_recorded, notes)
            for index in sorted(tree.list(f"{base}/ports"), key=natural)
            if index.isdigit()
        ),
        pci=_address(path),
        path=path if in_pci else "",
        numa=numa_node(tree, path) if in_pci else None,
        part=part,
        board=tree.read(f"{base}/board_id") or "",
        firmware=tree.read(f"{base}/fw_ver") or "",
        node_guid=tree.read(f"{base}/node_guid") or "",
        driver=tree.real(f"{path}/driver").rsplit("/", 1)[-1] if tree.exists(f"{path}/driver") else "",
        virtual_function=tree.exists(f"{path}/physfn") if in_pci else None,
        software=True if "/devices/virtual/" in tree.real(base) else (False if in_pci else None),
        management_only=bool(node_type) and node_type != _CHANNEL_ADAPTER,
        device_file=device_file,
        device_file_open=tree.may_open(device_file) if device_file else None,
        pcie_gbps=pcie_gbps(tree, path) if in_pci else None,
    )


def _device_files(tree: Tree) -> dict[str, str] | None:
    """Device name to its uverbs file, by the kernel's own map; None when the map is not there."""
    folder = "/sys/class/infiniband_verbs"
    entries = [name for name in tree.list(folder) if name.startswith("uverbs")]
    if not entries:
        return None
    return {tree.read(f"{folder}/{name}/ibdev") or "": f"/dev/infiniband/{name}" for name in entries}


def _port(tree: Tree, name: str, index: int, nets_recorded: bool, notes: Notes) -> Port:
    base = f"{RDMA}/{name}/ports/{index}"
    where = f"{name} port {index}"
    rate_text = tree.read(f"{base}/rate")
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", rate_text or "")
    if rate_text and not rate:
        notes.warn("bad-value", f"{where}: rate {rate_text!r} is no rate")
    gids = _gids(tree, base, where, notes)
    netdev = _netdev(tree, name, index, gids or (), nets_recorded)
    return Port(
        number=index,
        state=port_state(where, tree.read(f"{base}/state"), notes),
        phys=phys_state(where, tree.read(f"{base}/phys_state"), notes),
        layer=layer(where, tree.read(f"{base}/link_layer"), notes),
        rate_gbps=float(rate.group(1)) if rate else None,
        lid=number(where, "lid", tree.read(f"{base}/lid"), notes),
        sm_lid=number(where, "sm_lid", tree.read(f"{base}/sm_lid"), notes),
        netdev=netdev,
        netdev_state=_netdev_state(tree, name, netdev) if netdev else None,
        gids=gids,
        link_downed=number(where, "link_downed", tree.read(f"{base}/counters/link_downed"), notes),
    )


def _gids(tree: Tree, base: str, where: str, notes: Notes) -> tuple[Gid, ...] | None:
    """The filled entries of the table; None when the tree does not hold it."""
    entries = [index for index in tree.list(f"{base}/gids") if index.isdigit()]
    if not entries:
        return None
    gids = []
    for index in sorted(entries, key=int):
        text = tree.read(f"{base}/gids/{index}") or ""
        if not text.strip("0:"):
            continue
        value = gid_value(where, text, notes)
        kind = tree.read(f"{base}/gid_attrs/types/{index}") or ""
        if value:
            version = "v2" if "v2" in kind else "v1" if "v1" in kind else None
            netdev = tree.read(f"{base}/gid_attrs/ndevs/{index}")
            gids.append(Gid(index=int(index), value=value, version=version, netdev=netdev))
    return tuple(gids)


def _netdev(tree: Tree, name: str, index: int, gids: Iterable[Gid], nets_recorded: bool) -> str | None:
    """The port's network device: that of its GIDs when they agree (a bond), else the one of its PCI function."""
    named = {gid.netdev for gid in gids if gid.netdev and gid.kind == "link-local"}
    if len(named) == 1:
        return named.pop()
    folder = f"{RDMA}/{name}/device/net"
    nets = tree.list(folder)
    ports = {net: _dev_port(tree, f"{folder}/{net}") for net in nets}
    own = [net for net in nets if ports[net] in (None, index - 1)]
    if own:
        return own[0]
    return "" if nets_recorded or tree.exists(f"{RDMA}/{name}/device") else None


def _dev_port(tree: Tree, path: str) -> int | None:
    text = tree.read(f"{path}/dev_port")
    return int(text) if text and text.isdigit() else None


def _netdev_state(tree: Tree, name: str, netdev: str) -> str | None:
    state = tree.read(f"{RDMA}/{name}/device/net/{netdev}/operstate") or tree.read(f"/sys/class/net/{netdev}/operstate")
    return {"up": "UP", "down": "DOWN", "lowerlayerdown": "DOWN"}.get(state or "")


def gpus(tree: Tree) -> list[Gpu]:
    """NVIDIA GPUs on the PCI bus in address order, which is NVML's order too."""
    found = []
    for address in tree.list(PCI):
        base = f"{PCI}/{address}"
        if tree.read(f"{base}/vendor") == _NVIDIA and (tree.read(f"{base}/class") or "")[:6] in _GPU_CLASSES:
            found.append(address)
    return [pci_gpu(tree, index, address) for index, address in enumerate(found)]


def pci_gpu(tree: Tree, index: int, address: str) -> Gpu:
    """What PCI files say of the GPU at `address`; all but index and address stay empty when they are not there."""
    base = f"{PCI}/{address}"
    path = tree.real(base)
    if not tree.exists(base):
        return Gpu(index=index, pci=address)
    return Gpu(
        index=index,
        pci=address,
        path=path if "/devices/" in path else "",
        numa=numa_node(tree, base),
        cpus=tree.read(f"{base}/local_cpulist") or "",
        pcie_gbps=pcie_gbps(tree, base, at_rest=True),
    )


def numa_node(tree: Tree, device: str) -> int | None:
    text = tree.read(f"{device}/numa_node")
    return int(text) if text and text.isdigit() else None


def pcie_gbps(tree: Tree, device: str, at_rest: bool = False) -> float | None:
    """What the PCIe link carries one way, Gb/s. `at_rest`: the device clocks its link down when idle, so the
    highest speed counts, with the width of now."""
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", tree.read(f"{device}/{'max' if at_rest else 'current'}_link_speed") or "")
    width = tree.read(f"{device}/current_link_width") or ""
    if not speed or not width.isdigit() or int(width) == 0:
        return None
    transfers = float(speed.group(1))
    return transfers * int(width) * (128 / 130 if transfers >= 8 else 0.8)


def numa_nodes(tree: Tree) -> tuple[NumaNode, ...]:
    folder = "/sys/devices/system/node"
    nodes = []
    for name in sorted(tree.list(folder), key=natural):
        if re.fullmatch(r"node\d+", name):
            memory = re.search(r"MemTotal:\s+(\d+) kB", tree.read(f"{folder}/{name}/meminfo") or "")
            cpus = tree.read(f"{folder}/{name}/cpulist") or ""
            nodes.append(
                NumaNode(id=int(name[4:]), cpus=cpus, memory_bytes=int(memory.group(1)) * 1024 if memory else None)
            )
    return tuple(nodes)


def bridges(tree: Tree, paths: Iterable[str]) -> tuple[Bridge, ...]:
    """The parts of the PCI tree above the devices at `paths`. Below a root port, switch ports come in pairs: an
    upstream port and its downstream ports."""
    found: dict[str, Bridge] = {}
    for path in paths:
        parts = [part for part in path.partition("/devices/")[2].split("/") if part]
        for depth, part in enumerate(parts[:-1]):
            kind = (
                "host-bridge"
                if depth == 0
                else "root-port"
                if depth == 1
                else "upstream-port"
                if depth % 2 == 0
                else "downstream-port"
            )
            numa = numa_node(tree, f"{PCI}/{part}") if depth else None
            found.setdefault(part, Bridge(address=part, kind=kind, parent=parts[depth - 1] if depth else "", numa=numa))
    return tuple(found.values())


def modules(tree: Tree) -> dict[str, set[str]]:
    """Loaded modules and who uses each, from /proc/modules and the holders in /sys/module."""
    loaded: dict[str, set[str]] = {}
    for line in (tree.read("/proc/modules") or "").splitlines():
        words = line.split()
        if len(words) >= 4:
            loaded[words[0]] = {user for user in words[3].split(",") if user and user != "-"}
    for name in tree.list("/sys/module"):
        holders = tree.list(f"/sys/module/{name}/holders")
        if holders or tree.exists(f"/sys/module/{name}/initstate"):
            loaded.setdefault(name, set()).update(holders)
    return loaded


def default_route_netdevs(tree: Tree) -> frozenset[str]:
    """Network devices with an IPv4 default route in this namespace."""
    lines = (tree.read("/proc/net/route") or "").splitlines()[1:]
    rows = [line.split() for line in lines]
    return frozenset(row[0] for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000")


def memlock_bytes(tree: Tree) -> int | None:
    """Soft limit of locked memory of this process; None for unlimited or not shown."""
    match = re.search(r"Max locked memory\s+(\d+)", tree.read("/proc/self/limits") or "")
    return int(match.group(1)) if match else None


def _address(path: str) -> str:
    last = path.rsplit("/", 1)[-1]
    return last if _ADDRESS.fullmatch(last) else ""
