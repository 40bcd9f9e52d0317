"""Tensor parallelism on two GPUs, in one go: what two ranks answer and how long their steps take, against one.

    python scripts/gpu_tp.py [STEP ...] [--out FOLDER] [--devices cuda:0,cuda:1] [--model FOLDER] [--context N]

Steps: sums (an all-reduce, microseconds in a CUDA graph), two, one (decode steps of the model with random weights on
two ranks and on one), compare (logits of a prompt, of both). Without a step: all. The model is a Llama of 8 billion
parameters unless a folder with a config is given. Results are printed as they come and written to FOLDER/tp.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu_figures import Figures

from slipstream.bench.engine import write_shape
from slipstream.config import EngineConfig, TransferConfig
from slipstream.engine.plan import NewRow, StepPlan
from slipstream.ranks.lead import LeadRunner
from slipstream.ranks.team import Team
from slipstream.run.engine_model import open_model
from slipstream.types import SamplingParams

BATCHES = (1, 32)
STEPS = ("sums", "two", "one", "compare")
GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20)
results: dict[str, Any] = {}


@contextlib.contextmanager
def engine(model: str, devices: list[str], batch: int, context: int) -> Iterator[tuple[Any, Any]]:
    """(runner, opened model) of a worker on these devices, without the worker."""
    config = EngineConfig(
        model=model,
        load_format="dummy",
        device=devices[0],
        tp=len(devices),
        kv_tokens=(batch + 1) * (context + 64),
        max_sequences=batch,
        max_model_len=context + 64,
        chunk_tokens=512,
    )
    began = time.monotonic()
    with contextlib.ExitStack() as closing:
        team = None
        if len(devices) > 1:
            team = Team(
                config,
                TransferConfig(),
                devices,
                host="127.0.0.1",
                name="tp",
                on_copied=lambda *_: None,
                on_lost=lambda error: print(f"lost: {error.message}", flush=True),
            )
            closing.callback(team.close)
        opened = open_model(config)
        print(f"loaded after {time.monotonic() - began:.1f} s", flush=True)
        if team is None:
            pool = opened.allocate_pool(1 << 20)
            closing.callback(pool.close)
            runner: Any = opened.runner(pool.region, batch)
        else:
            (other,) = team.opened()
            nccl_id = b""
            if opened.device.type == "cuda":
                from slipstream.run.parallel_nccl import new_id

                nccl_id = new_id()
            pool = opened.allocate_pool(1 << 20, other.pages)
            closing.callback(pool.close)
            team.proceed(other.pages, nccl_id)
            fds = team.meeting.take(0)
            team.meeting.close()
            group = team.beside(lambda: opened.join(fds, nccl_id))
            closing.callback(group.close)
            print(f"joined after {time.monotonic() - began:.1f} s", flush=True)
            local = team.beside(lambda: opened.runner(pool.region, batch))
            runner = LeadRunner(local, team, group)
            team.ready()
        print(f"{len(devices)} rank(s) ready after {time.monotonic() - began:.1f} s", flush=True)
        yield runner, opened


def prompt_plan(step: int, tokens: int, pages: int, vocab: int, *, logprobs: bool) -> StepPlan:
    ids = np.random.default_rng(3).integers(3, min(30000, vocab), tokens)
    return StepPlan(
        step=step,
        token_ids=ids,
        positions=np.arange(tokens),
        query_start=np.array([0, tokens]),
        context_lens=np.array([tokens]),
        block_tables=np.arange(1, pages + 1)[None, :],
        rows=np.zeros(1, dtype=np.int64),
        sample=np.ones(1, dtype=np.bool_),
        new_rows=[NewRow(0, SamplingParams(temperature=0.0, prompt_logprobs=0), [], [], (), 0)],
        prompt_logprobs={0: np.append(ids[1:], -1)} if logprobs else {},
    )


def decode_plan(step: int, batch: int, context: int, page_tokens: int, first: bool) -> StepPlan:
    pages = -(-(context + 64) // page_tokens)
    tables = np.random.default_rng(1).permutation(np.arange(1, batch * pages + 1)).reshape(batch, pages)
    rows = np.arange(batch)
    return StepPlan(
        step=step,
        token_ids=np.full(batch, 7 + step % 100),
        positions=np.full(batch, context + step % 60),
        query_start=np.arange(batch + 1),
        context_lens=np.full(batch, context + 1 + step % 60),
        block_tables=tables,
        rows=rows,
        sample=np.ones(batch, dtype=np.bool_),
        new_rows=[NewRow(row, GREEDY, [], [], (), 0) for row in range(batch)] if first else [],
    )


def measure(model: str, devices: list[str], context: int) -> dict[str, Any]:
    """Milliseconds of a decode step for each batch, one by one and with the next launched before; logprobs too."""
    found: dict[str, Any] = {}
    with engine(model, devices, max(BATCHES), context) as (runner, opened):
        page_tokens = opened.layout.page_tokens
        outcome = runner.execute(prompt_plan(1, 64, -(-64 // page_tokens), opened.config.vocab, logprobs=True))
        found["logprobs"] = [value.logprob for value in outcome.prompt_logprobs[0] if value is not None]
        step = 2
        for batch in BATCHES:
            times = []
            for number in range(60):
                plan = decode_plan(step, batch, context, page_tokens, number == 0)
                began = time.perf_counter()
                runner.execute(plan)
                times.append(time.perf_counter() - began)
                step += 1
            found[f"step_ms_{batch}"] = round(1e3 * statistics.median(times[20:]), 3)
            began = time.perf_counter()
            if runner.depth > 1:
                runner.launch(decode_plan(step, batch, context, page_tokens, False))
                for number in range(100):
                    runner.launch(decode_plan(step + 1 + number, batch, context, page_tokens, False))
                    runner.collect()
                runner.collect()
                found[f"ahead_ms_{batch}"] = round(1e3 * (time.perf_counter() - began) / 101, 3)
                step += 102
            print(len(devices), "ranks, batch", batch, {k: v for k, v in found.items() if k != "logprobs"}, flush=True)
    return found


def sums(devices: list[str]) -> None:
    """An all-reduce of [rows, 4096] in bfloat16, 64 of them in one graph; both ranks are threads of this process."""
    import threading

    import torch

    from slipstream.run.parallel_nccl import NcclGroup, new_id

    unique = new_id()

    def rank(number: int) -> None:
        device = torch.device(devices[number])
        torch.cuda.set_device(device)
        group = NcclGroup(unique, number, len(devices), device)
        for rows in (1, 8, 32, 256):
            x = torch.full((rows, 4096), float(number + 1), dtype=torch.bfloat16, device=device)
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                group.reduce(x)
                stream.synchronize()
                assert float(x[0, 0]) == 3.0, x[0, 0]
                x.zero_()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                for _ in range(64):
                    group.reduce(x)
                graph.capture_end()
                for _ in range(3):
                    graph.replay()
                stream.synchronize()
                began = time.perf_counter()
                for _ in range(10):
                    graph.replay()
                stream.synchronize()
                took = (time.perf_counter() - began) / 640 * 1e6
            if number == 0:
                print(f"all-reduce of {rows} x 4096 bf16: {took:.1f} us", flush=True)
                results.setdefault("all_reduce_us", {})[rows] = round(took, 2)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path("gpu-tp"))
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--model", default="")
    parser.add_argument("--context", type=int, default=1024)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    devices = arguments.devices.split(",")
    folder = Path(tempfile.mkdtemp(prefix="tp-8b-"))
    write_shape(folder, "8b")
    model = arguments.model or os.fspath(folder)
    failures = 0
    for step in arguments.steps or STEPS:
        began = time.monotonic()
        print(f"== {step}", flush=True)
        try:
            run_step(step, devices, model, arguments.context, Figures(arguments.out, f"tp-{step}"))
        except Exception as error:  # one step's trouble leaves the others
            print(f"-- {step}: {type(error).__name__}: {error}", flush=True)
            failures += 1
        print(f"== {step}: {time.monotonic() - began:.1f} s", flush=True)
        (arguments.out / "tp.json").write_text(json.dumps(results, indent=1))
    return failures


def run_step(step: str, devices: list[str], model: str, context: int, figures: Figures) -> None:
    if step == "sums":
        sums(devices)
        for rows, micros in results.get("all_reduce_us", {}).items():
            figures.add(f"all-reduce of {rows} x 4096 bf16 in a graph", micros, "us")
    elif step in ("one", "two"):
        found = results[step] = measure(model, devices[: 2 if step == "two" else 1], context)
        for batch in BATCHES:
            name = f"{step} rank(s), decode batch {batch} at {context}"
            figures.add(f"{name}, one by one", found[f"step_ms_{batch}"], "ms")
            figures.add(f"{name}, launched ahead", found.get(f"ahead_ms_{batch}"), "ms")
    elif {"one", "two"} <= results.keys():
        one, two = (np.array(results[name]["logprobs"]) for name in ("one", "two"))
        results["logprob_gap"] = float(np.abs(one - two).max())
        figures.add("largest difference of a prompt's logprobs, two ranks and one", results["logprob_gap"])


if __name__ == "__main__":
    raise SystemExit(main())
