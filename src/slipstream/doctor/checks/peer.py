"""Peer access between GPUs: NVLink, its fabric, PCIe, and what stands in between."""

from __future__ import annotations

import re

from slipstream.doctor.case import Case, some
from slipstream.doctor.verdict import Remedy, Verdict, absent, check, fail, ok, unchecked, warn
from slipstream.topo import levels

_FEW = "fewer than two GPUs"
_MODULE_BOARD = re.compile(r"SXM|HGX|H800|A800|H200|B200|GB200|B300|GB300")
_SWITCH_CLASS, _NVIDIA = "0x0680", "0x10de"
_WORDS = {
    "CNS": "the chipset does not offer it",
    "TNS": "the topology does not offer it",
    "DR": "a driver setting turns it off",
    "NS": "not supported",
}


@check("peer.access", "GPUs may read and write each other", causes=("gpu.driver", "gpu.mig"))
def access(case: Case) -> Verdict:
    if len(case.machine.gpus) < 2:
        return absent(_FEW)
    said = {f"{a}-{b}": word for a, row in case.machine.peer_access.items() for b, word in row.items()}
    if not said:
        return unchecked("the driver does not tell; slipstream's preflight proves it with real bytes")
    refused = {pair: word for pair, word in said.items() if word not in ("OK", "U")}
    if not refused:
        return ok("all pairs" if all(word == "OK" for word in said.values()) else "not refused; some pairs not told")
    word = next(iter(refused.values()))
    if all(word == "GNS" for word in refused.values()):
        return ok("these boards do not offer it; KV is staged through shared host memory (shm)")
    return warn(
        f"{some(sorted(refused))}: {_WORDS.get(word, word)}",
        wanted="peer status OK",
        why="CUDA IPC cannot be used for these pairs: KV is staged through host memory, a tenth of NVLink's speed",
        remedy=Remedy(
            text="for DR remove the driver setting that disables it; for CNS and TNS put the GPUs below one PCIe switch"
        ),
    )


@check("peer.fabric", "NVLink fabric", causes=("gpu.driver", "peer.fabric-manager"))
def fabric(case: Case) -> Verdict:
    known = [gpu for gpu in case.machine.gpus if gpu.fabric and gpu.fabric.healthy is not None]
    if not known:
        return absent("no switch fabric")
    ill = [gpu for gpu in known if gpu.fabric and gpu.fabric.healthy is False]
    if not ill:
        return ok(f"{len(known)} GPUs are on it")
    state = ill[0].fabric
    assert state is not None
    return fail(
        f"{some([gpu.name for gpu in ill])}: {state.state}, {state.status}"
        + (f", {', '.join(state.health)}" if state.health else ""),
        wanted="state Completed, status Success, no health problem",
        why="without the fabric CUDA does not start on these boards (error 802), or NVLink carries nothing although "
        "its links are active",
        remedy=Remedy(
            host="systemctl start nvidia-fabricmanager (of the driver's version); nvidia-smi -q then shows it",
            container="start nvidia-fabricmanager on the host; a container cannot",
            pod="start nvidia-fabricmanager on the node; a pod cannot",
        ),
    )


@check("peer.fabric-manager", "Fabric manager of a switch machine")
def fabric_manager(case: Case) -> Verdict:
    tree = case.system.tree
    folder = "/sys/bus/pci/devices"
    switches = [
        name
        for name in tree.list(folder)
        if tree.read(f"{folder}/{name}/vendor") == _NVIDIA
        and (tree.read(f"{folder}/{name}/class") or "").startswith(_SWITCH_CLASS)
    ]
    if not switches or len(case.machine.gpus) < 2:
        return absent("no NVLink switch on the PCI bus")
    running = any(tree.read(f"/proc/{pid}/comm") == "nv-fabricmanage" for pid in tree.list("/proc") if pid.isdigit())
    if running:
        return ok(f"{len(switches)} switches, nv-fabricmanager runs")
    if case.place != "host":
        return unchecked("its process cannot be seen from here; peer.fabric tells whether the fabric is up")
    if all(gpu.fabric and gpu.fabric.healthy for gpu in case.machine.gpus):
        return ok("the fabric is up")
    return fail(
        f"{len(switches)} NVLink switches and no nv-fabricmanager process",
        wanted="nvidia-fabricmanager of the driver's version, running",
        why="CUDA does not start on these boards without it (error 802); after a driver update it stops at once when "
        "its own version is another",
        remedy=f"install nvidia-fabricmanager {case.machine.driver} and systemctl enable --now nvidia-fabricmanager",
    )


