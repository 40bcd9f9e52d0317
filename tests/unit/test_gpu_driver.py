"""The driver of the GPU scripts, with sections of a few lines: time, cards, what is kept, what is ended."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FIGURE = """
import sys
sys.path.insert(0, {scripts!r})
from pathlib import Path
from gpu_figures import Figures
figures = Figures(Path(sys.argv[1]), "part")
figures.add("rate", 5.0, "GB/s", least=4)
figures.add("time", 5.0, "ms", most=4, note="a note")
figures.add("nothing", None)
figures.add("plain", 1.0)
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("gpu_figures", "gpu_sections", "gpu_all")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


Ran = Callable[..., tuple[Any, str]]


@pytest.fixture
def run(scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs sections given as (name, cards, seconds, code of Python); the driver and what it printed."""

    def ran(*sections: tuple[str, int, float, str], kind: str = "one", budget: float = 60.0) -> tuple[Any, str]:
        driver_module: ModuleType = scripts.gpu_all
        out, work = tmp_path / "out", tmp_path / "work"
        out.mkdir(exist_ok=True)
        arguments = argparse.Namespace(budget=budget, kind=kind, device="cuda", out=out, loud=False, serve="")
        driver = driver_module.Driver(arguments, driver_module.Output(out), work)
        made = [
            scripts.gpu_sections.Section(name, "", cards, "measures", seconds, ("-c", code, "{out}"))
            for name, cards, seconds, code in sections
        ]
        driver.run(made)
        return driver, capsys.readouterr().out

    return ran


def test_figures_are_judged_and_kept_with_the_logs_of_all_sections(run: Ran, tmp_path: Path) -> None:
    driver, said = run(("first", 1, 1, FIGURE.format(scripts=str(SCRIPTS))), ("second", 1, 1, "print('hidden')"))
    kept = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert [(one["name"], one["verdict"]) for one in kept["figures"]] == [
        ("rate", "PASS"), ("time", "SHORT"), ("nothing", "NONE"), ("plain", "----"), ("ended well", "PASS"),
    ]  # fmt: skip
    assert "SHORT part           time: 5 ms  (goal <= 4); a note" in said
    assert "hidden" not in said
    with tarfile.open(tmp_path / "out" / "details.tar.gz") as archive:
        assert {"first/log", "first/figures.jsonl", "second/log"} <= set(archive.getnames())
        log = archive.extractfile("second/log")
        assert log is not None
        assert log.read() == b"hidden\n"
    assert [outcome.code for outcome in driver.outcomes] == [0, 0]


def test_a_section_that_fails_leaves_the_others_and_its_last_lines_are_shown(run: Ran) -> None:
    driver, said = run(("bad", 1, 1, "print('why'); raise SystemExit(3)"), ("good", 1, 1, "pass"))
    assert [(outcome.section, outcome.code) for outcome in driver.outcomes] == [("bad", 3), ("good", 0)]
    assert "bad> why" in said
    assert [one.verdict for outcome in driver.outcomes for one in outcome.figures] == ["SHORT", "PASS"]


def test_what_no_longer_fits_is_left_out_and_shorter_ones_behind_it_run(run: Ran) -> None:
    driver, said = run(("long", 1, 500, "pass"), ("two", 2, 1, "pass"), ("short", 1, 1, "pass"), budget=30.0)
    assert set(driver.left_out) == {"long", "two"}
    assert "needs 2 cards" in driver.left_out["two"]
    assert [outcome.section for outcome in driver.outcomes] == ["short"]
    assert "long left out: it takes about 500 s" in said


def test_a_section_ends_with_all_that_it_started_when_its_time_is_over(run: Ran, tmp_path: Path) -> None:
    """Also what began a session of its own and takes no notice of signals to the group."""
    code = f"""
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("-- at work", flush=True)
time.sleep(600)
"""
    driver, said = run(("stuck", 1, 1, code), budget=9.0)
    assert driver.outcomes[0].code is None
    assert "its time was over" in said
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, "the child of the section lives on"
        time.sleep(0.05)


def test_two_sections_of_one_card_run_beside_each_other_each_on_its_own(run: Ran, tmp_path: Path) -> None:
    """Each waits until the other has begun; the one for two cards comes alone, and sees both."""
    code = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1]); (here / os.environ["CUDA_VISIBLE_DEVICES"]).touch()
other = {"a": "b", "b": "a"}[here.name]
while not list((here.parent / other).glob("[01]")): time.sleep(0.02)
"""
    both = "import os; assert 'CUDA_VISIBLE_DEVICES' not in os.environ"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("GPUs are hidden here")
    driver, _ = run(("a", 1, 2, code), ("both", 2, 2, both), ("b", 1, 2, code), kind="two")
    assert [outcome.code for outcome in driver.outcomes] == [0, 0, 0]
    assert driver.outcomes[-1].section == "both"
    assert {path.name for path in (tmp_path / "work").glob("[ab]/[01]")} == {"0", "1"}


def test_every_section_names_a_script_and_steps_that_exist(scripts: SimpleNamespace) -> None:
    for section in scripts.gpu_sections.SECTIONS:
        for command in filter(None, (section.run, section.cpu)):
            assert command[0] == "-m" or (SCRIPTS.parent / command[0]).is_file(), command
            assert all("{" not in part for part in section.command(Path("/x"), 60.0, "cuda"))
        assert section.seconds < 420, "more than one call has"


def test_sections_that_share_one_card_say_so_and_only_there(scripts: SimpleNamespace) -> None:
    by_name = {section.name: section for section in scripts.gpu_sections.SECTIONS}
    for name in ("handoff", "exposed", "table", "peers", "staged", "packages", "apart", "serving-8b", "cached"):
        section = by_name[name]
        assert section.on("two") is section
        alone = section.on("one")
        assert (alone.cards, alone.run[-1]) == (1, "--one-card")
        assert "one-card variant" in alone.what
        assert alone.at_least <= alone.seconds <= section.seconds
    assert by_name["steps"].on("one") is by_name["steps"]
