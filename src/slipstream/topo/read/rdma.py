"""Reads the one-line-a-port lists: `rdma link`, `ibdev2netdev`, `show_gids`.

Every line must match its tool's form as a whole; a line that looks like one and does not is warned about and left
out. What the lines of a text have in common (a blank at the end, a count below) shows cuts that single lines hide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slipstream.topo import usable
from slipstream.topo.graph import Gid, Nic, Port
from slipstream.topo.read.fields import device_name, gid_value, netdev_name, number, phys_state, port_state
from slipstream.topo.read.reading import Reading
from slipstream.topo.read.text import Notes, Text

_LINK = re.compile(
    r"(?:link\s+(?P<name>[A-Za-z][\w.\-]*)/(?P<port>\d+)|\d+/\d+:\s+(?P<old>[A-Za-z][\w.\-]*)/(?P<oldport>\d+):)"
)
_LINK_KEYS = {"subnet_prefix", "lid", "sm_lid", "lmc", "state", "physical_state", "netdev", "netdev_index"}
_IBDEV = re.compile(r"(?P<name>[A-Za-z]\S*)\s+port\s+(?P<port>\d+)\s+==>\s+(?P<netdev>\S+)\s+\((?P<state>Up|Down)\)")
_GID_HEADER = re.compile(r"DEV\s+PORT\s+INDEX\s+GID\s+IPv4\s+VER\s+DEV\s*|[-\s]+")
_GID_LINE = re.compile(
    r"(?P<name>[A-Za-z]\S*)\s+(?P<port>\d+)\s+(?P<index>\d+)\s+(?P<gid>(?:[0-9a-fA-F]{4}:){7}[0-9a-fA-F]{4})"
    r"(?:\s+(?P<ipv4>\d+\.\d+\.\d+\.\d+))?\s+(?P<version>v[12])(?:\s+(?P<netdev>\S+))?"
)


def looks_like_link(text: Text) -> bool:
    return bool(re.search(r"(?:^|\s)(?:link \S+/\d+|\d+/\d+: \S+/\d+:)\s+(?:subnet|lid|state)", text.body))


def looks_like_ibdev(text: Text) -> bool:
    return "==>" in text.body and bool(re.search(r"\bport\s+\d+\s+==>", text.body))


def looks_like_gids(text: Text) -> bool:
    return bool(re.search(r"^DEV\s+PORT\s+INDEX|n_gids_found=|^\S+\t\d+\t\d+\t[0-9a-f]{4}:", text.body, re.MULTILINE))


def read_link(text: Text) -> Reading:
    notes = Notes()
    found: list[tuple[str, Port]] = []
    blanks = [line.endswith(" ") for line in text.lines if _LINK.search(line)]
    for line in text.lines:
        starts = list(_LINK.finditer(line))
        if not starts:
            if line.strip() and not re.match(r"\s*[#$]", line):
                notes.warn("stray-line", f"cannot read {line.strip()[:60]!r}")
            continue
        if line[: starts[0].start()].strip() not in ("", "$ rdma", "#"):
            notes.warn("stray-line", f"cannot read {line[: starts[0].start()].strip()[:60]!r}")
        for i, start in enumerate(starts):
            end = starts[i + 1].start() if i + 1 < len(starts) else len(line)
            name = start["name"] or start["old"]
            found.append(
                (name, _link_port(name, int(start["port"] or start["oldport"]), line[start.end() : end], notes))
            )
        if len(starts) > 1:
            notes.warn("joined-lines", "two links stand in one line")
        elif any(blanks) and not all(blanks) and not line.endswith(" "):
            notes.warn("line-cut", f"the line of {starts[0]['name'] or starts[0]['old']} may be cut at its end")
    ports = [port for _, port in found]
    silent = bool(ports) and not any(port.netdev for port in ports)
    if silent and any(port.active and port.layer == "Ethernet" for port in ports):
        notes.warn("no-netdevs", "no line names a network device: none is in this namespace, or the column is missing")
    return _reading("rdma-link", _devices(found, notes), text, notes)


def _link_port(name: str, index: int, rest: str, notes: Notes) -> Port:
    where = f"{name} port {index}"
    words = rest.split()
    keys: dict[str, str] = {}
    while words:
        key = words.pop(0)
        if key not in _LINK_KEYS or key in keys:
            notes.warn("line-damaged", f"{where}: cannot place {key!r}")
        elif not words or words[0] in _LINK_KEYS:
            notes.warn("line-damaged", f"{where}: {key} has no value")
        else:
            keys[key] = words.pop(0)
    for key in ("state", "physical_state"):
        if key not in keys:
            notes.warn("field-missing", f"{where}: no {key}")
    infiniband = "lid" in keys or "subnet_prefix" in keys
    whole = "state" in keys and "physical_state" in keys
    return Port(
        number=index,
        state=port_state(where, keys.get("state"), notes),
        phys=phys_state(where, keys.get("physical_state"), notes),
        layer="InfiniBand" if infiniband else "Ethernet",
        lid=number(where, "lid", keys.get("lid"), notes),
        sm_lid=number(where, "sm_lid", keys.get("sm_lid"), notes),
        netdev=keys.get("netdev") or ("" if whole else None),
    )


def read_ibdev(text: Text) -> Reading:
    notes = Notes()
    found: list[tuple[str, Port]] = []
    for line in text.lines:
        matches = list(_IBDEV.finditer(line))
        if _IBDEV.sub("", line).strip() and ("port" in line or "==>" in line or matches):
            notes.warn("line-damaged", f"cannot read {line.strip()[:60]!r}")
        for match in matches:
            name, netdev = match["name"], match["netdev"]
            layer = "InfiniBand" if re.match(r"ib[a-z]*\d", netdev) else "Ethernet"
            port = Port(number=int(match["port"]), layer=layer, netdev=netdev, netdev_state=match["state"].upper())
            found.append((name, port))
    return _reading("ibdev2netdev", _devices(found, notes), text, notes)


def read_gids(text: Text) -> Reading:
    notes = Notes()
    tables: dict[tuple[str, int], list[Gid]] = {}
    announced, headed = None, False
    for line in text.lines:
        count = re.search(r"n_gids_found=(\d+)", line)
        if count:
            announced = int(count.group(1))
            continue
        if not line.strip() or _GID_HEADER.fullmatch(line):
            headed = headed or line.startswith("DEV")
            continue
        match = _GID_LINE.fullmatch(line.strip())
        value = gid_value(line.split()[0], match["gid"], notes) if match else None
        if match is None or value is None:
            notes.warn("line-damaged", f"cannot read {line.strip()[:60]!r}")
            continue
        if not match["netdev"]:
            notes.warn("field-missing", f"{match['name']} GID {match['index']}: no network device in the line")
        version = "v2" if match["version"] == "v2" else "v1"
        gid = Gid(index=int(match["index"]), value=value, version=version, netdev=match["netdev"])
        table = tables.setdefault((match["name"], int(match["port"])), [])
        if any(known.index == gid.index for known in table):
            notes.warn("line-damaged", f"{match['name']}: GID index {gid.index} comes twice: the second is left out")
            continue
        if match["ipv4"] and match["ipv4"] != gid.address:
            notes.warn(
                "line-damaged", f"{match['name']} GID {gid.index}: {match['ipv4']} is not the address of the GID"
            )
        table.append(gid)
    if not headed:
        notes.warn("no-header", "no header line: the list may be cut at its beginning")
    shown = sum(len(table) for table in tables.values())
    if announced is None:
        notes.warn("no-count", "no n_gids_found line: the list may be cut")
    elif announced != shown:
        notes.warn("gids-missing", f"the tool found {announced} GIDs, {shown} are in the text")
    found = [(name, _gid_port(port, table)) for (name, port), table in tables.items()]
    return _reading("show_gids", _devices(found, notes), text, notes)


def _gid_port(number_: int, table: list[Gid]) -> Port:
    """The port's own network device is the one that holds its link-local entries, which no overlay has."""
    own = [gid.netdev for gid in table if gid.kind == "link-local" and gid.netdev]
    netdev = own[0] if own else table[0].netdev
    return Port(number=number_, layer="Ethernet", netdev=netdev, gids=tuple(table))


def _devices(found: Iterable[tuple[str, Port]], notes: Notes) -> list[Nic]:
    ports: dict[str, list[Port]] = {}
    for name, port in found:
        device_name(name, notes)
        netdev_name(name, port.netdev, notes)
        held = ports.setdefault(name, [])
        if any(known.number == port.number for known in held):
            notes.warn("duplicate-device", f"{name} port {port.number} comes twice: the second is left out")
        else:
            held.append(port)
    return [Nic(name=name, ports=tuple(sorted(held, key=lambda port: port.number))) for name, held in ports.items()]


def _reading(kind: str, nics: list[Nic], text: Text, notes: Notes) -> Reading:
    notes.gaps(text)
    return Reading(
        kind=kind,
        nics=usable.judge_all(nics),
        warnings=tuple(notes.findings),
        quirks=(*text.quirks, *notes.quirks),
    )
