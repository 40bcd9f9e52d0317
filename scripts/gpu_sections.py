"""The sections of `gpu_all.py`, the most important first: what each runs, on how many cards, and how long it takes.

Seconds are those of an H200 with an empty cache of kernels, estimated from earlier runs; they decide what still fits.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Kind = Literal["tests", "measures"]
PYTEST = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider")
ENGINE, SERVE, SERVING = "scripts/gpu_engine.py", "scripts/gpu_serve.py", "scripts/gpu_serving.py"
TRANSFER, TP = "scripts/gpu_transfer.py", "scripts/gpu_tp.py"
PACKAGES = ("nixl|nixl_cu13|nixl_cu12", "mooncake")
TINY_HANDOFF = ("--memory", "cpu,cpu", "--handoff=--cases 64x1x3,64x4x2 --layout 2x2x32")


@dataclass(frozen=True)
class Section:
    """`run` and `cpu` are arguments of python; {out} is the section's folder, {limit} the seconds that it gets.

    `one_card`: it is of use with two workers that share a card too, by the argument `--one-card`; then it measures the
    control path, not the link. `needs`: packages (one of "a|b"), or "$NAME" for a variable that names a file. `cpu` is
    empty where there is no way without a GPU.
    """

    name: str
    what: str
    cards: int
    kind: Kind
    seconds: float
    run: tuple[str, ...]
    cpu: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    least: int = 2  # of its cards are enough where there are no more
    useful: float = 0.0  # seconds in which it does at least a part; 0: it needs most of its time
    one_card: bool = False
    one_card_s: float = 0.0  # `seconds` there; 0: the same

    @property
    def at_least(self) -> float:
        """With fewer seconds left it is not begun."""
        return self.useful or 0.8 * self.seconds

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return 1.6 * self.seconds + 20

    def on(self, kind: str) -> Section:
        """What it is on a machine of that kind."""
        if kind != "one" or not self.one_card:
            return self
        return replace(
            self,
            cards=1,
            what=f"{self.what} [one-card variant: two workers share it]",
            seconds=self.one_card_s or self.seconds,
            useful=min(self.useful, 0.5 * self.one_card_s),
            run=(*self.run, "--one-card"),
            cpu=(*self.cpu, "--one-card") if self.cpu else (),
        )

    def why_not(self, kind: str, device: str) -> str:
        """Why it cannot run on a machine of that kind; empty when it can."""
        if device == "cpu":
            return "" if self.cpu else "it has no way without a GPU"
        if min(self.cards, self.least) > (2 if kind == "two" else 1):
            return f"it needs {self.cards} cards"
        for need in self.needs:
            if need.startswith("$") and not Path(os.environ.get(need[1:], "/nowhere")).exists():
                return f"{need} names no file that is there"
            if not need.startswith("$") and not any(map(importlib.util.find_spec, need.split("|"))):
                return f"the package {need.replace('|', ' or ')} is not there"
        return ""

    def command(self, folder: Path, limit: float, device: str, serve: str = "") -> list[str]:
        """`serve`: further flags of servers."""
        given = list(self.cpu if device == "cpu" else self.run)
        for name, value in (("{out}", str(folder)), ("{limit}", f"{limit - 5:.0f}"), ("{serve}", serve)):
            given = [part.replace(name, value) for part in given]
        return given


def transfer(name: str, what: str, seconds: float, step: str, *more: str, cpu: tuple[str, ...] = (), **rest) -> Section:
    run = (TRANSFER, step, "--out", "{out}", "--budget", "{limit}")
    return Section(name, what, 2, "measures", seconds, (*run, *more), (*run, *cpu) if cpu else (), **rest)


def serving(name: str, what: str, seconds: float, only: str, one_card_s: float, useful: float = 90.0) -> Section:
    common = (SERVING, "--out", "{out}", "--budget", "{limit}", "--apart={serve}", "--both={serve}")
    run = (*common, "--only", only, "--seconds", "12", "--seeds", "2")
    cpu = (*common, "--tiny", "--only", only.replace("1.5b", "tiny").replace("8b", "tiny"), "--seconds", "3")
    cpu = (*cpu, "--seeds", "1")
    return Section(name, what, 2, "measures", seconds, run, cpu, useful=useful, one_card=True, one_card_s=one_card_s)


SECTIONS = (
    Section(
        "engine-tests", "every kernel beside its twin, graphs, two steps under way", 1, "tests", 80,
        (ENGINE, "tests", "--out", "{out}"),
    ),
    Section(
        "transfer-tests", "cuda_ipc, staged shm and tcp, copy kernels, kill -9", 2, "tests", 100,
        (TRANSFER, "tests", "--out", "{out}", "--budget", "{limit}"), least=1,
    ),
    Section(
        "apart-tests", "prefill and decode in two processes answer like one, by cuda_ipc, shm, tcp", 2, "tests", 70,
        (*PYTEST, "tests/gpu/test_apart.py"), least=1,
    ),
    Section(
        "tp-tests", "two ranks answer like one, also across a handoff, and when one is killed", 2, "tests", 110,
        (*PYTEST, "--timeout", "200", "tests/gpu/test_tensor_parallel.py", "-s"),
    ),
    Section(
        "steps", "decode steps and prompts of 1.5B and 8B, step minus graph", 1, "measures", 75,
        (ENGINE, "bench", "--out", "{out}"),
    ),
    Section(
        "prompts", "steps with prompts, with and without prompt graphs", 1, "measures", 70,
        (ENGINE, "prompts", "--out", "{out}"),
        (ENGINE, "prompts", "--out", "{out}", "--shapes", "tiny", "--device", "cpu"),
    ),
    Section(
        "skewed", "decode steps of 1.5B and 8B with sequences of uneven lengths, graph and loop", 1, "measures", 45,
        (ENGINE, "skewed", "--out", "{out}"),
        (ENGINE, "skewed", "--out", "{out}", "--shapes", "tiny", "--device", "cpu"),
    ),
    transfer("handoff", "handoffs through the whole stack: 1,024, 8,192 tokens, 64 at once", 40, "handoff",
             cpu=TINY_HANDOFF, one_card=True),
    transfer("exposed", "what of a handoff is left behind its prompt's computation", 25, "exposed",
             cpu=("--memory", "cpu,cpu"), one_card=True),
    serving("serving-8b", "8B: ready, loads apart and both, long, exposure, turns, disturbed", 365, "8b", 100),
    serving("cached", "8B: streams beside long prompts that are handed over whole and hardly computed", 75,
            "8b/bare/cached", 75, useful=60),
    Section(
        "reference", "SmolLM2 beside transformers, 50 prompts, float32 and bfloat16", 1, "measures", 70,
        (SERVE, "reference", "--out", "{out}"), needs=("$SMOLLM2",),
    ),
    Section(
        "apart", "SmolLM2: prefill and decode on two cards against one, token for token", 2, "measures", 70,
        (SERVE, "apart", "--out", "{out}", "--transports", "auto"), needs=("$SMOLLM2",), one_card=True,
    ),
    transfer("table", "GB/s of cuda_ipc by page size, both directions, beside the raw copy", 45, "table",
             one_card=True),
    transfer("peers", "the same beside nixl and mooncake", 180, "peers", "--sizes", "1K,8K,32K,128K,1M,2M",
             "--engines", "raw,cuda_ipc,mooncake,nixl-best", needs=PACKAGES, one_card=True),
    transfer("staged", "shm and tcp with GPU memory", 40, "packages", "--engines", "shm,tcp",
             cpu=("--memory", "cpu,cpu", "--engines", "shm,tcp"), one_card=True),
    transfer("packages", "nixl and mooncake behind slipstream's transports, on GPU memory", 60, "packages",
             "--engines", "transport-nixl,transport-mooncake", needs=PACKAGES, one_card=True),
    transfer("paced", "what handoffs at intervals cost loops on either GPU", 25, "paced"),
    transfer("flight", "64 batches of 16 MiB under way", 15, "flight", one_card=True),
    serving("serving-1.5b", "1.5B: ready, loads apart and both, long, exposure, turns", 275,
            "1.5b/apart,1.5b/both", 80),
    Section(
        "exposure-chunks", "8B: exposure with chunks of 1,024 tokens, copied behind the next one", 2, "measures", 40,
        (SERVING, "--out", "{out}", "--budget", "{limit}", "--only", "8b/apart/exposure",
         "--apart=--chunk-tokens 1024 {serve}"), one_card=True,
    ),
    transfer("machine", "topo --routes and doctor --active", 40, "machine"),
    Section(
        "tp", "decode steps of the 8B on two ranks and on one, all-reduces", 2, "measures", 90,
        (TP, "--out", "{out}"),
    ),
    Section(
        "fp8", "decode steps and prompts with a KV cache of one byte a number", 1, "measures", 70,
        (ENGINE, "fp8", "--out", "{out}"),
    ),
    Section(
        "flashinfer", "prompts by FlashInfer's FA3, and its test", 1, "measures", 60,
        (ENGINE, "flashinfer", "--out", "{out}"), needs=("flashinfer",),
    ),
    Section("sampling", "drawing tokens beside plain torch", 1, "measures", 30, (ENGINE, "sampling", "--out", "{out}")),
    Section(
        "equality", "small random models beside transformers; PD against one worker over auto, shm, tcp", 2,
        "measures", 150,
        (SERVE, "--model", "tiny", "--out", "{out}", "--prompts", "14"),
        (SERVE, "--model", "tiny", "--out", "{out}", "--prompts", "4", "--longest", "60", "--answer", "4",
         "--device", "cpu", "--transports", "shm"), one_card=True,
    ),
    transfer("interference", "the same without pauses, by number of programs", 45, "interference"),
    transfer("wakes", "how long sleeping threads take to wake", 20, "wakes", cpu=("--memory", "cpu,cpu")),
)  # fmt: skip
