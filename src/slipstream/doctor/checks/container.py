"""Containers and device files: what the host has and this process was given."""

from __future__ import annotations

import re

from slipstream.doctor.case import Case, some
from slipstream.doctor.verdict import Remedy, Verdict, absent, check, ok, unchecked, warn

_SYS_PTRACE, _SYS_NICE, _IPC_LOCK = 19, 23, 14  # linux/capability.h
_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/opt/mellanox/lib64",
)
_PASS_RDMA = Remedy(
    host="load the driver's verbs module: modprobe ib_uverbs; then check /dev/infiniband",
    container="start the container with --device=/dev/infiniband (slipstream doctor --docker prints the whole line)",
    pod="request the RDMA resource of the device plugin, or mount /dev/infiniband with a privileged security context",
)


@check("container.place", "Where this process runs")
def where(case: Case) -> Verdict:
    return ok(f"in a {case.place}" if case.place != "host" else "on the host itself")


@check("container.rdma-files", "RDMA device files are here")
def rdma_files(case: Case) -> Verdict:
    if not case.hardware:
        return absent("no RDMA device on this machine")
    without = [nic.name for nic in case.hardware if nic.device_file == ""]
    if not without:
        return ok(f"{len(case.hardware)} devices, each with its file")
    active = [nic.name for nic in case.hardware if nic.device_file == "" and any(port.active for port in nic.ports)]
    if not active:
        return absent(f"no file for {some(without)}, none of which has an active port")
    everything = len(without) == len(case.hardware)
    return case.rdma_trouble(
        f"{some(active)} {'is' if len(active) == 1 else 'are'} active on the host and "
        + ("/dev/infiniband has no uverbs file here" if everything else "cannot be opened here: no uverbs file"),
        wanted="one /dev/infiniband/uverbsN for each device that is to be used",
        why="without it a device is shown but cannot be opened, and other engines go over TCP without a word",
        remedy=_PASS_RDMA,
    )


@check("container.rdma-permission", "RDMA device files may be opened", causes=("container.rdma-files",))
def rdma_permission(case: Case) -> Verdict:
    refused = [nic for nic in case.hardware if nic.device_file and nic.device_file_open is False]
    if not case.hardware:
        return absent("no RDMA device on this machine")
    if not refused:
        return ok("all that exist") if any(nic.device_file for nic in case.hardware) else absent("no files here")
    return case.rdma_trouble(
        f"no permission to read and write {some([nic.device_file or '' for nic in refused])}",
        wanted="reading and writing for this user",
        why="a device that cannot be opened carries nothing",
        remedy=Remedy(
            host="add this user to the group that owns the files (often rdma), or set mode 0666 by a udev rule",
            container="pass the files with --device (a bind mount does not lift the cgroup's rule)",
        ),
    )


@check("container.connection-manager", "The RDMA connection manager's file", causes=("container.rdma-files",))
def connection_manager(case: Case) -> Verdict:
    if not any(nic.device_file for nic in case.hardware):
        return absent("no usable RDMA device file")
    if case.system.tree.exists("/dev/infiniband/rdma_cm"):
        return ok("/dev/infiniband/rdma_cm is there")
    nixl = case.first("nixl", "nixl-cu12", "nixl-cu13")
    if nixl is None:
        return absent("/dev/infiniband/rdma_cm is missing; nothing installed here needs it")
    return warn(
        "/dev/infiniband/rdma_cm is missing",
        wanted="the file, for libraries that connect by the connection manager",
        why="plain verbs work without it; UCX (below nixl) can lose a way to connect",
        remedy=Remedy(
            host="modprobe rdma_ucm",
            container="modprobe rdma_ucm on the host, then add --device=/dev/infiniband/rdma_cm",
        ),
    )


@check("container.gpu-files", "GPUs of the bus are usable here")
def gpu_files(case: Case) -> Verdict:
    tree = case.system.tree
    files = [name for name in tree.list("/dev") if re.fullmatch(r"nvidia\d+", name)]
    on_bus = [gpu for gpu in case.machine.gpus if gpu.pci]
    if not on_bus and not files:
        return absent("no NVIDIA GPU on this machine")
    if case.system.driver is not None:
        hidden = next((note.text for note in case.machine.warnings if note.code == "gpus-hidden"), "")
        return ok(hidden or f"{len(files) or len(on_bus)} GPUs")
    return warn(
        f"{len(on_bus)} GPUs are on the PCI bus, and there is no driver for this process",
        wanted="/proc/driver/nvidia and /dev/nvidia* where GPUs are to be used",
        why="slipstream runs on the CPU until then",
        remedy=Remedy(
            host="install the NVIDIA driver (nvidia-smi must work)",
            container="start the container with --gpus all, with the NVIDIA container toolkit on the host",
            pod="request nvidia.com/gpu in the resources of the container",
        ),
    )


