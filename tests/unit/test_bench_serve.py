"""The load generator: what is sent when, what is made of the answers, and what is said about it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from tests.unit.openai_server import DONE, HEAD, Call, FakeServer, delta, event, fake, text, usage, well

from slipstream.bench.serve import command as command_module
from slipstream.bench.serve.arrivals import due_times, trace_times
from slipstream.bench.serve.client import Client
from slipstream.bench.serve.figures import SEEDS_TO_DRAW, Draws, Slo, figures, spread, wilson
from slipstream.bench.serve.load import LoadResult, Planned, Sample, run_load
from slipstream.bench.serve.prompts import PromptMaker, Sampling
from slipstream.bench.serve.report import ServeReport
from slipstream.bench.serve.session import Session, Settings
from slipstream.bench.serve.stream import Stream
from slipstream.bench.serve.target import NoServer, Target, discover, parse_url
from slipstream.bench.serve.work import MIXES, Conversations, Item, Range, Ranges, Trace
from slipstream.errors import ConfigError

TARGET = Target("h", 1, False, "/v1", "m", takes_ids=True)
QUIET = 0.0
LINE = '{"timestamp": %d, "input_length": %d, "output_length": 1}'


def settings(url: str, **rest: Any) -> Settings:
    base: dict[str, Any] = {
        "work": Ranges(Range(4, 9), Range(2, 5)), "headers": {}, "rates": (200.0,), "requests": 20, "warmup": 3,
        "drain_s": 60.0, "timeout_s": 60.0,
    }  # fmt: skip
    return Settings(url=url, **{**base, **rest})


async def measured(server: FakeServer, **rest: Any) -> ServeReport:
    return await Session(settings(server.url, **rest), lambda line: None).run(lambda name, progress: None)


def sent(server: FakeServer) -> list[Call]:
    """The load's own requests: all behind the probes, which ask for two tokens."""
    return [call for call in server.calls if call.body.get("temperature") == QUIET]


# ------------------------------------------------------------------------------------------------------ arrivals


def test_arrivals_have_the_rate_and_the_spread_of_their_kind() -> None:
    rng = np.random.default_rng(1)
    for kind, variation, low, high in (("constant", 2, 0, 0.001), ("poisson", 2, 0.9, 1.1), ("burst", 3, 2.6, 3.4)):
        gaps = np.diff(due_times(kind, 20_000, 50.0, rng, variation=variation))  # type: ignore[arg-type]
        assert 1 / gaps.mean() == pytest.approx(50, rel=0.08)
        assert low <= gaps.std() / gaps.mean() <= high
        assert (gaps >= 0).all()


def test_exact_arrivals_are_random_and_neither_more_nor_fewer_than_asked() -> None:
    asked = settings("http://127.0.0.1:1", arrivals="exact", duration_s=14.0, requests=0, warmup=8)
    work = Session(asked, lambda line: None)
    for rate in (0.5, 4.0, 12.0):
        loads = [work._items(rate, seed)[1] for seed in range(200)]
        assert {len(times) for times in loads} == {8 + round(14 * rate)}
        measured = np.array([times[8:] for times in loads]) - 8 / rate
        assert all(times == sorted(times) and times[7] <= 8 / rate for times in loads)
        assert measured.min() >= 0
        assert measured.max() <= 14
        counts = np.array([np.histogram(row, 7, (0, 14))[0] for row in measured])  # of two seconds each
        assert counts.mean() == pytest.approx(2 * rate)
        assert counts.var() == pytest.approx(2 * rate * 6 / 7, rel=0.2)  # poisson's, less what the fixed sum takes


def test_a_trace_keeps_its_gaps_and_is_made_faster() -> None:
    assert trace_times([5.0, 6.0, 9.0], speed=2.0) == [0.0, 0.5, 2.0]


def test_rates_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        due_times("poisson", 3, 0.0, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="above 0"):
        trace_times([1.0], speed=-1)


# ---------------------------------------------------------------------------------------------------------- work


