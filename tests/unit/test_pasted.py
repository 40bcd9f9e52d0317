"""Texts from files: encodings, packing, and what is no text at all."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest

from slipstream import pasted
from slipstream.doctor import log
from slipstream.errors import ConfigError
from slipstream.topo import report

FIXTURE = Path(__file__).parents[1] / "fixtures" / "topology" / "topo_pd_node_h800class_x8_nic32.txt"
FAILURE = "Session::writeBody failed. Error: Bad address"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gzip"])
def test_a_text_is_read_however_it_was_saved(tmp_path: Path, encoding: str) -> None:
    text = FIXTURE.read_text()
    data = gzip.compress(text.encode(), mtime=0) if encoding == "gzip" else text.encode(encoding)
    path = tmp_path / "pasted"
    path.write_bytes(data)
    assert pasted.whole(str(path)) == text
    machine, _ = report.load([str(path)])
    assert len(machine.gpus) == 8


def test_standard_input_may_be_packed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(b"a\r\nb\xff\n", mtime=0))))
    assert pasted.whole("-") == "a\r\nb\ufffd\n"


@pytest.mark.parametrize("data", [b"", b"a", b"ab", b"\x1f"])
def test_texts_shorter_than_any_mark(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert pasted.whole(str(tmp_path / "x")) == data.decode()


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"abc\0def", "is no text"), (b"x" * 2000, "longer than"),
     (gzip.compress(b"x" * 99, mtime=0)[:-9], "cannot be unpacked"),
     (b"\x1f\x8b\x00", "cannot be unpacked"), (gzip.compress(b"x" * 3000, mtime=0), "longer than")],
)  # fmt: skip
def test_what_is_no_pasted_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, said: str
) -> None:
    monkeypatch.setattr(pasted, "MOST_BYTES", 1000)
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        pasted.whole(str(tmp_path / "x"))


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no text"):
        pasted.whole("/dev/zero")


def found_in(path: Path) -> log.LogReport:
    with pasted.opened(str(path)) as file:
        return log.read(pasted.lines(file))


@pytest.mark.parametrize("before", [0, 3_590, 3_990, 4_000, 65_500, pasted.PART - 20, pasted.PART, 300_000])
@pytest.mark.parametrize("packed", [False, True])
def test_a_failure_is_found_anywhere_in_a_line_and_counts_once(tmp_path: Path, before: int, packed: bool) -> None:
    data = f"first\n{'y' * before} {FAILURE}, {FAILURE} {'z' * 5000}\nlast {FAILURE}\n".encode()
    (tmp_path / "log").write_bytes(gzip.compress(data, mtime=0) if packed else data)
    found = found_in(tmp_path / "log")
    assert found.lines == 3
    (only,) = found.findings
    assert (only.id, only.line, only.count) == ("tcp-gpu-memory", 2, 2)
    assert "writeBody failed" in only.text
    assert len(only.text) <= 160


def test_zeros_in_front_of_a_line_do_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\0" * 100_000 + FAILURE.encode() + b"\nfine\n")
    found = found_in(tmp_path / "log")
    assert [finding.id for finding in found.findings] == ["tcp-gpu-memory"]
    assert found.lines == 2


def test_a_log_that_is_no_text_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(range(256)) * 100)
    found = found_in(tmp_path / "log")
    assert found.no_text * 2 > found.lines
    assert "no text" in log.text(found, "log")
    (tmp_path / "fine").write_text("günstig\n" * 10)
    assert "no text" not in log.text(found_in(tmp_path / "fine"), "fine")
