"""Draws a machine: in the terminal with rich, and as SVG for reports.

Both show the same arrangement: one box a NUMA node, in it the host bridges or switches with the GPUs and NICs that
hang on them, the NVLink fabric above, and below the route of the handoff. Devices without a PCI path (pasted texts)
are grouped by who is PIX or PXB to whom. Colour never says anything that the words do not say too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from slipstream.topo import choose, levels
from slipstream.topo.graph import Gpu, Machine, Nic

_NEAR = ("PIX", "PXB")
_NODE = levels.order("NODE")


@dataclass
class Branch:
    """Devices that share a PCIe switch, or hang on the root alone (`switch` False)."""

    gpus: list[Gpu] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)
    switch: bool = False


@dataclass
class Socket:
    """A NUMA node's branches; `numa` None: nodes are not shown."""

    numa: int | None
    cpus: str = ""
    branches: list[Branch] = field(default_factory=list)


def arrange(machine: Machine) -> list[Socket]:
    """Sockets and branches of a machine in natural order; every GPU and every NIC is in exactly one branch."""
    branches = _branches(machine)
    nodes = {node.id: node.cpus for node in machine.numa_nodes}
    sockets: dict[int | None, Socket] = {}
    for branch in branches:
        numa = _numa(machine, [*branch.gpus, *branch.nics])
        cpus = nodes.get(numa, "") if numa is not None else ""
        cpus = cpus or next((gpu.cpus for gpu in branch.gpus), "")
        sockets.setdefault(numa, Socket(numa, cpus)).branches.append(branch)
    return sorted(sockets.values(), key=lambda socket: (socket.numa is None, socket.numa or 0))


def _numa(machine: Machine, branch: list[Gpu | Nic]) -> int | None:
    """NUMA node of a branch: its own devices say it, or one that is at most a host bridge away does."""
    own = [device.numa for device in branch if device.numa is not None]
    near = (
        other.numa
        for other in machine.gpus
        if other.numa is not None and branch and levels.order(machine.level(branch[0].name, other.name)) == _NODE
    )
    return own[0] if own else next(near, None)


def _branches(machine: Machine) -> list[Branch]:
    """Groups of devices that are PIX or PXB to each other; of several such groups for one device, the nearest."""
    devices: list[Gpu | Nic] = [*machine.gpus, *sorted(machine.nics, key=lambda nic: levels.natural(nic.name))]
    groups: list[list[Gpu | Nic]] = []
    for device in devices:
        home = next((g for g in groups if any(_pcie(machine, device, other) in _NEAR for other in g)), None)
        if home is None:
            groups.append([device])
        else:
            home.append(device)
    return [
        Branch(
            gpus=[device for device in group if isinstance(device, Gpu)],
            nics=[device for device in group if isinstance(device, Nic)],
            switch=len(group) > 1,
        )
        for group in groups
    ]


def _pcie(machine: Machine, a: Gpu | Nic, b: Gpu | Nic) -> str:
    """PCIe level of a pair: of two GPUs with NVLink it comes from their paths, as the matrix no longer tells."""
    level = machine.level(a.name, b.name)
    if levels.nvlinks(level):
        return levels.between(a.path, b.path, a.numa, b.numa, 0) if a.path and b.path else levels.UNKNOWN
    return level


def terminal(machine: Machine, plan: choose.Plan) -> RenderableType:
    """The machine as a rich renderable."""
    sockets = [_socket_panel(machine, socket) for socket in arrange(machine)]
    parts: list[RenderableType] = []
    fabric = _fabric_line(machine, plan)
    if fabric:
        parts.append(Panel(Text(fabric, justify="center"), style="green", border_style="green"))
    parts.append(Columns(sockets, equal=True, expand=True) if len(sockets) > 1 else Group(*sockets))
    parts.append(Panel(Text(plan.handoff), title="handoff", title_align="left"))
    return Group(*parts)


def _socket_panel(machine: Machine, socket: Socket) -> Panel:
    rows = [_branch_text(branch) for branch in socket.branches]
    title = f"NUMA node {socket.numa}" if socket.numa is not None else "PCIe"
    cpus = f"CPUs {socket.cpus}" if socket.cpus else None
    return Panel(Group(*rows), title=title, title_align="left", subtitle=cpus, subtitle_align="right")


def _branch_text(branch: Branch) -> Text:
    text = Text("switch " if branch.switch else "root   ", style="dim")
    for gpu in branch.gpus:
        text.append(f" {gpu.name} ", style="bold black on green")
        text.append(" ")
    for word, nics in _by_use(branch.nics):
        text.append(_nic_names(word, nics), style="dim" if word else "bold cyan")
        text.append(" ")
    return text


def _by_use(nics: list[Nic]) -> Iterable[tuple[str, list[Nic]]]:
    """NICs by what can be done with them: "" for usable ones, else the word for why not."""
    for word in ("", "state not shown", "not usable"):
        group = [nic for nic in nics if _use(nic) == word]
        if group:
            yield word, group


def _use(nic: Nic) -> str:
    if nic.usable:
        return ""
    shown = any(port.usable == "no" for port in nic.ports)
    return "not usable" if shown else "state not shown"


def _nic_names(word: str, nics: list[Nic]) -> str:
    """A short list: usable ones with their rate, others as a count when they are many."""
    if not word:
        return " ".join(_nic_label(nic) for nic in nics)
    if len(nics) > 2:
        return f"{len(nics)} NICs {word} ({nics[0].name} .. {nics[-1].name})"
    return " ".join(f"{nic.name} ({word})" for nic in nics)


