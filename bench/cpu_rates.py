"""Prefill and decode rates of the CPU path beside those of transformers' generate, same weights, same run.

    OMP_NUM_THREADS=1 python bench/cpu_rates.py [--model smollm2] [--prompt 256] [--tokens 48] [--batch 1 4 16]

Both sides compute in float32 (or --dtype) on --threads threads, one after the other; each figure is the best of
--repeats runs. Prefill is the time from a prompt to its first token, all prompts of the batch together; decode is all
further tokens of the batch over their time. On a machine that others use too, `--clock cpu` counts this process's
processor seconds instead of the wall's (one thread only). The conditions are printed with the figures.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.config import EngineConfig
from slipstream.engine.plan import NewRow, StepPlan
from slipstream.model.config import ModelConfig
from slipstream.run.engine_model import OpenedModel, open_model
from slipstream.run.runner import Runner
from slipstream.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Ours:
    """Our runner, driven by the plans that an engine with `chunk` tokens a step would make."""

    def __init__(self, opened: OpenedModel, batch: int, context: int, chunk: int) -> None:
        layout = opened.layout
        self.pages_each = layout.pages_for(context)
        memory = torch.zeros((1 + batch * self.pages_each) * layout.page_bytes, dtype=torch.uint8)
        self.runner: Runner = opened.runner(memory, batch)
        order = np.random.default_rng(0).permutation(np.arange(1, 1 + batch * self.pages_each))
        self.tables = order.reshape(batch, self.pages_each)
        self.chunk = chunk

    def step(
        self, rows: list[int], tokens: np.ndarray, start: int, new: bool = False, sample: bool = True
    ) -> np.ndarray:
        """Tokens [rows, n] at positions start and on; returns what was sampled."""
        count, width = tokens.shape
        plan = StepPlan(
            step=0,
            token_ids=tokens.reshape(-1),
            positions=np.tile(np.arange(start, start + width), count),
            query_start=np.arange(count + 1) * width,
            context_lens=np.full(count, start + width),
            block_tables=self.tables[rows],
            rows=np.array(rows),
            sample=np.full(count, sample),
            new_rows=[NewRow(row, GREEDY, [], [], (), 0) for row in rows] if new else [],
        )
        return self.runner.execute(plan).token_ids

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        first = np.zeros(len(prompts), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            found = first[:1]
            for start in range(0, len(prompt), self.chunk):
                part = prompt[None, start : start + self.chunk]
                last = start + self.chunk >= len(prompt)
                found = self.step([row], part, start, new=start == 0, sample=last)
            first[row] = found[0]
        return first

    def generate(self, prompts: np.ndarray, count: int) -> np.ndarray:
        out = [self.prefill(prompts)]
        rows = list(range(len(prompts)))
        while len(out) < count:
            out.append(self.step(rows, out[-1][:, None], prompts.shape[1] + len(out) - 1))
        return np.stack(out, 1)


def transformers_model(config: ModelConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """transformers' implementation over copies of the same weights, in the order in memory that it uses itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.rope.kind != "default":
        raise SystemExit("this comparison knows only models without rope scaling")
    shape = AutoConfig.for_model(
        config.architecture,
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()
    model.load_state_dict(weights, strict=False)
    return model


def best(action: Callable[[], Any], given: argparse.Namespace) -> tuple[float, Any]:
    clock = time.process_time if given.clock == "cpu" else time.perf_counter
    seconds, result = float("inf"), None
    for _ in range(given.repeats):
        start = clock()
        result = action()
        seconds = min(seconds, clock() - start)
    return seconds, result


def rates(generate: Callable[[int], Any], batch: int, given: argparse.Namespace) -> tuple[str, Any]:
    first, _ = best(lambda: generate(1), given)
    whole, tokens = best(lambda: generate(given.tokens), given)
    decode = batch * (given.tokens - 1) / max(whole - first, 1e-9)
    return f"{batch * given.prompt / first:10.0f} {decode:10.1f} {first:10.3f}", tokens


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one of our prefill steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"], help="cpu: this process's processor seconds"
    )
    given = parser.parse_args()

    engine = EngineConfig(model=given.model, device="cpu", dtype=given.dtype, threads=given.threads)
    opened = open_model(engine)
    reference = transformers_model(opened.config, opened.model.tensors(), opened.placement.dtype)
    import transformers

    print(
        f"{given.model} {given.dtype}, {given.threads} thread(s), prompt {given.prompt}, answer {given.tokens}, greedy"
    )
    print(f"{processor()}; python {platform.python_version()}, torch {torch.__version__}, ", end="")
    print(
        f"transformers {transformers.__version__}; load average {os.getloadavg()[0]:.1f}; "
        f"{given.clock} clock, best of {given.repeats}"
    )
    print(f"{'':24}{'prefill':>10} {'decode':>10} {'first':>10}\n{'':24}{'tok/s':>10} {'tok/s':>10} {'s':>10}")
    for batch in given.batch:
        rng = np.random.default_rng(batch)
        prompts = rng.integers(100, opened.config.vocab - 100, (batch, given.prompt))
        ours = Ours(opened, batch, given.prompt + given.tokens, given.chunk)
        line, tokens = rates(lambda n, o=ours, p=prompts: o.generate(p, n), batch, given)
        print(f"slipstream    batch {batch:3} {line}", flush=True)
        ids = torch.from_numpy(prompts)

        def generate(count: int, ids: torch.Tensor = ids) -> np.ndarray:
            with torch.inference_mode():
                whole = reference.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
                )
            return whole[:, ids.shape[1] :].numpy()

        line, wanted = rates(generate, batch, given)
        equal = int((tokens == wanted).all(1).sum())
        print(f"transformers  batch {batch:3} {line}   {equal} of {batch} answers equal", flush=True)


if __name__ == "__main__":
    main()
