"""Reads `ibv_devinfo` (plain and -v), `ibstat` and `ibstatus`: records of "key: value" lines.

A line may hold several pairs (joined lines) and a record may lose its head; a key that comes twice therefore starts a
new record without a name rather than changing the one before. A value that is not one of its kind is left out with a
warning, never bent into one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.topo import gids as gid_tables
from slipstream.topo import usable
from slipstream.topo.graph import Gid, Nic, Port
from slipstream.topo.read.fields import device_name, gid_value, layer, number, phys_state, port_state
from slipstream.topo.read.reading import Reading
from slipstream.topo.read.text import Notes, Text

NO_NAME = "(name not in excerpt)"
_VIRTUAL_PARTS = {4100, 4114, 4116, 4118, 4120, 4122, 4124, 4126}  # vendor 0x02c9 and 0x15b3: virtual functions


@dataclass
class Record:
    """One device as its lines say it; `ports` go by number, with the port's own keys."""

    name: str
    keys: dict[str, str] = field(default_factory=dict)
    ports: dict[int, dict[str, str]] = field(default_factory=dict)
    openable: bool | None = None
    assumed_port: bool = False


@dataclass(frozen=True)
class Dialect:
    """How one tool words its output. `head` matches a record's first line, `port` the start of a port."""

    kind: str
    head: re.Pattern[str]
    port: re.Pattern[str] | None
    device_keys: tuple[str, ...]
    port_keys: tuple[str, ...]
    expected: tuple[str, ...]


DEVINFO = Dialect(
    "ibv_devinfo",
    re.compile(r"hca_id:\s*(\S*)"),
    re.compile(r"(?<![\w.])port:\s*(\d+)"),
    ("transport", "fw_ver", "node_guid", "sys_image_guid", "vendor_id", "vendor_part_id", "hw_ver", "board_id",
     "phys_port_cnt"),
    ("state", "max_mtu", "active_mtu", "sm_lid", "port_lid", "port_lmc", "link_layer", "phys_state", "gid_tbl_len",
     "active_width", "active_speed", "max_msg_sz", "port_cap_flags", "max_vl_num", "subnet_timeout"),
    ("state", "link_layer"),
)  # fmt: skip
IBSTAT = Dialect(
    "ibstat",
    re.compile(r"CA '([^']*)'?"),
    re.compile(r"Port (\d+):"),
    ("CA type", "Number of ports", "Firmware version", "Hardware version", "Node GUID", "System image GUID"),
    ("State", "Physical state", "Rate", "Base lid", "LMC", "SM lid", "Capability mask", "Port GUID", "Link layer"),
    ("State", "Physical state", "Rate", "Link layer"),
)
IBSTATUS = Dialect(
    "ibstatus",
    re.compile(r"Infiniband device '([^']*)' port (\d+) status:"),
    None,
    (),
    ("default gid", "base lid", "sm lid", "state", "phys state", "rate", "link_layer"),
    ("state", "phys state", "rate", "link_layer"),
)
_GID = re.compile(r"GID\[\s*(\d+)\]:\s*([0-9a-fA-F:.]*)(?:,\s*(?:RoCE|IB)[ /]?(v\d)?(?:(?!GID\[)[^\n])*)?")
_GONE = re.compile(r"stat of IB device '([^']+)' failed: (.*)")
_FAILED = "Failed to open device"


def looks_like_devinfo(text: Text) -> bool:
    return bool(re.search(r"^\s*hca_id:|^\s*state:\s+PORT_|^\s*vendor_part_id:", text.body, re.MULTILINE))


def looks_like_ibstat(text: Text) -> bool:
    return bool(re.search(r"^\s*CA '|^ibpanic:|^\s*Physical state:", text.body, re.MULTILINE))


def looks_like_ibstatus(text: Text) -> bool:
    return "Infiniband device '" in text.body or "sys files not found (/sys/class/infiniband" in text.body


def read_devinfo(text: Text) -> Reading:
    notes = Notes()
    records = _records(text, DEVINFO, notes)
    failed = sum(line.count(_FAILED) for line in text.lines)
    if failed:
        notes.warn("failed-to-open", f"{failed} devices are listed and cannot be opened here (no device file)")
    verbose = bool(_GID.search(text.body)) or "phys_state" in text.body
    nics = [_nic(record, _devinfo_port, notes) for record in records]
    return _reading("ibv_devinfo-v" if verbose else "ibv_devinfo", nics, text, notes)


def read_ibstat(text: Text) -> Reading:
    notes = Notes()
    records = _records(text, IBSTAT, notes)
    for match in _GONE.finditer(text.body):
        records.append(Record(match.group(1), ports={1: {}}, openable=False))
        notes.warn("stops-early", f"the tool stopped at {match.group(1)}: devices after it are not shown")
    if len(_GONE.findall(text.body)) < text.body.count("ibpanic"):
        notes.warn("stops-early", "the tool stopped at a device whose name cannot be read: later ones are not shown")
    return _reading("ibstat", [_nic(record, _ibstat_port, notes) for record in records], text, notes)


