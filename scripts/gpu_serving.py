"""Serving under load on two GPUs: prefill and decode apart against two workers that do both, at the same loads.

    python scripts/gpu_serving.py --out FOLDER [--only 8b/apart,1.5b] [--seconds 22] [--budget 570] [--plan]

For each model (1.5B and 8B shapes, random weights, a byte tokenizer) and each arrangement (`apart`: `--prefill cuda:0
--decode cuda:1`; `both`: `--both cuda:0,1`) it starts `slipstream serve` and measures in parts, in this order:

    ready       seconds from the command to the line that says so; the first request against the tenth
    RATE        `slipstream bench serve` at each rate of the table, with what the workers' metrics grew by meanwhile
    long        time to first token of lone prompts of 8,192 tokens
    disturbed   gaps between tokens of short requests, alone and while prompts of 8,192 tokens arrive

Every part has a time limit, none begins that would not fit into the budget, and results are written after each, so
that whatever cuts this off leaves what was measured: FOLDER/results.json (figures), FOLDER/requests.json.gz (single
requests), FOLDER/*.log (what the servers said). `--only` takes pieces of MODEL/ARRANGEMENT/PART, such as 8b, apart/4
or 1.5b/both/ready. Without GPUs, or
with `--tiny`, the same runs with a tiny model on the CPU, for a dry run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_serve import SHAPES, model_folder, streamed

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
}
SLO = "ttft=1s,tpot=10ms"
READY_S, STOP_S, CLIENT_S = 150.0, 20.0, 12.0  # CLIENT_S: start of the load generator, its probes, the last answers
METRICS = re.compile(r"copy_seconds|copied_bytes|handoff|preempt|step_seconds_(sum|count)|worker_tokens|worker_steps")

# What another server reached at these loads on two H200: ms, first token p50 / p99, between tokens p50 / p99.
ELSEWHERE = {
    ("1.5b", 8): ("apart 25 / 61, 2.08 / 3.5", "both 16 / 46, 2.05 / 3.6"),
    ("1.5b", 24): ("apart 30 / 65, 2.17 / 4.2", "both 17 / 46, 2.14 / 9.8"),
    ("1.5b", 48): ("apart 47 / 597, 2.36 / 5.4", "both 17 / 46, 2.21 / 13.7"),
    ("8b", 4): ("apart 133 / 452, 5.4 / 6.6", "both 100 / 238, 5.2 / 9.3"),
    ("8b", 8): ("apart 999 / 1743, 6.3 / 7.6", "both 137 / 390, 6.6 / 151"),
    ("8b", 12): ("apart 2123 / 4237, 6.3 / 7.5", "both 152 / 450, 8.0 / 234"),
}


@dataclass(frozen=True)
class Model:
    """A shape and its loads. `long_rate`: lone long prompts a second, `disturbing_rate`: those beside short ones."""

    name: str
    shape: dict[str, Any]
    input: str
    output: str
    rates: tuple[float, ...]
    long_tokens: int = 8192
    long_rate: float = 1.0
    disturbing_rate: float = 2.0
    short: tuple[str, str, float] = ("128", "300", 8.0)  # prompt, answer, requests a second
    flags: tuple[str, ...] = ()
    server_flags: dict[str, tuple[str, ...]] = field(default_factory=dict)


GPU_FLAGS = ("--max-sequences", "256", "--max-model-len", "16384", "--page-tokens", "16")
MODELS = (
    Model("8b", LLAMA_8B, "1024-7168", "64-256", (4, 8, 12), flags=GPU_FLAGS),
    Model(
        "1.5b", {**SHAPES["1.5b"], "max_position_embeddings": 32768}, "512-2048", "64-256", (8, 24, 48),
        long_rate=4.0, disturbing_rate=6.0, flags=GPU_FLAGS,
    ),
)  # fmt: skip
TINY = (
    Model(
        "tiny", {**SHAPES["tiny"], "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
        "16-48", "4-8", (2, 4), long_tokens=256, long_rate=2.0, disturbing_rate=2.0, short=("16", "12", 3.0),
        flags=("--kv-tokens", "16384", "--max-model-len", "1024"),
    ),
)  # fmt: skip


class Results:
    """What was measured, by part; written whole after each."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        self.folder = folder
        self.parts: dict[str, Any] = {}
        self._requests: dict[str, Any] = {}
        self._end = time.monotonic() + budget_s
        self._began = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def keep(self, part: str, value: dict[str, Any]) -> None:
        self._requests[part] = {key: loaded.pop("requests", []) for key, loaded in _loads(value)}
        self.parts[part] = value
        (self.folder / "results.json").write_text(json.dumps(self.parts, indent=1))
        with gzip.open(self.folder / "requests.json.gz", "wt", compresslevel=4) as file:
            json.dump(self._requests, file)
        say(f"== {part} done, {time.monotonic() - self._began:.0f} s so far, {self.left_s:.0f} s left")


