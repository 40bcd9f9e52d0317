"""A diagnosis as text for people and as JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import msgspec

from slipstream.doctor.checks import GROUPS
from slipstream.doctor.run import Diagnosis
from slipstream.doctor.verdict import Result

_WIDTH = 110
_MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "not applicable": "-", "not checked": "?"}


def text(found: Diagnosis, everything: bool = False) -> str:
    """Causes with remedies, their effects below them, then one line a group (or a check, with `everything`)."""
    parts = [f"{_where(found)}. {found.handoff}"]
    parts += [_cause(found, result) for result in found.causes]
    parts.append(_every_check(found.results) if everything else _groups(found.results))
    parts.append(_summary(found))
    return "\n\n".join(parts)


def _where(found: Diagnosis) -> str:
    return {"host": "On the host", "container": "In a container", "pod": "In a pod"}[found.place]


def _cause(found: Diagnosis, result: Result) -> str:
    lines = [f"{_MARKS[result.status]}  {result.title}  [{result.id}]"]
    for name in ("seen", "wanted", "why", "remedy"):
        if value := getattr(result, name):
            lines.append(_wrap(f"{name + ':':8}{value}"))
    for effect in found.effects_of(result):
        lines.append(_wrap(f"{'so:':8}{effect.title}: {effect.seen}  [{effect.id}]"))
    return "\n".join(lines)


def _groups(results: Iterable[Result]) -> str:
    rows = []
    for group, title in GROUPS.items():
        mine = [result for result in results if result.group == group]
        if mine:
            counts = [f"{sum(r.status == s for r in mine)} {s}" for s in _MARKS if any(r.status == s for r in mine)]
            rows.append(f"{title:28}  {', '.join(counts)}")
    return "\n".join(rows)


def _every_check(results: Iterable[Result]) -> str:
    lines = []
    for group, title in GROUPS.items():
        mine = [result for result in results if result.group == group]
        if mine:
            lines.append(f"{title}")
            lines += [_wrap(f"{_MARKS[r.status]:5}{r.title}: {r.seen}  [{r.id}]", "  ", " " * 9) for r in mine]
    return "\n".join(lines)


def _summary(found: Diagnosis) -> str:
    bad = [f"{found.count(status)} {word}" for status, word in (("fail", "failed"), ("warn", "warned"))]
    counts = {status: found.count(status) for status in _MARKS}
    rest = f"{counts['ok']} ok, {counts['not applicable']} do not apply, {counts['not checked']} not checked"
    unseen = next((r for r in found.results if r.id == "cluster.reachable" and r.status == "not applicable"), None)
    rest += f".\nRunning cluster: {unseen.seen}." if unseen else "."
    if not (found.count("fail") or found.count("warn")):
        return f"Nothing is wrong: {rest}"
    return f"{', '.join(bad)}; {rest}"


def json_text(found: Diagnosis) -> str:
    report = {"failed": found.failed, **msgspec.to_builtins(found)}
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def _wrap(line: str, first: str = "      ", later: str = " " * 14) -> str:
    return textwrap.fill(line, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
