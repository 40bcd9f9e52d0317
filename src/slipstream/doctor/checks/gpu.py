"""The driver and each GPU: does it answer, is it whole, may several processes use it."""

from __future__ import annotations

import re

from slipstream.doctor.case import Case, size, some
from slipstream.doctor.driver import Card
from slipstream.doctor.verdict import Remedy, Verdict, absent, check, fail, ok, unchecked, warn
from slipstream.topo.graph import Gpu
from slipstream.topo.read.affinity import looks_truncated

_LOST, _HUNG = 79, 119
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}  # oldest driver branch that runs a CUDA major version
_SMALL_BAR1 = 256 << 20
_NO_GPU = "no GPU here"


@check("gpu.driver", "The driver answers", causes=("container.gpu-files", "gpu.kernel-log"))
def driver(case: Case) -> Verdict:
    told = case.system.driver
    if told is None:
        return absent("no GPU driver on this machine")
    if told.trouble == "no-package":
        return fail(
            "nvidia-ml-py is not installed",
            wanted="the package, to ask the driver",
            why="without it neither NVLink nor peer access is known",
            remedy="pip install 'slipstream[gpu]'",
        )
    if told.trouble == "hang":
        return fail(
            f"NVML: {told.said}",
            wanted="an answer within a second",
            why="a GPU hangs (Xid 119 in the kernel log is typical), and every tool that asks for it hangs too",
            remedy="reset the GPU or reboot the machine; leave it out with CUDA_VISIBLE_DEVICES until then",
        )
    if told.trouble:
        return _no_start(case, told.said)
    return ok(f"{told.nvml.driver or 'version not told'}, {len(told.nvml.gpus)} GPUs")


def _no_start(case: Case, said: str) -> Verdict:
    if "mismatch" in said.lower():
        remedy = Remedy(
            text="the driver was updated under a loaded module: reboot, or unload and load the nvidia modules"
        )
    elif "unknown error" in said.lower() and case.place != "host":
        remedy = Remedy(
            container="restart the container: a reload of the service manager took its device rules away. Name the "
            "devices (--device=/dev/nvidia0 ...) or set the cgroup driver to cgroupfs to keep them",
            pod="delete the pod so that it starts anew; name the devices, or set the cgroup driver to cgroupfs",
        )
    else:
        remedy = Remedy(text="nvidia-smi must work first: reinstall the driver, or look into the kernel log")
    return fail(
        f"NVML does not start: {said}",
        wanted="a driver that answers",
        why="no GPU can be used until it does",
        remedy=remedy,
    )


@check("gpu.lost", "Every GPU is on the bus", causes=("gpu.driver",))
def lost(case: Case) -> Verdict:
    told = case.system.driver
    if told is None or told.trouble:
        return absent(_NO_GPU) if told is None else unchecked("the driver does not answer")
    gone = [problem for problem in told.nvml.problems if "no handle" in problem]
    if not gone:
        return ok(f"{len(told.nvml.gpus)} GPUs")
    return fail(
        some(gone),
        wanted="a handle for each GPU",
        why="a GPU that fell off the bus takes collectives and whole jobs with it",
        remedy="reset or reboot; if it comes back, have the board and its power checked; until then hide it "
        "with CUDA_VISIBLE_DEVICES",
    )


@check("gpu.kernel-log", "GPU faults in the kernel's log")
def kernel_log(case: Case) -> Verdict:
    if not case.machine.gpus and case.system.driver is None:
        return absent(_NO_GPU)
    lines = case.system.kernel_log()
    if lines is None:
        return unchecked("/dev/kmsg may not be read by this user; try `sudo dmesg | grep Xid`")
    events: dict[int, str] = {}
    for line in lines:
        if match := re.search(r"Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", line):
            events[int(match.group(2))] = match.group(1)
    known = {number: where for number, where in events.items() if number in (_LOST, _HUNG)}
    if known:
        return fail(
            "; ".join(f"Xid {number} of the GPU at {where}" for number, where in sorted(known.items())),
            wanted="no such event since boot",
            why="79: the GPU fell off the bus; 119: its system processor does not answer. Calls to it hang or fail",
            remedy="reset the GPU (nvidia-smi --gpu-reset) or reboot; if it returns, service the board",
        )
    if events:
        return ok(f"other events only: Xid {some([str(number) for number in sorted(events)])}")
    return ok("none")


@check("gpu.compute-mode", "Several processes may use a GPU")
def compute_mode(case: Case) -> Verdict:
    cards = _cards(case)
    if not cards:
        return absent(_NO_GPU)
    closed = [f"GPU{card.index} {card.compute_mode}" for card in cards if card.compute_mode not in (None, "default")]
    if not closed:
        return ok("default")
    prohibited = any(card.compute_mode == "prohibited" for card in cards)
    return (fail if prohibited else warn)(
        some(closed),
        wanted="default",
        why="in exclusive mode the second process gets `all CUDA-capable devices are busy or unavailable`, so two "
        "workers cannot share a GPU; in prohibited mode none can",
        remedy="nvidia-smi -c DEFAULT (needs root on the host)",
    )


