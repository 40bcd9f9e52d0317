"""The probe on recorded systems: the seed machine as a tree and an NVML recording, and systems that lack parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from slipstream.errors import ConfigError
from slipstream.topo import choose, nvml, probe
from slipstream.topo.graph import Machine
from slipstream.topo.tree import FolderTree, ListTree

FIXTURES = Path(__file__).parent.parent / "fixtures" / "topology"
SEED_TREE = ListTree.parse((FIXTURES / "seed_machine_tree.tsv").read_text())
SEED_GPUS = [f"00000000:{bus:02X}:00.0" for k in range(4) for bus in (0x13 + 0x20 * k, 0x21 + 0x20 * k)]
USABLE, ACTIVE = "mlx5_24", {"mlx5_4", "mlx5_8", "mlx5_24", "mlx5_29"}


class NVMLError(Exception):
    pass


class RecordedNvml:
    """Answers like the nvidia-ml-py package, from what it was given; everything else is not supported."""

    NVMLError = NVMLError
    c_nvmlGpuFabricInfo_v2_t = SimpleNamespace

    def __init__(self, bus_ids: list[str], links: int = 18, remote: int = 2, peer: int = 0, ancestor: int = 40) -> None:
        self.bus_ids, self.links, self.remote, self.peer, self.ancestor = bus_ids, links, remote, peer, ancestor
        self.fabric_state, self.fabric_status, self.health = 3, 0, 0
        self.mig: set[int] = set()
        self.far_end = "00000000:05:00.0"

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.82.07"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.bus_ids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.bus_ids[gpu].encode())

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-00000000-0000-0000-0000-{gpu:012d}"

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "NVIDIA H800"

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=85899345920)

    def nvmlDeviceGetMigMode(self, gpu: int) -> list[int]:
        return [int(gpu in self.mig), 0]

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= self.links:
            raise NVMLError("not supported")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return self.remote

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> SimpleNamespace:
        other = self.bus_ids[1 - gpu] if self.remote == 0 else self.far_end
        return SimpleNamespace(busId=other.encode())

    def nvmlDeviceGetNvLinkVersion(self, gpu: int, link: int) -> int:
        return 6

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return self.ancestor

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        assert isinstance(index, int)
        return self.peer

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: int, info: SimpleNamespace) -> int:
        info.state, info.status, info.healthMask = self.fabric_state, self.fabric_status, self.health
        info.cliqueId, info.clusterUuid = 0, bytes(16)
        return 0


@pytest.fixture(scope="module")
def seed() -> Machine:
    return probe.machine(SEED_TREE, nvml.collect(RecordedNvml(SEED_GPUS)), source="seed machine")


def test_the_seed_machine_has_32_ports_4_active_and_one_usable(seed: Machine) -> None:
    ports = list(seed.ports())
    assert len(ports) == 32
    assert {nic.name for nic, port in ports if port.active} == ACTIVE
    assert [nic.name for nic, port in ports if port.carries] == [USABLE]
    usable = seed.nic(USABLE).ports[0]
    assert (usable.usable, usable.netdev, usable.gid_index, usable.rate_gbps) == ("roce", "eth0", 3, 200)


def test_the_other_31_ports_of_the_seed_machine_have_all_their_reasons(seed: Machine) -> None:
    refused = {port.nic: {reason.code for reason in port.reasons} for port in choose.plan(seed).refused}
    assert len(refused) == 31
    for name, codes in refused.items():
        wanted = {"no-netdev", "no-gid"} if name in ACTIVE else {"port-down", "port-disabled", "no-netdev", "no-gid"}
        assert codes == wanted, name


def test_the_seed_machine_is_pix_for_gpu6_and_node_for_the_rest(seed: Machine) -> None:
    assert {gpu.name: seed.level(gpu.name, USABLE) for gpu in seed.gpus} == {
        f"GPU{i}": "PIX" if i == 6 else "NODE" for i in range(8)
    }
    for i in range(8):
        near = [nic.name for nic in seed.nics if seed.level(f"GPU{i}", nic.name) == "PIX"]
        assert near == ([f"mlx5_{n}" for n in range(4 * i, 4 * i + 8)] if i % 2 == 0 else [])


def test_the_seed_machine_hands_off_over_nvlink(seed: Machine) -> None:
    plan = choose.plan(seed)
    assert {seed.level(pair.a, pair.b) for pair in plan.pairs} == {"NV18"}
    assert all(pair.best.way == "nvlink" and pair.best.possible for pair in plan.pairs)
    assert {pair.best.gbps for pair in plan.pairs} == {450.0}
    assert "NVLink between all GPUs" in plan.handoff
    assert seed.gpudirect.possible
    assert seed.gpudirect.gdrcopy
    assert seed.gpudirect.dma_buf
    advice = " ".join(finding.text for finding in plan.advice)
    assert "give mlx5_4 a network device and an address: GPU0 gets a PIX rail" in advice


def test_names_and_addresses_come_together_from_nvml_and_pci(seed: Machine) -> None:
    gpu = seed.gpu("GPU6")
    assert gpu.pci == "0000:73:00.0"
    assert gpu.path.startswith("/sys/devices/pci0000:70/")
    assert (gpu.numa, gpu.cpus, gpu.model) == (0, "0-191", "NVIDIA H800")
    assert gpu.pcie_gbps == pytest.approx(504.1, abs=0.1)
    assert {bridge.kind for bridge in seed.bridges} == {"host-bridge", "root-port", "upstream-port", "downstream-port"}


def test_a_machine_goes_to_json_and_back_unchanged(seed: Machine) -> None:
    assert Machine.from_json(seed.to_json()) == seed
    with pytest.raises(msgspec.ValidationError):
        Machine.from_json(b'{"format": "another-1"}')


def test_a_folder_reads_like_the_list_of_its_files(seed: Machine, tmp_path: Path) -> None:
    for line in (FIXTURES / "seed_machine_tree.tsv").read_text().splitlines():
        name, value = line.split("\t")
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if value.startswith("-> "):
            path.symlink_to(value[3:])
        else:
            path.write_text(value + "\n")
    facts = nvml.collect(RecordedNvml(SEED_GPUS))
    (tmp_path / probe.NVML_FILE).write_bytes(msgspec.json.encode(facts))
    assert msgspec.structs.replace(probe.recorded(tmp_path), source=seed.source) == seed


def test_a_missing_uverbs_file_refuses_the_nic_in_a_container() -> None:
    lines = (FIXTURES / "seed_machine_tree.tsv").read_text().splitlines()
    tree = ListTree.parse("\n".join(line for line in lines if "/dev/infiniband/uverbs24" not in line))
    port = probe.machine(tree, None).nic(USABLE).ports[0]
    assert port.usable == "no"
    assert [reason.code for reason in port.reasons] == ["no-device-file"]


def test_links_to_a_switch_without_its_fabric_are_no_nvlink() -> None:
    recording = RecordedNvml(SEED_GPUS)
    recording.fabric_state = 2
    machine = probe.machine(SEED_TREE, nvml.collect(recording))
    assert machine.level("GPU0", "GPU1") == "NODE"
    assert "fabric" in {finding.code for finding in machine.warnings}
    best = choose.plan(machine).pairs[0].best
    assert best.way == "pcie-peer"


def test_a_degraded_fabric_is_named() -> None:
    recording = RecordedNvml(SEED_GPUS)
    recording.health = 1 << 4  # route unhealthy
    gpu = nvml.collect(recording).gpus[0]
    assert gpu.fabric is not None
    assert gpu.fabric.problems == ("route unhealthy",)


def test_a_bridge_between_two_gpus_is_counted_by_the_far_end() -> None:
    recording = RecordedNvml(SEED_GPUS[:2], links=4, remote=0)
    machine = probe.machine(SEED_TREE, nvml.collect(recording))
    assert machine.level("GPU0", "GPU1") == "NV4"
    assert {finding.code for finding in machine.warnings} == {"gpus-hidden"}


def test_mig_and_missing_peer_access_rule_out_device_copies_with_the_reason() -> None:
    recording = RecordedNvml(SEED_GPUS[:2], links=0, peer=2)
    recording.mig = {1}
    pair = choose.plan(probe.machine(SEED_TREE, nvml.collect(recording))).pairs[0]
    assert pair.best.way == "host-memory"
    peer = next(path for path in pair.paths if path.way == "pcie-peer")
    assert peer.possible is False
    assert {"no-peer-access", "mig"} <= {reason.code for reason in peer.reasons}


def test_without_a_driver_gpus_come_from_the_bus_and_nvlink_is_not_claimed() -> None:
    machine = probe.machine(SEED_TREE, None)
    assert len(machine.gpus) == 8
    assert machine.level("GPU0", "GPU1") == "NODE"
    assert "no-nvml" in {finding.code for finding in machine.warnings}


def test_nvml_levels_fill_in_where_paths_are_hidden() -> None:
    machine = probe.machine(ListTree({}), nvml.collect(RecordedNvml(SEED_GPUS[:2], links=0, ancestor=20)))
    assert machine.level("GPU0", "GPU1") == "PXB"


def test_an_empty_system_is_an_empty_machine_without_warnings() -> None:
    machine = probe.machine(ListTree({}), None)
    assert (machine.gpus, machine.nics, machine.warnings) == ((), (), ())
    assert "shm" in choose.plan(machine).handoff


def test_this_system_is_read_without_root_and_without_an_error() -> None:
    assert probe.live().source == "this system"
    assert FolderTree("/").read("/proc/self/status")


def test_a_folder_without_system_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="root folder of a recorded system"):
        probe.recorded(tmp_path)


def test_a_hanging_nvml_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = nvml.collect_in_child(timeout_s=2.0)
    assert "did not answer within 2 s" in facts.problems[0]


def test_a_driver_that_does_not_start_is_a_problem_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "class NVMLError(Exception): pass\ndef nvmlInit(): raise NVMLError('Driver Not Loaded')\n"
    (tmp_path / "pynvml.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert nvml.collect_in_child(timeout_s=60).problems == ("NVML does not start: Driver Not Loaded",)


def test_a_far_end_that_a_guest_is_not_shown_has_no_address() -> None:
    guest = RecordedNvml(SEED_GPUS[:2], links=4)
    guest.far_end = "FFFFFFFF:FF:FF.0"
    assert {link.remote_pci for gpu in nvml.collect(guest).gpus for link in gpu.links} == {""}


def test_bus_ids_are_written_as_sysfs_writes_them() -> None:
    assert nvml.pci_address("00000000:1B:00.0") == "0000:1b:00.0"
    assert nvml.pci_address("00010001:1B:00.0") == "10001:1b:00.0"
