"""Reads `path<TAB>value` lists of sysfs, as monitors and test suites keep them.

The list becomes a tree and the ordinary probe reads it, so that a list and a machine cannot be read differently.
"""

from __future__ import annotations

import re

from slipstream.topo import sysfs, usable
from slipstream.topo.read.reading import Reading
from slipstream.topo.read.text import Notes, Text
from slipstream.topo.tree import ListTree

_ENTRY = re.compile(r"/(?:sys|proc|dev)/[^\t]*[^\t ]\t[^\t]*")


def looks_like(text: Text) -> bool:
    return bool(re.search(r"^/(?:sys|proc)/\S+\t", text.body, re.MULTILINE))


def read_snapshot(text: Text) -> Reading:
    notes = Notes()
    seen: dict[str, str] = {}
    for line in text.lines:
        if not line.strip():
            continue
        if not _ENTRY.fullmatch(line):
            notes.warn("line-damaged", f"cannot read {line.strip()[:70]!r}")
            continue
        path, value = line.split("\t")
        if not value.strip():
            notes.warn("line-damaged", f"{path} has no value")
        if seen.setdefault(path, value) != value:
            notes.warn("line-damaged", f"{path} comes twice with different values: the first is read")
    tree = ListTree({path: value.strip() for path, value in seen.items() if value.strip()})
    nics = sysfs.rdma_devices(tree, notes)
    for nic in nics:
        for port in nic.ports:
            missing = [what for what, value in (("state", port.state), ("link_layer", port.layer)) if value is None]
            if missing:
                notes.warn("field-missing", f"{nic.name} port {port.number}: no {', '.join(missing)}")
        if not nic.ports:
            notes.warn("field-missing", f"{nic.name}: no port in the list")
    notes.gaps(text)
    return Reading(
        kind="sysfs-tree",
        nics=usable.judge_all(nics),
        warnings=tuple(notes.findings),
        quirks=(*text.quirks, *notes.quirks),
    )
