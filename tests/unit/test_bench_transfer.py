"""The transfer benchmark on the host's memory: proof of contents, pairs of processes, answers to bad wishes."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from slipstream.bench.endpoint import choose
from slipstream.bench.pools import POISON, HostBenchPool
from slipstream.bench.report import Conditions, TransferReport, TransferRow, print_transfer, size_text, write_json
from slipstream.bench.transfer import (
    PHASES,
    Case,
    Child,
    EngineLost,
    Options,
    command,
    memory_kind,
    parse_size,
    pool_bytes,
    run,
    spread,
    unmeasured,
)
from slipstream.errors import ConfigError
from slipstream.transfer import transports

PAGE = 64
COUNT = 10


@pytest.fixture
def pools() -> tuple[HostBenchPool, HostBenchPool, np.ndarray, np.ndarray]:
    """A filled pool, one that holds ten of its pages, and the page numbers on either side."""
    giver, taker = HostBenchPool(PAGE * 32), HostBenchPool(PAGE * 32)
    giver.fill(99)
    taker.poison()
    here, there = choose(32, COUNT, 1, False), choose(32, COUNT, 2, False)
    words = PAGE // 8
    taker.words.reshape(-1, words)[there] = giver.words.reshape(-1, words)[here]
    return giver, taker, here, there


def test_pages_that_arrived_pass_the_check(pools: tuple[HostBenchPool, HostBenchPool, np.ndarray, np.ndarray]):
    _, taker, here, there = pools
    assert taker.check(PAGE, there, here, 99) == ""


@pytest.mark.parametrize("word", [0, 3, 7])
def test_a_wrong_word_in_a_page_is_found(pools: tuple[HostBenchPool, HostBenchPool, np.ndarray, np.ndarray], word: int):
    _, taker, here, there = pools
    taker.words[int(there[4]) * (PAGE // 8) + word] ^= 1
    assert "wrong contents" in taker.check(PAGE, there, here, 99)


def test_pages_in_each_others_place_are_found(pools: tuple[HostBenchPool, HostBenchPool, np.ndarray, np.ndarray]):
    _, taker, here, there = pools
    assert "wrong contents" in taker.check(PAGE, there, here[::-1].copy(), 99)
    assert "wrong contents" in taker.check(PAGE, there, here, 98)


def test_a_changed_word_outside_the_pages_is_found(pools: tuple[HostBenchPool, HostBenchPool, np.ndarray, np.ndarray]):
    _, taker, here, there = pools
    outside = next(page for page in range(32) if page not in there)
    taker.words[outside * (PAGE // 8)] = POISON + 1
    assert "outside" in taker.check(PAGE, there, here, 99)


def test_shared_memory_is_measured_and_verified_by_two_processes(tmp_path: Path):
    options = Options(engines=("raw", "memmove", "shm"), sizes=(4096, 65536), batch_bytes=1 << 20, case_s=0.01)
    said: list[str] = []
    report = run(options, tmp_path, said.append)
    cells = [(row.engine, row.page, row.direction) for row in report.rows]
    assert cells == [
        ("raw", 1 << 20, "push"),
        ("raw", 1 << 20, "pull"),
        *(("memmove", size, way) for size in (4096, 65536, 1 << 20) for way in ("push", "pull")),
        ("shm", 4096, "push"),
        ("shm", 65536, "push"),
        ("shm", 1 << 20, "push"),
    ]
    for row in report.rows:
        assert row.problem == ""
        assert row.verified == (row.engine not in ("raw", "memmove"))
        assert row.gbps > 0
        assert 0 < row.p50_us <= row.p99_us
        assert row.cpu_s_per_gb > 0
    assert len(said) == len(report.rows)
    write_json(report, tmp_path / "report.json")
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=TransferReport) == report


def test_a_budget_that_is_too_short_goes_to_transports_first_and_to_sizes_evenly(tmp_path: Path):
    options = Options(engines=("memmove", "shm"), sizes=(1024, 4096, 16384), batch_bytes=1 << 20, budget_s=1e-3)
    said: list[str] = []
    report = run(options, tmp_path, said.append)
    assert [(row.engine, row.page, row.problem) for row in report.rows] == [("shm", 1 << 20, "")]
    notes = "\n".join(report.notes)
    assert "shm: 1 of 4 cases were measured in its share of the budget of 0.001 s" in notes
    assert "memmove was not measured: the budget of 0.001 s is used up" in notes
    assert "no transport was measured" not in notes
    (warning,) = [note for note in report.notes if note.startswith("warning: ")]
    enough = re.search(r"1 of \d+ cases were measured. About --budget (\d+) is enough for all", warning)
    assert enough
    assert 12 * PHASES * options.case_s < int(enough[1]) < 120
    assert "{}" not in notes
    assert {note for note in report.notes if "measured" in note} <= set(said)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 13])
def test_every_beginning_of_the_order_of_cases_covers_the_sizes_evenly(count: int):
    cases = [Case(1 << number, 1, False) for number in range(count)]
    order = spread(cases)
    assert sorted(order, key=cases.index) == cases
    if count == 13:
        assert [cases.index(case) for case in order[:5]] == [12, 0, 6, 3, 9]


def test_a_package_that_is_not_installed_is_named_as_missing_and_no_transport_at_all_is_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(transports.__dict__, "PACKAGES", {"mooncake": ("no_package_of_this_name",)})
    wish = ["--engines", "mooncake-tcp,raw", "--batch", "64K", "--sizes", "4K", "--case-seconds", "0.01"]
    result = CliRunner().invoke(command, [*wish, "--memory", "cpu,cpu"])
    assert result.exit_code == 1
    assert "mooncake-tcp was not measured: the package 'mooncake' is not installed" in result.output
    assert result.output.count("slipstream[mooncake]") == 2  # as it happens, and below the table
    assert "warning: no transport was measured" in result.output


def test_who_asks_for_no_transport_is_not_warned_of_none(tmp_path: Path):
    options = Options(engines=("raw",), sizes=(4096,), batch_bytes=1 << 16, case_s=0.01)
    report = run(options, tmp_path, lambda text: None)
    assert not unmeasured(("raw",), report)
    assert not any("warning" in note for note in report.notes)


def test_an_engine_that_cannot_be_used_is_a_note_and_the_others_go_on(tmp_path: Path):
    options = Options(engines=("cuda_ipc", "shm"), sizes=(4096,), batch_bytes=1 << 16, case_s=0.01, block=False)
    report = run(options, tmp_path, lambda text: None)
    assert any("cuda_ipc" in note and "on the CPU" in note for note in report.notes)
    assert [row.engine for row in report.rows] == ["shm"]


def test_an_engine_whose_process_dies_is_reported_with_its_last_words(tmp_path: Path):
    child = Child({}, tmp_path / "log")
    child.process.kill()
    with pytest.raises(EngineLost, match="ended with -9 during make"):
        child.ask("make", 5.0, engine="shm", memory="cpu", bytes=4096, programs=1, depth=1)
    child.kill()


def test_an_engine_that_does_not_answer_in_time_is_lost(tmp_path: Path):
    child = Child({}, tmp_path / "log")
    with pytest.raises(EngineLost, match="no answer to make within 0 s"):
        child.ask("make", 0.0, engine="shm", memory="cpu", bytes=4096, programs=1, depth=1)
    child.kill()


@pytest.mark.parametrize(
    ("wish", "answer"),
    [
        (["--engines", "warp"], "no engine 'warp'"),
        (["--sizes", "12"], "multiples of 8"),
        (["--sizes", "1G"], "up to the batch"),
        (["--sizes", "many"], "no size"),
        (["--memory", "cpu"], "two sides"),
        (["--memory", "cpu,cuda:0"], "of one kind"),
    ],
)
def test_impossible_wishes_are_refused_with_what_is_possible(wish: list[str], answer: str):
    result = CliRunner().invoke(command, ["--batch", "1M", "--memory", "cpu,cpu", *wish])
    assert isinstance(result.exception, ConfigError)  # which the command line ends with code 2
    assert answer in str(result.exception)


def test_sizes_are_read_and_written():
    assert [parse_size(text) for text in ("32K", "2m", "1G", "100")] == [32768, 2 << 20, 1 << 30, 100]
    assert [size_text(size) for size in (32768, 2 << 20, 1 << 30, 100, 1536)] == [
        "32 KiB",
        "2 MiB",
        "1 GiB",
        "100 B",
        "1536 B",
    ]


def test_pools_hold_whole_pages_of_every_size_and_twice_the_batch():
    size = pool_bytes(Options(sizes=(1024, 3 << 16), batch_bytes=1 << 20))
    assert size >= 2 << 20
    assert size % (3 << 16) == 0


def test_kinds_of_memory_are_told_apart():
    assert memory_kind(["cpu", "cpu"]) == "cpu"
    assert memory_kind(["cuda:0", "GPU-12"]) == "cuda"
    with pytest.raises(ConfigError):
        memory_kind(["cpu", "cuda"])


def test_a_table_shows_each_row_and_its_share_of_the_raw_copy():
    from rich.console import Console

    rows = [
        TransferRow(engine="raw", page=1 << 30, pages=1, contiguous=True, direction="push", gbps=400.0),
        TransferRow(
            engine="shm", page=8192, pages=4, contiguous=False, direction="push", gbps=100.0, verified=True, p50_us=3.5
        ),
        TransferRow(engine="tcp", page=8192, pages=4, contiguous=False, direction="push", problem="wrong contents"),
    ]
    conditions = Conditions(
        command="", when="", version="", cpu="a processor", cores=2, kernel="", python="", packages={}, devices=[]
    )
    report = TransferReport(conditions=conditions, memory=["cpu", "cpu"], batch_bytes=1 << 30, notes=[], rows=rows)
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_transfer(report, console)
    text = console.export_text()
    assert "25 %" in text
    assert "More than 100 %" not in text
    assert "wrong contents" in text
    assert "a processor, 2 cores" in text


def test_a_share_above_that_of_the_raw_copy_is_explained_below_the_table():
    from rich.console import Console

    rows = [
        TransferRow(engine="raw", page=1 << 30, pages=1, contiguous=True, direction="push", gbps=4.0),
        TransferRow(engine="shm", page=8192, pages=4, contiguous=False, direction="push", gbps=5.0, verified=True),
    ]
    here = Conditions(command="", when="", version="", cpu="", cores=2, kernel="", python="", packages={}, devices=[])
    report = TransferReport(conditions=here, memory=["cpu", "cpu"], batch_bytes=1 << 30, notes=[], rows=rows)
    console = Console(width=140, record=True, file=io.StringIO())
    print_transfer(report, console)
    text = console.export_text()
    assert "125 %" in text
    assert text.count("More than 100 % is no mistake") == 1
