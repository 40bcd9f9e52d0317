"""Reads what a shell says of the host or container: `lsmod`, `ulimit`, listings of device files."""

from __future__ import annotations

import re
from typing import Any

from slipstream.topo.levels import natural
from slipstream.topo.read.reading import Reading
from slipstream.topo.read.text import Notes, Text

MODULES = (
    "nvidia_peermem",
    "nv_peer_mem",
    "gdrdrv",
    "nvidia_fs",
    "mlx5_ib",
    "mlx_compat",
    "ib_core",
    "rdma_rxe",
    "siw",
)
HARDWARE_DRIVERS = (
    "mlx5_ib",
    "mlx4_ib",
    "bnxt_re",
    "irdma",
    "qedr",
    "efa",
    "hfi1",
    "i40iw",
    "erdma",
    "cxgb4",
    "vmw_pvrdma",
)
_MODULE = re.compile(r"^(?P<name>[A-Za-z]\w*)\s+(?P<size>\d{4,})\s+(?P<count>-?\d+)(?:\s+(?P<users>[\w,\-\[\]]+))?\s*$")
_ULIMIT_A = re.compile(r"^(?P<what>[A-Za-z][a-zA-Z \-]*?)\s+\((?:[^()]*, )?-(?P<flag>\w)\)\s+(?P<value>\S+)\s*$")
_LISTED = re.compile(r"/dev/?|/(?:dev|sys/class)/(?:infiniband(?:_mad|_verbs)?|nvidia[\w\-]*)?/?[*:]{0,2}")
_PATH = re.compile(r"/(?:dev|sys/class)/(?:[a-z][a-z_\-]*/)?[^/]+")
_MEMLOCK_FLOOR_KB = 1 << 20  # pools are gigabytes: less than one can only fail
_NOFILE_FLOOR = 65536
_LONG = re.compile(r"^c(?P<mode>[rwx-]{9})\S*\s+\d+\s+\S+\s+\S+\s+\d+,\s+\d+\s+.*?(?P<name>\S+)$")


def looks_like_lsmod(text: Text) -> bool:
    lines = [line for line in text.lines if line.strip() and not line.startswith(("Module ", "#", "$"))]
    return any(_MODULE.match(line) for line in lines)


def looks_like_ulimit(text: Text) -> bool:
    body = text.body.strip()
    return bool(
        re.fullmatch(r"unlimited|\d{1,9}", body) or re.search(r"^ulimit soft:|\(kbytes, -l\)", body, re.MULTILINE)
    )


def looks_like_dev(text: Text) -> bool:
    return bool(
        re.search(r"\buverbs\d+|/dev/infiniband|\brdma_cm\b(?!,)\s*$|/dev/nvidia\d|-> ibdev=", text.body, re.MULTILINE)
    )


def read_lsmod(text: Text) -> Reading:
    """Modules seen. A module is also seen when it stands among the users of another (filtered lists do that)."""
    notes = Notes()
    users: dict[str, set[str]] = {}
    cut: set[str] = set()
    for line in text.lines:
        if not line.strip() or line.startswith(("Module ", "#", "$")):
            continue
        match = _MODULE.match(line)
        if not match:
            notes.warn("line-damaged", f"cannot read {line.strip()[:60]!r}")
            continue
        listed = {user for user in (match["users"] or "").split(",") if user and user != "-"}
        name = match["name"]
        if name in users:
            notes.warn("line-damaged", f"{name} comes twice")
        users.setdefault(name, set()).update(listed)
        if name in ("ib_core", "ib_uverbs") and int(match["count"]) != len(listed):
            cut.add(name)
            notes.warn("line-cut", f"{name} has {match['count']} users, {len(listed)} are listed")
        if int(match["count"]) < len(listed) or (match["users"] or "").endswith(","):
            notes.warn("line-damaged", f"{name}: count and users do not agree")
    notes.gaps(text)
    seen = set(users) | {user for named in users.values() for user in named}
    modules: dict[str, bool | None] = {name: name in seen for name in MODULES}
    modules["hardware_rdma"] = any(name in seen for name in HARDWARE_DRIVERS)
    bound = any(
        "nvidia_peermem" in users.get(name, ()) or "nv_peer_mem" in users.get(name, ())
        for name in ("ib_core", "ib_uverbs")
    )
    modules["peermem_bound_to_ib_core"] = bound or (None if cut or "ib_core" not in users else False)
    if text.body.strip() == "":
        notes.quirk("nothing-found")
    return Reading(kind="lsmod", modules=modules, warnings=tuple(notes.findings), quirks=(*text.quirks, *notes.quirks))


