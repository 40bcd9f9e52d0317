"""Takes from a pasted text what terminals, logs and web forms have added to it.

Escape sequences (whole, with their first byte replaced, or cut), carriage returns, log prefixes, quote marks, invisible
characters and the entities and escapes of web forms go; what was taken is named, so that the reading can say it. Blanks
and tabs stay: readers split by tokens, never by columns.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

from slipstream.topo.graph import Finding

_ESCAPE = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # operating system command
    r"|(?:\x1b|\u241b|\^\[)(?:\[[0-9;?]*(?:[A-Za-z]|(?=$|\n|\r))|[()][A-Z0-9]|[=>])"
    r"|\x1b",
)
_BROKEN_ESCAPE = re.compile(r"\ufffd?\[[0-9]{0,2}(?:;[0-9]{1,3})*[mK]|\ufffd")
_LOG_PREFIX = re.compile(
    r"^(?:\([^)\n]*pid=\d+[^)\n]*\)\s+)?"
    r"(?:\[?(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR)\]?[\s:]+)?"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?\s"
    r"(?:\[?(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR)\]?[\s:]+)?"
)
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_BLANK = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_HYPHEN = re.compile("[\u2010-\u2015\u2212]")
_ENTITY = re.compile(r"&(?:nbsp|lt|gt|amp|quot|#\d+|#x[0-9a-fA-F]+);")
_WRITTEN_ESCAPE = re.compile(r"\\([nrt])")  # as in a string of JSON: no tool prints a backslash
_ELIDED = re.compile(r"\s*(?:\[(?:\.{3}|\u2026|snip)\]|\.{3}|\u2026|\(\.{3}\)|<snip>|-+ ?More ?-+)\s*")
_QUOTE = re.compile(r"^(?:> ?|\| )+")


@dataclass
class Text:
    """A cleaned text: its lines, and what had to be taken from it."""

    lines: list[str]
    raw: str
    quirks: list[str] = field(default_factory=list)
    ends_cut: bool = False

    @property
    def body(self) -> str:
        return "\n".join(self.lines)

    @property
    def elided(self) -> bool:
        """Whether somebody has left lines out, and says so."""
        return any(_ELIDED.fullmatch(line) for line in self.lines)


class Notes:
    """Collects the warnings of one reading, each code and text once."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.quirks: list[str] = []

    def warn(self, code: str, text: str) -> None:
        finding = Finding(code, text)
        if finding not in self.findings:
            self.findings.append(finding)
        self.quirk(code)

    def gaps(self, text: Text) -> None:
        """Warns of what is missing at the end of a text, or in it, by its own signs."""
        if text.ends_cut:
            self.warn("no-line-end", "the last line has no line end: the text may be cut there")
        if text.elided and "elided" not in self.quirks:
            self.warn("elided", "lines are left out in the text: what they said is not known")

    def quirk(self, code: str) -> None:
        if code not in self.quirks:
            self.quirks.append(code)


def clean(raw: str) -> Text:
    """`raw` in lines, without what is not the tool's. A text whose last line has no end may be cut there."""
    quirks = []
    text = raw
    if "\r" in text:
        quirks.append("crlf")
        text = text.replace("\r\n", "\n").replace("\r", "\n" if "\n" not in text else "")
    if _ESCAPE.search(text):
        quirks.append("ansi-header")
        text = _ESCAPE.sub("", text)
    if _BROKEN_ESCAPE.search(text):
        quirks.append("broken-escape")
        text = _BROKEN_ESCAPE.sub("", text)
    if _ENTITY.search(text):
        quirks.append("html")
        text = html.unescape(text)
    if _WRITTEN_ESCAPE.search(text):
        quirks.append("written-escapes")
        text = _WRITTEN_ESCAPE.sub(lambda match: {"n": "\n", "r": "", "t": "\t"}[match.group(1)], text)
    text = _HYPHEN.sub("-", _BLANK.sub(" ", _INVISIBLE.sub("", text)))
    if "\t" in text:
        quirks.append("tabs")
    lines = [_QUOTE.sub("", line) for line in text.split("\n")]
    dated = [line for line in lines if _LOG_PREFIX.match(line)]
    if dated and len(dated) * 2 > len([line for line in lines if line.strip()]):
        quirks.append("log-prefix")
        lines = [_LOG_PREFIX.sub("", line) for line in lines]
    ends_cut = bool(text) and not text.endswith("\n")
    return Text(lines=lines, raw=raw, quirks=quirks, ends_cut=ends_cut)