def _nic_label(nic: Nic) -> str:
    port = nic.best_port
    rate = f" {port.rate_gbps:g}G" if port and port.rate_gbps else ""
    netdev = f" {port.netdev}" if port and port.netdev else ""
    return f"{nic.name}{rate}{netdev}"


def _fabric_line(machine: Machine, plan: choose.Plan) -> str:
    linked = [pair for pair in plan.pairs if pair.best.way == "nvlink"]
    if not linked:
        return ""
    through = "NVSwitch" if any(gpu.nvlinks and gpu.nvlinks.to_switch for gpu in machine.gpus) else "NVLink"
    words = " / ".join(sorted({pair.best.level for pair in linked}, key=levels.nvlinks))
    rates = {pair.best.gbps for pair in linked if pair.best.gbps}
    speed = f", {min(rates):.0f} GB/s one way" if rates else ""
    which = "all pairs" if len(linked) == len(plan.pairs) else f"{len(linked)} of {len(plan.pairs)} pairs"
    return f"{through}: {words}, {which}{speed}"


_BOX_WIDTH, _ROW, _PAD = 168, 26, 14
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1d2733 } .small { font-size: 11px; fill: #55606d }
  .frame { fill: #f7f9fb; stroke: #9aa7b4 } .switch { fill: #e6ebf0; stroke: #7d8b99 }
  .gpu { fill: #cfe9d0; stroke: #3d8b40 } .nic { fill: #cfe3f5; stroke: #2a6ca8 }
  .dead { fill: #eee; stroke: #bbb; stroke-dasharray: 4 3 } .fabric { fill: #bfe3c0; stroke: #2f7a33 }
  line { stroke: #7d8b99 } .nv { stroke: #2f7a33; stroke-width: 2 }
"""


@dataclass
class _Canvas:
    parts: list[str] = field(default_factory=list)

    def box(self, kind: str, x: float, y: float, width: float, height: float, label: str, note: str = "") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>')
        if label:
            self.text(x + width / 2, y + (height / 2 + 4 if height < 60 else 18), label, "middle")
        if note:
            self.text(x + width / 2, y + height - 5, note, "middle", "small")

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> None:
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "") -> None:
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{style}/>')


def svg(machine: Machine, plan: choose.Plan) -> str:
    """The machine as a standalone SVG document."""
    canvas = _Canvas()
    fabric = _fabric_line(machine, plan)
    top = 78.0 if fabric else 44.0
    x, bottom, tops = _PAD * 1.0, top, []
    for socket in arrange(machine):
        width, height, gpu_tops = _draw_socket(canvas, socket, x, top)
        tops += gpu_tops
        x += width + _PAD
        bottom = max(bottom, top + height)
    width = max(x, 420.0)
    if fabric:
        canvas.box("fabric", _PAD, 36, width - 2 * _PAD, 28, fabric)
        for gpu_x, gpu_y in tops:
            canvas.line(gpu_x, 64, gpu_x, gpu_y, "nv")
    canvas.text(_PAD, 22, machine.source or "machine")
    canvas.text(_PAD, bottom + 24, plan.handoff, kind="small")
    height = bottom + 38
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
    title = f"<title>{escape(plan.handoff)}</title>"
    return "\n".join([f'{head} role="img">', title, f"<style>{_STYLE}</style>", *canvas.parts, "</svg>", ""])


def _draw_socket(canvas: _Canvas, socket: Socket, x: float, y: float) -> tuple[float, float, list[tuple[float, float]]]:
    """Draws one NUMA node; returns its width, its height and the top middles of its GPUs."""
    heights = [_branch_rows(branch) for branch in socket.branches]
    width = max(len(socket.branches), 1) * (_BOX_WIDTH + _PAD) + _PAD
    height = 66 + max(heights, default=1) * (_ROW + 6)
    title = f"NUMA node {socket.numa}" if socket.numa is not None else "PCIe"
    slot = len(canvas.parts)
    tops = []
    for i, branch in enumerate(socket.branches):
        left = x + _PAD + i * (_BOX_WIDTH + _PAD)
        tops += _draw_branch(canvas, branch, left, y + 30)
    frame = _Canvas()
    frame.parts.append(f'<rect class="frame" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"/>')
    cpus = f", CPUs {socket.cpus}" if socket.cpus else ""
    frame.text(x + _PAD, y + height - 10, f"{title}{cpus}", kind="small")
    canvas.parts[slot:slot] = frame.parts
    return width, height, tops


def _branch_rows(branch: Branch) -> int:
    usable = sum(nic.usable for nic in branch.nics)
    others = len({_use(nic) for nic in branch.nics} - {""})
    return len(branch.gpus) + usable + others + branch.switch


def _draw_branch(canvas: _Canvas, branch: Branch, x: float, y: float) -> list[tuple[float, float]]:
    tops = []
    for gpu in branch.gpus:
        canvas.box("gpu", x, y, _BOX_WIDTH, _ROW, gpu.name)
        if not tops:
            tops.append((x + _BOX_WIDTH / 2, y))
        y += _ROW + 6
    if branch.switch:
        canvas.box("switch", x, y, _BOX_WIDTH, _ROW - 6, "PCIe switch")
        y += _ROW
    for nic in branch.nics:
        if nic.usable:
            canvas.box("nic", x, y, _BOX_WIDTH, _ROW, _nic_label(nic))
            y += _ROW + 6
    for word, nics in _by_use(branch.nics):
        if word:
            names = nics[0].name if len(nics) == 1 else f"{len(nics)} NICs"
            canvas.box("dead", x, y, _BOX_WIDTH, _ROW, f"{names}: {word}")
            y += _ROW + 6
    return tops
