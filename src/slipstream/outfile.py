"""The files that commands write because an option asked for them: `--json FILE`, `--plot`, `--svg`, `--save` and so on.

All of them go through `write`, so that each is announced by one line on standard error, which says what was written and
where; standard output is left to the data, whose width is settled here too. A command that measures for an hour calls
`check` first, so that a name that cannot be written to is refused before and not after.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def check(path: Path) -> None:
    """Raises ConfigError when `write` would not get a file of this name."""
    try:
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a folder; give the name of a file in it.")
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; make it first.")
        target = path if path.exists() else path.parent
        if not os.access(target, os.W_OK):
            raise ConfigError(f"cannot write {path}: writing to {target} is not allowed.")
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise ConfigError(f"cannot write {path}: {_reason(error)}.") from error


def write(path: Path, data: bytes, what: str) -> None:
    """Writes the file and says so; `what` names its contents, as "the snapshot". Raises ConfigError."""
    try:
        if _is_standard_output(path):  # opening it once more would begin a redirected file anew, over what is there
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            path.write_bytes(data)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {_reason(error)}.") from error
    click.echo(f"wrote {what} to {path} ({_size(len(data))})", err=True)


def _is_standard_output(path: Path) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(1))


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def terminal(width: int, *, highlight: bool = True) -> Console:
    """Standard output for tables and drawings: as wide as the terminal or COLUMNS says, else `width`."""
    from rich.console import Console

    console = Console(highlight=highlight)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = width
    return console


def _size(count: int) -> str:
    for size, unit in ((1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
