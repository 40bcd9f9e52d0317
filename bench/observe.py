"""What observation costs when nobody looks: microseconds a step and a request of a worker, and of the router.

    python bench/observe.py

Makes the calls that the engine core makes, on sequences of a real core, and times nothing else. CPU time of this
thread, the best of many short rounds, so that a busy machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slipstream.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.metrics import WorkerMetrics
from slipstream.engine.observe import Observer
from slipstream.engine.sequence import Sequence
from slipstream.engine.timeline import Watcher
from slipstream.kv.layout import KVLayout
from slipstream.router.journal import Journal
from slipstream.types import Request, SamplingParams

LAYOUT = KVLayout(page_tokens=16, layers=1, kv_heads=1, head_dim=4, dtype="float32", total_kv_heads=1, model="m")
SEQUENCES, CALLS, ROUNDS = 64, 200, 200


class Catcher(Watcher):
    """A watcher that also keeps the sequences, so that they can be shown to it again."""

    def __init__(self) -> None:
        super().__init__(WorkerMetrics())
        self.seen: list[Sequence] = []

    def submitted(self, sequence: Sequence) -> None:
        super().submitted(sequence)
        self.seen.append(sequence)


def sequences() -> list[Sequence]:
    numbers = EngineConfig(max_sequences=SEQUENCES, max_model_len=1024, max_waiting=100_000)
    catcher = Catcher()
    core = EngineCore(LAYOUT, 4096, numbers, (), observer=catcher)
    for number in range(max(SEQUENCES, CALLS)):
        prompt = [number % 100 + 3, *range(3, 18)]
        core.submit(Request(id=f"r{number}", prompt_ids=prompt, sampling=SamplingParams(max_tokens=9)), "router")
    return catcher.seen


def steps(observer: Observer, decodes: list[Sequence]) -> None:
    for number in range(CALLS):
        observer.planned(number, decodes, [])
        observer.settled(number, decodes, [])


def requests(observer: Observer, asked: list[Sequence]) -> None:
    """From arrival to end, with one prompt chunk; the decode steps cost what steps cost."""
    for number, sequence in enumerate(asked[:CALLS]):
        observer.submitted(sequence)
        observer.admitted(sequence)
        chunks = [(sequence, 16)]
        observer.planned(number, [], chunks)
        observer.settled(number, [], chunks)
        observer.sampled(sequence)
        observer.ended(sequence, "finished")


def journal(asked: list[Sequence]) -> None:
    kept = Journal()
    for sequence in asked[:CALLS]:
        kept.begin(sequence.request).spoke()


def microseconds(work: Callable[[], None]) -> float:
    """Of one call of CALLS."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best / CALLS * 1e6


if __name__ == "__main__":
    known = sequences()
    watcher = Watcher(WorkerMetrics())
    decoding = known[:SEQUENCES]
    print(f"a decode step of {SEQUENCES} sequences: {microseconds(lambda: steps(watcher, decoding)):.2f} us")
    print(f"a request with one prompt chunk: {microseconds(lambda: requests(watcher, known)):.2f} us")
    print(f"a request in the router's journal: {microseconds(lambda: journal(known)):.2f} us")
