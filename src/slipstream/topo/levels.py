"""How near two devices are, in the words of `nvidia-smi topo`.

    X      the device itself
    NV#    # NVLinks, direct or through NVSwitch
    PIX    at most one PCIe switch between them
    PXB    several switches, but not the root complex
    PHB    the same PCIe host bridge (root complex part)
    NODE   the same NUMA node, another host bridge
    SYS    across the link between the sockets
    ?      not known: ranked behind SYS, never guessed

A level between PCI devices follows from their paths in sysfs alone, so it needs no driver and also holds for pairs
that NVML does not answer for (GPU and NIC, NIC and NIC).
"""

from __future__ import annotations

import re

SELF = "X"
UNKNOWN = "?"
PCIE_LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")

_ORDER = {SELF: 0, "NV": 1, "PIX": 2, "PXB": 3, "PHB": 4, "NODE": 5, "SYS": 6}
_FARTHEST = 7
_NVLINK = re.compile(r"NV(\d+)")
_DIGITS = re.compile(r"(\d+)")


def nvlinks(level: str) -> int:
    """Number of NVLinks that `level` stands for; 0 when it is no NVLink level."""
    match = _NVLINK.fullmatch(level)
    return int(match.group(1)) if match else 0


def order(level: str) -> int:
    """Sort key of a level: smaller is nearer. What is not known ("?", "conflict") comes last."""
    return _ORDER["NV"] if nvlinks(level) else _ORDER.get(level, _FARTHEST)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts mlx5_10 behind mlx5_9."""
    parts = (part for part in _DIGITS.split(name) if part)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)


def parts_below(path: str, other: str) -> int:
    """PCI path parts of both devices below their deepest common part, the devices themselves included."""
    a, b = _parts(path), _parts(other)
    common = _common(a, b)
    return len(a) + len(b) - 2 * common


def between(path: str, other: str, numa: int | None, other_numa: int | None, cpu_nodes: int) -> str:
    """Level of two PCI devices from their real paths in sysfs (`/sys/devices/pciDDDD:BB/...`).

    `numa` is the device's `numa_node`, None when it is missing or -1; `cpu_nodes` is the number of NUMA nodes that
    have CPUs (0 when unknown). An upstream and a downstream port are two parts, so one switch leaves at most two
    parts on each side, and two functions of one card one part.
    """
    a, b = _parts(path), _parts(other)
    if not a or not b:
        return UNKNOWN
    common = _common(a, b)
    if common == 0:
        if cpu_nodes == 1:
            return "NODE"
        if numa is None or other_numa is None:
            return UNKNOWN
        return "NODE" if numa == other_numa else "SYS"
    if common == 1:
        return "PHB"
    return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"


def _parts(path: str) -> list[str]:
    _, found, rest = path.partition("/devices/")
    return [part for part in (rest if found else path).split("/") if part]


def _common(a: list[str], b: list[str]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
