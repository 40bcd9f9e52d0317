"""One known failure, and how its log lines are recognised.

A pattern is the text of a line as it is printed, in any case, with three placeholders: `{n}` is a number, `{w}` a
word, `...` anything (or nothing) between two parts of one line. The regex of a pattern is tried only where its longest
fixed part occurs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PLACEHOLDERS = {"{n}": r"\d+", "{w}": r"\S+", "...": r".*?"}
_SPLIT = re.compile(r"(\{n\}|\{w\}| ?\.\.\. ?)")


@dataclass(frozen=True)
class Pattern:
    """`needle` is a lower-case text that every match contains; `regex` decides. Both are made for lines in lower case
    with single spaces."""

    needle: str
    regex: re.Pattern[str]

    def matches(self, line: str) -> bool:
        return self.needle in line and self.regex.search(line) is not None


def pattern(text: str) -> Pattern:
    """Compiles the text of a pattern."""
    parts = [part for part in _SPLIT.split(text.lower()) if part]
    fixed = [part for part in parts if part.strip() not in _PLACEHOLDERS]
    body = "".join(_PLACEHOLDERS.get(part.strip()) or re.escape(part) for part in parts)
    begin = r"(?<![\d.])" if text[:1].isdigit() else ""
    end = r"(?!\d)" if text[-1:].isdigit() else ""
    return Pattern(max(fixed, key=len).lower(), re.compile(begin + body + end))


@dataclass(frozen=True)
class Symptom:
    """`checks` are the checks of the doctor that see the same fault from the machine's state. `effect_of` names
    symptoms that explain this one where both are found. A `notice` is no failure by itself."""

    id: str
    title: str
    cause: str
    remedies: tuple[str, ...]
    patterns: tuple[Pattern, ...] = ()
    checks: tuple[str, ...] = ()
    effect_of: tuple[str, ...] = ()
    notice: bool = False
    texts: tuple[str, ...] = field(default=(), compare=False)


def symptom(
    id: str,
    title: str,
    *texts: str,
    cause: str,
    remedies: tuple[str, ...] | str,
    checks: tuple[str, ...] | str = (),
    effect_of: tuple[str, ...] = (),
    notice: bool = False,
) -> Symptom:
    """A row of the catalogue; `texts` are its patterns."""
    return Symptom(
        id=id,
        title=title,
        cause=cause,
        remedies=(remedies,) if isinstance(remedies, str) else remedies,
        patterns=tuple(pattern(text) for text in texts),
        checks=(checks,) if isinstance(checks, str) else checks,
        effect_of=effect_of,
        notice=notice,
        texts=texts,
    )
