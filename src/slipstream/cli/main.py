"""The command line: `slipstream COMMAND`, and `slipstream MODEL` for `slipstream serve MODEL`.

A command's module is imported when that command runs, so that `--help` needs nothing but click, and the router's
process never sees what only workers need. Errors that slipstream raises on purpose end as one sentence on standard
error: exit code 2 for a wrong command line or setting, 1 for everything else; Ctrl-C is 130, without a word.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from typing import Any, NoReturn

import click

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.version import __version__

COMMANDS = {
    "serve": "Serve a model on this machine: router and workers, started and supervised.",
    "worker": "Run one worker, to be joined to a router.",
    "router": "Run one router with its HTTP front, in front of workers.",
    "generate": "Answer one prompt in the terminal, without a server.",
    "timeline": "Show where the time of recent requests went.",
    "topo": "Show GPUs, links and networks of a machine, and the ways that data can take.",
    "doctor": "Say what is wrong with this machine, a configuration, a cluster or in a log.",
    "bench": "Measure this machine.",
    "version": "Print the versions of slipstream and of what it runs on.",
}
DEFAULT_COMMAND = "serve"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what writing to a file that standard output is may end with
INTERRUPTED = 130  # exit code, as of a process that SIGINT has ended


class Commands(click.Group):
    """Loads each command from the module of its name; what is no command is the model of the default one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"slipstream.cli.{cmd_name}").command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in ("--help", "-h", "--version") and args[0] not in COMMANDS:
            _refuse_misspelt_command(ctx, args)
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _refuse_misspelt_command(ctx: click.Context, args: list[str]) -> None:
    """A word close to a command's name, with nothing of that name on disk, was hardly meant as a model.

    A longer form of a name (`topology`) is close, and so is anything whose help is asked for: models have none.
    """
    word = args[0]
    if word.startswith("-") or os.path.exists(word):
        return
    longer = [name for name in COMMANDS if word.startswith(name) and word.isalpha()]
    close = longer or difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.75)
    if close:
        raise click.UsageError(f"there is no command {word!r}; did you mean {close[0]!r}?", ctx)
    if args[1:] in (["--help"], ["-h"]):
        raise click.UsageError(f"there is no command {word!r}; there are {', '.join(COMMANDS)}.", ctx)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="slipstream %(version)s")
def cli() -> None:
    """Serve large language models with prefill and decode on separate workers.

    `slipstream MODEL` is short for `slipstream serve MODEL`.
    """


def fail(error: SlipstreamError) -> NoReturn:
    """Ends the process with the error as one sentence."""
    click.echo(f"error: {error.message}", err=True)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def main() -> None:
    """Entry point of the `slipstream` script and of `python -m slipstream`."""
    try:
        try:
            cli.main(prog_name="slipstream")
        finally:
            sys.stdout.flush()
    except SlipstreamError as error:
        fail(error)
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is written when the interpreter ends
        fail(SlipstreamError(f"the output cannot be written: {error.strerror}."))