def _loads(value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((key, found) for key, found in value.items() if isinstance(found, dict) and "rates" in found)


def say(text: str) -> None:
    print(text, flush=True)


# -------------------------------------------------------------------------------------------------------------- server


class Server:
    """One `slipstream serve`; `url` is "" when it did not get ready in time."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        say(f"== slipstream serve {' '.join(arguments)}")
        self.url = ""
        self.ready_s = 0.0
        self._began = time.monotonic()
        self._ready = threading.Event()
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._ready.wait(READY_S)
        if not self.ready_s:
            self.url = ""
        say(f"-- ready after {self.ready_s:.1f} s" if self.url else "-- NOT ready")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._log.write(f"{time.monotonic() - self._began:8.2f} {line}")
            self._log.flush()
            if not self._ready.is_set() or "WARNING" in line or "ERROR" in line or "warning" in line:
                say(f"   | {line.rstrip()}")
            if match := re.search(r"is served at (http://\S+)", line):
                self.url = match[1]
            if "Ctrl-C ends it" in line:
                self.ready_s = time.monotonic() - self._began
                self._ready.set()
        self._ready.set()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            say("-- it did not end by itself")

    def metrics(self) -> dict[str, float]:
        """What is of interest of all workers' metrics, by worker and name."""
        found: dict[str, float] = {}
        for worker in json.loads(get(f"{self.url}/workers"))["workers"]:
            for line in get(f"{worker['url']}/metrics").splitlines():
                name, _, value = line.rpartition(" ")
                if not line.startswith("#") and METRICS.search(name) and "_bucket" not in name:
                    found[f"{worker['name']} {name.removeprefix('slipstream_worker_')}"] = float(value)
        return found


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


# --------------------------------------------------------------------------------------------------------------- parts


@dataclass
class Run:
    """One model in one arrangement, served."""

    model: Model
    arrangement: str
    server: Server
    results: Results
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.arrangement}"

    def first_requests(self) -> dict[str, Any]:
        """Ten requests one after another, of prompts that nobody has seen."""
        firsts, wholes = [], []
        for number in range(10):
            prompt = [3 + (number * 31 + at * 7) % 240 for at in range(min(1024, self.model.long_tokens))]
            began = time.perf_counter()
            request = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
            _, first_s, _ = streamed(self.server.url, {**request, "temperature": 0})
            firsts.append(round(first_s * 1e3, 2))
            wholes.append(round((time.perf_counter() - began) * 1e3, 2))
        say(f"-- {self.name}: first token ms of ten requests: {firsts}; whole answers: {wholes}")
        return {"ready_s": self.server.ready_s, "first_token_ms": firsts, "answer_ms": wholes}

    def load(self, label: str, *options: str, seconds: float = 0.0) -> LoadProcess:
        """A load generator at work, with a limit of its own."""
        return LoadProcess(self, label, options, (seconds or self.seconds) + CLIENT_S + 15.0)

    def rate(self, rate: float) -> dict[str, Any]:
        before = self.server.metrics()
        load = self.load(
            f"{rate:g}", "--rate", f"{rate:g}", "--duration", f"{self.seconds:g}s", "--warmup", str(int(2 * rate)),
            "--input", self.model.input, "--output", self.model.output, "--slo", SLO,
        ).finish()  # fmt: skip
        grown = {name: value - before.get(name, 0.0) for name, value in self.server.metrics().items()}
        for line in ELSEWHERE.get((self.model.name, int(rate)), ()):
            say(f"   elsewhere: {line}")
        self._say_handoffs(grown)
        return {"load": load, "metrics": {name: value for name, value in grown.items() if value}}

    def _say_handoffs(self, grown: dict[str, float]) -> None:
        for name, total in grown.items():
            if "_seconds_sum" in name and (count := grown.get(name.replace("_seconds_sum", "_seconds_count"), 0)):
                shown = re.sub(r"\{.*\}", "", name.replace("_seconds_sum", ""))
                say(f"   {shown}: {count:.0f} times, mean {1e3 * total / count:.3f} ms")

    def long(self) -> dict[str, Any]:
        return {
            "load": self.load(
                "long", "--arrivals", "constant", "--rate", f"{self.model.long_rate:g}", "--requests", "14",
                "--warmup", "3", "--input", str(self.model.long_tokens), "--output", "8",
                seconds=17 / self.model.long_rate,
            ).finish()
        }  # fmt: skip

    def disturbed(self) -> dict[str, Any]:
        """Short requests whose tokens should come evenly, first alone, then beside long prompts."""
        seconds = min(10.0, self.seconds)
        prompt, answer, rate = self.model.short
        short = ["--rate", f"{rate:g}", "--input", prompt, "--output", answer, "--warmup", str(int(3 * rate)), "--raw"]
        short += ["--duration", f"{seconds:g}s"]
        alone = self.load("alone", *short, seconds=seconds + 3).finish()
        beside = self.load("beside", *short, seconds=seconds + 3)
        long = self.load(
            "disturbing", "--arrivals", "constant", "--rate", f"{self.model.disturbing_rate:g}", "--warmup", "0",
            "--duration", f"{seconds + 4:g}s", "--input", str(self.model.long_tokens), "--output", "1",
            seconds=seconds + 4,
        )  # fmt: skip
        found = {"alone": alone, "beside": beside.finish(), "disturbing": long.finish()}
        for name in ("alone", "beside"):
            for row in found[name].get("rates", []):
                itl = row["itl"]
                ratio = itl["p99"] / itl["p50"] if itl["p50"] else 0.0
                say(f"-- {self.name} {name}: ITL p50 {itl['p50']:.2f} p99 {itl['p99']:.2f} ms, p99 {ratio:.2f} x p50")
        return found


