"""The report of `slipstream topo`: from pasted texts, snapshots, recorded roots; as text, JSON and drawings."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console

from slipstream.cli.main import cli
from slipstream.errors import ConfigError, SetupError
from slipstream.topo import choose, draw, report

FIXTURES = Path(__file__).parent.parent / "fixtures" / "topology"
SEED = ["topo_pd_node_h800class_x8_nic32.txt", "pd_node_rdma_ports.txt", "pd_node_sysfs.tsv", "lsmod_full_stack.txt"]
GOLDEN = {row["file"]: row for row in map(json.loads, (FIXTURES / "readings.jsonl").read_text().splitlines())}


def paths(*names: str) -> list[str]:
    return [str(FIXTURES / name) for name in names]


def told(*arguments: str) -> str:
    """What `slipstream topo` prints."""
    result = CliRunner().invoke(cli, ["topo", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_seed_machine_is_reported_as_its_notes_describe_it() -> None:
    text = " ".join(told("--from", *paths(*SEED)).split())
    assert "8 GPUs, 32 RDMA ports (4 active, 1 usable)" in text
    assert "mlx5_24/1 ACTIVE Ethernet 200 Gb/s eth0 GID 3" in text
    assert "left out (31)" in text
    assert "GPU6 mlx5_24/1 PIX GPUDirect" in text
    for i in (0, 1, 2, 3, 4, 5, 7):
        assert f"GPU{i} mlx5_24/1 NODE GPUDirect" in text
    for i in set(range(32)) - {24}:
        assert f"mlx5_{i}/1" in text
    assert "Handoff: NVLink between all GPUs (NV18): use cuda_ipc" in text


def test_a_device_that_no_table_knows_is_of_another_machine() -> None:
    table = "topo_pd_node_h800class_x8_nic32.txt"
    assert "not in the topology table" not in told("--from", *paths(*SEED))
    for stranger in ("ibv_devinfo_dgx1_ib.txt", "rdma_link_host_namespace.txt"):
        machine, readings = report.load(paths(table, stranger))
        names = {nic.name for reading in readings for nic in reading.nics or ()}
        warned = "not-in-table" in {finding.code for finding in machine.warnings}
        assert warned == any(name.startswith("mlx") and name not in {f"mlx5_{i}" for i in range(32)} for name in names)
    mixed = told("--from", *paths("topo_a100_x8_nic10_cr.txt", "pd_node_rdma_ports.txt"))
    assert "mlx5_10, mlx5_11, mlx5_12, mlx5_13, ...: not in the topology table" in mixed


def test_nics_without_ports_are_not_counted_as_no_ports() -> None:
    text = told("--from", *paths("topo_pd_node_h800class_x8_nic32.txt"))
    assert "8 GPUs, 32 NICs whose ports are not shown" in text
    assert "0 RDMA ports" not in text


def test_the_best_usable_nic_of_the_golden_reading_is_chosen() -> None:
    machine, _ = report.load(paths(*SEED))
    plan = choose.plan(machine)
    golden = GOLDEN[SEED[0]]
    best = {n.gpu: {"nic": n.best.nic, "level": n.best.level} for n in plan.networks if n.best}
    assert best == golden["best_usable_nic"]
    assert [nic.name for nic in machine.nics if nic.usable] == golden["usable_nics"]


def test_json_holds_machine_plan_and_readings() -> None:
    found = json.loads(told("--json", "--from", *paths(*SEED)))
    assert found.keys() == {"machine", "plan", "readings"}
    assert len(found["plan"]["refused"]) == 31
    assert [reading["kind"] for reading in found["readings"]] == [GOLDEN[name]["kind"] for name in SEED]


def test_a_saved_snapshot_reads_back_as_the_same_machine(tmp_path: Path) -> None:
    saved = tmp_path / "machine.json"
    first = told("--save", str(saved), "--from", *paths(*SEED))
    assert told("--from", str(saved)) == first


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
def test_unreadable_input_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "input.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        report.load([str(file)])


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


@pytest.mark.parametrize("name", [n for n, row in GOLDEN.items() if row["kind"] == "nvidia-smi-topo"])
def test_nothing_in_a_drawing_overlaps_or_leaves_it(name: str) -> None:
    machine, _ = report.load(paths(name))
    root = ElementTree.fromstring(draw.svg(machine, choose.plan(machine)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = []
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        right, bottom = x + float(rect.attrib["width"]), y + float(rect.attrib["height"])
        assert x >= 0, rect.attrib
        assert right <= width + 0.01, rect.attrib
        assert bottom <= height + 0.01, rect.attrib
        if rect.get("class") not in ("paper", "frame"):
            boxes.append((x, y, right, bottom, rect.get("class")))
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            apart = a[2] <= b[0] + 0.01 or b[2] <= a[0] + 0.01 or a[3] <= b[1] + 0.01 or b[3] <= a[1] + 0.01
            assert apart, (a, b)


def test_the_seed_machine_is_drawn_with_all_its_nics_told_apart() -> None:
    machine, _ = report.load(paths(*SEED))
    root = ElementTree.fromstring(draw.svg(machine, choose.plan(machine)))
    kinds = [rect.get("class") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    words = " ".join("".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text"))
    keys = 1  # each kind is also shown once beside its note
    assert [kinds.count(kind) - keys for kind in ("nic", "up", "down")] == [1, 3, 28]
    assert "mlx5_24 \u00b7 200 Gb/s" in words
    assert "eth0 \u00b7 GID 3" in words
    assert "NV18 \u00b7 all pairs" in words
    assert "PIX to GPU6; NODE to GPU0, GPU1" in words


def test_a_drawing_with_hostile_names_stays_well_formed() -> None:
    name = '</text><script>alert(1)</script>\x00\x1b&\ud800"'
    overlay = draw.Overlay(
        workers=(draw.Placed(name, "prefill", ("cpu",)), draw.Placed("d", "<b>", ("cuda:9",), host=name, here=False)),
        handoffs=(draw.Handoff(name, ("d", "nobody"), "<shm>"),),
    )
    machine, _ = report.load(paths(*SEED))
    root = ElementTree.fromstring(draw.svg(machine, choose.plan(machine), overlay))
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        "svg", "title", "g", "rect", "text", "path", "circle"
    }  # fmt: skip
    assert not any("style" in element.attrib for element in root.iter())


def test_many_workers_are_drawn_each_once_and_reached_by_their_lanes() -> None:
    prefill = [draw.Placed(f"prefill-{i}", "prefill", (f"cuda:{i % 8}",)) for i in range(32)]
    decode = [draw.Placed(f"decode-{i}", "decode", ("cpu",)) for i in range(32)]
    everybody = tuple(worker.name for worker in decode)
    lanes = tuple(draw.Handoff(worker.name, everybody, "shm") for worker in prefill)
    machine, _ = report.load(paths(*SEED))
    root = ElementTree.fromstring(draw.svg(machine, choose.plan(machine), draw.Overlay((*prefill, *decode), lanes)))
    shown = [element.get("data-worker") for element in root.iter() if element.get("data-worker")]
    assert sorted(name for name in shown if name) == sorted(worker.name for worker in (*prefill, *decode))
    rates = [element for element in root.iter() if element.get("class") == "rate"]
    assert {element.get("data-lane") for element in rates} == {worker.name for worker in prefill}


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_png_is_the_drawing_at_twice_its_size_and_not_blank(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="the extra `png` is not installed")
    try:
        draw.png("<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>")
    except SetupError as error:
        pytest.skip(error.message)
    drawing, picture = tmp_path / "machine.svg", tmp_path / "machine.png"
    told("--from", *paths(*SEED), "--svg", str(drawing), "--png", str(picture))
    root = ElementTree.fromstring(drawing.read_text())
    assert png_size(picture.read_bytes()) == (2 * float(root.attrib["width"]), 2 * float(root.attrib["height"]))
    blank = f"<svg xmlns='http://www.w3.org/2000/svg' width='{root.attrib['width']}' height='{root.attrib['height']}'/>"
    wordless = re.sub(r"<text.*?</text>", "", drawing.read_text(), flags=re.DOTALL)
    assert len(picture.read_bytes()) > 1.5 * len(draw.png(wordless)) > 1.5 * len(draw.png(blank))


def test_a_png_without_its_library_or_without_letters_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "resvg_py", None)
        with pytest.raises(ConfigError, match=r"slipstream\[png\]"):
            draw.png("<svg/>")
    pytest.importorskip("resvg_py", reason="the extra `png` is not installed")
    with pytest.raises(SetupError, match="fonts-dejavu-core"):
        draw.png("<svg/>", folders=["/nowhere"])


def test_the_picture_in_the_documents_is_of_the_seed_machine() -> None:
    picture = (Path(__file__).parents[2] / "docs/images/topology.png").read_bytes()
    machine, _ = report.load(paths(*SEED))
    root = ElementTree.fromstring(draw.svg(machine, choose.plan(machine)))
    assert png_size(picture) == (2 * float(root.attrib["width"]), 2 * float(root.attrib["height"]))


def test_the_package_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, slipstream.topo.report; print({'torch', 'transformers', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
