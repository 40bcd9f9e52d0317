"""Made-up machines for the doctor's tests: healthy ones, and `but` to make one thing about them wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from slipstream.doctor.driver import Card, DriverFacts
from slipstream.doctor.system import Limit, Package, Space, System
from slipstream.topo.nvml import FabricFacts, GpuFacts, LinkFacts, NvmlFacts
from slipstream.topo.tree import ListTree

GIB = 1 << 30
FIXTURES = Path(__file__).parents[1] / "fixtures" / "topology"
NICS = {"mlx5_0": 0, "mlx5_1": 1}
BASE = {
    "/proc/version": "Linux version 6.8.0-45-generic (buildd@lcy02) (gcc 13.2.0)",
    "/proc/sys/kernel/osrelease": "6.8.0-45-generic",
    "/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu vme avx2",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro",
    "/proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\nHugePages_Free:        0",
    "/proc/self/cgroup": "0::/user.slice/session.scope",
    "/proc/self/limits": "Max locked memory         unlimited            unlimited            bytes",
    "/proc/self/status": "CapEff:\t0000000000000000",
    "/proc/net/sockstat": "sockets: used 300\nTCP: inuse 5 orphan 0 tw 12 alloc 8 mem 1",
    "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
    "/sys/devices/system/node/node0/cpulist": "0-7",
    "/dev/shm/.keep": "",
}
PACKAGES = {
    "slipstream": Package("slipstream", "0.1.0", requires=("click>=8.1", "torch>=2.11", "ray>=2.40; extra == 'ray'")),
    "click": Package("click", "8.1.7"),
    "torch": Package("torch", "2.13.0+cpu"),
}
GPU_PACKAGES = {
    **PACKAGES,
    "torch": Package("torch", "2.13.0+cu128"),
    "triton": Package("triton", "3.6.0"),
    "cuda-bindings": Package("cuda-bindings", "12.9.0"),
    "nvidia-ml-py": Package("nvidia-ml-py", "13.580.1"),
}


def files(*more: dict[str, str], without: str = "") -> ListTree:
    """A tree of the base files and more; paths that begin with `without` are left out."""
    together: dict[str, str] = {}
    for part in (BASE, *more):
        together.update(part)
    return ListTree({path: text for path, text in together.items() if not without or not path.startswith(without)})


def packages(known: dict[str, Package]) -> Any:
    return known.get


def cpu(tree: ListTree | None = None, **changes: Any) -> System:
    """A healthy machine without GPUs, 8 cores."""
    fields: dict[str, Any] = {
        "tree": tree or files(),
        "environ": {},
        "limits": {"memlock": Limit(8 << 20, 8 << 20), "nofile": Limit(1024, 1 << 20), "nproc": Limit(None, None)},
        "package": packages(PACKAGES),
        "space": lambda path: Space(32 * GIB, 32 * GIB),
        "addresses": {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.5",)},
        "hostname": "machine",
        "resolve": lambda name: ("127.0.1.1",),
        "kernel_log": list,
        "cpus": frozenset(range(8)),
        "home": "/home/user",
    }
    return System(**{**fields, **changes})


def gpu_files(count: int) -> dict[str, str]:
    found = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07"}
    for index in range(count):
        device = f"/sys/devices/pci0000:{16 * (index + 1):02x}/0000:{16 * (index + 1):02x}:01.0/{bus(index)}"
        found |= {
            f"/dev/nvidia{index}": "",
            f"/sys/bus/pci/devices/{bus(index)}": f"-> {device}",
            f"{device}/vendor": "0x10de",
            f"{device}/class": "0x030200",
            f"{device}/numa_node": "0",
            f"{device}/local_cpulist": "0-7",
            f"{device}/max_link_speed": "32.0 GT/s PCIe",
            f"{device}/current_link_width": "16",
            f"{device}/max_link_width": "16",
        }
    return found


def bus(index: int) -> str:
    return f"0000:{16 * (index + 1) + 1:02x}:00.0"


def driver(count: int, *, links: int = 0, word: str = "OK", model: str = "NVIDIA L40S", **card: Any) -> DriverFacts:
    """Facts of `count` GPUs; with `links` they hang on a switch whose fabric is up."""
    pairs = {f"{a},{b}": word for a in range(count) for b in range(count) if a != b}
    gpus = tuple(
        GpuFacts(
            index=index,
            model=model,
            uuid=f"GPU-{index}",
            pci=bus(index),
            memory_bytes=80 * GIB,
            mig=False,
            links=tuple(LinkFacts(slot=slot, active=True, remote="switch", version=6) for slot in range(links)),
            fabric=FabricFacts(state="Completed") if links else FabricFacts(state="Not Supported"),
        )
        for index in range(count)
    )
    values: dict[str, Any] = {"compute_mode": "default", "consumer": False, "bar1_bytes": 128 * GIB}
    values |= {"remap_pending": False, "remap_failed": False, **card}
    cards = tuple(Card(index=index, **values) for index in range(count))
    return DriverFacts(nvml=NvmlFacts(driver="580.82.07", gpus=gpus, peer_read=pairs, peer_write=pairs), cards=cards)


def gpu(
    count: int = 1, *more: dict[str, str], without: str = "", told: DriverFacts | None = None, **changes: Any
) -> System:
    """A healthy machine with GPUs that are not linked by NVLink."""
    fields = {"driver": told or driver(count), "package": packages(GPU_PACKAGES), **changes}
    return cpu(files(gpu_files(count), *more, without=without), **fields)


def nvlink(count: int = 2, *more: dict[str, str], **changes: Any) -> System:
    """A healthy machine with NVLink between all GPUs."""
    told = changes.pop("told", None) or driver(count, links=18, model="NVIDIA H200")
    return gpu(count, *more, told=told, **changes)


def nic_files(**changes: str) -> dict[str, str]:
    """Two RoCE cards that can be used, each below the root of one GPU; `changes` replace files of mlx5_0's port."""
    found = {
        "/dev/infiniband/rdma_cm": "",
        "/proc/modules": "mlx5_ib 1 0 - Live 0\nnvidia_peermem 1 0 - Live 0\n"
        "ib_core 1 2 nvidia_peermem,mlx5_ib, - Live 0",
    }
    for name, index in NICS.items():
        root = 16 * (index + 1)
        device = f"/sys/devices/pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{root + 2:02x}:00.0"
        port = f"/sys/class/infiniband/{name}/ports/1"
        own = {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "link_layer": "Ethernet",
            "rate": "200 Gb/sec (4X HDR)",
            "lid": "0x0",
            "sm_lid": "0x0",
            "counters/link_downed": "2",
            "gids/0": "0000:0000:0000:0000:0000:0000:0000:0000",
            "gids/3": f"0000:0000:0000:0000:0000:ffff:0a01:000{index}",
            "gid_attrs/types/3": "RoCE v2",
            "gid_attrs/ndevs/3": f"eth{index + 1}",
        }
        if index == 0:
            own |= {key.replace("__", "/"): value for key, value in changes.items()}
        found |= {f"{port}/{key}": value for key, value in own.items()}
        found |= {
            f"/sys/class/infiniband/{name}/device": f"-> {device}",
            f"/sys/class/infiniband/{name}/node_type": "1: CA",
            f"/sys/class/infiniband_verbs/uverbs{index}/ibdev": name,
            f"/dev/infiniband/uverbs{index}": "",
            f"/sys/bus/pci/devices/0000:{root + 2:02x}:00.0": f"-> {device}",
            f"{device}/numa_node": "0",
            f"{device}/current_link_speed": "32.0 GT/s PCIe",
            f"{device}/current_link_width": "16",
            f"{device}/net/eth{index + 1}/operstate": "up",
            f"/sys/class/net/eth{index + 1}/mtu": "9000",
        }
    return found


