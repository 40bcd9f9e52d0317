"""The dashboard without a browser: its figures, its snapshots over a front, and who may read what."""

from __future__ import annotations

import asyncio
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.front_house import MESSAGES, House, house, saying, until
from tests.unit.scripted import ScriptedRouter

from slipstream.config import FrontConfig
from slipstream.front.dashboard import handlers, watch
from slipstream.front.dashboard.figures import Samples, quantile
from slipstream.front.dashboard.snapshot import encode, overlay
from slipstream.front.dashboard.watch import FRONT_NAMES, WORKER_NAMES, History

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src/slipstream/front/dashboard/static"
TTFT = watch.LATENCIES["ttft"]
KEY = {"authorization": "Bearer s3cret"}


# ------------------------------------------------------------------------------------------------- figures


def test_a_figure_is_the_sum_of_the_samples_with_its_labels():
    text = 'a{x="1",y="p"} 2\na{x="1",y="q"} 3\na{x="2",y="q"} 4.5e1\nb 7\n# HELP a words\nab{x="1"} 100\n'
    samples = Samples.of_text(text, frozenset({"a", "b"}))
    assert samples.total("a", {"x": "1"}) == 5
    assert samples.total("a", {"x": ["1", "2"], "y": "q"}) == 48
    assert samples.total("a+b") == 57
    assert samples.total("ab") is None
    assert samples.total("a", {"x": "3"}) is None
    assert samples.values("a", "y") == ["p", "q"]


@given(st.text())
def test_a_label_reads_back_whatever_it_holds(value: str):
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    Gauge("slipstream_worker_requests", "x", ["stage"], registry=registry).labels(value).set(3)
    samples = Samples.of_text(generate_latest(registry).decode("utf-8", "replace"), WORKER_NAMES)
    if not re.search(r"[\x0b\x0c\x1c-\x1e\x85\u2028\u2029\r]", value):  # these end lines for whoever splits them so
        assert samples.total("slipstream_worker_requests", {"stage": value}) == 3


@given(st.text(max_size=200))
def test_nonsense_is_passed_over(text: str):
    Samples.of_text(f"slipstream_worker_pages{text}\nslipstream_worker_pages{{{text}\n{text}", WORKER_NAMES)


def test_numbers_that_json_cannot_hold_are_shown_as_none():
    samples = Samples.of_text('slipstream_worker_pages{state="free"} NaN\nslipstream_worker_pages{state="used"} +Inf\n',
                              WORKER_NAMES)  # fmt: skip
    values = [samples.total("slipstream_worker_pages", {"state": state}) for state in ("free", "used")]
    assert json.loads(encode(values)) == [None, None]


