"""`slipstream bench NAME`: measurements on the user's own machine. Each loads with the command that runs it."""

from __future__ import annotations

import importlib

import click

BENCHES = {
    "engine": (
        "slipstream.bench.engine",
        "Step times of the engine on a GPU, against what its memory and matrix units allow.",
    ),
    "serve": (
        "slipstream.bench.serve.command",
        "Latency, throughput and goodput of a server that speaks the OpenAI API, under load.",
    ),
    "handoff": (
        "slipstream.bench.handoff",
        "Handoffs through the whole stack of two workers: offer, grant, copies, commit.",
    ),
    "transfer": (
        "slipstream.bench.transfer",
        "How fast pages move between two processes: every transport, page size, direction.",
    ),
}


class Benches(click.Group):
    """Takes the `command` of the module that a benchmark lies in."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHES:
            return None
        return importlib.import_module(BENCHES[cmd_name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, text) for name, (_, text) in BENCHES.items()])


@click.command("bench", cls=Benches)
def command() -> None:
    """Measure a server, or this machine.

    \b
    slipstream bench serve http://127.0.0.1:8000 --rate 4,8,12 --slo ttft=1s,tpot=10ms
    slipstream bench transfer
    slipstream bench transfer --memory cuda:0,cuda:1 --sizes 32K,2M --json transfer.json
    """
