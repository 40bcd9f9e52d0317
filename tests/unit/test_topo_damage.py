"""Damaged texts: a reading may lose facts or be wrong only with a warning that the whole text does not give.

Each example takes a posted text, damages it as terminals, mail and hasty copying do, and compares the facts of the
two readings. Damage that leaves no trace even for a person (the last digit of a rate gone, in the middle of a text)
is left out for key-value texts, where lines carry no redundancy; the matrix gets all of it.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.topo.read import KINDS, Reading
from slipstream.topo.read.text import clean

FIXTURES = Path(__file__).parent.parent / "fixtures" / "topology"
ROWS = [json.loads(line) for line in (FIXTURES / "readings.jsonl").read_text().splitlines()]
SMALL = 5000  # bytes: larger tables only repeat what smaller ones have
MATRICES = sorted(
    row["file"] for row in ROWS if row["kind"] == "nvidia-smi-topo" and (FIXTURES / row["file"]).stat().st_size < SMALL
)
LISTS = sorted(
    row["file"]
    for row in ROWS
    if row["kind"] in ("rdma-link", "ibdev2netdev", "show_gids", "ibv_devinfo", "ibstat", "ibstatus", "sysfs-tree")
    and 0 < (FIXTURES / row["file"]).stat().st_size < SMALL
    and row.get("devices")
)
ESCAPES = ("\x1b[4m", "\x1b[0m", "\x1b[1;31m", "\ufffd[4m", "\x1b[K", "\r")


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
    return {key: value for key, value in found.items() if value is not None}


def check(name: str, damaged: str) -> None:
    raw = load(name)
    whole = read_as(name, raw)
    assert whole is not None
    try:
        reading = read_as(name, damaged)
    except ConfigError:
        return
    if reading is None:
        return  # nobody can take it for this kind any more: nothing is read, and the command refuses the text
    new = set(reading.warnings) - set(whole.warnings)
    new |= {finding for finding in reading.warnings if finding.code == "no-nic-rows"}  # says: cannot be checked
    before, after = facts(whole), facts(reading)
    wrong = {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}
    lost = {key: before[key] for key in before.keys() - after.keys()}
    if whole.matrix is None:  # a device that is gone with all its lines leaves no trace
        left = {part for key in after for part in key if isinstance(part, str)}
        lost = {key: value for key, value in lost.items() if {p for p in key if _is_device(p)} <= left}
    assert not (wrong or lost) or new, f"{name}: wrong {wrong}, lost {lost}, and no new warning"


def _is_device(part: object) -> bool:
    return isinstance(part, str) and bool(re.search(r"\d", part)) and part not in ("rate_gbps",)


def body(lines: list[str]) -> list[int]:
    """Lines of the table or list itself: the legend of the words is no data."""
    return [i for i, line in enumerate(lines) if line.strip() and "Connection" not in line and "= Self" not in line]


def drop_field(line: str, index: int) -> str:
    fields = list(re.finditer(r"\S+\s*", line))
    if index >= len(fields):
        return line
    return line[: fields[index].start()] + line[fields[index].end() :]


def join_fields(line: str, index: int) -> str:
    gaps = list(re.finditer(r"(?<=\S)[ \t]+(?=\S)", line))
    return line if index >= len(gaps) else line[: gaps[index].start()] + line[gaps[index].end() :]


def damage(raw: str, seed: int, matrix: bool) -> str:
    """One to three kinds of damage at places that `seed` decides."""
    chance = random.Random(seed)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        lines = raw.split("\n")
        places = body(lines)
        if not places:
            return raw
        at = chance.choice(places)
        fields = max(1, len(lines[at].split()))
        kinds = ["join fields", "join lines", "cut text", "escape", "drop field everywhere"]
        kinds += ["cut line", "drop field", "drop line", "wrap", "join everywhere", "cut at width"] if matrix else []
        kind = chance.choice(kinds)
        if kind == "join fields":
            lines[at] = join_fields(lines[at], chance.randrange(fields))
        elif kind == "join lines":
            lines[at : at + 2] = ["".join(lines[at : at + 2])]
        elif kind == "cut text":
            return raw[: chance.randrange(1, len(raw))].rstrip("\n")  # whole lines gone leave no trace in a list
        elif kind == "escape":
            position = chance.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:position] + chance.choice(ESCAPES) + lines[at][position:]
        elif kind == "drop field everywhere":
            index = chance.randrange(fields)
            lines = [drop_field(line, index) if i in places else line for i, line in enumerate(lines)]
        elif kind == "cut line":
            lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
        elif kind == "drop field":
            lines[at] = drop_field(lines[at], chance.randrange(fields))
        elif kind == "drop line":
            del lines[at]
        elif kind == "wrap":
            width = chance.randrange(20, 120)
            lines = [
                part for line in lines for part in (line[i : i + width] for i in range(0, max(1, len(line)), width))
            ]
        elif kind == "join everywhere":
            index = chance.randrange(fields)
            lines = [join_fields(line, index) if i in places else line for i, line in enumerate(lines)]
        elif kind == "cut at width":
            width = chance.randrange(10, 120)
            lines = [line[:width] for line in lines]
        raw = "\n".join(lines)
    return raw


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(MATRICES), st.integers(0, 2**32))
def test_a_damaged_matrix_is_never_wrong_without_a_warning(name: str, seed: int) -> None:
    check(name, damage(load(name), seed, matrix=True))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(LISTS), st.integers(0, 2**32))
def test_a_damaged_list_is_never_wrong_without_a_warning(name: str, seed: int) -> None:
    check(name, damage(load(name), seed, matrix=False))
