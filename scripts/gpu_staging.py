"""What shm and tcp make of GPU memory, on a machine with GPUs: correctness first, then rates.

    python scripts/gpu_staging.py [STEP ...] [--out FOLDER] [--budget SECONDS]

Steps: tests, table (bench transfer of both, contents verified), slots (shm by number and size of its slots), streams
(tcp by number of streams). Without a step: all. Results are printed as they come. Needs torch, triton, cuda-bindings,
and two GPUs for a figure that means something; `--memory cpu,cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("tests", "table", "slots", "streams")
SLOTS = ((8, 4), (8, 8), (8, 16), (4, 32))  # number, MiB
STREAMS = (4, 8, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path("gpu-staging"))
    parser.add_argument("--budget", type=float, default=300.0, help="seconds; later steps are left out or cut short")
    parser.add_argument("--memory", default="cuda:0,cuda:1")
    parser.add_argument("--batch-mib", type=int, default=512)
    parser.add_argument("--endpoint", nargs=4, metavar=("FD", "SLOTS", "MIB", "STREAMS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.endpoint:
        return endpoint(*map(int, arguments.endpoint))
    unknown = set(arguments.steps) - set(STEPS)
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.budget
    failed = 0
    for step in arguments.steps or STEPS:
        left = end - time.monotonic()
        print(f"== {step} ({left:.0f} s left)", flush=True)
        if left < 8:
            continue
        began = time.monotonic()
        if step == "tests":
            command = [sys.executable, "-m", "pytest", "tests/gpu/test_staging.py", "-q", "-p", "no:cacheprovider"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                failed += int(subprocess.run(command, cwd=ROOT, timeout=left).returncode != 0)
        else:
            failed += measure(step, arguments, end)
        print(f"== {step} took {time.monotonic() - began:.1f} s", flush=True)
    return failed


def measure(step: str, arguments: argparse.Namespace, end: float) -> int:
    """Runs the cases of a step; how many went wrong."""
    from slipstream.bench import transfer

    source, target = arguments.memory.split(",")
    sizes = (8 << 10, 32 << 10, 128 << 10, 1 << 20) if step == "table" else (8 << 10, 128 << 10, 1 << 20)
    cases = {
        "table": [("shm", 8, 16, 4), ("tcp", 8, 16, 4)],
        "slots": [("shm", number, mib, 4) for number, mib in SLOTS],
        "streams": [("tcp", 8, 16, streams) for streams in STREAMS],
    }[step]
    wrong = 0
    for engine, slots, mib, streams in cases:
        left = end - time.monotonic()
        if left < 8:
            print("no time left", flush=True)
            break
        print(f"-- {engine}, {slots} slots of {mib} MiB, {streams} streams", flush=True)
        options = transfer.Options(
            engines=(engine,),
            memory=(source, target),
            sizes=sizes,
            batch_bytes=arguments.batch_mib << 20,
            directions=("push",),
            case_s=0.3,
            limit_s=20,
            budget_s=left - 3,
        )
        transfer.Child = child_class(slots, mib, streams)  # type: ignore[misc]
        report = transfer.run(options, arguments.out)
        print("\n".join(note for note in report.notes if "was not" not in note), flush=True)
        wrong += sum(bool(row.problem) or not row.verified for row in report.rows) + (not report.rows)
    return wrong


def child_class(slots: int, mib: int, streams: int) -> type:
    """bench transfer's child, with other slots and streams: started through `endpoint` below."""
    from slipstream.bench import transfer

    class Child(transfer.Child):
        def __init__(self, environment: dict[str, str], log: Path) -> None:
            mine, theirs = socket.socketpair()
            self._socket, self._pending, self.log = mine, b"", log
            with theirs, log.open("wb") as output:
                command = [sys.executable, __file__, "--endpoint", str(theirs.fileno())]
                self.process = subprocess.Popen(
                    [*command, str(slots), str(mib), str(streams)],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )

    return Child


def endpoint(fd: int, slots: int, mib: int, streams: int) -> int:
    """One of the two processes of a measurement."""
    import logging

    import msgspec

    from slipstream.bench import endpoint
    from slipstream.transfer.transports import shm, tcp
    from slipstream.transfer.transports.base import Context
    from slipstream.transfer.transports.shm_ring import RingShape

    logging.basicConfig(level=logging.INFO)

    def make_shm(context: Context) -> shm.ShmTransport:
        return shm.ShmTransport(context, RingShape(slots=slots, slot_bytes=mib << 20))

    def make_tcp(context: Context) -> tcp.TcpTransport:
        config = msgspec.structs.replace(context.config, tcp_streams=streams)
        return tcp.TcpTransport(Context(context.region, config, context.agent, context.host, context.neighbours))

    shm.create, tcp.create = make_shm, make_tcp
    sys.argv = [sys.argv[0], str(fd)]
    endpoint.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
