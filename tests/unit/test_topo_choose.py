"""Choices and what must not change them: names, order, and devices that cannot be used."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.topo import choose, levels, probe, usable
from slipstream.topo.graph import Finding, Gid, Machine, Nic, Port
from slipstream.topo.merge import merge
from slipstream.topo.read import read_text
from slipstream.topo.tree import ListTree

FIXTURES = Path(__file__).parent.parent / "fixtures" / "topology"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
V4 = "0000:0000:0000:0000:0000:ffff:c000:0280"
PORTS = {  # files of one port by what it is
    "roce": {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "Ethernet", "gids/3": V4,
             "gid_attrs/types/3": "RoCE v2", "rate": "200 Gb/sec (4X HDR)"},
    "slow": {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "Ethernet", "gids/3": V4,
             "gid_attrs/types/3": "RoCE v2", "rate": "25 Gb/sec (1X EDR)"},
    "ib": {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "InfiniBand", "lid": "0x4", "sm_lid": "0x1",
           "rate": "400 Gb/sec (4X NDR)"},
    "down": {"state": "1: DOWN", "phys_state": "3: Disabled", "link_layer": "Ethernet", "gids/0": ZERO},
    "polling": {"state": "1: DOWN", "phys_state": "2: Polling", "link_layer": "InfiniBand", "lid": "0xffff"},
    "no address": {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "Ethernet", "gids/0": ZERO,
                   "rate": "200 Gb/sec (4X HDR)"},
    "no manager": {"state": "2: INIT", "phys_state": "5: LinkUp", "link_layer": "InfiniBand", "lid": "0xffff"},
}  # fmt: skip
DEAD = ("down", "polling", "no address", "no manager")


class Sketch:
    """A random PCI machine: roots, switches below some of them, GPUs and NICs on either."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.files: dict[str, str] = {}
        self.nics: list[tuple[str, str, str]] = []  # name, path, kind of port
        roots = chance.randint(1, 4)
        self.numa = {root: chance.choice((root % 2, root % 2, -1)) for root in range(roots)}
        for node in range(2):
            self.files[f"/sys/devices/system/node/node{node}/cpulist"] = f"{node * 8}-{node * 8 + 7}"
        self.slots = {(root, switch): 0 for root in range(roots) for switch in range(-1, 2)}
        for _ in range(chance.randint(1, 5)):
            self._device(self._slot(chance), "0x030200", "0x10de")
        names = [f"mlx5_{i}" for i in range(chance.randint(0, 7))]
        chance.shuffle(names)
        for name in names:
            self.add_nic(name, self._slot(chance), chance.choice((*PORTS, "roce", "roce")))

    def _slot(self, chance: random.Random) -> tuple[int, int]:
        return chance.choice(list(self.slots))

    def _device(self, slot: tuple[int, int], kind: str, vendor: str) -> str:
        root, switch = slot
        self.slots[slot] += 1
        address = f"0000:{0x20 * root + 8 * (switch + 1) + self.slots[slot] % 8:02x}:{self.slots[slot] // 8:02x}.0"
        parent = f"/sys/devices/pci0000:{0x20 * root:02x}/0000:{0x20 * root:02x}:1{switch + 1}.0"
        if switch >= 0:
            parent += f"/0000:{0x20 * root + 8 * (switch + 1):02x}:1f.0/0000:f{switch}:{self.slots[slot]:02x}.1"
        path = f"{parent}/{address}"
        self.files |= {f"{path}/class": kind, f"{path}/vendor": vendor, f"{path}/numa_node": str(self.numa[root])}
        self.files[f"/sys/bus/pci/devices/{address}"] = f"-> {path}"
        return path

    def add_nic(self, name: str, slot: tuple[int, int], kind: str) -> None:
        self.nics.append((name, self._device(slot, "0x020000", "0x15b3"), kind))

    def machine(self, rename: dict[str, str] | None = None, reverse: bool = False) -> Machine:
        files = dict(self.files)
        for name, path, kind in self.nics:
            base = f"/sys/class/infiniband/{(rename or {}).get(name, name)}"
            files |= {f"{base}/ports/1/{file}": value for file, value in PORTS[kind].items()}
            files |= {f"{base}/device": f"-> {path}", f"{base}/node_type": "1: CA"}
            if kind in ("roce", "slow", "down"):
                files[f"{path}/net/eth{path[-7:]}/operstate"] = "up" if kind != "down" else "down"
        machine = probe.machine(ListTree(files), None)
        if reverse:
            machine = msgspec.structs.replace(machine, nics=tuple(reversed(machine.nics)))
        return machine


