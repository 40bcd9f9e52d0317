"""The `docker run` line that this machine needs, each flag with its reason.

Made from what the host has: called on the host, or in a container that still sees the host's devices in sysfs.
"""

from __future__ import annotations

import re
import textwrap

import msgspec

from slipstream.doctor.case import Case
from slipstream.topo.levels import natural

_WIDTH = 110


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag and why it is there."""

    flag: str
    why: str


def flags(case: Case) -> list[Flag]:
    """The flags for `docker run`, the most general first."""
    found: list[Flag] = []

    def add(flag: str, why: str) -> None:
        found.append(Flag(flag=flag, why=why))

    gpus = [gpu for gpu in case.machine.gpus if not gpu.virtual]
    if case.machine.gpus:
        add("--gpus=all", f"{len(case.machine.gpus)} GPUs; workers choose theirs, and see the peers that they copy to")
    several = len(gpus) > 1
    if several or case.usable_ports or case.active_ports:
        add("--network=host", "workers on other machines, and RoCE, need the machine's own addresses")
    else:
        add(
            f"-p {case.front.port or 8000}:{case.front.port or 8000}",
            "the front's port, which then listens on all addresses of the container",
        )
    if several:
        add(
            "--ipc=host",
            "CUDA IPC and NCCL between containers of this machine, and a large /dev/shm; add --pid=host "
            "when workers run in several containers",
        )
    elif gpus:
        add("--shm-size=16g", "the default /dev/shm of 64 MiB is too small for PyTorch's helpers")
    if gpus or case.usable_ports or case.active_ports:
        add("--ulimit=memlock=-1", "pinned host memory and NICs lock the whole pool")
        add("--ulimit=stack=67108864", "NCCL's threads")
    add("--ulimit=nofile=65536:65536", "one socket for each open stream")
    for device in _rdma_files(case):
        add(f"--device={device[0]}", device[1])
    if case.usable_ports or case.active_ports:
        add("--cap-add=IPC_LOCK", "registering memory with NICs")
    if sum(bool(node.cpus) for node in case.machine.numa_nodes) > 1:
        add("--cap-add=SYS_NICE", "placing staging buffers on the GPU's NUMA node")
    if case.system.tree.exists("/dev/gdrdrv") or case.machine.gpudirect.gdrcopy:
        add("--device=/dev/gdrdrv", "gdrcopy, which UCX uses for small messages")
    for channel in case.system.tree.list("/dev/nvidia-caps-imex-channels"):
        add(f"--device=/dev/nvidia-caps-imex-channels/{channel}", "NVLink memory of GPUs in other machines")
    return found


def _rdma_files(case: Case) -> list[tuple[str, str]]:
    """Device files of the ports that can be used, by the kernel's own map; all of active ones when none can yet."""
    chosen = {nic.name: nic for nic, _ in case.usable_ports or case.active_ports}
    if not chosen:
        return []
    folder = "/sys/class/infiniband_verbs"
    tree = case.system.tree
    files = {
        tree.read(f"{folder}/{name}/ibdev") or "": f"/dev/infiniband/{name}"
        for name in tree.list(folder)
        if re.fullmatch(r"uverbs\d+", name)
    }
    listed = [
        (files.get(name) or nic.device_file or "", f"{name}, which can {'' if nic.usable else 'not yet '}be used")
        for name, nic in sorted(chosen.items(), key=lambda item: natural(item[0]))
    ]
    known = [entry for entry in listed if entry[0]]
    if len(known) < len(listed):
        return [("/dev/infiniband", "all RDMA device files: which one belongs to which device is not shown here")]
    return [*known, ("/dev/infiniband/rdma_cm", "the connection manager, for libraries that use it")]


def line(case: Case) -> str:
    """The whole command, ready to paste; IMAGE is the user's."""
    words = [flag.flag for flag in flags(case)]
    own_network = "--network=host" not in words  # then the port is published, and 127.0.0.1 is the container's own
    serve = "IMAGE slipstream serve MODEL" + (" --host 0.0.0.0" if own_network else "")
    return " \\\n  ".join(["docker run --rm -it", *words, serve])


def text(case: Case) -> str:
    """The command and, below it, why each flag is there."""
    listed = flags(case)
    width = max(len(flag.flag) for flag in listed)
    rows = [
        textwrap.fill(
            f"{flag.flag:{width}}  {flag.why}", _WIDTH, initial_indent="  ", subsequent_indent=" " * (width + 4)
        )
        for flag in listed
    ]
    return "\n".join([line(case), "", "Why:", *rows])


def json_text(case: Case) -> str:
    return msgspec.json.format(
        msgspec.json.encode({"command": line(case).replace(" \\\n ", ""), "flags": flags(case)}), indent=1
    ).decode()
