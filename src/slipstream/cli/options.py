"""Command-line options made from settings.

Options carry texts; `slipstream.settings` turns them into values, so that a wrong flag, a wrong variable and a wrong
line in a file are refused in the same words.
"""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec.inspect as inspect

from slipstream import settings
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.settings import Resolved, Scope, Setting


class SettingsCommand(click.Command):
    """A command whose options are the settings of `scope`, shown by section in its help, and `--config`."""

    def __init__(self, *arguments: Any, scope: Scope, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._scope = scope
        self._own = len(self.params)
        self.params.append(
            click.Option(["--config"], metavar="FILE", help="TOML file with settings; flags and variables win over it.")
        )
        self._options = {setting.name: _option(setting) for setting in scope}
        self.params.extend(self._options.values())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for setting in self._scope:
            record = self._options[setting.name].get_help_record(ctx)
            assert record is not None
            sections.setdefault(setting.section, []).append(record)
        for section, records in sections.items():
            with formatter.section(f"{section.capitalize()} settings"):
                formatter.write_dl(records)
        own = [*self.params[: self._own + 1], *filter(None, [self.get_help_option(ctx)])]
        with formatter.section("Options"):
            formatter.write_dl(
                [record for p in own if (record := p.get_help_record(ctx)) and p.opts[0].startswith("-")]
            )


def _option(setting: Setting) -> click.Option:
    if setting.is_switch:
        shown = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
        return click.Option([shown], default=None, help=_help(setting))
    return click.Option(
        [setting.flag], multiple=setting.is_list, default=None, metavar=_metavar(setting), help=_help(setting)
    )


def _metavar(setting: Setting) -> str:
    kind = setting.kind
    if isinstance(kind, inspect.LiteralType):
        return "[" + "|".join(str(value) for value in sorted(kind.values, key=str)) + "]"
    if isinstance(kind, inspect.IntType):
        return "N"
    if isinstance(kind, inspect.FloatType):
        return "X"
    return "TEXT"


def _help(setting: Setting) -> str:
    if setting.default in ("", ()):
        return setting.description
    shown = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
    return f"{setting.description}  [default: {shown}]"


def resolve(scope: Scope, model: str | None, options: dict[str, Any]) -> Resolved:
    """The settings of a command from its options and, where it has one, its MODEL argument.

    Prints the warnings. Raises ConfigError.
    """
    config_file = options.pop("config", None)
    if model is not None:
        also = options.get("model")
        if also is not None and also != model:
            raise ConfigError(f"the model is given twice: {model!r} and --model {also!r}; leave one of them out.")
        options["model"] = model
    if options.get("model"):
        options["model"] = _whole_path(options["model"])
    resolved = settings.resolve(scope, options, config_file=config_file)
    for warning in resolved.warnings:
        click.echo(f"warning: {warning}", err=True)
    return resolved


def _whole_path(model: str) -> str:
    """A model on disk by its whole path, so that other processes find it from their own working directory."""
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.exists(path) else model


def find_model(engine: EngineConfig) -> None:
    """Finds the model's files, fetching them from the hub if need be, before anything heavy. Raises ModelError."""
    from slipstream.model.files import locate

    locate(engine.model, need_weights=engine.load_format != "dummy")
