"""Equality on GPUs: answers beside those of `transformers`, and prefill and decode on two cards against one.

    python scripts/gpu_serve.py [STEP ...] [--model smollm2|FILE|FOLDER|tiny|1.5b|8b] [--out FOLDER]

Steps:

    reference   greedy tokens and logits of 50 prompts beside transformers on the same weights (`gpu_reference.py` has
                the rule of near-ties). Without weights (tiny, 1.5b, 8b) a small random model of each architecture
    apart       over HTTP, served once by one worker and then by prefill and decode on different cards over each
                transport named: the same requests, one by one, must be answered token for token alike. With one GPU,
                or with --one-card, both are on the first

Without a step: both. Without GPUs, or with `--device cpu`, the same runs on the CPU, for a dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests has tiny models
from gpu_figures import Figures
from gpu_models import SHAPES, model_folder, prompt
from gpu_servers import Server, gpus, say, streamed

STEPS = ("reference", "apart")
LENGTHS = (1, 15, 16, 17, 100, 511, 512, 513, 1000, 2000, 300, 700, 4000, 8000)
ANSWER = 48


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--model", default=os.environ.get("SMOLLM2", "tiny"), help="default: $SMOLLM2, else tiny")
    parser.add_argument("--out", type=Path, default=Path("gpu-serve"))
    parser.add_argument("--device", default="cuda:0" if gpus() else "cpu")
    parser.add_argument("--transports", default="auto,shm,tcp", help="of apart")
    parser.add_argument("--one-card", action="store_true", help="apart: prefill and decode share a card")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest prompt of reference")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer of reference")
    arguments = parser.parse_args()
    unknown = set(arguments.steps) - set(STEPS)
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    failures = 0
    for step in arguments.steps or STEPS:
        began = time.monotonic()
        say(f"== {step}")
        figures = Figures(arguments.out, step, one_card=step == "apart" and on_one_card(arguments))
        failures += {"reference": reference, "apart": apart}[step](arguments, figures)
        say(f"== {step}: {time.monotonic() - began:.1f} s")
    return failures


def reference(arguments: argparse.Namespace, figures: Figures) -> int:
    import gpu_reference

    named = {Path(arguments.model).stem: arguments.model}
    if arguments.model in SHAPES:
        named = gpu_reference.tiny_models(arguments.out / "tiny")
    failures = 0
    for name, model in named.items():
        try:
            gpu_reference.measure(
                model, name, arguments.device, arguments.prompts, arguments.longest, arguments.answer, figures
            )
        except Exception as error:  # one model's trouble leaves the others
            figures.add(f"{name} beside transformers", None, note=f"{type(error).__name__}: {error}"[:300])
            failures += 1
    return failures


def apart(arguments: argparse.Namespace, figures: Figures) -> int:
    both, prefill, decode = ("cpu", "cpu", "cpu") if arguments.device == "cpu" else ("cuda:0", "cuda:0", "cuda:1")
    if on_one_card(arguments):
        decode = prefill
    common = [arguments.model, "--port", "0", "--served-model-name", "model", "--kv-tokens", "65536"]
    longest = 8000
    if arguments.model in SHAPES:
        common[0] = str(model_folder(arguments.out / "model", arguments.model))
        common += ["--load-format", "dummy"]
    elif arguments.model:
        longest = 2000
    requests = made_requests(arguments.prompts, longest)
    wanted = served("colocated", [*common, "--both", both], requests, arguments.out)
    failures = 0
    for transport in arguments.transports.split(","):
        split = [*common, "--prefill", prefill, "--decode", decode, "--transport", transport]
        got = served(f"apart-{transport}", split, requests, arguments.out)
        different = len(requests) - sum(a == b for a, b in zip(got, wanted, strict=False))
        note = f"{len(requests)} answers of {ANSWER} tokens, {Path(arguments.model).stem}"
        figures.add(
            f"answers over {transport} unlike colocated ones", different, "", most=0, note=note, everywhere=True
        )
        failures += different > 0
    return failures


def on_one_card(arguments: argparse.Namespace) -> bool:
    return bool(arguments.one_card) or (arguments.device != "cpu" and gpus() == 1)


def made_requests(count: int, longest: int) -> list[dict[str, Any]]:
    lengths = [length for length in LENGTHS if length <= longest]
    requests = []
    for number in range(count):
        length = lengths[number] if number < len(lengths) else 1 + (number * 397) % 2000
        seeded = {"temperature": 1.0, "seed": 40 + number, "top_p": 0.9} if number % 2 else {}
        requests.append({"prompt": prompt(number, length), "max_tokens": ANSWER, **seeded})
    return requests


def served(label: str, arguments: list[str], requests: list[dict[str, Any]], out: Path) -> list[list[int]]:
    """The answers, one by one; none where the server did not get ready."""
    out.mkdir(parents=True, exist_ok=True)
    with Server(arguments, out / f"{label}.log") as server:
        if not server.url:
            return []
        answers = [streamed(server.url, request) for request in requests]
    firsts = " ".join(f"{1e3 * answer.first_s:.0f}" for answer in answers)
    rate = statistics.median(answer.rate for answer in answers)
    say(f"-- {label}: first token ms {firsts}; decode tokens/s median {rate:.1f}")
    (out / f"{label}.json").write_text(json.dumps([answer.tokens for answer in answers]))
    return [answer.tokens for answer in answers]


if __name__ == "__main__":
    sys.exit(main())