class LoadProcess:
    """`slipstream bench serve` in a process of its own."""

    def __init__(self, run: Run, label: str, options: tuple[str, ...], limit_s: float) -> None:
        self._json = run.results.folder / f"{run.name.replace('/', '-')}-{label}.json"
        self._json.unlink(missing_ok=True)
        self._end = time.monotonic() + min(limit_s, max(5.0, run.results.left_s))
        self._label = f"{run.name}/{label}"
        command = [sys.executable, "-m", "slipstream", "bench", "serve", "--url", run.server.url, "--drain", "12s"]
        command += ["--label", self._label, "--json", str(self._json), *options]
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
        say(
            "\n".join(
                f"   {line}" for line in output.splitlines() if not line.startswith(("┏", "┃", "┡", "│", "└", "lat"))
            )
        )
        if not self._json.exists():
            return {"problem": output[-1000:]}
        found = json.loads(self._json.read_text())
        self._json.unlink()
        return found


# ----------------------------------------------------------------------------------------------------------------- all


def parts_of(model: Model, seconds: float) -> dict[str, float]:
    """The parts of a run in order, with the seconds that each takes at most as planned."""
    rates = {f"{rate:g}": seconds + CLIENT_S for rate in model.rates}
    return {"ready": 5.0, **rates, "long": 17 / model.long_rate + 6.0, "disturbed": 2 * (min(10.0, seconds) + 9.0)}


