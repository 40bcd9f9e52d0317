"""Every check on made-up machines: silent on healthy ones, and each fault named by its own id."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit import doctor_systems as systems
from tests.unit.doctor_systems import but, cpu, files, gpu, nic_files, nvlink, packages, rdma

from slipstream.doctor import case, docker, driver, run, show
from slipstream.doctor.checks import CHECKS, GROUPS
from slipstream.doctor.checks.gpu import cpu_set
from slipstream.doctor.checks.packages import version_numbers
from slipstream.doctor.system import Limit, NoAnswer, Package, Space, System
from slipstream.doctor.verdict import Remedy, Result, absent, check, fail, ok, warn
from slipstream.errors import ConfigError
from slipstream.topo.nvml import FabricFacts, LinkFacts
from slipstream.topo.tree import ListTree

PASSIVE = [item for item in CHECKS if not item.active]
BY_ID = {item.id: item for item in CHECKS}
SEED_TREE = ListTree.parse((systems.FIXTURES / "seed_machine_tree.tsv").read_text())


def result(name: str, system: System, **wish: str) -> Result:
    """What one check says of a machine."""
    patient = case.make(system, case.Wish(**wish))
    (found,) = run.diagnose(patient, [BY_ID[name]]).results
    return found


def diagnosis(system: System, **wish: str) -> run.Diagnosis:
    return run.diagnose(case.make(system, case.Wish(**wish)), PASSIVE)


@pytest.mark.parametrize("name", systems.HEALTHY)
def test_a_healthy_machine_has_no_warning_and_no_failure(name: str):
    found = diagnosis(systems.HEALTHY[name]())
    assert [(r.id, r.status, r.seen) for r in found.results if r.bad] == []
    assert not any("check itself failed" in r.seen for r in found.results)


def test_an_empty_system_is_no_reason_to_stumble():
    found = diagnosis(System(tree=ListTree({}), package=packages(systems.PACKAGES)))
    assert not any("check itself failed" in r.seen for r in found.results)


def told(count: int, **changes: Any) -> driver.DriverFacts:
    """Facts of NVLink GPUs with the first GPU changed."""
    facts = systems.driver(count, links=18, model="NVIDIA H200")
    first = msgspec.structs.replace(facts.nvml.gpus[0], **changes)
    return msgspec.structs.replace(facts, nvml=msgspec.structs.replace(facts.nvml, gpus=(first, *facts.nvml.gpus[1:])))


def trouble(kind: str, said: str) -> driver.DriverFacts:
    return driver.DriverFacts(trouble=kind, said=said)  # type: ignore[arg-type]


def with_package(base: dict[str, Package], *more: Package, **changes: Any) -> dict[str, Any]:
    return {"package": packages({**base, **{package.name: package for package in more}}), **changes}


INFINIBAND = nic_files(link_layer="InfiniBand", lid="0x12", sm_lid="0x1")
XID = "NVRM: Xid (PCI:0000:11:00): 79, pid=1, GPU has fallen off the bus."
NIXL = Package("nixl", "1.0.0")
MOONCAKE = Package("mooncake-transfer-engine", "0.3.13")
ENGINE = {"libraries": lambda name: ("/site/mooncake/engine.so",) if "mooncake" in name else ()}
SWITCH = {"/sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:05:00.0/class": "0x068000"}
IDLE_FABRIC = told(2, fabric=FabricFacts(state="In Progress"))
ALL_IDLE = msgspec.structs.replace(
    IDLE_FABRIC,
    nvml=msgspec.structs.replace(
        IDLE_FABRIC.nvml,
        gpus=tuple(
            msgspec.structs.replace(gpu, fabric=FabricFacts(state="In Progress")) for gpu in IDLE_FABRIC.nvml.gpus
        ),
    ),
)

OLD_DRIVER = msgspec.structs.replace(
    systems.driver(1), nvml=msgspec.structs.replace(systems.driver(1).nvml, driver="535.54.03")
)

INTERLEAVED = {  # CPU numbers of two sockets in turn
    "/sys/devices/system/node/node0/cpulist": ",".join(map(str, range(0, 32, 2))),
    "/sys/devices/system/node/node1/cpulist": ",".join(map(str, range(1, 32, 2))),
    "/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/local_cpulist": ",".join(map(str, range(0, 32, 2))),
}
FAULTS: dict[str, tuple[str, str, System, str]] = {
    # what: (check, status, machine, words of the result)
    "no files in a container": ("container.rdma-files", "warn", rdma(without="/dev/infiniband"), "mlx5_0, mlx5_1"),
    "some files": ("container.rdma-files", "warn", rdma(without="/dev/infiniband/uverbs1"), "mlx5_1 is active"),
    "asked for without files": (
        "container.rdma-files",
        "fail",
        rdma(without="/dev/infiniband", environ={"SLIPSTREAM_TRANSPORT": "nixl"}),
        "active on the host",
    ),
    "no rdma_cm": (
        "container.connection-manager",
        "warn",
        rdma(without="/dev/infiniband/rdma_cm", **with_package(systems.GPU_PACKAGES, NIXL)),
        "rdma_cm is missing",
    ),
    "gpus without a driver": (
        "container.gpu-files",
        "warn",
        gpu(1, driver=None, without="/dev/nvidia"),
        "no driver for this process",
    ),
    "mixed libraries": (
        "container.mixed-libraries",
        "warn",
        rdma({"/usr/lib64/libibverbs.so.1": "", "/usr/local/lib/libibverbs.so.1": ""}),
        "more than once",
    ),
    "gvisor": ("container.sandbox", "warn", nvlink(2, {"/proc/version": "Linux version 4.4.0 gVisor"}), "gVisor"),
    "wsl": (
        "container.wsl",
        "warn",
        nvlink(2, {"/proc/sys/kernel/osrelease": "5.15.90.1-microsoft-standard-WSL2"}),
        "WSL2",
    ),
    "ptrace scope": (
        "container.ptrace",
        "warn",
        cpu(files({"/proc/sys/kernel/yama/ptrace_scope": "2"}), **with_package(systems.PACKAGES, NIXL)),
        "ptrace_scope is 2",
    ),
    "imex": (
        "container.imex",
        "warn",
        nvlink(2, told=told(2, fabric=FabricFacts(state="Completed", cluster="ab"))),
        "IMEX",
    ),
    "memlock of 64 KiB": (
        "limits.memlock",
        "warn",
        cpu(limits={"memlock": Limit(65536, 65536)}),
        "64 KiB",
    ),
    "memlock with a NIC": ("limits.memlock", "warn", but(rdma(), limits={"memlock": Limit(8 << 20, None)}), "8 MiB"),
    "few files": ("limits.open-files", "warn", cpu(limits={"nofile": Limit(256, 1024)}), "256"),
    "few processes": ("limits.processes", "warn", cpu(limits={"nproc": Limit(100, 100)}), "100 for this user"),
    "pids of the group": (
        "limits.processes",
        "fail",
        cpu(files({"/sys/fs/cgroup/user.slice/pids.max": "100", "/sys/fs/cgroup/user.slice/pids.current": "90"})),
        "90 of 100",
    ),
    "small container": (
        "limits.memory",
        "warn",
        cpu(files({"/sys/fs/cgroup/user.slice/session.scope/memory.max": str(systems.GIB)})),
        "1 GiB",
    ),
    "killed": (
        "limits.killed",
        "warn",
        cpu(files({"/.dockerenv": "", "/sys/fs/cgroup/memory.events": "oom 3\noom_kill 2"})),
        "2 so far",
    ),
    "no dev shm": ("limits.shared-memory", "warn", cpu(files(without="/dev/shm")), "there is no /dev/shm"),
    "small dev shm": (
        "limits.shared-memory",
        "warn",
        nvlink(2, space=lambda path: Space(64 << 20, 60 << 20)),
        "60 MiB free of 64 MiB",
    ),
    "huge pages": ("limits.huge-pages", "fail", cpu(environ={"MC_STORE_USE_HUGEPAGE": "1"}), "no huge page"),
    "lost gpu in the log": ("gpu.kernel-log", "fail", gpu(kernel_log=lambda: [XID]), "Xid 79 of the GPU at 0000:11:00"),
    "hanging driver": ("gpu.driver", "fail", gpu(told=trouble("hang", "no answer within 15 s")), "no answer"),
    "no package": ("gpu.driver", "fail", gpu(told=trouble("no-package", "")), "nvidia-ml-py"),
    "driver mismatch": (
        "gpu.driver",
        "fail",
        gpu(told=trouble("no-start", "Driver/library version mismatch")),
        "mismatch",
    ),
    "lost gpu": (
        "gpu.lost",
        "fail",
        gpu(
            told=msgspec.structs.replace(
                systems.driver(1),
                nvml=msgspec.structs.replace(
                    systems.driver(1).nvml, problems=("GPU1: NVML gives no handle (lost, or not permitted)",)
                ),
            )
        ),
        "GPU1",
    ),
    "exclusive": ("gpu.compute-mode", "warn", gpu(told=systems.driver(1, compute_mode="exclusive process")), "GPU0"),
    "prohibited": ("gpu.compute-mode", "fail", gpu(told=systems.driver(1, compute_mode="prohibited")), "prohibited"),
    "remap pending": (
        "gpu.memory-repair",
        "warn",
        gpu(told=systems.driver(1, remap_pending=True)),
        "waits for a reset",
    ),
    "remap failed": ("gpu.memory-repair", "fail", gpu(told=systems.driver(1, remap_failed=True)), "could not"),
    "hidden by a typing error": ("gpu.visible", "fail", gpu(2, environ={"CUDA_VISIBLE_DEVICES": "0,7"}), "7 is not"),
    "mixed order": (
        "gpu.order",
        "warn",
        gpu(2, told=told(2, model="NVIDIA L4")),
        "different GPUs",
    ),
    "mig": ("gpu.mig", "warn", nvlink(2, told=told(2, mig=True)), "GPU0 in MIG mode"),
    "old driver": (
        "gpu.driver-version",
        "fail",
        gpu(told=OLD_DRIVER, **with_package(systems.GPU_PACKAGES, Package("torch", "2.13.0+cu130"))),
        "driver 535.54.03 with PyTorch for CUDA 13.0",
    ),
    "far cpus": (
        "gpu.near-cpus",
        "warn",
        gpu(1, {"/sys/devices/system/node/node1/cpulist": "8-15"}, cpus=frozenset(range(8, 16))),
        "near GPU0",
    ),
    "a cut list of cpus": (
        "gpu.near-cpus",
        "warn",
        gpu(1, INTERLEAVED, cpus=frozenset({0, 2, 4, 6, 8, 10})),
        "CPUs 0,2,4,6,8,10: the first of the 16 near GPU0",
    ),
    "narrow link": (
        "gpu.pcie-link",
        "warn",
        gpu(1, {"/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/current_link_width": "4"}),
        "x4 of x16",
    ),
    "expandable": (
        "gpu.allocator",
        "warn",
        gpu(
            environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            **with_package(systems.GPU_PACKAGES, Package("sglang", "0.5.11")),
        ),
        "sglang is installed",
    ),
    "small bar1": ("gpu.bar1", "warn", rdma(driver=systems.driver(2, links=18, bar1_bytes=256 << 20)), "256 MiB"),
    "chipset without peers": ("peer.access", "warn", gpu(2, told=systems.driver(2, word="CNS")), "chipset"),
    "fabric": ("peer.fabric", "fail", nvlink(2, told=ALL_IDLE), "GPU0, GPU1: In Progress"),
    "fabric manager": ("peer.fabric-manager", "fail", nvlink(2, SWITCH, told=ALL_IDLE), "no nv-fabricmanager"),
    "dead links": (
        "peer.nvlinks",
        "warn",
        nvlink(2, told=told(2, links=tuple(LinkFacts(slot=s, active=False) for s in range(18)))),
        "GPU0: all links inactive",
    ),
    "some dead links": (
        "peer.nvlinks",
        "warn",
        nvlink(2, told=told(2, links=tuple(LinkFacts(slot=s, active=s > 1, remote="switch") for s in range(18)))),
        "GPU0 (2 off)",
    ),
    "module boards without NVLink": (
        "peer.nvlinks",
        "warn",
        gpu(2, told=systems.driver(2, model="NVIDIA H100 80GB HBM3 SXM5")),
        "no NVLink is shown",
    ),
    "odd gpu": ("peer.odd-gpu", "warn", nvlink(4, told=told(4, links=())), "GPU0 has NVLink to no other"),
    "iommu": (
        "peer.iommu",
        "warn",
        gpu(2, {"/sys/class/iommu/dmar0/x": ""}),
        "the IOMMU translates",
    ),
    "no address": (
        "rdma.addresses",
        "warn",
        rdma(nic_files(gids__3="0000:0000:0000:0000:0000:0000:0000:0000")),
        "mlx5_0: active",
    ),
    "nothing usable": (
        "rdma.usable",
        "warn",
        but(rdma(), tree=files(systems.gpu_files(2), {k: v for k, v in nic_files().items() if "gids/3" not in k})),
        "0 of 2 ports (2 active)",
    ),
    "no links but asked": (
        "rdma.links",
        "fail",
        rdma(
            {
                f"/sys/class/infiniband/{name}/ports/1/{file}": text
                for name in systems.NICS
                for file, text in (("state", "1: DOWN"), ("phys_state", "2: Polling"))
            },
            environ={"SLIPSTREAM_TRANSPORT": "nixl"},
        ),
        "POLLING",
    ),
    "init": ("rdma.subnet-manager", "warn", rdma(nic_files(link_layer="InfiniBand", state="2: INIT")), "mlx5_0/1 INIT"),
    "link local": (
        "rdma.gid-kind",
        "warn",
        rdma(nic_files(gids__3="fe80:0000:0000:0000:0000:0000:0000:0001")),
        "link-local",
    ),
    "fixed index": ("rdma.gid-index", "fail", rdma(environ={"NCCL_IB_GID_INDEX": "5"}), "no entry 5 (use 3)"),
    "index of v1": (
        "rdma.gid-index",
        "fail",
        rdma(
            nic_files(gids__1="0000:0000:0000:0000:0000:ffff:0a01:0000", gid_attrs__types__1="IB/RoCE v1"),
            environ={"MC_GID_INDEX": "1"},
        ),
        "RoCE v1",
    ),
    "foreign interface": ("rdma.gid-foreign", "warn", rdma(nic_files(gid_attrs__ndevs__3="eth9")), "of eth9"),
    "foreign address": (
        "rdma.gid-foreign",
        "warn",
        rdma(addresses={"lo": ("127.0.0.1",), "eth1": ("172.17.0.2",), "eth2": ("10.1.0.1",)}),
        "10.1.0.0",
    ),
    "mtu": ("rdma.mtu", "warn", rdma({"/sys/class/net/eth1/mtu": "1500"}), "mlx5_0 1500, mlx5_1 9000"),
    "flapping": ("rdma.flapping", "warn", rdma(nic_files(counters__link_downed="255")), "mlx5_0"),
    "slow slot": (
        "rdma.pcie",
        "warn",
        rdma({"/sys/devices/pci0000:10/0000:10:01.0/0000:12:00.0/current_link_width": "4"}),
        "mlx5_0: 200 Gb/s port",
    ),
    "unknown name": ("rdma.names", "fail", rdma(environ={"NCCL_IB_HCA": "=mlx5_7:1"}), "mlx5_7, which is not here"),
    "a column's number for a name": (
        "rdma.names",
        "fail",
        rdma(environ={"NCCL_IB_HCA": "NIC1"}),
        "NIC1, which is not here (NIC1 of nvidia-smi's matrix is a position: the device there is mlx5_1)",
    ),
    "dead name": (
        "rdma.names",
        "fail",
        rdma(nic_files(state="1: DOWN"), environ={"UCX_NET_DEVICES": "mlx5_0:1"}),
        "mlx5_0, which cannot be used",
    ),
    "mixed fabrics": (
        "rdma.one-fabric",
        "fail",
        rdma(INFINIBAND, environ={"NCCL_IB_HCA": "mlx5_0,mlx5_1"}),
        "one list",
    ),
    "no peermem": (
        "rdma.peer-memory",
        "warn",
        rdma({"/proc/modules": "mlx5_ib 1 0 - Live 0x0", "/proc/driver/nvidia/version": "NVRM version: 580.82.07"}),
        "nvidia_peermem is not loaded",
    ),
    "peermem not bound": (
        "rdma.peer-memory",
        "warn",
        rdma(
            {
                "/proc/modules": "nvidia_peermem 1 0 - Live 0x0\nib_core 1 1 mlx5_ib, - Live 0x0",
                "/proc/driver/nvidia/version": "NVRM version: 580.82.07",
            }
        ),
        "has not registered",
    ),
    "forced off": ("rdma.forced-off", "warn", rdma(environ={"NCCL_P2P_DISABLE": "1"}), "NCCL_P2P_DISABLE=1"),
    "loopback down": ("network.loopback", "fail", cpu(down=frozenset({"lo"})), "lo is down"),
    "port in use": ("network.port", "warn", cpu(bind=lambda host, port: "in use"), "in use by another program"),
    "host not here": (
        "network.port",
        "fail",
        cpu(environ={"SLIPSTREAM_HOST": "192.0.2.1"}, bind=lambda host, port: "Cannot assign requested address"),
        "192.0.2.1:8000",
    ),
    "closed range": (
        "network.free-ports",
        "fail",
        cpu(files({"/proc/sys/net/ipv4/ip_local_port_range": "40000\t40003"})),
        "40000 to 40003, 4 ports",
    ),
    "no free port": (
        "network.free-ports",
        "fail",
        cpu(bind=lambda host, port: "in use" if port == 0 else ""),
        "in use",
    ),
    "ports used up": (
        "network.used-ports",
        "warn",
        cpu(files({"/proc/net/sockstat": "TCP: inuse 5 orphan 0 tw 20000 alloc 8 mem 1"})),
        "20000 of 28232",
    ),
    "proxy": ("network.proxy", "warn", cpu(environ={"http_proxy": "http://p:3128"}), "no_proxy lacks 127.0.0.1 and"),
    "interface": ("network.interface", "fail", cpu(environ={"NCCL_SOCKET_IFNAME": "ens9"}), "matches none of eth0, lo"),
    "host of another": (
        "network.host",
        "fail",
        cpu(environ={"SGLANG_HOST_IP": "10.9.9.9"}),
        "no address of this machine",
    ),
    "bridge": (
        "network.host",
        "warn",
        cpu(environ={"HOST_IP": "172.17.0.1"}, addresses={"docker0": ("172.17.0.1",), "eth0": ("10.0.0.5",)}),
        "docker0",
    ),
    "loopback name": ("network.hostname", "warn", cpu(environ={"SLIPSTREAM_HOST": "10.0.0.5"}), "only 127.0.1.1"),
    "old python": ("packages.python", "fail", cpu(python=(3, 10)), "3.10"),
    "old click": (
        "packages.required",
        "fail",
        cpu(**with_package(systems.PACKAGES, Package("click", "7.9"))),
        "older than",
    ),
    "no torch": (
        "packages.torch",
        "fail",
        cpu(package=packages({"slipstream": Package("slipstream", "0.1.0")})),
        "not installed",
    ),
    "cpu torch": ("packages.torch", "fail", gpu(**with_package(systems.PACKAGES)), "a build without CUDA"),
    "no triton": (
        "packages.gpu-extra",
        "fail",
        gpu(**with_package({k: v for k, v in systems.GPU_PACKAGES.items() if k != "triton"})),
        "triton is not installed",
    ),
    "wrong nvml": (
        "packages.nvml",
        "warn",
        cpu(**with_package(systems.PACKAGES, Package("pynvml", "11.5.0"))),
        "11.5.0",
    ),
    "mooncake without cuda": (
        "packages.mooncake",
        "warn",
        gpu(needed=lambda path: ("libibverbs.so.1",), **with_package(systems.GPU_PACKAGES, MOONCAKE, **ENGINE)),
        "without CUDA",
    ),
    "mooncake of another cuda": (
        "packages.mooncake",
        "warn",
        gpu(needed=lambda path: ("libcudart.so.13",), **with_package(systems.GPU_PACKAGES, MOONCAKE, **ENGINE)),
        "with CUDA 13, PyTorch has CUDA 12.8",
    ),
    "nixl without plug-in": ("packages.nixl", "warn", cpu(**with_package(systems.PACKAGES, NIXL)), "none found"),
    "nixl without cuda": (
        "packages.nixl",
        "warn",
        gpu(libraries=lambda name: ("/site/libplugin_UCX.so",), **with_package(systems.GPU_PACKAGES, NIXL)),
        "no CUDA part",
    ),
    "ucx transports": (
        "packages.ucx-transports",
        "warn",
        cpu(environ={"UCX_TLS": "rc,cuda_ipc"}),
        "leaves out tcp, self",
    ),
    "cache": ("packages.cache", "warn", gpu(writable=lambda path: False), "/home/user/.triton cannot be written"),
    "wrong setting": ("config.settings", "fail", cpu(environ={"SLIPSTREAM_PAGE_TOKENS": "0"}), "0 is not possible"),
    "unknown setting": ("config.settings", "warn", cpu(environ={"SLIPSTREAM_PAGE_TOKEN": "16"}), "did you mean"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_named_by_its_check(what: str):
    name, status, system, words = FAULTS[what]
    found = result(name, system)
    assert found.status == status
    assert words in found.seen
    assert found.wanted
    assert found.why
    assert found.remedy


def test_every_passive_check_of_the_machine_has_a_fault_here():
    informs = {"container.place", "container.lock-capability", "rdma.distance", "packages.engines"}
    elsewhere = {"container.rdma-permission", "peer.guest"}  # below; config and cluster have files of their own
    wanted = {item.id for item in PASSIVE if item.group not in ("config", "cluster")}
    assert wanted - {name for name, *_ in FAULTS.values()} == informs | elsewhere


def test_files_that_may_not_be_opened_are_no_missing_files():
    class Closed(ListTree):
        def may_open(self, path: str) -> bool | None:
            return False

    tree = Closed({**systems.BASE, **systems.gpu_files(2), **nic_files()})
    assert result("container.rdma-files", but(rdma(), tree=tree)).status == "ok"
    found = result("container.rdma-permission", but(rdma(), tree=tree))
    assert (found.status, "uverbs0" in found.seen) == ("warn", True)


def test_a_flat_guest_is_told_from_a_real_machine():
    flat: dict[str, str] = {}
    for path, text in {**systems.gpu_files(2), **nic_files()}.items():
        for root in ("10", "20"):
            path, text = (t.replace(f"pci0000:{root}/0000:{root}:01.0/", "pci0000:00/") for t in (path, text))
        flat[path] = text
    guest = {"/proc/cpuinfo": "flags\t\t: fpu hypervisor avx2"}
    assert result("peer.guest", rdma(guest)).status == "ok"
    flat_tree = files(flat, guest)
    found = result("peer.guest", but(rdma(), tree=flat_tree, driver=systems.driver(2)))
    assert (found.status, "flat" in found.seen) == ("warn", True)


def test_the_seed_machine_is_told_what_an_address_would_give():
    facts = systems.driver(8, links=18, model="NVIDIA H800")
    buses = [f"0000:{b:02x}:00.0" for k in range(4) for b in (0x13 + 0x20 * k, 0x21 + 0x20 * k)]
    gpus = tuple(msgspec.structs.replace(g, pci=pci) for g, pci in zip(facts.nvml.gpus, buses, strict=True))
    facts = msgspec.structs.replace(facts, nvml=msgspec.structs.replace(facts.nvml, gpus=gpus))
    seed = System(tree=SEED_TREE, driver=facts, package=packages(systems.GPU_PACKAGES))
    found = result("rdma.addresses", seed)
    assert found.status == "warn"
    assert "mlx5_4" in found.seen
    assert "GPU0 gets a PIX rail" in found.why
    usable = result("rdma.usable", seed)
    assert (usable.status, usable.seen) == ("ok", "1 of 32 ports (4 active): mlx5_24/1")
    assert case.make(seed, case.Wish()).way == "nvlink"
    flags = docker.flags(case.make(seed, case.Wish()))
    assert "--device=/dev/infiniband" in " ".join(flag.flag for flag in flags)


# ---------------------------------------------------------------------------------------------- causes and effects


def test_causes_come_before_their_effects_and_fold_them():
    system = cpu(down=frozenset({"lo"}), bind=lambda host, port: "Network is unreachable")
    found = diagnosis(system)
    (cause,) = found.causes
    assert cause.id == "network.loopback"
    assert {effect.id for effect in found.effects_of(cause)} >= {"network.port", "network.free-ports"}
    shown = show.text(found)
    assert shown.index("[network.loopback]") < shown.index("[network.port]")
    assert shown.count("remedy:") == 1
    assert found.failed


def test_failures_come_before_warnings():
    system = cpu(environ={"http_proxy": "http://p", "NCCL_SOCKET_IFNAME": "ens9"})
    assert [cause.status for cause in diagnosis(system).causes] == ["fail", "warn"]


def test_causes_are_known_checks_and_stand_before_their_effects():
    ids = [item.id for item in CHECKS]
    assert len(ids) == len(set(ids))
    for item in CHECKS:
        assert item.group in GROUPS
        assert set(item.causes) <= set(ids), item.id


def test_a_remedy_is_that_of_the_place():
    remedy = Remedy(host="modprobe", container="docker")
    assert [remedy.at(place) for place in ("host", "container", "pod")] == ["modprobe", "docker", "docker"]
    found = result("limits.memlock", cpu(files({"/.dockerenv": ""}), limits={"memlock": Limit(65536, 65536)}))
    assert "--ulimit memlock=-1" in found.remedy
    pod = cpu(limits={"memlock": Limit(65536, 65536)}, environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert "IPC_LOCK" in result("limits.memlock", pod).remedy


FIRST_NAMESPACES = {
    f"/proc/self/ns/{name}": f"-> {name}:[{number}]"
    for name, number in (("ipc", 4026531839), ("uts", 4026531838), ("pid", 4026531836), ("cgroup", 4026531835))
}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, "host"),
        ({"/.dockerenv": ""}, "container"),
        ({"/proc/1/cgroup": "0::/docker/abc"}, "container"),
        ({"/.dockerenv": "", **FIRST_NAMESPACES}, "host"),
        ({"/.dockerenv": "", **FIRST_NAMESPACES, "/proc/self/ns/pid": "-> pid:[4026532999]"}, "container"),
    ],
)
def test_the_place_is_read_from_files(changes: dict[str, str], place: str):
    assert case.place(cpu(files(changes))) == place


def test_a_check_that_stumbles_or_hangs_is_not_checked():
    @check("limits.stumbles", "x")
    def stumbles(patient: case.Case):
        raise RuntimeError("strange file")

    @check("limits.hangs", "x", limit_s=0.05)
    def hangs(patient: case.Case):
        time.sleep(5)
        return ok()

    patient = case.make(cpu(), case.Wish())
    first, second = run.diagnose(patient, [stumbles, hangs]).results
    assert (first.status, second.status) == ("not checked", "not checked")
    assert "strange file" in first.seen
    assert "no answer within 0.05 s" in second.seen


def test_verdicts_of_every_kind_are_counted_and_shown():
    @check("limits.a", "A")
    def a(patient: case.Case):
        return warn("seen", wanted="w", why="y", remedy="r")

    @check("limits.b", "B", causes=("limits.a",))
    def b(patient: case.Case):
        return fail("effect", wanted="w", why="y", remedy="r")

    @check("limits.c", "C")
    def c(patient: case.Case):
        return absent("nothing there")

    found = run.diagnose(case.make(cpu(), case.Wish()), [a, b, c])
    assert found.results[1].because == ("limits.a",)
    report = json.loads(show.json_text(found))
    assert report["failed"] is True
    assert [r["status"] for r in report["results"]] == ["warn", "fail", "not applicable"]
    assert "1 failed, 1 warned" in show.text(found)
    assert "C: nothing there  [limits.c]" in show.text(found, everything=True)


def test_checks_are_chosen_by_id_and_group():
    assert [item.id for item in run.select(("limits.memlock",), False)] == ["limits.memlock"]
    assert {item.group for item in run.select(("rdma", "peer"), False)} == {"rdma", "peer"}
    assert not any(item.active for item in run.select((), False))
    assert any(item.active for item in run.select((), True))
    with pytest.raises(ConfigError, match="no check or group 'memlock'"):
        run.select(("memlock",), False)


# ---------------------------------------------------------------------------------------------- small parts


def test_proxies_that_leave_local_addresses_out_are_fine():
    for value in ("localhost,127.0.0.1", "localhost,127.0.0.0/8", "*"):
        assert result("network.proxy", cpu(environ={"http_proxy": "x", "no_proxy": value})).status == "ok"


def test_a_used_port_of_slipstream_itself_is_fine():
    answers = {"/health": b'{"status":"ok"}', "/workers": b'{"workers":[]}', "/audit": b'{"problems":[]}'}
    system = cpu(bind=lambda host, port: "in use" if port else "", get=lambda url, path: (200, answers[path]))
    assert result("network.port", system).status == "ok"


def test_versions_are_compared_by_their_numbers():
    assert version_numbers("2.13.0+cpu") == (2, 13)
    assert version_numbers("0.3.13.post1") == (0, 3, 13)
    assert version_numbers("10.0") > version_numbers("9.9")


def test_cpu_lists_are_read():
    assert cpu_set("0-2,8") == {0, 1, 2, 8}
    assert cpu_set("") == frozenset()


def test_cards_are_read_from_any_nvml_and_gaps_stay_open():
    class Nvml:
        class NVMLError(Exception):
            pass

        def nvmlDeviceGetCount(self) -> int:
            return 2

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetComputeMode(self, gpu: int) -> int:
            return 3

        def nvmlDeviceGetBrand(self, gpu: int) -> int:
            return 11

        def nvmlDeviceGetBAR1MemoryInfo(self, gpu: int) -> SimpleNamespace:
            return SimpleNamespace(bar1Total=256 << 20)

        def nvmlDeviceGetRemappedRows(self, gpu: int) -> list[int]:
            if gpu:
                raise Nvml.NVMLError
            return [0, 1, 1, 0]

    first, second = driver.collect(Nvml()).cards
    assert (first.compute_mode, first.consumer, first.bar1_bytes) == ("exclusive process", True, 256 << 20)
    assert (first.remap_pending, first.remap_failed) == (True, False)
    assert (second.remap_pending, second.remap_failed) == (None, None)


def test_a_hanging_driver_is_given_up(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pynvml.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert driver.collect_in_child(1.0).trouble == "hang"
    (tmp_path / "pynvml.py").write_text("import os\nos._exit(7)\n")
    assert driver.collect_in_child(30.0).trouble == "crash"


def test_a_system_that_answers_nothing_says_so():
    with pytest.raises(NoAnswer):
        System().get("http://x", "/")
