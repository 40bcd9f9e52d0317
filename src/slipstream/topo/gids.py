"""Which entry of a RoCE port's GID table to use.

An index is never assumed: the table of a pod starts anywhere, drivers fill it in different orders, and an overlay
network may own the first entry that looks right. Order (that of the verbs users in the field): RoCE v2 before v1,
IPv4 before routable IPv6 before link-local, entries of the port's own network device before others; overlay devices
only when nothing else is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.topo.graph import Gid

_OVERLAY = re.compile(r"vxlan|flannel|cni|cali|docker|tunl|veth|geneve|cilium|lxc|kube|weave|virbr|^br-", re.IGNORECASE)
_KINDS = ("ipv4", "ipv6", "link-local")


def is_overlay(netdev: str | None) -> bool:
    """Whether a network device belongs to a container overlay rather than to the wire."""
    return bool(netdev and _OVERLAY.search(netdev))


def with_guessed_types(gids: Sequence[Gid]) -> tuple[Gid, ...]:
    """Fills in types where the source prints none: the same address twice in a row is v1, then v2."""
    filled = list(gids)
    for i in range(1, len(filled)):
        first, second = filled[i - 1], filled[i]
        untyped = first.version is None and second.version is None
        if untyped and first.value == second.value and second.index == first.index + 1:
            filled[i - 1] = Gid(index=first.index, value=first.value, version="v1", netdev=first.netdev)
            filled[i] = Gid(index=second.index, value=second.value, version="v2", netdev=second.netdev)
    return tuple(filled)


def choose(gids: Sequence[Gid], netdev: str | None = None) -> Gid | None:
    """The entry to use, or None when the table holds none. `netdev` is the port's own network device, if known."""
    filled = [gid for gid in gids if gid.kind != "empty"]

    def rank(gid: Gid) -> tuple[bool, bool, int, bool, int]:
        foreign = bool(netdev) and gid.netdev not in (None, netdev)
        return is_overlay(gid.netdev), gid.version == "v1", _KINDS.index(gid.kind), foreign, gid.index

    return min(filled, key=rank, default=None)