@given(st.lists(st.floats(0.0001, 50), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_real_one(seen: list[float], q: float):
    bounds = [0.001, 0.01, 0.1, 1.0, 10.0, math.inf]
    buckets = {bound: float(sum(value <= bound for value in seen)) for bound in bounds}
    found = quantile(buckets, q)
    real = sorted(seen)[max(math.ceil(q * len(seen)) - 1, 0)]
    upper = min(bound for bound in bounds if real <= bound)
    lower = max([bound for bound in bounds if bound < upper], default=0.0)
    assert found is not None
    assert found == lower if math.isinf(upper) else lower <= found <= upper


def test_a_quantile_of_nothing_is_none_and_of_a_window_counts_only_that():
    before, after = {1.0: 100.0, 2.0: 100.0, math.inf: 100.0}, {1.0: 100.0, 2.0: 110.0, math.inf: 110.0}
    assert quantile({}, 0.5) is None
    assert quantile(before, 0.5, before) is None
    assert quantile(after, 0.5, before) == pytest.approx(1.5)


def test_the_history_is_of_the_last_half_minute_and_ends_by_itself():
    def at(slow: int, fast: int) -> Samples:
        counts = {"0.1": fast, "10.0": fast + slow, "+Inf": fast + slow}
        return Samples((f"{TTFT}_bucket", {"le": le}, float(n)) for le, n in counts.items())

    history = History()
    history.add(0.0, at(slow=100, fast=0))
    for step in range(1, 40):
        history.add(2.0 * step, at(slow=100, fast=step))
    first, last = history.points[1], history.points[-1]
    assert last["t"] == 78.0
    assert (last["ttft_p99"] or 9) <= 0.1  # the slow ones are older than half a minute
    assert first["itl_p50"] is None
    assert [point["t"] for point in history.since(70.0)] == [72.0, 74.0, 76.0, 78.0]
    for step in range(40, 1000):
        history.add(2.0 * step, at(slow=100, fast=40))
    assert len(history.points) == 450
    assert history.points[-1]["ttft_p50"] is None  # nothing came lately


# ------------------------------------------------------------------------------------------------- over a front


async def fetched(home: House, path: str) -> tuple[int, str, dict[str, str]]:
    wire = await home.open("GET", path)
    await wire.head()
    body = await wire.body()
    wire.close()
    return wire.status, body.decode(), wire.headers


async def test_the_page_and_its_files_are_served_closed_to_everything_else():
    async with house(saying("x")) as home:
        for path in ["/dashboard", *(f"/dashboard/{file.name}" for file in STATIC.iterdir())]:
            status, body, headers = await fetched(home, path)
            assert status == 200, path
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            again = await home.open("GET", path, if_none_match=headers["etag"])
            await again.head()
            assert again.status == 304
            again.close()
            if path.endswith((".js", ".css", "dashboard")):
                assert not re.search(r"https?://(?!www\.w3\.org)", body), path
            if path.endswith(("dashboard", ".html")):
                assert not re.search(r"\son[a-z]+=|style=|<script(?! type=\"module\" src=)", body)
        assert (await fetched(home, "/dashboard/nothing.js"))[0] == 404
        assert (await fetched(home, "/dashboard/..%2fhandlers.py"))[0] == 404
        assert (await fetched(home, "/dashboard/"))[2]["location"] == "../dashboard"
        status, _, headers = await fetched(home, "/")
        assert (status, headers["location"]) == (307, "dashboard")


async def test_with_a_key_the_page_is_open_and_its_data_are_not():
    async with house(saying("x"), config=FrontConfig(port=0, api_key="s3cret")) as home:
        assert (await home.request("GET", "/dashboard"))[0] == 200
        assert (await home.request("GET", "/dashboard/main.js"))[0] == 200
        for method, path in (("GET", "state"), ("GET", "machine"), ("GET", "metrics?snapshot=1"), ("POST", "doctor")):
            assert (await home.request(method, f"/dashboard/{path}"))[0] == 401, path
        status, state, headers = await home.request("GET", "/dashboard/state", **KEY)
        assert status == 200
        assert state["workers"] == []
        assert headers["cache-control"] == "no-store"


async def test_a_snapshot_is_what_metrics_say_at_that_moment():
    async with house(saying("four"), config=FrontConfig(port=0)) as home:
        for _ in range(3):
            await home.client.chat.completions.create(model="scripted", messages=MESSAGES)
        _, state, _ = await home.request("GET", "/dashboard/state")
        _, text, headers = await fetched(home, f"/dashboard/metrics?snapshot={state['id']}")
        _, live, _ = await fetched(home, "/metrics")
        told, now = (Samples.of_text(words, FRONT_NAMES) for words in (text, live))
        for figure in (*state["latency"]["ttft"].values(), *(v for v in state["totals"].values() if "metric" in v)):
            if "quantile" in figure:
                assert figure["value"] == quantile(told.buckets(figure["metric"]), figure["quantile"])
                assert figure["value"] == quantile(now.buckets(figure["metric"]), figure["quantile"])
            elif "since" not in figure and figure["value"] is not None:
                expected = told.total(figure["metric"], figure.get("labels"))
                assert figure["value"] == expected == now.total(figure["metric"], figure.get("labels"))
        assert state["totals"]["outcomes"]["ok"]["value"] == 3
        assert state["totals"]["generated_tokens"]["value"] == 15  # the letters and the end, three times
        assert float(headers["x-sampled-at"]) > 0
        missing, error, _ = await home.request("GET", "/dashboard/metrics?snapshot=999")
        assert missing == 404
        assert str(state["id"]) in error["error"]["message"]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "x", "1&snapshot=2"])
async def test_a_number_that_is_none_is_refused(number: str):
    async with house(saying("x")) as home:
        status, body, _ = await home.request("GET", f"/dashboard/metrics?snapshot={number}")
        assert (status, body["error"]["param"]) == (400, "snapshot")
        status, body, _ = await home.request("GET", f"/dashboard/state?since={number.replace('snapshot', 'since')}")
        assert (status, body["error"]["param"]) == (400, "since")


async def test_rates_are_growth_between_two_kept_snapshots(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "FRESH_S", 0.0)
    async with house(saying("four")) as home:
        _, first, _ = await home.request("GET", "/dashboard/state")
        assert first["totals"]["tokens_per_s"]["value"] is None
        await home.client.chat.completions.create(model="scripted", messages=MESSAGES)
        await asyncio.sleep(0.05)
        _, second, _ = await home.request("GET", "/dashboard/state")
        rate = second["totals"]["requests_per_s"]
        texts = [await fetched(home, f"/dashboard/metrics?snapshot={i}") for i in (rate["since"], second["id"])]
        before, after = (Samples.of_text(text, FRONT_NAMES).total(rate["metric"]) or 0.0 for _, text, _ in texts)
        start, end = (float(headers["x-sampled-at"]) for _, _, headers in texts)
        assert after - before == 1
        assert rate["value"] == pytest.approx((after - before) / (end - start), rel=1e-3)


