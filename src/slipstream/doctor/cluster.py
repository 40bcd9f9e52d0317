"""What a running slipstream says of itself over HTTP, gathered once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from slipstream.asking import Unreachable
from slipstream.doctor.routes import Member, members
from slipstream.doctor.system import NoAnswer

Get = Callable[[str, str], tuple[int, bytes]]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """`problem` is why it could not be asked; `keyless` that it wants an API key and did not get it; `reasons` why it
    would not answer a request now; `faults` what its books get wrong."""

    url: str
    reachable: bool = False
    problem: str = ""
    keyless: bool = False
    healthy: bool = False
    reasons: tuple[str, ...] = ()
    workers: tuple[Member, ...] = ()
    faults: tuple[str, ...] = ()


class _Health(msgspec.Struct):
    status: str = ""
    reasons: tuple[str, ...] = ()


class _Audit(msgspec.Struct):
    problems: tuple[str, ...] = ()


def look(get: Get, url: str) -> Cluster:
    """Asks `/health`, `/workers` and `/audit` of the router at `url`; never raises."""
    try:
        status, body = get(url, "/health")
        health = msgspec.json.decode(body, type=_Health)
        workers_status, listed = get(url, "/workers")
        if workers_status != 200:
            if workers_status == 401:
                return Cluster(url=url, problem=f"{url} wants its API key", keyless=True)
            return Cluster(url=url, problem=f"what listens there answers /workers with {workers_status}")
        workers = tuple(members(listed))
        audit_status, books = get(url, "/audit")
        faults = msgspec.json.decode(books, type=_Audit).problems if audit_status == 200 else ()
    except (NoAnswer, Unreachable) as error:
        return Cluster(url=url, problem=str(error))
    except (msgspec.MsgspecError, RecursionError) as error:
        return Cluster(url=url, problem=f"what listens there is no slipstream router ({error})")
    return Cluster(
        url=url, reachable=True, healthy=status == 200, reasons=health.reasons, workers=workers, faults=faults
    )
