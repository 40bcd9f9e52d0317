"""What the dashboard lays over the machine: workers in the devices they run on, and the ways of KV between them.

A way is a lane above the machine: from a source worker to all destinations that it reaches by one transport, as the
worker counts its bytes by transport. Groups carry data attributes (`worker`, `lane`, `transport`), by which the page
finds them to fill in states and rates without a new drawing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.topo.draw_canvas import Canvas, clean
from slipstream.topo.graph import Gpu, Machine

CHIP_H, CHIP_GAP = 20.0, 4.0
LANE_STEP, LANES_TOP = 28.0, 2.0
LABEL_W, LABEL_H = 150.0, 20.0
CPU_CHIP_W, CPU_COLUMNS, CPU_PAD = 118.0, 4, 10.0
MAX_LANES = 32


@dataclass(frozen=True)
class Placed:
    """A worker: `devices` as it names them (cpu, cuda:0, a GPU's UUID), `here` when it runs on the drawn machine."""

    name: str
    role: str
    devices: tuple[str, ...]
    host: str = ""
    here: bool = True


@dataclass(frozen=True)
class Handoff:
    """The way of KV from one worker to others by one transport."""

    source: str
    destinations: tuple[str, ...]
    transport: str


@dataclass(frozen=True)
class Overlay:
    """Workers and handoffs of a running cluster. Beyond 32 handoffs the rest is left to the table of routes."""

    workers: tuple[Placed, ...] = ()
    handoffs: tuple[Handoff, ...] = ()

    @property
    def lanes(self) -> tuple[Handoff, ...]:
        return self.handoffs[:MAX_LANES]

    @property
    def lanes_height(self) -> float:
        return LANES_TOP + LANE_STEP * len(self.lanes) + 10 if self.lanes else 0.0

    def on_gpu(self, gpu: Gpu) -> list[Placed]:
        return [w for w in self.workers if w.here and any(_names(device, gpu) for device in w.devices)]

    def on_cpu(self, machine: Machine) -> list[Placed]:
        """Workers of this machine on no GPU that is drawn."""
        on_gpus = {worker.name for gpu in machine.gpus for worker in self.on_gpu(gpu)}
        return [worker for worker in self.workers if worker.here and worker.name not in on_gpus]

    def elsewhere(self) -> dict[str, list[Placed]]:
        """Workers of other hosts, by host."""
        found: dict[str, list[Placed]] = {}
        for worker in self.workers:
            if not worker.here:
                found.setdefault(worker.host or "not known", []).append(worker)
        return found


def _names(device: str, gpu: Gpu) -> bool:
    kind, _, number = device.partition(":")
    return device == gpu.uuid != "" or (kind == "cuda" and number == str(gpu.index))


@dataclass
class CpuBox:
    """The processors and memory of a NUMA node, with the workers that compute there."""

    words: str
    workers: list[Placed]
    least: float

    @property
    def width(self) -> float:
        across = min(len(self.workers), CPU_COLUMNS)
        return max(self.least, across * (CPU_CHIP_W + CHIP_GAP) - CHIP_GAP + 2 * CPU_PAD)

    @property
    def height(self) -> float:
        rows = -(-len(self.workers) // CPU_COLUMNS)
        return rows * (CHIP_H + CHIP_GAP) + (2 * CPU_PAD if rows else CPU_PAD) + (18 if self.words else -4)

    def draw(self, canvas: Canvas, x: float, y: float) -> dict[str, tuple[float, float]]:
        """Returns where each worker is reached from above."""
        canvas.box("cpu", x, y, self.width, self.height)
        if self.words:
            canvas.text(x + self.width / 2, y + self.height - 9, self.words, "small", "middle", self.width - 12)
        across = min(len(self.workers), CPU_COLUMNS)
        left = x + (self.width - across * (CPU_CHIP_W + CHIP_GAP) + CHIP_GAP) / 2
        taps = {}
        for at, worker in enumerate(self.workers):
            column, row = at % CPU_COLUMNS, at // CPU_COLUMNS
            place = left + column * (CPU_CHIP_W + CHIP_GAP), y + CPU_PAD + row * (CHIP_H + CHIP_GAP)
            taps[worker.name] = _chip(canvas, worker, *place, CPU_CHIP_W)
        return taps


def chips_height(workers: Iterable[Placed]) -> float:
    return sum(CHIP_H + CHIP_GAP for _ in workers) + (2 if workers else 0)


def draw_chips(
    canvas: Canvas, workers: list[Placed], x: float, y: float, width: float
) -> dict[str, tuple[float, float]]:
    """Workers below each other; returns where each is reached from above."""
    taps = {}
    for at, worker in enumerate(workers):
        taps[worker.name] = _chip(canvas, worker, x, y + at * (CHIP_H + CHIP_GAP), width)
    return taps


def _chip(canvas: Canvas, worker: Placed, x: float, y: float, width: float) -> tuple[float, float]:
    canvas.open(f"worker {_role(worker.role)}", f"{worker.name} ({worker.role})", worker=worker.name)
    canvas.box("chip", x, y, width, CHIP_H, 10)
    canvas.parts.append(f'<circle class="lamp" cx="{x + 11:g}" cy="{y + CHIP_H / 2:g}" r="3.5"/>')
    canvas.text(x + 20, y + 14, worker.name, "chip-name", width=width - 26)
    canvas.close()
    return x + width / 2, y


def _role(role: str) -> str:
    return role if role in ("prefill", "decode", "both") else "both"


def draw_lanes(
    lines: Canvas, boxes: Canvas, overlay: Overlay, taps: dict[str, tuple[float, float]], top: float
) -> None:
    """A lane for each handoff: up from the source, along, and down to every destination with an arrow head."""
    uses: dict[str, int] = {}
    ends: dict[str, int] = {}
    for handoff in overlay.lanes:
        for name in (handoff.source, *handoff.destinations):
            ends[name] = ends.get(name, 0) + 1

    def tap(name: str) -> tuple[float, float] | None:
        """The next free line up from a worker: several stand side by side."""
        if name not in taps:
            return None
        uses[name] = uses.get(name, 0) + 1
        step = min(14.0, 80.0 / max(ends[name], 1))
        x, y = taps[name]
        return x + (uses[name] - (ends[name] + 1) / 2) * step, y

    for at, handoff in enumerate(overlay.lanes):
        y = top + LANES_TOP + LABEL_H / 2 + at * LANE_STEP
        source = tap(handoff.source)
        found = [place for name in handoff.destinations if (place := tap(name)) is not None]
        if source is None or not found:
            continue
        names = {"lane": handoff.source, "transport": handoff.transport}
        attributes = "".join(f' data-{key}="{clean(value)}"' for key, value in names.items())
        for x, bottom in found:
            points = [source, (source[0], y), (x, y), (x, bottom - 2)]
            lines.line(points, "lane", attributes)
            boxes.parts.append(
                f'<path class="head" d="M{x - 4:g} {bottom - 8:g} L{x + 4:g} {bottom - 8:g} L{x:g} {bottom - 1:g} Z"/>'
            )
        start = source[0]
        middle = (start + max((x for x, _ in found), key=lambda x, start=start: abs(x - start))) / 2
        _label(boxes, handoff, max(middle - LABEL_W / 2, 4.0), y - LABEL_H / 2)


def _label(canvas: Canvas, handoff: Handoff, x: float, y: float) -> None:
    who = f"{handoff.source} to {', '.join(handoff.destinations)} by {handoff.transport}"
    canvas.open("rate", who, lane=handoff.source, transport=handoff.transport)
    canvas.box("pill", x, y, LABEL_W, LABEL_H, 10)
    canvas.text(x + 10, y + 14, handoff.transport, "small", width=60)
    canvas.parts.append(f'<text class="figure" x="{x + LABEL_W - 10:g}" y="{y + 14:g}" text-anchor="end">-</text>')
    canvas.close()
