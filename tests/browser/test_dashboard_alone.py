"""The dashboard in a real Chromium before a front whose router plays a script, so that every request is known.

What was seen lately, what the page asks for, and when it asks for nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.browser.chromium import Browser, Page, installed
from tests.browser.test_dashboard import NONE, histogram_quantile, samples, shown, total
from tests.unit.front_house import EOS, house, saying
from tests.unit.scripted import Stage

from slipstream.front.dashboard import watch

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(installed() is None, reason="no Chromium here (Debian: apt-get install chromium)"),
]

READ = "[...document.querySelectorAll('#charts output')].map((e) => e.textContent)"
SPOKEN = "[...document.querySelectorAll('#charts .plot')].map((e) => e.getAttribute('aria-label'))"
SINCE_START = """[...document.querySelectorAll('#charts figure')]
  .map((e) => Number(e.querySelector('dd[data-quantile="0.99"]').dataset.value))"""
METRICS = tuple(watch.LATENCIES.values())
NOTHING = f"now p50 {NONE}, p99 {NONE}"


def before_a_page(walk: Callable[[Page, str], None], chromium: Browser, script: object) -> None:
    """Opens the dashboard of a front of its own and walks on it."""

    def go(url: str) -> None:
        tab = chromium.page()
        tab.open(url + "/dashboard")
        tab.until("document.querySelector('#status')?.dataset.state === 'ready'")
        walk(tab, url)
        assert tab.problems == []
        tab.close()

    async def serve() -> None:
        async with house(script) as home:
            await asyncio.to_thread(go, home.url)

    asyncio.run(serve())


def complete(url: str, count: int) -> None:
    """That many requests, at once."""

    def one(number: int) -> None:
        body = json.dumps({"prompt": f"{number}", "stream": True}).encode()
        request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))


def metrics(url: str) -> dict[str, list]:
    with urllib.request.urlopen(url + "/metrics", timeout=20) as answer:
        return samples(answer.read().decode())


def lately(before: dict[str, list], after: dict[str, list], metric: str, q: float) -> float | None:
    """The quantile of what was observed between two texts of /metrics."""
    bucket = metric + "_bucket"
    old = {sample.labels["le"]: sample.value for sample in before.get(bucket, [])}
    grown = [sample._replace(value=sample.value - old.get(sample.labels["le"], 0)) for sample in after[bucket]]
    return histogram_quantile({bucket: grown}, metric, q)


def says(text: str, expected: list[float | None]) -> bool:
    """Whether `now p50 X, p99 Y` gives these two values, as exactly as it is written."""
    words = re.fullmatch(r"now p50 (.*), p99 (.*)", text)
    assert words, text
    for word, value in zip(words.groups(), expected, strict=True):
        assert value is not None
        if word == NONE:
            return False
        number, half = shown(word)
        if abs(number - value) > half * 1.001:
            return False
    return True


def test_the_percentiles_of_now_are_those_of_the_requests_of_the_window_alone(
    chromium: Browser, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watch, "STEP_S", 0.2)
    monkeypatch.setattr(watch, "WINDOW_S", 8.0)
    pause = [1.6, 0.8]  # before the first token, and between it and the end

    async def script(stage: Stage) -> None:
        await asyncio.sleep(pause[0])
        stage.say([97])
        await asyncio.sleep(pause[1])
        stage.say([98])
        stage.say([EOS], finish="stop", stop_token=EOS)

    def walk(tab: Page, url: str) -> None:
        def now_is(before: dict[str, list], after: dict[str, list]) -> None:
            wanted = [[lately(before, after, metric, q) for q in (0.5, 0.99)] for metric in METRICS]
            deadline = time.monotonic() + 60
            while not all(map(says, tab.run(READ), wanted)):
                assert time.monotonic() < deadline, (tab.run(READ), wanted)
                time.sleep(0.05)

        empty = metrics(url)
        complete(url, 6)
        slow = metrics(url)
        now_is(empty, slow)
        tab.until(f"{READ}.every((text) => text === '{NOTHING}')", 60)
        pause[:] = [0.01, 0.02]
        complete(url, 12)
        fast = metrics(url)
        now_is(slow, fast)
        for read, spoken in zip(tab.run(READ), tab.run(SPOKEN), strict=True):
            assert read.removeprefix("now ") in spoken
        for metric, since_start in zip(METRICS, tab.run(SINCE_START), strict=True):
            recent = lately(slow, fast, metric, 0.99)
            assert recent is not None
            assert since_start > 2 * recent  # the slow ones are still in that
        assert total(fast, METRICS[0] + "_count", {}) == 18

    before_a_page(walk, chromium, script)


def test_keys_go_along_a_chart_from_end_to_end(chromium: Browser, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "STEP_S", 0.2)

    def walk(tab: Page, url: str) -> None:
        tab.until("document.querySelector('#charts output').textContent.startsWith('now')")
        snapshot = tab.run("document.documentElement.dataset.snapshot")
        tab.until(f"document.documentElement.dataset.snapshot > Number({snapshot}) + 1")  # each brings some points
        tab.press("p")  # so that no further point comes in between
        tab.run("document.querySelector('#charts .plot').focus()")
        read, place = (
            "document.querySelector('#charts output').textContent",
            "document.querySelector('#charts circle, #charts .cursor')?.getAttribute('d')",
        )
        seen = {}
        for key in ("Home", "ArrowLeft", "ArrowRight", "End", "ArrowRight", "ArrowLeft"):
            tab.press(key)
            assert re.match(r"\d\d:\d\d:\d\d p50 ", tab.run(read))
            seen.setdefault(key, []).append(float(re.findall(r"[\d.]+", tab.run(place))[0]))
        first, last = seen["Home"][0], seen["End"][0]
        assert first < last
        assert seen["ArrowLeft"][0] == first < seen["ArrowRight"][0] < last
        assert seen["ArrowRight"][1] == last > seen["ArrowLeft"][1]
        tab.run("document.activeElement.blur()")
        assert tab.run(read).startswith("now ")

    before_a_page(walk, chromium, saying("x"))


HIDE = """(() => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => %s });
  document.dispatchEvent(new Event('visibilitychange')); })()"""


def test_a_hidden_or_paused_page_asks_for_nothing_and_goes_on(chromium: Browser):
    def walk(tab: Page, url: str) -> None:
        tab.until("document.querySelector('#requests-rows .none')")

        def rest() -> None:
            """What was asked before it rested may still be under way; behind that nothing comes."""
            deadline, asked = time.monotonic() + 60, -1
            while asked != len(tab.urls):
                assert time.monotonic() < deadline, tab.urls[asked:]
                asked = len(tab.urls)
                time.sleep(3.5)  # three times as long as the page waits between two questions

        def goes_on(resume: Callable[[], object]) -> None:
            asked = len(tab.urls)
            resume()
            tab.until("document.querySelector('#status').dataset.state === 'ready'")
            snapshot = tab.run("document.documentElement.dataset.snapshot")
            tab.until(f"document.documentElement.dataset.snapshot > {snapshot}")
            assert len(tab.urls) > asked

        tab.run(HIDE % "true")
        rest()
        goes_on(lambda: tab.run(HIDE % "false"))
        tab.press("p")
        rest()
        goes_on(lambda: tab.press("p"))

    before_a_page(walk, chromium, saying("x"))


def test_the_last_fifty_requests_are_listed_the_newest_first(chromium: Browser):
    rows = "[...document.querySelectorAll('#requests-rows tr[data-key]')].map((e) => e.dataset.key)"

    def walk(tab: Page, url: str) -> None:
        for _ in range(6):
            complete(url, 10)
        with urllib.request.urlopen(url + "/v1/requests?limit=60", timeout=20) as answer:
            ids = [one["id"] for one in json.loads(answer.read())["data"]]
        assert len(ids) == 60
        tab.until(f"{rows}[0] === '{ids[0]}'")
        assert tab.run(rows) == ids[:50]

    before_a_page(walk, chromium, saying("x"))


def test_the_timeline_of_a_request_has_a_bar_where_nothing_was_heard(chromium: Browser):
    async def script(stage: Stage) -> None:
        await asyncio.sleep(0.5)
        await saying("x")(stage)

    def walk(tab: Page, url: str) -> None:
        complete(url, 1)
        tab.until("document.querySelector('#requests-rows tr[data-key]')")
        tab.run("document.querySelector('#requests-rows tr[data-key]').click()")
        tab.until("document.querySelector('#timeline .gantt .silent')")
        assert tab.run("document.querySelector('#timeline .silent title').textContent").startswith("nothing heard at ")
        names = "[...document.querySelectorAll('#timeline .events tbody tr')].map((e) => e.cells[3].textContent.trim())"
        assert [name.partition(" endpoint")[0] for name in tab.run(names)][:2] == ["received", "nothing heard"]

    before_a_page(walk, chromium, script)


def test_doctor_looks_once_for_a_page_and_again_when_the_button_is_pressed(chromium: Browser):
    note = "document.querySelector('#doctor-note').textContent"

    def walk(tab: Page, url: str) -> None:
        tab.until(f"/^doctor at /.test({note})", 90)
        assert not any(asked.endswith("/doctor") for asked in tab.urls)  # opening the page was enough
        before = tab.run(note)
        tab.until("!document.querySelector('#doctor-again').ariaDisabled")
        time.sleep(1.1)  # the note has the time to the second
        tab.run("document.querySelector('#doctor-again').click()")
        tab.until(f"/^doctor at /.test({note}) && {note} !== {json.dumps(before)}", 90)
        assert [asked for asked in tab.urls if asked.endswith("/doctor")] == [url + "/dashboard/doctor"]

    before_a_page(walk, chromium, saying("x"))