@check("gpu.memory-repair", "Memory that waits for repair")
def memory_repair(case: Case) -> Verdict:
    cards = _cards(case)
    if not cards:
        return absent(_NO_GPU)
    failed = [f"GPU{card.index}" for card in cards if card.remap_failed]
    pending = [f"GPU{card.index}" for card in cards if card.remap_pending]
    if failed:
        return fail(
            f"{some(failed)}: a row could not be remapped",
            wanted="no failed remap",
            why="memory errors on this board go on",
            remedy="take the GPU out of use and have it replaced",
        )
    if pending:
        return warn(
            f"{some(pending)}: a remap waits for a reset",
            wanted="none pending",
            why="faulty rows stay in use until the reset",
            remedy="reset the GPU at a quiet time (nvidia-smi --gpu-reset)",
        )
    return ok("nothing pending")


@check("gpu.visible", "CUDA_VISIBLE_DEVICES names GPUs that exist", causes=("gpu.driver",))
def visible(case: Case) -> Verdict:
    gpus = case.machine.gpus
    text = case.system.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        return absent(_NO_GPU)
    if text is None:
        return ok("not set: all")
    entries = [part.strip() for part in text.split(",") if part.strip()]
    missing = [entry for entry in entries if not _names_one(entry, gpus)]
    if missing:
        return fail(
            f"{text}: {some(missing)} is not among {some([gpu.name[3:] for gpu in gpus])}",
            wanted="indices or UUIDs of this machine",
            why="CUDA stops reading at the first entry that names nothing, and hides all behind it",
            remedy="correct or unset CUDA_VISIBLE_DEVICES",
        )
    return ok(text or "empty: GPUs are hidden on purpose")


def _names_one(entry: str, gpus: tuple[Gpu, ...]) -> bool:
    if entry.isdigit():
        return int(entry) < len(gpus)
    return entry.startswith("MIG-") or sum(gpu.uuid.startswith(entry) for gpu in gpus if gpu.uuid) == 1


@check("gpu.order", "CUDA counts GPUs as the driver does")
def order(case: Case) -> Verdict:
    models = sorted({gpu.model for gpu in case.machine.gpus if gpu.model})
    if len(models) < 2:
        return absent("GPUs of one kind" if case.machine.gpus else _NO_GPU)
    if case.system.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return ok("PCI_BUS_ID")
    return warn(
        f"different GPUs ({some(models)}) and CUDA_DEVICE_ORDER is not PCI_BUS_ID",
        wanted="CUDA_DEVICE_ORDER=PCI_BUS_ID",
        why="CUDA puts the fastest first, tools count by PCI address: cuda:0 may be another GPU than GPU0",
        remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID",
    )


@check("gpu.mig", "GPUs are whole")
def mig(case: Case) -> Verdict:
    split = [gpu.name for gpu in case.machine.gpus if gpu.mig]
    if not case.machine.gpus:
        return absent(_NO_GPU)
    if not split:
        return ok("no GPU is split")
    return warn(
        f"{some(split)} in MIG mode",
        wanted="whole GPUs where KV moves between them",
        why="slices have neither peer access nor CUDA IPC: KV is staged through host memory",
        remedy="nvidia-smi -mig 0 for these GPUs, or keep one worker a slice and expect shm",
    )


@check("gpu.driver-version", "The driver runs this CUDA version", causes=("gpu.driver",))
def driver_version(case: Case) -> Verdict:
    version = case.machine.driver
    cuda = torch_cuda(case)
    if not version or not cuda:
        return absent("no driver, or PyTorch without CUDA")
    needed = _DRIVER_OF_CUDA.get(int(cuda.split(".")[0]), 0)
    if int(version.split(".")[0]) >= needed:
        return ok(f"driver {version}, CUDA {cuda}")
    return fail(
        f"driver {version} with PyTorch for CUDA {cuda}",
        wanted=f"driver {needed} or newer",
        why="CUDA refuses to start (error 803 or 804), or PyTorch reports no GPU",
        remedy="update the driver on the host, or install PyTorch for an older CUDA version",
    )


def torch_cuda(case: Case) -> str:
    """The CUDA version that PyTorch was built for, "" for a build without."""
    torch = case.system.package("torch")
    if torch is None:
        return ""
    told = case.system.tree.read(f"{torch.folder.rstrip('/')}/torch/version.py") or ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", told, re.MULTILINE)
    if match:
        return match.group(1)
    match = re.search(r"\+cu(\d+)(\d)$", torch.version)
    return f"{match.group(1)}.{match.group(2)}" if match else ""


