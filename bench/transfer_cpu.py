"""Measures page transfers between the memory of two processes of this machine: shm, tcp, a plain memcpy, and peers.

    python bench/transfer_cpu.py [--mib 128] [--repeat 5] [--json FILE] [--peer-python PYTHON]

Each engine gets two processes with a pool each. Every case moves the same bytes in pages of one size, scattered at
random on both sides, from the call to the notice that all is in place; the receiver then compares all of its pool with
what it has to be, untouched pages too. `memcpy` is a loop of memmoves over the same pages inside one process, the bound
for anything that copies once. nixl and mooncake are measured when they can be imported by PYTHON (by default this one).

Other work on the machine lowers the medians first, the best less, and hardly the processor seconds a GB, which count
both processes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

PAGES = [8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20]
SLACK = 2  # the pool is this many times what is moved
SMALL = 64 << 10


def pattern(seed: int, size: int) -> np.ndarray:
    return np.random.PCG64(seed).random_raw(size // 8).view(np.uint8)


def lists(seed: int, page: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and destination pages of a case: `size` bytes out of a pool of SLACK times that."""
    rng = np.random.default_rng(seed)
    pages, count = SLACK * size // page, size // page
    return rng.permutation(pages)[:count], rng.permutation(pages)[:count]


class Pool:
    """Memory of one process, also as a file descriptor, touched."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("bench")
        os.ftruncate(self.fd, size)
        self.array = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self.array[:] = 0
        self.address = int(self.array.ctypes.data)


# Engines: `Engine(pool, page)` in both processes; `describe` at the target, `attach(description)` at the source, which
# returns its own description for the target's `admit`; then `copy(source_pages, destination_pages)` blocks until done.


class Memcpy:
    """One process: the bound."""

    def __init__(self, pool: Pool, page: int) -> None:
        self.pool, self.page = pool, page

    def describe(self) -> bytes:
        return b""

    def admit(self, description: bytes) -> None: ...

    def attach(self, description: bytes, admit: Callable[[bytes], None]) -> None:
        self.target = Pool(len(self.pool.array))

    def copy(self, source: np.ndarray, destination: np.ndarray) -> None:
        page, move = self.page, ctypes.memmove
        origin = (source * page + self.pool.address).tolist()
        to = (destination * page + self.target.address).tolist()
        for a, b in zip(origin, to, strict=True):
            move(b, a, page)

    def close(self) -> None: ...


class Slipstream:
    """Through the transfer agent: page lists in, notice out."""

    transport = ""

    def __init__(self, pool: Pool, page: int) -> None:
        import queue

        from slipstream.config import TransferConfig
        from slipstream.kv.layout import KVLayout
        from slipstream.transfer.agent import TransferAgent
        from slipstream.transfer.transports.base import Region

        layout = KVLayout(page_tokens=16, layers=page // 128, kv_heads=1, head_dim=2, dtype="float16", total_kv_heads=1)
        assert layout.page_bytes == page
        size = len(pool.array)
        region = Region("cpu", pool.address, size, page, size // page, size, fd=pool.fd, array=pool.array)
        self.done: Any = queue.SimpleQueue()
        self.agent = TransferAgent(
            region,
            layout,
            TransferConfig(transport=self.transport),  # type: ignore[arg-type]
            on_done=lambda job, error: self.done.put(error),
        )

    def describe(self) -> bytes:
        import msgspec

        return msgspec.msgpack.encode(self.agent.exports())

    def admit(self, description: bytes) -> None:
        self.agent.admit("source", [_exports(description)])

    def attach(self, description: bytes, admit: Callable[[bytes], None]) -> None:
        admit(self.describe())
        self.agent.connect("target", [_exports(description)])

    def copy(self, source: np.ndarray, destination: np.ndarray) -> None:
        from slipstream.transfer.agent import CopyJob

        self.agent.submit(CopyJob("target", 1, source, destination))
        error = self.done.get()
        assert error is None, error

    def close(self) -> None:
        self.agent.close()


def _exports(description: bytes) -> Any:
    import msgspec

    from slipstream.transfer.transports.base import Exports

    return msgspec.msgpack.decode(description, type=Exports)


class Shm(Slipstream):
    transport = "shm"


class Tcp(Slipstream):
    transport = "tcp"


class Nixl:
    """The nixl package over UCX, one transfer a batch. `tls` limits UCX to that transport."""

    tls = ""

    def __init__(self, pool: Pool, page: int) -> None:
        if self.tls:
            os.environ["UCX_TLS"] = self.tls
        api = _nixl()
        self.pool, self.page = pool, page
        self.agent = api.nixl_agent(
            f"agent-{os.getpid()}", api.nixl_agent_config(backends=["UCX"], enable_prog_thread=True)
        )
        self.agent.register_memory([(pool.address, len(pool.array), 0, "pool")], "DRAM")

    def describe(self) -> bytes:
        name = self.agent.name.encode()
        return self.pool.address.to_bytes(8, "little") + self.agent.get_agent_metadata() + b"|" + name

    def admit(self, description: bytes) -> None:
        self.agent.add_remote_agent(description[8:].rpartition(b"|")[0])

    def attach(self, description: bytes, admit: Callable[[bytes], None]) -> None:
        admit(self.describe())
        metadata, _, name = description[8:].rpartition(b"|")
        self.agent.add_remote_agent(metadata)
        peer = name.decode()
        self.agent.make_connection(peer)
        self.lists = [
            self.agent.prep_xfer_dlist(who, self._descriptors(address), "DRAM")
            for who, address in (
                ("NIXL_INIT_AGENT", self.pool.address),
                (peer, int.from_bytes(description[:8], "little")),
            )
        ]

    def _descriptors(self, address: int) -> np.ndarray:
        count = len(self.pool.array) // self.page
        table = np.zeros((count, 3), np.uint64)
        table[:, 0] = address + np.arange(count, dtype=np.uint64) * self.page
        table[:, 1] = self.page
        return table

    def copy(self, source: np.ndarray, destination: np.ndarray) -> None:
        origin, to = source.astype(np.int32), destination.astype(np.int32)
        handle = self.agent.make_prepped_xfer("WRITE", self.lists[0], origin, self.lists[1], to, b"")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)

    def close(self) -> None: ...


class NixlTcp(Nixl):
    tls = "tcp"


def _nixl() -> Any:
    import importlib

    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("nixl")


class MooncakeTcp:
    """The mooncake package over TCP, in calls of 1,000 pages (its queue takes no more than about 2,000)."""

    def __init__(self, pool: Pool, page: int) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self.pool, self.page = pool, page
        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self.engine.register_memory(pool.address, len(pool.array)) == 0

    def describe(self) -> bytes:
        return json.dumps([self.engine.get_rpc_port(), self.pool.address]).encode()

    def admit(self, description: bytes) -> None: ...

    def attach(self, description: bytes, admit: Callable[[bytes], None]) -> None:
        port, self.remote = json.loads(description)
        self.peer = f"127.0.0.1:{port}"

    def copy(self, source: np.ndarray, destination: np.ndarray) -> None:
        origin = (source * self.page + self.pool.address).tolist()
        to = (destination * self.page + self.remote).tolist()
        for at in range(0, len(origin), 1000):
            part = slice(at, at + 1000)
            sizes = [self.page] * len(origin[part])
            assert self.engine.batch_transfer_sync_write(self.peer, origin[part], to[part], sizes) == 0

    def close(self) -> None: ...


ENGINES: dict[str, Any] = {
    "memcpy": Memcpy,
    "shm": Shm,
    "tcp": Tcp,
    "nixl": Nixl,
    "nixl tcp": NixlTcp,
    "mooncake tcp": MooncakeTcp,
}
PEERS = ("nixl", "nixl tcp", "mooncake tcp")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(connection: Connection, engine: str, page: int, size: int) -> None:
    """The target's process."""
    pool = Pool(SLACK * size)
    target = ENGINES[engine](pool, page)
    connection.send(target.describe())
    while True:
        order, argument = connection.recv()
        if order == "admit":
            target.admit(argument)
        elif order == "cpu":
            connection.send(cpu_seconds())
            continue
        elif order == "check":
            seed, count = argument
            expected = np.zeros_like(pool.array).reshape(-1, page)
            origin, to = lists(page, page, size)
            expected[to[:count]] = pattern(seed, len(pool.array)).reshape(-1, page)[origin[:count]]
            connection.send(bool(np.array_equal(pool.array.reshape(-1, page), expected)))
            continue
        elif order == "end":
            target.close()
            connection.send(None)
            return
        connection.send(None)