@check("peer.nvlinks", "NVLinks are active", causes=("peer.fabric", "gpu.driver"))
def nvlinks(case: Case) -> Verdict:
    linked = [gpu for gpu in case.machine.gpus if gpu.nvlinks]
    boards = [gpu for gpu in case.machine.gpus if _MODULE_BOARD.search(gpu.model)]
    if len(case.machine.gpus) < 2:
        return absent(_FEW)
    if not linked:
        if boards and case.system.driver is not None and not case.system.driver.trouble:
            return warn(
                f"{boards[0].model}: no NVLink is shown",
                wanted="NVLink, which such boards have",
                why=f"KV goes another way than it could ({case.path})",
                remedy="check the fabric manager; in a virtual machine ask the provider for NVLink pass-through",
            )
        return absent("no NVLink on these boards")
    dead = [gpu.name for gpu in linked if gpu.nvlinks and gpu.nvlinks.active == 0]
    if len(dead) == len(linked) and not boards:
        return ok("slots for NVLink and no bridge between the boards")
    part = [f"{gpu.name} ({gpu.nvlinks.inactive} off)" for gpu in linked if gpu.nvlinks and gpu.nvlinks.inactive_links]
    if dead:
        return warn(
            f"{some(dead)}: all links inactive",
            wanted="active links, as the other GPUs have" if len(dead) < len(linked) else "active links",
            why="these GPUs are reached over PCIe or host memory",
            remedy="check bridge or fabric manager; reset the GPU (nvidia-smi --gpu-reset) at a quiet time",
        )
    counts = {gpu.nvlinks.active for gpu in linked if gpu.nvlinks}
    if part and len(counts) > 1:
        return warn(
            some(part),
            wanted=f"{max(count or 0 for count in counts)} links on every GPU",
            why="a pair is as fast as its end with fewer links",
            remedy="check nvidia-smi nvlink -s and the kernel log; reseat or service the board",
        )
    return ok(f"{some([str(count) for count in sorted(counts, key=lambda c: c or 0)])} a GPU")


@check("peer.odd-gpu", "No GPU stands apart", causes=("peer.nvlinks", "peer.fabric"))
def odd_gpu(case: Case) -> Verdict:
    names = [gpu.name for gpu in case.machine.gpus]
    if len(names) < 3:
        return absent("fewer than three GPUs")
    linked = {a for a in names if any(levels.nvlinks(case.machine.level(a, b)) for b in names)}
    if not linked or len(linked) == len(names):
        return ok("alike" if linked else "no NVLink anywhere")
    apart = [name for name in names if name not in linked]
    if len(apart) > len(linked):
        return ok(f"NVLink joins {some(sorted(linked))}")
    return warn(
        f"{some(apart)} has NVLink to no other GPU, the rest has",
        wanted="NVLink on all",
        why="a handoff from or to it takes a slower way, and collectives with it too",
        remedy="keep it out of prefill and decode pairs (--prefill/--decode with devices), reset it, have it serviced",
    )


@check("peer.iommu", "PCIe peer copies go straight", causes=("peer.access",))
def iommu(case: Case) -> Verdict:
    if case.way != "pcie-peer":
        return absent(f"no peer copies over PCIe here ({case.path})")
    tree = case.system.tree
    if not tree.list("/sys/class/iommu"):
        return ok("no IOMMU in use")
    command = tree.read("/proc/cmdline") or ""
    kinds = {tree.read(f"/sys/bus/pci/devices/{gpu.pci}/iommu_group/type") for gpu in case.machine.gpus}
    if "iommu=pt" in command or "iommu.passthrough=1" in command or kinds == {"identity"}:
        return ok("pass-through")
    return warn(
        f"the IOMMU translates (GPU groups: {some(sorted(str(kind) for kind in kinds if kind)) or 'type not shown'})",
        wanted="iommu=pt, or off",
        why="peer traffic is routed through the root complex: low bandwidth, or a hang in the first copy",
        remedy=Remedy(
            host="boot with iommu=pt, turn ACS off on the bridges above the GPUs, then slipstream doctor --active",
            container="on the host: boot with iommu=pt and turn ACS off on the bridges above the GPUs",
        ),
    )


@check("peer.guest", "The guest shows the real PCI tree")
def guest(case: Case) -> Verdict:
    flags = case.system.tree.read("/proc/cpuinfo") or ""
    if " hypervisor" not in flags:
        return absent("not a virtual machine")
    devices = [*(gpu.name for gpu in case.machine.gpus), *(nic.name for nic in case.hardware)]
    pairs = [case.machine.level(a, b) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    flat = [level for level in pairs if not levels.nvlinks(level)]
    if len(case.machine.gpus) < 2 or not case.usable_ports or set(flat) - {"PHB", "?"}:
        return ok("nothing depends on distances here, or they differ as on a real machine")
    return warn(
        "all GPUs and NICs are equally far (PHB): the guest's PCI tree is flat",
        wanted="a topology file of the provider, or measured routes",
        why="the nearest NIC cannot be told from the tree; rails may be mixed up",
        remedy="slipstream bench transfer for each pair; set NCCL_TOPO_FILE for other engines if the provider has one",
    )


CHECKS = (fabric_manager, fabric, access, nvlinks, odd_gpu, iommu, guest)
