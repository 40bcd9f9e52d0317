"""Kinds of damage that texts suffer between a terminal and a report, for the tests of the readers.

Each takes a text and a source of chance and gives the damaged text. `LOSSLESS` change how a text looks and leave all
that it says; `LOSSY` take something away or mix something in. What a text can show of its damage depends on what its
lines have in common, so `LISTS` and `PLAIN` name the kinds that leave a trace in lists of one line or record a device,
and in texts without any redundancy.
"""

from __future__ import annotations

import html
import random
import re
from collections.abc import Callable

Damage = Callable[[str, random.Random], str]
ESCAPES = ("\x1b[4m", "\x1b[0m", "\x1b[1;31m", "\ufffd[4m", "\x1b[K", "\r")
BLANKS = ("\u00a0", "\u2003", "\u2009", "\u3000")
INVISIBLE = ("\u200b", "\u200e", "\u2060", "\ufeff", "\u00ad")
FOREIGN = (
    "INFO 03-12 10:00:00 engine.py:12] Loading model",
    "Connection to 10.0.0.5 closed.",
    "[rank0]: Traceback (most recent call last):",
    "root@node:~# ",
    "Every 2.0s: nvidia-smi",
)


def body(lines: list[str]) -> list[int]:
    """Lines of the table or list itself: the legend of the words is no data."""
    return [i for i, line in enumerate(lines) if line.strip() and "Connection" not in line and "= Self" not in line]


def _one_line(change: Callable[[str, random.Random], str]) -> Damage:
    """Damage of one line of the body."""

    def damage(raw: str, chance: random.Random) -> str:
        lines = raw.split("\n")
        if places := body(lines):
            at = chance.choice(places)
            lines[at] = change(lines[at], chance)
        return "\n".join(lines)

    return damage


def _each_line(change: Callable[[str, int], str]) -> Damage:
    """The same change of each line, by its number."""
    return lambda raw, chance: "\n".join(change(line, i) for i, line in enumerate(raw.split("\n")))


def _everywhere(change: Callable[[str, int], str]) -> Damage:
    """The same change, at one place of a line, of all lines of the body."""

    def damage(raw: str, chance: random.Random) -> str:
        lines = raw.split("\n")
        places = body(lines)
        if not places:
            return raw
        index = chance.randrange(max(1, len(lines[chance.choice(places)].split())))
        return "\n".join(change(line, index) if i in places else line for i, line in enumerate(lines))

    return damage


def drop_field(line: str, index: int) -> str:
    fields = list(re.finditer(r"\S+\s*", line))
    return line if index >= len(fields) else line[: fields[index].start()] + line[fields[index].end() :]


def join_fields(line: str, index: int) -> str:
    gaps = list(re.finditer(r"(?<=\S)[ \t]+(?=\S)", line))
    return line if index >= len(gaps) else line[: gaps[index].start()] + line[gaps[index].end() :]


def _field(line: str, chance: random.Random) -> int:
    return chance.randrange(max(1, len(line.split())))


def _insert(line: str, chance: random.Random, what: str) -> str:
    at = chance.randrange(len(line) + 1)
    return line[:at] + what + line[at:]


def join_lines(raw: str, chance: random.Random) -> str:
    lines = raw.split("\n")
    if places := body(lines):
        at = chance.choice(places)
        lines[at : at + 2] = ["".join(lines[at : at + 2])]
    return "\n".join(lines)


def cut_text(raw: str, chance: random.Random) -> str:
    return raw[: chance.randrange(1, len(raw))].rstrip("\n") if len(raw) > 1 else raw


def cut_head(raw: str, chance: random.Random) -> str:
    lines = raw.split("\n")
    return "\n".join(lines[chance.choice(body(lines) or [0]) :])


def drop_line(raw: str, chance: random.Random) -> str:
    lines = raw.split("\n")
    if places := body(lines):
        del lines[chance.choice(places)]
    return "\n".join(lines)


def twice(raw: str, chance: random.Random) -> str:
    lines = raw.split("\n")
    if places := body(lines):
        at = chance.choice(places)
        lines.insert(at, lines[at])
    return "\n".join(lines)


def foreign(raw: str, chance: random.Random) -> str:
    lines = raw.split("\n")
    lines.insert(chance.choice(body(lines) or [0]), chance.choice(FOREIGN))
    return "\n".join(lines)