def test_lengths_of_ranges_fill_them_and_those_of_mixes_have_their_medians() -> None:
    rng = np.random.default_rng(0)
    items = Ranges(Range(10, 20), Range(1, 3)).items(2000, rng)
    assert {item.input for item in items} == set(range(10, 21))
    assert {item.output for item in items} == {1, 2, 3}
    for mix in MIXES.values():
        items = mix.items(4000, rng)
        assert np.median([item.input for item in items]) == pytest.approx(mix.input.median, rel=0.1)
        assert np.median([item.output for item in items]) == pytest.approx(mix.output.median, rel=0.1)
        assert min(item.output for item in items) >= mix.output.low


@pytest.mark.parametrize("given", ["", "a", "9-3", "0", "1-2-3", "-5"])
def test_what_is_no_range_is_refused_with_an_example(given: str) -> None:
    with pytest.raises(ConfigError, match="512-2048"):
        Range.parse(given, "--input")


def test_a_trace_is_replayed_with_its_prefixes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 100, "input_length": 25, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 400, "input_length": 20, "output_length": 0, "hash_ids": [0, 1]},
        {"timestamp": 400, "input_length": 13, "output_length": 5, "hash_ids": [0, 7], "more": True},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    items = Trace.load(path, block_tokens=10).items(3, np.random.default_rng(0))
    assert [(i.input, i.output, i.at_s) for i in items] == [(25, 3, 0.1), (20, 1, 0.4), (13, 5, 0.4)]
    maker = PromptMaker(TARGET, 5, Sampling())
    a, b, c = (maker.ids(item, number).tolist() for number, item in enumerate(items))
    assert [len(a), len(b), len(c)] == [25, 20, 13]
    assert a[:20] == b
    assert b[:10] == c[:10]
    assert b[10:13] != c[10:13]
    assert PromptMaker(TARGET, 6, Sampling()).ids(items[0], 0).tolist() != a, "another run is another salt"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no requests"),
        ("{}", r":1 is no line of a trace"),
        (LINE % (9, 4) + "\n" + LINE % (3, 4), ":2.*not go back"),
        (LINE % (9, 0), "above 0"),
    ],
)  # fmt: skip
def test_a_damaged_trace_is_refused_with_its_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=said):
        Trace.load(tmp_path / "t.jsonl")


def test_conversations_are_read_from_files_of_the_usual_form(tmp_path: Path) -> None:
    def turn(who: str, words: str) -> dict[str, str]:
        return {"from": who, "value": words}

    entries = [
        {"id": "a", "conversations": [turn("human", "q" * 40), turn("gpt", "r" * 80), turn("human", "more")]},
        {"id": "b", "conversations": [turn("gpt", "starts wrong"), turn("human", "x")]},
        {"id": "c", "conversations": [turn("human", "alone")]},
        {"id": "d", "conversations": [turn("user", "hi"), turn("assistant", "ok")]},
        {"id": "e"},
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(entries))
    items = Conversations.load(path).items(9, np.random.default_rng(0))
    assert sorted((item.text, item.input, item.output) for item in items) == [("hi", 1, 1), ("q" * 40, 10, 20)]
    for content in ("{}", "[]", "nonsense"):
        path.write_text(content)
        with pytest.raises(ConfigError):
            Conversations.load(path)


def test_prompts_are_exact_and_differ_unless_they_share_a_prefix() -> None:
    maker = PromptMaker(TARGET, 1, Sampling())
    assert len(maker.ids(Item(777, 1), 0)) == 777
    assert maker.ids(Item(50, 1), 0).tolist() != maker.ids(Item(50, 1), 1).tolist()
    shared = Ranges(Range(30, 40), Range(1, 1), shared=20, groups=2).items(40, np.random.default_rng(0))
    prompts = [maker.ids(item, number).tolist() for number, item in enumerate(shared)]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 2
    assert len({tuple(prompt[20:30]) for prompt in prompts}) == 40
    assert [len(prompt) for prompt in prompts] == [item.input for item in shared]