@check("container.mixed-libraries", "One set of RDMA libraries", causes=("container.rdma-files",))
def mixed_libraries(case: Case) -> Verdict:
    if not case.hardware:
        return absent("no RDMA device on this machine")
    tree = case.system.tree
    extra = [part for part in case.system.environ.get("LD_LIBRARY_PATH", "").split(":") if part.startswith("/")]
    found: dict[str, dict[str, str]] = {}
    for folder in dict.fromkeys([*extra, *_LIBRARY_FOLDERS]):
        for name in tree.list(folder):
            if match := re.fullmatch(r"(libibverbs|libmlx5)\.so\.1", name):
                found.setdefault(match.group(1), {})[tree.real(f"{folder}/{name}")] = folder
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    if not several:
        return ok("one each" if found else "none outside of the packages")
    name, paths = next(iter(several.items()))
    return warn(
        f"{name} is here more than once: {some(sorted(paths))}",
        wanted="libibverbs and libmlx5 from one source",
        why="a library of the host over one of the image ends in missing symbols at start",
        remedy="use one set: take the host's libraries out of the mounts and LD_LIBRARY_PATH, or the image's out of it",
    )


@check("container.sandbox", "The kernel passes GPU calls on")
def sandbox(case: Case) -> Verdict:
    version = case.system.tree.read("/proc/version") or ""
    log = case.system.kernel_log() or []
    if not ("gVisor" in version or any("Starting gVisor" in line for line in log[:50])):
        return ok("no sandboxed kernel")
    if case.way in ("cpu", "one-gpu"):
        return ok("a sandboxed kernel (gVisor); it passes on what one GPU needs")
    return warn(
        "a sandboxed kernel (gVisor)",
        wanted="an ordinary container runtime for several GPUs",
        why="sandboxes refuse driver calls that peer copies need, and a job may hang in its first one",
        remedy="run with runc, or with --transport shm",
    )


@check("container.wsl", "Peer copies exist on this kernel")
def wsl(case: Case) -> Verdict:
    if "microsoft" not in case.machine.kernel.lower():
        return ok("not WSL")
    if case.way in ("cpu", "one-gpu"):
        return ok("WSL2, where peer copies do not exist; none are needed")
    return warn(
        f"WSL2 ({case.machine.kernel})",
        wanted="Linux on the machine itself for several GPUs",
        why="CUDA IPC and peer access are not offered under WSL2: GPUs are staged through host memory",
        remedy="nothing needs to be set: slipstream takes shm; for NVLink boot Linux itself",
    )


@check("container.ptrace", "Siblings may be read (UCX, pidfd)")
def ptrace(case: Case) -> Verdict:
    if case.first("nixl", "nixl-cu12", "nixl-cu13") is None:
        return absent("slipstream hands descriptors over sockets; nothing else here needs it")
    scope = case.system.tree.read("/proc/sys/kernel/yama/ptrace_scope") or "0"
    if not scope.isdigit() or int(scope) < 2 or _has(case, _SYS_PTRACE):
        return ok(f"ptrace_scope {scope}")
    return warn(
        f"ptrace_scope is {scope} and SYS_PTRACE is missing",
        wanted="ptrace_scope 0 or 1, or the capability",
        why="UCX (below nixl) copies between processes with process_vm_readv, which then is not permitted",
        remedy=Remedy(
            host="sysctl kernel.yama.ptrace_scope=1",
            container="--cap-add=SYS_PTRACE, or leave cma out of UCX_TLS",
            pod="add the capability SYS_PTRACE, or leave cma out of UCX_TLS",
        ),
    )


@check("container.lock-capability", "Memory may be locked", causes=("limits.memlock",))
def lock_capability(case: Case) -> Verdict:
    if not case.usable_ports:
        return absent("no RDMA port that would register memory")
    limit = case.system.limits.get("memlock")
    if (limit and limit.soft is None) or _has(case, _IPC_LOCK):
        return ok("unlimited, or IPC_LOCK")
    return unchecked("neither unlimited nor IPC_LOCK: limits.memlock decides")


@check("container.imex", "Multi-node NVLink channel")
def imex(case: Case) -> Verdict:
    if not any(gpu.fabric and gpu.fabric.cluster for gpu in case.machine.gpus):
        return absent("no NVLink fabric over several machines")
    channels = case.system.tree.list("/dev/nvidia-caps-imex-channels")
    if channels:
        return ok(some(channels))
    return warn(
        "the GPUs are part of a fabric over several machines, and there is no IMEX channel here",
        wanted="/dev/nvidia-caps-imex-channels/channel0",
        why="memory of GPUs in other machines cannot be imported over NVLink; within this machine nothing changes",
        remedy=Remedy(
            host="start nvidia-imex on all nodes and create a channel (NVreg_CreateImexChannel0=1)",
            container="--device=/dev/nvidia-caps-imex-channels/channel0, with nvidia-imex running on the hosts",
            pod="use a compute domain of the NVIDIA DRA driver",
        ),
    )


def _has(case: Case, capability: int) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", case.system.tree.read("/proc/self/status") or "", re.MULTILINE)
    return bool(match and int(match.group(1), 16) >> capability & 1)


CHECKS = (
    where,
    rdma_files,
    rdma_permission,
    connection_manager,
    gpu_files,
    mixed_libraries,
    sandbox,
    wsl,
    ptrace,
    lock_capability,
    imex,
)
