"""The right-hand part of a GPU row: CPU affinity, NUMA affinity, GPU NUMA ID.

The three may be blank, run together ("0N/A", "144-1911N/A") or be cut. A value that could be read in two ways is
read in none, unless the other rows or the shape of the CPU list decide; what was decided so is warned about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

CPU, NUMA, MEMORY = "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"
COLUMNS = (CPU, NUMA, MEMORY)

_TOKEN = re.compile(r"N/A|[0-9][0-9,\-]*")
_RANGES = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
_TRUNCATED_SINGLES = 6  # the tool stops a list of single CPUs after so many


@dataclass
class Tail:
    """One row's values by column; None is N/A, blank or doubtful. `problem` says what was wrong, `guess` that a
    value was split out of a run-together token."""

    values: dict[str, str | None]
    problem: str = ""
    blank: bool = False
    fused: bool = False
    guess: bool = False


def expand(ranges: str) -> set[int] | None:
    """CPUs of a list such as "0-23,48-71"; None when it is no ascending list."""
    if not _RANGES.fullmatch(ranges):
        return None
    cpus: set[int] = set()
    last = -1
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        first, end = int(low), int(high or low)
        if first <= last or end < first or (high and len(high) > 1 and high[0] == "0"):
            return None
        cpus.update(range(first, end + 1))
        last = end
    return cpus


def looks_truncated(ranges: str) -> bool:
    """Whether a CPU list is one that the tool has cut at its fixed number of single CPUs."""
    parts = ranges.split(",")
    return len(parts) >= _TRUNCATED_SINGLES and not any("-" in part for part in parts)


def parse(text: str, columns: tuple[str, ...], known: Iterable[str] = ()) -> Tail:
    """The tail `text` of one row under the header's `columns`. `known` are CPU lists of rows that read cleanly."""
    tail = Tail(values=dict.fromkeys(columns))
    rest = _TOKEN.sub(" ", text).strip()
    tokens = _TOKEN.findall(text)
    tail.fused = bool(re.search(r"\dN/A|N/A\d", text))
    if rest:
        tail.problem = f"cannot read {rest!r} behind the cells"
        return tail
    if len(tokens) > len(columns):
        tail.problem = f"{len(tokens)} values under {len(columns)} columns"
        return tail
    if len(tokens) == len(columns):
        _assign(tail, tokens, columns)
    elif set(tokens) <= {"N/A"}:
        tail.blank = True
    else:
        _short(tail, tokens, columns, set(known))
    return tail


def _assign(tail: Tail, tokens: list[str], columns: tuple[str, ...]) -> None:
    for column, token in zip(columns, tokens, strict=True):
        if token == "N/A":
            continue
        valid = re.fullmatch(r"\d+", token) if column == MEMORY else expand(token) is not None
        if valid:
            tail.values[column] = token
        else:
            tail.problem = f"{token!r} is no value for {column}"


def _short(tail: Tail, tokens: list[str], columns: tuple[str, ...], known: set[str]) -> None:
    tail.problem = f"{len(tokens)} values under {len(columns)} columns: {' '.join(tokens)}"
    if columns[0] != CPU:
        return
    if tokens[0] in known:
        tail.values[CPU] = tokens[0]
        return
    closed = columns[-1] == MEMORY and tokens[-1] == "N/A" and len(tokens) == len(columns) - 1
    splits = [split for split in _splits(tokens[0]) if split[0] in known] if known else []
    splits = splits or [split for split in _splits(tokens[0]) if _equal_halves(split[0])]
    if closed and len(splits) == 1:
        tail.values[CPU], tail.values[NUMA] = splits[0]
        tail.fused = tail.guess = True


def _splits(token: str) -> list[tuple[str, str]]:
    """Ways to take the CPU list and the NUMA node apart that were run together."""
    digits = re.search(r"\d+$", token)
    if not digits:
        return []
    cuts = range(digits.start() + 1, len(token))
    pairs = ((token[:cut], token[cut:]) for cut in cuts)
    return [(cpus, node) for cpus, node in pairs if expand(cpus) is not None and (node == "0" or node[0] != "0")]


def _equal_halves(cpus: str) -> bool:
    """Whether all ranges of a list are of one length: cores and their hyperthreads."""
    parts = cpus.split(",")
    lengths = {len(expand(part) or ()) for part in parts}
    return len(parts) > 1 and len(lengths) == 1
