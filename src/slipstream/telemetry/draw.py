"""Timelines in a terminal: one request event by event, or many as one bar each on a common scale.

Each stage has a mark of its own, so that bars can be read where there is no colour; the line below says which is which.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.telemetry import silence

BAR = 48
FIXED = 48  # columns that times and names take
FACTS = 40
IDLE = 0.05  # of the busy time: the longest stretch without requests that is drawn as it is
COLUMNS = ("request", "at", "prompt", "answer", "first", "total", "workers")
DISPENSABLE = ("workers", "at", "prompt", "answer", "first", "total")  # in this order, where a terminal is narrow
ROOMY = 24  # columns that a bar has before others are left out
STYLES = {
    "received": "white", "placed": "white", "queued": "bright_black", "prefill_chunk": "cyan", "offer": "bright_black",
    "grant": "bright_black", "copy_chunk": "yellow", "commit": "yellow", "first_token": "bold magenta",
    "decode_step": "green", "resubmitted": "bold red", "failed": "bold red", "cancelled": "red", "finished": "white",
    silence.NAME: "bold red",
}  # fmt: skip
STAGES = {  # event: mark, style, word of the legend
    "queued": ("·", "bright_black", "queued"),
    "prefill_chunk": ("█", "cyan", "prefill"),
    "copy_chunk": ("▒", "yellow", "KV copy"),
    "decode_step": ("━", "green", "decode"),
}
TROUBLE = ("failed", "resubmitted", "cancelled")
TROUBLE_MARK = ("!", "bold red", "failed, resubmitted or cancelled")
SILENCE_MARK = ("?", "bold red", silence.NAME)
MARKS = {**STAGES, silence.NAME: SILENCE_MARK}
LONG, MOMENT = "─", "╹"  # marks of other events

Timeline = dict[str, Any]


def one(timeline: Timeline, width: int = 160) -> RenderableType:
    """Every event of a request, with its bar, and between them the stretches in which nothing was heard."""
    total = _length(timeline)
    bar = min(BAR, max(10, width - FIXED - FACTS))
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title, right in (("at", True), ("for", True), ("where", False), ("event", False), ("", False), ("", False)):
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    table.columns[-1].no_wrap = False  # so that it is this one which makes room
    for event in sorted(_all(timeline), key=lambda event: event["start_s"]):
        style = STYLES.get(event["name"], "white")
        table.add_row(
            _seconds(event["start_s"]),
            _seconds(event["duration_s"]) if event["duration_s"] else "",
            Text(_plain(event["where"])),
            Text(_plain(event["name"]), style=style),
            _strip(event, total, bar),
            Text(
                _plain(_heard_of(event) if event["name"] == silence.NAME else _facts(event["attributes"])), style="dim"
            ),
        )
    parts: list[RenderableType] = [_headline(timeline), table]
    return Group(*parts, *(Text(line, style="red") for line in gaps([timeline])))


def _all(timeline: Timeline) -> list[dict[str, Any]]:
    """Its events and its silences, which a front of an earlier version does not tell."""
    return [*timeline["events"], *timeline.get("silences", [])]


def _strip(event: dict[str, Any], total: float, width: int) -> Text:
    """Where an event lies in its request, as one cell at least."""
    first, last = _cells(event["start_s"], event["duration_s"], total, width)
    return Text.assemble(" " * first, (_mark(event) * (last - first), STYLES.get(event["name"], "white")))


def _mark(event: dict[str, Any]) -> str:
    name = event["name"]
    if name in TROUBLE:
        return TROUBLE_MARK[0]
    return MARKS[name][0] if name in MARKS else LONG if event["duration_s"] else MOMENT


def _heard_of(event: dict[str, Any]) -> str:
    """What is known of a stretch in which nothing was heard."""
    placed, reason = event["attributes"].get("placed_s"), event["attributes"].get("reason")
    where = f"placed there at {_seconds(placed)} by the router" if placed is not None else ""
    choice = event["attributes"].get("choice")
    return "; ".join(part for part in (where, reason, f"choice {choice}" if choice is not None else "") if part)


def many(timelines: Sequence[Timeline], width: int = 160) -> RenderableType:
    """A row for each request, the oldest first; all bars on one scale, from the first arrival to the last end.

    Stretches in which no request was under way are cut to a short one. Where a terminal is narrow, columns are left
    out, so that ids and bars stay readable.
    """
    timelines = sorted(timelines, key=lambda timeline: timeline["created"])
    if not timelines:
        return Text("no requests yet")
    scale = _Scale([(timeline["created"], timeline["created"] + _length(timeline)) for timeline in timelines])
    rows = [_row(timeline) for timeline in timelines]
    kept, bar = _fitting(rows, width)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for at in kept:
        right = COLUMNS[at] in ("prompt", "answer", "first", "total")
        table.add_column(COLUMNS[at], justify="right" if right else "left", no_wrap=True, overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("")
    for timeline, row in zip(timelines, rows, strict=True):
        error = Text(_plain(timeline["error"] or ""), style="red")
        table.add_row(*(Text(row[at]) for at in kept), _bar(timeline, scale, bar), error)
    legend = Text.assemble("scale ", _seconds(scale.total), "   ")
    marks = list(STAGES.values())
    if any(event["name"] in TROUBLE for timeline in timelines for event in timeline["events"]):
        marks.append(TROUBLE_MARK)
    if any(timeline.get("silences") for timeline in timelines):
        marks.append(SILENCE_MARK)
    for mark, style, word in marks:
        legend.append_text(Text.assemble((mark, style), f" {word}   "))
    if scale.cut:
        legend.append(f"{_seconds(scale.cut)} without requests are left out")
    return Group(table, legend, *(Text(line, style="red") for line in [*_quiet(timelines), *gaps(timelines)]))


def _quiet(timelines: Sequence[Timeline]) -> list[str]:
    """A line for each place at which nothing was heard of requests: of how many, and of which the longest."""
    found: dict[str, dict[str, float]] = {}
    for timeline in timelines:
        for gap in timeline.get("silences", []):
            of = found.setdefault(gap["where"], {})
            of[timeline["id"]] = max(of.get(timeline["id"], 0.0), gap["duration_s"])
    lines: list[str] = []
    for where, of in found.items():
        name = max(of, key=lambda name: of[name])
        many = f" of {len(of)} requests" if len(of) > 1 else ""
        at_most = "up to " if len(of) > 1 else ""
        lines.append(_plain(f"{where}: {silence.NAME}{many} for {at_most}{_seconds(of[name])} ({name})"))
    return lines


def gaps(timelines: Sequence[Timeline]) -> list[str]:
    """A line for each worker whose part is missing, and why."""
    found = Counter((gap["where"], gap["reason"]) for timeline in timelines for gap in timeline.get("missing", []))
    of = f" of {len(timelines)} requests" if len(timelines) > 1 else ""
    return [
        _plain(f"{where}: its part{f' of {count}{of}' if of else ''} is missing: {why}")
        for (where, why), count in found.items()
    ]


class _Scale:
    """Moments as seconds from the first arrival, without the stretches in which nothing was under way.

    `total` is the length of what is shown, `cut` how much was left out.
    """

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        """`spans` in order of their begin, at least one."""
        busy: list[list[float]] = []
        for begin, end in spans:
            if busy and begin <= busy[-1][1]:
                busy[-1][1] = max(busy[-1][1], end)
            else:
                busy.append([begin, end])
        longest = IDLE * sum(end - begin for begin, end in busy)
        self._spans: list[tuple[float, float, float]] = []  # begin, end, where it is drawn
        self.cut, at, before = 0.0, 0.0, busy[0][0]
        for begin, end in busy:
            shown = min(begin - before, longest)
            self.cut += begin - before - shown
            at += shown
            self._spans.append((begin, end, at))
            at += end - begin
            before = end
        self.total = at

    def __call__(self, moment: float) -> float:
        begin, end, at = next(span for span in reversed(self._spans) if span[0] <= moment or span is self._spans[0])
        return at + min(moment, end) - begin


def _bar(timeline: Timeline, scale: _Scale, width: int) -> Text:
    """In each cell the stage that most of its time went to; trouble is drawn over everything.

    A stage that would be seen nowhere has the cell with most of it, where another one can spare that. Cells that are
    blank then are drawn as queued where a long event lies: it waited for a place, or for the other worker.
    """
    created, least = timeline["created"], silence.least(_length(timeline))
    times: list[dict[str, float]] = [{} for _ in range(width)]
    waits: set[int] = set()
    for event in _all(timeline):
        name, start, seconds = event["name"], scale(created + event["start_s"]), event["duration_s"]
        first, last = _cells(start, seconds, scale.total, width)
        if name in MARKS:
            for cell in range(first, last):
                here = _shared(start, seconds, cell, scale.total / width)
                times[cell][name] = times[cell].get(name, 0.0) + here
        elif seconds > least:
            waits.update(range(first, last))
    cells = [MARKS[name][:2] if name else (" ", "") for name in _winners(times)]
    for cell in waits:
        cells[cell] = STAGES["queued"][:2] if not times[cell] else cells[cell]
    for event in timeline["events"]:
        if event["name"] in TROUBLE:
            cells[_cells(scale(created + event["start_s"]), 0.0, scale.total, width)[0]] = TROUBLE_MARK[:2]
    return Text.assemble(*cells)


def _cells(start: float, seconds: float, total: float, width: int) -> tuple[int, int]:
    """The first cell of a stretch and the one behind its last; it has one at least."""
    scale = width / total if total > 0 else 0.0
    first = min(width - 1, max(0, int(start * scale)))
    return first, min(width, max(first + 1, round((start + seconds) * scale)))


def _shared(start: float, seconds: float, cell: int, cell_s: float) -> float:
    """Seconds of a stretch that lie in a cell; what took no time, or lies there by rounding, counts as next to none."""
    return max(1e-9, min(start + seconds, (cell + 1) * cell_s) - max(start, cell * cell_s))


def _winners(times: Sequence[dict[str, float]]) -> list[str]:
    """Of each cell the stage that is drawn there; of equal ones the later stage."""
    order = list(MARKS)
    drawn = [max(cell, key=lambda name: (cell[name], order.index(name)), default="") for cell in times]
    whole = {name: sum(cell.get(name, 0.0) for cell in times) for name in order}
    for name in sorted(set(order).difference(drawn), key=lambda name: -whole[name]):
        spare = [at for at, cell in enumerate(times) if name in cell and drawn.count(drawn[at]) > 1]
        if spare:
            drawn[max(spare, key=lambda at: times[at][name])] = name
    return drawn


def _row(timeline: Timeline) -> tuple[str, ...]:
    """The cells of COLUMNS."""
    return (
        _plain(timeline["id"]),
        time.strftime("%H:%M:%S", time.localtime(timeline["created"])),
        str(timeline["prompt_tokens"]),
        str(timeline["output_tokens"]),
        _seconds(timeline["ttft_s"]),
        _seconds(timeline["e2e_s"]),
        _workers(timeline),
    )


def _fitting(rows: Sequence[tuple[str, ...]], width: int) -> tuple[list[int], int]:
    """Which columns there is room for, and how long bars are."""
    wide = [max(len(title), *(len(row[at]) for row in rows)) + 2 for at, title in enumerate(COLUMNS)]
    kept = list(range(len(COLUMNS)))
    for least in DISPENSABLE:
        if sum(wide[at] for at in kept) + ROOMY <= width:
            break
        kept.remove(COLUMNS.index(least))
    room = width - sum(wide[at] for at in kept) - 2
    return kept, min(BAR, max(10, room))


def _plain(text: str) -> str:
    """On one line, and without what would steer a terminal: names and errors come from elsewhere."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _headline(timeline: Timeline) -> Text:
    text = Text.assemble((_plain(timeline["id"]), "bold"), _plain(f"  {timeline['model']}  {timeline['state']}"))
    text.append(
        f"  {timeline['prompt_tokens']} prompt tokens ({timeline['cached_tokens']} cached), "
        f"{timeline['output_tokens']} tokens, first after {_seconds(timeline['ttft_s'])}, "
        f"{_seconds(timeline['e2e_s'])} in all, {_workers(timeline)}"
    )
    if timeline["error"]:
        text.append("\n" + _plain(timeline["error"]), style="red")
    return text


def _workers(timeline: Timeline) -> str:
    prefill, decode = timeline["prefill_worker"], timeline["decode_worker"]
    if prefill is None:
        return "nowhere"
    attempts = f" (attempt {timeline['attempts']})" if timeline["attempts"] > 1 else ""
    return _plain(prefill if prefill == decode else f"{prefill} > {decode}") + attempts


def _length(timeline: Timeline) -> float:
    ends = [event["start_s"] + event["duration_s"] for event in _all(timeline)]
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
