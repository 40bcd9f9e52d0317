"""The words of a diagnosis: a check, what it found, and what to do about it.

A check is one function from a `Case` to a `Verdict`, with an id that never changes. The verdict says what was seen,
what was wanted, why that matters for the way that data take here, and the remedy for the place where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from slipstream.doctor.case import Case

Status = Literal["ok", "warn", "fail", "not applicable", "not checked"]
Place = Literal["host", "container", "pod"]


class Remedy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to do. `text` is for any place; the others win where they fit."""

    text: str = ""
    host: str = ""
    container: str = ""
    pod: str = ""

    def at(self, place: Place) -> str:
        special = {"host": self.host, "container": self.container, "pod": self.pod or self.container}[place]
        return special or self.text or self.host or self.container


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a check found. A warning or failure has `wanted`, `why` and `remedy`; the others may have only `seen`."""

    status: Status
    seen: str = ""
    wanted: str = ""
    why: str = ""
    remedy: Remedy = Remedy()


def ok(seen: str = "") -> Verdict:
    return Verdict(status="ok", seen=seen)


def absent(seen: str) -> Verdict:
    """What the check is about does not exist here, and need not."""
    return Verdict(status="not applicable", seen=seen)


def unchecked(seen: str) -> Verdict:
    """It could not be found out here; says why."""
    return Verdict(status="not checked", seen=seen)


def warn(seen: str, *, wanted: str, why: str, remedy: Remedy | str) -> Verdict:
    """It works, but worse than this machine could, or only for a part of what it could do."""
    return Verdict(status="warn", seen=seen, wanted=wanted, why=why, remedy=_remedy(remedy))


def fail(seen: str, *, wanted: str, why: str, remedy: Remedy | str) -> Verdict:
    """What the chosen way needs does not work."""
    return Verdict(status="fail", seen=seen, wanted=wanted, why=why, remedy=_remedy(remedy))


def _remedy(remedy: Remedy | str) -> Remedy:
    return Remedy(text=remedy) if isinstance(remedy, str) else remedy


@dataclass(frozen=True)
class Check:
    """`causes` are ids of checks whose failure explains this one's: it is then shown as their effect. `active` ones
    move real bytes and run only when asked for; `limit_s` is given to each."""

    id: str
    title: str
    find: Callable[[Case], Verdict]
    causes: tuple[str, ...] = ()
    active: bool = False
    limit_s: float = 10.0

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


def check(
    id: str, title: str, *, causes: tuple[str, ...] = (), active: bool = False, limit_s: float = 10.0
) -> Callable[[Callable[[Case], Verdict]], Check]:
    """Makes a function a check."""
    return lambda find: Check(id, title, find, causes, active, limit_s)


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A verdict with its check, for tables and JSON. `because` names the checks whose failure explains it."""

    id: str
    group: str
    title: str
    status: Status
    seen: str = ""
    wanted: str = ""
    why: str = ""
    remedy: str = ""
    because: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        return self.status in ("warn", "fail")
