"""Names the known failures in a log of slipstream, SGLang, vLLM, Mooncake, NIXL, UCX or NCCL.

A line is a hint, not a proof: the finding names the checks that prove it on the machine. Where one failure explains
another, the cause is shown and the other folded below it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from slipstream.doctor.symptoms import CATALOGUE
from slipstream.doctor.symptoms.symptom import Symptom
from slipstream.pasted import PART

_WIDTH = 110
_WINDOW = 4000  # characters that are searched at once; longer lines are searched in windows
_OVERLAP = 400  # of two windows, so that none cuts a failure in two
_SHOWN = 160
_BLOCK = 256  # lines that are searched together first
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Finding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A known failure and its first line; `because` names the failures in the same log that explain it."""

    id: str
    title: str
    cause: str
    remedies: tuple[str, ...]
    checks: tuple[str, ...] = ()
    notice: bool = False
    line: int = 0
    text: str = ""
    count: int = 0
    because: tuple[str, ...] = ()


class LogReport(msgspec.Struct, frozen=True, kw_only=True):
    """Findings in the order of their first lines."""

    lines: int
    findings: tuple[Finding, ...]
    no_text: int = 0  # lines of bytes that are no text

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.notice]


def read(lines: Iterable[str], catalogue: Iterable[Symptom] = CATALOGUE) -> LogReport:
    """Searches a log. Lines may have colours and any length; each counts once for every failure that it names.

    A line without an end that is `pasted.PART` long goes on in the next.
    """
    symptoms = list(catalogue)
    table = [(pattern.needle, pattern.regex, symptom) for symptom in symptoms for pattern in symptom.patterns]
    found: dict[str, Finding] = {}
    last: dict[str, int] = {}  # the last line that names a failure
    count = _Count()
    windows = _windows(lines, count)
    while block := list(islice(windows, _BLOCK)):
        whole = "\n".join(line for _, line in block).lower()
        near = [row for row in table if row[0] in whole]  # for most blocks of a log none
        for number, line in block if near else ():
            lowered = line.lower()
            for needle, regex, symptom in near:
                if needle in lowered and last.get(symptom.id) != number and (match := regex.search(lowered)):
                    last[symptom.id] = number
                    _note(found, symptom, number, _around(line, match.start()))
    for symptom in symptoms:
        if symptom.id in found:
            found[symptom.id].because = _roots(symptom, found, {symptom.id: symptom for symptom in symptoms}, ())
    return LogReport(lines=count.lines, findings=tuple(found.values()), no_text=count.no_text)


class _Count:
    """What has been read."""

    lines = 0
    no_text = 0


def _windows(lines: Iterable[str], count: _Count) -> Iterator[tuple[int, str]]:
    """Pieces to be searched, with the numbers of their lines."""
    goes_on, tail = False, ""
    for raw in lines:
        if not goes_on:
            count.lines += 1
            tail = ""
            count.no_text += "\0" in raw or raw.count("\ufffd") * 5 > len(raw)
        goes_on = len(raw) == PART and not raw.endswith("\n")
        line = tail + _COLOURS.sub("", raw.replace("\0", ""))
        for start in range(0, max(1, len(line) - _OVERLAP), _WINDOW - _OVERLAP):
            yield count.lines, " ".join(line[start : start + _WINDOW].split())
        tail = line[-_OVERLAP:]


def _around(line: str, at: int) -> str:
    """The part of a long line in which a failure stands."""
    return line if len(line) <= _SHOWN or at < _SHOWN // 2 else f"... {line[at - _SHOWN // 4 :]}"


def _note(found: dict[str, Finding], symptom: Symptom, number: int, text: str) -> None:
    if symptom.id not in found:
        found[symptom.id] = Finding(
            id=symptom.id,
            title=symptom.title,
            cause=symptom.cause,
            remedies=symptom.remedies,
            checks=symptom.checks,
            notice=symptom.notice,
            line=number,
            text=textwrap.shorten(text, _SHOWN, placeholder=" ..."),
        )
    found[symptom.id].count += 1


def _roots(
    symptom: Symptom, found: dict[str, Finding], by_id: dict[str, Symptom], seen: tuple[str, ...]
) -> tuple[str, ...]:
    """The failures at the beginning of the chain that leads to `symptom`; () when nothing here explains it."""
    roots: dict[str, None] = {}
    for name in symptom.effect_of:
        if name in found and name not in seen:
            further = _roots(by_id[name], found, by_id, (*seen, symptom.id))
            roots.update(dict.fromkeys(further or (name,)))
    return tuple(roots)


def text(report: LogReport, name: str) -> str:
    """Causes with remedies, and below each the failures that it explains."""
    what = f"{name if name != '-' else 'standard input'}: {report.lines} lines"
    if report.no_text * 2 > report.lines:
        what += f", {report.no_text} of them no text: is this the log, and unpacked?"
    if not report.findings:
        return f"{what}, no known failure in them. On the machine itself, `slipstream doctor` sees more."
    causes = sorted((f for f in report.findings if not f.because), key=lambda f: (f.notice, f.line))
    parts = [what]
    parts += [_finding(finding, [f for f in report.findings if finding.id in f.because]) for finding in causes]
    return "\n\n".join(parts)


def _finding(finding: Finding, effects: list[Finding]) -> str:
    lines = [f"{'note' if finding.notice else 'FAIL'}  {finding.title}  [{finding.id}]"]
    times = f", {finding.count} times" if finding.count > 1 else ""
    lines.append(_wrap(f"{'line:':9}{finding.line}{times}: {finding.text}"))
    lines.append(_wrap(f"{'cause:':9}{finding.cause}"))
    lines += [_wrap(f"{'remedy:':9}{remedy}") for remedy in finding.remedies]
    lines += [_wrap(f"{'so:':9}{effect.title} (line {effect.line})  [{effect.id}]") for effect in effects]
    if finding.checks:
        lines.append(_wrap(f"{'proof:':9}slipstream doctor {' '.join(f'--only {check}' for check in finding.checks)}"))
    return "\n".join(lines)


def json_text(report: LogReport) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def _wrap(line: str) -> str:
    return textwrap.fill(line, _WIDTH, initial_indent="      ", subsequent_indent=" " * 15, break_on_hyphens=False)
