"""Everything about KV transfer that only a machine with GPUs can show, in one go.

    python scripts/gpu_transfer.py [STEP ...] [--out FOLDER] [--budget SECONDS]

Steps: tests, machine (`slipstream topo --routes`, `doctor --active`), handoff (the whole stack), exposed (what of a
handoff is left behind the computation of its prompt), table (bench transfer of slipstream's engines), peers (the table
beside nixl and mooncake), packages (shm, tcp, and nixl and mooncake behind slipstream's transports), flight (64 small
batches under way), paced and interference (`gpu_interference.py`: handoffs at intervals alone; all), staging (to and
from pinned memory), kernel (shapes and programs of the copy kernel), engine (copy engine and kernel with batches in
flight), wakes (`wakes.py`), write (`gpu_write_through.py`). Without a step: all. Results are printed as they come and
written to FOLDER, figures with their goals to FOLDER/figures.jsonl (`gpu_transfer_goals.py` has these). Needs torch,
triton, cuda-bindings; two GPUs for most of it. `--memory cpu,cpu` tries the steps that have a CPU way. With one GPU, or
with `--one-card`, handoffs and tables are those of two processes that share it, and have no goals.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu_servers import gpus
from gpu_transfer_goals import judge

from slipstream.transfer.cuda.plan import CopyCosts

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
STEPS = (
    *("tests", "machine", "handoff", "exposed", "table", "peers", "packages", "flight", "paced", "interference"),
    *("staging", "kernel", "engine", "wakes", "write"),
)
PEERS = "raw,cuda_ipc,nixl-best,nixl-sgl,mooncake"
TRANSPORTS = "shm,tcp,transport-nixl,transport-mooncake"
HANDOFFS = "1024x1x30,8192x1x15,1024x64x3"  # tokens x under way x rounds
KERNEL_BYTES = GIB // 2
BULK_SHAPES = (  # warps, stages, bytes a stage, stages ahead
    (4, 4, 4096, 3),
    (4, 4, 4096, 2),
    (8, 4, 4096, 3),
    (4, 4, 8192, 3),
    (4, 8, 2048, 6),
    (2, 4, 8192, 3),
)
MACHINE = """
import subprocess, sys
for command in (["topo", "--routes"], ["doctor", "--active", "-v"]):
    print("--", *command, flush=True)
    code = subprocess.run([sys.executable, "-m", "slipstream", *command]).returncode
    print("--", *command, "ended with", code, flush=True)
    if code: sys.exit(code)
