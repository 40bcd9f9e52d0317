"""Reads what `nvidia-smi` and the kernel log say of single GPUs: NVLink status, fabric state, Xid events."""

from __future__ import annotations

import re

from slipstream.topo.graph import Fabric, NvLinks
from slipstream.topo.read.reading import Reading, XidEvent
from slipstream.topo.read.text import Notes, Text

_GPU = re.compile(r"GPU (\d+): (.*?) \(UUID: ([^)\s]+)\)")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_GPU_START = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"Link (\d+): (?:(\d+(?:\.\d+)?) GB/s|<inactive>)")
_LINK_START = re.compile(r"Link \d+")
_ALL_INACTIVE = re.compile(r"all links are inactive", re.IGNORECASE)
_XID = re.compile(r"Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)\b(.*)")
_FABRIC_KEY = re.compile(
    r"^\s*(State|Status|CliqueId|ClusterUUID|Health|Bandwidth|Route \w+|Access \w+ \w+)\s*:\s*(.*?)\s*$"
)
_NO_FABRIC = ("N/A", "Not Supported")
_FABRIC_STATUS = re.compile(r"(?:[A-Z][A-Za-z/]*)(?: [A-Z][A-Za-z/]*)*")


def looks_like_nvlink(text: Text) -> bool:
    return bool(_LINK_START.search(text.body) or _ALL_INACTIVE.search(text.body))


def looks_like_fabric(text: Text) -> bool:
    return bool(re.search(r"^\s*Fabric\s*$", text.body, re.MULTILINE)) or "CliqueId" in text.body


def looks_like_dmesg(text: Text) -> bool:
    return "NVRM: Xid" in text.body


def read_nvlink(text: Text) -> Reading:
    """`nvidia-smi nvlink -s`. Empty text is a part without NVLink, not a failure."""
    notes = Notes()
    models: dict[str, tuple[str, str]] = {}
    rates: dict[str, dict[int, float | None]] = {}
    elided: set[str] = set()
    all_inactive: set[str] = set()
    gpu = ""
    for line in text.lines:
        known = _GPU.search(line)
        start = known or _GPU_START.search(line)
        if start:
            gpu = f"GPU{start.group(1)}"
            models[gpu] = (known.group(2), known.group(3)) if known else ("", "")
            if known and not _UUID.fullmatch(known.group(3).removeprefix("GPU-")):
                notes.warn("bad-value", f"{gpu}: {known.group(3)!r} is no UUID")
            rates.setdefault(gpu, {})
            if not known:
                notes.warn("line-damaged", f"{gpu}: name and UUID cannot be read")
        rest = line[start.end() :] if start else line
        if not gpu and rest.strip():
            notes.warn("stray-line", f"no GPU line above {rest.strip()[:60]!r}")
            continue
        matches = list(_LINK.finditer(rest))
        for match in matches:
            if int(match.group(1)) in rates[gpu]:
                notes.warn("record-damaged", f"{gpu}: link {match.group(1)} comes twice: a GPU line is missing")
                elided.add(gpu)
            rates[gpu].setdefault(int(match.group(1)), float(match.group(2)) if match.group(2) else None)
        if _ALL_INACTIVE.search(rest):
            all_inactive.add(gpu)
        elif "[...]" in rest or rest.strip() in ("...", "\u2026"):
            elided.add(gpu)
            notes.warn("elided", f"{gpu}: links are left out in the text: only those shown are proven")
        elif _LINK.sub("", rest).strip(" \t)"):
            notes.warn("line-damaged", f"{gpu}: cannot read {rest.strip()[:60]!r}")
            elided.add(gpu)
    links = {gpu: _links(gpu, found, gpu in elided, gpu in all_inactive, notes) for gpu, found in rates.items()}
    _compare(links, notes)
    notes.gaps(text)
    return Reading(
        kind="nvidia-smi-nvlink-status",
        links=links,
        models=models,
        warnings=tuple(notes.findings),
        quirks=(*text.quirks, *notes.quirks),
    )


def _links(gpu: str, found: dict[int, float | None], elided: bool, all_inactive: bool, notes: Notes) -> NvLinks:
    numbers = tuple(sorted(found))
    speeds = {speed for speed in found.values() if speed is not None}
    if len(speeds) > 1:
        notes.warn("uneven-rates", f"{gpu}: links run at {', '.join(f'{speed:g}' for speed in sorted(speeds))} GB/s")
    if all_inactive:
        return NvLinks(active=0, inactive=0)
    gaps = not numbers or numbers != tuple(range(len(numbers)))
    if gaps and not elided:
        notes.warn("links-missing", f"{gpu}: link numbers are not complete: only those shown are proven")
    rate = min(speeds) if len(speeds) == 1 else None
    if elided or gaps:
        return NvLinks(seen_links=numbers, gbps_per_link=rate)
    inactive = tuple(number for number in numbers if found[number] is None)
    return NvLinks(
        active=len(numbers) - len(inactive),
        inactive=len(inactive),
        inactive_links=inactive,
        seen_links=numbers,
        gbps_per_link=rate,
    )


