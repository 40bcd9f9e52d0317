"""Turns a tree of system files and NVML's facts into a Machine.

    live()        this system: NVML in a child with a time limit, everything else from /sys, /proc and /dev
    recorded()    a root folder that holds such files, with NVML's facts in nvml.json
    machine()     the pure part of both: a tree and facts in, a Machine out

Levels come from PCI paths; NVML's answer is taken only where a path is missing. NVLink comes from link states, remote
ends and the fabric's health, never from a matrix: active links to a switch whose fabric is not up carry nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.errors import ConfigError
from slipstream.topo import levels, sysfs, usable
from slipstream.topo.graph import Fabric, Finding, Gpu, GpuDirect, Machine, Nic, NvLinks
from slipstream.topo.nvml import FabricFacts, GpuFacts, NvmlFacts, collect_in_child
from slipstream.topo.read.host import HARDWARE_DRIVERS
from slipstream.topo.read.text import Notes
from slipstream.topo.tree import FolderTree, Tree

NVML_FILE = "nvml.json"
_SOFTWARE_DRIVERS = frozenset({"rdma_rxe", "siw"})
_NO_FABRIC = "Not Supported"
_DMA_BUF_KERNEL = (5, 12)  # ib_umem_dmabuf appeared there


def live(timeout_s: float = 15.0) -> Machine:
    """The running system. Never raises for a missing driver or package: `warnings` says what was not seen."""
    tree = FolderTree("/")
    driver = tree.exists("/proc/driver/nvidia/version") or tree.exists("/dev/nvidiactl")
    facts = collect_in_child(timeout_s) if driver else None
    return machine(tree, facts, source="this system")


def recorded(root: str | Path) -> Machine:
    """A recorded root folder. Raises ConfigError when it holds nothing that the probe reads."""
    folder = Path(root)
    tree = FolderTree(folder)
    file = folder / NVML_FILE
    if not (tree.exists("/sys") or tree.exists("/proc") or file.exists()):
        raise ConfigError(f"{folder} holds no sys, proc or {NVML_FILE}: give the root folder of a recorded system.")
    facts = None
    if file.exists():
        try:
            facts = msgspec.json.decode(file.read_bytes(), type=NvmlFacts)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"{file} does not hold NVML facts: {error}") from error
    return machine(tree, facts, source=str(folder))


def machine(tree: Tree, facts: NvmlFacts | None, source: str = "") -> Machine:
    """The machine that `tree` and `facts` describe; `facts` None: no GPU driver."""
    notes = Notes()
    for problem in facts.problems if facts else ():
        notes.warn("nvml", problem)
    nics = usable.judge_all(sysfs.rdma_devices(tree, notes), _surroundings(tree))
    gpus = _gpus(tree, facts, notes)
    nodes = sysfs.numa_nodes(tree)
    cpu_nodes = sum(bool(node.cpus) for node in nodes)
    paths = [device.path for device in (*gpus, *nics) if device.path]
    return Machine(
        source=source,
        gpus=gpus,
        nics=nics,
        bridges=sysfs.bridges(tree, paths),
        numa_nodes=nodes,
        levels=_levels(gpus, nics, facts, cpu_nodes, notes),
        peer_access=_peer_access(gpus, facts),
        gpudirect=gpudirect(tree),
        driver=facts.driver if facts else "",
        kernel=tree.read("/proc/sys/kernel/osrelease") or "",
        memlock_bytes=sysfs.memlock_bytes(tree),
        warnings=tuple(notes.findings),
    )


def _surroundings(tree: Tree) -> usable.Surroundings:
    loaded = set(sysfs.modules(tree))
    return usable.Surroundings(
        software_drivers=frozenset(loaded & _SOFTWARE_DRIVERS),
        hardware_drivers=bool(loaded & set(HARDWARE_DRIVERS)) if loaded else None,
        default_route_netdevs=sysfs.default_route_netdevs(tree),
    )


def _gpus(tree: Tree, facts: NvmlFacts | None, notes: Notes) -> tuple[Gpu, ...]:
    on_bus = sysfs.gpus(tree)
    if facts is None or not facts.gpus:
        if on_bus:
            notes.warn("no-nvml", "GPUs are on the PCI bus, and no driver tells of them: NVLink is not known")
        return tuple(on_bus)
    known = {told.pci for told in facts.gpus}
    hidden = [gpu.pci for gpu in on_bus if gpu.pci not in known]
    if hidden:
        notes.warn("gpus-hidden", f"on the PCI bus but not for this container or driver: {', '.join(hidden)}")
    return tuple(_gpu(tree, told, notes) for told in facts.gpus)


def _gpu(tree: Tree, told: GpuFacts, notes: Notes) -> Gpu:
    seen = sysfs.pci_gpu(tree, told.index, told.pci)
    fabric = _fabric(told.fabric) if told.fabric else None
    if fabric and fabric.healthy is False:
        what = f"state {fabric.state}, status {fabric.status}{', ' if fabric.health else ''}{', '.join(fabric.health)}"
        notes.warn("fabric", f"{seen.name} is not well on the NVLink fabric: {what}")
    return msgspec.structs.replace(
        seen,
        model=told.model,
        uuid=told.uuid,
        memory_bytes=told.memory_bytes,
        memory_node=told.memory_node,
        mig=told.mig,
        virtual=told.virtual,
        nvlinks=_nvlinks(told),
        fabric=fabric,
    )


def _nvlinks(told: GpuFacts) -> NvLinks | None:
    if not told.links:
        return None
    active = [link for link in told.links if link.active]
    inactive = tuple(link.slot for link in told.links if not link.active)
    remotes = {link.remote for link in active if link.remote}
    return NvLinks(
        active=len(active),
        inactive=len(inactive),
        inactive_links=inactive if active else (),
        seen_links=tuple(link.slot for link in told.links),
        gbps_per_link=told.gbps_per_link,
        to_switch="switch" in remotes if remotes else None,
    )


def _fabric(told: FabricFacts) -> Fabric:
    if told.state == _NO_FABRIC:
        return Fabric(state=told.state)
    clustered = bool(told.cluster.strip("0"))
    # a single board without a multi-node fabric completes with a zero cluster id: only problems speak against it
    healthy = told.state == "Completed" and told.status == 0 and not told.problems
    status = "Success" if told.status == 0 else f"NVML error {told.status}"
    cluster = told.cluster if clustered else ""
    return Fabric(
        state=told.state, status=status, healthy=healthy, clique=str(told.clique), cluster=cluster, health=told.problems
    )


def _levels(
    gpus: Sequence[Gpu], nics: Sequence[Nic], facts: NvmlFacts | None, cpu_nodes: int, notes: Notes
) -> dict[str, dict[str, str]]:
    devices: list[Gpu | Nic] = [*gpus, *nics]
    told = {gpu.index: gpu for gpu in facts.gpus} if facts else {}
    table: dict[str, dict[str, str]] = {}
    for i, a in enumerate(devices):
        row = table.setdefault(a.name, {})
        for b in devices[i + 1 :]:
            level = levels.between(a.path, b.path, a.numa, b.numa, cpu_nodes)
            if isinstance(a, Gpu) and isinstance(b, Gpu) and facts:
                if level == levels.UNKNOWN:
                    level = facts.levels.get(f"{a.index},{b.index}", level)
                links = _links_between(told[a.index], told[b.index], facts)
                level = f"NV{links}" if links else level
            row[b.name] = level
    unknown = sum(level == levels.UNKNOWN for row in table.values() for level in row.values())
    if unknown:
        notes.warn("levels-unknown", f"{unknown} pairs have no known level (no PCI path or NUMA node): ranked last")
    return table


def _links_between(a: GpuFacts, b: GpuFacts, facts: NvmlFacts) -> int:
    """NVLinks that connect two GPUs: direct ones, or through a switch whose fabric both are well on."""
    direct = sum(link.active and link.remote_pci == b.pci and link.remote != "switch" for link in a.links)
    if direct:
        return direct
    if not all(gpu.fabric is None or _fabric(gpu.fabric).healthy is not False for gpu in (a, b)):
        return 0
    switched = [sum(link.active and link.remote == "switch" for link in gpu.links) for gpu in (a, b)]
    if min(switched):
        return min(switched)
    told = facts.peer_nvlink.get(f"{a.index},{b.index}") == "OK"
    unnamed = [sum(link.active and not link.remote for link in gpu.links) for gpu in (a, b)]
    return min(unnamed) if told else 0


def _peer_access(gpus: Sequence[Gpu], facts: NvmlFacts | None) -> dict[str, dict[str, str]]:
    """Word for copies from a to b: reading and writing must both be OK."""
    if facts is None:
        return {}
    access: dict[str, dict[str, str]] = {}
    for a in gpus:
        for b in gpus:
            words = [table.get(f"{a.index},{b.index}") for table in (facts.peer_read, facts.peer_write)]
            said = [word for word in words if word]
            if a.index != b.index and said:
                access.setdefault(a.name, {})[b.name] = next((word for word in said if word != "OK"), "OK")
    return access


def gpudirect(tree: Tree) -> GpuDirect:
    """How NICs may reach GPU memory here, as far as files show it."""
    loaded = sysfs.modules(tree)
    version = tree.read("/proc/driver/nvidia/version") or ""
    findings = []
    peer_module = next((name for name in ("nvidia_peermem", "nv_peer_mem") if name in loaded), None)
    registered = any(tree.exists(f"/sys/kernel/mm/memory_peers/{name}/version") for name in ("nv_mem", "nv_mem_nc"))
    bound = (
        registered or any(peer_module in loaded.get(core, ()) for core in ("ib_core", "ib_uverbs"))
        if peer_module
        else None
    )
    if peer_module and not registered and bound:
        text = "some libraries look for /sys/kernel/mm/memory_peers, which this kernel lacks, and report it as disabled"
        findings.append(Finding("peermem-version-file", f"{peer_module} is loaded and bound; {text}"))
    open_driver = "Open Kernel Module" in version
    kernel = tuple(
        int(part) for part in (tree.read("/proc/sys/kernel/osrelease") or "").split(".")[:2] if part.isdigit()
    )
    dma_buf = open_driver and kernel >= _DMA_BUF_KERNEL if version and kernel else None
    if dma_buf is False:
        why = (
            "the closed kernel module cannot export GPU memory" if not open_driver else "the kernel is older than 5.12"
        )
        findings.append(Finding("no-dma-buf", f"no dma-buf: {why}"))
    gdrcopy = "gdrdrv" in loaded or tree.exists("/dev/gdrdrv")
    shown = bool(loaded)
    return GpuDirect(
        peermem=peer_module is not None if shown else None,
        peermem_bound=bound,
        dma_buf=dma_buf,
        gdrcopy=gdrcopy if shown or gdrcopy else None,
        storage="nvidia_fs" in loaded if shown else None,
        findings=tuple(findings),
    )
