"""Damaged texts: a reading may lose facts or be wrong only with a warning that the whole text does not give.

Each example takes a posted text, damages it as terminals, mail and hasty copying do, and compares the facts of the
two readings. Damage that leaves no trace even for a person (the last digit of a rate gone, in the middle of a text)
is left out for key-value texts, where lines carry no redundancy; the matrix gets all of it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit import topo_damage
from tests.unit.topo_damage import Damage, damaged

from slipstream.errors import ConfigError
from slipstream.topo.read import KINDS, Reading
from slipstream.topo.read.text import clean

FIXTURES = Path(__file__).parent.parent / "fixtures" / "topology"
ROWS = [json.loads(line) for line in (FIXTURES / "readings.jsonl").read_text().splitlines()]
SMALL = 5000  # bytes: larger tables only repeat what smaller ones have
LIST_KINDS = (
    "rdma-link",
    "ibdev2netdev",
    "show_gids",
    "ibv_devinfo",
    "ibv_devinfo-v",
    "ibstat",
    "ibstatus",
    "sysfs-tree",
)
ONE_VALUE = ("ulimit-l", "sglang-ulimit-soft")  # a number alone says nothing of what is missing


def files(*kinds: str) -> list[str]:
    return sorted(row["file"] for row in ROWS if row["kind"] in kinds and (FIXTURES / row["file"]).stat().st_size)


def small(names: list[str]) -> list[str]:
    return [name for name in names if (FIXTURES / name).stat().st_size < SMALL]


ALL_MATRICES = files("nvidia-smi-topo")
ALL_LISTS = [name for name in files(*LIST_KINDS) if next(row for row in ROWS if row["file"] == name).get("devices")]
MATRICES, LISTS = small(ALL_MATRICES), small(ALL_LISTS)
PLAIN = files("nvidia-smi-nvlink-status", "nvidia-smi-q-fabric", "ls-dev-infiniband", "lsmod", "ulimit-a", "dmesg")


@cache
def load(name: str) -> str:
    with open(FIXTURES / name, newline="", encoding="utf-8", errors="replace") as file:
        return file.read()


def read_as(name: str, raw: str) -> Reading | None:
    """Reads `raw` with the reader of the file it came from; None: even that reader sees nothing of its kind."""
    kind = max(
        (kind for kind in KINDS if name.startswith(kind.prefixes)),
        key=lambda kind: len(kind.prefixes[0]),
        default=KINDS[0],
    )
    if name.endswith(".tsv"):
        kind = KINDS[0]
    elif name == "pd_node_rdma_ports.txt":
        kind = next(kind for kind in KINDS if kind.name == "rdma link")
    text = clean(raw)
    return kind.read(text) if kind.looks_like(text) else None


def facts(reading: Reading) -> dict[tuple, object]:
    """All single facts of a reading that are known."""
    found: dict[tuple, object] = {}
    if reading.matrix is not None:
        matrix = reading.matrix
        labels = [*matrix.gpus, *matrix.nics]
        for i, a in enumerate(labels):
            found[("label", a)] = True
            for b in labels[i + 1 :]:
                found[("level", *sorted((a, b)))] = matrix.level(a, b)
        for what in ("cpus", "numa", "memory_nodes", "names"):
            for label, value in getattr(matrix, what).items():
                found[(what, label)] = value
    for a, row in (reading.peer_access or {}).items():
        found |= {("peer", a, b): word for b, word in row.items()}
    for nic in reading.nics or ():
        for port in nic.ports:
            for field in ("state", "phys", "layer", "rate_gbps", "netdev", "netdev_state", "gid_index", "usable"):
                found[(nic.name, port.number, field)] = getattr(port, field)
            if port.gids is not None:
                found[(nic.name, port.number, "gids")] = tuple((gid.index, gid.value, gid.netdev) for gid in port.gids)
    found |= host_facts(reading)
    return {key: value for key, value in found.items() if value is not None}


def host_facts(reading: Reading) -> dict[tuple, object]:
    """Those of texts that are no table of devices. Names of models are free text, and show no damage."""
    found: dict[tuple, object] = {("verdict",): reading.verdict}
    for gpu, links in (reading.links or {}).items():
        shown = (links.active, links.inactive, links.gbps_per_link, links.seen_links)
        found |= {("links", gpu, number): value for number, value in enumerate(shown)}
    found |= {("uuid", gpu): uuid or None for gpu, (_, uuid) in (reading.models or {}).items()}
    for section in ("modules", "limits", "dev"):
        found |= {(section, key): repr(value) for key, value in (getattr(reading, section) or {}).items()}
    if reading.fabric is not None:
        found |= {("fabric", key): value for key, value in msgspec.to_builtins(reading.fabric).items()}
    for number, event in enumerate(reading.events or ()):
        found |= {("event", number, key): value for key, value in msgspec.to_builtins(event).items()}
    return found


@cache
def undamaged(name: str) -> tuple[Reading, dict[tuple, object]]:
    reading = read_as(name, load(name))
    assert reading is not None
    return reading, facts(reading)


def check(name: str, damaged: str, kinds: Sequence[str] = ()) -> None:
    whole, before = undamaged(name)
    try:
        reading = read_as(name, damaged)
    except ConfigError:
        return
    if reading is None:
        return  # nobody can take it for this kind any more: nothing is read, and the command refuses the text
    new = set(reading.warnings) - set(whole.warnings)
    new |= {finding for finding in reading.warnings if finding.code in ("no-nic-rows", "elided")}  # cannot be checked
    after = facts(reading)
    wrong = {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}
    lost = {key: before[key] for key in before.keys() - after.keys()}
    if "no-numa-column" in reading.quirks:  # as of an old driver: a cut before that column leaves no other trace
        lost = {key: value for key, value in lost.items() if key[0] != "numa"}
    if whole.matrix is None and whole.nics:  # a device that is gone with all its lines leaves no trace
        left = {part for key in after for part in key if isinstance(part, str)}
        lost = {key: value for key, value in lost.items() if {p for p in key if _is_device(p)} <= left}
    assert not (wrong or lost) or new, f"{name}, {kinds}: wrong {wrong}, lost {lost}, and no new warning"


def _is_device(part: object) -> bool:
    return isinstance(part, str) and bool(re.search(r"\d", part)) and part not in ("rate_gbps",)


def example(name: str, seed: int, kinds: dict[str, Damage]) -> None:
    text, names = damaged(load(name), seed, kinds)
    check(name, text, names)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.sampled_from(MATRICES), st.integers(0, 2**32))
def test_a_damaged_matrix_is_never_wrong_without_a_warning(name: str, seed: int) -> None:
    example(name, seed, topo_damage.MATRICES)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.sampled_from(LISTS), st.integers(0, 2**32))
def test_a_damaged_list_is_never_wrong_without_a_warning(name: str, seed: int) -> None:
    example(name, seed, topo_damage.LISTS)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(PLAIN), st.integers(0, 2**32))
def test_a_damaged_text_of_a_host_is_never_wrong_without_a_warning(name: str, seed: int) -> None:
    example(name, seed, topo_damage.PLAIN)


@pytest.mark.parametrize("name", [row["file"] for row in ROWS if row["kind"] not in ONE_VALUE])
def test_every_kind_of_damage_once_a_text(name: str) -> None:
    """Each fixture, the largest too, with each kind of damage that leaves a trace in it."""
    raw = load(name)
    if not raw.strip() or read_as(name, raw) is None:
        return
    kinds = (
        topo_damage.MATRICES if name in ALL_MATRICES else topo_damage.LISTS if name in ALL_LISTS else topo_damage.PLAIN
    )
    for number, (kind, change) in enumerate(kinds.items()):
        check(name, change(raw, random.Random(number)), [kind])
