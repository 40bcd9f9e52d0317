"""What the parts of a topology matrix must agree on, and the warnings when they do not.

Both cells of a pair say the same, labels count up from 0 without gaps, the legend names exactly the NIC columns in
natural order, CPU lists are equal or disjoint and go with one NUMA node each. None of it changes the reading; it is
how damage that parses shows itself.
"""

from __future__ import annotations

import re
from collections import Counter

from slipstream.topo import levels
from slipstream.topo.read import affinity
from slipstream.topo.read.legend import Legend
from slipstream.topo.read.reading import CONFLICT, Matrix
from slipstream.topo.read.text import Notes


def check(matrix: Matrix, legend: Legend, tail: tuple[str, ...], notes: Notes) -> None:
    _pairs(matrix, notes)
    _labels(matrix, notes)
    _legend(matrix, legend, notes)
    _affinity(matrix, tail, notes)
    _links(matrix, notes)


def _pairs(matrix: Matrix, notes: Notes) -> None:
    names = [*matrix.gpus, *matrix.nics]
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            if matrix.level(a, b) == CONFLICT:
                said = f"row {a} says {matrix.cells[a][b]}, row {b} says {matrix.cells[b][a]}"
                notes.warn("asymmetric-matrix", f"{a} and {b}: {said}: do not plan on this pair")
    if matrix.missing_rows:
        rows = ", ".join(matrix.missing_rows)
        notes.warn("cut-off", f"no rows for {rows}: their pairs are known from other rows only")
    missing = [nic for nic in matrix.nics if nic not in matrix.cells]
    if missing and len(missing) < len(matrix.nics):
        notes.warn("nic-rows-missing", f"no rows for {', '.join(missing)}")
    elif missing and matrix.nics:
        notes.warn("no-nic-rows", "NIC columns without NIC rows: the table is not whole, a lost column would not show")


def _labels(matrix: Matrix, notes: Notes) -> None:
    for kind, labels in (("GPU", matrix.gpus), ("NIC", [nic for nic in matrix.nics if nic.startswith("NIC")])):
        numbers = [int(label[3:]) for label in labels]
        if numbers and numbers != list(range(len(numbers))):
            notes.warn("labels-with-gaps", f"{kind} labels do not count up from 0: {', '.join(labels)}")


def _legend(matrix: Matrix, legend: Legend, notes: Notes) -> None:
    labelled = [nic for nic in matrix.nics if nic.startswith("NIC")]
    if any(not nic.startswith("NIC") for nic in matrix.nics):
        notes.quirk("old-nic-columns")
    if labelled and not legend.shown:
        notes.warn("no-nic-legend", "no NIC legend: device names are not known")
        return
    if legend.corrupt:
        notes.warn("legend-corrupt", f"the legend has no device name for {', '.join(dict.fromkeys(legend.corrupt))}")
    if legend.shared:
        notes.warn("legend-damaged", f"the legend gives one name to {', '.join(dict.fromkeys(legend.shared))}")
    missing = [nic for nic in labelled if nic not in legend.entries]
    extra = [label for label in legend.entries if label not in labelled]
    if missing or extra:
        what = f"without a legend line: {', '.join(missing) or '-'}; without a column: {', '.join(extra) or '-'}"
        notes.warn("legend-damaged", f"legend and columns differ; {what}")
    names = [name for nic in labelled if (name := matrix.names.get(nic))]
    if names != sorted(names, key=levels.natural):
        notes.warn("legend-order", "device names of the legend are not in order: one may be cut or misplaced")
    if any("bond" in name for name in names):
        notes.quirk("bond-nics")
    numbers = [int(digits.group()) for name in names if (digits := re.search(r"(?<=mlx5_)\d+$", name))]
    if numbers and numbers != list(range(len(numbers))):
        notes.quirk("legend-not-contiguous")


def _affinity(matrix: Matrix, tail: tuple[str, ...], notes: Notes) -> None:
    lists = {cpus for cpus in matrix.cpus.values() if cpus}
    sets = {cpus: expanded for cpus in lists if (expanded := affinity.expand(cpus))}
    overlapping = [a for a in lists for b in lists if a != b and sets.get(a, set()) & sets.get(b, set())]
    if overlapping:
        notes.warn("cpu-lists-overlap", f"CPU lists overlap without being equal: {', '.join(sorted(overlapping))}")
    nodes: dict[str, set[str]] = {}
    for gpu, cpus in matrix.cpus.items():
        if cpus and (node := matrix.numa.get(gpu)):
            nodes.setdefault(cpus, set()).add(node)
    if any(len(found) > 1 for found in nodes.values()):
        notes.warn("numa-differs", "GPUs with the same CPU list have different NUMA nodes")
    if not matrix.cpus_trusted:
        notes.warn("truncated-cpu-list", "the tool has cut a CPU list at its fixed length: do not bind to it")
    if tail and tail not in ((affinity.CPU,), (affinity.CPU, affinity.NUMA), affinity.COLUMNS):
        notes.warn("header-damaged", f"affinity columns are {', '.join(tail)}: one is missing or misplaced")
    if not tail:
        notes.warn("header-damaged", "the header has no affinity columns")
    if tail == affinity.COLUMNS[:1] and not any(not nic.startswith("NIC") for nic in matrix.nics):
        notes.warn("header-short", "the header ends at CPU Affinity: an old driver, or lines cut at one width")
    if tail == affinity.COLUMNS[:2]:
        notes.quirk("no-gpu-numa-id-column")
    if tail == affinity.COLUMNS[:1]:
        notes.quirk("no-numa-column")
    _nodes(matrix, notes)


def _nodes(matrix: Matrix, notes: Notes) -> None:
    memory = [node for node in matrix.memory_nodes.values() if node]
    if memory:
        notes.quirk("gpu-numa-id-set")
        if len(set(memory)) != len(memory) or set(memory) & {node for node in matrix.numa.values() if node}:
            notes.warn("memory-nodes", f"GPU NUMA IDs {', '.join(memory)} are not distinct memory nodes")
    if any(node and not node.isdigit() for node in matrix.numa.values()):
        notes.quirk("multi-node-affinity")
    if len({node for node in matrix.numa.values() if node}) > 2:
        notes.quirk("many-numa-nodes")
    if len(matrix.gpus) == 1:
        notes.quirk("single-gpu")
    if any(matrix.cpus.get(gpu) and node is None for gpu, node in matrix.numa.items()):
        notes.quirk("numa-na")


def _links(matrix: Matrix, notes: Notes) -> None:
    pairs = [(a, b) for i, a in enumerate(matrix.gpus) for b in matrix.gpus[i + 1 :]]
    said = [level for a, b in pairs if (level := matrix.level(a, b))]
    counts = Counter(level for level in said if levels.nvlinks(level))
    if counts and sum(counts.values()) < len(said):
        notes.quirk("partial-nvlink")
    if len(counts) > 1:
        notes.quirk("link-count-uneven")
