"""Measures how fast pages move between two processes of this machine: `python -m slipstream.bench.transfer`.

For every engine that exists here (slipstream's transports, the raw copy, the packages nixl and mooncake called
directly) two fresh processes are started, each with a pool; pages of each size, scattered on both sides, and one
contiguous block are moved in both directions. The receiver checks every byte, those that should not have changed too.
This process only conducts: it passes the greetings on, asks for one case at a time, and kills a pair that is silent.

The budget is shared out: what is left of it is divided among the engines that are left, transports before the copies
they are compared with, and each takes its cases from an even coverage of the sizes, in less time each where time is
short. Its first case is always measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from slipstream import outfile
from slipstream.bench.engines import ENGINES
from slipstream.bench.report import (
    TransferReport,
    TransferRow,
    conditions,
    load_transfer,
    print_transfer,
    size_text,
    write_json,
)
from slipstream.errors import ConfigError, MissingExtra, SlipstreamError
from slipstream.transfer.transports import missing_package

DEFAULT_SIZES = tuple(1 << shift for shift in range(10, 22))
SETUP_S = 120.0  # importing torch and compiling kernels included
BASELINES = ("raw", "memmove")  # copies inside one process, which transports are compared with
PHASES = 3  # of a case: batches one at a time, several under way, single pages
SHORTEST_CASE_S = 0.02
STARTING_S = 5.0  # of an engine's two processes, about
CHECKING_S = 0.5  # filling and comparing of a case, about
LEAST_CASES = 3  # what an engine of fewer counts for when the budget is shared out: starting it takes time too


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `memory` names either side's: "cpu", or a GPU by index, cuda:N or UUID."""

    engines: tuple[str, ...] = ()
    memory: tuple[str, str] = ("cpu", "cpu")
    sizes: tuple[int, ...] = DEFAULT_SIZES
    batch_bytes: int = 64 << 20
    directions: tuple[str, ...] = ("push", "pull")
    case_s: float = 0.5
    limit_s: float = 30.0
    budget_s: float = 3600.0
    programs: int = 64
    depth: int = 4
    block: bool = True


class EngineLost(SlipstreamError):
    """The pair of an engine died, hung or refused; the rest of its cases is not run."""


