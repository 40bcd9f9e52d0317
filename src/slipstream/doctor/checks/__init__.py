"""All checks in the order in which causes come before effects, and the names of their groups."""

from __future__ import annotations

from slipstream.doctor.checks import active, cluster, config, container, gpu, limits, network, packages, peer, rdma
from slipstream.doctor.verdict import Check

GROUPS = {
    "container": "Containers and device files",
    "limits": "Limits",
    "gpu": "Driver and GPU",
    "peer": "Peer access",
    "rdma": "RDMA",
    "network": "Network addresses and ports",
    "packages": "Packages and builds",
    "config": "Model and configuration",
    "cluster": "Running cluster",
    "active": "Small real tests",
}
CHECKS: tuple[Check, ...] = (
    *container.CHECKS,
    *limits.CHECKS,
    *gpu.CHECKS,
    *peer.CHECKS,
    *rdma.CHECKS,
    *network.CHECKS,
    *packages.CHECKS,
    *config.CHECKS,
    *cluster.CHECKS,
    *active.CHECKS,
)
