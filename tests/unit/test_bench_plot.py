"""Curves of benchmarks: what is drawn, and what is said when it cannot be."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.plot import Curve, Panel, draw
from slipstream.errors import ConfigError, MissingExtra

PANELS = [
    Panel("time to first token", "requests/s", "ms", [Curve("apart", [4, 8], [10, 20], low=[9, 17], high=[11, 26])]),
    Panel("page sizes", "page", "GB/s", [Curve("shm", [1024, 65536], [1, 30])], log_x=True, x_ticks={1024: "1 KiB"}),
]


def test_panels_become_a_picture_with_their_words(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(PANELS, tmp_path / "curves.png", title="a title", note="two cores")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    draw(PANELS, tmp_path / "curves.svg", title="a title", note="two cores")
    text = (tmp_path / "curves.svg").read_text()
    for words in ("a title", "two cores", "time to first token", "requests/s", "1 KiB", "apart", "shm"):
        assert f"<!-- {words} -->" in text


def test_the_same_panels_make_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        draw(PANELS, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_nothing_to_draw_is_an_empty_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw([], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_another_kind_of_file_is_refused_with_the_kinds_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"curves\.gif.*\.png, \.svg"):
        draw(PANELS, tmp_path / "curves.gif")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"slipstream\[plot\]"):
        draw(PANELS, tmp_path / "curves.png")