def read_ibstatus(text: Text) -> Reading:
    notes = Notes()
    records = _records(text, IBSTATUS, notes)
    return _reading("ibstatus", [_nic(record, _ibstatus_port, notes) for record in records], text, notes)


def _reading(kind: str, nics: list[Nic], text: Text, notes: Notes) -> Reading:
    notes.gaps(text)
    return Reading(
        kind=kind,
        nics=usable.judge_all(_merge(nics, notes)),
        warnings=tuple(notes.findings),
        quirks=(*text.quirks, *notes.quirks),
    )


def _merge(nics: list[Nic], notes: Notes) -> list[Nic]:
    """ibstatus prints a record a port: those of one device belong together."""
    merged: dict[str, Nic] = {}
    for nic in nics:
        known = merged.get(nic.name)
        if known is None:
            merged[nic.name] = nic
        elif nic.name != NO_NAME and not {p.number for p in known.ports} & {p.number for p in nic.ports}:
            merged[nic.name] = Nic(name=nic.name, ports=(*known.ports, *nic.ports))
        else:
            notes.warn("duplicate-device", f"{nic.name} comes twice: the second record is left out")
    return list(merged.values())


def _records(text: Text, dialect: Dialect, notes: Notes) -> list[Record]:
    keys = sorted((*dialect.device_keys, *dialect.port_keys), key=len, reverse=True)
    pattern = re.compile("(" + "|".join(re.escape(key) for key in keys) + r"):")
    records: list[Record] = []
    current: Record | None = None
    port: dict[str, str] | None = None
    for line in text.lines:
        events = _events(line, dialect, pattern)
        if not events and not _may_stand_alone(line, dialect):
            notes.warn("stray-line", f"cannot read {line.strip()[:60]!r}")
        for kind, key, value in events:
            if kind == "head":
                current, port = Record(key), None
                records.append(current)
                if value.isdigit():
                    port = current.ports.setdefault(int(value), {})
                continue
            at_device = key in dialect.device_keys
            repeated = current is not None and _repeats(current, port, kind, key, at_device)
            if current is None or repeated:
                notes.warn("record-damaged", "a record has lost its first line: its device name is not known")
                current, port = Record(NO_NAME), None
                records.append(current)
            if kind == "port":
                port = current.ports.setdefault(int(value), {})
            elif at_device:
                current.keys[key] = value
            else:
                if port is None:
                    port = current.ports.setdefault(1, {})
                    if dialect.port is not None:
                        notes.warn("record-damaged", f"{current.name}: port line missing, taken as port 1")
                port.setdefault(key, value)
    _complete(records, dialect, notes)
    return records


def _may_stand_alone(line: str, dialect: Dialect) -> bool:
    """Whether a line without a known key is none that lost its own: a command, a complaint of the tool, or, of
    `ibv_devinfo -v`, one of the many keys that are not read."""
    if not line.strip() or re.match(r"\s*\S*[#$]\s", line) or _FAILED in line or "failed:" in line:
        return True
    if line.startswith(("ibpanic", "Fatal", "ibwarn")) or "not found" in line:
        return True
    return dialect is DEVINFO and (":" in line or bool(re.fullmatch(r"\s+[A-Z][A-Z0-9_ ]+", line)))


def _repeats(record: Record, port: dict[str, str] | None, kind: str, key: str, at_device: bool) -> bool:
    if kind == "port":
        return False
    if at_device:
        return key in record.keys or bool(record.ports)
    return port is not None and key in port and not key.startswith("GID[")


def _events(line: str, dialect: Dialect, pattern: re.Pattern[str]) -> list[tuple[str, str, str]]:
    """("head", name, port) / ("port", "", number) / ("key", key, value) in the order of the line."""
    found: list[tuple[int, int, str, str, str]] = []
    for match in dialect.head.finditer(line):
        number_ = match.group(2) if dialect.head.groups > 1 else ""
        found.append((match.start(), match.end(), "head", match.group(1) or NO_NAME, number_))
    for match in dialect.port.finditer(line) if dialect.port else ():
        found.append((match.start(), match.end(), "port", "", match.group(1)))
    if dialect is DEVINFO:
        for match in _GID.finditer(line):
            found.append((match.start(), match.end(), "gid", f"GID[{match.group(1)}]", match.group()))
    taken = [(start, end) for start, end, *_ in found]
    for match in pattern.finditer(line):
        if not any(start < match.end() and match.start() < end for start, end in taken):
            found.append((match.start(), match.end(), "key", match.group(1), ""))
    found.sort()
    events = []
    for i, (_, end, kind, key, value) in enumerate(found):
        until = found[i + 1][0] if i + 1 < len(found) else len(line)
        events.append((kind, key, line[end:until].strip() if kind == "key" else value))
    return events