def read_ulimit(text: Text) -> Reading:
    """`ulimit -l` (one word), `ulimit -a`, or a server's line "ulimit soft: N"."""
    notes = Notes()
    limits: dict[str, int | bool | None] = {}
    body = text.body.strip()
    soft = re.search(r"ulimit soft:\s*(\S+)", body)
    if soft:
        kind = "sglang-ulimit-soft"
        _limit(limits, "nofile", soft.group(1), notes)
    elif re.fullmatch(r"\S+", body):
        kind = "ulimit-l"
        _limit(limits, "memlock", body, notes)
    else:
        kind = "ulimit-a"
        for line in text.lines:
            match = _ULIMIT_A.match(line)
            if match and match["flag"] in "ln":
                _limit(limits, "memlock" if match["flag"] == "l" else "nofile", match["value"], notes)
            elif not match and line.strip():
                notes.warn("line-damaged", f"cannot read {line.strip()[:60]!r}")
        for what in ("memlock", "nofile"):
            if not any(key.startswith(what) for key in limits):
                notes.warn("field-missing", f"no {what} line")
    notes.gaps(text)
    return Reading(
        kind=kind,
        limits=limits,
        verdict=_verdict(limits),
        warnings=tuple(notes.findings),
        quirks=(*text.quirks, *notes.quirks),
    )


def _limit(limits: dict[str, int | bool | None], what: str, value: str, notes: Notes) -> None:
    key = "memlock_kb" if what == "memlock" else what
    if value == "unlimited":
        limits[key] = None
        limits[f"{what}_unlimited"] = True
    elif value.isdigit():
        limits[key] = int(value)
    else:
        notes.warn("bad-value", f"{what} {value!r} is no limit")


def _verdict(limits: dict[str, int | bool | None]) -> str | None:
    memlock, nofile = limits.get("memlock_kb"), limits.get("nofile")
    if isinstance(memlock, int) and memlock < _MEMLOCK_FLOOR_KB:
        return "fail"
    if isinstance(nofile, int) and nofile < _NOFILE_FLOOR:
        return "warn"
    return "ok" if limits else None


def read_dev(text: Text) -> Reading:
    """Listings of /dev/infiniband, /sys/class/infiniband and /dev/nvidia*, alone or below their commands."""
    notes = Notes()
    notes.gaps(text)
    if "-> ibdev=" in text.body:
        dev = _mad_map(text, notes)
    else:
        names, modes, sysfs = _entries(text, notes)
        dev = (
            _nvidia(names)
            if any(name.startswith("nvidia") for name in names)
            else _rdma(text, names, modes, sysfs, notes)
        )
    return Reading(
        kind="ls-dev-infiniband", dev=dev, warnings=tuple(notes.findings), quirks=(*text.quirks, *notes.quirks)
    )


def _entries(text: Text, notes: Notes) -> tuple[list[str], dict[str, str], list[str] | None]:
    """(entries of /dev, their modes in long listings, entries of /sys/class/infiniband when listed)."""
    names: list[str] = []
    modes: dict[str, str] = {}
    sysfs: list[str] | None = None
    target = names
    for line in text.lines:
        if not line.strip() or re.match(r"^(?:total \d+\s*$|d[rwx-]{9}|ls: )", line):
            continue
        if re.match(r"^\s*[#$]", line) or line.rstrip().endswith(":"):
            strange = [path for path in re.findall(r"(?<!\S)/\S*", line) if not _LISTED.fullmatch(path)]
            if strange:
                notes.warn("line-damaged", f"{strange[0]!r} is no folder of device files: the line holds more")
            if "/sys/class/infiniband" in line:
                sysfs = []
                target = sysfs
            else:
                target = names
            continue
        match = _LONG.match(line)
        if match:
            target.append(match["name"].rsplit("/", 1)[-1])
            modes[target[-1]] = match["mode"]
        elif re.match(r"^[c-][rwx-]", line):
            notes.warn("line-damaged", f"cannot read {line.strip()[:60]!r}")
        else:
            for word in line.split():
                if "/" in word and not _PATH.fullmatch(word):
                    notes.warn("stray-entry", f"{word!r} is no path of a device file")
                target.append(_name(word))
    for name in names:
        if not re.fullmatch(
            r"(?:uverbs|umad|issm|ucm|nvidia|channel)\d+|rdma_cm|by-ibdev|by-path|nvidia[-\w]*|imex", name
        ):
            notes.warn("stray-entry", f"{name!r} is no known device file")
    for listed in (names, sysfs or ()):
        if len(set(listed)) < len(listed):
            notes.warn("line-twice", "an entry stands twice: lines are repeated")
    for name in sysfs or ():
        if not re.fullmatch(r"[a-z][a-z0-9_\-]*\d[a-z0-9_]*", name):
            notes.warn("stray-entry", f"{name!r} is no name of an RDMA device")
    return names, modes, sysfs


