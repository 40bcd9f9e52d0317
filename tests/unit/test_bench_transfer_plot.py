"""The picture of a transfer benchmark: which figures become which curves, what is left out, what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from slipstream.bench.report import Conditions, TransferReport, TransferRow, write_json
from slipstream.bench.transfer import command as measure
from slipstream.bench.transfer_plot import note, panels, plot_transfer
from slipstream.errors import ConfigError

KIB = 1 << 10


def row(engine: str, page: int, direction: str = "push", **figures: object) -> TransferRow:
    known = {"gbps": 2.0, "p50_us": 10.0, "p99_us": 30.0, "cpu_s_per_gb": 0.2, "verified": engine != "raw"}
    return TransferRow(
        **{"engine": engine, "page": page, "pages": 4, "contiguous": False, "direction": direction, **known, **figures}
    )  # type: ignore[arg-type]


def report(*rows: TransferRow) -> TransferReport:
    here = Conditions(
        command="bench transfer", when="now", version="1", cpu="a processor", cores=2, kernel="Linux", python="3.11",
        packages={"numpy": "2"}, devices=[],
    )  # fmt: skip
    return TransferReport(conditions=here, memory=["cpu", "cpu"], batch_bytes=64 << 20, notes=[], rows=list(rows))


def curves(found: list, title: str) -> dict[tuple[str, bool], tuple[list[float], list[float]]]:
    (panel,) = [panel for panel in found if panel.title.startswith(title)]
    return {(curve.label, curve.dashed): (list(curve.x), list(curve.y)) for curve in panel.curves}


def test_rates_stand_at_their_pages_and_the_block_behind_them() -> None:
    found = panels(
        report(
            row("shm", 64 * KIB, gbps=7.0, gbps_many=9.0),
            row("shm", 8 * KIB, gbps=3.0, gbps_many=4.0),
            row("shm", 64 << 20, gbps=8.0, contiguous=True),
            row("raw", 64 << 20, gbps=10.0, contiguous=True),
        )
    )
    rates = curves(found, "rate, push")
    assert rates["shm", False] == ([8 * KIB, 64 * KIB, 256 * KIB], [3.0, 7.0, 8.0])
    assert rates["shm", True] == ([8 * KIB, 64 * KIB], [4.0, 9.0])
    assert rates["raw", False] == ([8 * KIB, 256 * KIB], [10.0, 10.0])
    assert found[0].x_ticks == {8 * KIB: "8 KiB", 64 * KIB: "64 KiB", 256 * KIB: "one block"}


def test_each_direction_has_axes_of_its_own_and_latency_is_of_pushes_first() -> None:
    found = panels(
        report(
            row("shm", KIB, "pull", gbps=1.0, p50_us=5.0),
            row("shm", KIB, gbps=2.0),
            row("nixl", KIB, "pull", p50_us=7.0),
        )
    )
    assert curves(found, "rate, pull")["shm", False][1] == [1.0]
    assert curves(found, "rate, push") == {("shm", False): ([KIB], [2.0])}
    assert curves(found, "one page") == {("shm", False): ([KIB], [10.0]), ("nixl", False): ([KIB], [7.0])}


def test_what_has_no_figures_or_wrong_contents_is_left_out_and_named() -> None:
    made = report(row("shm", KIB), row("tcp", KIB, problem="it hung"), row("nixl", KIB, verified=False))
    assert set(curves(panels(made), "rate")) == {("shm", False)}
    assert "tcp 1 KiB push, nixl 1 KiB push" in note(made)
    assert "a processor, 2 cores" in note(made)


def test_a_report_without_figures_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_transfer(report(row("tcp", KIB, problem="it hung")), tmp_path / "x.svg")


def test_the_command_measures_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, saved = tmp_path / "transfer.svg", tmp_path / "transfer.json"
    options = ["--memory", "cpu,cpu", "--engines", "raw,shm", "--sizes", "4K,64K", "--batch", "1M"]
    outcome = CliRunner().invoke(
        measure, [*options, "--case-seconds", "0.01", "--json", str(saved), "--plot", str(picture)]
    )
    assert outcome.exit_code == 0, outcome.output
    text = picture.read_text()
    for words in ("shm", "raw", "rate, push", "one block", "4 KiB"):
        assert f"<!-- {words} -->" in text
    again = tmp_path / "again.svg"
    assert CliRunner().invoke(measure, [str(saved), "--plot", str(again)]).exit_code == 0
    assert again.read_bytes() == picture.read_bytes()


def test_a_name_that_is_no_picture_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(measure, ["--memory", "cpu,cpu", "--plot", str(tmp_path / "transfer.txt")])
    assert isinstance(outcome.exception, ConfigError)
    assert ".png, .svg" in str(outcome.exception)
    assert "GB/s" not in outcome.output


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"rows": 1}')
    for name in ("other.json", "missing.json"):
        outcome = CliRunner().invoke(measure, [str(tmp_path / name), "--plot", str(tmp_path / "x.png")])
        assert isinstance(outcome.exception, ConfigError)
        assert name in str(outcome.exception)
        assert not (tmp_path / "x.png").exists()


def test_a_saved_report_keeps_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_json(report(row("shm", KIB)), tmp_path / "r.json")
    drawn = CliRunner().invoke(measure, [str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")])
    assert drawn.exit_code == 0
    assert "shm" in drawn.output
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
