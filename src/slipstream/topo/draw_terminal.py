"""The machine as a drawing in the terminal."""

from __future__ import annotations

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from slipstream.topo import choose
from slipstream.topo.draw_arrange import Branch, Socket, arrange, by_use, fabric_line, nic_label
from slipstream.topo.graph import Machine, Nic


def terminal(machine: Machine, plan: choose.Plan) -> RenderableType:
    """The machine as a rich renderable."""
    sockets = [_socket_panel(machine, socket) for socket in arrange(machine)]
    parts: list[RenderableType] = []
    fabric = fabric_line(machine, plan)
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
    for word, nics in by_use(branch.nics):
        text.append(_nic_names(word, nics), style="dim" if word else "bold cyan")
        text.append(" ")
    return text


def _nic_names(word: str, nics: list[Nic]) -> str:
    """A short list: usable ones with their rate, others as a count when they are many."""
    if not word:
        return " ".join(nic_label(nic) for nic in nics)
    if len(nics) > 2:
        return f"{len(nics)} NICs {word} ({nics[0].name} .. {nics[-1].name})"
    return " ".join(f"{nic.name} ({word})" for nic in nics)
