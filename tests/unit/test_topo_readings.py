"""Every posted text reads as its golden reading.

`readings.jsonl` holds one reading a file. Its reasons are prose; here each is matched with the codes that must be
among those of the reading. Three files say more in their golden reading than the text itself holds: two are read
together with the texts of the same machine, for one the two keys from elsewhere are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.topo.merge import merge
from slipstream.topo.read import Reading, plain_devices, read_text

FIXTURES = Path(__file__).parent.parent / "fixtures" / "topology"
GOLDEN = {row["file"]: row for row in map(json.loads, (FIXTURES / "readings.jsonl").read_text().splitlines())}
ABOUT = {"file", "kind", "source", "machine", "text", "note", "quirks", "usable_nics", "best_usable_nic"}
WITH_COMPANIONS = {"rdma_link_soft_renamed.txt", "pd_node_rdma_ports.txt"}
NOT_IN_THE_TEXT = {"rdma_link_bf3_four_ports.txt": {"pci", "numa"}}
QUIRKS = {  # those that the text itself shows
    "ansi-header", "asymmetric-matrix", "blank-affinity", "broken-escape", "crlf", "cut-off", "fused-cells",
    "fused-tail", "gpu-numa-id-set", "header-fused", "legend-corrupt", "link-count-uneven", "log-prefix",
    "multi-node-affinity", "nic-count-capped", "no-gpu-numa-id-column", "no-nic-legend", "no-numa-column", "numa-na",
    "old-nic-columns", "p2p-table", "partial-nvlink", "single-gpu", "tabs", "topo-mp", "truncated-cpu-list",
}  # fmt: skip
WHY = {  # beginning of the golden reason -> codes that say the same
    "network device up; GID not shown": {"gid-not-shown"},
    "network device down": {"netdev-down"},
    "InfiniBand port: the Up/Down word": {"state-not-shown"},
    "port active on InfiniBand": set(),
    "port active, InfiniBand 400; link_downed": {"link-downed-saturated"},
    "port active, InfiniBand 400": set(),
    "active Ethernet port; GID and address are not in this output, so RoCE use is not proven yet; 25G": {
        "gid-not-shown", "slow-card"},
    "active Ethernet port; GID and address are not in this output, so RoCE use is not proven yet; active MTU": {
        "gid-not-shown", "small-mtu"},
    "active Ethernet port; GID": {"gid-not-shown"},
    "active; default GID is link-local": {"gid-not-shown"},
    "Down/Disabled": {"port-down", "port-disabled"},
    "Polling at 10": {"port-polling", "rate-of-dead-port"},
    "listed but its management files are gone": {"failed-to-open"},
    "PORT_INIT": {"port-init", "zero-guid"},
    "port down and DISABLED; GIDs exist": {"port-down", "port-disabled", "gid-not-routable"},
    "port down; LID 65535": {"port-down", "no-lid"},
    "port down": {"port-down"},
    "this is the cloud front-end": {"cloud-front-end"},
    "record is cut before the port": set(),
    "active; the only GIDs of this pod are at 14 and 15": {"gid-index"},
    "DISABLED, LID 65535": {"port-disabled", "no-lid"},
    "DISABLED, and its network device lives": {"port-disabled", "no-netdev"},
    "active link but no network device and empty GID table": {"no-netdev", "no-gid"},
    "active but GID table empty and no network device": {"no-netdev", "no-gid"},
    "looks like a hardware RoCE name": {"software-device"},
    "physical state POLLING": {"port-polling", "stale-lid"},
    "port DISABLED": {"port-disabled"},
    "port is not active": {"port-down"},
    "not active": {"port-down"},
    "state DOWN, no netdev": {"port-down", "no-netdev"},
    "active, has eth0": set(),
    "active, GID of type RoCE v2 on eth0": set(),
    "active; Intel irdma": {"irdma-mode", "gid-not-shown"},
    "port active, network device present": {"gid-not-shown"},
    "ACTIVE but no netdev shown and physical state NOP": {"no-netdev"},
    "link-local only": {"gid-not-routable"},
    "IPv4 RoCE v2 GID at index 3": set(),
    "IPv4 RoCE v2 GID at index 7": {"gid-index"},
    "routable IPv6": {"gid-index"},
    "two v2 GIDs with the same address": {"overlay-gid-skipped", "gid-index"},
    "DPU front-end bond on Ethernet": {"other-fabric"},
}  # fmt: skip


def read(name: str) -> Reading:
    with open(FIXTURES / name, newline="", encoding="utf-8", errors="replace") as file:
        return read_text(file.read(), name)


def check_devices(mine: list[dict], golden: list[dict], skipped: set[str]) -> None:
    assert [(d["name"], d["port"]) for d in mine] == [(d["name"], d["port"]) for d in golden]
    for got, wanted in zip(mine, golden, strict=True):
        shown = {key: value for key, value in wanted.items() if key not in skipped | {"why"}}
        assert {key: got.get(key) for key in shown} == shown
        codes = max((key for key in WHY if wanted["why"].startswith(key)), key=len)
        assert WHY[codes] <= {*got["reasons"], *got["cautions"]}, (wanted["why"], got["reasons"], got["cautions"])
        if got["usable"] == "no":
            assert got["reasons"]


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in WITH_COMPANIONS])
def test_a_posted_text_reads_as_its_golden_reading(name: str) -> None:
    golden = GOLDEN[name]
    reading = read(name)
    plain = reading.plain()
    assert reading.kind == golden["kind"]
    for key in golden.keys() - ABOUT:
        if key == "devices":
            order = (lambda d: d["name"]) if golden["kind"] == "sysfs-tree" else (lambda d: 0)
            mine, wanted = sorted(plain["devices"], key=order), sorted(golden["devices"], key=order)
            check_devices(mine, wanted, NOT_IN_THE_TEXT.get(name, set()))
        elif key == "links":
            assert plain["links"].keys() == golden["links"].keys()
            for gpu, wanted in golden["links"].items():
                assert {key: plain["links"][gpu].get(key) for key in wanted} == wanted
        elif key in ("modules", "limits", "dev", "fabric"):
            assert {inner: plain[key].get(inner) for inner in golden[key]} == golden[key]
        else:
            assert plain[key] == golden[key], key


@pytest.mark.parametrize("name", [name for name, row in GOLDEN.items() if QUIRKS & set(row.get("quirks", ()))])
def test_damage_that_a_text_shows_is_named(name: str) -> None:
    assert QUIRKS & set(GOLDEN[name]["quirks"]) <= set(read(name).quirks)


def test_a_renamed_software_device_is_refused_when_the_module_list_is_read_too() -> None:
    name = "rdma_link_soft_renamed.txt"
    modules = read_text("rdma_rxe 200704 0\nib_uverbs 196608 1 rdma_rxe\n")
    machine = merge([read(name), modules])
    check_devices(plain_devices(machine.nics[0]), GOLDEN[name]["devices"], set())


def test_the_ports_of_the_seed_machine_read_as_golden_with_its_other_texts() -> None:
    name = "pd_node_rdma_ports.txt"
    machine = merge([read("topo_pd_node_h800class_x8_nic32.txt"), read(name), read("pd_node_sysfs.tsv")])
    devices = [device for nic in machine.nics for device in plain_devices(nic)]
    for device in devices:
        device["near_gpu"] = next(gpu.name for gpu in machine.gpus if machine.level(gpu.name, device["name"]) == "PIX")
    golden = GOLDEN[name]["devices"]
    active = {device["name"] for device in golden if "gid" in device}
    check_devices(devices, golden, set())
    assert active == {nic.name for nic, port in machine.ports() if port.active}


def test_most_undamaged_texts_read_without_a_warning() -> None:
    """A warning must mean something: texts that are whole give none."""
    quiet = [name for name in GOLDEN if not read(name).warnings]
    assert len(quiet) >= 105
    assert not [name for name in quiet if any(word in name for word in ("asymmetric", "odd_cpu", "elided", "panic"))]


def test_a_text_of_no_known_tool_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known are: .*nvidia-smi topo.*rdma link"):
        read_text("hello\nworld\n", "notes.txt")
