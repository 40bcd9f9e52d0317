"""The dashboard in a real Chromium before a real cluster: one prefill and one decode worker on the CPU, under load.

Every number on the page is compared with the text of `/metrics` that its snapshot was read from, by a parser and a
quantile that are not the dashboard's own.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.browser.chromium import Browser, Page, installed, retried
from tests.proc.programs import Program, Server, serving
from tests.unit.front_house import house, saying
from tests.unit.scripted import ScriptedRouter
from tests.unit.tiny_models import tiny_model

from slipstream.config import FrontConfig

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(installed() is None, reason="no Chromium here (Debian: apt-get install chromium)"),
]

NONE = "\u2013"
UNITS = {"": 1, "ms": 1e-3, "s": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
FIGURES = """[document.documentElement.dataset.snapshot,
  [...document.querySelectorAll('[data-metric]')].filter((e) => e.dataset.metric)
    .map((e) => ({...e.dataset, text: e.textContent}))]"""
BARE = """[...document.querySelectorAll('main .value, main .figure')].filter((e) => /[0-9]/.test(e.textContent)
  && !e.dataset.metric && !e.dataset.sumOf).map((e) => e.outerHTML)"""

NAMELESS = """[...document.querySelectorAll('main [data-metric]')].filter((e) => e.dataset.metric
  && !e.closest('svg') && !e.title.includes(e.dataset.metric)).map((e) => e.outerHTML)"""


class Cluster:
    def __init__(self, program: Program, server: Server, pids: dict[str, int]) -> None:
        self.program, self.server, self.pids = program, server, pids
        self.page = server.url + "/dashboard"

    @contextmanager
    def loaded(self, streams: int = 3) -> Iterator[None]:
        stop = threading.Event()
        numbers = itertools.count()

        def work() -> None:
            while not stop.is_set():
                number = next(numbers)
                body = {
                    "model": "smollm2",
                    "prompt": f"{number} " * (20 + number % 50),
                    "max_tokens": 20,
                    "ignore_eos": True,
                }
                try:
                    self.server.post("/v1/completions", body)
                except OSError:
                    time.sleep(0.2)

        threads = [threading.Thread(target=work) for _ in range(streams)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def text(self, path: str) -> tuple[str, float]:
        with urllib.request.urlopen(self.server.url + path, timeout=20) as answer:
            return answer.read().decode(), float(answer.headers.get("x-sampled-at", 0))

    def told(self, snapshot: str, worker: str) -> tuple[dict[str, list[Any]], float]:
        of = f"&worker={quote(worker)}" if worker else ""
        text, at = self.text(f"/dashboard/metrics?snapshot={snapshot}{of}")
        return samples(text), at

    def live(self, worker: str) -> dict[str, list[Any]]:
        if not worker:
            return samples(self.text("/metrics")[0])
        urls = {w["name"]: w["url"] for w in self.server.get("/workers")[1]["workers"]}
        with urllib.request.urlopen(urls[worker] + "/metrics", timeout=20) as answer:
            return samples(answer.read().decode())


def samples(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def total(found: dict[str, list[Any]], metric: str, labels: dict[str, Any]) -> float | None:
    values = [
        sample.value
        for name in metric.split("+")
        for sample in found.get(name, [])
        if all(sample.labels.get(key) in (one if isinstance(one, list) else [one]) for key, one in labels.items())
    ]
    return sum(values) if values else None


def histogram_quantile(found: dict[str, list[Any]], metric: str, q: float) -> float | None:
    """As the documentation of Prometheus describes it, written down a second time."""
    counts: dict[float, float] = {}
    for sample in found.get(metric + "_bucket", []):
        bound = float(sample.labels["le"])
        counts[bound] = counts.get(bound, 0) + sample.value
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] == 0:
        return None
    rank = q * counts[bounds[-1]]
    at = next(i for i, bound in enumerate(bounds) if counts[bound] >= rank)
    if math.isinf(bounds[at]):
        return bounds[at - 1]
    low, below = (bounds[at - 1], counts[bounds[at - 1]]) if at else (0.0, 0.0)
    return low + (bounds[at] - low) * (rank - below) / (counts[bounds[at]] - below)


def expected(
    figure: dict[str, str], told: Callable[[str, str], tuple[dict[str, list[Any]], float]], snapshot: str
) -> float | None:
    """What a figure of the page must be, from the texts of its snapshots."""
    labels = json.loads(figure["labels"])
    found, at = told(snapshot, figure["worker"])
    if figure["quantile"]:
        return histogram_quantile(found, figure["metric"], float(figure["quantile"]))
    now = total(found, figure["metric"], labels)
    if not figure["since"]:
        return now
    before, then = told(figure["since"], figure["worker"])
    growth = (now or 0) - (total(before, figure["metric"], labels) or 0)
    if figure["per"]:
        return growth / ((total(found, figure["per"], {}) or 0) - (total(before, figure["per"], {}) or 0))
    return growth / (at - then)


def shown(text: str) -> tuple[float, float]:
    """The number that a text says, and half a unit of its last digit."""
    match = re.fullmatch(r"(-?[\d,]+(?:\.(\d+))?) ?([a-zA-Z]*)(?:/s)?", text)
    assert match, text
    unit = UNITS[match[3]]
    return float(match[1].replace(",", "")) * unit, 0.5 * 10 ** -len(match[2] or "") * unit


def check(figure: dict[str, str], value: float | None) -> None:
    """The page says this value, in its data exactly and in words as exactly as they are written."""
    what = f"{figure['metric']} {figure['labels']} {figure['worker']}: page {figure['text']}, /metrics {value}"
    if not figure["value"]:
        assert figure["text"] == NONE, what
        assert value is None or figure["since"] == "", what
        return
    assert value is not None, what
    assert float(figure["value"]) == pytest.approx(value, rel=1e-3 if figure["since"] else 1e-9, abs=1e-9), what
    number, half = shown(figure["text"])
    assert abs(number - float(figure["value"])) <= half * 1.001, what


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tiny_model(tmp_path_factory.mktemp("models") / "smollm2", tokenizer=True)
    with serving(model=str(folder)) as (program, server, pids):
        yield Cluster(program, server, pids)


@pytest.fixture
def page(chromium: Browser, cluster: Cluster) -> Iterator[Page]:
    """The dashboard, with everything on it; nothing may have gone wrong on it in the end."""
    tab = chromium.page()
    tab.open(cluster.page)
    tab.until("document.querySelector('#status')?.dataset.state === 'ready'")
    tab.until("document.querySelectorAll('#workers-rows [data-metric]').length > 10")
    tab.until("document.querySelector('#drawing .rate')")
    yield tab
    assert tab.problems == []
    assert tab.urls, "the page asked for nothing"
    assert [
        url
        for url in tab.urls
        if not url.startswith((cluster.server.url + "/dashboard", cluster.server.url + "/v1/requests"))
    ] == []
    tab.close()


def settled(
    cluster: Cluster, page: Page, when: Callable[[list[dict[str, str]]], bool]
) -> tuple[str, list[dict[str, str]]]:
    """Snapshot and figures of a moment at which `when` holds."""
    deadline = time.monotonic() + 60
    while True:
        snapshot, figures = page.run(FIGURES)
        if when(figures):
            return snapshot, figures
        assert time.monotonic() < deadline, figures
        time.sleep(0.2)


def value_of(figures: list[dict[str, str]], metric: str) -> float:
    return next((float(f["value"]) for f in figures if f["metric"] == metric and f["value"]), 0.0)


def test_every_number_is_that_of_metrics_at_that_moment_under_load_and_after_it(cluster: Cluster, page: Page):
    def busy(figures: list[dict[str, str]]) -> bool:
        moved = [f for f in figures if f["metric"] == "slipstream_worker_transfer_bytes_total" and f["value"]]
        return (
            bool(moved)
            and any(float(f["value"]) > 0 for f in moved)
            and value_of(figures, "slipstream_requests_in_flight") > 0
        )

    with cluster.loaded():
        settled(cluster, page, busy)
        for _ in range(2):
            before = cluster.live("")
            snapshot = page.run("document.documentElement.dataset.snapshot")
            page.until(f"document.documentElement.dataset.snapshot > {snapshot} + 1")
            page.press("p")  # no further snapshots: the server keeps only the last ones
            snapshot, figures = page.run(FIGURES)
            after = cluster.live("")
            told = cache(cluster.told)
            for figure in figures:
                check(figure, expected(figure, told, snapshot))
                if not figure["since"] and not figure["worker"] and figure["metric"].endswith(("_total", "_count")):
                    labels = json.loads(figure["labels"])
                    low, high = (total(found, figure["metric"], labels) or 0 for found in (before, after))
                    assert low <= float(figure["value"]) <= high
            page.press("p")
            assert len({figure["metric"] for figure in figures}) >= 12
            assert page.run(BARE) == []
            assert page.run(NAMELESS) == []
    snapshot, figures = settled(cluster, page, lambda figures: value_of(figures, "slipstream_requests_in_flight") == 0)
    page.until(f"document.documentElement.dataset.snapshot > {snapshot} + 1")

    def still() -> dict[str, dict[str, list[Any]]]:
        """Texts of `/metrics` with all the page's figures, once the workers have ended what was under way."""
        snapshot, figures = page.run(FIGURES)
        texts = {worker: cluster.live(worker) for worker in {figure["worker"] for figure in figures}}
        for figure in figures:
            if not figure["since"]:
                check(figure, expected(figure, lambda _, worker: (texts[worker], 0.0), snapshot))
        return texts

    texts = retried(still)
    page.press("p")
    snapshot, figures = page.run(FIGURES)
    told = cache(cluster.told)
    for figure in figures:
        check(figure, expected(figure, told, snapshot))
    counts = "[...document.querySelectorAll('[data-metric=slipstream_requests_total]')].find((e) => !e.dataset.since)"
    ok = page.run(f"{counts}.textContent")
    assert int(ok.replace(",", "")) == total(texts[""], "slipstream_requests_total", {"outcome": "ok"}) > 0