def drive(connection: Connection, engine: str, page: int, size: int, repeat: int) -> dict[str, float]:
    """The source's process: one engine, one page size."""

    def ask(order: str, argument: Any = None) -> Any:
        connection.send((order, argument))
        return connection.recv()

    pool = Pool(SLACK * size)
    pool.array[:] = pattern(page, len(pool.array))
    source = ENGINES[engine](pool, page)
    description = connection.recv()
    source.attach(description, lambda mine: ask("admit", mine))
    origin, to = lists(page, page, size)
    source.copy(origin, to)  # touches all that is mapped
    seconds: list[float] = []
    before = cpu_seconds() + ask("cpu")
    for _ in range(repeat):
        started = time.perf_counter()
        source.copy(origin, to)
        seconds.append(time.perf_counter() - started)
    used = cpu_seconds() + ask("cpu") - before
    few = max(1, SMALL // page)
    small: list[float] = []
    for _ in range(50):
        started = time.perf_counter()
        source.copy(origin[:few], to[:few])
        small.append(time.perf_counter() - started)
    if engine == "memcpy":
        right = bool((source.target.array.reshape(-1, page)[to] == pool.array.reshape(-1, page)[origin]).all())
    else:
        right = ask("check", (page, len(to)))
    ask("end")
    source.close()
    moved = size // page * page
    return {
        "gb_per_s": moved / statistics.median(seconds) / 1e9,
        "best_gb_per_s": moved / min(seconds) / 1e9,
        "cpu_s_per_gb": used / (repeat * moved / 1e9),
        "small_us": statistics.median(small) * 1e6,
        "verified": right,
    }


def measure(python: str, engine: str, page: int, size: int, repeat: int) -> dict[str, Any]:
    """Starts both processes of one case and gives what the source found, or why there is nothing."""
    ours, theirs = socket.socketpair()
    ends = [ours, theirs]
    common = [python, __file__, "--engine", engine, "--page", str(page), "--bytes", str(size), "--repeat", str(repeat)]
    processes = [
        subprocess.Popen(
            [*common, "--role", role, "--fd", str(end.fileno())],
            pass_fds=[end.fileno()],
            stdout=subprocess.PIPE if role == "source" else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, end in zip(("target", "source"), ends, strict=True)
    ]
    for end in ends:
        end.close()
    try:
        out, complaint = processes[1].communicate(timeout=120)
    except subprocess.TimeoutExpired:
        return {"error": "took more than 120 s"}
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    words = complaint.strip().splitlines()
    return {"error": words[-1] if words else f"ended with status {processes[1].returncode}"}


def conditions() -> dict[str, Any]:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def name_of(page: int) -> str:
    return f"{page >> 20} MiB" if page >= 1 << 20 else f"{page >> 10} KiB"


def report(engines: Sequence[str], pages: Sequence[int], run: Callable[[str, int], dict[str, Any]]) -> list[Any]:
    """Runs and prints page size by page size, so that the engines of a row meet the same conditions."""
    rows: list[Any] = []
    print("GB/s, median and best (processor seconds a GB; median microseconds for 64 KiB)")
    print("page".ljust(9) + "".join(engine.rjust(24) for engine in engines))
    for page in pages:
        cells: list[str] = []
        for engine in engines:
            found = run(engine, page)
            rows.append({"engine": engine, "page": page, **found})
            if "error" in found:
                cells.append("-")
            elif not found["verified"]:
                cells.append("WRONG BYTES")
            else:
                cells.append("{gb_per_s:.2f} {best_gb_per_s:.2f} ({cpu_s_per_gb:.2f}; {small_us:.0f})".format(**found))
        print(name_of(page).ljust(9) + "".join(cell.rjust(24) for cell in cells), flush=True)
    for engine in engines:
        errors = {row["error"] for row in rows if row["engine"] == engine and "error" in row}
        for error in errors:
            print(f"{engine}: {error}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="what each case moves")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has nixl and mooncake")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--pages", default=",".join(map(str, PAGES)), help="page sizes in bytes")
    for hidden in ("--role", "--engine"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--fd", "--page", "--bytes"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "target":
        serve(Connection(args.fd), args.engine, args.page, args.bytes)
    elif args.role == "source":
        print(json.dumps(drive(Connection(args.fd), args.engine, args.page, args.bytes, args.repeat)), flush=True)
    else:
        here = conditions()
        print(", ".join(f"{key} {value}" for key, value in here.items()))
        rows = report(
            args.engines.split(","),
            [int(page) for page in args.pages.split(",")],
            lambda engine, page: measure(
                args.peer_python if engine in PEERS else sys.executable, engine, page, args.mib << 20, args.repeat
            ),
        )
        if args.json:
            args.json.write_text(json.dumps({"conditions": here, "rows": rows}, indent=1))
        if not all(row.get("verified", True) for row in rows):
            raise SystemExit("wrong bytes arrived")


if __name__ == "__main__":
    main()