def test_bodies_ask_for_exact_answers_in_the_way_that_the_server_takes() -> None:
    item = Item(6, 9)
    able = Target("h", 1, False, "/v1", "m", takes_ids=True, takes_ignore_eos=True, takes_token_ids=True, usage="final")
    body = json.loads(PromptMaker(able, 1, Sampling(0.0)).body(item, 0))
    assert len(body.pop("prompt")) == 6
    assert body == {
        "model": "m", "stream": True, "max_tokens": 9, "temperature": 0.0, "ignore_eos": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    least = Target("h", 1, False, "/v1", "m", api="chat", takes_min_tokens=True, limit_field="max_completion_tokens")
    body = json.loads(PromptMaker(least, 1, Sampling(None)).body(item, 0))
    assert len(body["messages"][0]["content"].split()) == 6
    assert {k: v for k, v in body.items() if k != "messages"} == {
        "model": "m", "stream": True, "max_completion_tokens": 9, "min_tokens": 9,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------- target


async def found(server: FakeServer, **rest: Any) -> Target:
    host, port, _, _ = parse_url(server.url)
    client = Client(host, port)
    try:
        return await discover(client, server.url, **rest)
    finally:
        client.close()


async def test_probes_wait_no_longer_than_an_answer_may_take() -> None:
    async def silent(call: Call) -> None:
        await asyncio.Event().wait()

    async with fake(silent) as server:
        with pytest.raises(NoServer, match=r"no end of the answer within 0\.2 s"):
            await found(server, patience_s=0.2)


async def test_a_server_that_takes_everything_is_used_to_the_full() -> None:
    async with fake() as server:
        target = await found(server)
    assert (target.model, target.server, target.max_model_len) == ("fake", "fakes", 1000)
    assert (target.takes_ids, target.takes_ignore_eos, target.usage, target.notes) == (True, True, "final", ())
    assert not target.takes_token_ids, "the fake never tells ids"


async def test_a_strict_server_gets_only_what_it_takes_and_the_rest_is_said() -> None:
    async with fake(refused=("ignore_eos", "return_token_ids", "stream_options", "token ids")) as server:
        target = await found(server)
        report = await measured(server)
    assert (target.takes_ids, target.takes_ignore_eos, target.takes_min_tokens) == (False, False, True)
    assert (target.usage, target.takes_token_ids) == ("none", False)
    assert len(target.notes) == 4
    assert report.rates[0].ok == 20
    assert "counts of events" in " ".join(report.rates[0].notes)
    assert all(isinstance(call.body["prompt"], str) for call in sent(server))


async def test_words_are_matched_to_the_servers_tokens_template_included() -> None:
    async def answer(call: Call) -> None:
        words = len(call.body["messages"][0]["content"].split())
        await call.write(HEAD)
        await call.chunked([delta(role="assistant", content=""), delta(content="x"), delta("stop")])
        await call.chunked([usage(words * 2 + 11, 1), DONE])
        await call.end()

    async with fake(answer) as server:
        target = await found(server, api="chat")
    assert target.words_per_token == pytest.approx(0.5)
    assert target.overhead_tokens == pytest.approx(11)
    assert target.words_for(111) == 50


async def test_a_server_that_is_none_is_said_to_be_none() -> None:
    async with fake() as server:
        pass
    with pytest.raises(NoServer, match="nothing answers"):
        await found(server)

    async def broken(call: Call) -> None:
        await call.status(503, {"error": {"message": "no workers"}})

    async with fake(broken) as server:
        with pytest.raises(NoServer, match=r"http_503.*no workers"):
            await found(server)
    async with fake(card={"nothing": 1}) as server:
        with pytest.raises(NoServer, match="--model"):
            await found(server)


# ---------------------------------------------------------------------------------------------------------- load


async def test_requests_go_out_when_they_are_due_although_none_is_answered() -> None:
    """The heart of an open loop: a server that answers nothing for a while gets the same load."""
    open_gate = asyncio.Event()

    async def answer(call: Call) -> None:
        if len(server.calls) == 30:
            open_gate.set()
        await open_gate.wait()
        await well(call)

    async with fake(answer) as server:
        host, port, _, _ = parse_url(server.url)
        client = Client(host, port)
        payload = client.request("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 2}')
        plan = [Planned(at * 0.01, Item(1, 2), payload) for at in range(30)]
        result = await run_load(client, plan, window_s=0.29, timeout_s=60.0, drain_s=60.0)  # to when the last is due
        client.close()
    assert [sample.stream.problem for sample in result.samples] == [""] * 30
    assert result.samples[0].ttft_s > result.samples[-1].ttft_s, "the wait of the first is in its latency"
    assert result.open_at_end > 0


async def test_latency_counts_from_the_due_time_and_lateness_is_told() -> None:
    async with fake() as server:
        host, port, _, _ = parse_url(server.url)
        client = Client(host, port)
        payload = client.request("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 2}')
        loop = asyncio.get_running_loop()

        def block() -> None:
            import time

            time.sleep(0.15)

        loop.call_later(0.05, block)  # this process is held up while requests are due
        plan = [Planned(at * 0.02, Item(1, 2), payload) for at in range(10)]
        result = await run_load(client, plan, window_s=0.2, timeout_s=60.0, drain_s=60.0)
        client.close()
    late = max(sample.lateness_s for sample in result.samples)
    assert late > 0.05
    worst = max(result.samples, key=lambda sample: sample.lateness_s)
    assert worst.ttft_s >= worst.lateness_s
    assert result.lag_s > 0.05
    row = figures(50.0, {0: result}, None, told_usage=True)
    assert any("client is a bottleneck" in note for note in row.notes)


async def test_answers_that_do_not_come_are_errors_at_the_end() -> None:
    async def answer(call: Call) -> None:
        if len(server.calls) % 2:
            return await well(call)
        await asyncio.sleep(600)
        return None

    async with fake(answer) as server:
        host, port, _, _ = parse_url(server.url)
        client = Client(host, port)
        payload = client.request("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 2}')
        plan = [Planned(at * 0.001, Item(1, 2), payload) for at in range(4)]
        result = await run_load(client, plan, window_s=0.01, timeout_s=60.0, drain_s=2.0)
    assert sorted(sample.stream.problem for sample in result.samples) == ["", "", "unfinished", "unfinished"]


async def test_a_session_sends_each_rate_and_seed_with_its_own_prompts() -> None:
    async with fake() as server:
        report = await measured(server, rates=(200.0, 400.0), seeds=(0, 1))
        prompts = [tuple(call.body["prompt"]) for call in sent(server)]
    assert [row.rate for row in report.rates] == [200.0, 400.0]
    assert [row.requests for row in report.rates] == [40, 40]
    assert len(prompts) == 2 * 2 * 23
    assert len(set(prompts)) == len(prompts), "a prompt that was sent before would be in a cache"
    lengths = [
        [row.wanted_output for row in report.requests if (row.rate, row.seed) == (rate, 0)] for rate in (200, 400)
    ]
    assert lengths[0] == lengths[1], "rates are compared on the same lengths"
    assert len({row.seed for row in report.requests}) == 2
    row = report.rates[0]
    assert (row.ok, row.wrong_length, row.other_prompts, row.errors) == (40, 0, 0, {})
    assert 1.0 <= row.tokens_per_event < 1.01
    assert row.ttft.p50 <= row.ttft.p99 <= row.e2e.max


async def test_a_duration_limits_a_load_in_time() -> None:
    async with fake() as server:
        report = await measured(server, requests=0, duration_s=0.5, rates=(100.0,), warmup=5)
    row = report.rates[0]
    assert 25 < row.requests < 80
    assert row.window_s == pytest.approx(0.5, abs=0.05)
    assert max(request.due_s for request in report.requests) <= 0.5


async def test_answers_of_another_length_are_counted_and_said() -> None:
    async def stubborn(call: Call) -> None:
        await well(Call(call.path, {**call.body, "max_tokens": 2}, call.writer))

    async with fake(stubborn) as server:
        row = (await measured(server, work=Ranges(Range(4, 4), Range(5, 5)))).rates[0]
    assert (row.ok, row.wrong_length, row.mean_output_tokens) == (20, 20, 2.0)
    assert any("not as long as asked" in note for note in row.notes)


async def test_failed_requests_are_counted_by_kind_and_miss_the_goodput() -> None:
    async def moody(call: Call) -> None:
        if call.body.get("temperature") != QUIET:
            return await well(call)
        match len(server.calls) % 4:
            case 0:
                await call.status(429, {"error": {"message": "full"}})
            case 1:
                await call.write(HEAD)
                await call.chunked([text("a"), event({"error": {"message": "lost the worker"}})])
                call.writer.close()
            case _:
                await well(call)
        return None

    async with fake(moody) as server:
        row = (await measured(server, slo=Slo(ttft=60.0), warmup=0)).rates[0]
    assert row.errors == {"http_429": 5, "error_event": 5}
    assert row.error_examples == {"http_429": "full", "error_event": "lost the worker"}
    assert row.good is not None
    assert row.good.value == 0.5
    assert 0.2 < row.good.low < 0.5 < row.good.high < 0.8
    assert row.ttft.n == 10
    assert "10 of 20 requests failed" in row.notes[0] or "10 of 20 requests failed" in " ".join(row.notes)


async def test_lengths_are_cut_to_the_servers_context() -> None:
    async with fake(card={"id": "fake", "max_model_len": 40}) as server:
        report = await measured(server, work=Ranges(Range(50, 60), Range(10, 10)), max_output=8)
    assert {(request.input, request.wanted_output) for request in report.requests} == {(32, 8)}
    assert any("23 of 23 requests were cut" in note for note in report.notes)


async def test_a_load_without_measured_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 4, "output_length": 1}')
    async with fake() as server:
        with pytest.raises(ConfigError, match="none would be measured"):
            await measured(server, work=Trace.load(path), arrivals="trace", warmup=1)


# ------------------------------------------------------------------------------------------------------- figures


def sample(first: float, gap: float, tokens: int, problem: str = "") -> Sample:
    stream = Stream(status=200, sent=10.0, problem=problem, finish="length")
    stream.times = array("d", [10.0 + first + gap * i for i in range(tokens)])
    stream.counts = array("l", [1] * tokens)
    return Sample(Planned(0.0, Item(5, tokens), b""), 10.0, stream)


def result(samples: list[Sample]) -> LoadResult:
    return LoadResult(samples, 10.0, 12.0, 0.1, 0.0, 0, 1)


def test_latencies_are_those_of_the_definitions() -> None:
    row = figures(1.0, {0: result([sample(0.5, 0.1, 11)])}, None, told_usage=True)
    assert row.ttft.p50 == pytest.approx(500)
    assert row.itl.p99 == pytest.approx(100)
    assert row.itl.n == 10
    assert row.tpot.p50 == pytest.approx(100)
    assert row.e2e.p50 == pytest.approx(1500)
    assert row.done_per_s == pytest.approx(0.5)
    assert row.output_tokens_per_s == pytest.approx(11 / 2)
    assert row.prompt_tokens_per_s == pytest.approx(5 / 2)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ("ttft=600ms", True), ("ttft=400ms", False), ("tpot=0.11s", True), ("tpot=90ms", False), ("itl=101ms", True),
        ("itl=99ms", False), ("e2e=1.6s", True), ("e2e=1.4", False), ("ttft=600ms,tpot=90ms", False),
    ],
)  # fmt: skip
def test_bounds_are_met_or_not(bounds: str, expected: bool) -> None:
    assert Slo.parse(bounds).met(sample(0.5, 0.1, 11)) is expected
    assert not Slo.parse(bounds).met(sample(0.5, 0.1, 11, problem="cut"))


@pytest.mark.parametrize("given", ["", "ttft", "speed=3s", "ttft=fast", "ttft=-1s", "ttft=0"])
def test_bounds_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        Slo.parse(given)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(60):
        values = rng.exponential(1.0, 120)
        found = spread(values, np.arange(120), Draws([0] * 120, rng))
        hits += found.low[0] <= 1e3 * np.log(2) <= found.high[0]
    assert 50 <= hits <= 60


def test_intervals_over_seeds_are_wider_when_the_seeds_disagree() -> None:
    rng = np.random.default_rng(4)
    seeds = np.repeat(np.arange(SEEDS_TO_DRAW + 2), 50)
    values = 1.0 + seeds * 0.5 + rng.normal(0, 0.05, len(seeds))
    by_seed = spread(values, np.arange(len(seeds)), Draws(seeds.tolist(), rng))
    alone = spread(values, np.arange(len(seeds)), Draws([0] * len(seeds), rng))
    assert by_seed.high[0] - by_seed.low[0] > 1.5 * (alone.high[0] - alone.low[0])


def test_a_share_of_everything_is_not_certain() -> None:
    low, high = wilson(50, 50)
    assert low == pytest.approx(0.929, abs=0.002)
    assert high == 1.0
    assert wilson(0, 50)[1] == pytest.approx(0.071, abs=0.002)
    row = figures(1.0, {0: result([sample(0.1, 0.01, 3) for _ in range(50)])}, Slo(ttft=1.0), told_usage=True)
    assert row.good is not None
    assert (row.good.value, round(row.good.low, 2)) == (1.0, 0.93)


def test_figures_of_nothing_but_errors_are_empty_not_wrong() -> None:
    broken = Sample(Planned(0.0, Item(5, 5), b""), 10.0, Stream(problem="connect", detail="refused"))
    row = figures(1.0, {0: result([broken])}, Slo(ttft=1.0), told_usage=True)
    assert (row.ok, row.errors, row.ttft.n, row.itl.n) == (0, {"connect": 1}, 0, 0)
    assert row.good is not None
    assert row.good.value == 0.0


def test_events_of_several_tokens_are_told_beside_the_gaps() -> None:
    merged = sample(0.1, 0.1, 3)
    merged.stream.output_tokens = 9
    row = figures(1.0, {0: result([merged])}, None, told_usage=True)
    assert row.tokens_per_event == 3.0
    assert row.tpot.p50 == pytest.approx(1e3 * 0.2 / 8)
    assert any("read TPOT" in note for note in row.notes)


# -------------------------------------------------------------------------------------------------- command line


def called(*arguments: str) -> Result:
    return CliRunner().invoke(command_module.command, list(arguments))


async def in_thread(*arguments: str) -> Result:
    return await asyncio.to_thread(called, *arguments)


async def test_a_load_from_the_command_line_is_shown_and_kept_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    async with fake() as server:
        for name, url in {"a": ["--url", server.url], "b": [server.url.removeprefix("http://")]}.items():
            ran = await in_thread(
                *url, "--rate", "100,200", "--requests", "10", "--warmup", "2", "--input", "4-8",
                "--output", "2-4", "--slo", "ttft=5s,tpot=1s", "--label", name,
                "--json", str(tmp_path / f"{name}.json"),
            )  # fmt: skip
            assert ran.exit_code == 0, ran.output
            assert "10 of 10 whole" in ran.output
            assert "goodput" in ran.output
            assert re.search(r"asked +. +sent/s +. +done/s", ran.output)
            assert re.search(r"100/s asked, [\d.]+/s sent: 10 of 10 whole", ran.output)
    written = msgspec.json.decode((tmp_path / "a.json").read_bytes(), type=ServeReport)
    assert [row.rate for row in written.rates] == [100, 200]
    assert all(10 / row.window_s == pytest.approx(row.sent_per_s) for row in written.rates)
    assert [row.ok for row in written.rates] == [10, 10]
    assert len(written.requests) == 20
    both = called(str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--plot", str(tmp_path / "curves.svg"))
    assert both.exit_code == 0, both.output
    for name in ("a", "b"):
        assert f"{name}: goodput: share of requests with ttft 5000 ms, tpot 1000 ms" in " ".join(both.output.split())
    written.rates[0].notes.append("a doubt about this rate")
    written.notes.append("a doubt about all")
    (tmp_path / "doubtful.json").write_bytes(msgspec.json.encode(written))
    again = called(str(tmp_path / "doubtful.json"))
    for words in ("goodput: share of requests with", "100/s: a doubt about this rate", "a doubt about all"):
        assert words in again.output
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(f"<!-- {words} -->" in drawn for words in ("a", "b", "requests/s asked"))


@pytest.mark.parametrize("width", [80, 120, 200])
async def test_no_figure_of_the_table_is_cut_off_on_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    async with fake() as server:
        ran = await in_thread(
            server.url, "--rate", "100,200,300", "--requests", "10", "--warmup", "0", "--input", "4", "--output", "3",
            "--slo", "ttft=5s",
        )  # fmt: skip
    drawn = [line for line in ran.output.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, drawn)) <= width
    assert "…" not in "".join(drawn)
    words = " ".join("".join(drawn).replace("│", " ").replace("┃", " ").split())
    for heading in ("asked", "sent/s", "done/s", "TTFT", "ITL", "TPOT", "E2E", "goodput", "failed"):
        assert heading in words
    assert len([line for line in drawn if "300/s" in line]) == (1 if width == 200 else 2)


async def test_of_a_trace_the_speed_was_asked_and_the_rate_is_what_was_sent(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, results, curves = (tmp_path / name for name in ("t.jsonl", "r.json", "c.svg"))
    lines = ({"timestamp": 100 * at, "input_length": 4, "output_length": 2} for at in range(12))
    trace.write_text("\n".join(map(json.dumps, lines)))
    async with fake() as server:
        ran = await in_thread(
            server.url, "--workload", str(trace), "--speed", "2,4", "--warmup", "0", "--json", str(results),
            "--plot", str(curves),
        )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    written = msgspec.json.decode(results.read_bytes(), type=ServeReport)
    assert [row.rate for row in written.rates] == [2, 4]
    assert {row.rate for row in written.requests} == {2, 4}
    assert [row.sent_per_s for row in written.rates] == pytest.approx([20, 40], rel=0.2)
    assert re.search(r"(?m)^2 x asked, [\d.]+/s sent: 12 of 12 whole", ran.output)
    assert "<!-- requests/s sent -->" in curves.read_text()


async def test_what_was_measured_before_an_interruption_is_kept(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def slow_at_last(call: Call) -> None:
        loads.append(call.body.get("temperature") == QUIET)
        if loads.count(True) > 5:
            started.set()
            await asyncio.sleep(60)
        await well(call)

    loads: list[bool] = []
    async with fake(slow_at_last) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "slipstream", "bench", "serve", "--url", server.url, "--rate", "50,40",
            "--requests", "5", "--warmup", "0", "--input", "4", "--output", "2", "--json", str(tmp_path / "x.json"),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await asyncio.wait_for(started.wait(), 60)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert "these were not measured: 40" in " ".join(output.decode().split())
    written = msgspec.json.decode((tmp_path / "x.json").read_bytes(), type=ServeReport)
    assert [(row.rate, row.ok) for row in written.rates] == [(50.0, 5)]
    assert len(written.requests) == 5


async def test_a_single_rate_is_drawn_as_distributions(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    async with fake() as server:
        ran = await in_thread(
            "--url", server.url, "--rate", "100", "--requests", "10", "--plot", str(tmp_path / "one.svg"),
            "--input", "4", "--output", "3", "--raw", "--json", str(tmp_path / "one.json"),
        )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert "<!-- whole answer -->" in (tmp_path / "one.svg").read_text()
    written = msgspec.json.decode((tmp_path / "one.json").read_bytes(), type=ServeReport)
    assert all(len(request.gaps_ms) == 2 for request in written.requests)


async def test_a_server_that_fails_every_request_fails_the_command() -> None:
    async def failing(call: Call) -> None:
        await (well(call) if call.body.get("temperature") != QUIET else call.status(500, {"error": {"message": "no"}}))

    async with fake(failing) as server:
        ran = await in_thread("--url", server.url, "--rate", "100", "--requests", "5", "--warmup", "0", "--input", "4")
    assert ran.exit_code == 1
    assert "5 x http_500: no" in ran.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "which server? Give its address, as in: slipstream bench serve http://127.0.0.1:8000"),
        (("http://a", "--url", "http://b"), "one server to load; http://a and http://b"),
        (("http://a", "b:80"), "one server to load"),
        (("http://a", "x.json"), "either a server to load (http://a), or files of earlier results to compare (x.json)"),
        (("--url", "x y://"), "is no address"),
        (("--url", "http://h", "--rate", "fast"), "--rate 'fast'"),
        (("--url", "http://h", "--workload", "sonnets"), "neither one of random, chat"),
        (("--url", "http://h", "--workload", "none.jsonl"), "cannot read none.jsonl"),
        (("--url", "http://h", "--arrivals", "trace"), "needs the times of a trace"),
        (("--url", "http://h", "--header", "nothing"), "is no header"),
        (("--url", "http://h", "--seeds", "0"), "at least 1"),
        (("--url", "http://h", "--warmup", "-1"), "--warmup is -1"),
        (("--url", "http://h", "--plot", "x.gif"), "cannot draw"),
        (("missing.json",), "cannot read missing.json"),
        (("missing.json", "--url", "http://h"), "either a server"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(arguments: tuple[str, ...], said: str) -> None:
    ran = called(*arguments)
    assert ran.exit_code != 0
    assert isinstance(ran.exception, ConfigError)
    assert said in str(ran.exception)


def test_a_file_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no result of"):
        command_module.reports.load_report(tmp_path / "x.json")
