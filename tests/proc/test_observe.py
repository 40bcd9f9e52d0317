"""A real cluster of one prefill and one decode worker, seen from outside: timelines, metrics, the board, traces."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.proc.collector import Collector, TakenSpan
from tests.proc.programs import Program, Server, serving, until
from tests.unit.test_telemetry import check_trace

from slipstream.telemetry import reference

pytest.importorskip("opentelemetry.sdk")

ROOT = Path(__file__).parents[2]
LONG = " ".join(f"word{number}" for number in range(60))
KEYS = {
    "id", "model", "state", "created", "prompt_tokens", "output_tokens", "cached_tokens", "attempts", "prefill_worker",
    "decode_worker", "ttft_s", "e2e_s", "finish_reason", "error",
}  # fmt: skip
NAMES = {
    "received", "placed", "queued", "prefill_chunk", "copy_chunk", "offer", "grant", "commit", "first_token",
    "decode_step", "finished", "failed", "cancelled", "resubmitted",
}  # fmt: skip


@dataclass
class Cluster:
    program: Program
    server: Server
    pids: dict[str, int]
    collector: Collector

    def complete(self, prompt: str = LONG, tokens: int = 20, headers: dict[str, str] | None = None, **how: Any) -> Any:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **how}
        request = urllib.request.Request(
            self.server.url + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=90) as answer:
            return json.loads(answer.read())

    def timeline(self, name: str) -> dict[str, Any]:
        status, body = self.server.get(f"/v1/requests/{name}/timeline")
        assert status == 200, body
        return body

    def handed_over(self, name: str) -> dict[str, Any]:
        """The timeline, once the prefill worker has heard that its part is over; the answer may be there before."""

        def told() -> dict[str, Any] | None:
            body = self.timeline(name)
            return body if any((e["name"], e["where"]) == ("commit", "prefill-0") for e in body["events"]) else None

        return until(told, "the prefill worker's commit")

    def workers(self) -> dict[str, str]:
        return {worker["name"]: worker["url"] for worker in self.server.get("/workers")[1]["workers"]}

    def trace(self, trace: str, spans: int) -> list[TakenSpan]:
        found = until(lambda: len(self.collector.of(trace)) >= spans and self.collector.of(trace), f"{spans} spans")
        assert len(found) == spans, found
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    collector = Collector()
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"
    flags = ("--otlp-endpoint", collector.url, "--metrics-compat", "vllm", "--chunk-tokens", "64", "--prefill", "1",
             "--decode", "1", "--resubmissions", "2")  # fmt: skip
    try:
        with serving(*flags) as (program, server, pids):
            yield Cluster(program, server, pids, collector)
    finally:
        del os.environ["OTEL_BSP_SCHEDULE_DELAY"]
        collector.close()


# ---------------------------------------------------------------------------------------------------------- timelines


def test_a_timeline_tells_every_stage_in_its_order(cluster: Cluster) -> None:
    answer = cluster.complete("first " + LONG, headers={"x-request-id": "mine/1"})
    body = cluster.handed_over(answer["id"])
    assert set(body) >= KEYS
    assert body["missing"] == []
    assert (body["state"], body["finish_reason"], body["error"]) == ("finished", "length", None)
    assert (body["prefill_worker"], body["decode_worker"], body["attempts"]) == ("prefill-0", "decode-0", 1)
    assert (body["prompt_tokens"], body["output_tokens"]) == (answer["usage"]["prompt_tokens"], 20)
    assert abs(body["created"] - time.time()) < 60
    assert 0 < body["ttft_s"] < body["e2e_s"]
    events = body["events"]
    assert {event["name"] for event in events} <= NAMES
    assert [event["start_s"] for event in events] == sorted(event["start_s"] for event in events)

    def at(name: str, where: str) -> float:
        return next(e["start_s"] for e in events if (e["name"], e["where"]) == (name, where))

    order = [
        ("received", "router"), ("placed", "router"), ("queued", "prefill-0"), ("prefill_chunk", "prefill-0"),
        ("copy_chunk", "prefill-0"), ("first_token", "prefill-0"), ("commit", "prefill-0"), ("commit", "decode-0"),
        ("decode_step", "decode-0"), ("finished", "router"),
    ]  # fmt: skip
    moments = [at(*step) for step in order]
    assert moments == sorted(moments), list(zip(order, moments, strict=True))
    assert at("first_token", "prefill-0") <= at("first_token", "router")
    assert at("offer", "prefill-0") <= at("grant", "decode-0")
    chunks = [e["attributes"]["tokens"] for e in events if e["name"] == "prefill_chunk"]
    assert len(chunks) > 1
    assert sum(chunks) + body["cached_tokens"] == body["prompt_tokens"]
    assert sum(e["attributes"]["tokens"] for e in events if e["name"] == "decode_step") == 19
    copies = [e["attributes"] for e in events if e["name"] == "copy_chunk"]
    assert {copy["transport"] for copy in copies} == {"shm"}
    assert sum(copy["pages"] for copy in copies) == -(-body["prompt_tokens"] // 16)
    before_the_end = [e for e in events if (e["name"], e["where"]) != ("commit", "prefill-0")]
    assert max(e["start_s"] + e["duration_s"] for e in before_the_end) <= body["e2e_s"] + 0.05
    for name in ("mine%2F1", answer["id"] + "-0"):
        assert cluster.timeline(name)["id"] == answer["id"]


def test_choices_are_told_apart_and_the_list_has_the_newest_first(cluster: Cluster) -> None:
    ids = [cluster.complete(f"{number} of {LONG}", 4, n=1 + number)["id"] for number in range(2)]
    status, listed = cluster.server.get("/v1/requests?limit=2")
    assert status == 200
    assert [one["id"] for one in listed["data"]] == ids[::-1]
    assert all(set(one) >= KEYS and "events" not in one for one in listed["data"])
    two = cluster.timeline(ids[1])
    assert {event["attributes"].get("choice") for event in two["events"] if event["name"] == "first_token"} == {0, 1}
    assert two["output_tokens"] == 8
    assert cluster.server.get("/v1/requests?limit=0")[0] == 400
    assert cluster.server.get("/v1/requests?limit=x")[0] == 400
    status, refusal = cluster.server.get("/v1/requests/nobody/timeline")
    assert (status, refusal["error"]["code"]) == (404, "not_found")


def test_a_client_that_leaves_is_seen_as_cancelled_and_a_running_one_as_running(cluster: Cluster) -> None:
    host, port = cluster.server.url.removeprefix("http://").split(":")
    body = {"prompt": "leaving " + LONG, "max_tokens": 700, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: left\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
        connection.recv(1)
        running = cluster.timeline("left")
        assert (running["state"], running["e2e_s"], running["finish_reason"]) == ("running", None, None)
        assert any(event["name"] == "first_token" for event in running["events"])
    left = until(lambda: (found := cluster.timeline("left"))["state"] != "running" and found, "its end")
    assert left["state"] == "cancelled"
    assert "cancelled" in {event["name"] for event in left["events"]}
    assert left["error"].startswith("client_closed_request")


def run_timeline(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "slipstream", "timeline", "--url", cluster.server.url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_draws_prints_json_and_writes_a_trace(cluster: Cluster, tmp_path: Path) -> None:
    answer = cluster.complete("drawn " + LONG, headers={"x-request-id": "drawn-1"})
    assert answer["id"] in run_timeline(cluster)
    drawn = run_timeline(cluster, "drawn-1")
    for word in ("prefill_chunk", "copy_chunk", "decode_step", "shm", "GB/s", "prefill-0 > decode-0"):
        assert word in drawn
    assert json.loads(run_timeline(cluster, "drawn-1", "--json"))["id"] == answer["id"]
    assert len(json.loads(run_timeline(cluster, "--window", "300", "--json"))) >= 1
    file = tmp_path / "trace.json"
    run_timeline(cluster, "--last", "3", "--perfetto", str(file))
    slices = check_trace(json.loads(file.read_text()))
    assert {"prefill_chunk", "copy_chunk", "decode_step"} <= {entry["name"] for entry in slices}
    command = [sys.executable, "-m", "slipstream", "timeline", "nobody", "--url", cluster.server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no request 'nobody' is remembered here" in done.stderr


# ------------------------------------------------------------------------------------------------------------ metrics


def text_of(url: str) -> str:
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        return answer.read().decode()


def shown(cluster: Cluster) -> dict[str, set[str]]:
    """All sample names of front and workers with the labels they came with; names without samples have none."""
    found: dict[str, set[str]] = {}
    for url in (cluster.server.url, *cluster.workers().values()):
        for family in text_string_to_metric_families(text_of(url)):
            found.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
            if family.type == "histogram":
                for suffix in ("_bucket", "_sum", "_count"):
                    found.setdefault(family.name + suffix, set())
    return found


def documented() -> dict[str, set[str]]:
    """Native names in docs/metrics.md with their labels."""
    rows = re.findall(r"^\| `(slipstream_\w+)` \| \w+ \| ([^|]*) \|", reference.reference(), re.M)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_every_documented_metric_is_shown_and_every_shown_one_documented(cluster: Cluster) -> None:
    cluster.complete("counted " + LONG)
    names = {name for name in shown(cluster) if name.startswith("slipstream_") and not name.endswith("_created")}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in names} == set(documented())


def test_every_expression_of_the_board_is_about_what_is_shown(cluster: Cluster) -> None:
    cluster.complete("board " + LONG)
    found, labels_of = shown(cluster), documented()
    board = json.loads((ROOT / "deploy/grafana/slipstream.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 50
    for expression in expressions:
        names = re.findall(r"\b(slipstream_\w+)\{", expression)
        assert names, expression
        wanted = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
        for name in names:
            assert name in found, f"{name} of {expression} is nowhere"
            family = re.sub("_(bucket|sum|count)$", "", name)
            base = {"worker", "role", "model_name"} if "_worker_" in name else {"model_name"}
            known = found[name] | labels_of[family] | base | {"le", "job", "instance"}
            assert wanted <= known, f"{wanted - known} of {expression} is no label of {name}"
            if found[name]:
                assert wanted <= found[name] | {"job", "instance"}, expression


def value(text: str, name: str, **labels: str) -> float:
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert values, f"no {name} {labels}"
    return sum(values)


def test_metrics_count_what_has_been_done(cluster: Cluster) -> None:
    workers = cluster.workers()
    p0, d0 = text_of(workers["prefill-0"]), text_of(workers["decode-0"])
    answer = cluster.complete("numbers " + LONG, 12)

    def settled() -> bool:
        at_p, at_d = text_of(workers["prefill-0"]), text_of(workers["decode-0"])
        under_way = value(at_p, "slipstream_worker_requests") + value(at_d, "slipstream_worker_requests")
        return under_way + value(at_d, "slipstream_worker_pages", state="used") == 0

    until(settled, "both workers to have nothing left of the request")
    p1, d1, front = text_of(workers["prefill-0"]), text_of(workers["decode-0"]), text_of(cluster.server.url)

    def grown(before: str, after: str, name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    prompt, cached = answer["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert grown(p0, p1, "slipstream_worker_tokens_total", stage="prefill") == prompt - cached
    assert grown(p0, p1, "slipstream_worker_prompt_tokens_total") == prompt
    assert grown(d0, d1, "slipstream_worker_tokens_total", stage="decode") == 11
    assert grown(p0, p1, "slipstream_worker_handoffs_total", side="source") == 1
    assert grown(d0, d1, "slipstream_worker_handoffs_total", side="destination") == 1
    assert grown(p0, p1, "slipstream_worker_handoff_seconds_count") == 1
    moved = grown(p0, p1, "slipstream_worker_transfer_bytes_total", transport="shm")
    assert moved > 0
    assert grown(p0, p1, "slipstream_worker_handoff_bytes_sum") == moved
    assert grown(d0, d1, "slipstream_worker_inter_token_seconds_count") == 11
    assert value(front, "slipstream_router_worker_up", worker="decode-0") == 1
    assert value(front, "slipstream_router_route_bytes_per_second", source="prefill-0", destination="decode-0") > 0
    # the same under another engine's names
    assert value(front, "vllm:generation_tokens_total", engine="0") == value(front, "slipstream_generated_tokens_total")
    assert value(d1, "vllm:num_requests_running", model_name="smollm2") == 0
    assert value(p1, "vllm:prefix_cache_queries_total") == value(p1, "slipstream_worker_prompt_tokens_total")


def test_the_front_says_whom_to_scrape(cluster: Cluster) -> None:
    _, targets = cluster.server.get("/metrics/targets")
    by_part = {entry["labels"]["component"]: entry["targets"] for entry in targets}
    assert by_part["front"] == [cluster.server.url.removeprefix("http://")]
    assert set(by_part["worker"]) == {url.removeprefix("http://") for url in cluster.workers().values()}


# ------------------------------------------------------------------------------------------------------------- traces

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_request_is_one_trace_over_all_processes(cluster: Cluster) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "traced"}
    answer = cluster.complete("traced " + LONG, 10, headers, temperature=0.5, seed=3)
    spans = {span.name: span for span in cluster.trace(TRACE, 6)}
    assert set(spans) == {"text_completion smollm2", "place", "queue", "prefill", "kv_transfer", "decode"}
    root = spans.pop("text_completion smollm2")
    assert root.parent == PARENT
    assert root.kind == 2  # SERVER
    assert {span.parent for span in spans.values()} == {root.id}
    instances = {name: span.resource["service.instance.id"] for name, span in spans.items()}
    assert instances == {"place": "router", "queue": "prefill-0", "prefill": "prefill-0", "kv_transfer": "prefill-0",
                         "decode": "decode-0"}  # fmt: skip
    assert {span.resource["service.name"] for span in [root, *spans.values()]} == {"slipstream"}
    for span in spans.values():
        assert root.start - 0.05 <= span.start <= span.end <= root.end + 0.5
    order = [spans[name].start for name in ("place", "queue", "prefill", "kv_transfer", "decode")]
    assert order == sorted(order)
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": "smollm2",
        "gen_ai.request.max_tokens": 10,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 10,
        "slipstream.request_id": "traced",
    }
    assert wanted.items() <= root.attributes.items()
    assert root.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert spans["kv_transfer"].attributes["slipstream.transfer.transport"] == "shm"
    assert spans["kv_transfer"].attributes["slipstream.transfer.bytes"] > 0
    assert spans["decode"].attributes["gen_ai.usage.output_tokens"] == 10
    assert cluster.collector.paths == {"/v1/traces"}


def test_a_client_that_does_not_sample_is_obeyed_and_one_without_a_trace_gets_a_new_one(cluster: Cluster) -> None:
    unsampled = "1" * 32
    cluster.complete("quiet " + LONG, 4, {"traceparent": f"00-{unsampled}-{PARENT}-00"})
    before = {span.trace for span in cluster.collector.spans}
    cluster.complete("new " + LONG, 4, {"x-request-id": "untraced"})

    def root() -> TakenSpan | None:
        return next(
            (s for s in cluster.collector.spans if s.attributes.get("slipstream.request_id") == "untraced"), None
        )

    found = until(root, "the span of the front")
    assert found.parent == ""
    assert found.trace not in before
    cluster.trace(found.trace, 6)
    assert cluster.collector.of(unsampled) == []


def test_a_request_that_is_wrong_is_a_span_with_its_error(cluster: Cluster) -> None:
    trace = "2" * 32
    with pytest.raises(urllib.error.HTTPError):
        cluster.complete(LONG, 4, {"traceparent": f"00-{trace}-{PARENT}-01"}, temperature=9)
    (span,) = cluster.trace(trace, 1)
    assert span.failed
    assert (span.parent, span.attributes["error.type"]) == (PARENT, "invalid_value")


# ------------------------------------------------------------------------------------------------------------- losses


def test_a_stopped_worker_is_named_with_the_requests_whose_part_is_missing(cluster: Cluster) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: cluster.complete(f"{number} stopped", 3), range(12)))
    gap = {"where": "decode-0", "reason": "the worker did not answer within 2 s"}

    def all_but_the_stopped_one() -> list[dict[str, Any]]:
        found = cluster.server.get("/v1/requests?limit=1000&events=true")[1]["data"]
        here = [one for one in found if one["decode_worker"] == "decode-0"]
        return here if all(one["missing"] == [gap] for one in here) else []  # where a machine is busy, others are late

    pid = cluster.server.pids()["decode-0"]
    os.kill(pid, signal.SIGSTOP)
    try:
        concerned = until(all_but_the_stopped_one, "everybody else to answer in time")
        drawn = " ".join(run_timeline(cluster, "--last", "1000").split())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(concerned) >= 12
    handed_over = [one for one in concerned if one["prefill_worker"] == "prefill-0"]  # it may have helped with others
    assert handed_over
    assert all(any(event["where"] == "prefill-0" for event in one["events"]) for one in handed_over)
    assert re.search(rf"decode-0: its part of {len(concerned)} of \d+ requests is missing: {gap['reason']}", drawn)


def test_a_request_that_waits_at_a_stopped_worker_tells_since_when_nothing_was_heard(cluster: Cluster) -> None:
    stopped = [pid for name, pid in cluster.server.pids().items() if name in ("prefill-0", "decode-0")]
    with ThreadPoolExecutor(1) as pool:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            answer = pool.submit(cluster.complete, "unheard " + LONG, 4, {"x-request-id": "unheard"})

            def waits() -> list[dict[str, Any]]:
                status, body = cluster.server.get("/v1/requests/unheard/timeline")
                return body["silences"] if status == 200 else []

            (waiting,) = until(waits, "a stretch in which nothing was heard")
            assert "nothing heard" in run_timeline(cluster, "unheard")
            drawn = run_timeline(cluster)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert len(answer.result()["choices"]) == 1
    assert waiting["where"] in ("prefill-0", "decode-0")
    assert waiting["attributes"]["reason"].endswith("the worker did not answer within 2 s")
    assert "? nothing heard" in drawn
    told = until(lambda: (found := cluster.timeline("unheard"))["missing"] == [] and found, "all workers to answer")
    first = told["silences"][0]
    assert (first["name"], first["where"]) == ("nothing heard", waiting["where"])
    assert first["attributes"] == {"placed_s": waiting["attributes"]["placed_s"]}
    assert first["duration_s"] >= waiting["duration_s"]
    assert first["start_s"] == waiting["start_s"]


def test_a_lost_worker_is_named_and_what_it_did_to_a_request_is_told(cluster: Cluster) -> None:
    """The last test of the module: the decode worker is another process behind it."""
    answer = cluster.complete("before " + LONG, 6)
    body = {"prompt": "during " + LONG, "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    data, headers = json.dumps(body).encode(), {"content-type": "application/json", "x-request-id": "survivor"}
    request = urllib.request.Request(cluster.server.url + "/v1/completions", data, headers)

    def decoding() -> bool:
        try:
            return any(event["name"] == "decode_step" for event in cluster.timeline("survivor")["events"])
        except AssertionError:
            return False

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(urllib.request.urlopen, request, timeout=100)
        until(decoding, "the request to decode")
        os.kill(cluster.server.pid("decode-0"), signal.SIGKILL)
        gone = cluster.timeline(answer["id"])
        assert future.result().status == 200
    assert [gap["where"] for gap in gone["missing"]] == ["decode-0"]
    assert any(event["where"] == "prefill-0" for event in gone["events"])
    survivor = cluster.timeline("survivor")
    assert (survivor["state"], survivor["attempts"], survivor["output_tokens"]) == ("finished", 2, 120)
    again = next(event for event in survivor["events"] if event["name"] == "resubmitted")
    assert again["attributes"]["cause"] == "worker_lost"
    assert [gap["where"] for gap in survivor["missing"]] == ["decode-0"]
    assert sum(event["name"] == "placed" for event in survivor["events"]) == 2
    until(lambda: "decode-0" in cluster.server.pids(), "the decode worker to be back")
    gone = cluster.timeline(answer["id"])
    assert "another process is at its address" in gone["missing"][0]["reason"]
