"""Everything that needs GPUs, in one call: sections of the GPU scripts in order of importance, within a time budget.

    python scripts/gpu_all.py [SECTION ...] --kind one|two --budget 540 --out FOLDER [--list] [--loud]

Each section is a process of its own with a time limit; what no longer fits is left out and said. With `--kind two`,
sections that need one card run beside each other, one on each, tests beside tests and measurements beside measurements,
and sections that need two have the machine to themselves. With `--kind one` many of those put two workers on one card:
what they measure then is the control path, not the link, so their figures have no goals and say so. What a section
prints goes to its log; shown are its figures, what it says of its progress, and the end of the log when it failed. At
the end stands a table of all figures with their goals.

FOLDER gets three files, written after each section, so that whatever cuts this off leaves what was there by then:
figures.json (all figures), details.tar.gz (logs and JSON of all sections), log.txt (what was printed). `--list` says
what there is, and what it takes. `--device cpu` runs the sections that have a CPU way, with small models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpu_figures import Figure, read, table
from gpu_sections import SECTIONS, Section

ROOT = Path(__file__).resolve().parent.parent
SHOWN = re.compile(r"^(PASS|SHORT|NONE|----|==|--) |passed|failed|FAILED|^E  ")
END_S = 6.0  # what is kept for packing and the table
MOST_DETAILS = 15 << 20
ONE_CARD_TESTS = ("engine-tests", "transfer-tests", "apart-tests")
MARK = "SLIPSTREAM_GPU_SECTION"  # in the environment of all that a section starts


class Output:
    """What is printed, kept too."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "log.txt").open("w")
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)
            self._file.write(text + "\n")
            self._file.flush()


@dataclass
class Running:
    """A section at work on some cards."""

    section: Section
    cards: tuple[int, ...]
    folder: Path
    process: subprocess.Popen[str]
    began: float
    limit_s: float
    lines: list[str] = field(default_factory=list)

    @property
    def expected_end(self) -> float:
        return self.began + self.section.seconds


@dataclass
class Outcome:
    section: str
    seconds: float
    code: int | None  # None: its time was over
    figures: list[Figure]


class Driver:
    """Runs sections; `run` returns when all have ended, were left out, or the time is over."""

    def __init__(self, arguments: argparse.Namespace, output: Output, work: Path) -> None:
        self.arguments, self.output, self.work = arguments, output, work
        self.end = time.monotonic() + arguments.budget
        self.outcomes: list[Outcome] = []
        self.left_out: dict[str, str] = {}
        self._ended: queue.SimpleQueue[Running] = queue.SimpleQueue()
        self._cards = {0, 1} if arguments.kind == "two" else {0}

    @property
    def left_s(self) -> float:
        return self.end - END_S - time.monotonic()

    def run(self, sections: list[Section]) -> None:
        waiting, running = list(sections), []
        while waiting or running:
            while (chosen := self._next(waiting, running)) is not None:
                waiting.remove(chosen)
                running.append(self._start(chosen, running))
            if not running:
                break
            ended = self._ended.get()
            running.remove(ended)
            self._settle(ended)

    def _next(self, waiting: list[Section], running: list[Running]) -> Section | None:
        """The first that fits into the time and onto the free cards, without making a more important one wait."""
        free = len(self._cards) - sum(len(one.cards) for one in running)
        for section in list(waiting):
            reason = section.why_not(self.arguments.kind, self.arguments.device)
            if not reason and self.left_s < section.at_least:
                reason = f"it takes about {section.seconds:.0f} s, and {max(0, self.left_s):.0f} s are left"
            if reason:
                waiting.remove(section)
                self.left_out[section.name] = reason
                self.output.say(f"== {section.name} left out: {reason}")
        for section in waiting:
            if min(section.cards, len(self._cards)) > free:
                continue
            beside = [one for one in running if one.section.kind != section.kind]
            lasts = time.monotonic() + section.seconds
            if not beside and all(lasts <= one.expected_end + 15 for one in running):
                return section
        return None

    def _start(self, section: Section, running: list[Running]) -> Running:
        taken = {card for one in running for card in one.cards}
        cards = tuple(sorted(self._cards - taken))[: section.cards]
        folder = self.work / section.name
        folder.mkdir(parents=True, exist_ok=True)
        limit = min(section.limit, self.left_s)
        path = f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", MARK: f"{os.getpid()}-{section.name}"}
        if self.arguments.device != "cpu" and len(self._cards) > len(cards):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, cards))
        command = section.command(folder, limit, self.arguments.device, self.arguments.serve)
        self.output.say(f"== {section.name}: begins, at most {limit:.0f} s, {self.left_s:.0f} s left, cards {cards}")
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        started = Running(section, cards, folder, process, time.monotonic(), limit)
        threading.Thread(target=self._follow, args=(started,), daemon=True).start()
        return started

    def _follow(self, running: Running) -> None:
        """Keeps what the section prints, ends it when its time is over, and tells when it has ended."""
        timer = threading.Timer(running.limit_s, stop, (running.process, f"{os.getpid()}-{running.section.name}"))
        timer.start()
        assert running.process.stdout is not None
        with (running.folder / "log").open("w") as log:
            for line in running.process.stdout:
                log.write(line)
                log.flush()
                running.lines = [*running.lines[-39:], line.rstrip()]
                if self.arguments.loud or SHOWN.search(line):
                    self.output.say(f"   {running.section.name}| {line.rstrip()[:220]}")
        running.process.wait()
        timer.cancel()
        sweep(f"{os.getpid()}-{running.section.name}")
        self._ended.put(running)

    def _settle(self, ended: Running) -> None:
        took = time.monotonic() - ended.began
        code = ended.process.returncode
        timed_out = took >= ended.limit_s - 0.5
        found, passed = read(ended.folder), code == 0 and not timed_out
        if not found or not passed:
            found.append(Figure(ended.section.name, "ended well", float(passed), "", least=1.0))
        outcome = Outcome(ended.section.name, took, None if timed_out else code, found)
        self.outcomes.append(outcome)
        how = "its time was over" if timed_out else f"code {code}"
        self.output.say(f"== {ended.section.name}: {how} after {took:.0f} s")
        if code and not self.arguments.loud:
            self.output.say("\n".join(f"   {ended.section.name}> {line[:200]}" for line in ended.lines[-12:]))
        pack(self.arguments.out, self.work, self.outcomes, self.left_out)


