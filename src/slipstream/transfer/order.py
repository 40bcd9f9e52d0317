"""The transports in the order of trying, for who routes (`transfer.route`) and who explains a route to people.

Nearest first: one process, one machine, any machine. Between machines, nixl and mooncake come first where both sides
have an RDMA device that can carry data. Elsewhere they would use sockets too, and move fewer bytes than our own tcp,
with more of the processor (docs/transfer.md).
"""

from __future__ import annotations

from collections.abc import Mapping

SAME_PROCESS = ("local",)
SAME_MACHINE = ("cuda_ipc", "shm")
RDMA = ("nixl", "mooncake")
ANYWHERE = (*RDMA, "tcp")
AUTOMATIC = SAME_PROCESS + SAME_MACHINE + ANYWHERE


def nearest_first(rdma: bool) -> tuple[str, ...]:
    """All transports in the order of trying; `rdma`: whether both sides have a device for it."""
    return AUTOMATIC if rdma else (*(name for name in AUTOMATIC if name not in RDMA), *RDMA)


def better(transport: str, rejected: Mapping[str, str], rdma: bool) -> dict[str, str]:
    """The transports that were tried, or would have been, before the one in use, each with the reason against it.

    `local`, which joins workers of one process, is never missed.
    """
    order = nearest_first(rdma)
    before = order[: order.index(transport)] if transport in order else order
    return {name: rejected[name] for name in before if name in rejected and name not in SAME_PROCESS}
