"""What the ranks of a worker cost each other on a CPU: orders through the ring, sums through memory and by gloo.

    python bench/ranks.py

Prints microseconds: to encode and to decode a plan, from `put` until another process has the order (asleep before), the
processor time of both sides for it, and a sum of some sizes between two processes in either way.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from slipstream.engine.plan import StepPlan
from slipstream.ranks import codec
from slipstream.ranks.ring import RingReader, RingWriter
from slipstream.run.parallel import Meeting, MemoryGroup

SIZES = (256, 8192, 262144, 1 << 20)  # bytes
ORDERS, PAUSE_S = 300, 0.004
SUMS = 200


def plan(sequences: int, pages: int) -> StepPlan:
    return StepPlan(
        step=1,
        token_ids=np.arange(sequences),
        positions=np.arange(sequences),
        query_start=np.arange(sequences + 1),
        context_lens=np.full(sequences, 1000),
        block_tables=np.zeros((sequences, pages), dtype=np.int64),
        rows=np.arange(sequences),
        sample=np.ones(sequences, dtype=np.bool_),
    )


def microseconds(work: Callable[[], Any], count: int = 500) -> float:
    began = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - began) / count * 1e6


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def ring() -> None:
    for sequences, pages in ((1, 64), (64, 64), (256, 512)):
        made = plan(sequences, pages)
        parts = codec.encode_plan(made)
        order = b"".join(parts)
        encode, decode = (
            microseconds(lambda made=made: codec.encode_plan(made)),
            microseconds(lambda order=order: codec.decode(order)),
        )
        latency, writer_cpu, reader_cpu = travel(parts)
        print(
            f"plan of {sequences} sequences, {pages} pages ({len(order)} bytes): encode {encode:.0f}, "
            f"put {writer_cpu:.0f} (processor), arrives after {latency:.0f}, get {reader_cpu:.0f} (processor), "
            f"decode {decode:.0f} us"
        )


def travel(parts: list[bytes]) -> tuple[float, float, float]:
    """Of an order to a sleeping process: median microseconds from put to get, processor microseconds of both ends."""
    writer = RingWriter(1)
    there, here = os.pipe()
    fds = writer.fds(0)

    def read() -> None:
        reader = RingReader((os.dup(fds[0]), os.dup(fds[1])), 0, 1)
        spent = time.process_time()
        arrivals = []
        for _ in range(ORDERS):
            reader.get()
            arrivals.append(time.monotonic_ns())
        used = (time.process_time() - spent) / ORDERS * 1e6
        os.write(here, np.array([*arrivals, int(used)], dtype=np.int64).tobytes())

    child = in_child(read)
    time.sleep(0.1)
    sent, spent = [], 0.0
    for _ in range(ORDERS):
        began = time.thread_time()
        sent.append(time.monotonic_ns())
        writer.put(parts)
        spent += time.thread_time() - began
        time.sleep(PAUSE_S)
    *arrivals, used = np.frombuffer(os.read(there, 1 << 20), np.int64).tolist()
    os.waitpid(child, 0)
    writer.close()
    delays = [(arrived - began) / 1e3 for began, arrived in zip(sent, arrivals, strict=True)]
    return statistics.median(delays), spent / ORDERS * 1e6, used


def sums() -> None:
    meeting = Meeting(2)
    fds = [meeting.take(rank) for rank in range(2)]
    meeting.close()
    measure("gloo", gloo)
    measure("mapped memory", lambda rank: MemoryGroup(fds[rank], rank).reduce)


def gloo(rank: int) -> Callable[[torch.Tensor], Any]:
    from torch.distributed import ProcessGroupGloo, TCPStore

    wait = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", PORT, 2, rank == 0, wait, wait_for_workers=False)
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = wait
    group = ProcessGroupGloo(store, rank, 2, options)
    return lambda x: group.allreduce([x]).wait()


def measure(name: str, join: Callable[[int], Callable[[torch.Tensor], Any]]) -> None:
    def run(rank: int) -> None:
        reduce = join(rank)
        for size in SIZES:
            x = torch.ones(size // 4)
            reduce(x)
            times = sorted(microseconds(lambda x=x: reduce(x), 1) for _ in range(SUMS))
            if rank == 0:
                middle, late = times[SUMS // 2], times[SUMS * 9 // 10]
                print(
                    f"sum of {size} bytes over two ranks by {name}: median {middle:.0f}, p90 {late:.0f} us", flush=True
                )

    child = in_child(lambda: run(1))
    run(0)
    os.waitpid(child, 0)


PORT = 29_617

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, Python {sys.version[:6]}")
    ring()
    sums()
