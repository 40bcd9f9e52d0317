"""Every option that names a file to write says what was written and where, and refuses what cannot be."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from slipstream import outfile
from slipstream.bench import plot
from slipstream.cli.bench import BENCHES
from slipstream.cli.main import COMMANDS, cli
from slipstream.errors import ConfigError

SEED = Path(__file__).parents[1] / "fixtures/topology/topo_pd_node_h800class_x8_nic32.txt"


def test_a_written_file_is_announced_on_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    outfile.write(tmp_path / "a.json", b"x" * 2345, "the results")
    assert (tmp_path / "a.json").read_bytes() == b"x" * 2345
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"wrote the results to {tmp_path}/a.json (2.3 kB)\n")


def test_the_drawings_of_topo_and_its_snapshot_are_announced_beside_the_data(tmp_path: Path):
    names = {"--svg": "m.svg", "--save": "m.json"}
    options = [word for flag, name in names.items() for word in (flag, str(tmp_path / name))]
    result = CliRunner().invoke(cli, ["topo", "--from", str(SEED), *options, "--json"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("{")
    for what, name in (("the drawing", "m.svg"), ("the snapshot", "m.json")):
        size = (tmp_path / name).stat().st_size
        assert f"wrote {what} to {tmp_path / name} ({size / 1e3:.1f} kB)" in result.stderr


def test_a_plot_is_announced(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    panel = plot.Panel("t", "x", "y", [plot.Curve("a", [1, 2], [1, 2])])
    for kind in ("svg", "png", "pdf"):
        plot.draw([panel], tmp_path / f"p.{kind}")
        assert f"wrote the plot to {tmp_path}/p.{kind} (" in capfd.readouterr().err
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path):
    for path, words in (
        (tmp_path, "it is a folder"),
        (Path(), "it is a folder"),
        (tmp_path / "no" / "x.json", "there is no folder"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(ConfigError, match=words):
            outfile.check(path)
        with pytest.raises(ConfigError, match="cannot write"):
            outfile.write(path, b"", "it")
    outfile.check(tmp_path / "new.json")
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_standard_output_goes_on_behind_what_is_there(tmp_path: Path):
    program = "from pathlib import Path; from slipstream import outfile; print('table'); " + (
        "outfile.write(Path('/dev/stdout'), b'{}\\n', 'the results')"
    )
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=out, stderr=subprocess.PIPE, text=True, check=True
        )
    assert (tmp_path / "out").read_text() == "table\n{}\n"
    assert done.stderr == "wrote the results to /dev/stdout (3 bytes)\n"


def test_a_full_disk_behind_standard_output_is_said_in_one_line():
    for words in (["--json"], []):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "slipstream", "topo", "--from", str(SEED), *words],
                stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device.\n")


def test_an_empty_name_is_refused(tmp_path: Path):
    for option in ("--save", "--svg", "--png"):
        result = CliRunner().invoke(cli, ["topo", "--from", str(SEED), option, ""])
        assert isinstance(result.exception, ConfigError), option


@pytest.mark.parametrize(
    "bench", [["serve", "http://127.0.0.1:1"], ["handoff"], ["transfer"]], ids=lambda words: words[0]
)
def test_a_benchmark_refuses_its_file_before_it_measures(bench: list[str], tmp_path: Path):
    result = CliRunner().invoke(cli, ["bench", *bench, "--json", str(tmp_path / "no" / "x.json")])
    assert result.exit_code != 0
    assert "there is no folder" in f"{result.output}{result.exception}"


def file_options() -> dict[str, set[str]]:
    """The options of each command that name a file or a path, by the file of the command's module."""
    modules = {f"slipstream.cli.{name}" for name in COMMANDS if name != "bench"} | {
        name for name, _ in BENCHES.values()
    }
    found: dict[str, set[str]] = {}
    for name in modules:
        module = importlib.import_module(name)
        for parameter in module.command.params:
            names = isinstance(parameter, click.Option) and parameter.metavar == "FILE"
            if names or isinstance(parameter.type, click.Path):
                found.setdefault(str(module.__file__), set()).update(parameter.opts)
    return found


def test_every_option_that_writes_a_file_goes_through_the_helper():
    reading = {"--from", "--config", "--log", "files", "saved"}
    folders = {"--logs"}
    writing = {"--json", "--plot", "--save", "--svg", "--png", "--perfetto"}
    for module, options in file_options().items():
        assert options <= reading | folders | writing, f"{module}: is {options} read or written?"
        text = Path(module).read_text()
        if options & writing:
            assert re.search(r"\boutfile\.(write|check)\(", text), module
        assert not re.search(r"json_path\.write|\.savefig\(path|Path\(\w+\)\.write_", text), module
