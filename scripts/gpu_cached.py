"""The part `cached` of `gpu_serving.py`: what it costs streams that decode when long prompts are handed over.

The streams are those of `disturbed`. The prompts beside them lie in the prefix cache of the prefill worker, which so
computes next to nothing, and are handed over whole each time, because the decode worker has no prefix cache. So what
the streams feel is the handoff alone: its bytes, and what both processes do for it.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

from gpu_models import prompt
from gpu_servers import Streamed, say, streamed
from gpu_stories import events, line, total

if TYPE_CHECKING:
    from gpu_loads import Run

PROMPTS = 4  # different ones, by turns
ANSWER = 8
METRICS = "transfer_bytes|worker_tokens|handoffs_total|copy_failures|step_seconds_(sum|count)"
PERCENTILES = ("p50", "p90", "p95", "p99")
SETTLE_S = 0.2  # the workers file what has ended


class Repeated:
    """Sends the same prompts again and again, `rate` a second whatever is answered, until it is stopped."""

    def __init__(self, url: str, prompts: list[list[int]], rate: float) -> None:
        self.answers: list[Streamed] = []
        self.problems: list[str] = []
        self._url, self._prompts, self._rate = url, prompts, rate
        self._over = threading.Event()
        self._asking: list[threading.Thread] = []
        self._sender = threading.Thread(target=self._send)
        self._sender.start()

    def _send(self) -> None:
        began, number = time.monotonic(), 0
        while not self._over.wait(max(0.0, began + number / self._rate - time.monotonic())):
            self._asking.append(threading.Thread(target=self._ask, args=(self._prompts[number % len(self._prompts)],)))
            self._asking[-1].start()
            number += 1

    def _ask(self, ids: list[int]) -> None:
        try:
            found = streamed(self._url, {"prompt": ids, "max_tokens": ANSWER})
        except OSError as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            return
        self.problems += [found.problem] if found.problem else []
        self.answers.append(found)

    def stop(self) -> None:
        """Returns when all that was sent is answered."""
        self._over.set()
        for thread in (self._sender, *self._asking):
            thread.join()


def cached(run: Run) -> dict[str, Any]:
    """Streams alone, then beside the prompts; raises RuntimeError when these are not in the prefill worker's cache."""
    tokens = run.model.long_tokens
    prompts = [prompt(6000 + number, tokens) for number in range(PROMPTS)]
    for ids in prompts:
        run.ask(ids, ANSWER)
    time.sleep(SETTLE_S)
    known = min(run.ask(ids, ANSWER).cached for ids in prompts)
    if known < 0.9 * tokens:
        raise RuntimeError(f"of prompts of {tokens} tokens that were sent before, {known} are in the prefix cache")
    alone, steps_alone, _, _ = beside(run, "alone", [])
    disturbed, steps, long, grown = beside(run, "beside", prompts)
    figures(run, "alone", alone, steps_alone)
    figures(run, "beside", disturbed, steps)
    moved = _handed_over(run, long, grown)
    return {"alone": alone, "beside": disturbed, "metrics": grown, "long": long, **moved} | {
        "longest_steps_ms": {"alone": steps_alone, "beside": steps}
    }


def beside(
    run: Run, label: str, prompts: list[list[int]]
) -> tuple[dict[str, Any], list[float], list[dict[str, Any]], dict[str, float]]:
    """(the streams' load, their longest steps in milliseconds, stories of the prompts, what metrics grew by)."""
    before, began = run.server.metrics(METRICS), time.monotonic()
    streams = run.streams(label)
    repeated = Repeated(run.server.url, prompts, run.model.disturbing_rate) if prompts else None
    try:
        load = streams.finish()
    finally:
        if repeated:
            repeated.stop()
    time.sleep(SETTLE_S)
    grown = {name: value - before.get(name, 0.0) for name, value in run.server.metrics(METRICS).items()}
    stories = run.server.stories(time.monotonic() - began)
    if repeated and repeated.problems:
        say(f"-- {run.name}: {len(repeated.problems)} of the long prompts failed: {repeated.problems[0]}")
    long = [story for story in stories if story["prompt_tokens"] == run.model.long_tokens]
    short = [story for story in stories if story["prompt_tokens"] != run.model.long_tokens]
    return load, longest_steps(short), long, grown


def longest_steps(stories: list[dict[str, Any]]) -> list[float]:
    """The longest step of each run of decode steps of any of these, in milliseconds, the longest first.

    Streams that decode together have the same steps: the same time within the same quarter of a second counts once.
    """
    found = {
        (round(1e3 * event["attributes"]["longest_s"], 2), round((story["created"] + event["start_s"]) * 4))
        for story in stories
        for event in events(story, "decode_step")
        if event["attributes"].get("longest_s")
    }
    return sorted((longest for longest, _ in found), reverse=True)


def figures(run: Run, label: str, load: dict[str, Any], steps: list[float]) -> None:
    from gpu_loads import streams_of

    add = run.results.figures.add
    for row in load.get("rates", []):
        for percentile in PERCENTILES:
            note = f"about {streams_of(row):.0f} streams" if percentile == "p50" else ""
            add(f"{run.name} cached, ITL {percentile}, {label}", row["itl"][percentile], "ms", note=note)
    if steps:
        note = f"then {', '.join(f'{step:.2f}' for step in steps[1:8])}; median of runs {statistics.median(steps):.2f}"
        add(f"{run.name} cached, longest decode step, {label}", steps[0], "ms", note=note)


def _handed_over(run: Run, long: list[dict[str, Any]], grown: dict[str, float]) -> dict[str, Any]:
    """Whether each prompt was moved whole and hardly computed, and how long its copies took."""
    size, add = run.model.long_tokens * run.model.token_bytes, run.results.figures.add
    moved = [total(story, "copy_chunk", "bytes") for story in long]
    computed = [total(story, "prefill_chunk", "tokens") for story in long]
    copies = [1e3 * sum(event["duration_s"] for event in events(story, "copy_chunk")) for story in long]
    if not long:
        add(f"{run.name} cached, long prompts handed over", None)
        return {}
    note = f"{len(long)} prompts, {sum(grown[name] for name in grown if 'transfer_bytes' in name) / 1e9:.3g} GB in all"
    add(f"{run.name} cached, least bytes moved of a prompt / its KV", min(moved) / size, "x", least=1.0, note=note,
        everywhere=True)  # fmt: skip
    add(f"{run.name} cached, most tokens computed of a prompt", max(computed), most=0.1 * run.model.long_tokens,
        everywhere=True)  # fmt: skip
    add(f"{run.name} cached, copies of a prompt", statistics.median(copies), "ms", note=f"longest {max(copies):.2f}")
    middle = sorted(range(len(copies)), key=copies.__getitem__)[len(copies) // 2]
    say(f"-- {run.name} median copies: {line(long[middle])}")
    return {"moved_bytes": moved, "computed_tokens": computed, "copies_ms": copies}