@check("gpu.near-cpus", "CPUs near each GPU may be used")
def near_cpus(case: Case) -> Verdict:
    nodes = [node for node in case.machine.numa_nodes if node.cpus]
    placed = [gpu for gpu in case.machine.gpus if gpu.cpus and gpu.cpus_trusted]
    if len(nodes) < 2 or not placed:
        return absent("one NUMA node" if case.machine.gpus else _NO_GPU)
    far = [gpu.name for gpu in placed if not cpu_set(gpu.cpus) & case.system.cpus]
    if not far:
        cut = next((gpu for gpu in placed if _is_cut(case.system.cpus, cpu_set(gpu.cpus or ""))), None)
        return _cut_list(case, cut) if cut else ok(f"{len(case.system.cpus)} CPUs, on the side of every GPU")
    return warn(
        f"none of this process's CPUs is near {some(far)}",
        wanted="cores of the GPU's own socket",
        why="launching work and staging across sockets can halve the throughput of these GPUs",
        remedy=Remedy(
            host="start without taskset or numactl, or with cores of both sockets",
            container="leave out --cpuset-cpus, or give it cores of both sockets",
            pod="set topologyManagerPolicy: single-numa-node, or give the pod more cores",
        ),
    )


def _is_cut(bound: frozenset[int], near: frozenset[int]) -> bool:
    """Whether a process is bound to what `nvidia-smi topo -m` prints of the CPUs near a GPU where it cuts the list."""
    first = sorted(near)[: len(bound)]
    whole, shorter = (looks_truncated(",".join(map(str, cpus))) for cpus in (first, first[:-1]))
    return len(bound) < len(near) and bound == set(first) and whole and not shorter


def _cut_list(case: Case, gpu: Gpu) -> Verdict:
    near = cpu_set(gpu.cpus or "")
    return warn(
        f"bound to CPUs {','.join(map(str, sorted(case.system.cpus)))}: the first of the {len(near)} near {gpu.name}",
        wanted=f"all CPUs near it, {gpu.cpus}, or a choice that was meant",
        why="nvidia-smi topo -m cuts long lists of CPUs; a worker that is bound to what it shows has these few alone",
        remedy=f"take the list from /sys/bus/pci/devices/{gpu.pci}/local_cpulist, or from slipstream topo",
    )


def cpu_set(text: str) -> frozenset[int]:
    """CPUs of a kernel list such as 0-15,32."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last if last.isdigit() else first) + 1))
    return frozenset(found)


@check("gpu.pcie-link", "PCIe link of each GPU")
def pcie_link(case: Case) -> Verdict:
    if not case.machine.gpus:
        return absent(_NO_GPU)
    narrow, tree = [], case.system.tree
    for gpu in case.machine.gpus:
        base = f"/sys/bus/pci/devices/{gpu.pci}"
        now, most = (tree.read(f"{base}/{name}_link_width") or "" for name in ("current", "max"))
        if now.isdigit() and most.isdigit() and 0 < int(now) * 4 <= int(most):
            narrow.append(f"{gpu.name} x{now} of x{most}")
    if not narrow:
        return ok("no link is narrower than half of its board's")
    return warn(
        some(narrow),
        wanted="x8 or x16",
        why="copies to and from the host, and between GPUs without NVLink, run at a quarter or less",
        remedy="reseat the board, check riser and slot; some slots are wired narrower than they look",
    )


@check("gpu.allocator", "Allocator settings and GPU memory of peers")
def allocator(case: Case) -> Verdict:
    asked = [
        name
        for name, value in case.env("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        if re.search(r"expandable_segments:\s*true", value, re.IGNORECASE)
    ]
    if not asked:
        return ok("nothing that hinders") if case.machine.gpus else absent(_NO_GPU)
    others = case.engines()
    if not others or not case.machine.gpus:
        return ok("expandable segments; slipstream's pools are its own allocations and not concerned")
    return warn(
        f"{asked[0]} turns expandable segments on, and {some([p.name for p in others])} is installed",
        wanted="expandable_segments:False for engines that export their KV cache",
        why="such memory has no classic IPC handle: their transfers fall to a few hundred MB/s or fail. "
        "slipstream's pools are not concerned",
        remedy=f"unset it in {asked[0]} for these engines",
    )


@check("gpu.bar1", "Window through which NICs reach GPU memory")
def bar1(case: Case) -> Verdict:
    cards = [card for card in _cards(case) if card.bar1_bytes]
    if not cards or not case.usable_ports:
        return absent("no GPU and usable RDMA port together")
    memory = {gpu.index: gpu.memory_bytes or 0 for gpu in case.machine.gpus}
    small = [
        f"GPU{card.index} {size(card.bar1_bytes)}"
        for card in cards
        if (card.bar1_bytes or 0) <= _SMALL_BAR1 < memory.get(card.index, 0)
    ]
    if not small:
        return ok(size(min(card.bar1_bytes or 0 for card in cards)))
    return warn(
        some(small),
        wanted="a window as large as the GPU's memory",
        why="a NIC registers small device buffers and fails with the pool",
        remedy="turn on resizable BAR (above 4G decoding) in the firmware, or let slipstream stage through host memory",
    )


def _cards(case: Case) -> tuple[Card, ...]:
    told = case.system.driver
    return told.cards if told and not told.trouble else ()


CHECKS = (
    kernel_log,
    driver,
    lost,
    compute_mode,
    memory_repair,
    visible,
    order,
    mig,
    driver_version,
    near_cpus,
    pcie_link,
    allocator,
    bar1,
)
