"""Where everything of a machine belongs, for whoever draws it.

One socket a NUMA node, in it the branches: devices that share a PCIe switch, or hang on the root alone. Devices without
a PCI path (pasted texts) are grouped by who is PIX or PXB to whom. `linked` gives the groups of GPUs that NVLink joins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.topo import choose, levels
from slipstream.topo.graph import Gpu, Machine, Nic

_NEAR = ("PIX", "PXB")
_NODE = levels.order("NODE")


@dataclass
class Branch:
    """Devices that share a PCIe switch, or hang on the root alone (`switch` False)."""

    gpus: list[Gpu] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)
    switch: bool = False


@dataclass
class Socket:
    """A NUMA node's branches; `numa` None: nodes are not shown."""

    numa: int | None
    cpus: str = ""
    branches: list[Branch] = field(default_factory=list)


def arrange(machine: Machine) -> list[Socket]:
    """Sockets and branches of a machine in natural order; every GPU and every NIC is in exactly one branch."""
    branches = _branches(machine)
    nodes = {node.id: node.cpus for node in machine.numa_nodes}
    sockets: dict[int | None, Socket] = {}
    for branch in branches:
        numa = _numa(machine, [*branch.gpus, *branch.nics])
        cpus = nodes.get(numa, "") if numa is not None else ""
        cpus = cpus or next((gpu.cpus for gpu in branch.gpus), "")
        sockets.setdefault(numa, Socket(numa, cpus)).branches.append(branch)
    return sorted(sockets.values(), key=lambda socket: (socket.numa is None, socket.numa or 0))


def _numa(machine: Machine, branch: list[Gpu | Nic]) -> int | None:
    """NUMA node of a branch: its own devices say it, or one that is at most a host bridge away does."""
    own = [device.numa for device in branch if device.numa is not None]
    near = (
        other.numa
        for other in machine.gpus
        if other.numa is not None and branch and levels.order(machine.level(branch[0].name, other.name)) == _NODE
    )
    return own[0] if own else next(near, None)


def _branches(machine: Machine) -> list[Branch]:
    """Groups of devices that are PIX or PXB to each other; of several such groups for one device, the nearest."""
    devices: list[Gpu | Nic] = [*machine.gpus, *sorted(machine.nics, key=lambda nic: levels.natural(nic.name))]
    groups: list[list[Gpu | Nic]] = []
    for device in devices:
        home = next((g for g in groups if any(_pcie(machine, device, other) in _NEAR for other in g)), None)
        if home is None:
            groups.append([device])
        else:
            home.append(device)
    return [
        Branch(
            gpus=[device for device in group if isinstance(device, Gpu)],
            nics=[device for device in group if isinstance(device, Nic)],
            switch=len(group) > 1,
        )
        for group in groups
    ]


def _pcie(machine: Machine, a: Gpu | Nic, b: Gpu | Nic) -> str:
    """PCIe level of a pair: of two GPUs with NVLink it comes from their paths, as the matrix no longer tells."""
    level = machine.level(a.name, b.name)
    if levels.nvlinks(level):
        return levels.between(a.path, b.path, a.numa, b.numa, 0) if a.path and b.path else levels.UNKNOWN
    return level


def by_use(nics: list[Nic]) -> Iterable[tuple[str, list[Nic]]]:
    """NICs by what can be done with them: "" for usable ones, else the word for why not."""
    for word in ("", "state not shown", "not usable"):
        group = [nic for nic in nics if use(nic) == word]
        if group:
            yield word, group


def use(nic: Nic) -> str:
    if nic.usable:
        return ""
    shown = any(port.usable == "no" for port in nic.ports)
    return "not usable" if shown else "state not shown"


def nic_label(nic: Nic) -> str:
    port = nic.best_port
    rate = f" {port.rate_gbps:g}G" if port and port.rate_gbps else ""
    netdev = f" {port.netdev}" if port and port.netdev else ""
    return f"{nic.name}{rate}{netdev}"


def fabric_line(machine: Machine, plan: choose.Plan) -> str:
    linked = [pair for pair in plan.pairs if pair.best.way == "nvlink"]
    if not linked:
        return ""
    through = "NVSwitch" if any(gpu.nvlinks and gpu.nvlinks.to_switch for gpu in machine.gpus) else "NVLink"
    words = " / ".join(sorted({pair.best.level for pair in linked}, key=levels.nvlinks))
    rates = {pair.best.gbps for pair in linked if pair.best.gbps}
    speed = f", {min(rates):.0f} GB/s one way" if rates else ""
    which = "all pairs" if len(linked) == len(plan.pairs) else f"{len(linked)} of {len(plan.pairs)} pairs"
    return f"{through}: {words}, {which}{speed}"


@dataclass(frozen=True)
class Linked:
    """GPUs that NVLink joins, directly or through each other; `words` from the longest to the shortest description."""

    gpus: tuple[str, ...]
    words: tuple[str, ...]


def linked(machine: Machine, plan: choose.Plan) -> list[Linked]:
    """The groups of GPUs that NVLink joins, in the order of their first GPU."""
    pairs = [pair for pair in plan.pairs if pair.best.way == "nvlink"]
    groups: list[set[str]] = []
    for pair in pairs:
        touched = [group for group in groups if pair.a in group or pair.b in group]
        groups = [group for group in groups if group not in touched]
        groups.append({pair.a, pair.b}.union(*touched))
    order = {gpu.name: at for at, gpu in enumerate(machine.gpus)}
    found = []
    for group in sorted(groups, key=lambda group: min(order[name] for name in group)):
        names = tuple(sorted(group, key=order.__getitem__))
        found.append(Linked(names, _link_words(machine, names, [pair for pair in pairs if pair.a in group])))
    return found


def _link_words(machine: Machine, names: tuple[str, ...], pairs: list[choose.Pair]) -> tuple[str, ...]:
    switch = any(gpu.nvlinks and gpu.nvlinks.to_switch for gpu in machine.gpus if gpu.name in names)
    through = "NVSwitch" if switch else "NVLink"
    level = " / ".join(sorted({pair.best.level for pair in pairs}, key=levels.nvlinks))
    rates = {pair.best.gbps for pair in pairs if pair.best.gbps}
    speed = f"{min(rates):.0f} GB/s one way" if rates else ""
    possible = len(names) * (len(names) - 1) // 2
    which = "" if len(names) == 2 else "all pairs" if len(pairs) == possible else f"{len(pairs)} of {possible} pairs"
    parts = [part for part in (through, level, which, speed) if part]
    return " \u00b7 ".join(parts), " \u00b7 ".join(parts[:2]), level
