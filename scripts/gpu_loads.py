"""What `gpu_serving.py` measures of one served model: the loads, what others reached at them, and each part.

A part returns what is written into results.json, and gives its figures with their goals as it goes.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_cached import cached
from gpu_figures import ONE_CARD, Figures
from gpu_models import SHAPES, prompt
from gpu_servers import Served, Streamed, say, streamed
from gpu_stories import line

SLO = "ttft=1s,tpot=10ms"
CLIENT_S = 4.0  # of a load generator: its start, its probes, the last answers
DRAIN_S = 12.0
METRICS = r"copy_seconds|transfer_bytes|handoff|grant_sec|preempt|step_seconds_(sum|count)|worker_tokens|worker_steps"
GPU_FLAGS = ("--max-sequences", "256", "--max-model-len", "16384", "--page-tokens", "16")


@dataclass(frozen=True)
class Elsewhere:
    """What another server reached, ms: first token p50 and p99, between tokens p50 and p99, goodput."""

    ttft: tuple[float, float]
    itl: tuple[float, float]
    good: float | None = None

    def __str__(self) -> str:
        return f"{self.ttft[0]:g} / {self.ttft[1]:g}, {self.itl[0]:g} / {self.itl[1]:g}"


ELSEWHERE = {  # SGLang 0.5.17 at these loads on two H200: 1+1, and two plain servers
    ("1.5b", 8): {"apart": Elsewhere((25, 61), (2.08, 3.5)), "both": Elsewhere((16, 46), (2.05, 3.6))},
    ("1.5b", 24): {"apart": Elsewhere((30, 65), (2.17, 4.2)), "both": Elsewhere((17, 46), (2.14, 9.8))},
    ("1.5b", 48): {"apart": Elsewhere((47, 597), (2.36, 5.4)), "both": Elsewhere((17, 46), (2.21, 13.7))},
    ("8b", 4): {"apart": Elsewhere((133, 452), (5.4, 6.6), 1.0), "both": Elsewhere((100, 238), (5.2, 9.3), 1.0)},
    ("8b", 8): {"apart": Elsewhere((999, 1743), (6.3, 7.6), 0.5), "both": Elsewhere((137, 390), (6.6, 151), 0.31)},
    ("8b", 12): {"apart": Elsewhere((2123, 4237), (6.3, 7.5), 0.2), "both": Elsewhere((152, 450), (8.0, 234), 0.14)},
}


@dataclass(frozen=True)
class Model:
    """A shape and its loads. `long_rate`: lone long prompts a second, `disturbing_rate`: those beside short ones.

    `short` are prompt tokens, answer tokens and requests a second of the streams that are disturbed: about 20 at once.
    """

    name: str
    shape: str
    input: str
    output: str
    rates: tuple[float, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    long_tokens: int = 8192
    long_rate: float = 1.0
    disturbing_rate: float = 2.0
    short: tuple[int, int, float] = (128, 300, 12.0)
    turn_tokens: int = 512  # new in a second turn
    repeats: int = 9
    flags: tuple[str, ...] = GPU_FLAGS

    @property
    def token_bytes(self) -> int:
        """Of the KV of a token, in bfloat16."""
        shape = {**SHAPES[self.shape], **self.changes}
        dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * dim


MODELS = (
    Model("8b", "8b", "1024-7168", "64-256", (4, 8, 12)),
    Model(
        "1.5b", "1.5b", "512-2048", "64-256", (8, 24, 48), long_rate=4.0, disturbing_rate=6.0, short=(128, 300, 40.0)
    ),
)  # fmt: skip
TINY = (
    Model(
        "tiny", "tiny", "16-48", "4-8", (2, 4),
        changes={"hidden_size": 64, "intermediate_size": 128, "torch_dtype": "bfloat16"},
        long_tokens=256, long_rate=2.0, disturbing_rate=2.0, short=(16, 12, 3.0), turn_tokens=64, repeats=3,
        flags=("--kv-tokens", "16384", "--max-model-len", "1024", "--dtype", "bfloat16"),
    ),
)  # fmt: skip


class Results:
    """What was measured, by part; written whole after each."""

    def __init__(self, folder: Path, budget_s: float, one_card: bool = False) -> None:
        self.folder = folder
        self.parts: dict[str, Any] = {}
        self.figures = Figures(folder, "serving", one_card)
        self._requests: dict[str, Any] = {}
        self._end = time.monotonic() + budget_s
        self._began = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def keep(self, part: str, value: dict[str, Any]) -> None:
        self._requests[part] = {key: loaded.pop("requests", []) for key, loaded in loads(value)}
        self.parts[part] = value
        (self.folder / "results.json").write_text(json.dumps(self.parts, indent=1))
        with gzip.open(self.folder / "requests.json.gz", "wt", compresslevel=4) as file:
            json.dump(self._requests, file)
        say(f"== {part} done, {time.monotonic() - self._began:.0f} s so far, {self.left_s:.0f} s left")


def loads(value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((key, found) for key, found in value.items() if isinstance(found, dict) and "rates" in found)


# --------------------------------------------------------------------------------------------------------------- parts


@dataclass
class Run:
    """One model in one arrangement, served.

    `asked` are the ids of the requests that a part sent one by one, `shown` those whose timelines it wants printed.
    """

    model: Model
    arrangement: str
    server: Served
    results: Results
    seconds: float
    seeds: int
    empty_caches: bool = False
    asked: list[str] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self._named(self.arrangement)

    def _named(self, arrangement: str) -> str:
        return f"{self.model.name}/{arrangement}" + ONE_CARD * self.results.figures.one_card

    def ask(self, ids: list[int], tokens: int) -> Streamed:
        """One request; raises RuntimeError unless it is answered whole."""
        self.asked.append(f"asked-{time.monotonic_ns()}")
        found = streamed(self.server.url, {"prompt": ids, "max_tokens": tokens}, self.asked[-1])
        if found.problem or len(found.tokens) != tokens:
            raise RuntimeError(f"{len(found.tokens)} of {tokens} tokens came: {found.problem or 'the stream ended'}")
        return found

    def ready(self) -> dict[str, Any]:
        """Ten requests one after another, of prompts that nobody has seen."""
        firsts, wholes = [], []
        for number in range(10):
            began = time.perf_counter()
            firsts.append(round(1e3 * self.ask(prompt(number, min(1024, self.model.long_tokens)), 16).first_s, 2))
            wholes.append(round((time.perf_counter() - began) * 1e3, 2))
        self.shown = {"first request": self.asked[0], "second request": self.asked[1]}
        say(f"-- {self.name}: first token ms of ten requests: {firsts}; whole answers: {wholes}")
        caches, add = "empty" if self.empty_caches else "filled", self.results.figures.add
        add(f"{self.name} ready, {caches} kernel cache", self.server.ready_s, "s", most=20)
        add(f"{self.name} first request / median of ten", firsts[0] / statistics.median(firsts), "x", most=1.2)
        return {"ready_s": self.server.ready_s, "caches": caches, "first_token_ms": firsts, "answer_ms": wholes}

    def load(self, label: str, *options: str, seconds: float = 0.0) -> LoadProcess:
        """A load generator at work, with a limit of its own."""
        return LoadProcess(self, label, options, (seconds or self.seconds) + CLIENT_S + DRAIN_S + 15.0)

    def rate(self, rate: float) -> dict[str, Any]:
        before = self.server.metrics(METRICS)
        warm = int(2 * rate)
        load = self.load(
            f"{rate:g}", "--arrivals", "exact", "--rate", f"{rate:g}", "--duration", f"{self.seconds:g}s",
            "--warmup", str(warm), "--seeds", str(self.seeds), "--input", self.model.input,
            "--output", self.model.output, "--slo", SLO, seconds=self.seeds * (self.seconds + 2 + 4),
        ).finish()  # fmt: skip
        grown = {name: value - before.get(name, 0.0) for name, value in self.server.metrics(METRICS).items()}
        self._say_handoffs(grown)
        for row in load.get("rates", []):
            self._judge(rate, row)
        return {"load": load, "metrics": {name: value for name, value in grown.items() if value}}

    def _judge(self, rate: float, row: dict[str, Any]) -> None:
        """Against what another server reached in the same arrangement."""
        kind = "both" if self.arrangement == "both" else "apart"
        other = ELSEWHERE.get((self.model.name, int(rate)), {}).get(kind)
        add, name = self.results.figures.add, f"{self.name} {rate:g}/s"
        sent = f"{row['sent_per_s']:.2f} sent/s, {row['ok']} of {row['requests']} whole"
        for index, percentile in enumerate(("p50", "p99")):
            most = other.ttft[index] if other else None
            add(f"{name} TTFT {percentile}", row["ttft"][percentile], "ms", most=most, note=sent)
        for index, percentile in enumerate(("p50", "p99")):
            add(f"{name} ITL {percentile}", row["itl"][percentile], "ms", most=other.itl[index] if other else None)
        good = row.get("good")
        if good:
            add(f"{name} goodput", good["value"], "", least=other.good if other else None, note=f"at {SLO}")

    def _say_handoffs(self, grown: dict[str, float]) -> None:
        for name, total in grown.items():
            if "_seconds_sum" in name and (count := grown.get(name.replace("_seconds_sum", "_seconds_count"), 0)):
                shown = re.sub(r"\{.*\}", "", name.replace("_seconds_sum", ""))
                say(f"   {shown}: {count:.0f} times, mean {1e3 * total / count:.3f} ms")

    def long(self) -> dict[str, Any]:
        load = self.load(
            "long", "--arrivals", "constant", "--rate", f"{self.model.long_rate:g}", "--requests", "14",
            "--warmup", "3", "--input", str(self.model.long_tokens), "--output", "8",
            seconds=17 / self.model.long_rate,
        ).finish()  # fmt: skip
        for row in load.get("rates", []):
            found = row["ttft"]["p50"]
            colocated = self.results.parts.get(f"{self._named('both')}/long", {}).get("load", {}).get("rates", [])
            apart = self.results.parts.get(f"{self._named('apart')}/long", {}).get("load", {}).get("rates", [])
            self.results.figures.add(f"{self.name} TTFT p50, prompt of {self.model.long_tokens}", found, "ms")
            pair = (found, colocated[0]["ttft"]["p50"]) if colocated else None
            if self.arrangement == "both" and apart:
                pair = apart[0]["ttft"]["p50"], found
            if pair:
                self.results.figures.add(f"{self.model.name} TTFT apart - both", pair[0] - pair[1], "ms", most=1.0)
        return {"load": load}

    def exposure(self) -> dict[str, Any]:
        """Milliseconds by which the second token is later than a step behind the first, of lone long prompts."""
        late, seconds, steps = [], [], []
        for number in range(self.model.repeats + 1):
            gaps = self.ask(prompt(1000 + number, self.model.long_tokens), 24).gaps_s
            step = statistics.median(gaps[3:])
            if number:  # the first may open connections
                seconds.append(round(1e3 * gaps[0], 3))
                steps.append(round(1e3 * step, 3))
                late.append(1e3 * (gaps[0] - step))
        middle = sorted(range(len(late)), key=late.__getitem__)[len(late) // 2]
        self.shown = {"median exposure": self.asked[middle + 1]}
        say(f"-- {self.name}: second token after {seconds} ms, steps {steps}")
        most = 0.3 if self.model.name == "8b" else None
        self.results.figures.add(
            f"{self.name} exposed before the second token, prompt of {self.model.long_tokens}",
            statistics.median(late), "ms", most=most, note=f"median of {len(late)}",
        )  # fmt: skip
        return {"exposed_ms": [round(value, 3) for value in late], "second_ms": seconds, "step_ms": steps}

    def turns(self) -> dict[str, Any]:
        """Second turns: the history of the first one, its answer, and new tokens behind them."""
        model, firsts, fresh, moved = self.model, [], [], []
        for number in range(max(3, self.model.repeats // 2) + 1):
            history = prompt(2000 + number, model.long_tokens)
            history += self.ask(history, 32).tokens
            second = [*history, *prompt(3000 + number, model.turn_tokens)]
            time.sleep(0.1)  # the workers file the pages of what has ended
            before = self._moved()
            found = self.ask(second, 8)
            time.sleep(0.1)
            bytes_moved = self._moved() - before
            unseen = self.ask(prompt(4000 + number, len(second)), 8)
            if number:
                firsts.append(round(1e3 * found.first_s, 2))
                fresh.append(round(1e3 * unseen.first_s, 2))
                moved.append(bytes_moved)
        say(f"-- {self.name}: second turns {firsts} ms, the same prompts unseen {fresh} ms, MB moved {moved}")
        add, size = self.results.figures.add, model.turn_tokens * model.token_bytes
        ratio = statistics.median(fresh) / statistics.median(firsts)
        add(f"{self.name} second turn, first token sooner than unseen", ratio, "x", least=3.0)
        if self.arrangement != "both":
            add(
                f"{self.name} second turn, bytes moved / new tokens",
                statistics.median(moved) / size,
                "x",
                most=1.1,
                everywhere=True,
            )
        return {"first_token_ms": firsts, "unseen_ms": fresh, "moved_bytes": moved, "new_bytes": size}

    def _moved(self) -> float:
        return sum(self.server.metrics("transfer_bytes_total").values())

    def disturbed(self) -> dict[str, Any]:
        """Short requests whose tokens should come evenly, first alone, then beside long prompts."""
        seconds = self.streams_s
        alone = self.streams("alone").finish()
        beside = self.streams("beside")
        long = self.load(
            "disturbing", "--arrivals", "constant", "--rate", f"{self.model.disturbing_rate:g}", "--warmup", "0",
            "--duration", f"{seconds + 4:g}s", "--input", str(self.model.long_tokens), "--output", "8",
            seconds=seconds + 4,
        )  # fmt: skip
        found = {"alone": alone, "beside": beside.finish(), "disturbing": long.finish()}
        for name in ("alone", "beside"):
            for row in found[name].get("rates", []):
                itl = row["itl"]
                note = f"p50 {itl['p50']:.2f}, p99 {itl['p99']:.2f} ms, about {streams_of(row):.0f} streams"
                ratio = itl["p99"] / itl["p50"] if itl["p50"] else 0.0
                most = 1.2 if name == "beside" else None
                self.results.figures.add(f"{self.name} ITL p99 / p50, {name}", ratio, "x", most=most, note=note)
        return found

    @property
    def streams_s(self) -> float:
        return min(10.0, self.seconds)

    def streams(self, label: str) -> LoadProcess:
        """The load of streams that are disturbed."""
        tokens, answer, rate = self.model.short
        short = ["--arrivals", "exact", "--rate", f"{rate:g}", "--input", str(tokens), "--output", str(answer)]
        short += ["--warmup", str(int(3 * rate)), "--duration", f"{self.streams_s:g}s", "--raw"]
        return self.load(label, *short, seconds=self.streams_s + 3)

    def stories(self) -> dict[str, Any]:
        """Timelines of the requests that were asked one by one; those that are `shown` are printed."""
        told = {name: self.server.story(name) for name in self.asked}
        for label, name in self.shown.items():
            say(f"-- {self.name} {label}: {line(told[name])}")
        return told


def streams_of(row: dict[str, Any]) -> float:
    """Streams under way on average, by Little's law."""
    return row["sent_per_s"] * row["e2e"]["mean"] / 1e3


