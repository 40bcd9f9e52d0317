"""Results of benchmarks: their form, the conditions under which they were made, the table and the file."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from slipstream import outfile
from slipstream.errors import ConfigError
from slipstream.version import __version__

ABOVE_RAW = (
    "of raw: GB/s over that of one call that copies the whole batch in one piece. More than 100 % is no mistake: that "
    "is one way of copying, not a bound, and other work on the machine slows it as it slows the others."
)
PACKAGES = ("torch", "triton", "cuda-bindings", "numpy", "nixl-cu13", "nixl-cu12", "mooncake-transfer-engine-cuda13")


class Conditions(msgspec.Struct, kw_only=True):
    """Where and how a benchmark ran; printed beside every figure."""

    command: str
    when: str
    version: str
    cpu: str
    cores: int
    kernel: str
    python: str
    packages: dict[str, str]
    devices: list[str]


class TransferRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One engine, page size and direction. Rates in GB/s (10^9 bytes), times in microseconds.

    `gbps` is the median of single batches, from the lists on the host until all bytes are in place; `gbps_many` is
    with several batches under way; latency is that of a single page. `problem` says why there are no figures.
    """

    engine: str
    page: int
    pages: int
    contiguous: bool
    direction: str
    gbps: float = 0.0
    gbps_best: float = 0.0
    gbps_many: float | None = None
    p50_us: float = 0.0
    p99_us: float = 0.0
    cpu_s_per_gb: float = 0.0
    batches: int = 0
    first_s: float = 0.0
    verified: bool = False
    problem: str = ""


class TransferReport(msgspec.Struct, kw_only=True):
    conditions: Conditions
    memory: list[str]
    batch_bytes: int
    notes: list[str]
    rows: list[TransferRow]


def conditions(command: Sequence[str], devices: Sequence[str]) -> Conditions:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Conditions(
        command=" ".join(command),
        when=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        version=__version__,
        cpu=_cpu_name(),
        cores=os.cpu_count() or 0,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=found,
        devices=list(devices),
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def size_text(size: int) -> str:
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def transfer_table(report: TransferReport) -> Table:
    """Rows by page size, engines side by side below each other; the share is of the raw copy in the same direction."""
    where = " to ".join(report.memory)
    title = (
        f"{size_text(report.batch_bytes)} a batch, {where}; {report.conditions.cpu}, {report.conditions.cores} cores"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("page", "direction", "engine"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "in flight", "of raw", "p50 us", "p99 us", "CPU s/GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("contents")
    raw = _raw_rates(report)
    last = None
    for row in sorted(report.rows, key=lambda row: (row.contiguous, row.page, row.direction)):
        key = (row.page, row.direction)
        if last is not None and key != last:
            table.add_section()
        last = key
        name = "one block" if row.contiguous else size_text(row.page)
        if row.problem:
            table.add_row(name, row.direction, row.engine, *[""] * 6, f"[red]{row.problem}")
            continue
        share = f"{100 * row.gbps / raw[row.direction]:.0f} %" if raw.get(row.direction) else ""
        many = "" if row.gbps_many is None else f"{row.gbps_many:.4g}"
        figures = [f"{row.gbps:.4g}", many, share, f"{row.p50_us:.1f}", f"{row.p99_us:.1f}", f"{row.cpu_s_per_gb:.4f}"]
        table.add_row(name, row.direction, row.engine, *figures, "verified" if row.verified else "not checked")
    return table


def _raw_rates(report: TransferReport) -> dict[str, float]:
    """GB/s of the raw copy, by direction."""
    return {row.direction: row.gbps for row in report.rows if row.engine == "raw" and not row.problem and row.gbps}


def print_transfer(report: TransferReport, console: Console) -> None:
    console.print(transfer_table(report))
    raw = _raw_rates(report)
    if any(row.gbps > raw.get(row.direction, float("inf")) for row in report.rows if row.engine != "raw"):
        console.print(ABOVE_RAW, highlight=False, markup=False, soft_wrap=True)
    for note in report.notes:
        console.print(note, highlight=False, markup=False)


def load_transfer(path: Path) -> TransferReport:
    """Raises ConfigError when the file is no report of `slipstream bench transfer`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TransferReport)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is no result of `slipstream bench transfer --json`: {error}") from None


def write_json(report: msgspec.Struct | list[Any], path: Path) -> None:
    """Says what it wrote. Raises ConfigError."""
    outfile.write(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n", "the results")
