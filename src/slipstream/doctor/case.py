"""One patient: a system, what its user wants of it, and what follows from both.

Made once before all checks. The way of a handoff on this machine decides how much a finding matters: locked memory is
nothing to worry about where nothing is pinned, and everything where a NIC has to register the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from slipstream import settings
from slipstream.config import EngineConfig, FrontConfig, TransferConfig
from slipstream.doctor import cluster
from slipstream.doctor.cluster import Cluster
from slipstream.doctor.system import Package, System
from slipstream.doctor.verdict import Place, Remedy, Verdict, fail, ok, warn
from slipstream.errors import ConfigError
from slipstream.settings import Resolved
from slipstream.topo import choose, probe
from slipstream.topo.graph import Machine, Nic, Port

Way = Literal["cpu", "one-gpu", "nvlink", "pcie-peer", "host-memory"]
_ENGINES = ("sglang", "vllm", "tensorrt_llm")
_RDMA_TRANSPORTS = ("nixl", "mooncake")
_FIRST_NAMESPACES = {"ipc": 0xEFFFFFFF, "uts": 0xEFFFFFFE, "pid": 0xEFFFFFFC, "cgroup": 0xEFFFFFFB}  # linux/proc_ns.h
_WORDS: dict[Way, str] = {
    "cpu": "no GPU: workers share host memory (shm)",
    "one-gpu": "one GPU: workers share it, no link between GPUs",
    "nvlink": "NVLink between the GPUs (cuda_ipc)",
    "pcie-peer": "peer copies over PCIe (cuda_ipc)",
    "host-memory": "GPUs staged through shared host memory (shm)",
}


@dataclass(frozen=True)
class Wish:
    """What the user asked to have checked, beyond the machine: a model, the URL of a running cluster."""

    model: str = ""
    url: str = ""
    config_file: str = ""


@dataclass(frozen=True)
class Case:
    """What checks work on. `resolved` is None when the settings themselves are wrong; `problem` then says how."""

    system: System
    wish: Wish
    machine: Machine
    plan: choose.Plan
    place: Place
    resolved: Resolved | None
    problem: str = ""

    @property
    def way(self) -> Way:
        """The way of KV on this machine; of several, the one that demands most of the machine."""
        if not self.machine.gpus:
            return "cpu"
        best = {pair.best.way for pair in self.plan.pairs}
        if not best:
            return "one-gpu"
        if "host-memory" in best or "rdma-loopback" in best or "tcp" in best:
            return "host-memory"
        return "pcie-peer" if "pcie-peer" in best else "nvlink"

    @property
    def path(self) -> str:
        """The way in words, for the `why` of a verdict."""
        return _WORDS[self.way]

    @property
    def front(self) -> FrontConfig:
        return self.resolved.config(FrontConfig) if self.resolved else FrontConfig()

    @property
    def engine(self) -> EngineConfig:
        return self.resolved.config(EngineConfig) if self.resolved else EngineConfig()

    @property
    def transfer(self) -> TransferConfig:
        return self.resolved.config(TransferConfig) if self.resolved else TransferConfig()

    @cached_property
    def cluster(self) -> Cluster | None:
        """The slipstream at the wished URL, or at the front's own address; None when nothing was asked for and
        nothing is there. Asked once for all checks."""
        front = self.front
        if self.wish.url:
            return cluster.look(self.system.get, self.wish.url)
        if front.port == 0 or not self.system.bind(front.host, front.port):
            return None
        found = cluster.look(self.system.get, self.front_url)
        return found if found.reachable or found.keyless else None

    @property
    def front_url(self) -> str:
        """Where a slipstream with these settings listens."""
        host = "127.0.0.1" if self.front.host in ("", "0.0.0.0", "::") else self.front.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.front.port}"

    @property
    def hardware(self) -> list[Nic]:
        """RDMA devices that are hardware and no management function."""
        return [nic for nic in self.machine.nics if not nic.software and not nic.management_only]

    @property
    def active_ports(self) -> list[tuple[Nic, Port]]:
        return [(nic, port) for nic in self.hardware for port in nic.ports if port.active]

    @property
    def usable_ports(self) -> list[tuple[Nic, Port]]:
        return [(nic, port) for nic, port in self.machine.ports() if port.carries]

    @property
    def rdma_asked(self) -> bool:
        """Whether the settings insist on a transport that needs RDMA devices."""
        return self.transfer.transport in _RDMA_TRANSPORTS and bool(self.hardware)

    @cached_property
    def rdma_matters(self) -> bool:
        """Whether anything here would use RDMA: GPUs whose KV may go to other machines, or a package for it."""
        packages = ("nixl", "nixl-cu12", "nixl-cu13", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
        return bool(self.machine.gpus) or self.rdma_asked or self.first(*packages) is not None

    def rdma_trouble(self, seen: str, *, wanted: str, why: str, remedy: Remedy | str) -> Verdict:
        """A failure when the settings insist on RDMA, else a warning, since only other machines are concerned; and
        no matter at all where nothing would use RDMA."""
        if not self.rdma_matters:
            return ok(f"{seen}; nothing here uses RDMA")
        return (fail if self.rdma_asked else warn)(seen, wanted=wanted, why=why, remedy=remedy)

    def env(self, *names: str) -> list[tuple[str, str]]:
        """Those of the variables that are set and not empty."""
        return [(name, self.system.environ[name]) for name in names if self.system.environ.get(name)]

    def engines(self) -> list[Package]:
        """Other serving engines that are installed beside slipstream."""
        return [found for name in _ENGINES if (found := self.system.package(name))]

    def first(self, *names: str) -> Package | None:
        """The first of these distributions that is installed."""
        return next((found for name in names if (found := self.system.package(name))), None)


def make(system: System, wish: Wish) -> Case:
    """The case of a system. Never raises: wrong settings become `problem`."""
    facts = system.driver.nvml if system.driver and not system.driver.trouble else None
    machine = probe.machine(system.tree, facts, source="this system")
    resolved, problem = None, ""
    try:
        flags = {"model": wish.model} if wish.model else {}
        resolved = settings.resolve(
            settings.SERVE, flags, environment=system.environ, config_file=wish.config_file or None
        )
    except ConfigError as error:
        problem = error.message
    return Case(
        system=system,
        wish=wish,
        machine=machine,
        plan=choose.plan(machine),
        place=place(system),
        resolved=resolved,
        problem=problem,
    )


def place(system: System) -> Place:
    """Where this process runs. The files of the container engines decide, then the names of its control groups.

    A virtual machine that was booted from a container's image has these files too. Nothing of it is contained: its
    processes are in the kernel's first namespaces, which no engine uses.
    """
    tree = system.tree
    if system.environ.get("KUBERNETES_SERVICE_HOST") or tree.exists("/var/run/secrets/kubernetes.io"):
        return "pod"
    if all(tree.real(f"/proc/self/ns/{name}").endswith(f"[{number}]") for name, number in _FIRST_NAMESPACES.items()):
        return "host"
    if tree.exists("/.dockerenv") or tree.exists("/run/.containerenv") or system.environ.get("container"):
        return "container"
    groups = tree.read("/proc/1/cgroup") or ""
    return "container" if any(word in groups for word in ("docker", "containerd", "libpod", "lxc")) else "host"


def size(count: int | None) -> str:
    """Bytes as people write limits: 64 KiB, 8 MiB, unlimited."""
    if count is None:
        return "unlimited"
    for factor, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} bytes"


def some(names: list[str], most: int = 6) -> str:
    """A list for people; the end of a long one is only counted."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
