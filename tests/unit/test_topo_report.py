"""The report of `slipstream topo`: from pasted texts, snapshots, recorded roots; as text, JSON and drawings."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from slipstream.topo import choose, draw, report

FIXTURES = Path(__file__).parent.parent / "fixtures" / "topology"
SEED = ["topo_pd_node_h800class_x8_nic32.txt", "pd_node_rdma_ports.txt", "pd_node_sysfs.tsv", "lsmod_full_stack.txt"]
GOLDEN = {row["file"]: row for row in map(json.loads, (FIXTURES / "readings.jsonl").read_text().splitlines())}


def paths(*names: str) -> list[str]:
    return [str(FIXTURES / name) for name in names]


def test_the_seed_machine_is_reported_as_its_notes_describe_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--from", *paths(*SEED)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "8 GPUs, 32 RDMA ports (4 active, 1 usable)" in text
    assert "mlx5_24/1 ACTIVE Ethernet 200 Gb/s eth0 GID 3" in text
    assert "left out (31)" in text
    assert "GPU6 mlx5_24/1 PIX GPUDirect" in text
    for i in (0, 1, 2, 3, 4, 5, 7):
        assert f"GPU{i} mlx5_24/1 NODE GPUDirect" in text
    for i in set(range(32)) - {24}:
        assert f"mlx5_{i}/1" in text
    assert "Handoff: NVLink between all GPUs (NV18): use cuda_ipc" in text


def test_the_best_usable_nic_of_the_golden_reading_is_chosen() -> None:
    machine, _ = report.load(paths(*SEED))
    plan = choose.plan(machine)
    golden = GOLDEN[SEED[0]]
    best = {n.gpu: {"nic": n.best.nic, "level": n.best.level} for n in plan.networks if n.best}
    assert best == golden["best_usable_nic"]
    assert [nic.name for nic in machine.nics if nic.usable] == golden["usable_nics"]


def test_json_holds_machine_plan_and_readings(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--json", "--from", *paths(*SEED)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"machine", "plan", "readings"}
    assert len(told["plan"]["refused"]) == 31
    assert [reading["kind"] for reading in told["readings"]] == [GOLDEN[name]["kind"] for name in SEED]


def test_a_saved_snapshot_reads_back_as_the_same_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "machine.json"
    assert report.main(["--save", str(saved), "--from", *paths(*SEED)]) == 0
    first = capsys.readouterr().out
    assert report.main(["--from", str(saved)]) == 0
    assert capsys.readouterr().out == first


def test_every_posted_text_alone_gives_a_report() -> None:
    for name in GOLDEN:
        machine, readings = report.load(paths(name))
        assert report.text(machine, choose.plan(machine))
        assert readings[0].kind == GOLDEN[name]["kind"]


def test_texts_that_contradict_each_other_are_warned_about(tmp_path: Path) -> None:
    up = tmp_path / "up.txt"
    down = tmp_path / "down.txt"
    up.write_text("link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev eth0 \n")
    down.write_text("link mlx5_0/1 state DOWN physical_state DISABLED netdev eth0 \n")
    machine, _ = report.load([str(up), str(down)])
    assert "texts-contradict" in {finding.code for finding in machine.warnings}


def test_one_file_with_several_outputs_is_read_whole(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.txt"
    bundle.write_text(
        "".join((FIXTURES / name).read_text() for name in ("topo_a10g_x1.txt", "rdma_link_roce_two_up.txt"))
    )
    machine, readings = report.load([str(bundle)])
    assert {reading.kind for reading in readings} == {"nvidia-smi-topo", "rdma-link"}
    assert len(machine.nics) == 2
    assert len(machine.gpus) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [("nothing known\n", "cannot tell which tool"), ("{}", "no snapshot"), (None, "cannot read")],
)
def test_unreadable_input_is_refused_with_exit_code_2(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "input.txt"
    if content is not None:
        file.write_text(content)
    assert report.main(["--from", str(file)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [n for n, row in GOLDEN.items() if row["kind"] == "nvidia-smi-topo"])
def test_a_drawing_shows_every_device_once(name: str) -> None:
    machine, _ = report.load(paths(name))
    plan = choose.plan(machine)
    branches = [branch for socket in draw.arrange(machine) for branch in socket.branches]
    assert sorted(gpu.name for branch in branches for gpu in branch.gpus) == sorted(gpu.name for gpu in machine.gpus)
    assert sorted(nic.name for branch in branches for nic in branch.nics) == sorted(nic.name for nic in machine.nics)
    root = ElementTree.fromstring(draw.svg(machine, plan))
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(gpu.name in words for gpu in machine.gpus)
    out = io.StringIO()
    Console(file=out, width=100).print(draw.terminal(machine, plan))
    assert all(gpu.name in out.getvalue() for gpu in machine.gpus)


def test_the_package_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, slipstream.topo.report; print({'torch', 'transformers', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
