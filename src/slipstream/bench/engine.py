"""`slipstream bench engine`: how long the steps of the engine take on one GPU, against what its memory allows.

Weights are random, so that nothing but a config is needed. A decode step is measured in the loop of a worker (`step`:
from the end of one to the end of the next, the host at work on one while the device computes the other), by itself
(`alone`: plan in, tokens out, nothing beside it), and as the device sees its graph (`graph`: replayed back to back, by
events); the limit is the time to read all weights but the embedding, and all keys and values, once, at the rate of a
large copy on the same card. A prompt is measured from plan to token, several in a row (`step`) and after pauses
(`alone`), against the time of its matrix products at the rate of a large one. Steps in a row bring a card to its power
limit, where it lowers its clock: both stand beside.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from slipstream import outfile
from slipstream.bench.report import Conditions, conditions, write_json
from slipstream.bench.steady import SteadyLoop
from slipstream.config import EngineConfig
from slipstream.engine.plan import NewRow, StepPlan
from slipstream.errors import ConfigError
from slipstream.kv.layout import KVLayout
from slipstream.launch.devices import this_machine
from slipstream.types import SamplingParams

LOOP_STEPS = 200
REPLAY_MS = 500.0  # of a graph, back to back
PAUSE_S = 0.2  # before a prompt alone: the card is at its full clock again
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, ignore_eos=True)  # of random weights' flat logits
SHAPES: dict[str, dict[str, Any]] = {  # configs of Qwen2.5-1.5B and Llama-3.1-8B
    "1.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
}


class StepRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One kind of step, milliseconds. `limit_ms` is what memory (decode) or the matrix units (prefill) allow.

    Of a decode step `step_ms` is that of the loop, `alone_ms` of one that is waited for before the next is planned;
    `context` is the longest, and `tokens` all sequences together where they differ in length.
    """

    model: str
    kind: str
    batch: int
    context: int
    step_ms: float
    step_p90_ms: float
    alone_ms: float | None = None
    device_ms: float | None = None
    limit_ms: float = 0.0
    clock_mhz: int = 0  # of the multiprocessors, behind the steps of `step_ms`
    power_w: int = 0
    tokens: int = 0

    @property
    def share(self) -> float:
        return self.limit_ms / self.step_ms


class EngineReport(msgspec.Struct, kw_only=True):
    conditions: Conditions
    copy_tb_s: float
    matmul_tflop_s: float
    ready_s: dict[str, float]
    rows: list[StepRow]


def write_shape(folder: Path, name: str) -> Path:
    """A folder with the config of a known shape."""
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, **SHAPES[name]}))
    return folder


