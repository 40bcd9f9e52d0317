"""Timelines in a terminal: one request event by event, or many as one bar each on a common scale."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BAR = 48
FIXED = 48  # columns that times and names take
FACTS = 40
STYLES = {
    "received": "white", "placed": "white", "queued": "bright_black", "prefill_chunk": "cyan", "offer": "bright_black",
    "grant": "bright_black", "copy_chunk": "yellow", "commit": "yellow", "first_token": "bold magenta",
    "decode_step": "green", "resubmitted": "bold red", "failed": "bold red", "cancelled": "red", "finished": "white",
}  # fmt: skip
STAGES = (("queued", "░", "bright_black"), ("prefill_chunk", "█", "cyan"), ("copy_chunk", "▒", "yellow"),
          ("decode_step", "█", "green"))  # fmt: skip

Timeline = dict[str, Any]


def one(timeline: Timeline, width: int = 160) -> RenderableType:
    """Every event of a request, with its bar."""
    total = _length(timeline)
    bar = min(BAR, max(10, width - FIXED - FACTS))
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title, right in (("at", True), ("for", True), ("where", False), ("event", False), ("", False), ("", False)):
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    table.columns[-1].no_wrap = False  # so that it is this one which makes room
    for event in timeline["events"]:
        style = STYLES.get(event["name"], "white")
        table.add_row(
            _seconds(event["start_s"]),
            _seconds(event["duration_s"]) if event["duration_s"] else "",
            event["where"],
            Text(event["name"], style=style),
            _bar([(event["start_s"], event["duration_s"], "━" if event["duration_s"] else "╹", style)], total, bar),
            Text(_facts(event["attributes"]), style="dim"),
        )
    parts: list[RenderableType] = [_headline(timeline), table]
    parts += [Text(f"{gap['where']}: its part is missing: {gap['reason']}", style="red") for gap in _missing(timeline)]
    return Group(*parts)


def many(timelines: Sequence[Timeline]) -> RenderableType:
    """A row for each request, the oldest first; all bars on one scale, from the first arrival to the last end."""
    timelines = sorted(timelines, key=lambda timeline: timeline["created"])
    if not timelines:
        return Text("no requests yet")
    zero = timelines[0]["created"]
    total = max(timeline["created"] - zero + _length(timeline) for timeline in timelines)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("request", "at", "prompt", "answer", "first", "total", "workers", "", ""):
        table.add_column(title, justify="right" if title in ("prompt", "answer", "first", "total") else "left")
    for timeline in timelines:
        shift = timeline["created"] - zero
        pieces = [
            (shift + event["start_s"], event["duration_s"], mark, style)
            for name, mark, style in STAGES
            for event in timeline["events"]
            if event["name"] == name
        ]
        pieces += [
            (shift + event["start_s"], 0.0, "╹", "bold red")
            for event in timeline["events"]
            if event["name"] in ("failed", "resubmitted", "cancelled")
        ]
        table.add_row(
            timeline["id"],
            time.strftime("%H:%M:%S", time.localtime(timeline["created"])),
            str(timeline["prompt_tokens"]),
            str(timeline["output_tokens"]),
            _seconds(timeline["ttft_s"]),
            _seconds(timeline["e2e_s"]),
            _workers(timeline),
            _bar(pieces, total, BAR),
            Text(timeline["error"] or "", style="red"),
        )
    legend = Text.assemble("scale ", _seconds(total), "   ")
    for (_, mark, style), word in zip(STAGES, ("queued", "prefill", "KV copy", "decode"), strict=True):
        legend.append_text(Text.assemble((mark, style), f" {word}   "))
    gaps = {(gap["where"], gap["reason"]): None for timeline in timelines for gap in _missing(timeline)}
    return Group(table, legend, *(Text(f"{where}: its part is missing: {why}", style="red") for where, why in gaps))


def _bar(pieces: Iterable[tuple[float, float, str, str]], total: float, width: int) -> Text:
    """Later pieces are drawn over earlier ones; each is at least one cell."""
    cells: list[tuple[str, str]] = [(" ", "")] * width
    scale = width / total if total > 0 else 0.0
    for start, length, mark, style in pieces:
        first = min(width - 1, max(0, int(start * scale)))
        last = min(width, max(first + 1, round((start + length) * scale)))
        cells[first:last] = [(mark, style)] * (last - first)
    return Text.assemble(*cells)


def _headline(timeline: Timeline) -> Text:
    text = Text.assemble((timeline["id"], "bold"), f"  {timeline['model']}  {timeline['state']}")
    text.append(
        f"  {timeline['prompt_tokens']} prompt tokens ({timeline['cached_tokens']} cached), "
        f"{timeline['output_tokens']} tokens, first after {_seconds(timeline['ttft_s'])}, "
        f"{_seconds(timeline['e2e_s'])} in all, {_workers(timeline)}"
    )
    if timeline["error"]:
        text.append(f"\n{timeline['error']}", style="red")
    return text


def _workers(timeline: Timeline) -> str:
    prefill, decode = timeline["prefill_worker"], timeline["decode_worker"]
    if prefill is None:
        return "nowhere"
    attempts = f" (attempt {timeline['attempts']})" if timeline["attempts"] > 1 else ""
    return (prefill if prefill == decode else f"{prefill} > {decode}") + attempts


def _missing(timeline: Timeline) -> list[dict[str, str]]:
    return timeline.get("missing", [])


def _length(timeline: Timeline) -> float:
    ends = [event["start_s"] + event["duration_s"] for event in timeline["events"]]
    return max([timeline["e2e_s"] or 0.0, *ends])


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 0.0995:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s"


def _facts(attributes: dict[str, Any]) -> str:
    shown: list[str] = []
    for name, value in attributes.items():
        if value is False or value == "" or name == "peer":
            continue
        if name == "bytes_per_second":
            shown.append(f"{value / 1e9:.2f} GB/s")
        elif name.endswith("_s") and isinstance(value, float):
            shown.append(f"{name.removesuffix('_s').replace('_', ' ')} {_seconds(value)}")
        elif value is True:
            shown.append(name.replace("_", " "))
        else:
            shown.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(shown)