def _compare(links: dict[str, NvLinks], notes: Notes) -> None:
    indices = [int(gpu[3:]) for gpu in links]
    if len(indices) > 1 and indices != list(range(indices[0], indices[0] + len(indices))):
        notes.warn("gpus-missing", f"GPU numbers have gaps: {', '.join(links)}")
    totals = {len(found.seen_links) for found in links.values() if found.active}
    if len(totals) > 1:
        notes.warn("uneven-links", "GPUs show different numbers of links: lines may be missing")
    rates = {found.gbps_per_link for found in links.values() if found.gbps_per_link}
    if len(rates) > 1:
        notes.warn("uneven-rates", f"GPUs run at {', '.join(f'{rate:g}' for rate in sorted(rates))} GB/s a link")


def read_fabric(text: Text) -> Reading:
    """The Fabric part of `nvidia-smi -q`. "Completed" alone is not healthy: the status must be Success too."""
    notes = Notes()
    keys: dict[str, str] = {}
    for line in text.lines:
        match = _FABRIC_KEY.match(line)
        if match:
            if match.group(1) in keys:
                notes.warn("record-damaged", f"{match.group(1)} comes twice: only the first is read")
            keys.setdefault(match.group(1), match.group(2))
        elif line.strip() not in ("", "Fabric"):
            notes.warn("stray-line", f"cannot read {line.strip()[:60]!r}")
    state, status = keys.get("State", ""), keys.get("Status", "")
    if not state or not status:
        notes.warn("field-missing", "fabric state or status is not shown")
    if state and state not in ("Completed", "In Progress", "Not Started", *_NO_FABRIC):
        notes.warn("bad-value", f"{state!r} is no fabric state")
    clique, cluster = keys.get("CliqueId", ""), keys.get("ClusterUUID", "")
    if status and not _FABRIC_STATUS.fullmatch(status):
        notes.warn("bad-value", f"{status!r} is no fabric status")
    if clique and clique != "N/A" and not clique.isdigit():
        notes.warn("bad-value", f"{clique!r} is no clique")
    if cluster and cluster != "N/A" and not _UUID.fullmatch(cluster):
        notes.warn("bad-value", f"{cluster!r} is no UUID")
    notes.gaps(text)
    return Reading(
        kind="nvidia-smi-q-fabric",
        fabric=Fabric(
            state=state,
            status=status,
            healthy=fabric_health(state, status),
            clique=clique,
            cluster=cluster,
        ),
        warnings=tuple(notes.findings),
        quirks=(*text.quirks, *notes.quirks),
    )


def fabric_health(state: str, status: str) -> bool | None:
    """Whether a GPU is on its fabric; None where there is none to be on. Boards of one node complete with a cluster
    id of zero, so the id says nothing against them."""
    if not state or state in _NO_FABRIC:
        return None
    return state == "Completed" and status == "Success"


def read_dmesg(text: Text) -> Reading:
    notes = Notes()
    events: list[XidEvent] = []
    seen: set[str] = set()
    for line in text.lines:
        match = _XID.search(line)
        if match and line in seen:
            notes.warn("line-twice", f"a line of Xid {match.group(2)} stands twice: the second is left out")
        elif match:
            seen.add(line)
            index = re.search(r"\bGPU(\d+)", match.group(3))
            if "Timeout" in match.group(3) and not index:
                notes.warn("line-cut", f"the line of Xid {match.group(2)} ends before it names the GPU")
            address, xid = match.group(1), int(match.group(2))
            if not re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?", address):
                notes.warn("bad-value", f"{address!r} is no PCI address")
            events.append(XidEvent(xid=xid, pci=address, gpu_index_in_text=int(index.group(1)) if index else None))
            if match.group(3)[:1] not in ("", ",", " "):
                notes.warn("line-damaged", f"the line of Xid {xid} is damaged")
        elif "Xid" in line or "NVRM" in line:
            notes.warn("line-damaged", f"cannot read {line.strip()[:60]!r}")
    notes.gaps(text)
    return Reading(
        kind="dmesg", events=tuple(events), warnings=tuple(notes.findings), quirks=(*text.quirks, *notes.quirks)
    )
