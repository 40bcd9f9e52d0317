"""The command line, environment and inherited files of each process of a cluster.

They are the commands that a user would type to build the same cluster by hand. What is added are two descriptors: the
lifeline, which ends a child with its parent, and for the router the listening socket, which the parent holds so that
no connection attempt is lost while a router is started again. Settings travel as flags alone: `SLIPSTREAM_*` variables
of the parent are taken out, because `serve` has read them already and they would mean something else to a child. The
API key is the exception, since command lines can be read by every user of a machine.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from slipstream.config import (
    EngineConfig,
    FrontConfig,
    LaunchConfig,
    ObserveConfig,
    RouterConfig,
    TransferConfig,
    WorkerConfig,
)
from slipstream.launch.devices import Machine
from slipstream.launch.spec import Placement
from slipstream.launch.supervise import ChildSpec
from slipstream.settings import PREFIX, ROUTER, WORKER, to_flags
from slipstream.types import Role

ROUTER_NAME = "router"
# -P: a folder that happens to be the working directory must not stand in for a package
INTERPRETER = (sys.executable, "-P", "-m", "slipstream")


@dataclass(frozen=True)
class ClusterConfig:
    """Everything that `serve` was told."""

    engine: EngineConfig
    transfer: TransferConfig
    worker: WorkerConfig
    router: RouterConfig
    front: FrontConfig
    launch: LaunchConfig
    observe: ObserveConfig = field(default_factory=ObserveConfig)


def child_environment(environment: Mapping[str, str], **extra: str) -> dict[str, str]:
    """The parent's environment without settings, with unbuffered output, and `extra`."""
    kept = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


def router_spec(config: ClusterConfig, *, port: int, listen_fd: int, parent_fd: int) -> ChildSpec:
    """The router and front. It listens on `listen_fd`; `port` is that socket's."""
    front = msgspec.structs.replace(config.front, port=port)
    flags = to_flags(ROUTER, config.router, front, config.observe, config.launch, config.engine, skip=("api_key",))
    argv = [*INTERPRETER, "router", *flags, "--listen-fd", str(listen_fd), "--parent-fd", str(parent_fd)]
    secret = {PREFIX + "API_KEY": config.front.api_key} if config.front.api_key else {}
    return ChildSpec(ROUTER_NAME, argv, child_environment(os.environ, **secret), (listen_fd,))


def router_again(spec: ChildSpec, workers: Sequence[tuple[Role, str]], wait_s: float) -> ChildSpec:
    """The router for its next life: it knows the workers, and lets connections wait until it can serve them."""
    known = [word for role, url in sorted(workers) for word in (f"--{role}", url)]
    argv = [*spec.argv, *known, "--accept-after", f"{wait_s:g}"]
    return ChildSpec(spec.name, argv, spec.environment, spec.fds)


def worker_specs(
    config: ClusterConfig, placements: Sequence[Placement], machine: Machine, *, router_url: str, parent_fd: int
) -> dict[str, ChildSpec]:
    """The workers by name."""
    sharing = Counter(device for placement in placements for device in placement.devices)
    threads = config.engine.threads or threads_each(machine.cores, sharing["cpu"])
    specs: dict[str, ChildSpec] = {}
    for placement in placements:
        engine = msgspec.structs.replace(config.engine, device=placement.device, tp=placement.tp)
        if placement.on_cpu:
            engine = msgspec.structs.replace(engine, threads=threads)
        else:
            share = config.engine.mem_fraction / max(sharing[device] for device in placement.devices)
            engine = msgspec.structs.replace(engine, mem_fraction=round(share, 4))
        worker = msgspec.structs.replace(config.worker, role=placement.role, name=placement.name, join=router_url)
        log = msgspec.structs.replace(
            FrontConfig(), log_level=config.front.log_level, log_format=config.front.log_format
        )
        flags = to_flags(WORKER, worker, engine, config.transfer, log, config.observe, config.launch, skip=("model",))
        argv = [*INTERPRETER, "worker", engine.model, *flags, "--parent-fd", str(parent_fd)]
        secret = {PREFIX + "API_KEY": config.front.api_key} if config.front.api_key else {}
        specs[placement.name] = ChildSpec(placement.name, argv, child_environment(os.environ, **secret))
    return specs


def threads_each(cores: int, cpu_ranks: int) -> int:
    """Compute threads of each rank on the CPU; 0 leaves it to the worker when it is the only one."""
    return max(1, cores // cpu_ranks) if cpu_ranks > 1 else 0


def with_port(spec: ChildSpec, port: int) -> ChildSpec:
    """The same worker on a fixed port, so that one that is started again is found where the old one was."""
    at = len(spec.argv) - 2
    return ChildSpec(spec.name, [*spec.argv[:at], "--port", str(port), *spec.argv[at:]], spec.environment, spec.fds)
