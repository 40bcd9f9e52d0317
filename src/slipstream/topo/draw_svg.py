"""The machine as SVG: for a report on its own, or for the dashboard with workers and the ways of KV laid over it.

From top to bottom: the ways of KV (dashboard), NVLink, one frame a NUMA node, the notes. In a frame each branch is a
column: its GPUs side by side, the switch below them, the NICs below that. NICs that can be used are boxes with rate and
network device; the others are one small numbered cell each, so that 31 of them are as legible as one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.topo import choose, levels
from slipstream.topo.draw_arrange import Branch, Linked, Socket, arrange, linked, use
from slipstream.topo.draw_canvas import Canvas, measure, wrapped
from slipstream.topo.draw_workers import CpuBox, Handoff, Overlay, Placed, chips_height, draw_chips, draw_lanes
from slipstream.topo.graph import Machine, Nic, NumaNode

__all__ = ["Handoff", "Overlay", "Placed", "svg"]

MARGIN, GAP, PAD = 20.0, 14.0, 14.0
GPU_W, GPU_GAP, NIC_W = 118.0, 8.0, 150.0
CELL_W, CELL_H, CELL_GAP = 26.0, 18.0, 4.0
SWITCH_H, NIC_H, BAR_H, BAR_STEP, DROP = 20.0, 38.0, 24.0, 32.0, 20.0
CPU_W = 220.0
_NUMBERED = re.compile(r"(.*?)(\d+)$")


def svg(machine: Machine, plan: choose.Plan, overlay: Overlay | None = None) -> str:
    """The machine as a standalone SVG document.

    With an overlay it is the dashboard's: workers in their devices, the ways of KV above, neither style nor notes.
    """
    return _Drawing(machine, plan, overlay).document()


@dataclass
class _Frame:
    """One NUMA node, or one other host: its columns and how wide they are."""

    title: str
    branches: list[Branch] = field(default_factory=list)
    cpu: CpuBox | None = None

    @property
    def widths(self) -> list[float]:
        return ([self.cpu.width] if self.cpu else []) + [_branch_width(branch) for branch in self.branches]

    @property
    def width(self) -> float:
        columns = sum(self.widths) + GAP * max(len(self.widths) - 1, 0)
        return max(columns, measure(self.title, "small")) + 2 * PAD


@dataclass
class _Drawing:
    machine: Machine
    plan: choose.Plan
    overlay: Overlay | None
    canvas: Canvas = field(default_factory=Canvas)
    boxes: Canvas = field(default_factory=Canvas)  # what covers the lines
    gpu_tops: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # middle, top, and how many drawn
    taps: dict[str, tuple[float, float]] = field(default_factory=dict)  # where each worker is reached

    def document(self) -> str:
        groups = linked(self.machine, self.plan)
        bars = _bar_lanes(groups, [gpu.name for gpu in self.machine.gpus])
        frames = self._frames()
        margin, least = (MARGIN, 400.0) if self.overlay is None else (4.0, 240.0)
        width = max(sum(frame.width for frame in frames) + GAP * max(len(frames) - 1, 0), least) + 2 * margin
        y = margin
        if self.overlay is None:
            self._heading(y)
            y += 56
        lanes_top = y
        y += self.overlay.lanes_height if self.overlay else 0.0
        bars_top = y
        y += BAR_STEP * (max(bars.values()) + 1) + DROP - 8 if bars else 0.0
        height = max((self._frame_height(frame) for frame in frames), default=40.0)
        x = margin + max(0.0, (width - 2 * margin - sum(f.width for f in frames) - GAP * (len(frames) - 1)) / 2)
        for frame in frames:
            self._frame(frame, x, y, height)
            x += frame.width + GAP
        for group in groups:
            self._bar(group, bars_top + BAR_STEP * bars[group.gpus], width)
        if self.overlay:
            draw_lanes(self.canvas, self.boxes, self.overlay, self.taps, lanes_top)
        y += height + margin
        if self.overlay is None:
            y = self._notes(y + 4, width)
        self.canvas.parts += self.boxes.parts
        return self.canvas.document(width, y, self.plan.handoff, styled=self.overlay is None)

    # ------------------------------------------------------------------------------------------ the whole

    def _frames(self) -> list[_Frame]:
        machine, overlay = self.machine, self.overlay
        cpu_nodes = {node.id: node for node in machine.numa_nodes if node.cpus}
        sockets = [socket for socket in arrange(machine) if socket.branches]
        present = {socket.numa for socket in sockets}
        sockets += [Socket(numa, node.cpus) for numa, node in cpu_nodes.items() if numa not in present]
        sockets.sort(key=lambda socket: (socket.numa is None, socket.numa or 0))
        here = overlay.on_cpu(machine) if overlay else []
        if not sockets and here:
            sockets = [Socket(None)]
        frames = [_Frame(_socket_title(socket), _columns(socket.branches)) for socket in sockets]
        for at, (socket, frame) in enumerate(zip(sockets, frames, strict=True)):
            mine = here if at == 0 else []
            if mine or not socket.branches:
                node = cpu_nodes.get(socket.numa) if socket.numa is not None else None
                frame.cpu = CpuBox(_cpu_words(node), mine, CPU_W)
        for host, workers in overlay.elsewhere().items() if overlay else ():
            frames.append(_Frame(f"host {host}", cpu=CpuBox("", workers, CPU_W)))
        return frames

    def _heading(self, y: float) -> None:
        machine = self.machine
        models = list(dict.fromkeys(gpu.model for gpu in machine.gpus if gpu.model))
        gpus = _many(len(machine.gpus), "GPU") + (f" ({', '.join(models)})" if models else "")
        usable = sum(nic.usable for nic in machine.nics)
        nics = f"{_many(len(machine.nics), 'NIC')}, {usable} usable" if machine.nics else "no RDMA NIC"
        self.canvas.text(MARGIN, y + 14, f"{gpus} · {nics}", "title")
        source = f"{machine.source or 'machine'}{f' · driver {machine.driver}' if machine.driver else ''}"
        self.canvas.text(MARGIN, y + 33, source, "small", width=900)

    def _notes(self, y: float, width: float) -> float:
        """The sentences below the drawing; returns where they end."""
        self.canvas.line([(MARGIN, y), (width - MARGIN, y)], "rule")
        y += 22
        for kind, title, words in _note_rows(self.machine, self.plan):
            if kind:
                self.canvas.box(kind, MARGIN, y - 10, 12, 12, 2)
            self.canvas.text(MARGIN + 20, y, title, "name")
            for line in wrapped(words, width - 2 * MARGIN - 150):
                self.canvas.text(MARGIN + 150, y, line)
                y += 17
            y += 4
        return y + 4

    # ------------------------------------------------------------------------------------------ NVLink

    def _bar(self, group: Linked, y: float, width: float) -> None:
        tops = [self.gpu_tops[name] for name in group.gpus]
        left, right = min(x for x, _, _ in tops) - GPU_W / 2, max(x for x, _, _ in tops) + GPU_W / 2
        for x, top, _ in tops:
            self.canvas.line([(x, y + BAR_H), (x, top)], "nv")
        self.boxes.box("fabric", left, y, right - left, BAR_H)
        words = next((w for w in group.words if measure(w) < right - left - 16), group.words[-1])
        self.boxes.text((left + right) / 2, y + 16, words, "", "middle")

    # ------------------------------------------------------------------------------------------ frames

    def _frame_height(self, frame: _Frame) -> float:
        columns = [self._branch_height(branch) for branch in frame.branches]
        if frame.cpu:
            columns.append(frame.cpu.height)
        return max(columns, default=40.0) + PAD + 30

    def _frame(self, frame: _Frame, x: float, y: float, height: float) -> None:
        frame_shape = Canvas()
        frame_shape.box("frame", x, y, frame.width, height, 6)
        self.canvas.parts[:0] = frame_shape.parts
        self.boxes.text(x + PAD, y + height - 10, frame.title, "small")
        left = x + PAD
        if frame.cpu:
            self.taps |= frame.cpu.draw(self.boxes, left, y + PAD)
            left += frame.cpu.width + GAP
        for branch in frame.branches:
            self._branch(branch, left, y + PAD)
            left += _branch_width(branch) + GAP

    def _gpu_height(self, branch: Branch) -> float:
        workers = [chips_height(self._workers_on(gpu.name)) for gpu in branch.gpus]
        detail = any(gpu.model or gpu.memory_bytes for gpu in self.machine.gpus)
        return (44.0 if detail else 30.0) + max(workers, default=0.0)

    def _workers_on(self, gpu: str) -> list[Placed]:
        return self.overlay.on_gpu(self.machine.gpu(gpu)) if self.overlay else []

    def _branch_height(self, branch: Branch) -> float:
        usable = sum(nic.usable for nic in branch.nics)
        height = self._gpu_height(branch) if branch.gpus else 0.0
        if branch.switch:
            height += 10 + SWITCH_H
        height += usable * (NIC_H + 6) + (8 if usable else 0)
        rows = _cell_rows(branch)
        return height + (rows * (CELL_H + CELL_GAP) + 26 if rows else 0.0)

    def _branch(self, branch: Branch, x: float, y: float) -> None:
        width, height = _branch_width(branch), self._gpu_height(branch)
        if branch.gpus:
            left = x + (width - _gpus_width(branch)) / 2
            for gpu in branch.gpus:
                self._gpu(gpu.name, left, y, height)
                left += GPU_W + GPU_GAP
            y += height
        if branch.switch:
            if branch.gpus:
                for i in range(len(branch.gpus)):
                    middle = x + (width - _gpus_width(branch)) / 2 + GPU_W / 2 + i * (GPU_W + GPU_GAP)
                    self.canvas.line([(middle, y), (middle, y + 10)], "wire")
                y += 10
            self.boxes.box("switch", x, y, width, SWITCH_H, 3)
            self.boxes.text(x + width / 2, y + 14, "PCIe switch", "small", "middle")
            y += SWITCH_H
        if branch.nics:
            self._nics(branch, x, y, width)

    def _gpu(self, name: str, x: float, y: float, height: float) -> None:
        gpu = self.machine.gpu(name)
        self.boxes.open("device", " ".join(part for part in (name, gpu.model, gpu.pci) if part), device=name)
        self.boxes.box("gpu", x, y, GPU_W, height)
        self.boxes.text(x + GPU_W / 2, y + 19, name, "name", "middle", GPU_W - 10)
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else ""
        detail = " · ".join(part for part in (gpu.model.removeprefix("NVIDIA "), memory) if part)
        if detail:
            self.boxes.text(x + GPU_W / 2, y + 35, detail, "small", "middle", GPU_W - 10)
        workers = self._workers_on(name)
        first = y + height - chips_height(workers)
        taps = draw_chips(self.boxes, workers, x + 6, first, GPU_W - 12)
        self.taps |= {worker: (taps[worker][0], y) for worker in taps if worker not in self.taps}
        self.boxes.close()
        self.gpu_tops[name] = (x + GPU_W / 2, y, height)

    # ------------------------------------------------------------------------------------------ NICs

    def _nics(self, branch: Branch, x: float, y: float, width: float) -> None:
        good = [nic for nic in branch.nics if nic.usable]
        rest = [nic for nic in branch.nics if not nic.usable]
        if good:
            y += 8
        for nic in good:
            if branch.switch:
                self.canvas.line([(x + width / 2, y - 8), (x + width / 2, y)], "wire")
            self._nic(nic, x, y, width)
            y += NIC_H + 6
        if rest:
            self._cells(rest, x, y + 8, width)

    def _nic(self, nic: Nic, x: float, y: float, width: float) -> None:
        port = nic.best_port
        assert port is not None  # it is usable
        rate = f" · {port.rate_gbps:g} Gb/s" if port.rate_gbps else ""
        gid = f"GID {port.gid_index}" if port.gid_index is not None else port.layer or ""
        detail = " · ".join(part for part in (port.netdev or "", gid) if part) or "usable"
        self.boxes.open("device", f"{nic.name} {nic.part} {nic.pci}".strip(), device=nic.name)
        self.boxes.box("nic", x, y, width, NIC_H)
        self.boxes.text(x + width / 2, y + 16, f"{nic.name}{rate}", "", "middle", width - 8)
        self.boxes.text(x + width / 2, y + 30, detail, "small", "middle", width - 8)
        self.boxes.close()

    def _cells(self, nics: list[Nic], x: float, y: float, width: float) -> None:
        """NICs that cannot be used: one numbered cell each below a line that says so."""
        count = f"{len(nics)} {_family(nics) or 'NICs'}: " if len(nics) > 1 else ""
        self.boxes.text(x, y + 10, f"{count}{_common_use(nics)}", "small", width=width)
        y += 16
        labels, cell = _cell_labels(nics), _cell_width(nics, width)
        across = max(int((width + CELL_GAP) // (cell + CELL_GAP)), 1)
        for at, (nic, label) in enumerate(zip(nics, labels, strict=True)):
            left, top = x + at % across * (cell + CELL_GAP), y + at // across * (CELL_H + CELL_GAP)
            why = "; ".join(reason.text for port in nic.ports for reason in port.reasons) or "state not shown"
            self.boxes.open("device", f"{nic.name}: {why}", device=nic.name)
            self.boxes.box(_cell_kind(nic), left, top, cell, CELL_H, 3)
            self.boxes.text(left + cell / 2, top + 12.5, label, "cell", "middle", cell - 2)
            self.boxes.close()


# ---------------------------------------------------------------------------------------------- measures


def _gpus_width(branch: Branch) -> float:
    return len(branch.gpus) * (GPU_W + GPU_GAP) - GPU_GAP if branch.gpus else 0.0


def _branch_width(branch: Branch) -> float:
    rest = sum(not nic.usable for nic in branch.nics)
    return max(_gpus_width(branch), NIC_W * min(max(1, -(-rest // 15)), 4) if branch.nics else 0.0)


def _cell_rows(branch: Branch) -> int:
    rest = [nic for nic in branch.nics if not nic.usable]
    if not rest:
        return 0
    width = _branch_width(branch)
    across = max(int((width + CELL_GAP) // (_cell_width(rest, width) + CELL_GAP)), 1)
    return -(-len(rest) // across)


def _cell_width(nics: list[Nic], width: float) -> float:
    return min(max(CELL_W, *(measure(label, "cell") + 6 for label in _cell_labels(nics))), width)


def _cell_labels(nics: list[Nic]) -> list[str]:
    """Numbers alone where all names but the numbers are the same."""
    prefix = _family(nics)
    return [nic.name.removeprefix(prefix) for nic in nics] if len(nics) > 1 else [nic.name for nic in nics]


def _family(nics: list[Nic]) -> str:
    """What the names have in common before their numbers: "mlx5_"; "" when they differ."""
    found = {match[1] if (match := _NUMBERED.match(nic.name)) else nic.name for nic in nics}
    return found.pop() if len(found) == 1 and len(nics) > 1 else ""


def _common_use(nics: list[Nic]) -> str:
    return " or ".join(dict.fromkeys(use(nic) for nic in nics))


def _cell_kind(nic: Nic) -> str:
    if use(nic) == "state not shown":
        return "unseen"
    return "up" if any(port.active for port in nic.ports) else "down"


def _columns(branches: Sequence[Branch]) -> list[Branch]:
    """The branches, with all NICs that hang on the root without a GPU in one column at the end."""
    alone = [branch for branch in branches if not branch.gpus and not branch.switch]
    kept = [branch for branch in branches if branch.gpus or branch.switch]
    nics = [nic for branch in alone for nic in branch.nics]
    return [*kept, Branch(nics=nics)] if nics else kept


def _bar_lanes(groups: list[Linked], order: list[str]) -> dict[tuple[str, ...], int]:
    """A height for each NVLink bar, so that bars that overlap in width lie above each other; 0 is the topmost."""
    ends: list[int] = []
    lanes = {}
    for group in groups:
        first, last = order.index(group.gpus[0]), order.index(group.gpus[-1])
        lane = next((lane for lane, end in enumerate(ends) if end < first), len(ends))
        ends[lane : lane + 1] = [last]
        lanes[group.gpus] = lane
    return lanes


# ---------------------------------------------------------------------------------------------- words


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _socket_title(socket: Socket) -> str:
    title = f"NUMA node {socket.numa}" if socket.numa is not None else "PCIe" if socket.branches else "this machine"
    return f"{title} · CPUs {socket.cpus}" if socket.cpus else title


def _cpu_words(node: NumaNode | None) -> str:
    if node is None:
        return "CPU"
    memory = f" · {node.memory_bytes / 2**30:.0f} GiB" if node.memory_bytes else ""
    return f"CPU and host memory{memory}"


def _note_rows(machine: Machine, plan: choose.Plan) -> list[tuple[str, str, str]]:
    """Class of the key, title and words of each note."""
    rows = [("fabric" if linked(machine, plan) else "cpu", "Handoff", plan.handoff)]
    for nic in machine.nics:
        if nic.usable:
            rows.append(("nic", nic.name, _reach(machine, nic)))
    reasons: dict[tuple[str, str], list[str]] = {}
    for nic in machine.nics:
        if nic.usable:
            continue
        why = "; ".join(dict.fromkeys(reason.text for port in nic.ports for reason in port.reasons))
        reasons.setdefault((_cell_kind(nic), why or "ports not shown"), []).append(nic.name)
    for (kind, why), names in reasons.items():
        few = f" ({', '.join(sorted(names, key=levels.natural))})" if len(names) <= 6 else ""
        rows.append((kind, f"{_many(len(names), 'NIC')} left out", why + few))
    return rows


def _reach(machine: Machine, nic: Nic) -> str:
    """To which GPUs a NIC is how near."""
    groups: dict[str, list[str]] = {}
    for gpu in machine.gpus:
        groups.setdefault(machine.level(gpu.name, nic.name), []).append(gpu.name)
    shown = sorted(groups.items(), key=lambda item: levels.order(item[0]))
    rest = [f"{level} to {', '.join(names)}" for level, names in shown]
    return "; ".join(rest) or "usable"