def rdma(*more: dict[str, str], without: str = "", **changes: Any) -> System:
    """A healthy machine with two GPUs on NVLink and two RoCE cards."""
    fields = {
        "addresses": {"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",), "eth1": ("10.1.0.0",), "eth2": ("10.1.0.1",)},
        "limits": {"memlock": Limit(None, None), "nofile": Limit(65536, 65536), "nproc": Limit(None, None)},
        "driver": driver(2, links=18, model="NVIDIA H200"),
        "package": packages(GPU_PACKAGES),
        **changes,
    }
    return cpu(files(gpu_files(2), nic_files(), *more, without=without), **fields)


def rdma_without_gpus() -> System:
    """A server without GPUs whose cards lack addresses and locked memory: no matter, nothing would use them."""
    cards = {path: text for path, text in nic_files().items() if "gids/3" not in path}
    return cpu(files(cards))


def but(system: System, **changes: Any) -> System:
    return dataclasses.replace(system, **changes)


HEALTHY = {
    "cpu": cpu,
    "one-gpu": gpu,
    "two-gpus-pcie": lambda: gpu(2),
    "consumer-pair": lambda: gpu(2, told=driver(2, word="GNS", model="NVIDIA GeForce RTX 4090", consumer=True)),
    "nvlink-pair": nvlink,
    "nvlink-eight": lambda: nvlink(8),
    "rdma": rdma,
    "cpu-with-nics": lambda: rdma_without_gpus(),
}