def test_a_killed_worker_is_shown_as_lost_and_then_back_without_a_reload(cluster: Cluster, page: Page):
    began = page.run("performance.timeOrigin")
    row = "[...document.querySelectorAll('#workers-rows tr')].find((r) => r.textContent.includes('decode-0'))"
    chip = "document.querySelector('#drawing .worker[data-worker=decode-0]').dataset.state"
    page.until(f"{row}.dataset.state === 'live' && {chip} === 'live'")
    os.kill(cluster.server.pid("decode-0"), signal.SIGKILL)
    no_figures = f"{row}.querySelectorAll('[data-value]').length === 0"  # of the dead
    page.until(f"{row}?.dataset.state === 'lost' && {no_figures} && {row}.textContent.includes('decode')")
    page.until(f"{row}?.dataset.state === 'live' && {chip} === 'live'", 60)
    page.until("document.querySelector('#status').dataset.state === 'ready'")
    page.until(f"{row}.querySelectorAll('[data-value]').length > 5")
    assert page.run("performance.timeOrigin") == began


def test_a_server_that_is_out_of_reach_is_said_so_and_found_again(cluster: Cluster, page: Page):
    def reach(offline: bool) -> None:
        page.call(
            "Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    reach(offline=True)
    page.until("document.querySelector('#status').dataset.state === 'lost'")
    page.until("document.querySelector('#banner').innerText.includes('Disconnected')")
    assert page.run("document.querySelector('#main').dataset.stale") == "yes"
    reach(offline=False)
    page.until("document.querySelector('#status').dataset.state === 'ready'")
    assert page.run("document.querySelector('#banner').hidden && !document.querySelector('#main').dataset.stale")
    page.problems.clear()  # the browser's own words about the lost network


ACTIVE = """(() => { const e = document.activeElement; const s = getComputedStyle(e);
  const seen = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0;
  return [e.id || e.closest('[id]')?.id || e.tagName, e.tagName, seen]; })()"""


def test_all_of_it_is_reached_with_the_keyboard_and_the_focus_is_seen(cluster: Cluster, page: Page):
    cluster.server.complete()
    page.until("document.querySelectorAll('#requests-rows tr[data-key]').length > 0")
    stops = []
    for _ in range(40):
        page.press("Tab")
        place, tag, visible = page.run(ACTIVE)
        if tag == "BODY":
            break
        assert visible, (place, tag)
        stops.append([place, tag])
    places = [place for place, _ in stops]
    order = ["theme", "help", "drawing", "routes-rows", "workers-rows", "charts", "requests-rows", "doctor-again"]
    assert [place for place in dict.fromkeys(places) if place in order] == order
    assert [tag for _, tag in stops].count("A") == 7

    for key, section in zip("124563", ("machine", "routes", "latency", "requests", "health", "workers"), strict=True):
        page.press(key)
        assert page.run("document.activeElement.id") == section
    page.press("Tab")
    page.press("ArrowDown")
    assert page.run("document.activeElement === document.querySelector('#workers-rows').children[1]")
    page.press("Home")
    assert page.run("document.activeElement === document.querySelector('#workers-rows').children[0]")

    page.press("5")
    page.press("Tab")
    page.press("Enter")
    page.until("!document.querySelector('#timeline').hidden && document.querySelector('#timeline .gantt')")
    assert "first_token" in page.run("document.querySelector('#timeline .events').innerText")
    page.press("Escape")
    assert page.run(
        "document.querySelector('#timeline').hidden && document.activeElement.closest('#requests-rows') !== null"
    )

    page.press("?")
    assert page.run("document.querySelector('#keys').open")
    page.press("Escape")
    page.until("!document.querySelector('#keys').open")
    page.press("p")
    assert page.run("document.querySelector('#status').dataset.state") == "paused"
    page.press("p")
    page.until("document.querySelector('#status').dataset.state === 'ready'")


CONTRAST = """(() => {
  const rgb = (text) => { const p = text.match(/[\\d.]+/g).map(Number); return { c: p.slice(0, 3), a: p[3] ?? 1 }; };
  const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const paint = rgb(getComputedStyle(at).backgroundColor);
      if (paint.a > 0.99) return paint.c;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    if (!e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e);
    const svg = e.namespaceURI.endsWith('svg');
    if (e.tagName === 'title' || e.disabled) continue;
    const [a, b] = [light(rgb(svg ? style.fill : style.color).c), light(behind(e.closest('svg') ?? e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${e.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return poor; })()"""


def test_light_and_dark_are_readable_and_switched_by_system_and_hand(page: Page):
    paper = "getComputedStyle(document.body).backgroundColor"
    page.prefer(prefers_color_scheme="light")
    light = page.run(paper)
    assert page.run(CONTRAST) == []
    page.prefer(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    dark = page.run(paper)
    assert dark != light
    assert page.run(CONTRAST) == []
    page.run("document.querySelectorAll('.lane').forEach((e) => { e.dataset.active = 'yes'; })")
    assert page.run(
        "[...document.querySelectorAll('.lane')].every((e) => getComputedStyle(e).animationName === 'none')"
    )
    page.press("t")
    assert page.run(paper) == light
    page.press("t")
    page.prefer(prefers_color_scheme="light")
    assert page.run(paper) == dark
    page.run("document.querySelector('#theme').click()")
    assert page.run("document.querySelector('#theme').textContent") == "Theme: system"
    assert page.run(paper) == light


def test_a_phone_shows_all_of_it_without_scrolling_sideways(cluster: Cluster, page: Page):
    page.size(360, 780, mobile=True)
    page.until("innerWidth === 360")
    cluster.server.complete()
    page.until("document.querySelector('#requests-rows tr[data-key]')")
    page.run("document.querySelector('#requests-rows tr[data-key]').click()")
    page.until("!document.querySelector('#timeline').hidden && document.querySelector('#timeline .gantt')")
    assert page.run("document.documentElement.scrollWidth") <= 360
    wide = """[...document.querySelectorAll('main *')].filter((e) => !e.closest('.drawing, .scroll, svg')
      && e.getBoundingClientRect().right > 361).map((e) => e.outerHTML.slice(0, 200))"""
    assert page.run(wide) == []
    small = """[...document.querySelectorAll('button, nav a')].filter((e) => e.checkVisibility()
      && e.getBoundingClientRect().height < 24).map((e) => e.textContent)"""
    assert page.run(small) == []


def test_roles_and_names_are_there_for_those_who_do_not_see_it(page: Page):
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if "role" in node}
    wanted = [("table", "Workers"), ("table", "Routes of KV"), ("table", "Requests"), ("navigation", "Sections")]
    for role, name in (*wanted, ("region", "Latency"), ("heading", "Health"), ("columnheader", "Batch")):
        assert (role, name) in named
    assert any(role == "image" and name.startswith("Time to first token:") for role, name in named)
    nameless = [role for role, name in named if role in ("button", "link", "table") and not name]
    assert nameless == []


def test_a_protected_server_is_asked_with_the_key_that_this_tab_keeps(chromium: Browser):
    def walk(url: str) -> None:
        tab = chromium.page()
        tab.open(url + "/dashboard")
        tab.until("document.querySelector('#ask-key')?.open")
        for key in ("wrong", "s3cret"):
            tab.until("document.querySelector('#ask-key').open")
            tab.run("document.querySelector('#key').focus()")
            tab.call("Input.insertText", text=key)
            tab.press("Enter")
            tab.until("!document.querySelector('#ask-key').open || document.querySelector('#key').value === ''")
        tab.until("['ready', 'unready'].includes(document.querySelector('#status').dataset.state)")
        inside = tab.run("Object.values(sessionStorage).includes('s3cret')")
        elsewhere = tab.run("JSON.stringify(localStorage) + document.cookie + location")
        assert inside
        assert "s3cret" not in elsewhere
        assert not any("s3cret" in url for url in tab.urls)
        other = chromium.page()
        other.open(url + "/dashboard")
        other.until("document.querySelector('#ask-key')?.open")  # another tab knows nothing
        assert [problem for problem in tab.problems if "401" not in problem] == []
        tab.close()
        other.close()

    async def serve() -> None:
        async with house(saying("x"), config=FrontConfig(port=0, api_key="s3cret")) as home:
            await asyncio.to_thread(walk, home.url)

    asyncio.run(serve())


STRANGE = '<img src=x onerror="alert(1)">&amp;</tr>\u202e\x07'


def strange_worker(number: int, url: str) -> dict[str, Any]:
    """Each of the first dozen is strange in one way."""
    name = f"{STRANGE}{number}" if number < 3 else f"worker-{number}" * (12 if number == 5 else 1)
    route = {"peer": f"worker-{number + 32}", "transport": "shm", "error": "", "rejected": {STRANGE: STRANGE}}
    worker: dict[str, Any] = {"url": f"{url}/{number}", "id": f"w{number}", "name": name, "state": "live", "host": "vm"}
    worker |= {"role": "prefill" if number < 32 else "decode", "devices": ["cuda:3"], "pid": None, "problem": ""}
    worker |= {"routes": [route] if number < 32 else [], "problems": []}
    changes: dict[int, dict[str, Any]] = {
        3: {"url": "http://127.0.0.1:1/3"},
        4: {"routes": [{**route, "transport": STRANGE}]},
        6: {"routes": [{**route, "error": STRANGE}]},
        7: {"state": STRANGE},
        8: {"role": STRANGE},
        9: {"host": STRANGE},
        10: {"devices": None},
        11: {"problem": STRANGE, "problems": [STRANGE]},
    }
    return worker | changes.get(number, {})


def test_strange_and_many_workers_and_figures_that_are_none_do_it_no_harm(
    chromium: Browser, monkeypatch: pytest.MonkeyPatch
):
    pages = 'slipstream_worker_pages{state="free"} NaN\nslipstream_worker_pages{state="used"} +Inf\n'
    strange = pages + 'slipstream_worker_tokens_total{stage="decode"} x\n'
    view: dict[str, Any] = {"router": "r", "ready": True, "model": None, "workers": []}
    monkeypatch.setattr(ScriptedRouter, "describe", lambda self: copy.deepcopy(view))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + strange.encode())
        writer.close()

    def walk(url: str, worker: str) -> None:
        tab = chromium.page()
        tab.open(url + "/dashboard")
        tab.until("document.querySelector('#workers-rows .none')")
        tab.until("document.querySelector('#drawing svg')")
        view["workers"] = [strange_worker(number, worker) for number in range(64)]
        tab.until("document.querySelectorAll('#workers-rows tr[data-key]').length === 64")
        tab.until("document.querySelectorAll('#drawing .worker[data-worker]').length === 64", 40)
        assert tab.run("document.querySelectorAll('img, #drawing script').length") == 0
        assert tab.run("document.querySelector('#workers-rows').textContent.includes('<img src=x')")
        parts = "[...document.querySelectorAll('main > *:not(#health)')].map((e) => e.innerText).join(' ')"
        assert not re.search("NaN|undefined|Infinity|null", tab.run(parts))
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        tab.size(360, 780, mobile=True)
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        view["workers"] = []
        tab.until("document.querySelector('#workers-rows .none')")
        assert tab.problems == []
        tab.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, house(saying("x")) as home:
            await asyncio.to_thread(walk, home.url, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    asyncio.run(serve())


def test_the_cluster_that_was_watched_still_answers(cluster: Cluster):
    assert cluster.server.ready()
    assert cluster.server.complete()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        cluster.text("/dashboard/metrics?snapshot=0")