def stop(process: subprocess.Popen[str], mark: str) -> None:
    """Asks a section to end, then ends it and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(4)
    sweep(mark)


def sweep(mark: str) -> None:
    """Kills what is left of a section: the processes that have its mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def pack(out: Path, work: Path, outcomes: list[Outcome], left_out: dict[str, str]) -> None:
    """The files of `out`, whole or as they were before."""
    figures = {
        "sections": [{**asdict(outcome), "figures": len(outcome.figures)} for outcome in outcomes],
        "left_out": left_out,
        "figures": [{**asdict(one), "verdict": one.verdict} for outcome in outcomes for one in outcome.figures],
    }
    replace(out / "figures.json", lambda path: path.write_text(json.dumps(figures, indent=1)))

    def details(path: Path) -> None:
        size = 0
        with tarfile.open(path, "w:gz", compresslevel=3) as archive:
            for file in sorted(work.rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0):
                if file.is_file() and file.suffix not in (".safetensors", ".so") and "kernels" not in file.parts:
                    size += file.stat().st_size
                    if size < 6 * MOST_DETAILS:
                        archive.add(file, file.relative_to(work))

    replace(out / "details.tar.gz", details)


def replace(path: Path, write: object) -> None:
    assert callable(write)
    beside = path.with_name(f".{path.name}")
    write(beside)
    beside.replace(path)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="in this order; default: all that fit")
    parser.add_argument("--kind", choices=("one", "two"), default="one", help="GPUs of the machine")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("gpu-all"))
    parser.add_argument("--skip", default="", help="sections that are left out, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--serve", default="", help="further flags of `serve` in the serving sections, in one string")
    parser.add_argument("--list", action="store_true", help="say what there is and what it takes")
    parser.add_argument("--loud", action="store_true", help="show all that sections print")
    arguments = parser.parse_args()
    known = [section.name for section in SECTIONS]
    if unknown := [
        name for name in [*arguments.sections, *filter(None, arguments.skip.split(","))] if name not in known
    ]:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(known)}")
    return arguments


def main() -> int:
    arguments = parsed()
    by_name = {section.name: section for section in SECTIONS}
    chosen = [by_name[name] for name in arguments.sections] or list(SECTIONS)
    chosen = [section for section in chosen if section.name not in arguments.skip.split(",")]
    if arguments.list:
        for section in (section.on(arguments.kind) for section in chosen):
            needs = section.why_not(arguments.kind, arguments.device)
            print(f"{section.name:18} {section.cards} cards, about {section.seconds:4.0f} s: {section.what}", end="")
            print(f" [not here: {needs}]" if needs else "")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    output = Output(arguments.out)
    with tempfile.TemporaryDirectory(prefix="slipstream-gpu-") as work:
        driver = Driver(arguments, output, Path(work))
        driver.run([section.on(arguments.kind) for section in chosen])
        pack(arguments.out, Path(work), driver.outcomes, driver.left_out)
    figures = [figure for outcome in driver.outcomes for figure in outcome.figures]
    tests = [outcome for outcome in driver.outcomes if outcome.section in ONE_CARD_TESTS]
    if len(tests) == len(ONE_CARD_TESTS):
        figures.append(Figure("tests", "tests/gpu that need one card", sum(o.seconds for o in tests), "s", most=300))
    output.say("\n" + table(figures))
    counts = [figure.verdict for figure in figures]
    output.say(", ".join(f"{kind} {counts.count(kind)}" for kind in ("PASS", "SHORT", "NONE", "----")))
    for name, reason in driver.left_out.items():
        output.say(f"left out: {name}: {reason}")
    return int(any(outcome.code != 0 for outcome in driver.outcomes))


if __name__ == "__main__":
    sys.exit(main())
