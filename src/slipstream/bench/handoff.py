"""Measures handoffs through the whole stack: `slipstream bench handoff`.

Two worker processes without a model (`handoff_worker`) and this process as their router. A request of N tokens goes to
the first, which offers it to the second, computes its prompt, copies the pages and commits; the second decodes one
token. Offer, grant, copies and commit pass through the links, engine loops and transfer agents that serve.

    whole      from the offer to the step of the second worker that uses the pages; its prompt takes no time to compute
    exposed    the part of it behind the prompt's computation, when that takes longer than offer and grant

The parts of a handoff that is alone lie end to end, each named by what it ends with. "Comes" is a message on its way:
coding, socket, and the waking of the thread that reads; the others are work, and `by` says which threads did it:

    offer comes       from its leaving the first worker to the second's decoder
    grant made        room found, pages chosen
    grant comes
    copies begun      from there until somebody starts to copy
    copies queued     page lists, runs, calls of the device; until all are, since the end of a long prompt is a copy of
                      its own, begun behind the first
    copies done       until their end has been seen; `link_ms` is what the bytes take at the rate of the preflight
    commit made
    commit comes
    step planned
    step begun        the loop thread of the second worker has woken
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from slipstream import outfile, wire
from slipstream.bench.handoff_options import HandoffOptions
from slipstream.bench.report import write_json
from slipstream.bench.transfer import default_memory
from slipstream.config import TransferConfig
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.launch.checks import refuse_transport
from slipstream.stream import Link
from slipstream.types import Request, SamplingParams

START_S = 120.0
ANSWER_S = 20.0
Event = tuple[str, int, float, str]  # name, number, seconds, thread
PARTS = {
    "offer comes": ("offer", "heard offer"),
    "grant made": ("heard offer", "grant"),
    "grant comes": ("grant", "heard grant"),
    "copies begun": ("heard grant", "begun"),
    "copies queued": ("begun", "queued"),
    "copies done": ("queued", "copied"),
    "commit made": ("copied", "commit"),
    "commit comes": ("commit", "heard commit"),
    "step planned": ("heard commit", "planned"),
    "step begun": ("planned", "decode"),
}
ACTS = ("grant", "begun", "copied", "commit", "planned")  # of which it is said which thread did them


class BenchFailed(SlipstreamError):
    """A worker ended, or a request was not answered."""


class WorkerProcess:
    """One of the two, as this process speaks to it."""

    def __init__(self, options: HandoffOptions, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.bench.handoff_worker", msgspec.json.encode(options).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def ask(self, verb: str = "") -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            if verb:
                self.process.stdin.write(json.dumps(verb) + "\n")
                self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise BenchFailed(f"a worker has ended: {self._log.read_text(errors='replace')[-400:]}")
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Pair:
    """Both workers, and the links of their router."""

    def __init__(self, source: Link, target: Link, workers: list[WorkerProcess], decode_at: str) -> None:
        self._source, self._workers, self._decode_at = source, workers, decode_at
        self._numbers = itertools.count(1)
        self._ended: dict[str, asyncio.Event] = {}
        self._problem = ""
        self._readers = [asyncio.create_task(self._read(link)) for link in (source, target)]

    async def _read(self, link: Link) -> None:
        while (message := await link.receive()) is not None:
            if isinstance(message, wire.Failed):
                self._problem = f"{message.request} failed: {message.message}"
                self._ended[message.request].set()
            elif isinstance(message, wire.StepOutput):
                for tokens in message.tokens:
                    if tokens.finish:
                        self._ended[tokens.request].set()
        self._problem = self._problem or link.lost_because
        for event in self._ended.values():
            event.set()

    async def hand_over(self, tokens: int, count: int) -> None:
        """`count` requests, made before the first is sent and sent at once, to their ends. Raises BenchFailed."""
        names = [f"r{next(self._numbers)}" for _ in range(count)]
        self._ended = {name: asyncio.Event() for name in names}
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        prompts = {name: random.Random(name).choices(range(1000), k=tokens) for name in names}
        requests = [Request(id=name, prompt_ids=prompt, sampling=sampling) for name, prompt in prompts.items()]
        self._source.send(*(wire.Submit(request=request, decode_at=self._decode_at) for request in requests))
        try:
            async with asyncio.timeout(ANSWER_S):
                for event in self._ended.values():
                    await event.wait()
        except TimeoutError:
            raise BenchFailed(f"no answer within {ANSWER_S:.0f} s") from None
        if self._problem:
            raise BenchFailed(self._problem)

    def events(self) -> list[list[Event]]:
        return [worker.ask("events") for worker in self._workers]

    def rate(self) -> float:
        """GB/s of the route, by its preflight; 0 when there is none."""
        return max(self._workers[0].ask("rates"), default=0.0)


class HandoffRow(msgspec.Struct, kw_only=True):
    """Milliseconds, medians unless said; `gbps` is what a round of transfers moved, from first offer to last use."""

    tokens: int
    under_way: int
    megabytes: float
    whole_ms: float
    best_ms: float
    p90_ms: float
    gbps: float
    parts_ms: dict[str, float]
    exposed_ms: float | None = None
    link_ms: float | None = None
    by: dict[str, dict[str, int]] = {}


def measure(
    times: list[list[list[Event]]], tokens: int, count: int, token_bytes: int, rate_gbps: float = 0.0
) -> HandoffRow:
    """`times` are the events of both workers, for each round of `count` handoffs."""
    spans, exposed = [], []
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    by: dict[str, Counter[str]] = {act: Counter() for act in ACTS}
    for source, target in times:
        offered = min(t for n, _, t, _ in source if n == "offer")
        whole = [t for n, length, t, _ in source if n == "computed" and length == tokens]  # the last chunks of prompts
        used = [t for n, length, t, _ in target if n == "computing" and length == tokens + 1]
        spans.append(max(used) - offered)
        exposed.append(max(used) - max(whole))
        if count == 1:
            last = _last(source, target, tokens)
            for name, (begin, end) in PARTS.items():
                if begin in last and end in last:
                    parts[name].append(last[end][0] - last[begin][0])
            for act in ACTS:
                if act in last:
                    by[act][last[act][1]] += 1
    spans.sort()
    size = tokens * token_bytes * count
    return HandoffRow(
        tokens=tokens,
        under_way=count,
        megabytes=tokens * token_bytes / 1e6,
        whole_ms=1e3 * statistics.median(spans),
        best_ms=1e3 * spans[0],
        p90_ms=1e3 * spans[int(0.9 * (len(spans) - 1))],
        gbps=size / statistics.median(spans) / 1e9,
        parts_ms={name: 1e3 * statistics.median(values) for name, values in parts.items() if values},
        exposed_ms=1e3 * statistics.median(exposed),
        link_ms=size / count / rate_gbps / 1e6 if rate_gbps and count == 1 else None,
        by={act: dict(threads) for act, threads in by.items() if threads},
    )


def _last(source: list[Event], target: list[Event], tokens: int) -> dict[str, tuple[float, str]]:
    """When each thing of one handoff happened last, the first copy begun, and on which thread."""
    last: dict[str, tuple[float, str]] = {}
    for name, _, at, thread in (*source, *target):
        if name == "begun":
            last[name] = min((at, thread), last.get(name, (at, thread)))
        elif name not in ("planned", "computing", "computed"):
            last[name] = max((at, thread), last.get(name, (0.0, "")))
    for name, number, at, thread in target:
        if number == tokens + 1 and name in ("planned", "computing"):
            last.setdefault("planned" if name == "planned" else "decode", (at, thread))
    return last


@contextlib.contextmanager
def workers(options: HandoffOptions, memory: tuple[str, str], folder: Path) -> Iterator[list[WorkerProcess]]:
    pair = []
    try:
        for role, where in zip(("prefill", "decode"), memory, strict=True):
            chosen = msgspec.structs.replace(options, role=role, memory=where)
            pair.append(WorkerProcess(chosen, folder / f"handoff-{role}.log"))
        yield pair
        for worker in pair:
            assert worker.process.stdin is not None
            worker.process.stdin.write('"end"\n')
            worker.process.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(10)
    finally:
        for worker in pair:
            worker.kill()


async def run(
    options: HandoffOptions,
    memory: tuple[str, str],
    cases: list[tuple[int, int, int]],
    folder: Path,
    say: Callable[[HandoffRow], None],
    shuffled: bool = True,
) -> list[HandoffRow]:
    """`cases` are (tokens, handoffs under way, rounds). Raises BenchFailed."""
    rows = []
    with workers(options, memory, folder) as pair:
        wires = [worker.ask()["wire"] for worker in pair]
        if shuffled:
            for worker in pair:
                worker.ask("shuffle")
        links: list[Link] = []
        for address in wires:
            link = await Link.connect(address, wire.Decoder(wire.ToRouter))
            link.send(wire.Hello(kind="router", id="bench"))
            welcome = await link.receive()
            if not isinstance(welcome, wire.Welcome):
                raise BenchFailed(f"{address} answered Hello with {type(welcome).__name__}")
            links.append(link)
        both = Pair(links[0], links[1], pair, wires[1])
        await both.hand_over(options.page_tokens, 1)  # opens and proves the route
        for tokens, count, rounds in cases:
            times = []
            for number in range(rounds + 2):
                await asyncio.sleep(0.01)
                both.events()
                await both.hand_over(tokens, count)
                await asyncio.sleep(0.01)
                if number >= 2:
                    times.append(both.events())
            rows.append(measure(times, tokens, count, options.layout.token_bytes, both.rate()))
            say(rows[-1])
        for link in links:
            link.close()
    return rows


def line(row: HandoffRow) -> str:
    text = (
        f"{row.tokens:6d} tokens x {row.under_way:2d}  whole {row.whole_ms:8.3f} ms (best {row.best_ms:.3f}, p90 "
        f"{row.p90_ms:.3f}), {row.gbps:6.1f} GB/s, behind the computation {row.exposed_ms:.3f} ms"
    )
    if not row.parts_ms:
        return text
    parts = ", ".join(f"{name} {value:.3f}" for name, value in row.parts_ms.items())
    link = "" if row.link_ms is None else f"; the bytes alone {row.link_ms:.3f}"
    threads = "; ".join(
        f"{act} by {', '.join(f'{name} {count}' for name, count in sorted(counts.items(), key=lambda one: -one[1]))}"
        for act, counts in row.by.items()
    )
    return f"{text}\n              {parts}{link}\n              {threads}"


def parse_cases(text: str) -> list[tuple[int, int, int]]:
    """(tokens, under way, rounds) of "1024x1x30,1024x64x5"."""
    cases = []
    for part in text.split(","):
        numbers = part.split("x")
        if not 1 <= len(numbers) <= 3 or not all(number.isdigit() and int(number) > 0 for number in numbers):
            raise ConfigError(f"{part!r} is not TOKENS, TOKENSxUNDERWAY or TOKENSxUNDERWAYxROUNDS")
        tokens, under_way, rounds = (*map(int, numbers), *(1, 30)[len(numbers) - 1 :])
        cases.append((tokens, under_way, rounds))
    return cases


def parse_layout(text: str) -> tuple[int, int, int]:
    """(layers, KV heads, head dimension) of "32x8x128"."""
    numbers = text.split("x")
    if len(numbers) != 3 or not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ConfigError(f"--layout {text!r} is not LAYERSxHEADSxDIMENSION, such as 32x8x128")
    layers, heads, dim = map(int, numbers)
    return layers, heads, dim


@click.command(help="Measure handoffs between two workers without a model: offer, grant, copies, commit.")
@click.option("--memory", default="", help="SOURCE,TARGET, each cpu, cuda:N or a UUID. Default: two GPUs if there are.")
@click.option("--cases", default="1024,8192", show_default=True, help="TOKENS[xUNDERWAY[xROUNDS]], comma-separated.")
@click.option("--layout", default="32x8x128", show_default=True, help="Layers, KV heads, head dimension; bfloat16.")
@click.option("--page-tokens", default=16, show_default=True)
@click.option("--transport", default="auto", show_default=True)
@click.option("--compute-ms", default=0.0, show_default=True, help="How long the step of a prompt takes.")
@click.option("--chunk-tokens", default=16384, show_default=True, help="Tokens a step: the grain of overlap.")
@click.option("--programs", default=TransferConfig().cuda_programs, show_default=True)
@click.option(
    "--engine-preference",
    type=click.FloatRange(min=0.0, min_open=True),
    default=TransferConfig().cuda_engine_preference,
    show_default=True,
    help="As --cuda-engine-preference of serve: 0.01 has the kernel copy everything, 100 the copy engine.",
)
@click.option("--asleep", is_flag=True, help="Let GPUs lower their clocks between handoffs.")
@click.option("--ordered", is_flag=True, help="Leave the pages in the order of a new pool: one long run a handoff.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="Write the results here.")
@click.option("--logs", type=click.Path(path_type=Path), default=None, help="Folder for the workers' logs.")
def command(
    memory: str,
    cases: str,
    layout: str,
    page_tokens: int,
    transport: str,
    compute_ms: float,
    chunk_tokens: int,
    programs: int,
    engine_preference: float,
    asleep: bool,
    ordered: bool,
    json_path: Path | None,
    logs: Path | None,
) -> None:
    import tempfile

    if json_path:
        outfile.check(json_path)
    wanted = parse_cases(cases)
    layers, heads, dim = parse_layout(layout)
    sides = tuple(memory.split(",")) if memory else default_memory()
    refuse_transport(transport, sides)
    options = HandoffOptions(
        tokens=max(tokens * count for tokens, count, _ in wanted) * 5 // 4 + 1024,
        page_tokens=page_tokens,
        layers=layers,
        kv_heads=heads,
        head_dim=dim,
        chunk_tokens=chunk_tokens,
        compute_ms=compute_ms,
        awake=not asleep,
        transfer=TransferConfig(
            transport=transport,  # type: ignore[arg-type]
            cuda_programs=programs,
            cuda_engine_preference=engine_preference,
        ),
    )
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        rows = asyncio.run(
            run(options, (sides[0], sides[1]), wanted, folder, lambda row: print(line(row), flush=True), not ordered)
        )
    print(f"{options.layout.fingerprint_text}, {sides[0]} to {sides[1]}; {time.monotonic() - began:.1f} s in all")
    if json_path:
        write_json(rows, json_path)
