"""Puts readings of several texts together into one Machine.

Facts of one device come from all texts that name it; what a text does not show never hides what another does, and
two texts that contradict each other are warned about (the first one counts). Verdicts are then made anew from all
facts: an active port of `rdma link` becomes unusable when the GID list beside it is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from slipstream.topo import levels, usable
from slipstream.topo.graph import Gpu, GpuDirect, Machine, Nic, Port
from slipstream.topo.levels import natural
from slipstream.topo.read.reading import CONFLICT, Matrix, Reading
from slipstream.topo.read.text import Notes
from slipstream.topo.read.verbs import NO_NAME

_VERDICT = ("usable", "gid_index", "front_end", "reasons", "cautions")
_STALE = ("state", "phys", "netdev_state", "link_downed")  # may differ because the texts are of different moments


def merge(readings: Sequence[Reading], source: str = "") -> Machine:
    """The machine that the texts describe together. All must be of one machine: nothing here can tell."""
    notes = Notes()
    for reading in readings:
        for finding in reading.warnings:
            notes.warn(finding.code, f"{reading.kind}: {finding.text}")
    matrix = _matrix(readings, notes)
    modules = _modules(readings)
    _warn_of_strangers(readings, matrix, notes)
    nics = usable.judge_all(_nics(readings, matrix, notes), _surroundings(modules))
    gpus = _gpus(readings, matrix, notes)
    hidden = (matrix.nics_total or 0) - (matrix.nics_shown or 0) if matrix else 0
    limits = next((r.limits for r in readings if r.limits and "memlock_kb" in r.limits), {})
    memlock = limits.get("memlock_kb")
    return Machine(
        source=source,
        gpus=gpus,
        nics=nics,
        nics_hidden=max(0, hidden),
        levels=_levels(matrix) if matrix else {},
        peer_access=next((r.peer_access for r in readings if r.peer_access), {}),
        nvlink_shown=matrix is not None and not matrix.pcie_only,
        gpudirect=_gpudirect(modules),
        memlock_bytes=memlock * 1024 if isinstance(memlock, int) else None,
        warnings=tuple(notes.findings),
    )


def _matrix(readings: Iterable[Reading], notes: Notes) -> Matrix | None:
    found = [reading.matrix for reading in readings if reading.matrix is not None]
    if len(found) > 1:
        notes.warn("several-matrices", f"{len(found)} topology tables: the first is used")
    return found[0] if found else None


def _warn_of_strangers(readings: Sequence[Reading], matrix: Matrix | None, notes: Notes) -> None:
    """A table that names all its NICs has every Mellanox device of the machine; one beside it is of another machine,
    or of another moment. Other makes are not in such tables."""
    names = {matrix.names.get(label) for label in matrix.nics} if matrix is not None else set()
    if matrix is None or not names or None in names or matrix.nics_total != matrix.nics_shown:
        return
    for reading in readings:
        strangers = [nic.name for nic in reading.nics or () if nic.name.startswith("mlx") and nic.name not in names]
        if strangers:
            listed = ", ".join(sorted(strangers, key=natural)[:4]) + (", ..." if len(strangers) > 4 else "")
            notes.warn(
                "not-in-table",
                f"{reading.kind}: {listed}: not in the topology table; are the texts of one machine and one moment?",
            )


def _modules(readings: Iterable[Reading]) -> dict[str, bool | None]:
    return next((reading.modules for reading in readings if reading.modules is not None), {})


def _surroundings(modules: dict[str, bool | None]) -> usable.Surroundings:
    software = frozenset(name for name in ("rdma_rxe", "siw") if modules.get(name))
    return usable.Surroundings(software_drivers=software, hardware_drivers=modules.get("hardware_rdma"))


def _nics(readings: Sequence[Reading], matrix: Matrix | None, notes: Notes) -> list[Nic]:
    merged: dict[str, Nic] = {}
    for label in matrix.nics if matrix else ():
        name = matrix.nic_name(label) if matrix else label
        merged[name] = Nic(name=name, label=label)
    for reading in readings:
        for nic in reading.nics or ():
            if nic.name == NO_NAME:
                notes.warn("nameless-device", f"{reading.kind}: a device without a name is left out")
            else:
                merged[nic.name] = _join(merged.get(nic.name), nic, reading.kind, notes)
    nics = sorted(merged.values(), key=lambda nic: natural(nic.name)) if matrix is None else list(merged.values())
    for reading in readings:
        nics = _with_device_files(nics, reading.dev) if reading.dev else nics
    return nics


def _join(known: Nic | None, nic: Nic, kind: str, notes: Notes) -> Nic:
    if known is None:
        return nic
    ports = {port.number: port for port in known.ports}
    for port in nic.ports:
        ports[port.number] = _join_port(ports.get(port.number), port, f"{kind}: {nic.name} port {port.number}", notes)
    changes = {
        field: getattr(nic, field)
        for field in nic.__struct_fields__
        if field not in ("name", "ports") and getattr(known, field) in (None, "", False)
    }
    return msgspec.structs.replace(known, **changes, ports=tuple(ports[number] for number in sorted(ports)))


def _join_port(known: Port | None, port: Port, where: str, notes: Notes) -> Port:
    if known is None:
        return port
    changes = {}
    for field in port.__struct_fields__:
        old, new = getattr(known, field), getattr(port, field)
        if field in _VERDICT or new is None or old == new:
            continue
        fuller = (field == "netdev" and not old) or (field == "gids" and old is not None and len(new) > len(old))
        if old is None or fuller:
            changes[field] = new
        elif field in ("state", "layer", "netdev", "lid") and new:
            when = ", unless it has changed in between" if field in _STALE else ""
            notes.warn("texts-contradict", f"{where}: {field} is {new}, another text says {old}{when}")
    return msgspec.structs.replace(known, **changes)


def _with_device_files(nics: list[Nic], dev: dict) -> list[Nic]:
    if dev.get("uverbs") == [] and dev.get("usable_char_devices") is False:
        return [msgspec.structs.replace(nic, device_file="") for nic in nics]
    missing = dev.get("not_usable", {})
    management = dev.get("management_only", ())
    return [
        msgspec.structs.replace(
            nic,
            device_file="" if nic.name in missing else nic.device_file,
            management_only=nic.management_only or nic.name in management,
        )
        for nic in nics
    ]


def _gpus(readings: Sequence[Reading], matrix: Matrix | None, notes: Notes) -> tuple[Gpu, ...]:
    names = list(matrix.gpus) if matrix else []
    for reading in readings:
        names += [name for name in reading.links or () if name not in names]
        names += [name for name in reading.peer_access or () if name not in names]
    gpus = {name: _gpu(name, matrix) for name in sorted(names, key=natural)}
    for reading in readings:
        for name, links in (reading.links or {}).items():
            model, uuid = (reading.models or {}).get(name, ("", ""))
            gpus[name] = msgspec.structs.replace(gpus[name], nvlinks=links, model=model, uuid=uuid)
        for event in reading.events or ():
            name = f"GPU{event.gpu_index_in_text}"
            if name in gpus:
                gpu = gpus[name]
                gpus[name] = msgspec.structs.replace(gpu, xids=(*gpu.xids, event.xid), pci=gpu.pci or event.pci)
            notes.warn("xid", f"the GPU at {event.pci} reported Xid {event.xid}: place no work on it before a reset")
        if reading.fabric and reading.fabric.healthy is False:
            fabric = reading.fabric
            notes.warn("fabric", f"a GPU is not on the NVLink fabric: {fabric.state}, status {fabric.status}")
            if len(gpus) == 1:
                name = next(iter(gpus))
                gpus[name] = msgspec.structs.replace(gpus[name], fabric=fabric)
    return tuple(gpus.values())


def _gpu(name: str, matrix: Matrix | None) -> Gpu:
    index = int(name[3:])
    if matrix is None:
        return Gpu(index=index)
    numa, memory = matrix.numa.get(name), matrix.memory_nodes.get(name)
    return Gpu(
        index=index,
        numa=int(numa) if numa and numa.isdigit() else None,
        cpus=matrix.cpus.get(name) or "",
        cpus_trusted=matrix.cpus_trusted,
        memory_node=int(memory) if memory else None,
    )


def _levels(matrix: Matrix) -> dict[str, dict[str, str]]:
    """Levels by device name; pairs whose two cells differ are not known."""
    labels = [*matrix.gpus, *matrix.nics]
    table: dict[str, dict[str, str]] = {}
    for i, a in enumerate(labels):
        row = {}
        for b in labels[i + 1 :]:
            level = matrix.level(a, b)
            if level:
                row[matrix.nic_name(b)] = levels.UNKNOWN if level == CONFLICT else level
        table[matrix.nic_name(a)] = row
    return table


def _gpudirect(modules: dict[str, bool | None]) -> GpuDirect:
    if not modules:
        return GpuDirect()
    return GpuDirect(
        peermem=bool(modules.get("nvidia_peermem") or modules.get("nv_peer_mem")),
        peermem_bound=modules.get("peermem_bound_to_ib_core"),
        gdrcopy=modules.get("gdrdrv"),
        storage=modules.get("nvidia_fs"),
    )
