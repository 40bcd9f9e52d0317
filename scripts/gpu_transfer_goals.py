"""Goals of KV transfer, and how the results of `gpu_transfer.py`'s steps compare with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_figures import Figures

PACED = "134 MB each"
SCATTERED_GBPS, BLOCK_GBPS = 360.0, 390.0
HANDOFF_MS = {1024: 0.5, 8192: 3.0}
EXPOSED_MS = 0.3
SLOWER_PERCENT = 3.0
STAGED_GBPS = {"shm": 40.0, "tcp": 6.0}
STAGED_FROM = 128 << 10  # the goal of shm is for pages of this size and more
PEERS = ("nixl", "mooncake")


def judge(step: str, folder: Path, one_card: bool = False) -> None:
    """Says how the results that a step left compare with the goals; nothing of a step without any.

    `one_card`: of two processes that share one, for which there are no goals.
    """
    read: dict[str, tuple[str, Callable[[Any, Figures], None]]] = {
        "handoff": ("handoff.json", handoff),
        "exposed": ("exposed.json", exposed),
        "table": ("table.json", table),
        "flight": ("flight.json", flight),
        "peers": ("peers.json", peers),
        "packages": ("packages.json", packages),
        "interference": ("interference.jsonl", interference),
        "paced": ("interference.jsonl", interference),
    }
    if step not in read:
        return
    name, judged = read[step]
    path = folder / name
    figures = Figures(folder, step, one_card)
    if not path.exists():
        figures.add(f"{step}: no results", None)
        return
    text = path.read_text()
    judged([json.loads(line) for line in text.splitlines()] if name.endswith("jsonl") else json.loads(text), figures)


def handoff(rows: list[dict[str, Any]], figures: Figures) -> None:
    for row in rows:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in row["parts_ms"].items())
        name = f"{row['tokens']} tokens x {row['under_way']}"
        if row["under_way"] == 1:
            note = f"best {row['best_ms']:.2f}, p90 {row['p90_ms']:.2f}; {parts}"
            figures.add(f"handoff of {name}", row["whole_ms"], "ms", most=HANDOFF_MS.get(row["tokens"]), note=note)
        else:
            figures.add(f"handoffs of {name} at once", row["gbps"], "GB/s", least=SCATTERED_GBPS)


def exposed(rows: list[dict[str, Any]], figures: Figures) -> None:
    for row in rows:
        name = f"exposed behind the computation, {row['tokens']} tokens in chunks of 1024"
        figures.add(name, row["exposed_ms"], "ms", most=EXPOSED_MS)


def cell(row: dict[str, Any]) -> str:
    size = "block" if row["contiguous"] else f"{row['page'] >> 10} KiB"
    return f"{row['engine']} {size} {row['direction']}"


def rate(row: dict[str, Any]) -> float | None:
    return None if row.get("problem") else row.get("gbps_many") or row.get("gbps")


def own(rows: list[dict[str, Any]], figures: Figures, engine: str, *, from_page: int = 0) -> None:
    mine = [row for row in rows if row["engine"] == engine]
    if not mine:
        figures.add(f"{engine}: no results", None)
    for row in mine:
        least: float | None = BLOCK_GBPS if row["contiguous"] else SCATTERED_GBPS
        if engine in STAGED_GBPS:
            least = STAGED_GBPS[engine] if row["page"] >= from_page else None
        note = row.get("problem") or ("" if row.get("verified") else "contents NOT verified")
        figures.add(cell(row), rate(row), "GB/s", least=least, note=note[:200])


def table(report: dict[str, Any], figures: Figures) -> None:
    own(report["rows"], figures, "cuda_ipc")
    for row in report["rows"]:
        if row["engine"] == "raw":
            figures.add(cell(row), rate(row), "GB/s")


def flight(report: dict[str, Any], figures: Figures) -> None:
    for row in report["rows"]:
        figures.add(f"64 batches of 16 MiB, {cell(row)}", rate(row), "GB/s", least=SCATTERED_GBPS)


def peers(report: dict[str, Any], figures: Figures) -> None:
    """The packages' figures, and in how many cells any of them is ahead of cuda_ipc."""
    table(report, figures)
    ours = {
        (row["page"], row["contiguous"], row["direction"]): row for row in report["rows"] if row["engine"] == "cuda_ipc"
    }
    compared, behind = 0, []
    for row in report["rows"]:
        if not row["engine"].startswith(PEERS):
            continue
        figures.add(cell(row), rate(row), "GB/s", note=row.get("problem", "")[:200])
        mine = ours.get((row["page"], row["contiguous"], row["direction"]))
        if mine and rate(row) is not None and not mine.get("problem"):
            compared += 1
            if (rate(row) or 0) > (rate(mine) or 0) or row.get("gbps", 0) > mine.get("gbps", 0):
                behind.append(cell(row))
    note = f"of {compared} compared: {', '.join(behind)}" if behind else f"of {compared} compared"
    figures.add(
        "cells in which a package is ahead of cuda_ipc", len(behind) if compared else None, "", most=0, note=note
    )


def packages(report: dict[str, Any], figures: Figures) -> None:
    if not report["rows"]:
        figures.add("no results", None)
    for engine in dict.fromkeys(row["engine"] for row in report["rows"]):
        if engine in STAGED_GBPS:
            own(report["rows"], figures, engine, from_page=STAGED_FROM)
            continue
        for row in report["rows"]:
            if row["engine"] == engine:
                figures.add(cell(row), rate(row), "GB/s", note=row.get("problem", "")[:200])


def interference(rows: list[dict[str, Any]], figures: Figures) -> None:
    """Of handoffs at intervals, and of the default number of programs without a pause, each loop on its own."""
    for row in rows:
        paced = PACED in row.get("way", "")
        for loop, percent in row.get("slower_percent", {}).items():
            name = f"{row['way']}, {row['direction']}, {loop} slower"
            figures.add(name, percent, "%", most=SLOWER_PERCENT if paced else None, note=f"{row['gbps'][loop]} GB/s")
