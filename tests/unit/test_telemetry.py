"""Meters, clocks, traces for Perfetto, names of other engines, and the documents and boards made of them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from slipstream.engine.metrics import WorkerMetrics
from slipstream.errors import ConfigError, MissingExtra
from slipstream.front.metrics import FrontMetrics
from slipstream.router.metrics import FleetMetrics, RouterMetrics
from slipstream.telemetry import clock, draw, perfetto, reference, trace
from slipstream.telemetry.compat import Compat, Flavour
from slipstream.telemetry.meters import Meters
from slipstream.wire import Status, WorkerInfo

ROOT = Path(__file__).parents[2]


def exposed(*registries: CollectorRegistry) -> dict[str, Any]:
    text = "".join(generate_latest(registry).decode() for registry in registries)
    return {family.name: family for family in text_string_to_metric_families(text)}


# ------------------------------------------------------------------------------------------------------------- meters


def test_meters_become_families_with_help_units_and_base_labels() -> None:
    registry = CollectorRegistry()
    meters = Meters("slipstream_x_", lambda: {"worker": "w"})
    meters.counter("things", "Things.", "kind").add(2, "small")
    meters.counter("read", "Kept elsewhere.", read=lambda: {(): 7})
    meters.histogram("wait_seconds", "Waits.", (0.1, 1.0)).observe(0.5, count=3)
    meters.gauge("slipstream_load", "Load.").set(0.25)
    registry.register(meters)
    found = exposed(registry)
    assert {(s.name, s.labels["kind"], s.value) for s in found["slipstream_x_things"].samples} == {
        ("slipstream_x_things_total", "small", 2)
    }
    assert found["slipstream_x_read"].samples[0].value == 7
    waits = {
        (s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in found["slipstream_x_wait_seconds"].samples
    }
    assert waits == {("bucket", "0.1"): 0, ("bucket", "1.0"): 3, ("bucket", "+Inf"): 3, ("count", None): 3,
                     ("sum", None): 1.5}  # fmt: skip
    assert found["slipstream_load"].samples[0].labels == {"worker": "w"}
    assert all(family.documentation for family in found.values())


def test_first_tokens_are_told_apart_from_one_millisecond_on_and_tokens_from_two() -> None:
    specs = {spec.name: spec for spec in [*FrontMetrics().specs, *WorkerMetrics().specs]}
    for name, floor in (
        ("slipstream_time_to_first_token_seconds", 0.001),
        ("slipstream_inter_token_latency_seconds", 0.002),
        ("slipstream_worker_time_to_first_token_seconds", 0.001),
        ("slipstream_worker_inter_token_seconds", 0.002),
    ):
        assert specs[name].bounds[0] == floor
        assert list(specs[name].bounds) == sorted(set(specs[name].bounds))


UNITS = ("_seconds", "_bytes", "_ratio", "_bytes_per_second", "_tokens_per_second", "_info", "_tokens")
COUNTED = ("requests", "workers", "pages", "worker_requests", "worker_pages", "worker_up", "requests_in_flight")


def test_names_have_units_and_sentences() -> None:
    fleet, front, worker = FleetMetrics(list), FrontMetrics(), WorkerMetrics()
    for spec in [*front.specs, *fleet.specs, *worker.specs]:
        assert re.fullmatch(r"slipstream_[a-z_]+", spec.name)
        assert spec.text[0].isupper()
        assert spec.text.endswith(".")
        assert not spec.name.endswith("_total")
        if spec.kind != "counter":
            bare = re.sub("^slipstream_(router_|worker_)?", "", spec.name)
            assert spec.name.endswith(UNITS) or bare in COUNTED, spec.name


def test_the_reference_of_metrics_is_what_the_meters_say() -> None:
    written = (ROOT / "docs/metrics.md").read_text()
    assert written == reference.reference(), "run: python -m slipstream.telemetry.reference > docs/metrics.md"


# ----------------------------------------------------------------------------------------------- names of other engines

VLLM_FRONT = """
    vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:cache_config_info
    vllm:prompt_tokens_total vllm:generation_tokens_total vllm:request_success_total vllm:admission_rejections_total
    vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
    vllm:request_time_per_output_token_seconds_bucket vllm:e2e_request_latency_seconds_bucket
    vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket http_requests_total