def choices(machine: Machine, rename: dict[str, str] | None = None) -> bytes:
    """Everything that a plan decides, as bytes; names are mapped back through `rename`."""
    plan = choose.plan(machine)
    text = msgspec.json.encode((plan.networks, plan.pairs, plan.handoff)).decode()
    for old, new in (rename or {}).items():
        text = text.replace(f'"{new}"', f'"{old}"').replace(f"through {new},", f"through {old},")
    return text.encode()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_levels_are_symmetric_and_choices_are_too(seed: int) -> None:
    machine = Sketch(seed).machine()
    names = [device.name for device in (*machine.gpus, *machine.nics)]
    for a in names:
        for b in names:
            assert machine.level(a, b) == machine.level(b, a)
    for i, a in enumerate(machine.gpus):
        for b in machine.gpus[i + 1 :]:
            assert choose.pair(machine, a, b).paths == choose.pair(machine, b, a).paths


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_renaming_devices_renames_the_choices_and_nothing_else(seed: int) -> None:
    sketch = Sketch(seed)
    names = [name for name, _, _ in sketch.nics]
    order = list(range(len(names)))
    random.Random(seed).shuffle(order)
    rename = {name: f"rail_{order[i]}x" for i, name in enumerate(names)}
    assert choices(sketch.machine(rename), rename) == choices(sketch.machine())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_the_order_of_devices_changes_no_choice(seed: int) -> None:
    sketch = Sketch(seed)
    assert choices(sketch.machine(reverse=True)) == choices(sketch.machine())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.sampled_from(DEAD))
def test_a_near_nic_that_cannot_be_used_changes_no_choice(seed: int, kind: str) -> None:
    sketch = Sketch(seed)
    before = choices(sketch.machine())
    for slot in list(sketch.slots):
        sketch.add_nic(f"mlx5_{90 + len(sketch.nics)}", slot, kind)
    assert choices(sketch.machine()) == before


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_every_refused_nic_has_its_reasons_and_none_is_offered(seed: int) -> None:
    machine = Sketch(seed).machine()
    plan = choose.plan(machine)
    refused = {port.nic for port in plan.refused}
    offered = {nic.nic for network in plan.networks for nic in network.ranked}
    assert all(port.reasons and all(reason.text for reason in port.reasons) for port in plan.refused)
    assert not refused & offered
    assert not machine.gpus or refused | offered == {nic.name for nic in machine.nics}


def test_a_dead_nearest_port_is_passed_over_for_its_living_neighbour() -> None:
    """Two dual-port cards whose first port is down (rdma_link_bf3_four_ports): the near living port is right."""
    table = (
        "\tGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tNIC3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tSYS\tPIX\tPIX\tSYS\tSYS\t0-7\t0\t\tN/A\nGPU1\tSYS\t X \tSYS\tSYS\tPIX\tPIX\t8-15\t1\t\tN/A\n"
        "NIC0\tPIX\tSYS\t X \tPIX\tSYS\tSYS\nNIC1\tPIX\tSYS\tPIX\t X \tSYS\tSYS\n"
        "NIC2\tSYS\tPIX\tSYS\tSYS\t X \tPIX\nNIC3\tSYS\tPIX\tSYS\tSYS\tPIX\t X \n\nNIC Legend:\n\n"
        "  NIC0: mlx5_0\n  NIC1: mlx5_1\n  NIC2: mlx5_2\n  NIC3: mlx5_3\n"
    )
    links = (FIXTURES / "rdma_link_bf3_four_ports.txt").read_text()
    plan = choose.plan(merge([read_text(table), read_text(links)]))
    best = {network.gpu: network.best.nic for network in plan.networks if network.best}
    assert best == {"GPU0": "mlx5_1", "GPU1": "mlx5_3"}


def test_equal_ports_are_shared_out_among_gpus() -> None:
    sketch = Sketch(0)
    sketch.files, sketch.nics, sketch.numa = {}, [], {0: 0}
    sketch.slots = {(0, 0): 0}
    for _ in range(4):
        sketch._device((0, 0), "0x030200", "0x10de")
    for i in range(4):
        sketch.add_nic(f"mlx5_{i}", (0, 0), "roce")
    plan = choose.plan(sketch.machine())
    assert sorted(network.best.nic for network in plan.networks if network.best) == [f"mlx5_{i}" for i in range(4)]


