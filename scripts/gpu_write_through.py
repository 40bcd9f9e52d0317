"""Layer-wise write-through against copies: does it pay to store KV into the peer's pool where it is made?

    python scripts/gpu_write_through.py [--tokens 8192] [--chunk 2048] [--out FILE]

A load like the prefill of an 8B model (32 layers of its matrix products, one layer's weights for all) writes the KV of
each layer, 2 x 8 heads x 128 dimensions a token, into a paged pool on GPU 0, four ways:

    local     into its own pool alone
    through   the same kernel also stores into the mapped pool on GPU 1
    layers    into its own pool; behind each layer of a chunk its part of every page is copied (runs of 8 KiB)
    chunks    into its own pool; behind each chunk its pages are copied whole

Printed: how long the computation takes beside `local`, and how long after its end the last byte is in the peer's pool.
The peer's contents are compared with the own pool after each. Needs two GPUs, torch, triton, cuda-bindings.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LAYERS, HEADS, DIM, PAGE_TOKENS = 32, 8, 128, 16
HIDDEN, QKV, MLP = 4096, 6144, 14336
ROW = PAGE_TOKENS * DIM  # elements of one head, layer and K or V of a page
LAYER = 2 * ROW
HEAD = LAYERS * LAYER
PAGE = HEADS * HEAD


@triton.jit
def write_kv(
    qkv_at,
    table_at,
    here,
    there,
    layer,
    THROUGH: tl.constexpr,
    QKV: tl.constexpr,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    LAYER: tl.constexpr,
    HEAD: tl.constexpr,
):
    # Program (page of the chunk, head, K or V): 16 tokens of 128 dimensions, 4 KiB side by side in the page.
    page, head, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, dim = tl.arange(0, TOKENS), tl.arange(0, DIM)
    column = FIRST + side * HEADS * DIM + head * DIM + dim
    data = tl.load(qkv_at + (page * TOKENS + token)[:, None] * QKV + column[None, :])
    slot = tl.load(table_at + page).to(tl.int64)
    place = slot * HEADS * HEAD + head * HEAD + layer * LAYER + side * TOKENS * DIM
    places = place + token[:, None] * DIM + dim[None, :]
    tl.store(tl.multiple_of(here.to(tl.pointer_type(tl.bfloat16)) + places, (1, 16)), data)
    if THROUGH:
        tl.store(tl.multiple_of(there.to(tl.pointer_type(tl.bfloat16)) + places, (1, 16)), data)


class Load:
    """The computation, the pools, and a copier between them."""

    def __init__(self, tokens: int, chunk: int) -> None:
        from slipstream.transfer.cuda.copier import Copier
        from slipstream.transfer.cuda.memory import DeviceMemory
        from slipstream.transfer.cuda.runtime import Device

        self.chunk, self.chunks, self.pages = chunk, tokens // chunk, tokens // PAGE_TOKENS
        self.devices = [Device(0), Device(min(1, torch.cuda.device_count() - 1))]
        self.memories = [DeviceMemory(device, self.pages, 2 * PAGE, 0) for device in self.devices]
        self.devices[0].use()
        reason = self.devices[0].reach_peer(self.devices[1].uuid)
        if reason:
            raise SystemExit(reason)
        torch.cuda.set_device(0)
        self.pools = [
            torch.as_tensor(memory, device=f"cuda:{device.index}")[: self.pages * 2 * PAGE].view(torch.bfloat16)
            for memory, device in zip(self.memories, self.devices, strict=True)
        ]
        self.copier = Copier(self.devices[0])
        scratch = self.memories[1].address
        self.costs = self.copier.measure(
            self.memories[0].address, self.memories[0].region.bytes, scratch, self.memories[0].region.bytes, _clock
        )
        self.stream = torch.cuda.Stream(0)
        table = np.random.default_rng(1).permutation(self.pages)
        self.slots = table.reshape(self.chunks, -1).astype(np.int64)
        self.tables = torch.as_tensor(self.slots.astype(np.int32), device="cuda:0")
        scale = HIDDEN**-0.5
        shapes = ((HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN))
        self.weights = [torch.randn(shape, device="cuda:0", dtype=torch.bfloat16) * scale for shape in shapes]
        self.hidden = torch.randn(chunk, HIDDEN, device="cuda:0", dtype=torch.bfloat16)

    def layer(self, hidden: Any, chunk: int, layer: int, through: bool) -> Any:
        qkv_weight, out, up, down = self.weights
        qkv = hidden @ qkv_weight
        grid = (self.chunk // PAGE_TOKENS, HEADS, 2)
        addresses = (self.memories[0].address, self.memories[1].address)
        write_kv[grid](  # pyright: ignore[reportIndexIssue]
            qkv, self.tables[chunk], *addresses, layer, through, QKV, HIDDEN, PAGE_TOKENS, DIM, HEADS, LAYER, HEAD
        )
        hidden = hidden + qkv[:, :HIDDEN] @ out
        gate, value = (hidden @ up).chunk(2, dim=1)
        return torch.nn.functional.rms_norm(hidden + (torch.nn.functional.silu(gate) * value) @ down, (HIDDEN,))

    def copy(self, chunk: int, layer: int | None) -> Any:
        """Queues the copy of a chunk's pages, or of one layer of them, behind what the stream has to do by now."""
        from slipstream.transfer.copies import merged
        from slipstream.transfer.cuda.plan import survey
        from slipstream.transfer.transports.base import Runs

        pages = np.sort(self.slots[chunk]) * 2 * PAGE
        if layer is None:
            offsets, length = pages, 2 * PAGE
        else:
            parts = np.arange(HEADS, dtype=np.int64) * 2 * HEAD + layer * 2 * LAYER
            offsets, length = (pages[:, None] + parts).reshape(-1), 2 * LAYER
        runs = merged(Runs(offsets, offsets, np.full(len(offsets), length, np.int64)))
        size = self.memories[0].region.bytes
        event = torch.cuda.Event()
        event.record(self.stream)
        ends = self.memories[0].address, self.memories[1].address
        copy = self.copier.start(*ends, runs, survey(runs, size, size), self.costs, event.cuda_event)
        return copy, event

    def once(self, way: str) -> tuple[float, float]:
        """(milliseconds of the computation, of what comes after it)."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copies = []
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host gets ahead
            begin.record()
            for chunk in range(self.chunks):
                hidden = self.hidden
                for layer in range(LAYERS):
                    hidden = self.layer(hidden, chunk, layer, way == "through")
                    if way == "layers":
                        copies.append(self.copy(chunk, layer))
                if way == "chunks":
                    copies.append(self.copy(chunk, None))
            end.record()
        lasts = []
        for copy, _ in copies:
            last = torch.cuda.Event(enable_timing=True)
            last.record(torch.cuda.ExternalStream(copy.lane.stream, device=0))
            lasts.append(last)
        for copy, _ in copies:
            self.copier.wait(copy)
        torch.cuda.synchronize()
        after = max((end.elapsed_time(last) for last in lasts), default=0.0)
        return begin.elapsed_time(end), max(after, 0.0)

    def right(self) -> bool:
        here, there = (pool.view(torch.int16) for pool in self.pools)
        same = torch.equal(here.to(there.device), there)
        return same and bool((here != 0).any())


def _clock() -> float:
    import time

    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    load = Load(arguments.tokens, arguments.chunk)
    print(load.costs, flush=True)
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ("local", "through", "layers", "chunks")}
    wrong = set()
    for number in range(arguments.repeat + 1):
        for way, found in taken.items():  # in turn, since clocks wander
            load.pools[1].zero_()
            torch.cuda.synchronize()
            times = load.once(way)
            if way != "local" and not load.right():
                wrong.add(way)
            if number:
                found.append(times)
    alone = statistics.median(compute for compute, _ in taken["local"])
    results = []
    for way, found in taken.items():
        compute, after = (statistics.median(column) for column in zip(*found, strict=True))
        results.append(
            {
                "way": way,
                "tokens": arguments.tokens,
                "chunk": arguments.chunk,
                "computation_ms": round(compute, 3),
                "slower_percent": round(100 * (compute / alone - 1), 2),
                "after_ms": round(after, 3),
                "contents": "not compared" if way == "local" else "WRONG" if way in wrong else "equal",
            }
        )
        print(json.dumps(results[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    main()
