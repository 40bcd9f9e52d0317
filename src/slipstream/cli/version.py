"""`slipstream version`: what to write into a bug report. Reads package metadata; imports none of the packages."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from slipstream.version import __version__
from slipstream.wire import PROTOCOL

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "msgspec", "uvicorn", "starlette")


@click.command("version")
def command() -> None:
    """Print the versions of slipstream and of what it runs on."""
    click.echo(f"slipstream {__version__} (wire protocol {PROTOCOL})")
    click.echo(f"python {platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}")
    for package in PACKAGES:
        try:
            click.echo(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{package} is not installed")