class LoadProcess:
    """`slipstream bench serve` in a process of its own."""

    def __init__(self, run: Run, label: str, options: tuple[str, ...], limit_s: float) -> None:
        self._json = run.results.folder / f"{run.name.replace('/', '-')}-{label}.json"
        self._json.unlink(missing_ok=True)
        self._end = time.monotonic() + min(limit_s, max(5.0, run.results.left_s))
        self._label = f"{run.name}/{label}"
        command = [sys.executable, "-m", "slipstream", "bench", "serve", "--url", run.server.url]
        command += ["--drain", f"{DRAIN_S:g}s", "--label", self._label, "--json", str(self._json), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self) -> dict[str, Any]:
        """Its results; {"problem": ...} when there are none."""
        try:
            output, _ = self._process.communicate(timeout=max(1.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            say(f"-- {self._label}: cut off at its time limit\n{output[-600:]}")
            return {"problem": "cut off at its time limit"}
        frame = ("┏", "┃", "┡", "│", "└", "lat")
        say("\n".join(f"   {line}" for line in output.splitlines() if not line.startswith(frame)))
        if not self._json.exists():
            return {"problem": output[-1000:]}
        found = json.loads(self._json.read_text())
        self._json.unlink()
        return found


def parts_of(model: Model, seconds: float, seeds: int) -> dict[str, float]:
    """The parts of a run in order, with the seconds that each takes at most as planned."""
    lone = 1.0 / model.long_rate
    return {
        "ready": 4.0,
        **{f"{rate:g}": seeds * (seconds + 4) + CLIENT_S for rate in model.rates},
        "long": 17 * lone + CLIENT_S,
        "exposure": (model.repeats + 1) * (0.5 * lone + 0.2),
        "turns": (max(3, model.repeats // 2) + 1) * (lone + 0.5),
        "disturbed": 2 * (min(10.0, seconds) + 9.0),
        "cached": 2 * (min(10.0, seconds) + 9.0) + 6.0,
    }


def measure(run: Run, wanted: list[str], planned: dict[str, float]) -> None:
    measures = {
        "ready": run.ready, "long": run.long, "exposure": run.exposure, "turns": run.turns, "disturbed": run.disturbed,
        "cached": lambda: cached(run),
    }  # fmt: skip
    for part in wanted:
        name = f"{run.name}/{part}"
        if run.results.left_s < planned[part]:
            say(f"== {name} left out: it takes {planned[part]:.0f} s and {run.results.left_s:.0f} s are left")
            continue
        say(f"== {name}")
        run.asked, run.shown = [], {}
        try:
            found: dict[str, Any] = measures[part]() if part in measures else run.rate(float(part))
        except Exception as error:  # one part's trouble leaves the others
            found = {"problem": f"{type(error).__name__}: {error}"}
            say(f"-- {name}: {found['problem']}")
        if run.asked:  # behind the part, so that asking disturbs none of its requests
            found["timelines"] = run.stories()
        run.results.keep(name, found)
