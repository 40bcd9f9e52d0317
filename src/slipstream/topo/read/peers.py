"""The tables of `nvidia-smi topo -p2p`: whether one GPU may read, write or map another's memory.

They are pasted below or instead of the matrix, so they are taken out of the text first.
"""

from __future__ import annotations

import re

from slipstream.topo.read.text import Notes

_STATUS = re.compile(r"OK|CNS|GNS|TNS|NS|U|DR|X")
_COMMAND = re.compile(r"topo\s+-p2p\s+([rwnap])\b")
_ROW = re.compile(r"^\s*(GPU\d+)((?:\s+(?:OK|CNS|GNS|TNS|NS|U|DR|X))+)\s*$")
_HEADER = re.compile(r"^\s*(?:GPU\d+\s*)+$")


def read_peers(lines: list[str], notes: Notes) -> tuple[list[str], dict[str, dict[str, str]] | None, str]:
    """(lines without the peer table, status by ordered pair or None, capability letter)."""
    rows = [i for i, line in enumerate(lines) if (match := _ROW.match(line)) and not _only_self(match.group(2))]
    commands = [match for line in lines if (match := _COMMAND.search(line))]
    if not rows:
        if commands or any(re.match(r"\s*CNS\s*=", line) for line in lines):
            notes.warn("p2p-damaged", "the peer table cannot be read")
        return lines, None, "r"
    notes.quirk("p2p-table")
    head = next((i for i in range(rows[0] - 1, -1, -1) if lines[i].strip()), -1)
    header = lines[head] if head >= 0 and _HEADER.match(lines[head]) else ""
    columns = re.findall(r"GPU\d+", header)
    if not columns:
        notes.warn("p2p-damaged", "the peer table has no header: left out")
    status: dict[str, dict[str, str]] = {}
    for i in rows:
        match = _ROW.match(lines[i])
        label, words = (match.group(1), _STATUS.findall(match.group(2))) if match else ("", [])
        sound = len(words) == len(columns) and label in columns and words[columns.index(label)] == "X"
        if sound:
            status[label] = {b: word for b, word in zip(columns, words, strict=True) if b != label}
        elif columns:
            notes.warn("p2p-damaged", f"row {label} of the peer table does not fit its header: left out")
    rowless = [label for label in columns if label not in status]
    if rowless:
        notes.warn("p2p-damaged", f"the peer table has no sound row for {', '.join(rowless)}")
    gone = {*rows, head} if header else set(rows)
    rest = [line for i, line in enumerate(lines) if i not in gone]
    return rest, status, commands[0].group(1) if commands else "r"


def _only_self(words: str) -> bool:
    return set(words.split()) <= {"X"}
