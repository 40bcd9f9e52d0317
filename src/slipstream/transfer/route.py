"""Which transports may serve a pair of ranks, best first, and why the others may not.

This is the part that needs no try: what both sides say about themselves. Whether a candidate really works, its
preflight shows (`transfer.peer`), which falls to the next one when it does not. A transport that the user named is the
only candidate; if it cannot serve, that is an error, never a reason to take another one.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from slipstream.errors import RouteUnavailable
from slipstream.topo import probe
from slipstream.topo.tree import FolderTree
from slipstream.transfer.order import SAME_MACHINE, SAME_PROCESS, nearest_first
from slipstream.transfer.transports.base import Exports


class Ranking(NamedTuple):
    """`candidates`, best first, and the reason for each transport that is none."""

    candidates: tuple[str, ...]
    rejected: dict[str, str]


def rank(
    mine: Exports, theirs: Exports, usable: Collection[str], refused: Mapping[str, str], wanted: str = "auto"
) -> Ranking:
    """The candidates for writing from rank `mine` into rank `theirs`.

    `usable` are the transports that this rank can use at all, `refused` the others with their reasons. Raises
    RouteUnavailable when there is no candidate; the message has every reason.
    """
    candidates: list[str] = []
    rejected: dict[str, str] = {}
    for name in nearest_first(mine.rdma and theirs.rdma) if wanted == "auto" else (wanted,):
        reason = _objection(name, mine, theirs, usable, refused)
        if reason:
            rejected[name] = reason
        else:
            candidates.append(name)
    if not candidates:
        raise RouteUnavailable(unavailable(wanted, rejected))
    return Ranking(tuple(candidates), rejected)


def usable_nics() -> list[str]:
    """RDMA devices of this machine that can carry data, as far as the system's files tell (`topo.usable`)."""
    return [nic.name for nic in probe.machine(FolderTree("/"), None).nics if nic.usable]


def unavailable(wanted: str, rejected: Mapping[str, str]) -> str:
    """The message for a pair that no transport serves."""
    if wanted == "auto":
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        return f"no transport serves this pair of workers. {reasons}"
    return (
        f"the transport {wanted!r}, which was asked for, does not serve this pair of workers: "
        f"{rejected.get(wanted, 'unknown')}. Use --transport auto, or another one."
    )


def _objection(name: str, mine: Exports, theirs: Exports, usable: Collection[str], refused: Mapping[str, str]) -> str:
    """Why this transport cannot serve the pair, as far as can be said without trying; empty when it may."""
    if name in SAME_PROCESS and mine.process != theirs.process:
        return "the peer is another process"
    if name in SAME_MACHINE and mine.machine != theirs.machine:
        return "the peer runs on another machine"
    if name not in usable:
        return f"here: {refused.get(name, 'not set up by this worker')}"
    if name == "cuda_ipc" and (mine.kind, theirs.kind) != ("cuda", "cuda"):
        return f"it joins GPUs; the memory is {mine.kind} here and {theirs.kind} there"
    if name not in {description.transport for description in theirs.descriptions} and name != "fake":
        return f"at the peer: {theirs.refused.get(name, 'not set up by that worker')}"
    return ""


def machine_id() -> str:
    """Equal for all processes of one running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"node-{uuid.getnode():x}"


def process_id() -> str:
    """Unique a process, also across PID namespaces and after a restart under the same number."""
    try:
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        started = namespace = ""
    return f"{machine_id()}/{namespace}/{os.getpid()}/{started}"
