"""Runs the checks of a case and puts causes before their effects.

Each check runs in a thread of its own with a time limit, so that no file system, resolver or driver that hangs holds
up the diagnosis: the check is then "not checked", with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from slipstream.doctor.case import Case
from slipstream.doctor.checks import CHECKS, GROUPS
from slipstream.doctor.verdict import Check, Place, Result, Verdict, unchecked
from slipstream.errors import ConfigError


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found, results in the order of `CHECKS`."""

    place: Place
    way: str
    path: str
    handoff: str
    results: tuple[Result, ...]

    @property
    def causes(self) -> list[Result]:
        """Failures, then warnings, which nothing else explains."""
        roots = [result for result in self.results if result.bad and not result.because]
        return sorted(roots, key=lambda result: result.status != "fail")

    def effects_of(self, cause: Result) -> list[Result]:
        return [result for result in self.results if result.bad and cause.id in result.because]

    @property
    def failed(self) -> bool:
        return any(result.status == "fail" for result in self.results)

    def count(self, status: str) -> int:
        return sum(result.status == status for result in self.results)


def select(only: Sequence[str], active: bool, checks: Sequence[Check] = CHECKS) -> list[Check]:
    """The checks to run: all that are not active, or those of the named ids and groups. Raises ConfigError."""
    known = {check.id for check in checks} | set(GROUPS)
    for name in only:
        if name not in known:
            raise ConfigError(f"there is no check or group {name!r}; groups are {', '.join(GROUPS)}.")
    named = [check for check in checks if check.id in only or check.group in only]
    return named if only else [check for check in checks if active or not check.active]


def diagnose(case: Case, checks: Sequence[Check], progress: Callable[[Check], None] = lambda check: None) -> Diagnosis:
    """Runs `checks` one after the other."""
    verdicts: dict[str, Verdict] = {}
    for check in checks:
        progress(check)
        verdicts[check.id] = run(check, case)
    bad = {name for name, verdict in verdicts.items() if verdict.status in ("warn", "fail")}
    return Diagnosis(
        place=case.place,
        way=case.way,
        path=case.path,
        handoff=case.plan.handoff,
        results=tuple(_result(check, verdicts[check.id], case.place, _roots(check, checks, bad)) for check in checks),
    )


def run(check: Check, case: Case) -> Verdict:
    """One check within its time limit; a check that fails itself is not a fault of the machine."""
    found: list[Verdict] = []

    def work() -> None:
        try:
            found.append(check.find(case))
        except Exception as error:  # the edge of a check: one that stumbles over a strange system ends alone
            found.append(unchecked(f"the check itself failed: {type(error).__name__}: {error}"))

    thread = threading.Thread(target=work, name=check.id, daemon=True)
    thread.start()
    thread.join(check.limit_s)
    return found[0] if found else unchecked(f"no answer within {check.limit_s:g} s")


def _roots(check: Check, checks: Sequence[Check], bad: set[str]) -> tuple[str, ...]:
    """The failed checks at the beginning of the chain that leads to this one; () for a cause."""
    if check.id not in bad:
        return ()
    by_id = {other.id: other for other in checks}
    roots: dict[str, None] = {}
    for name in check.causes:
        if name in bad:
            roots.update(dict.fromkeys(_roots(by_id[name], checks, bad) or (name,)))
    return tuple(roots)


def _result(check: Check, verdict: Verdict, place: Place, because: tuple[str, ...]) -> Result:
    return Result(
        id=check.id,
        group=check.group,
        title=check.title,
        status=verdict.status,
        seen=verdict.seen,
        wanted=verdict.wanted,
        why=verdict.why,
        remedy=verdict.remedy.at(place) if verdict.status in ("warn", "fail") else "",
        because=because,
    )
