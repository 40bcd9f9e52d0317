"""How the GPU scripts read results: rows as the benchmarks write them, judged without a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from slipstream.bench.engine import StepRow
from slipstream.bench.handoff import HandoffRow
from slipstream.bench.report import TransferRow

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = (
    "gpu_figures", "gpu_models", "gpu_servers", "gpu_loads", "gpu_prompts", "gpu_engine", "gpu_serving",
    "gpu_transfer_goals", "gpu_reference", "gpu_skewed", "gpu_cached", "gpu_stories",
)  # fmt: skip


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)


def plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def verdicts(scripts: SimpleNamespace, folder: Path) -> dict[str, str]:
    return {figure.name: figure.verdict for figure in scripts.gpu_figures.read(folder)}


def cell(engine: str, page: int, gbps: float, many: float, **more: Any) -> TransferRow:
    given = {"pages": 9, "contiguous": False, "direction": "push", "verified": True, **more}
    return TransferRow(engine=engine, page=page, gbps=gbps, gbps_many=many, **given)


def test_a_package_is_ahead_where_it_is_faster_at_once_or_in_flight(scripts: SimpleNamespace, tmp_path: Path) -> None:
    rows = [cell("cuda_ipc", 1024, 200, 361), cell("nixl-best", 1024, 100, 362), cell("mooncake", 1024, 90, 80)]
    rows += [cell("cuda_ipc", 8192, 300, 365), cell("nixl-best", 8192, 301, 302), cell("mooncake", 8192, 1, 0)]
    rows += [cell("cuda_ipc", 1 << 30, 372, 396, contiguous=True)]
    rows += [cell("mooncake", 1 << 30, 0, 0, contiguous=True, problem="it hung")]
    (tmp_path / "peers.json").write_text(json.dumps({"rows": plain(rows)}))
    scripts.gpu_transfer_goals.judge("peers", tmp_path)
    found = {figure.name: figure for figure in scripts.gpu_figures.read(tmp_path)}
    behind = found["cells in which a package is ahead of cuda_ipc"]
    assert (behind.value, behind.verdict) == (2, "SHORT")
    assert behind.note.startswith("of 4 compared: nixl-best 1 KiB push, nixl-best 8 KiB push")
    assert found["cuda_ipc block push"].verdict == "PASS"
    assert found["mooncake block push"].value is None


def test_an_engine_without_results_is_named(scripts: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps({"rows": plain([cell("raw", 1 << 30, 395, 395)])}))
    scripts.gpu_transfer_goals.judge("table", tmp_path)
    assert verdicts(scripts, tmp_path)["cuda_ipc: no results"] == "NONE"
    scripts.gpu_transfer_goals.judge("flight", tmp_path)
    assert verdicts(scripts, tmp_path)["flight: no results"] == "NONE"


def test_handoffs_have_the_goals_of_their_lengths(scripts: SimpleNamespace, tmp_path: Path) -> None:
    common = {"megabytes": 1.0, "best_ms": 0.1, "p90_ms": 9.0, "gbps": 361.0, "parts_ms": {}, "exposed_ms": 0.2}
    rows = [
        HandoffRow(tokens=tokens, under_way=count, whole_ms=whole, **common)  # type: ignore[arg-type]
        for tokens, count, whole in ((1024, 1, 0.6), (8192, 1, 2.9), (1024, 64, 50.0))
    ]
    for step in ("handoff", "exposed"):
        (tmp_path / f"{step}.json").write_text(json.dumps(plain(rows)))
    scripts.gpu_transfer_goals.judge("handoff", tmp_path)
    assert verdicts(scripts, tmp_path) == {
        "handoff of 1024 tokens x 1": "SHORT",
        "handoff of 8192 tokens x 1": "PASS",
        "handoffs of 1024 tokens x 64 at once": "PASS",
    }
    scripts.gpu_transfer_goals.judge("exposed", tmp_path)
    assert "PASS" in [one.verdict for one in scripts.gpu_figures.read(tmp_path) if one.section == "exposed"]


def test_steps_are_judged_by_shape_and_batch_and_others_beside_them(scripts: SimpleNamespace, tmp_path: Path) -> None:
    def rows(step_ms: float) -> Any:
        common = {"model": "8b", "context": 1024, "limit_ms": 3.0, "step_p90_ms": 9.0}
        decode = StepRow(kind="decode", batch=1, step_ms=step_ms, device_ms=step_ms - 0.3, **common)  # type: ignore[arg-type]
        prompt = StepRow(kind="prefill", batch=1, step_ms=210.0, alone_ms=204.0, **common)  # type: ignore[arg-type]
        return plain([decode, prompt])

    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"rows": rows(4.0)}))
    figures = scripts.gpu_figures.Figures(tmp_path, "bench")
    scripts.gpu_engine.judge("bench", rows(4.0), bench, figures)
    assert verdicts(scripts, tmp_path) == {
        "8b decode batch 1 at 1024": "PASS",
        "8b decode batch 1 at 1024, step - graph": "SHORT",
        "8b prompt of 1024": "SHORT",
        "8b prompt of 1024, after a pause": "PASS",
    }
    scripts.gpu_engine.judge("fp8", rows(3.0), bench, scripts.gpu_figures.Figures(tmp_path / "fp8", "fp8"))
    first = scripts.gpu_figures.read(tmp_path / "fp8")[0]
    assert (first.verdict, first.note.split("; ")[1]) == ("----", "0.75 x of plain")


@pytest.mark.parametrize(
    ("only", "arrangement", "chosen"),
    [
        ("", "apart", ["ready", "4", "long", "exposure", "turns"]),
        ("", "strict", ["disturbed"]),
        ("8b", "both", ["ready", "4", "long"]),
        ("8b/strict/4,1.5b", "strict", ["4"]),
        ("1.5b", "apart", []),
        ("exposure", "both", ["exposure"]),
        ("strict", "strict", ["disturbed"]),
    ],
)
def test_parts_are_those_named_or_usual(
    scripts: SimpleNamespace, only: str, arrangement: str, chosen: list[str]
) -> None:
    parts = ["ready", "4", "long", "exposure", "turns", "disturbed"]
    assert scripts.gpu_serving.selected("8b", arrangement, parts, only, "") == chosen


def test_the_kv_of_a_token_is_that_of_the_shape(scripts: SimpleNamespace) -> None:
    sizes = {model.name: model.token_bytes for model in scripts.gpu_loads.MODELS}
    assert sizes == {"8b": 131072, "1.5b": 28672}


def test_a_token_that_differs_is_right_only_where_rounding_may_decide(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """Of three tokens the second is the reference's second choice, by 0.3; a logit's error is 0.1, then 0.2."""
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.7, 1.0, 0.0], [0.0, 0.0, 1.0]])
    answered = scripts.gpu_reference.Answered([[0, 0, 2]], [logits])
    figures = scripts.gpu_figures.Figures(tmp_path, "reference")
    for error in (0.1, 0.2):
        scripts.gpu_reference.compare(f"model {error}", answered, [logits], error, figures)
    wrong, tie = scripts.gpu_figures.read(tmp_path)
    assert (wrong.value, wrong.verdict, tie.value, tie.verdict) == (1, "SHORT", 0, "PASS")
    assert "2 equal, 1 near-ties, 0 of 1 answers equal throughout, gap 0.3" in tie.note


def test_prompts_for_the_reference_have_the_lengths_at_the_edges_and_up_to_the_longest(
    scripts: SimpleNamespace,
) -> None:
    lengths = scripts.gpu_reference.lengths(50, 2000)
    assert len(lengths) == 50
    assert {1, 16, 17, 512, 513, 2000} <= set(lengths)
    assert max(scripts.gpu_reference.lengths(9, 100)) <= 100


def test_figures_of_one_card_have_no_goals_for_two(scripts: SimpleNamespace, tmp_path: Path) -> None:
    figures = scripts.gpu_figures.Figures(tmp_path, "handoff", one_card=True)
    figures.add("time", 9.0, "ms", most=1.0, note="best 8")
    figures.add("different", 1, most=0, everywhere=True)
    time, different = scripts.gpu_figures.read(tmp_path)
    assert (time.section, time.verdict, time.note) == ("handoff-one-card", "----", "one card; best 8")
    assert (different.verdict, different.note) == ("SHORT", "one card")


def test_on_one_card_loads_run_only_by_name(scripts: SimpleNamespace) -> None:
    parts, usual = ["ready", "4", "long", "exposure", "turns", "disturbed"], scripts.gpu_serving.ON_ONE_CARD
    chosen = {
        only: scripts.gpu_serving.selected("8b", only.split("/")[0], parts, only, "", usual)
        for only in ("apart", "both", "strict", "strict/disturbed", "apart/4")
    }
    assert chosen == {
        "apart": ["ready", "exposure", "turns"],
        "both": ["ready"],
        "strict": [],
        "strict/disturbed": ["disturbed"],
        "apart/4": ["4"],
    }


def test_a_timeline_is_told_in_a_line_and_its_longest_steps_once(scripts: SimpleNamespace) -> None:
    step = {"name": "decode_step", "where": "decode-0", "start_s": 0.5, "duration_s": 0.08}
    event = {"name": "copy_chunk", "where": "prefill-0", "start_s": 0.0012, "duration_s": 0.003}
    story = {
        "created": 100.0,
        "events": [
            {**event, "attributes": {"bytes": 64}},
            {**event, "attributes": {"bytes": 32}},
            {**step, "attributes": {"longest_s": 0.009}},
        ],
        "silences": [],
        "missing": [],
    }
    line = scripts.gpu_stories.line(story)
    assert line.startswith("copy_chunk@prefill-0 1.20+3.00, ")
    assert line.endswith("decode_step@decode-0 500.00+80.00")
    assert scripts.gpu_stories.total(story, "copy_chunk", "bytes") == 96
    later = {**story, "created": 101.0}
    assert scripts.gpu_cached.longest_steps([story, {**story}, later]) == [9.0, 9.0]
    assert scripts.gpu_stories.line({"problem": "gone"}) == "gone"
