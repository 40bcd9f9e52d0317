"""What one pasted text says, before it is put together with others.

Every reader returns a `Reading`: the sections that its kind of text can hold, and warnings for all that was damaged,
missing or ambiguous. `plain` gives the same in the flat words of the golden readings (`tests/fixtures/topology`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.topo import levels
from slipstream.topo.graph import Fabric, Finding, Nic, NvLinks

CONFLICT = "conflict"


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """The matrix of `nvidia-smi topo -m`. Rows and columns go by label (GPU0, NIC3, or a device name in old ones).

    `cells[a][b]` is what row a says of column b; only cells that are certain are there. `names` maps a NIC label to
    its device name, None when it cannot be known. `numa`, `cpus` and `memory_nodes` hold the text of the cell, None
    for N/A, blank or doubtful.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    names: dict[str, str | None]
    cells: dict[str, dict[str, str]]
    cpus: dict[str, str | None]
    numa: dict[str, str | None]
    memory_nodes: dict[str, str | None]
    cpus_trusted: bool = True
    pcie_only: bool = False
    nics_total: int | None = None
    nics_shown: int | None = None
    missing_rows: tuple[str, ...] = ()
    damaged_rows: tuple[str, ...] = ()

    def nic_name(self, label: str) -> str:
        return self.names.get(label) or label

    def level(self, a: str, b: str) -> str | None:
        """Level of a pair: "conflict" when the two rows disagree, None when neither says it."""
        said = {level for level in (self.cells.get(a, {}).get(b), self.cells.get(b, {}).get(a)) if level}
        return said.pop() if len(said) == 1 else CONFLICT if said else None

    def asymmetric(self) -> list[dict[str, str]]:
        pairs = ((a, b) for i, a in enumerate(self.gpus) for b in self.gpus[i + 1 :])
        return [
            {"pair": f"{a}-{b}", f"row_{a}": self.cells[a][b], f"row_{b}": self.cells[b][a]}
            for a, b in pairs
            if self.level(a, b) == CONFLICT
        ]

    def nearest(self, gpu: str) -> tuple[str, list[str]] | None:
        """(best level, all NICs at it) for one GPU; None without a certain NIC cell."""
        near = [(level, nic) for nic in self.nics if (level := self.level(gpu, nic)) and level != CONFLICT]
        if not near:
            return None
        best = min((level for level, _ in near), key=levels.order)
        return best, [self.nic_name(nic) for level, nic in near if level == best]

    def plain(self) -> dict[str, Any]:
        pairs = [(a, b) for i, a in enumerate(self.gpus) for b in self.gpus[i + 1 :]]
        known = {gpu: nearest for gpu in self.gpus if (nearest := self.nearest(gpu))}
        plain: dict[str, Any] = {
            "gpus": list(self.gpus),
            "nics": [{"label": label, "name": self.names.get(label)} for label in self.nics],
            "gpu_pairs": {f"{a}-{b}": level for a, b in pairs if (level := self.level(a, b))},
            "gpu_nic": {
                gpu: {self.nic_name(nic): level for nic in self.nics if (level := self.level(gpu, nic))}
                for gpu in known
            },
            "nearest_nics": {gpu: {"level": level, "nics": nics} for gpu, (level, nics) in known.items()},
            "cpu_affinity": self.cpus,
            "cpu_affinity_trusted": self.cpus_trusted,
            "numa": self.numa,
            "gpu_numa_id": self.memory_nodes,
            "asymmetric_pairs": self.asymmetric(),
            "missing_rows": list(self.missing_rows),
            "damaged_rows": list(self.damaged_rows),
        }
        if self.nics_total is not None:
            plain |= {"nics_total": self.nics_total, "nics_shown": self.nics_shown}
        return plain


class XidEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One Xid line of the kernel log. `gpu_index_in_text` is what the message itself calls the GPU."""

    xid: int
    pci: str
    gpu_index_in_text: int | None = None


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One text. `kind` names the tool; sections that the kind does not have are None."""

    kind: str
    warnings: tuple[Finding, ...] = ()
    quirks: tuple[str, ...] = ()
    matrix: Matrix | None = None
    peer_access: dict[str, dict[str, str]] | None = None
    peer_capability: str = "r"
    nics: tuple[Nic, ...] | None = None
    links: dict[str, NvLinks] | None = None
    models: dict[str, tuple[str, str]] | None = None
    modules: dict[str, bool | None] | None = None
    limits: dict[str, int | bool | None] | None = None
    verdict: str | None = None
    dev: dict[str, Any] | None = None
    fabric: Fabric | None = None
    events: tuple[XidEvent, ...] | None = None

    def plain(self) -> dict[str, Any]:
        """The reading as JSON values, in the words of the golden readings."""
        plain: dict[str, Any] = {"kind": self.kind}
        if self.matrix is not None:
            plain |= self.matrix.plain()
        if self.peer_access is not None:
            word = {"r": "read", "w": "write", "n": "nvlink", "a": "atomics", "p": "pci"}[self.peer_capability]
            plain[f"p2p_{word}"] = _pairs(self.peer_access)
        if self.nics is not None:
            plain["devices"] = [device for nic in self.nics for device in plain_devices(nic)]
        if self.links is not None:
            plain["links"] = {gpu: _plain_links(links) for gpu, links in self.links.items()}
        if self.fabric is not None:
            plain["fabric"] = msgspec.to_builtins(self.fabric)
        if self.events is not None:
            plain["events"] = [msgspec.to_builtins(event) for event in self.events]
        for section in ("modules", "limits", "verdict", "dev"):
            if (value := getattr(self, section)) is not None:
                plain[section] = value
        plain["quirks"] = list(self.quirks)
        plain["warnings"] = [msgspec.to_builtins(finding) for finding in self.warnings]
        return plain


def plain_devices(nic: Nic) -> list[dict[str, Any]]:
    """One flat dict a port; keys that the source does not show are left out."""
    devices = []
    for port in nic.ports:
        gid = port.gid
        device: dict[str, Any] = {
            "name": nic.name,
            "port": port.number,
            "layer": port.layer,
            "state": port.state,
            "phys": port.phys,
            "rate_gbps": port.rate_gbps,
            "part": nic.part or None,
            "active_mtu": port.active_mtu,
            "virtual_function": nic.virtual_function,
            "netdev_state": port.netdev_state.capitalize() if port.netdev_state else None,
            "gid": (gid.kind if gid else "empty") if port.gids is not None else None,
            "gid_index": port.gid_index,
            "pci": nic.pci or None,
            "numa": nic.numa,
        }
        device = {key: value for key, value in device.items() if value is not None}
        if port.netdev is not None:
            device["netdev"] = port.netdev or None
        device["usable"] = port.usable
        device["reasons"] = [finding.code for finding in port.reasons]
        device["cautions"] = [finding.code for finding in port.cautions]
        device["why"] = "; ".join(finding.text for finding in (*port.reasons, *port.cautions))
        devices.append(device)
    return devices


def _plain_links(links: NvLinks) -> dict[str, Any]:
    plain: dict[str, Any] = {"gbps_per_link": links.gbps_per_link}
    if links.active is None:
        plain["seen_links"] = list(links.seen_links)
        return plain
    plain |= {"active": links.active, "inactive": links.inactive if links.active or links.inactive else "all"}
    if links.inactive_links:
        plain["inactive_links"] = list(links.inactive_links)
    return plain


def _pairs(directed: dict[str, dict[str, str]]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for a, row in directed.items():
        for b, word in row.items():
            low, high = sorted((a, b), key=levels.natural)
            key = f"{low}-{high}"
            pairs[key] = word if pairs.get(key, word) == word else CONFLICT
    return pairs