"""
VLLM_WORKER = """
    vllm:num_requests_running vllm:num_requests_waiting vllm:num_requests_waiting_by_reason vllm:kv_cache_usage_perc
    vllm:cache_config_info vllm:prompt_tokens_total vllm:generation_tokens_total vllm:prefix_cache_queries_total
    vllm:prefix_cache_hits_total vllm:num_preemptions_total vllm:time_to_first_token_seconds_bucket
    vllm:inter_token_latency_seconds_bucket vllm:request_queue_time_seconds_bucket
    vllm:request_prefill_time_seconds_bucket vllm:request_decode_time_seconds_bucket
    vllm:request_inference_time_seconds_bucket vllm:iteration_tokens_total_bucket vllm:nixl_xfer_time_seconds_bucket
    vllm:nixl_bytes_transferred_bucket vllm:nixl_num_failed_transfers_total vllm:mooncake_xfer_time_seconds_bucket
    vllm:mooncake_num_failed_transfers_total
"""
SGLANG_FRONT = """
    sglang:num_running_reqs sglang:num_queue_reqs sglang:token_usage sglang:prompt_tokens_total
    sglang:generation_tokens_total sglang:cached_tokens_total sglang:num_requests_total
    sglang:time_to_first_token_seconds_bucket sglang:inter_token_latency_seconds_bucket
    sglang:e2e_request_latency_seconds_bucket
"""
SGLANG_WORKER = """
    sglang:num_running_reqs sglang:num_queue_reqs sglang:token_usage sglang:gen_throughput sglang:cache_hit_rate
    sglang:time_to_first_token_seconds_bucket sglang:inter_token_latency_seconds_bucket
    sglang:queue_time_seconds_bucket sglang:per_stage_req_latency_seconds_bucket
    sglang:num_prefill_bootstrap_queue_reqs sglang:num_prefill_inflight_queue_reqs
    sglang:num_decode_prealloc_queue_reqs sglang:num_decode_transfer_queue_reqs sglang:kv_transfer_speed_gb_s_bucket
    sglang:kv_transfer_latency_ms_bucket sglang:kv_transfer_bootstrap_ms_bucket sglang:kv_transfer_alloc_ms_bucket
    sglang:kv_transfer_total_mb_bucket sglang:num_bootstrap_failed_reqs_total sglang:num_transfer_failed_reqs_total
    sglang:num_prefill_retries_total
"""
INFO = WorkerInfo(
    id="1", name="p", role="prefill", wire="", http="", model="m", served_name="m", fingerprint="", fingerprint_text="",
    page_tokens=16, max_model_len=64, pages=65, max_sequences=4, devices=[], pid=1, host="", version="0",
)  # fmt: skip


def used_worker(flavour: Flavour) -> WorkerMetrics:
    """A worker's metrics, with numbers that tell apart what aliases might mix up."""
    worker = WorkerMetrics(flavour)
    worker.identify(INFO)
    stages = ("waiting", "prefilling", "handing_off", "offered", "granted", "landed", "decoding")
    status = Status(
        waiting=1, running=1, handing_off=1, waiting_tokens=9, pages_free=10, pages_cached=38, pages_total=64
    )
    worker.status(status, {stage: 1 << at for at, stage in enumerate(stages)})
    worker.copy_wire.observe(0.02, "shm")
    worker.copy_wire.observe(0.04, "mooncake")
    worker.copy_rate.observe(5e9, "shm")
    worker.copy_failures.add(3, "tcp")
    worker.copy_failures.add(5, "mooncake")
    worker.handoff_failures.add(2, "no_workers")
    worker.handoff_failures.add(7, "worker_lost")
    worker.prompt_tokens.add(100)
    worker.cached_tokens.add(25)
    worker.preemptions.add(6)
    worker.retried.add(4)
    worker.tokens.add(75, "prefill")
    worker.tokens.add(50, "decode")
    return worker


