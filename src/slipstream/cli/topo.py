"""`slipstream topo`: the machine and the ways through it; `--routes`: which way KV takes, planned or measured."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from slipstream import outfile


@click.command("topo")
@click.option(
    "--from", "first", metavar="FILE...", help="Read a snapshot, or pasted outputs of one machine; - is standard input."
)
@click.argument("more", nargs=-1, metavar="")
@click.option("--root", metavar="DIR", help="Read a recorded root folder: sys/, proc/, dev/, nvml.json.")
@click.option(
    "--routes",
    is_flag=False,
    flag_value="",
    metavar="[URL]",
    help="Ranked ways between the GPUs with reasons, or the measured routes of the slipstream that runs at URL.",
)
@click.option("--api-key", envvar="SLIPSTREAM_API_KEY", metavar="TEXT", help="Bearer token for URL, if it wants one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--save", metavar="FILE", help="Write a snapshot that --from reads.")
@click.option("--svg", metavar="FILE", help="Write a drawing of the machine.")
@click.option("--png", metavar="FILE", help="Write the drawing as a PNG (needs the extra `png`).")
def command(
    first: str | None,
    more: tuple[str, ...],
    root: str | None,
    routes: str | None,
    api_key: str | None,
    as_json: bool,
    save: str | None,
    svg: str | None,
    png: str | None,
) -> None:
    """Show GPUs, links, NUMA nodes and networks of a machine, which ports are usable and why others are not.

    Reads this machine, or one that was saved, recorded or pasted: `nvidia-smi topo -m`, `nvidia-smi nvlink -s`,
    `rdma link`, `ibv_devinfo`, `ibstat`, `show_gids`, `ibdev2netdev`, `lsmod`, alone or together.

    \b
    slipstream topo
    slipstream topo --from topo.txt links.txt gids.txt --svg machine.svg --png machine.png
    slipstream topo --save machine.json
    slipstream topo --routes
    slipstream topo --routes http://127.0.0.1:8000
    """
    files = _files(first, more, root)
    for name in (save, svg, png):
        if name is not None:
            outfile.check(Path(name))
    if routes:
        _refuse_other_sources(files, root, save, svg, png)
        _measured(routes, api_key or "", as_json)
        return
    from slipstream.topo import choose, report

    machine, readings = report.load(files, root)
    plan = choose.plan(machine)
    if save:
        outfile.write(Path(save), machine.to_json(), "the snapshot")
    if svg or png:
        from slipstream.topo import draw

        drawing = draw.svg(machine, plan)
        if svg:
            outfile.write(Path(svg), drawing.encode(), "the drawing")
        if png:
            outfile.write(Path(png), draw.png(drawing), "the drawing")
    if routes is not None:
        from slipstream.doctor import routes as shown

        click.echo(shown.planned_json(plan) if as_json else shown.planned(plan))
    elif as_json:
        click.echo(report.json_report(machine, plan, readings))
    else:
        if sys.stdout.isatty() and (machine.gpus or machine.nics):
            from rich.console import Console

            from slipstream.topo import draw

            Console().print(draw.terminal(machine, plan))
        click.echo(report.text(machine, plan))


def _files(first: str | None, more: tuple[str, ...], root: str | None) -> list[str]:
    if first is None and more:
        raise click.UsageError(f"what is {' '.join(more)!r}? Files to read come after --from.")
    if first is not None and root is not None:
        raise click.UsageError("--from and --root name two machines; give one of them.")
    return [first, *more] if first is not None else []


def _refuse_other_sources(
    files: list[str], root: str | None, save: str | None, svg: str | None, png: str | None
) -> None:
    given = {"--from": files, "--root": root, "--save": save, "--svg": svg, "--png": png}
    if named := [flag for flag, value in given.items() if value]:
        raise click.UsageError(f"--routes URL asks a running slipstream; {', '.join(named)} cannot go with it.")


def _measured(url: str, api_key: str, as_json: bool) -> None:
    from slipstream.doctor import routes as shown

    body = shown.ask(url, api_key)
    click.echo(shown.measured_json(body) if as_json else shown.measured(body, url))