class Child:
    """One process of a pair, as this process speaks to it."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        mine, theirs = socket.socketpair()
        self._socket = mine
        self._pending = b""
        self.log = log
        with theirs, log.open("wb") as output:
            command = [sys.executable, "-m", "slipstream.bench.endpoint", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Raises EngineLost when the answer is an error, does not come in time, or the process has ended."""
        self.tell(verb, **arguments)
        return self.hear(verb, limit_s)

    def tell(self, verb: str, **arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended: the answer will not come either
            self._socket.sendall(json.dumps({"verb": verb, **arguments}).encode() + b"\n")

    def hear(self, verb: str, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                received = self._socket.recv(1 << 20)
            except TimeoutError:
                raise EngineLost(f"no answer to {verb} within {limit_s:.0f} s{self._words()}") from None
            except OSError:
                received = b""
            if not received:
                code = self.process.wait(5)
                raise EngineLost(f"its process ended with {code} during {verb}{self._words()}")
            self._pending += received
        line, self._pending = self._pending.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineLost(f"{verb}: {reply['error']}")
        return reply

    def _words(self) -> str:
        """The last line that it wrote, for the reason."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f" ({lines[-1][:200]})" if lines else ""

    def kill(self) -> None:
        self._socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def run(options: Options, folder: Path, say: Callable[[str], None] = print) -> TransferReport:
    """Runs all of it; `folder` takes the logs. Raises ConfigError when something is asked for that does not exist."""
    chosen = chosen_engines(options)
    for name in chosen:
        if name not in ENGINES:
            raise ConfigError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    for size in options.sizes:
        if size < 8 or size % 8 or size > options.batch_bytes:
            raise ConfigError(
                f"a page of {size} bytes: sizes are multiples of 8 up to the batch ({options.batch_bytes})"
            )
    report = TransferReport(
        conditions=conditions([Path(sys.executable).name, *sys.argv], device_names(options.memory)),
        memory=list(options.memory),
        batch_bytes=options.batch_bytes,
        notes=[],
        rows=[],
    )
    usable = []
    for name in chosen:
        if missing := missing_package(_package(name)):
            _note(f"{name} was not measured: {missing.message}", report, say)
        else:
            usable.append(name)
    usable.sort(key=lambda name: name in BASELINES)
    end = time.monotonic() + options.budget_s
    cases = {name: len(_cases(name, options)) * len(options.directions) for name in usable}
    for number, name in enumerate(usable):
        left = end - time.monotonic()
        if left <= 0:
            _note(f"{name} was not measured: the budget of {options.budget_s:g} s is used up", report, say)
            continue
        weights = [max(LEAST_CASES, len(_cases(other, options))) for other in usable[number:]]
        share = time.monotonic() + left * weights[0] / sum(weights)
        cases[name] = _measure_engine(name, options, folder, share, report, say)
    report.rows.sort(
        key=lambda row: (chosen.index(row.engine), row.contiguous, row.page, options.directions.index(row.direction))
    )
    _tell_budget(cases, options, report, say)
    if unmeasured(chosen, report):
        _note("warning: no transport was measured; the lines above say why.", report, say)
    return report


def _tell_budget(cases: dict[str, int], options: Options, report: TransferReport, say: Callable[[str], None]) -> None:
    """Once for all engines, where the budget has cut any of them short: the one that would do."""
    if not any("the budget of" in note for note in report.notes):
        return
    whole = sum(STARTING_S + number * (PHASES * options.case_s + CHECKING_S) for number in cases.values())
    hardly = "warning: " if len(report.rows) < sum(cases.values()) / 2 else ""
    _note(
        f"{hardly}{len(report.rows)} of {sum(cases.values())} cases were measured. About --budget "
        f"{10 * math.ceil(whole / 10)} is enough for all; --engines and --sizes ask for fewer.",
        report,
        say,
    )


def chosen_engines(options: Options) -> tuple[str, ...]:
    kind = memory_kind(options.memory)
    return options.engines or tuple(name for name, engine in ENGINES.items() if kind in engine.memory)


def unmeasured(chosen: Sequence[str], report: TransferReport) -> bool:
    """Whether transports were to be measured and none could be."""
    measured = {row.engine for row in report.rows if not row.problem}
    transports = [name for name in chosen if name not in BASELINES]
    return bool(transports) and measured.isdisjoint(transports)


def _note(text: str, report: TransferReport, say: Callable[[str], None]) -> None:
    report.notes.append(text)
    say(text)


def _package(name: str) -> str:
    """The package or transport of slipstream that an engine drives."""
    kind = ENGINES[name]
    return kind.driver if kind.driver != "slipstream" else kind.transport or name


def _measure_engine(
    name: str, options: Options, folder: Path, end: float, report: TransferReport, say: Callable[[str], None]
) -> int:
    """Returns how many cases the engine has, of which those that fit into its share are measured."""
    cases: list[tuple[Case, str]] = []
    environment = dict(ENGINES[name].environment)
    pair = [Child(environment, folder / f"{name}-{side}.log") for side in ("source", "target")]
    try:
        directions = _set_up(pair, name, options, report)
        cases = [
            (case, way) for case in spread(_cases(name, options)) for way in options.directions if way in directions
        ]
        for number, (case, direction) in enumerate(cases):
            left = end - time.monotonic()
            if number and left <= 0:
                text = f"{name}: {number} of {len(cases)} cases were measured in its share of the budget of"
                _note(f"{text} {options.budget_s:g} s", report, say)
                break
            seconds = min(options.case_s, max(SHORTEST_CASE_S, left / (len(cases) - number) / PHASES))
            row = _measure(pair, name, case, direction, seconds, options)
            report.rows.append(row)
            say(_line(row))
        for child in pair:
            child.ask("end", options.limit_s)
    except EngineLost as error:
        _note(f"{name}: {error.message}", report, say)
    finally:
        for child in pair:
            child.kill()
    return len(cases)


def _set_up(pair: list[Child], name: str, options: Options, report: TransferReport) -> list[str]:
    size = pool_bytes(options)
    for child, memory in zip(pair, options.memory, strict=True):
        child.tell("make", engine=name, memory=memory, bytes=size, programs=options.programs, depth=options.depth)
    hellos = [child.hear("make", SETUP_S) for child in pair]
    for child, other in ((pair[0], hellos[1]), (pair[1], hellos[0])):
        child.ask("meet", options.limit_s, hello=other["hello"])
    connected = pair[0].ask("connect", SETUP_S)
    costs = ", ".join(f"{what} {value:.4g}" for what, value in connected["costs"].items())
    spent = f"set up in {hellos[0]['seconds']:.2f} s, connected in {connected['seconds']:.3f} s"
    report.notes.append(f"{name}: {spent} ({costs})" if costs else f"{name}: {spent}")
    return hellos[0]["directions"]


class Case(msgspec.Struct, frozen=True):
    page: int
    pages: int
    contiguous: bool


def _cases(name: str, options: Options) -> list[Case]:
    scattered = [Case(size, options.batch_bytes // size, False) for size in options.sizes]
    block = [Case(options.batch_bytes, 1, True)] if options.block else []
    return block if name == "raw" else [*scattered, *block]


def spread(cases: Sequence[Case]) -> list[Case]:
    """The same cases in an order whose every beginning covers them evenly: both ends, the middle, the quarters..."""
    if len(cases) < 3:
        return list(reversed(cases))
    found, gaps = [len(cases) - 1, 0], [(0, len(cases) - 1)]
    for first, last in gaps:  # which grows meanwhile
        middle = (first + last) // 2
        if first < middle < last:
            found.append(middle)
            gaps += [(first, middle), (middle, last)]
    return [cases[index] for index in found]


def pool_bytes(options: Options) -> int:
    """Twice the batch, so that pages lie scattered; whole pages of every size."""
    largest = max((*options.sizes, 4096))
    return -(-2 * options.batch_bytes // largest) * largest


def _measure(pair: list[Child], name: str, case: Case, direction: str, seconds: float, options: Options) -> TransferRow:
    source, target = pair
    giver, taker = (source, target) if direction == "push" else (target, source)
    seed = random.randrange(1 << 40)
    row = TransferRow(engine=name, page=case.page, pages=case.pages, contiguous=case.contiguous, direction=direction)
    giver.ask("fill", options.limit_s, seed=seed)
    taker.ask("poison", options.limit_s)
    before = target.ask("cpu", options.limit_s)["cpu"]
    batch = {"page": case.page, "pages": case.pages, "contiguous": case.contiguous}
    answer = source.ask("run", options.limit_s, direction=direction, mine=1, theirs=2, seconds=seconds, **batch)
    others = target.ask("cpu", options.limit_s)["cpu"] - before
    here, there = (2, 1) if direction == "push" else (1, 2)
    if name not in BASELINES or options.memory[0] != "cpu":  # there these stay inside one process
        row.problem = taker.ask("check", options.limit_s, here=here, there=there, seed=seed, **batch)["wrong"]
        row.verified = not row.problem
    answer["cpu_s_per_gb"] += others / (answer.pop("moved") / 1e9)
    for field, value in answer.items():
        setattr(row, field, value)
    return row


def _line(row: TransferRow) -> str:
    name = "one block" if row.contiguous else size_text(row.page)
    many = "" if row.gbps_many is None else f", {row.gbps_many:.4g} in flight"
    state = row.problem or ("verified" if row.verified else "not checked")
    return (
        f"{row.engine:13} {name:>9} {row.direction}  {row.gbps:8.4g} GB/s{many}, one page {row.p50_us:.1f} us "
        f"(p99 {row.p99_us:.1f}), CPU {row.cpu_s_per_gb:.4f} s/GB, {state}"
    )


def memory_kind(memory: Sequence[str]) -> str:
    kinds = {"cpu" if name == "cpu" else "cuda" for name in memory}
    if len(kinds) != 1:
        raise ConfigError(f"both sides must be of one kind, not {' and '.join(memory)}")
    return kinds.pop()


def device_names(memory: Sequence[str]) -> list[str]:
    if memory_kind(memory) == "cpu":
        return []
    from slipstream.transfer.cuda.runtime import Device

    return [Device(name).uuid for name in memory]


def default_memory() -> tuple[str, str]:
    """Two GPUs where there are two, one GPU twice where there is one, the host's memory otherwise."""
    try:
        from slipstream.transfer.cuda.runtime import Runtime

        count = len(Runtime().device_uuids())
    except MissingExtra:
        count = 0
    return ("cpu", "cpu") if count == 0 else ("cuda:0", f"cuda:{min(count - 1, 1)}")


def parse_size(text: str) -> int:
    """Bytes of "32K", "2M", "1G" or a number."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdigit():
        raise ConfigError(f"{text!r} is no size; write a number of bytes, or 32K, 2M, 1G")
    return int(digits) * factor


@click.command()
@click.argument("saved", type=click.Path(path_type=Path), required=False)
@click.option("--engines", default="", help="Comma-separated: " + ", ".join(ENGINES) + ". Default: all for the memory.")
@click.option("--memory", default="", help="SOURCE,TARGET, each cpu, cuda:N or a UUID. Default: two GPUs if there are.")
@click.option("--sizes", default="", help="Page sizes, such as 1K,32K,2M. Default: 1K to 2M.")
@click.option("--batch", default="", help="Bytes a batch. Default: 1G on GPUs, 64M on the host.")
@click.option("--directions", default="push,pull", show_default=True)
@click.option("--case-seconds", default=0.5, show_default=True, help="How long a case is repeated, roughly.")
@click.option("--limit", default=30.0, show_default=True, help="Seconds after which an engine is taken for hung.")
@click.option("--budget", default=3600.0, show_default=True, help="Seconds for everything, shared by all engines.")
@click.option("--programs", default=64, show_default=True, help="Thread blocks of the copy kernel of cuda_ipc.")
@click.option("--depth", default=4, show_default=True, help="Batches under way at once in the figure `in flight`.")
@click.option("--logs", type=click.Path(path_type=Path), default=None, help="Folder for the processes' output.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="Write the results here.")
@click.option("--plot", type=click.Path(path_type=Path), default=None, help="Draw the results here (PNG, SVG, PDF).")
def command(
    saved: Path | None,
    engines: str,
    memory: str,
    sizes: str,
    batch: str,
    directions: str,
    case_seconds: float,
    limit: float,
    budget: float,
    programs: int,
    depth: int,
    logs: Path | None,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Measure how fast pages move between two processes of this machine.

    With SAVED, a report of --json, nothing is measured: its table is shown again, and drawn with --plot.
    """
    import tempfile

    from slipstream.bench.plot import check_path
    from slipstream.bench.transfer_plot import plot_transfer

    console = outfile.terminal(140)
    if json_path:
        outfile.check(json_path)
    if plot:
        check_path(plot)
    if saved:
        report = load_transfer(saved)
        print_transfer(report, console)
        if plot:
            plot_transfer(report, plot)
        return
    sides = tuple(memory.split(",")) if memory else default_memory()
    if len(sides) != 2:
        raise ConfigError(f"--memory takes two sides, such as cpu,cpu or cuda:0,cuda:1, not {memory!r}")
    options = Options(
        engines=tuple(name for name in engines.split(",") if name),
        memory=(sides[0], sides[1]),
        sizes=tuple(parse_size(size) for size in sizes.split(",")) if sizes else DEFAULT_SIZES,
        batch_bytes=parse_size(batch) if batch else (64 << 20 if memory_kind(sides) == "cpu" else 1 << 30),
        directions=tuple(directions.split(",")),
        case_s=case_seconds,
        limit_s=limit,
        budget_s=budget,
        programs=programs,
        depth=depth,
    )
    with contextlib.ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        report = run(options, folder, lambda text: print(text, flush=True))
    print_transfer(report, console)
    if json_path:
        write_json(report, json_path)
    if plot:
        plot_transfer(report, plot)
    if unmeasured(chosen_engines(options), report):
        sys.exit(1)
