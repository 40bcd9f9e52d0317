"""`slipstream bench serve` against a real cluster: what it reports is what the cluster did."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.proc.programs import Server, serving, until
from tests.unit.tiny_models import tiny_model

from slipstream.bench.serve.report import ServeReport

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)
    with serving("--served-model-name", "tiny", "--prefill", "cpu", "--decode", "cpu", model=str(model)) as found:
        yield found[1]


def bench(server: Server, path: Path, *options: str) -> tuple[ServeReport, str]:
    command = [sys.executable, "-m", "slipstream", "bench", "serve", "--url", server.url, "--json", str(path), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return msgspec.json.decode(path.read_bytes(), type=ServeReport), ran.stdout


def counted(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", text))


def test_every_token_that_the_cluster_made_is_in_the_figures(server: Server, tmp_path: Path) -> None:
    before = counted(server, "slipstream_generated_tokens_total")
    report, output = bench(
        server, tmp_path / "a.json", "--rate", "10,20", "--requests", "12", "--warmup", "0", "--input", "20-60",
        "--output", "3-9", "--slo", "ttft=60s", "--raw",
    )  # fmt: skip
    probes = 2 * 8
    made = counted(server, "slipstream_generated_tokens_total") - before
    asked = sum(row.wanted_output for row in report.requests)
    assert report.target["prompts_as_ids"] is True
    assert report.target["ignore_eos"] is True
    assert report.target["token_ids"] is True
    assert [row.ok for row in report.rates] == [12, 12], output
    assert [row.wrong_length for row in report.rates] == [0, 0]
    assert [row.other_prompts for row in report.rates] == [0, 0]
    assert all(row.output == row.wanted_output for row in report.requests)
    assert asked <= made <= asked + probes
    assert all(row.good is not None and row.good.value == 1.0 for row in report.rates)
    assert all(sum(row.gaps_ms) == pytest.approx(row.e2e_ms - row.ttft_ms, abs=0.1) for row in report.requests)


def test_a_chat_load_has_prompts_of_about_the_wanted_length(server: Server, tmp_path: Path) -> None:
    report, _ = bench(
        server, tmp_path / "b.json", "--endpoint", "chat", "--rate", "10", "--requests", "8", "--warmup", "0",
        "--input", "300", "--output", "4",
    )  # fmt: skip
    assert report.rates[0].ok == 8
    assert all(abs(row.input - 300) <= 60 for row in report.requests), [row.input for row in report.requests]


def test_a_trace_with_shared_prefixes_hits_the_cache(server: Server, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 300 * at, "input_length": 260, "output_length": 3, "hash_ids": [0, 1, 10 + at]} for at in range(8)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    report, _ = bench(server, tmp_path / "c.json", "--workload", str(trace), "--warmup", "1", "--trace-block", "128")
    row = report.rates[0]
    assert (row.requests, row.ok) == (7, 7)
    assert row.cached_share > 0.8
    assert row.rate == 1  # times as fast
    assert row.sent_per_s == pytest.approx(1000 / 300, rel=0.01)


def test_nothing_of_the_loads_is_left_in_the_cluster(server: Server) -> None:
    def quiet() -> bool:
        status, found = server.get("/audit")
        return status == 200 and found["problems"] == [] and not any(found["stages"].values())

    until(quiet, "the router has no requests left")
