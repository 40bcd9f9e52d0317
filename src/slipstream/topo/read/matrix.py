"""Reads `nvidia-smi topo -m` (and -mp, and the -p2p tables) as people paste them.

The header gives the column labels by pattern, each row is one label and then exactly as many cell words as there are
columns, whatever stands between them; only what is left behind the cells is the affinity part. A row counts as sound
when its cell number fits and its X stands under its own label: that anchor, the symmetry of the matrix and the NIC
legend are what makes damage show. Cells of an unsound row are taken only as far as the anchor proves them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from slipstream.topo import levels
from slipstream.topo.read import affinity
from slipstream.topo.read.legend import Legend, read_legend
from slipstream.topo.read.matrix_checks import check
from slipstream.topo.read.peers import read_peers
from slipstream.topo.read.reading import CONFLICT, Matrix, Reading
from slipstream.topo.read.text import Notes, Text

_LABEL = re.compile(r"GPU\d+|NIC\d+|mlx\d_(?:bond_)?\d+|(?:hfi1|bnxt_re|irdma|qedr|efa|ib|roce)[a-zA-Z0-9_]*\d")
_CELL = re.compile(r"NV\d+|NODE|SYS|SOC|PHB|PXB|PIX|X")
_HEAD_WORDS = ("CPU", "Affinity", "NUMA", "GPU", "ID")
_FUSED = re.compile(r"(?:NODE|SYS|PHB|PXB|PIX|NV\d+)(?:NODE|SYS|PHB|PXB|PIX|NV|X)")
_MAX_LINKS = 36  # slots that a GPU can have; more is two numbers run together
_CAPPED = re.compile(r"(\d+) NICs found in the topology, only displaying (\d+)")
_END = re.compile(r"^\s*(?:NIC )?Legend\b", re.IGNORECASE)


@dataclass
class Row:
    """One row: its cells in order, and the text behind them."""

    label: str
    cells: list[str]
    tail: str
    fits: bool = False
    fused_cells: bool = False
    fused_tail: bool = False


@dataclass
class Header:
    labels: list[str]
    tail: tuple[str, ...]
    lines: int = 1


@dataclass
class Table:
    header: Header | None = None
    rows: list[Row] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)


def looks_like(text: Text) -> bool:
    rows = sum(bool(re.match(r"\s*GPU\d+\s*(?:X|NV\d+|SYS|NODE|PHB|PXB|PIX)\b", line)) for line in text.lines)
    return rows > 0 or "NICs found in the topology" in text.body or "topo -m" in text.body


def read_matrix(text: Text) -> Reading:
    """One `nvidia-smi topo` text. Warnings name every row, cell or name that could not be taken as it stands."""
    notes = Notes()
    notes.quirks += text.quirks
    lines, peers, capability = read_peers(text.lines, notes)
    table = _read_table(lines, notes)
    legend = read_legend(lines)
    _choose_columns(table, notes)
    cells = _take_cells(table, notes)
    matrix = _assemble(table, cells, legend, lines, notes)
    _check(matrix, table, legend, notes)
    notes.gaps(text)
    return Reading(
        kind="nvidia-smi-topo",
        warnings=tuple(notes.findings),
        quirks=tuple(notes.quirks),
        matrix=matrix,
        peer_access=peers,
        peer_capability=capability,
    )


def _read_table(lines: list[str], notes: Notes) -> Table:
    table = Table()
    for line in lines:
        if _END.match(line):
            break
        if not line.strip():
            continue
        header = _header(line, notes)
        if header and not table.rows:
            _add_header(table, header, notes)
        elif row := _row(line, table.header):
            table.rows.append(row)
        elif table.rows and (more := _continuation(line, table.rows[-1])):
            table.rows[-1] = more
            notes.warn("wrapped", f"the row of {more.label} goes on in a new line: joined")
        elif table.rows or table.header:
            notes.warn("stray-line", f"cannot place this line: {line.strip()[:60]!r}")
    return table


def _add_header(table: Table, header: Header, notes: Notes) -> None:
    if table.header is None:
        table.header = header
        return
    notes.warn("wrapped", "the header goes on in a new line: joined")
    table.header = Header(table.header.labels + header.labels, table.header.tail + header.tail, 2)


def _header(line: str, notes: Notes) -> Header | None:
    """The line as a header, or None when it holds anything but labels and the three known titles."""
    rest = line
    tail = []
    for title in affinity.COLUMNS:
        match = re.search(r"\s*".join(title.split()), rest)
        if match:
            tail.append((match.start(), title))
            if match.start() and not rest[match.start() - 1].isspace():
                notes.quirk("header-fused")
            rest = rest[: match.start()] + " " * len(match.group()) + rest[match.end() :]
    labels: list[str] = []
    leftover = []
    for token in rest.split():
        found = _LABEL.findall(token)
        if "".join(found) == token:
            labels += found
            if len(found) > 1:
                notes.quirk("header-fused")
        else:
            leftover.append(token)
    if not labels and not tail:
        return None
    if any(not any(word.startswith(token) for word in _HEAD_WORDS) for token in leftover):
        return None
    if len(labels) == 1 and not tail and not leftover and not line[:1].isspace():
        return None  # a row that lost all its cells
    if leftover:
        notes.warn("header-damaged", f"cannot read {' '.join(leftover)!r} in the header")
    return Header(labels, tuple(title for _, title in sorted(tail)))


def _row(line: str, header: Header | None) -> Row | None:
    stripped = line.strip()
    named = sorted((label for label in (header.labels if header else ())), key=len, reverse=True)
    label = next((label for label in named if re.match(re.escape(label) + r"(?!\d)", stripped)), None)
    if label is None:
        match = _LABEL.match(stripped)
        if not match:
            return None
        label = match.group()
    rest = stripped[len(label) :]
    cells, tail = _scan(rest)
    if not cells and tail and affinity.parse(tail, affinity.COLUMNS).problem:
        return None
    fused_tail = bool(cells and tail) and rest[: len(rest) - len(tail)] == rest[: len(rest) - len(tail)].rstrip()
    return Row(label, cells, tail, fused_cells=bool(_FUSED.search(rest)), fused_tail=fused_tail)


def _continuation(line: str, row: Row) -> Row | None:
    cells, tail = _scan(line)
    if not cells and not re.fullmatch(r"[\s\dN/A,\-]+", line):
        return None
    if row.tail and cells:
        return None
    return Row(row.label, row.cells + cells, f"{row.tail} {tail}".strip())


def _scan(text: str) -> tuple[list[str], str]:
    """Cell words from the start of `text`, and what stands behind them."""
    cells = []
    position = 0
    while match := _CELL.match(text, _skip(text, position)):
        cells.append("SYS" if match.group() == "SOC" else match.group())
        position = match.end()
    return cells, text[position:].strip()


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _choose_columns(table: Table, notes: Notes) -> None:
    """Columns are the header's labels, unless the rows' own labels explain the rows better."""
    if table.header is None:
        notes.warn("no-header", "no header line: the row labels are taken for the columns")
    header = table.header.labels if table.header else []
    rows = list(dict.fromkeys(row.label for row in table.rows))
    _split_last_cells(table, len(header) or len(rows))
    if _fitting(table, rows) > _fitting(table, header):
        if table.header is not None:
            notes.warn("header-damaged", f"the header has {len(header)} columns, the rows have {len(rows)} cells")
        table.columns = rows
    else:
        table.columns = header
    duplicates = {label for label in table.columns if table.columns.count(label) > 1}
    if duplicates:
        notes.warn(
            "header-damaged", f"the header names {', '.join(sorted(duplicates))} twice: those cells are left out"
        )
    for row in table.rows:
        row.fits = _row_fits(row, table.columns)


def _row_fits(row: Row, columns: list[str]) -> bool:
    if len(row.cells) != len(columns) or columns.count(row.label) > 1:
        return False
    crosses = [i for i, cell in enumerate(row.cells) if cell == levels.SELF]
    return crosses == ([columns.index(row.label)] if row.label in columns else [])


def _fitting(table: Table, columns: list[str]) -> int:
    return sum(_row_fits(row, columns) for row in table.rows)


def _split_last_cells(table: Table, count: int) -> None:
    """Takes the CPU list off a last NVLink cell that it was run together with ("NV40-23")."""
    for row in table.rows:
        last = row.cells[-1] if row.cells else ""
        links = levels.nvlinks(last)
        if len(row.cells) != count or not links or not (links > _MAX_LINKS or row.tail[:1] in ("-", ",")):
            continue
        seen = {cell for other in table.rows for cell in other.cells[:-1]}
        splits = [cut for cut in range(3, len(last)) if last[:cut] in seen]
        if len(splits) == 1:
            row.cells[-1], row.tail = last[: splits[0]], last[splits[0] :] + row.tail
        else:
            row.cells[-1] = levels.UNKNOWN


def _take_cells(table: Table, notes: Notes) -> dict[str, dict[str, str]]:
    columns = table.columns
    cells: dict[str, dict[str, str]] = {}
    for row in table.rows:
        if row.label in cells:
            notes.warn("duplicate-row", f"{row.label} has two rows: the second is left out")
            row.fits = False
            continue
        taken = dict(zip(columns, row.cells, strict=True)) if row.fits else _anchored(row, columns)
        taken = {name: cell for name, cell in taken.items() if columns.count(name) == 1}
        if row.label not in columns and columns:
            notes.warn("unknown-row", f"{row.label} has a row and no column")
        if not row.fits:
            what = f"{len(row.cells)} cells under {len(columns)} columns"
            notes.warn("row-damaged", f"row {row.label}: {what}, or X not under its own label: only sure cells taken")
        if levels.UNKNOWN in taken.values():
            notes.warn("fused-tail", f"row {row.label}: the last cell and the CPU list cannot be told apart")
        cells[row.label] = {
            name: cell
            for name, cell in taken.items()
            if cell not in (levels.SELF, levels.UNKNOWN) and name != row.label
        }
    return cells


def _anchored(row: Row, columns: list[str]) -> dict[str, str]:
    """Cells of a short row that its X proves: those before it, when X stands where it should."""
    if row.label not in columns or columns.count(row.label) > 1:
        return {}
    index = columns.index(row.label)
    crosses = [i for i, cell in enumerate(row.cells) if cell == levels.SELF]
    return dict(zip(columns[:index], row.cells[:index], strict=True)) if crosses == [index] else {}


def _assemble(table: Table, cells: dict, legend: Legend, lines: list[str], notes: Notes) -> Matrix:
    labels = list(dict.fromkeys([*table.columns, *(row.label for row in table.rows)]))
    gpus = [label for label in labels if label.startswith("GPU")]
    nics = [label for label in labels if not label.startswith("GPU")]
    if any(gpu not in table.columns for gpu in gpus):
        gpus.sort(key=levels.natural)
    tails = _tails(table, gpus, notes)
    with_rows = [gpu for gpu in gpus if gpu in tails]
    capped = next((match for line in lines if (match := _CAPPED.search(line))), None)
    if capped:
        notes.warn("nic-count-capped", f"{capped[1]} NICs exist and {capped[2]} are shown: the near one may be hidden")
    if any("topo -mp" in line or "topo -p -m" in line for line in lines):
        notes.warn("topo-mp", "the -mp form shows PCIe paths only: it says nothing about NVLink")
    return Matrix(
        gpus=tuple(gpus),
        nics=tuple(nics),
        names={nic: legend.name_of(nic) for nic in nics},
        cells=cells,
        cpus={gpu: tails[gpu].values.get(affinity.CPU) for gpu in with_rows},
        numa={gpu: tails[gpu].values.get(affinity.NUMA) for gpu in with_rows},
        memory_nodes={gpu: tails[gpu].values.get(affinity.MEMORY) for gpu in with_rows},
        cpus_trusted=not any(affinity.looks_truncated(tails[gpu].values.get(affinity.CPU) or "") for gpu in with_rows),
        pcie_only="topo-mp" in notes.quirks,
        nics_total=int(capped[1]) if capped else None,
        nics_shown=int(capped[2]) if capped else None,
        missing_rows=tuple(gpu for gpu in gpus if gpu not in cells),
        damaged_rows=tuple(row.label for row in table.rows if not row.fits),
    )


def _tails(table: Table, gpus: list[str], notes: Notes) -> dict[str, affinity.Tail]:
    columns = table.header.tail if table.header else affinity.COLUMNS
    rows = {row.label: row for row in reversed(table.rows) if row.label in gpus}
    first = {label: affinity.parse(row.tail, columns) for label, row in rows.items()}
    clean = {tail.values.get(affinity.CPU) for tail in first.values() if not tail.problem} - {None}
    tails = {}
    for label in gpus:
        if label not in rows:
            continue
        tail = affinity.parse(rows[label].tail, columns, {cpus for cpus in clean if cpus})
        tails[label] = tail
        if tail.fused:
            notes.quirk("fused-tail")
        if tail.blank:
            notes.warn("blank-affinity", "affinity cells are blank: the container's cpuset or a guest hides them")
        if tail.problem:
            taken = "; split by the shape of the CPU list" if tail.guess else "; left out"
            notes.warn("tail-damaged", f"row {label}, affinity part: {tail.problem}{taken}")
    return tails


def _check(matrix: Matrix, table: Table, legend: Legend, notes: Notes) -> None:
    if not matrix.gpus:
        notes.warn("no-gpus", "no GPU row found")
    if any(row.fused_cells for row in table.rows):
        notes.quirk("fused-cells")
    if any(row.fused_tail for row in table.rows):
        notes.quirk("fused-tail")
    check(matrix, legend, table.header.tail if table.header else (), notes)
    if CONFLICT in {matrix.level(a, b) for a in matrix.cells for b in matrix.cells[a]}:
        notes.quirk("asymmetric-matrix")