def elide(raw: str, chance: random.Random) -> str:
    lines = raw.split("\n")
    if places := body(lines):
        first, last = sorted((chance.choice(places), chance.choice(places)))
        lines[first : last + 1] = [chance.choice(("...", "[...]", "\u2026", "<snip>", "--More--"))]
    return "\n".join(lines)


def wrap(raw: str, chance: random.Random) -> str:
    width = chance.randrange(20, 120)
    return "\n".join(
        part for line in raw.split("\n") for part in (line[i : i + width] for i in range(0, max(1, len(line)), width))
    )


def mail_wrap(raw: str, chance: random.Random) -> str:
    """At blanks, as mail programs do."""
    width, out = chance.randrange(60, 100), list[str]()
    for line in raw.split("\n"):
        while len(line) > width:
            at = line.rfind(" ", 1, width)
            at = at if at > 0 else width
            out.append(line[:at])
            line = line[at:].lstrip()
        out.append(line)
    return "\n".join(out)


def cut_at_width(raw: str, chance: random.Random) -> str:
    width = chance.randrange(10, 120)
    return "\n".join(line[:width] for line in raw.split("\n"))


def column_gone(raw: str, chance: random.Random) -> str:
    """Some columns of characters, of all lines."""
    lines = raw.split("\n")
    first = chance.randrange(max(1, max(map(len, lines))))
    end = first + chance.randrange(1, 12)
    return "\n".join(line[:first] + line[end:] for line in lines)


LOSSLESS: dict[str, Damage] = {
    "tabs to blanks": lambda raw, chance: raw.replace("\t", " "),
    "blanks to tabs": lambda raw, chance: re.sub(r" {2,}", "\t", raw),
    "strip": _each_line(lambda line, i: line.strip()),
    "trim ends": _each_line(lambda line, i: line.rstrip()),
    "other blanks": lambda raw, chance: raw.replace(" ", chance.choice(BLANKS)),
    "invisible": _one_line(lambda line, chance: _insert(line, chance, chance.choice(INVISIBLE))),
    "byte order mark": lambda raw, chance: "\ufeff" + raw,
    "entities": lambda raw, chance: html.escape(raw, quote=chance.random() < 0.5).replace("  ", "&nbsp; "),
    "quoted": lambda raw, chance: _each_line(lambda line, i: chance.choice(("> ", "> > ", ">")) + line)(raw, chance),
    "crlf": lambda raw, chance: raw.replace("\n", "\r\n"),
    "written escapes": lambda raw, chance: raw.replace("\t", "\\t") if chance.random() < 0.5 else raw + "\\n",
    "hyphens": lambda raw, chance: raw.replace("-", chance.choice("\u2011\u2013\u2014\u2212")),
    "escape": _one_line(lambda line, chance: _insert(line, chance, chance.choice(ESCAPES))),
}
MIXED: dict[str, Damage] = {
    "join lines": join_lines,
    "cut text": cut_text,
    "twice": twice,
    "foreign": foreign,
    "elide": elide,
}
FIELDS: dict[str, Damage] = {
    "join fields": _one_line(lambda line, chance: join_fields(line, _field(line, chance))),
    "drop field everywhere": _everywhere(drop_field),
    "mail wrap": mail_wrap,
    "numbered": _each_line(lambda line, i: f"{i + 1:6}\t{line}"),
    "pipes": _each_line(lambda line, i: "| " + re.sub(r"\t+| {2,}", " | ", line) + " |"),
}
TABLES: dict[str, Damage] = {
    "cut line": _one_line(lambda line, chance: line[: chance.randrange(len(line) + 1)]),
    "drop field": _one_line(lambda line, chance: drop_field(line, _field(line, chance))),
    "drop line": drop_line,
    "wrap": wrap,
    "join everywhere": _everywhere(join_fields),
    "cut at width": cut_at_width,
    "cut head": cut_head,
    "column gone": column_gone,
}
PLAIN = {**LOSSLESS, **MIXED}
LISTS = {**PLAIN, **FIELDS}
MATRICES = {**LISTS, **TABLES}


def damaged(raw: str, seed: int, kinds: dict[str, Damage]) -> tuple[str, list[str]]:
    """One to three kinds of damage at places that `seed` decides, and their names."""
    chance = random.Random(seed)
    names = [chance.choice(list(kinds)) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    for name in names:
        raw = kinds[name](raw, chance)
        if name == "cut text":
            break
    return raw, names