def sample(found: dict[str, Any], name: str, **labels: str) -> float:
    family = found.get(name) or found[name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum")]
    values = [s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    assert len(values) == 1, (name, labels, family.samples)
    return values[0]


@pytest.mark.parametrize("name", VLLM_WORKER.split())
def test_a_worker_shows_vllm_s_name(name: str) -> None:
    lines = generate_latest(used_worker("vllm").registry).decode()
    assert re.search(rf'^{name}{{engine="0",(.*,)?model_name="m"', lines, re.M) or re.search(
        rf'^{name}{{block_size="16",engine="0",model_name="m",num_gpu_blocks="65"', lines, re.M
    )


@pytest.mark.parametrize("name", SGLANG_WORKER.split())
def test_a_worker_shows_sglang_s_name(name: str) -> None:
    lines = generate_latest(used_worker("sglang").registry).decode()
    assert re.search(
        rf'^{name}{{engine_type="prefill",(.*,)?model_name="m",pp_rank="0",(.*,)?tp_rank="0"}}', lines, re.M
    )


def front_registry(flavour: Flavour) -> CollectorRegistry:
    natives, shown = CollectorRegistry(), CollectorRegistry()
    front = FrontMetrics()
    front.model = "m"
    natives.register(front)
    natives.register(FleetMetrics(list))
    RouterMetrics(natives, lambda: {"waiting": 3}, dict, lambda: {"queued": 5, "running": 2})
    front.finishes.add(2, "stop")
    front.outcomes.add(4, "chat", "ok")
    front.outcomes.add(1, "chat", "queue_full")
    front.statuses.add(1, "/v1/chat/completions", "503")
    front.statuses.add(2, "/v1/chat/completions", "500")
    shown.register(Compat(flavour, "front", natives.collect, lambda: ("m", "both")))
    return shown


@pytest.mark.parametrize("name", VLLM_FRONT.split())
def test_the_front_shows_vllm_s_name(name: str) -> None:
    lines = generate_latest(front_registry("vllm")).decode()
    if name == "vllm:cache_config_info":  # there is no worker yet
        assert f"# TYPE {name} gauge" in lines
    else:
        labels = r"" if name == "http_requests_total" else r'engine="0",(.*,)?model_name="m"'
        assert re.search(rf"^{name}{{{labels}", lines, re.M)


@pytest.mark.parametrize("name", SGLANG_FRONT.split())
def test_the_front_shows_sglang_s_name(name: str) -> None:
    lines = generate_latest(front_registry("sglang")).decode()
    assert re.search(rf'^{name}{{engine_type="unified",(.*,)?model_name="m"', lines, re.M)


def test_aliases_have_the_values_of_what_they_are_made_of() -> None:
    vllm, sglang = exposed(used_worker("vllm").registry), exposed(used_worker("sglang").registry)
    assert sample(vllm, "vllm:num_requests_waiting") == 1 + 8
    assert sample(vllm, "vllm:num_requests_waiting_by_reason", reason="deferred") == 8
    assert sample(vllm, "vllm:num_requests_running") == 2 + 4 + 32 + 64
    assert sample(vllm, "vllm:kv_cache_usage_perc") == 0.25
    assert sample(vllm, "vllm:prefix_cache_hits_total") == 25
    assert sample(vllm, "vllm:num_preemptions_total") == 6
    assert sample(vllm, "vllm:generation_tokens_total") == 50
    assert sample(vllm, "vllm:nixl_num_failed_transfers_total") == 3
    assert sample(vllm, "vllm:mooncake_num_failed_transfers_total") == 5
    assert sample(vllm, "vllm:nixl_xfer_time_seconds_sum") == pytest.approx(0.02)
    assert sample(sglang, "sglang:num_decode_transfer_queue_reqs") == 16
    assert sample(sglang, "sglang:cache_hit_rate") == 0.25
    assert sample(sglang, "sglang:num_bootstrap_failed_reqs_total") == 2
    assert sample(sglang, "sglang:num_transfer_failed_reqs_total") == 7
    assert sample(sglang, "sglang:kv_transfer_latency_ms_sum") == pytest.approx(60)
    assert sample(sglang, "sglang:kv_transfer_latency_ms_bucket", le="30") == 1
    assert sample(sglang, "sglang:kv_transfer_speed_gb_s_sum") == pytest.approx(5)
    front = exposed(front_registry("vllm"))
    assert sample(front, "vllm:num_requests_waiting") == 5
    assert sample(front, "vllm:num_requests_running") == 2
    assert sample(front, "vllm:admission_rejections_total", reason="queue_full") == 1
    assert sample(front, "http_requests_total", status="5xx") == 3
    assert sample(exposed(front_registry("sglang")), "sglang:num_requests_total") == 5


# -------------------------------------------------------------------------------------------------------------- clock


def test_all_processes_of_a_machine_have_one_clock() -> None:
    before = clock.now()
    code = "from slipstream.telemetry import clock; print(clock.machine_clock()); print(clock.now())"
    name, moment = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split("\n")[:2]
    assert name == clock.machine_clock()
    assert before < float(moment) < clock.now()


def test_another_clock_is_read_by_the_shortest_round_trip() -> None:
    offset = clock.estimate([(100.0, 7.5, 101.0), (200.0, 107.01, 200.02), (300.0, 207.2, 300.5)])
    assert offset.seconds == pytest.approx(93.0)
    assert offset.error == pytest.approx(0.01)
    assert abs(107.01 + offset.seconds - 200.01) <= offset.error


# ----------------------------------------------------------------------------------------------------------- perfetto


def event(name: str, where: str, start: float, seconds: float, **attributes: Any) -> dict[str, Any]:
    return {"name": name, "where": where, "start_s": start, "duration_s": seconds, "attributes": attributes}


def timeline(name: str = "cmpl-1", created: float = 1000.0, **more: Any) -> dict[str, Any]:
    return {
        "id": name, "model": "m", "state": "finished", "created": created, "prompt_tokens": 12, "output_tokens": 5,
        "cached_tokens": 0, "attempts": 1, "prefill_worker": "p", "decode_worker": "d", "ttft_s": 0.3, "e2e_s": 1.0,
        "finish_reason": "stop", "error": None, "missing": [],
        "events": [
            event("received", "router", 0.0, 0.01),
            event("placed", "router", 0.01, 0.0),
            event("queued", "p", 0.02, 0.01, cached_tokens=0),
            event("offer", "p", 0.03, 0.15, peer="d"),
            event("prefill_chunk", "p", 0.03, 0.2, tokens=8),
            event("copy_chunk", "p", 0.2, 0.1, peer="d", transport="shm", bytes=10),
            event("copy_chunk", "p", 0.25, 0.1, peer="d", transport="shm", bytes=10),
            event("commit", "p", 0.35, 0.02, peer="d"),
            event("commit", "d", 0.36, 0.0, peer="p"),
            event("decode_step", "d", 0.37, 0.6, steps=4, tokens=4),
            event("finished", "router", 1.0, 0.0, reason="stop"),
        ],
        **more,
    }  # fmt: skip


def check_trace(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Holds a trace against the rules of the Trace Event Format (JSON object form); returns its slices."""
    body = json.loads(json.dumps(body))
    assert body["displayTimeUnit"] in ("ms", "ns")
    named, threads, slices = set(), set(), []
    flows: dict[str, list[str]] = {}
    for entry in body["traceEvents"]:
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        assert isinstance(entry["ts"], int | float)
        assert entry["ts"] >= 0
        assert isinstance(entry["name"], str)
        match entry["ph"]:
            case "M":
                assert entry["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                assert set(entry["args"]) == {"sort_index" if entry["name"].endswith("index") else "name"}
                named |= {entry["pid"]} if entry["name"] == "process_name" else set()
                threads |= {(entry["pid"], entry["tid"])} if entry["name"] == "thread_name" else set()
            case "X":
                assert entry["dur"] >= 0
                slices.append(entry)
            case "i":
                assert entry["s"] in ("g", "p", "t")
            case "s" | "f" as phase:
                assert phase == "s" or entry["bp"] == "e"
                flows.setdefault(entry["id"], []).append(phase)
            case phase:
                raise AssertionError(f"phase {phase!r} is not used here")
    shown = [entry for entry in body["traceEvents"] if entry["ph"] != "M"]
    assert all(entry["pid"] in named and (entry["pid"], entry["tid"]) in threads for entry in shown)
    assert all(phases == ["s", "f"] for phases in flows.values())
    assert [entry["ts"] for entry in shown] == sorted(entry["ts"] for entry in shown)
    for one in slices:  # slices of a thread are nested or apart
        for other in slices:
            if one is not other and (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                start, end = one["ts"], one["ts"] + one["dur"]
                low, high = other["ts"], other["ts"] + other["dur"]
                assert end <= low or high <= start or (low <= start and end <= high) or (start <= low and high <= end)
    return slices


def test_a_trace_keeps_the_rules_of_its_format() -> None:
    body = perfetto.trace([timeline(), timeline("cmpl-2", 1000.5)])
    slices = check_trace(body)
    assert len(slices) == 2 * 8
    assert {entry["args"]["name"] for entry in body["traceEvents"] if entry["name"] == "process_name"} == {
        "router", "p", "d"
    }  # fmt: skip
    second = [s for s in slices if s["args"]["request"] == "cmpl-2" and s["name"] == "received"]
    assert (second[0]["ts"], second[0]["dur"]) == (500_000, 10_000)
    assert sum(entry["ph"] == "f" for entry in body["traceEvents"]) == 2


def test_a_trace_of_nothing_is_still_one() -> None:
    assert check_trace(perfetto.trace([])) == []


# ------------------------------------------------------------------------------------------------------------ drawing


def drawn(what: Any, width: int) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


@pytest.mark.parametrize("width", [80, 160])
def test_a_timeline_is_drawn_event_by_event(width: int) -> None:
    gap = [{"where": "d", "reason": "the worker cannot be asked: connection refused"}]
    text = drawn(draw.one(timeline(missing=gap), width), width)
    for word in ("cmpl-1", "prefill_chunk", "copy_chunk", "decode_step", "0.60 s", "10.0 ms", "d: its part is missing"):
        assert word in text
    assert max(map(len, text.splitlines())) <= width


def test_many_requests_are_bars_on_one_scale() -> None:
    early, late = timeline(), timeline("cmpl-2", 1001.0, state="failed", error="worker_lost: gone", e2e_s=None)
    lines = drawn(draw.many([late, early]), 200).splitlines()
    first, second = (next(line for line in lines if name in line) for name in ("cmpl-1", "cmpl-2"))
    assert lines.index(first) < lines.index(second)
    assert first.index("█") < second.index("█")
    assert "worker_lost: gone" in second
    assert "p > d" in first
    assert drawn(draw.many([]), 80).strip() == "no requests yet"


def test_stages_are_told_apart_without_colour_by_the_marks_that_the_legend_names() -> None:
    text = drawn(
        draw.many([timeline(events=[event(name, "w", 0.1 * at, 0.1) for at, name in enumerate(draw.STAGES)])]), 160
    )
    bar, legend = text.splitlines()[1:3]
    marks = dict(re.findall(r"(\S) (queued|prefill|KV copy|decode)\b", legend))
    assert len(marks) == 4
    found = "".join(dict.fromkeys(letter for letter in bar if letter in marks))
    assert [marks[letter] for letter in found] == ["queued", "prefill", "KV copy", "decode"]
    assert "resubmitted" not in legend
    broken = [*timeline()["events"], event("resubmitted", "router", 0.5, 0.0)]
    bar, legend = drawn(draw.many([timeline(events=broken)]), 200).splitlines()[1:3]
    assert "! failed, resubmitted or cancelled" in legend
    assert "!" in bar


def bar_of(events: list[dict[str, Any]], total: float, name: str = "cmpl-1") -> str:
    """The bar of a request, of 48 cells."""
    row = drawn(draw.many([timeline(name, events=events, e2e_s=total)]), 200).splitlines()[1]
    return row[row.index("p > d") + 5 :].strip()


def test_the_stage_that_most_of_a_cell_went_to_is_drawn_and_a_short_one_is_still_seen() -> None:
    short = [event("queued", "p", 0.0, 0.0001), event("prefill_chunk", "p", 0.0001, 0.31)]
    short += [event("copy_chunk", "p", 0.31, 0.0007), event("decode_step", "d", 0.311, 0.589)]
    assert re.fullmatch("·█{15}▒━{31}", bar_of(short, 0.9))
    coarse = bar_of([*short, event("decode_step", "d", 0.9, 13.5)], 14.4)  # a cell is 0.3 s
    assert re.fullmatch("█▒━{46}", coarse)
    assert bar_of([*short[:3], event("finished", "router", 30.0, 0.0)], 30.0) == "█"
    copies = [event("copy_chunk", "p", 0.02 * at, 0.0007) for at in range(1, 16)]
    assert bar_of([short[1], *copies, short[3]], 0.9).count("▒") == 1


def test_a_stage_takes_no_cell_that_another_one_cannot_spare() -> None:
    events = [event("prefill_chunk", "p", 0.0, 0.3), event("copy_chunk", "p", 0.1, 0.001)]
    assert bar_of([*events, event("finished", "router", 14.4, 0.0)], 14.4) == "█"
    at_once = [event("prefill_chunk", "p", 0.0, 0.3), event("decode_step", "d", 0.0, 0.3)]
    assert bar_of([*at_once, event("finished", "router", 14.4, 0.0)], 14.4) == "━"


@pytest.mark.parametrize("width", [48, 60, 80, 120, 240])
def test_many_requests_keep_their_ids_and_bars_on_a_narrow_terminal(width: int) -> None:
    name = "chatcmpl-86476fccc86471aeb21c2980"
    text = drawn(draw.many([timeline(name), timeline("cmpl-2", 1000.5)], width), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if line.startswith(name))
    assert row.count("█") + row.count("━") >= 3


def test_minutes_without_requests_do_not_squeeze_the_bars() -> None:
    text = drawn(draw.many([timeline(), timeline("cmpl-2", 1600.0)], 160), 160)
    assert "scale 2.10 s" in text
    assert "598.90 s without requests are left out" in text
    first, second = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("cmpl-1", "cmpl-2"))
    assert first.rindex("━") < second.index("█")
    assert min(first.count("━"), second.count("━")) > 10
    assert "left out" not in drawn(draw.many([timeline(), timeline("cmpl-2", 1000.5)], 160), 160)


def test_names_from_elsewhere_are_text_in_a_terminal() -> None:
    strange = {"prefill_worker": "[red]p[/red]", "decode_worker": "[/]d\x1b[2J", "error": "x\x07[bold]", "attempts": 1}
    events = [
        {"name": "queued", "where": "[/b]w\x1b]0;", "start_s": 0.0, "duration_s": 0.1, "attributes": {"a": "[x]\n"}}
    ]
    for shown in (draw.many([timeline(**strange)], 240), draw.one(timeline(**strange, events=events), 240)):
        text = drawn(shown, 240)
        assert "[red]p[/red] > [/]d" in text
        assert "[bold]" in text
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert "[/b]w" in drawn(draw.one(timeline(events=events), 240), 240)


# -------------------------------------------------------------------------------------------------------------- board


def test_the_board_is_what_its_program_makes() -> None:
    made = runpy.run_path(str(ROOT / "deploy/grafana/board.py"))["board"]()
    assert json.loads((ROOT / "deploy/grafana/slipstream.json").read_text()) == made


def test_the_board_can_be_imported() -> None:
    board = json.loads((ROOT / "deploy/grafana/slipstream.json").read_text())
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {"job", "instance"} <= set(variables)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in (panel for panel in board["panels"] if panel["type"] != "row"):
        assert panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert 'job=~"$job",instance=~"$instance"' in target["expr"]


# ------------------------------------------------------------------------------------------------------------- traces


def test_traces_are_wanted_by_flag_or_by_the_standard_variables() -> None:
    assert not trace.wanted("", {})
    assert trace.wanted("http://c:4318", {})
    assert trace.wanted("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"})
    assert not trace.wanted("http://c:4318", {"OTEL_SDK_DISABLED": "true"})
    assert not trace.wanted("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"})
    with pytest.raises(ConfigError, match="'c:4318' is no address of a collector"):
        trace.wanted("c:4318", {})


def test_spans_are_posted_where_the_protocol_says() -> None:
    assert trace.traces_url("http://c:4318") == "http://c:4318/v1/traces"
    assert trace.traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert trace.traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"


WITHOUT_EXTRA = """
import sys
sys.modules["opentelemetry"] = None
from slipstream.telemetry.trace import open_tracing
from slipstream.errors import MissingExtra
assert open_tracing("", "p") is None
try:
    open_tracing("http://127.0.0.1:1", "p")
except MissingExtra as error:
    print(error.message)
"""


def test_without_the_extra_the_flag_says_what_to_install_and_the_variables_only_warn() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRA], capture_output=True, text=True)
    assert "pip install 'slipstream[otel]'" in done.stdout, done.stderr
    quiet = WITHOUT_EXTRA.partition("try:")[0]
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", quiet], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "no traces are sent, though the environment asks for them" in done.stderr
    assert issubclass(MissingExtra, Exception)


def test_without_tracing_the_libraries_are_not_loaded() -> None:
    code = (
        "import sys; from slipstream.telemetry.trace import open_tracing; import slipstream.launch.router_process; "
        "assert open_tracing('', 'x') is None; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={}).returncode == 0


def test_trace_headers_of_a_client_go_on() -> None:
    assert trace.passed_on({b"traceparent": b"00-1-2-01", b"tracestate": b"a=b", b"x": b"y"}) == {
        "traceparent": "00-1-2-01", "tracestate": "a=b"
    }  # fmt: skip
    assert trace.passed_on({b"tracestate": b"a=b"}) == {}