def median_ms(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(median, 90th percentile) of the host's time for a call that ends when its work is done."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times), statistics.quantiles(times, n=10)[-1] if repeats > 1 else times[0]


def card_state() -> tuple[int, int]:
    """(clock of the multiprocessors in MHz, power in watts) of the current GPU; zeros where nvidia-ml-py is missing."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return 0, 0
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    return int(clock), round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)


def device_ms(call: Callable[[], object], repeats: int) -> float:
    """Device time of one of `repeats` calls launched back to back."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def card_rates() -> tuple[float, float]:
    """(TB/s of a large copy, read and write counted; TFLOP/s of a large bf16 product) of the current GPU."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * source.numel() / device_ms(lambda: target.copy_(source), 10) / 1e9
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(left)
    product = 2 * 8192**3 / device_ms(lambda: torch.mm(left, left, out=out), 10) / 1e9
    return copy, product


def fill_pool(memory: Any, layout: KVLayout, dtype: Any) -> None:
    """Random keys and values; bytes below 64 are finite as codes and as scales."""
    if layout.dtype == "fp8":
        memory.random_(0, 64)
    else:
        memory.view(dtype).normal_()


def block_tables(order: NDArray[np.int64], lengths: NDArray[np.int64], page_tokens: int) -> NDArray[np.int64]:
    """Pages for sequences of so many tokens, each its own, in that order; padded with page 0."""
    counts = -(-lengths // page_tokens)
    tables = np.zeros((len(lengths), int(counts.max())), np.int64)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = order[: int(counts.sum())]
    return tables


class StepBench:
    """An opened model with its pool, and plans over random pages of it. Used on one thread."""

    def __init__(self, name: str, model: str, *, sequences: int, tokens: int, settings: dict[str, Any]) -> None:
        import torch

        from slipstream.run.engine_model import open_model

        started = time.perf_counter()
        engine = EngineConfig(
            model=model,
            load_format="dummy",
            device="cuda:0",
            max_sequences=sequences,
            **settings,
        )
        self.name, self.opened = name, open_model(engine)
        if self.opened.device.type != "cuda":
            raise ConfigError("bench engine measures GPUs, and there is none here.")
        layout = self.opened.layout
        self.pages = layout.pages_for(tokens) + sequences + 1
        memory = torch.empty(self.pages * layout.page_bytes, dtype=torch.uint8, device="cuda:0")
        fill_pool(memory, layout, self.opened.placement.dtype)
        loaded = time.perf_counter()
        self.runner: Any = self.opened.runner(memory, sequences)
        torch.cuda.synchronize()
        self.load_s, self.ready_s = loaded - started, time.perf_counter() - started
        self._order = np.random.default_rng(0).permutation(np.arange(1, self.pages))

    def plan(
        self, batch: int, new: int, context: int | Sequence[int], *, first: bool, sampling: SamplingParams | None = None
    ) -> StepPlan:
        """`new` tokens of each of `batch` sequences that are `context` tokens long then, all or each."""
        rng, lengths = np.random.default_rng(1), np.broadcast_to(np.asarray(context, np.int64), batch).copy()
        return StepPlan(
            step=1,
            token_ids=rng.integers(3, 1000, batch * new),
            positions=(lengths[:, None] + np.arange(-new, 0)).reshape(-1),
            query_start=np.arange(batch + 1) * new,
            context_lens=lengths,
            block_tables=block_tables(self._order, lengths, self.opened.layout.page_tokens),
            rows=np.arange(batch),
            sample=np.ones(batch, dtype=np.bool_),
            new_rows=[NewRow(row, sampling or GREEDY, [], [], (), 0) for row in range(batch)] if first else [],
        )

    def decode_row(
        self,
        batch: int,
        context: int | Sequence[int],
        copy_tb_s: float,
        kind: str = "decode",
        repeats: int = LOOP_STEPS,
    ) -> StepRow:
        sampling = SAMPLED if kind == "sampled" else GREEDY
        loop = SteadyLoop(
            self.runner, self.opened.layout, self.pages, batch=batch, context=context, steps=repeats, sampling=sampling
        )
        plan = self.plan(batch, 1, context, first=False)
        self._begin(batch, context, sampling, plan)
        graph = [self._graph_ms(batch)]  # before the loop and behind it: a card that gets hot lowers its clock
        steady = loop.measure()
        clock, power = card_state()
        self._begin(batch, context, sampling, plan)
        graph.append(self._graph_ms(batch))
        alone, _ = median_ms(lambda: self.runner.execute(plan), 20)
        config, layout = self.opened.config, self.opened.layout
        tokens, longest = int(plan.context_lens.sum()), int(plan.context_lens.max())
        read = config.parameters - (0 if config.tied else config.vocab * config.hidden)
        size_bytes = read * self.opened.placement.dtype.itemsize + tokens * layout.token_bytes
        return StepRow(
            model=self.name,
            kind=kind,
            batch=batch,
            context=longest,
            tokens=0 if tokens == batch * longest else tokens,
            step_ms=steady.mean_ms,
            step_p90_ms=steady.p90_ms,
            alone_ms=alone,
            device_ms=statistics.mean(graph),
            limit_ms=size_bytes / copy_tb_s / 1e9,
            clock_mhz=clock,
            power_w=power,
        )

    def _begin(self, batch: int, context: int | Sequence[int], sampling: SamplingParams, plan: StepPlan) -> None:
        self.runner.execute(self.plan(batch, 1, context, first=True, sampling=sampling))
        self.runner.execute(plan)

    def _graph_ms(self, batch: int) -> float:
        """The graph of the step that was executed last, replayed for a while."""
        import torch

        graphs = self.runner._graphs
        replay = graphs._replay[next(size for size in graphs.sizes if size >= batch)]
        with torch.inference_mode(), torch.cuda.stream(self.runner._stream):
            once = device_ms(replay, 10)
            return device_ms(replay, max(20, round(REPLAY_MS / once)))

    def prefill_row(self, tokens: int, earlier: int, tflop_s: float, repeats: int = 10) -> StepRow:
        self.runner.execute(self.plan(1, tokens, earlier + tokens, first=True))
        plan = self.plan(1, tokens, earlier + tokens, first=False)
        paused = []
        for _ in range(4):
            time.sleep(PAUSE_S)
            paused.append(median_ms(lambda: self.runner.execute(plan), 1)[0])
        step, slow = median_ms(lambda: self.runner.execute(plan), repeats)
        clock, power = card_state()
        config = self.opened.config
        head = config.vocab * config.hidden
        weights = config.parameters - head * (1 if config.tied else 2)
        seen = tokens * (earlier + (tokens + 1) / 2)
        work = 2 * tokens * weights + 4 * seen * config.heads * config.head_dim * config.layers + 2 * head
        return StepRow(
            model=self.name,
            kind="prefill",
            batch=1,
            context=earlier + tokens,
            step_ms=step,
            step_p90_ms=slow,
            alone_ms=statistics.median(paused),
            limit_ms=work / tflop_s / 1e9,
            clock_mhz=clock,
            power_w=power,
        )

    def kernels(self, call: Callable[[], object]) -> list[tuple[str, int, float]]:
        """(name, launches, microseconds) of the device's work in one call, the longest first."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        events = [(e.key, e.count, float(e.self_device_time_total)) for e in found.key_averages()]
        return sorted(events, key=lambda event: -event[2])


def table(rows: list[StepRow]) -> Table:
    drawn = Table(title="steps, milliseconds", title_justify="left")
    for heading in ("model", "kind"):
        drawn.add_column(heading, no_wrap=True)
    for heading in (
        "batch",
        "context",
        "step",
        "p90",
        "alone",
        "graph",
        "step - graph",
        "limit",
        "of limit",
        "MHz",
        "W",
    ):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        alone = "" if row.alone_ms is None else f"{row.alone_ms:.3f}"
        device = "" if row.device_ms is None else f"{row.device_ms:.3f}"
        gap = "" if row.device_ms is None else f"{row.step_ms - row.device_ms:.3f}"
        figures = [f"{row.step_ms:.3f}", f"{row.step_p90_ms:.3f}", alone, device, gap, f"{row.limit_ms:.3f}"]
        figures += [f"{100 * row.share:.0f} %", str(row.clock_mhz or ""), str(row.power_w or "")]
        drawn.add_row(row.model, row.kind, str(row.batch), str(row.context), *figures)
    return drawn


def numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{text!r} is no list of positive numbers; write them like 1,32,256.")
    return [int(part) for part in parts]


@click.command(help="Measure the engine's steps on a GPU with random weights.")
@click.option("--shapes", default="1.5b,8b", show_default=True, help="Of " + ", ".join(SHAPES) + ".")
@click.option("--batches", default="1,32,256", show_default=True, help="Sequences of a decode step.")
@click.option("--context", default=1024, show_default=True, help="Tokens of each sequence of a decode step.")
@click.option("--prompts", default="8192", show_default=True, help="Tokens of prompts.")
@click.option("--page-tokens", default=16, show_default=True)
@click.option("--sampled", is_flag=True, help="Also decode steps with temperature, top_k and top_p.")
@click.option("--kv-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True)
@click.option(
    "--attention-backend", type=click.Choice(["auto", "triton", "flashinfer"]), default="auto", show_default=True
)
@click.option("--kernels", is_flag=True, help="Also print what each step's kernels take.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="Write the results here.")
def command(
    shapes: str,
    batches: str,
    context: int,
    prompts: str,
    page_tokens: int,
    sampled: bool,
    kv_dtype: str,
    attention_backend: str,
    kernels: bool,
    json_path: Path | None,
) -> None:
    machine = this_machine()  # before torch, which takes seconds to be imported
    if not machine.gpus:
        raise ConfigError(f"bench engine measures GPUs; this machine has {machine.devices}.")
    unknown = [name for name in shapes.split(",") if name not in SHAPES]
    if unknown:
        raise ConfigError(f"shape {unknown[0]!r} is not known; known: {', '.join(SHAPES)}.")
    sizes, lengths = numbers(batches), numbers(prompts)
    if json_path:
        outfile.check(json_path)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench engine measures GPUs, and torch sees none here.")
    console = Console(width=120, highlight=False)
    copy, product = card_rates()
    found = conditions(sys.argv, [torch.cuda.get_device_name(0)])
    console.print(f"{found.devices[0]}: copy {copy:.2f} TB/s, bf16 product {product:.0f} TFLOP/s")
    report = EngineReport(conditions=found, copy_tb_s=copy, matmul_tflop_s=product, ready_s={}, rows=[])
    settings = {"kv_dtype": kv_dtype, "attention_backend": attention_backend, "page_tokens": page_tokens}
    for name in shapes.split(","):
        measure_shape(report, name, sizes, context, lengths, settings, console, kernels, sampled)
        torch.cuda.empty_cache()
    if json_path:
        write_json(report, json_path)


def measure_shape(
    report: EngineReport,
    name: str,
    batches: list[int],
    context: int,
    prompts: list[int],
    settings: dict[str, Any],
    console: Console,
    kernels: bool,
    sampled: bool,
) -> None:
    """Adds one model's rows to the report and prints them."""
    with TemporaryDirectory() as folder:
        each = SteadyLoop.tokens_each(context, LOOP_STEPS, max(batches)) + settings["page_tokens"]
        tokens = max(max(batches) * each, *prompts, 4096)
        write_shape(Path(folder), name)
        bench = StepBench(name, folder, sequences=max(batches), tokens=tokens, settings=settings)
    report.ready_s[name] = bench.ready_s
    console.print(
        f"{name}: weights and pool after {bench.load_s:.1f} s, ready after {bench.ready_s:.1f} s, attention of prompts "
        f"by {bench.runner.attention}, KV {bench.opened.layout.dtype}"
    )
    first = len(report.rows)
    report.rows += [bench.decode_row(batch, context, report.copy_tb_s) for batch in batches]
    if sampled:
        report.rows += [bench.decode_row(batch, context, report.copy_tb_s, "sampled") for batch in batches]
    report.rows += [bench.prefill_row(length, 0, report.matmul_tflop_s) for length in prompts]
    console.print(table(report.rows[first:]))
    if kernels:
        plans = {f"decode {batch}": bench.plan(batch, 1, context, first=False) for batch in batches}
        plans |= {f"prefill {length}": bench.plan(1, length, length, first=False) for length in prompts}
        for title, plan in plans.items():
            print_kernels(console, f"{name} {title}", bench.kernels(partial(bench.runner.execute, plan)))


def print_kernels(console: Console, title: str, found: list[tuple[str, int, float]], most: int = 14) -> None:
    total = sum(micros for _, _, micros in found)
    console.print(f"{title}: {sum(count for _, count, _ in found)} kernels, {total / 1e3:.3f} ms")
    for name, count, micros in found[:most]:
        console.print(f"  {micros:9.1f} us  {count:4d} x {micros / count:8.2f}  {name[:80]}")
