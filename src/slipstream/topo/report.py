"""A machine and the paths through it as text and JSON: what `slipstream topo` prints.

`load` gets the machine from this system or from what people saved or pasted, `text` and `json_report` tell it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream import pasted
from slipstream.errors import ConfigError
from slipstream.topo import choose, levels, probe, usable
from slipstream.topo.graph import Machine, Nic, Port
from slipstream.topo.merge import merge
from slipstream.topo.read import Reading, read_all

_WIDTH = 110


def load(files: Sequence[str] | None, root: str | None = None) -> tuple[Machine, list[Reading]]:
    """The machine of pasted texts or a snapshot, of a recorded root, or this one; and the readings of the texts.

    Raises ConfigError when a file is missing, is of no known kind, or snapshots and texts are mixed.
    """
    if root:
        return probe.recorded(root), []
    if not files:
        return probe.live(), []
    readings: list[Reading] = []
    for name in files:
        raw = pasted.whole(name)
        if raw.lstrip().startswith("{"):
            if len(files) > 1:
                raise ConfigError(f"{name} is a snapshot of a whole machine: give it alone, not together with texts.")
            return _snapshot(name, raw), []
        readings += read_all(raw, name)
    return merge(readings, source=", ".join(Path(name).name for name in files)), readings


def _snapshot(name: str, raw: str) -> Machine:
    try:
        return Machine.from_json(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{name} is no snapshot written by `slipstream topo --save`: {error}") from error


def json_report(machine: Machine, plan: choose.Plan, readings: Sequence[Reading] = ()) -> bytes:
    report = {"machine": machine, "plan": plan, "readings": [reading.plain() for reading in readings]}
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def text(machine: Machine, plan: choose.Plan) -> str:
    """The whole report as plain text of at most 110 columns, apart from wide matrices."""
    sections = [
        _headline(machine),
        _gpus(machine),
        _matrix(machine),
        _ports(machine),
        _refused(plan),
        _affinity(plan),
        _between(plan),
        _notes("What would help", [finding.text for finding in plan.advice]),
        _notes("Warnings", [finding.text for finding in machine.warnings]),
    ]
    return "\n\n".join(section for section in sections if section)


def _headline(machine: Machine) -> str:
    ports, active, good = usable.count(port for _, port in machine.ports())
    unproven = sum(port.usable == "maybe-roce" for _, port in machine.ports())
    parts = [f"{_many(len(machine.gpus), 'GPU')}"]
    states = f"{active} active, " if any(port.state for _, port in machine.ports()) else ""
    if ports or not machine.nics:
        parts.append(f"{_many(ports, 'RDMA port')} ({states}{good} usable{', GID not shown' if unproven else ''})")
    if bare := sum(not nic.ports for nic in machine.nics):
        parts.append(f"{_many(bare, 'NIC')} whose ports are not shown")
    if machine.numa_nodes:
        parts.append(_many(sum(bool(node.cpus) for node in machine.numa_nodes), "NUMA node"))
    if machine.nics_hidden:
        parts.append(f"{machine.nics_hidden} more NICs not shown")
    if machine.driver:
        parts.append(f"driver {machine.driver}")
    return f"{machine.source or 'machine'}: {', '.join(parts)}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _gpus(machine: Machine) -> str:
    rows = []
    for gpu in machine.gpus:
        links = gpu.nvlinks
        nvlink = f"{links.active} NVLinks" if links and links.active is not None else ""
        if links and links.active and links.gbps_per_link:
            nvlink += f" x {links.gbps_per_link:g} GB/s"
        numa = f"NUMA {gpu.numa}" if gpu.numa is not None else ""
        rows.append((gpu.name, gpu.model, gpu.pci, numa, f"CPUs {gpu.cpus}" if gpu.cpus else "", nvlink, gpu.uuid))
    return _table(rows) if any(any(row[1:]) for row in rows) else ""


def _matrix(machine: Machine) -> str:
    names = [gpu.name for gpu in machine.gpus]
    if len(names) < 2:
        return ""
    rows = [("", *names)] + [(a, *(machine.level(a, b) for b in names)) for a in names]
    return "Between GPUs\n" + _table(rows)


def _ports(machine: Machine) -> str:
    rows = [_port_row(nic, port) for nic, port in machine.ports() if port.carries]
    return "Network ports that can be used\n" + _table(rows) if rows else ""


def _port_row(nic: Nic, port: Port) -> tuple[str, ...]:
    gid = port.gid
    return (
        f"{nic.name}/{port.number}",
        nic.pci,
        port.state or "state not shown",
        port.layer or "",
        f"{port.rate_gbps:g} Gb/s" if port.rate_gbps else "",
        port.netdev or "",
        f"GID {gid.index} {gid.address}" if gid else "",
        "; ".join(finding.text for finding in (*port.reasons, *port.cautions)),
    )


def _refused(plan: choose.Plan) -> str:
    groups: dict[str, list[str]] = {}
    for port in plan.refused:
        name = port.nic if port.port is None else f"{port.nic}/{port.port}"
        groups.setdefault("; ".join(reason.text for reason in port.reasons), []).append(name)
    lines = [_wrap(f"{', '.join(sorted(names, key=levels.natural))}: {why}", "  ") for why, names in groups.items()]
    return "\n".join([f"Network ports left out ({len(plan.refused)})", *lines]) if lines else ""


def _affinity(plan: choose.Plan) -> str:
    rows = []
    for network in plan.networks:
        best = network.best
        if best is None:
            continue
        direct = {True: "GPUDirect", False: "staged", None: "GPUDirect not shown"}[best.direct]
        speed = f"{best.gbps:g} GB/s" if best.gbps else ""
        others = ", ".join(f"{nic.nic} {nic.level}" for nic in network.ranked[1:4])
        rows.append(
            (network.gpu, f"{best.nic}/{best.port}", best.level, direct, speed, f"then {others}" if others else "")
        )
    return "GPU to network\n" + _table(rows) if rows else ""


def _between(plan: choose.Plan) -> str:
    groups: dict[str, list[str]] = {}
    for pair in plan.pairs:
        best = pair.best
        speed = f", {best.gbps:g} GB/s one way" if best.gbps else ""
        proof = "" if best.possible else " (to be proven by a test)"
        what = f"{best.way} by {best.transport}{f', {best.level}' if best.level else ''}{speed}{proof}"
        groups.setdefault(what, []).append(f"{pair.a}-{pair.b}")
    lines = [
        _wrap(f"{'all pairs' if len(names) == len(plan.pairs) else ', '.join(names)}: {what}", "  ")
        for what, names in groups.items()
    ]
    return "\n".join([f"Handoff: {plan.handoff}", *lines])


def _notes(title: str, texts: Sequence[str]) -> str:
    return "\n".join([title, *(_wrap(line, "  ") for line in texts)]) if texts else ""


def _wrap(line: str, indent: str) -> str:
    return textwrap.fill(line, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    kept = [column for column, width in enumerate(widths) if width]
    return "\n".join("  " + "  ".join(row[c].ljust(widths[c]) for c in kept).rstrip() for row in rows)