async def test_a_worker_that_is_lost_keeps_its_name_and_one_that_hangs_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "FRESH_S", 0.0)
    monkeypatch.setattr(watch, "WORKER_S", 0.05)
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(1), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    worker: dict[str, Any] = {"url": url, "id": "w1", "name": "decode-0", "role": "decode", "state": "live"}
    worker |= {"host": "h", "devices": ["cpu"], "routes": []}
    monkeypatch.setattr(ScriptedRouter, "describe", lambda self: {"workers": [dict(worker)]})
    async with server, house(saying("x")) as home:
        _, state, _ = await home.request("GET", "/dashboard/state")
        assert state["workers"][0]["figures_problem"] == "no answer within 0.05 s"
        worker |= {"name": "", "role": "both", "state": "connecting", "devices": []}
        _, state, _ = await home.request("GET", "/dashboard/state")
        shown = state["workers"][0]
        assert (shown["name"], shown["role"], shown["state"]) == ("decode-0", "decode", "connecting")
        assert shown["figures"] is None


async def test_the_drawing_follows_the_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "FRESH_S", 0.0)
    workers: list[dict[str, Any]] = []
    monkeypatch.setattr(ScriptedRouter, "describe", lambda self: {"workers": [dict(worker) for worker in workers]})
    async with house(saying("x")) as home:
        _, state, _ = await home.request("GET", "/dashboard/state")
        while not state["drawing"]["version"]:
            await asyncio.sleep(0.02)
            _, state, _ = await home.request("GET", "/dashboard/state")
        status, drawing, headers = await fetched(home, "/dashboard/machine")
        assert status == 200
        assert drawing.startswith("<svg")
        assert headers["content-type"].startswith("image/svg+xml")
        workers.append({"url": "http://h:1", "id": "w", "name": "p-7", "role": "prefill", "state": "connecting"})
        _, after, _ = await home.request("GET", "/dashboard/state")
        assert after["drawing"]["version"] != state["drawing"]["version"]
        assert "p-7" in (await fetched(home, "/dashboard/machine"))[1]


async def test_doctor_runs_when_a_page_of_this_server_asks():
    async with house(saying("x"), config=FrontConfig(port=0, api_key="s3cret")) as home:
        foreign = await home.request("POST", "/dashboard/doctor", b"x=1", content_type="text/plain", **KEY)
        assert foreign[0] == 415
        assert (await home.post("/dashboard/doctor", {}, **KEY))[0] == 200

        async def done() -> dict[str, Any]:
            while True:
                _, state, _ = await home.request("GET", "/dashboard/state", **KEY)
                if not state["doctor"]["running"]:
                    return state["doctor"]
                await asyncio.sleep(0.1)

        doctor = await asyncio.wait_for(done(), 100)
        assert doctor["state"] == "done", doctor
        assert doctor["counts"]["ok"] > 5
        assert not any("wants an API key" in result["seen"] for result in doctor["results"])


async def test_what_the_page_started_ends_with_the_front():
    async with house(saying("x")) as home:
        await home.request("GET", "/dashboard/state")
        started = [task for task in asyncio.all_tasks() if task.get_name().startswith("dashboard")]
        assert started
    await until(lambda: all(task.done() for task in started))


def test_ways_with_an_error_or_to_nobody_are_not_drawn():
    def worker(name: str, role: str, routes: list[dict[str, Any]]) -> dict[str, Any]:
        return {"name": name, "url": f"http://{name}", "role": role, "devices": ["cpu"], "host": "h", "routes": routes}

    routes = [
        {"peer": "d-10", "transport": "shm", "error": ""},
        {"peer": "d-2", "transport": "shm", "error": ""},
        {"peer": "d-2", "transport": "tcp", "error": "refused"},
        {"peer": "gone", "transport": "tcp", "error": ""},
    ]
    shown = overlay(
        [worker("d-10", "decode", []), worker("d-2", "decode", []), worker("p", "prefill", routes)], frozenset("h")
    )
    assert [placed.name for placed in shown.workers] == ["p", "d-2", "d-10"]
    assert [(way.source, way.destinations, way.transport) for way in shown.handoffs] == [("p", ("d-10", "d-2"), "shm")]


def test_the_files_of_the_page_are_part_of_the_package():
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "static/*" in globs["slipstream.front.dashboard"]
    assert {file.suffix[1:] for file in STATIC.iterdir()} <= set(handlers.KINDS)


def test_the_drawing_has_no_class_without_a_colour_on_the_page():
    from slipstream.topo.draw_canvas import STYLE

    page = (STATIC / "drawing.css").read_text()
    for name in set(re.findall(r"\.([a-z]+) \{", STYLE)) - {"title", "paper", "rule"}:
        assert f".{name}" in page, name


@pytest.mark.parametrize("name", ["light", "dark", "phone"])
def test_the_pictures_of_the_documents_are_there_and_small(name: str):
    picture = (ROOT / f"docs/images/dashboard-{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 300_000