def test_a_front_end_port_is_ranked_behind_a_far_rail() -> None:
    good = Port(number=1, state="ACTIVE", phys="LINK_UP", layer="Ethernet", rate_gbps=400, netdev="rail0",
                gids=(Gid(index=3, value=V4, version="v2"),))  # fmt: skip
    slow = msgspec.structs.replace(good, rate_gbps=25.0, netdev="eth0")
    nics = usable.judge_all([Nic(name="near", ports=(slow,)), Nic(name="far", ports=(good,))])
    machine = merge([read_text((FIXTURES / "topo_a10g_x1.txt").read_text())])
    machine = msgspec.structs.replace(machine, nics=nics, levels={"GPU0": {"near": "PIX", "far": "SYS"}})
    network = choose.plan(machine).networks[0]
    assert [nic.nic for nic in network.ranked] == ["far", "near"]
    assert "slower" in {finding.code for finding in network.ranked[1].reasons}


def test_a_pcie_only_matrix_is_no_proof_against_nvlink() -> None:
    machine = merge([read_text((FIXTURES / "topo_gpu_x8_topo_mp_pcie_only.txt").read_text())])
    nvlink = next(path for path in choose.plan(machine).pairs[0].paths if path.way == "nvlink")
    assert [reason.code for reason in nvlink.reasons] == ["nvlink-not-shown"]


def test_gpus_whose_rows_disagree_get_no_nvlink_plan() -> None:
    machine = merge([read_text((FIXTURES / "topo_h100_x4_asymmetric_nvlink.txt").read_text())])
    ways = {f"{pair.a}-{pair.b}": pair.best.way for pair in choose.plan(machine).pairs}
    assert ways["GPU0-GPU1"] == "nvlink"
    assert {ways[pair] for pair in ("GPU0-GPU2", "GPU1-GPU2", "GPU2-GPU3")} != {"nvlink"}
    assert machine.level("GPU0", "GPU2") == levels.UNKNOWN


def test_gns_peers_stage_through_host_memory() -> None:
    machine = merge([read_text((FIXTURES / "topo_rtx5090_x2_p2p_gns.txt").read_text())])
    pair = choose.plan(machine).pairs[0]
    assert pair.best.way == "host-memory"
    peer = next(path for path in pair.paths if path.way == "pcie-peer")
    assert Finding("no-peer-access", "the GPUs do not support peer access") in peer.reasons


def test_management_functions_and_missing_device_files_are_refused() -> None:
    port = Port(number=1, state="ACTIVE", phys="LINK_UP", layer="InfiniBand", lid=3, sm_lid=1)
    four = tuple(msgspec.structs.replace(port, number=number) for number in range(1, 5))
    data = Nic(name="mlx5_0", pci="0000:0b:00.0", ports=(port,))
    nics = usable.judge_all([data, Nic(name="smi1", pci="0000:0b:00.0", ports=four)])
    assert nics[0].ports[0].usable == "ib"
    assert {reason.code for port in nics[1].ports for reason in port.reasons} == {"management-device"}
    missing = usable.judge_all([msgspec.structs.replace(data, device_file="")])
    assert [reason.code for reason in missing[0].ports[0].reasons] == ["no-device-file"]


def test_levels_follow_from_pci_paths() -> None:
    root = "/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0"
    gpu, near = f"{root}/0000:12:00.0/0000:13:00.0", f"{root}/0000:12:01.0/0000:14:00.0"
    deep = f"{root}/0000:12:02.0/0000:15:00.0/0000:16:00.0/0000:17:00.0"
    same_root, other = "/sys/devices/pci0000:10/0000:10:02.0/0000:18:00.0", "/sys/devices/pci0000:80/0000:81:00.0"
    assert levels.between(gpu, near, 0, 0, 2) == "PIX"
    assert levels.between(gpu, deep, 0, 0, 2) == "PXB"
    assert levels.between(gpu, same_root, 0, 0, 2) == "PHB"
    assert levels.between(gpu, other, 0, 0, 2) == "NODE"
    assert levels.between(gpu, other, 0, 1, 2) == "SYS"
    assert levels.between(gpu, other, 0, None, 2) == levels.UNKNOWN
    assert levels.between(gpu, other, None, None, 1) == "NODE"
    card = f"{root}/0000:12:01.0/0000:14:00"
    assert levels.between(f"{card}.0", f"{card}.1", 0, 0, 2) == "PIX"
    assert sorted(["mlx5_10", "mlx5_9", "mlx5_1"], key=levels.natural) == ["mlx5_1", "mlx5_9", "mlx5_10"]
