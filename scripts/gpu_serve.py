"""The whole product on GPUs: PD on two cards against one, the same requests, over HTTP.

    python scripts/gpu_serve.py [--shape tiny|1.5b] [--out FOLDER]

Makes a model folder with random weights (the same everywhere) and a byte tokenizer, serves it once with one worker
and once with prefill and decode on different cards over each transport named, and compares the answers token for
token. Prints the banner with the measured routes, time to ready, time to first token and decode rate. Without a GPU it
runs the same on the CPU, for a dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--out", type=Path, default=Path("gpu-serve"))
    parser.add_argument("--transports", default="auto,shm,tcp")
    arguments = parser.parse_args()
    import torch

    cards = torch.cuda.device_count()
    both, prefill, decode = ("cuda:0", "cuda:0", "cuda:1") if cards > 1 else ("cpu", "cpu", "cpu")
    folder = model_folder(arguments.out / "model", SHAPES[arguments.shape])
    common = [str(folder), "--load-format", "dummy", "--port", "0", "--kv-tokens", "65536"]
    requests = made_requests()
    wanted = served("colocated", [*common, "--both", both], requests)
    failures = 0
    for transport in arguments.transports.split(","):
        split = [*common, "--prefill", prefill, "--decode", decode, "--transport", transport]
        got = served(f"apart over {transport}", split, requests)
        same = sum(a == b for a, b in zip(got or [], wanted or [], strict=False))
        print(f"== {transport}: {same} of {len(requests)} answers equal the colocated ones", flush=True)
        failures += same != len(requests)
    return failures


def model_folder(folder: Path, shape: dict[str, int]) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "vocab_size": 151936 if shape["hidden_size"] > 1000 else 1024,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<u>": 2, **{letter: i + 3 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    return folder


def made_requests() -> list[dict[str, Any]]:
    rng = random.Random(3)
    requests = []
    for i, length in enumerate([1, 15, 16, 17, 100, 511, 512, 513, 1000, 2000, 4000, 8000, 300, 700]):
        prompt = [rng.randrange(3, 250) for _ in range(length)]
        sampling = {"temperature": 0} if i % 2 == 0 else {"temperature": 1.0, "seed": 40 + i, "top_p": 0.9}
        requests.append({"prompt": prompt, "max_tokens": 48, "ignore_eos": True, "return_token_ids": True, **sampling})
    return requests


def served(label: str, arguments: list[str], requests: list[dict[str, Any]]) -> list[list[int]] | None:
    print(f"== {label}: slipstream serve {' '.join(arguments)}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    url = first_url(process, limit_s=150.0)
    try:
        if url is None:
            return None
        print(f"-- {label}: ready after {time.monotonic() - began:.1f} s", flush=True)
        answers, firsts, rates = [], [], []
        for request in requests:
            tokens, first_s, rate = streamed(url, request)
            answers.append(tokens)
            firsts.append(first_s * 1e3)
            rates.append(rate)
        print(
            f"-- {label}: first token ms {' '.join(f'{v:.0f}' for v in firsts)}; "
            f"decode tokens/s median {statistics.median(rates):.1f}",
            flush=True,
        )
        return answers
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            print(f"-- {label}: did not end by itself", flush=True)


def first_url(process: subprocess.Popen[str], limit_s: float) -> str | None:
    """Prints what the cluster says; the URL it is served at, None when it ends or takes too long."""
    found: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print("   |", line.rstrip(), flush=True)
            match = re.search(r"is served at (http://\S+)", line)
            if match:
                found.append(match[1])
            if "Ctrl-C ends it" in line:
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    ready.wait(limit_s)
    return found[0] if found and process.poll() is None else None


def streamed(url: str, request: dict[str, Any]) -> tuple[list[int], float, float]:
    """Token ids, seconds to the first, tokens a second of the others."""
    body = json.dumps({**request, "model": "model", "stream": True}).encode()
    began = time.perf_counter()
    first = last = 0.0
    tokens: list[int] = []
    call = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                print("   error:", chunk["error"], flush=True)
                break
            new = [t for choice in chunk["choices"] for t in choice.get("token_ids") or []]
            if new:
                last = time.perf_counter()
                first = first or last
                tokens += new
    return tokens, first - began, (len(tokens) - 1) / max(last - first, 1e-9)


if __name__ == "__main__":
    sys.exit(main())