def measure(run: Run, wanted: list[str], planned: dict[str, float]) -> None:
    for part in wanted:
        name = f"{run.name}/{part}"
        if run.results.left_s < planned[part]:
            say(f"== {name} left out: it takes {planned[part]:.0f} s and {run.results.left_s:.0f} s are left")
            continue
        say(f"== {name}")
        try:
            found = {"ready": run.first_requests, "long": run.long, "disturbed": run.disturbed}.get(
                part, lambda part=part: run.rate(float(part))
            )()
        except Exception as error:  # one part's trouble leaves the others
            found = {"problem": f"{type(error).__name__}: {error}"}
            say(f"-- {name}: {found['problem']}")
        run.results.keep(name, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-serving"))
    parser.add_argument("--only", default="", help="pieces of MODEL/ARRANGEMENT/PART, separated by commas")
    parser.add_argument("--skip", default="", help="parts that are left out, such as disturbed")
    parser.add_argument("--seconds", type=float, default=22.0, help="how long each rate is sent")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--apart", default="", help="further flags of serve for prefill and decode apart")
    parser.add_argument("--both", default="", help="further flags of serve for workers that do both")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--plan", action="store_true", help="only say what would be measured and how long it takes")
    arguments = parser.parse_args()
    tiny = arguments.tiny or (gpus() < 2 and not arguments.plan)
    more = {"apart": tuple(arguments.apart.split()), "both": tuple(arguments.both.split())}
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.out, arguments.budget)
    total = 0.0
    for model in TINY if tiny else MODELS:
        for arrangement in ("apart", "both"):
            planned = parts_of(model, arguments.seconds)
            wanted = selected(f"{model.name}/{arrangement}", list(planned), arguments.only, arguments.skip)
            if not wanted:
                continue
            total += 20.0 + sum(planned[part] for part in wanted)
            if arguments.plan:
                say(f"{model.name}/{arrangement}: start 20 s, " + ", ".join(f"{p} {planned[p]:.0f} s" for p in wanted))
                continue
            serve_and_measure(model, arrangement, tiny, more, results, wanted, planned, arguments.seconds)
    if arguments.plan:
        say(f"together about {total:.0f} s")
        return 0
    summary(results)
    return 0 if any("problem" not in part for part in results.parts.values()) else 1


def serve_and_measure(
    model: Model,
    arrangement: str,
    tiny: bool,
    more: dict[str, tuple[str, ...]],
    results: Results,
    wanted: list[str],
    planned: dict[str, float],
    seconds: float,
) -> None:
    if results.left_s < 45:
        say(f"== {model.name}/{arrangement} left out: {results.left_s:.0f} s are left")
        return
    devices = {"apart": ("--prefill", "cuda:0", "--decode", "cuda:1"), "both": ("--both", "cuda:0,1")}
    if tiny:
        devices = {"apart": ("--prefill", "cpu", "--decode", "cpu"), "both": ("--both", "2xcpu")}
    folder = model_folder(results.folder / "models" / model.name, model.shape)
    flags = (*model.flags, *model.server_flags.get(arrangement, ()), *more[arrangement])
    log = results.folder / f"{model.name}-{arrangement}.log"
    server = Server(
        [
            str(folder),
            "--load-format",
            "dummy",
            "--served-model-name",
            "model",
            "--port",
            "0",
            *devices[arrangement],
            *flags,
        ],
        log,
    )
    try:
        if server.url:
            measure(Run(model, arrangement, server, results, seconds), wanted, planned)
        else:
            results.keep(f"{model.name}/{arrangement}/ready", {"problem": f"not ready; see {log.name}"})
    finally:
        server.stop()


def selected(run: str, parts: list[str], only: str, skip: str) -> list[str]:
    prefixes = [text for text in only.split(",") if text]
    skipped = [text for text in skip.split(",") if text]
    chosen = []
    for part in parts:
        name = f"{run}/{part}"
        if prefixes and not any(f"/{p}/" in f"/{name}/" for p in prefixes):
            continue
        if part not in skipped:
            chosen.append(part)
    return chosen


def gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def summary(results: Results) -> None:
    """One line a load, with what another server reached, in the same order of figures."""
    say("\nms: first token p50 / p99, between tokens p50 / p99; goodput at " + SLO)
    for part, value in results.parts.items():
        for key, load in _loads(value):
            for row in load["rates"]:
                ttft, itl = row["ttft"], row["itl"]
                good = f", goodput {row['good']['value']:.2f}" if row.get("good") else ""
                say(
                    f"{part:24} {key:10} {ttft['p50']:7.1f} / {ttft['p99']:7.1f}, {itl['p50']:6.2f} / {itl['p99']:6.2f}"
                    f"{good}, {row['ok']} of {row['requests']}, {row['output_tokens_per_s']:.0f} tokens/s"
                )
        if "first_token_ms" in value:
            times = value["first_token_ms"]
            median = round(statistics.median(times), 1)
            say(f"{part:24} ready {value['ready_s']:.1f} s; first request {times[0]} ms, median {median} ms")


if __name__ == "__main__":
    sys.exit(main())