def _complete(records: list[Record], dialect: Dialect, notes: Notes) -> None:
    for record in records:
        if not record.ports and record.openable is None:
            record.ports[1] = {}
            record.assumed_port = True
            notes.warn("record-damaged", f"{record.name}: the record is cut before its port")
            continue
        for port, keys in record.ports.items():
            missing = [key for key in dialect.expected if key not in keys]
            if missing and record.name != NO_NAME:
                notes.warn("field-missing", f"{record.name} port {port}: no {', '.join(missing)}")
        announced = record.keys.get("phys_port_cnt") or record.keys.get("Number of ports")
        if announced and announced.isdigit() and int(announced) != len(record.ports):
            notes.warn("ports-missing", f"{record.name} has {announced} ports, {len(record.ports)} are shown")


def _nic(record: Record, read_port: Callable[[str, int, dict[str, str], Notes], Port], notes: Notes) -> Nic:
    part = record.keys.get("vendor_part_id", "")
    if part and not part.isdigit():
        notes.warn("bad-value", f"{record.name}: vendor_part_id {part!r} is no number")
    if record.name != NO_NAME:
        device_name(record.name, notes)
    name = f"MT{part}" if part.isdigit() and len(part) == 4 else record.keys.get("CA type", "")
    digits = name.removeprefix("MT")
    return Nic(
        name=record.name,
        ports=tuple(read_port(record.name, number_, keys, notes) for number_, keys in record.ports.items()),
        part=name,
        board=record.keys.get("board_id", ""),
        firmware=record.keys.get("fw_ver") or record.keys.get("Firmware version", ""),
        node_guid=record.keys.get("node_guid") or record.keys.get("Node GUID", ""),
        virtual_function=True if digits.isdigit() and int(digits) in _VIRTUAL_PARTS else None,
        openable=record.openable,
    )


def _devinfo_port(name: str, index: int, keys: dict[str, str], notes: Notes) -> Port:
    where = f"{name} port {index}"
    gids = [_gid(where, value, notes) for key, value in keys.items() if key.startswith("GID[")]
    filled = gid_tables.with_guessed_types([gid for gid in gids if gid])
    if any(gid.version for gid in filled) and not any(gid and gid.version for gid in gids):
        notes.warn("gid-types-guessed", f"{where}: GID types are not shown; of two equal entries the second is v2")
    return Port(
        number=index,
        state=port_state(where, keys.get("state"), notes),
        phys=phys_state(where, keys.get("phys_state"), notes),
        layer=layer(where, keys.get("link_layer"), notes),
        lid=number(where, "port_lid", keys.get("port_lid"), notes),
        sm_lid=number(where, "sm_lid", keys.get("sm_lid"), notes),
        active_mtu=number(where, "active_mtu", re.sub(r"\s*\(\d+\)$", "", keys.get("active_mtu", "")) or None, notes),
        gids=filled if gids else None,
    )


def _gid(where: str, line: str, notes: Notes) -> Gid | None:
    match = _GID.match(line)
    value = gid_value(where, match.group(2), notes) if match else None
    if match is None or value is None:
        return None
    version = match.group(3)
    return Gid(index=int(match.group(1)), value=value, version=version if version in ("v1", "v2") else None)


def _ibstat_port(name: str, index: int, keys: dict[str, str], notes: Notes) -> Port:
    where = f"{name} port {index}"
    rate = keys.get("Rate")
    if rate is not None and not re.fullmatch(r"\d+(?:\.\d+)?", rate):
        notes.warn("bad-value", f"{where}: rate {rate!r} is no number")
        rate = None
    return Port(
        number=index,
        state=port_state(where, keys.get("State"), notes),
        phys=phys_state(where, keys.get("Physical state"), notes),
        layer=layer(where, keys.get("Link layer"), notes),
        rate_gbps=float(rate) if rate else None,
        lid=number(where, "Base lid", keys.get("Base lid"), notes),
        sm_lid=number(where, "SM lid", keys.get("SM lid"), notes),
    )


def _ibstatus_port(name: str, index: int, keys: dict[str, str], notes: Notes) -> Port:
    where = f"{name} port {index}"
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec \(", keys.get("rate", ""))
    if "rate" in keys and not rate:
        notes.warn("bad-value", f"{where}: rate {keys['rate']!r} is no rate")
    return Port(
        number=index,
        state=port_state(where, keys.get("state"), notes),
        phys=phys_state(where, keys.get("phys state"), notes),
        layer=layer(where, keys.get("link_layer"), notes),
        rate_gbps=float(rate.group(1)) if rate else None,
        lid=number(where, "base lid", keys.get("base lid"), notes),
        sm_lid=number(where, "sm lid", keys.get("sm lid"), notes),
    )