def _name(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def _numbers(names: list[str], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in names if re.fullmatch(prefix + r"\d+", name))


def _rdma(text: Text, names: list[str], modes: dict[str, str], sysfs: list[str] | None, notes: Notes) -> dict[str, Any]:
    uverbs = _numbers(names, "uverbs")
    umad = _numbers(names, "umad")
    dev: dict[str, Any] = {"uverbs": uverbs, "rdma_cm": "rdma_cm" in names}
    if umad:
        dev["umad"] = len(umad)
    missing = "No such file or directory" in text.body or "cannot access" in text.body
    if not uverbs and not missing and names:
        dev["uverbs"] = "not shown"  # ls sorts uverbs behind umad: the listing ends before them
        dev["usable_char_devices"] = "unknown"
        notes.warn("cut-off", "the listing ends before the uverbs files: nothing can be said about opening devices")
    else:
        readable = [name for name in names if name.startswith("uverbs")]
        dev["usable_char_devices"] = bool(readable) and all(
            modes.get(name, "rw").endswith(("rw-", "rw")) for name in readable
        )
    gaps = [uverbs, umad]
    if sysfs is None and any(numbers and numbers != list(range(len(numbers))) for numbers in gaps):
        notes.warn("numbers-with-gaps", "device files do not count up from 0: lines may be missing")
    if sysfs is not None:
        usable = {name: f"uverbs{i}" in names for i, name in enumerate(sorted(sysfs, key=natural))}
        dev["sysfs"] = sysfs
        dev["usable"] = [name for name, found in usable.items() if found]
        dev["not_usable"] = {name: f"no uverbs{i}" for i, (name, found) in enumerate(usable.items()) if not found}
        notes.quirk("mapped-by-order")
    return dev


def _nvidia(names: list[str]) -> dict[str, Any]:
    return {
        "nvidia": _numbers(names, "nvidia"),
        "imex_channels": _numbers(names, "channel"),
        "uvm": "nvidia-uvm" in names,
        "ctl": "nvidiactl" in names,
    }


def _mad_map(text: Text, notes: Notes) -> dict[str, Any]:
    """ "umad0 -> ibdev=mlx5_0 port=1" lines: several ports on one PCI function are a card's management device."""
    ports: dict[str, set[int]] = {}
    functions: dict[str, str] = {}
    for line in text.lines:
        mad = re.fullmatch(r"\s*(?:umad|issm)\d+ -> ibdev=(\S+) port=(\d+)\s*", line)
        function = re.fullmatch(r"\s*(\S+) -> pci=(\S+) class=0x[0-9a-f]+ driver=\S+\s*", line)
        if mad:
            ports.setdefault(mad.group(1), set()).add(int(mad.group(2)))
        elif function:
            functions[function.group(1)] = function.group(2)
        elif line.strip():
            notes.warn("line-damaged", f"cannot read {line.strip()[:60]!r}")
    shared = {pci for pci in functions.values() if list(functions.values()).count(pci) > 1}
    management = [name for name in ports if len(ports[name]) > 1 and functions.get(name) in shared]
    without = [name for name in ports if name not in functions]
    if without:
        notes.warn("field-missing", f"no PCI function for {', '.join(without)}: it may manage a card")
    return {"data_devices": [name for name in ports if name not in management], "management_only": management}
