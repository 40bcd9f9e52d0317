"""Stretches of a request in which nobody said anything: found from its events, told by the front, drawn, in a trace."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.unit.front_house import house, saying
from tests.unit.test_telemetry import check_trace, drawn, event, timeline

from slipstream.telemetry import draw, perfetto
from slipstream.telemetry.silence import silences

GONE = "the worker that had it has ended; another process is at its address now"
RECEIVED = event("received", "router", 0.0, 0.01)


def placed(at: float, prefill: str = "p", decode: str = "d", **more: Any) -> dict[str, Any]:
    return event("placed", "router", at, 0.002, prefill=prefill, decode=decode, **more)


def told(
    events: list[dict[str, Any]], end_s: float, finished: bool = True, lost: dict[str, str] | None = None
) -> list[tuple[str, float, float]]:
    found = silences(events, end_s, finished=finished, lost=lost or {})
    assert all(one["name"] == "nothing heard" for one in found)
    return [(one["where"], one["start_s"], one["duration_s"]) for one in found]


def test_an_ordinary_request_has_no_silences() -> None:
    assert told(timeline()["events"], 1.0) == []
    short = [RECEIVED, placed(0.01), event("finished", "router", 0.2, 0.0)]
    assert told(short, 0.2) == []
    long = [RECEIVED, placed(0.01), event("prefill_chunk", "p", 0.5, 58.9), event("decode_step", "d", 60.5, 39.5)]
    assert told(long, 100.0) == []  # under 2 % of the whole


def test_a_worker_that_answers_nothing_is_named_with_the_moment_at_which_it_was_given_the_request() -> None:
    running = [RECEIVED, placed(0.01)]
    why = {"p": "the worker did not answer within 2 s"}
    (one,) = silences(running, 19.0, finished=False, lost=why)
    assert (one["where"], one["start_s"], one["duration_s"]) == ("p", 0.012, 18.988)
    assert one["attributes"] == {
        "placed_s": 0.012,
        "reason": "what it noted is missing: the worker did not answer within 2 s",
    }
    again = [*running, event("queued", "p", 19.0, 0.1), event("prefill_chunk", "p", 19.1, 0.3)]
    (one,) = silences([*again, event("finished", "router", 19.4, 0.0)], 19.4, finished=True, lost={})
    assert (one["where"], one["duration_s"], one["attributes"]) == ("p", 18.988, {"placed_s": 0.012})
    cancelled = [*running, event("cancelled", "router", 10.0, 0.0), event("queued", "p", 19.0, 0.1)]
    assert told(cancelled, 10.0, finished=False) == [("p", 0.012, 9.988)]


def test_where_all_that_a_worker_noted_is_lost_the_time_between_the_router_s_notes_is_told() -> None:
    events = [RECEIVED, placed(0.01, "w", "w"), event("first_token", "router", 1.2, 0.0)]
    events.append(event("finished", "router", 3.25, 0.0))
    found = silences(events, 3.25, finished=True, lost={"w": GONE})
    assert [(one["where"], one["start_s"], one["duration_s"]) for one in found] == [
        ("w", 0.012, 1.188),
        ("w", 1.2, 2.05),
    ]
    assert all(GONE in one["attributes"]["reason"] for one in found)


PREFILLED = [RECEIVED, placed(0.0), event("prefill_chunk", "p", 0.01, 0.3), event("first_token", "router", 0.31, 0.0)]
COMMITTED = [*PREFILLED, event("commit", "p", 0.32, 0.01)]


@pytest.mark.parametrize(
    ("events", "lost", "where"),
    [
        ([RECEIVED], {}, "router"),  # not placed yet
        (PREFILLED[:3], {}, "p"),
        (PREFILLED[:3], {"d": GONE}, "p"),
        (PREFILLED, {}, "d"),  # its grant is what is waited for
        (PREFILLED, {"p": GONE}, "p"),
        (PREFILLED, {"p": GONE, "d": GONE}, "d"),
        (COMMITTED, {}, "d"),
        (COMMITTED, {"p": GONE}, "d"),
        ([*PREFILLED, event("commit", "d", 0.33, 0.0), event("decode_step", "d", 0.33, 0.1)], {}, "d"),
        ([*PREFILLED, event("decode_step", "p", 0.33, 0.1)], {}, "p"),  # the handoff failed, it stayed
        ([*COMMITTED, event("resubmitted", "router", 0.4, 0.0)], {"d": GONE}, "router"),
        ([*COMMITTED, event("resubmitted", "router", 0.4, 0.0), placed(0.4, "q", "e")], {"d": GONE}, "q"),
    ],
)
def test_the_silent_one_is_who_had_the_request(events: list[dict[str, Any]], lost: dict[str, str], where: str) -> None:
    ((found, _, _),) = told(events, 9.0, finished=False, lost=lost)
    assert found == where


def test_a_client_that_reads_slowly_is_not_laid_to_a_worker() -> None:
    events = [*COMMITTED, event("decode_step", "d", 0.33, 0.5), event("finished", "router", 5.0, 0.0)]
    (one,) = silences(events, 5.0000004, finished=True, lost={})
    assert one["where"] == "router"
    assert "on its way to the client" in one["attributes"]["reason"]
    assert told(events[:-1], 5.0, finished=False) == [("d", 0.83, 4.17)]
    assert told(events, 5.0, lost={"d": GONE}) == [("d", 0.83, 4.17)]


def test_a_choice_that_waits_is_told_while_another_one_is_computed() -> None:
    events = [RECEIVED, placed(0.01, "p", "p", choice=0), placed(0.01, "q", "q", choice=1)]
    events += [event("decode_step", "p", 0.01, 5.0, choice=0)]
    (one,) = silences(events, 5.0, finished=False, lost={})
    assert (one["where"], one["attributes"]["choice"]) == ("q", 1)


# --------------------------------------------------------------------------------------------------------------- shown


def silent(name: str = "cmpl-1", created: float = 1000.0) -> dict[str, Any]:
    """It waited for 19 s at a worker that was stopped, and has been answered since."""
    events = [RECEIVED, placed(0.01), event("queued", "p", 19.0, 0.01), event("prefill_chunk", "p", 19.01, 0.4)]
    events += [event("decode_step", "d", 19.41, 0.59), event("finished", "router", 20.0, 0.0)]
    gaps = silences(events, 20.0, finished=True, lost={})
    return timeline(name, created, events=events, silences=gaps, e2e_s=20.0)


@pytest.mark.parametrize("width", [80, 200])
def test_a_request_that_waited_unheard_is_drawn_with_a_mark_of_its_own(width: int) -> None:
    text = drawn(draw.many([silent(), timeline("cmpl-2", 1001.0)], width), width)
    row = next(line for line in text.splitlines() if line.startswith("cmpl-1"))
    assert row.count("?") > 9 * (row.count("█") + row.count("━"))
    assert row.index("?") < row.index("█")
    assert "? nothing heard" in text
    assert "p: nothing heard for 18.99 s (cmpl-1)" in " ".join(text.split())
    assert "?" not in drawn(draw.many([timeline()], width), width)


def test_one_request_tells_its_silence_between_its_events() -> None:
    assert "nothing heard" in drawn(draw.one(silent(), 80), 80)
    lines = drawn(draw.one(silent(), 160), 160).splitlines()
    at = next(at for at, line in enumerate(lines) if "nothing heard" in line)
    assert "placed" in lines[at - 1]
    assert "queued" in lines[at + 1]
    assert re.search(r"12\.0 ms +18\.99 s +p +nothing heard +\?{30,}", lines[at])
    assert "placed there at 12.0 ms by the router" in lines[at]


def test_one_request_says_that_what_its_worker_noted_is_lost() -> None:
    events = [RECEIVED, placed(0.01, "w", "w"), event("finished", "router", 3.25, 0.0)]
    gaps = silences(events, 3.25, finished=True, lost={"w": GONE})
    text = drawn(draw.one(timeline(events=events, silences=gaps, e2e_s=3.25), 200), 200)
    assert "what it noted is missing: the worker that had it has ended" in " ".join(text.split())


def test_requests_that_were_not_heard_of_are_counted_by_worker() -> None:
    text = drawn(draw.many([silent(f"cmpl-{at}", 1000.0 + at) for at in range(3)], 200), 200)
    assert "p: nothing heard of 3 requests for up to 18.99 s (cmpl-0)" in text


def test_a_request_under_way_is_drawn_up_to_now() -> None:
    events = [RECEIVED, placed(0.01)]
    gaps = silences(events, 12.0, finished=False, lost={})
    running = timeline(events=events, silences=gaps, e2e_s=None, ttft_s=None, state="running")
    text = drawn(draw.many([running], 160), 160)
    assert "scale 12.00 s" in text
    assert text.splitlines()[1].count("?") > 40


def test_a_wait_for_a_place_or_for_the_other_worker_is_no_blank() -> None:
    events = [RECEIVED, placed(0.01, "p", "d"), event("prefill_chunk", "p", 0.01, 0.5)]
    events += [event("offer", "p", 0.1, 8.0, deferred=True), event("decode_step", "d", 8.1, 1.9)]
    row = drawn(draw.many([timeline(events=events, e2e_s=10.0)], 160), 160).splitlines()[1]
    assert row.rindex("█") < row.index("·") < row.index("━")
    assert " " not in row[row.index("█") : row.rindex("━")]


def test_a_trace_has_a_slice_where_nothing_was_heard() -> None:
    slices = check_trace(perfetto.trace([silent()]))
    (one,) = [piece for piece in slices if piece["name"] == "nothing heard"]
    (chunk,) = [piece for piece in slices if piece["name"] == "prefill_chunk"]
    assert (one["ts"], one["dur"], one["pid"]) == (12_000, 18_988_000, chunk["pid"])
    assert one["args"]["placed_s"] == 0.012


# --------------------------------------------------------------------------------------------------------------- front


async def test_the_front_tells_silences_up_to_the_question() -> None:
    async with house(saying("a")) as h:
        _, body, _ = await h.post("/v1/completions", {"prompt": "xy"})
        path = f"/v1/requests/{body['id']}/timeline"
        assert (await h.request("GET", path))[1]["silences"] == []
        story = h.app.generator.stories.find(body["id"])
        assert story is not None
        assert story.e2e_s is not None
        story.started -= 50.0
        story.submitted -= 50.0
        story.e2e_s += 50.0
        (ended,) = (await h.request("GET", path))[1]["silences"]
        story.state, story.e2e_s = "running", None
        (running,) = (await h.request("GET", "/v1/requests?events=true"))[1]["data"][0]["silences"]
    for one in (ended, running):
        assert (one["name"], one["where"], round(one["duration_s"])) == ("nothing heard", "router", 50)
    assert running["duration_s"] > ended["duration_s"]