"""

KERNEL_ONLY, ENGINE_ONLY = CopyCosts(0.0, 0.0, 1.0, 1.0, 1.0), CopyCosts(1.0, 1.0, 0.0, 0.0, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path("gpu-transfer"))
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; later steps are left out or cut short")
    parser.add_argument(
        "--sizes", default="1K,4K,8K,32K,128K,512K,1M,2M", help="page sizes of the table and peers steps"
    )
    parser.add_argument("--engines", default="", help="engines of the peers step")
    parser.add_argument("--handoff", default=f"--cases {HANDOFFS}", help="options of the handoff step, in one string")
    parser.add_argument("--memory", default="", help="SOURCE,TARGET of handoffs and tables; cpu,cpu without GPUs")
    parser.add_argument("--one-card", action="store_true", help="both processes on the first GPU, unless --memory")
    parser.add_argument("--here", action="store_true", help="run one measuring step in this process")
    arguments = parser.parse_args()
    unknown = set(arguments.steps) - set(STEPS)
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.one_card |= not arguments.memory and gpus() == 1
    if arguments.one_card and not arguments.memory:
        arguments.memory = "cuda:0,cuda:0"
    if arguments.here:
        {"kernel": kernel, "engine": engine, "staging": staging}[arguments.steps[0]](str(arguments.out))
        return 0
    end = time.monotonic() + arguments.budget
    failed = 0
    for step in arguments.steps or STEPS:
        left = end - time.monotonic()
        print(f"== {step} ({left:.0f} s left)", flush=True)
        if left < 5:
            continue
        began = time.monotonic()
        failed += int(run_step(step, arguments, left) != 0)
        judge(step, arguments.out, arguments.one_card)
        print(f"== {step} took {time.monotonic() - began:.1f} s", flush=True)
    return failed


def run_step(step: str, arguments: argparse.Namespace, left: float) -> int:
    """Each step in a process of its own, so that a lost context ends that step alone."""
    bench = [sys.executable, "-m", "slipstream", "bench", "transfer", "--budget", f"{left - 5:.0f}"]
    kept = ["--logs", str(arguments.out), "--json", str(arguments.out / f"{step}.json")]
    kept += ["--memory", arguments.memory] if arguments.memory else []
    bench += kept
    handoff = [sys.executable, "-m", "slipstream", "bench", "handoff", *kept]
    if arguments.one_card:  # processes have a card by turns: a kernel that keeps one awake takes turns from the other
        handoff += ["--asleep"]
    interference = [sys.executable, "scripts/gpu_interference.py", "--out", str(arguments.out)]
    commands = {
        "tests": [
            sys.executable,
            "-m",
            "pytest",
            "tests/gpu/test_cuda_ipc.py",
            "tests/gpu/test_staging.py",
            "--maxfail=5",
            "-s",
            "-p",
            "no:cacheprovider",
        ],
        "table": [*bench, "--engines", "raw,cuda_ipc", "--sizes", arguments.sizes, "--case-seconds", "0.15"],
        "flight": [
            *bench,
            *("--engines", "cuda_ipc", "--batch", "16M", "--depth", "64"),
            *("--sizes", "8K,32K,128K,2M", "--case-seconds", "0.15"),
        ],
        "machine": [sys.executable, "-c", MACHINE],
        "handoff": [*handoff, *arguments.handoff.split()],
        "exposed": [*handoff, "--cases", "8192x1x8", "--chunk-tokens", "1024", "--compute-ms", "25"],
        "interference": interference,
        "paced": [*interference, "--paced"],
        "wakes": [sys.executable, "scripts/wakes.py"],
        "write": [sys.executable, "scripts/gpu_write_through.py", "--out", str(arguments.out / "write.jsonl")],
        "packages": [
            *bench,
            *("--engines", arguments.engines or TRANSPORTS, "--sizes", "32K,1M", "--depth", "2", "--limit", "60"),
            *("--case-seconds", "0.1", "--directions", "push"),
        ],
        "peers": [
            *bench,
            *("--limit", "60", "--engines", arguments.engines or PEERS),
            *("--sizes", arguments.sizes, "--case-seconds", "0.15"),
        ],
    }
    own = [sys.executable, __file__, step, "--here", "--out", str(arguments.out)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        return subprocess.run(commands.get(step, own), cwd=ROOT, env=environment, timeout=left).returncode
    except subprocess.TimeoutExpired:
        print(f"{step} was stopped after {left:.0f} s", flush=True)
        return 1


class Results:
    """Prints each result and appends it to a file."""

    def __init__(self, folder: str, name: str) -> None:
        self._file = (Path(folder) / f"{name}.jsonl").open("w")

    def add(self, **result: Any) -> None:
        line = json.dumps({key: float(f"{v:.5g}") if isinstance(v, float) else v for key, v in result.items()})
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


class Pools:
    """2 GiB on each of two GPUs of this process, reachable from the first, and a copier there."""

    def __init__(self, size: int = 2 * GIB) -> None:
        import torch

        from slipstream.transfer.cuda.memory import DeviceMemory
        from slipstream.transfer.cuda.runtime import Device

        self.torch = torch
        self.devices = [Device(0), Device(min(1, torch.cuda.device_count() - 1))]
        self.memories = [DeviceMemory(device, 1, size, 0) for device in self.devices]
        self.devices[0].use()
        reason = self.devices[0].reach_peer(self.devices[1].uuid)
        if reason:
            raise SystemExit(reason)
        self.size = size

    def view(self, side: int) -> Any:
        """The bytes of a pool as a tensor, filled with noise."""
        device = f"cuda:{self.devices[side].index}"
        self.torch.cuda.set_device(device)
        whole = self.torch.as_tensor(self.memories[side], device=device)[: self.size]
        whole.view(self.torch.int64).random_()
        return whole

    def runs(self, page: int, total: int = GIB) -> Any:
        from slipstream.transfer.transports.base import Runs

        places = [np.random.default_rng(seed).permutation(self.size // page)[: total // page] * page for seed in (1, 2)]
        return Runs(places[0], places[1], np.broadcast_to(np.int64(page), (total // page,)))


def kernel(folder: str) -> None:
    """GB/s of the kernels alone by their shape: lists ready on the GPU, time between events around the launches."""
    from slipstream.transfer.cuda.bulk import BulkShape
    from slipstream.transfer.cuda.launcher import CopySettings, KernelLauncher, Launch
    from slipstream.transfer.cuda.lists import kernel_lists
    from slipstream.transfer.cuda.plan import survey

    pools, results = Pools(), Results(folder, "kernel")
    torch, launcher = pools.torch, KernelLauncher(pools.devices[0])
    here, there = pools.memories[0].address, pools.memories[1].address
    views = [pools.view(side) for side in (0, 1)]
    torch.cuda.set_device(0)
    cases: dict[str, tuple[int, Any, list[Launch]]] = {}
    lists = []
    for page in (1024, 8192, 131072):
        runs = pools.runs(page, KERNEL_BYTES)
        for name, ends in (("push", (here, there)), ("pull", (there, here))):
            launches = []
            for part in kernel_lists(*ends, runs, survey(runs, pools.size, pools.size)):
                room = np.empty(part.bytes, np.uint8)
                part.write(room)
                lists.append(torch.as_tensor(room, device="cuda:0"))
                shape = len(part.runs.length), part.length, part.longest
                launches.append(Launch(*ends, lists[-1].data_ptr(), *shape))
            cases[f"{name} {page}"] = page, runs, launches
    counts = (2, 4, 8, 16, 32, 64, 132)
    shapes = [None] + [BulkShape(*shape) for shape in BULK_SHAPES]
    stream = torch.cuda.Stream(0)
    for shape in shapes:
        rates: dict[str, Any] = {}
        for case, (page, runs, batch) in cases.items():
            giver, taker = views if case.startswith("push") else views[::-1]
            taker.fill_(0)
            torch.cuda.synchronize(taker.device)
            settings = [CopySettings(programs=count, bulk=shape) for count in counts]
            rates[case] = [round(_kernel_rate(torch, launcher, batch, one, stream), 1) for one in settings]
            sent = giver.view(-1, page)[torch.as_tensor(runs.source // page, device=giver.device)]
            came = taker.view(-1, page)[torch.as_tensor(runs.destination // page, device=taker.device)]
            if not torch.equal(sent.to(taker.device), came):
                rates[case] = "WRONG CONTENTS"
        results.add(bulk=list(shape) if shape else None, programs=list(counts), **rates)


def engine(folder: str) -> None:
    """GB/s in flight: of the copy engine by length of the runs, of the kernel by its programs."""
    from slipstream.transfer.cuda.copier import Copier
    from slipstream.transfer.cuda.launcher import CopySettings
    from slipstream.transfer.cuda.plan import survey

    pools, results = Pools(), Results(folder, "engine")
    here, there = pools.memories[0].address, pools.memories[1].address
    copier = Copier(pools.devices[0], CopySettings())
    rates: dict[str, float] = {}
    for page in (128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, GIB):
        runs = pools.runs(page, min(GIB, 4096 * page))
        seen = survey(runs, pools.size, pools.size)
        for name, ends in (("push", (here, there)), ("pull", (there, here))):
            rates[f"{name} {page >> 10}K"] = round(_in_flight(copier, ends, runs, seen, ENGINE_ONLY), 1)
    copier.close()
    results.add(copy_engine=True, **rates)
    for programs in (32, 64, 132):
        copier = Copier(pools.devices[0], CopySettings(programs=programs))
        rates = {}
        for page in (1 << 10, 8 << 10, 128 << 10):
            runs = pools.runs(page)
            seen = survey(runs, pools.size, pools.size)
            for name, ends in (("push", (here, there)), ("pull", (there, here))):
                rates[f"{name} {page >> 10}K"] = round(_in_flight(copier, ends, runs, seen, KERNEL_ONLY), 1)
        copier.close()
        results.add(programs=programs, **rates)


def _in_flight(copier: Any, ends: tuple[int, int], runs: Any, seen: Any, costs: Any) -> float:
    copies = [copier.start(*ends, runs, seen, costs) for _ in range(3)]
    copier.wait(copies.pop(0))
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 0.06:
        copies.append(copier.start(*ends, runs, seen, costs))
        copier.wait(copies.pop(0))
        count += 1
    rate = count * seen.total / (time.perf_counter() - began) / 1e9
    for copy in copies:
        copier.wait(copy)
    return rate


def _kernel_rate(torch: Any, launcher: Any, launches: list[Any], settings: Any, stream: Any) -> float:
    best = 0.0
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # about half a millisecond, in which all launches are queued
            start.record()
            for launch in launches:
                launcher(launch, stream.cuda_stream, settings)
            end.record()
        end.synchronize()
        best = max(best, KERNEL_BYTES / start.elapsed_time(end) / 1e6)
    return best


def staging(folder: str) -> None:
    """GB/s of device memory through pinned pieces, by page size: out, in, and both at once in two threads."""
    from slipstream.transfer.copies import split
    from slipstream.transfer.staging import PIECE_RUNS, Staging

    pools, results = Pools(), Results(folder, "staging")
    region = pools.memories[0].region
    for slot in (1 << 20, 4 << 20, 16 << 20):
        stage = Staging(region, slots=4, slot_bytes=slot)
        for page in (8 << 10, 128 << 10, 1 << 20):
            runs = pools.runs(page, GIB // 2)
            began = time.perf_counter()
            moved = sum(len(piece) for _, piece in stage.out(runs))
            out = moved / (time.perf_counter() - began) / 1e9
            began = time.perf_counter()
            for piece in split(runs, slot, PIECE_RUNS):
                with stage.into(piece):
                    pass
            stage.flush()
            back = runs.total / (time.perf_counter() - began) / 1e9
            results.add(slot=slot, page=page, out_gbps=out, in_gbps=back)
        stage.close()


if __name__ == "__main__":
    sys.exit(main())
