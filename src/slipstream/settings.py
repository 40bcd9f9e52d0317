"""From flags, environment and TOML to the frozen configs.

Every field of the structs in `slipstream.config` is one `Setting`, and a command uses a `Scope` of them. `resolve`
looks for each setting of the scope in the flags, then in `SLIPSTREAM_*` variables, then in the TOML file, takes the
default where none names it, and returns the configs. A wrong value ends here, with the place it came from, what it was
and what is possible; so does a key of the file that no setting is called by. An unknown variable is only a warning,
since an environment is shared with other programs.

`to_flags` is the way back: how one process of a cluster is told what its parent was told.

    python -m slipstream.settings       prints docs/configuration.md
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as inspect

from slipstream.config import (
    EngineConfig,
    FrontConfig,
    LaunchConfig,
    ObserveConfig,
    RouterConfig,
    TransferConfig,
    WorkerConfig,
)
from slipstream.errors import ConfigError

PREFIX = "SLIPSTREAM_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "engine": EngineConfig,
    "transfer": TransferConfig,
    "worker": WorkerConfig,
    "router": RouterConfig,
    "front": FrontConfig,
    "observe": ObserveConfig,
    "launch": LaunchConfig,
}
SIMILAR = 0.75  # how alike (0 to 1) two names must be for one to be taken for a slip of the other
WORKER_SPECS = ("prefill", "decode", "both")  # settings of the launch section
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")

Config = TypeVar("Config", bound=msgspec.Struct)


@dataclass(frozen=True)
class Setting:
    """One field of one config struct. `kind` is msgspec's description of its type; `or_zero` allows 0 beside it."""

    section: str
    name: str
    description: str
    default: Any
    kind: inspect.Type
    or_zero: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return isinstance(self.kind, inspect.BoolType)

    @property
    def is_list(self) -> bool:
        return isinstance(self.kind, inspect.VarTupleType)

    @property
    def is_spec(self) -> bool:
        """Whether it names workers by count or devices, so that a whole number is a value like any other."""
        return self.section == "launch" and self.name in WORKER_SPECS

    @property
    def allowed(self) -> str:
        """What values are possible, as words."""
        if self.is_spec:
            return "a count of workers, or a text that names devices"
        return ("0 or " if self.or_zero else "") + _allowed(self.kind)

    def parse(self, text: str, where: str) -> Any:
        """The value that `text` of a flag or variable means. Raises ConfigError that begins with `where`."""
        kind = self.kind
        value: Any = text
        if isinstance(kind, inspect.VarTupleType):
            value = [part.strip() for part in text.split(",") if part.strip()]
        elif isinstance(kind, inspect.BoolType):
            lowered = text.strip().lower()
            value = True if lowered in TRUE else False if lowered in FALSE else text
        elif isinstance(kind, inspect.IntType | inspect.FloatType):
            try:
                value = int(text) if isinstance(kind, inspect.IntType) else float(text)
            except ValueError:
                value = text
        return self.check(value, where)

    def check(self, value: Any, where: str) -> Any:
        """`value` of a TOML file or of Python in the field's own type. Raises ConfigError that begins with `where`."""
        kind = self.kind
        if isinstance(kind, inspect.VarTupleType):
            if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
                return tuple(value)
        elif isinstance(kind, inspect.BoolType):
            if isinstance(value, bool):
                return value
        elif isinstance(kind, inspect.LiteralType):
            if value in kind.values:
                return value
        elif isinstance(kind, inspect.StrType):
            if isinstance(value, str):
                return value
            if self.is_spec and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return str(value)
        elif isinstance(kind, inspect.IntType):
            if isinstance(value, int) and not isinstance(value, bool) and _within(value, kind):
                return value
        elif isinstance(kind, inspect.FloatType):
            # NaN is in no range, and infinity is of no use in any of these settings
            numeric = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
            if numeric and (_within(value, kind) or (self.or_zero and value == 0)):
                return float(value)
        else:
            raise TypeError(f"{self.section}.{self.name}: no rule for settings of type {kind!r}")
        raise ConfigError(f"{where}: {value!r} is not possible; it takes {self.allowed}.")


def _within(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def _allowed(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(str(value) for value in sorted(kind.values, key=str))
    if isinstance(kind, inspect.VarTupleType):
        return "a list of texts (separated by commas in a variable)"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        if kind.ge is not None and kind.le is not None:
            return f"{noun} from {kind.ge:g} to {kind.le:g}"
        bounds = [
            f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}"
            for word, bound in (
                ("of at least", kind.ge),
                ("greater than", kind.gt),
                ("at most", kind.le),
                ("less than", kind.lt),
            )
            if bound is not None
        ]
        return " ".join([noun, " and ".join(bounds)]).strip()
    return "a text"


def _settings_of(section: str, struct: type[msgspec.Struct]) -> Iterator[Setting]:
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType)
    for entry in described.fields:
        kind, description, or_zero = entry.type, "", False
        if isinstance(kind, inspect.Metadata):
            or_zero = (kind.extra or {}).get("or_zero", False)
            description = (kind.extra_json_schema or {}).get("description", "")
            kind = kind.type
        yield Setting(section, entry.name, description, entry.default, kind, or_zero)


SETTINGS: tuple[Setting, ...] = tuple(
    setting for section, struct in SECTIONS.items() for setting in _settings_of(section, struct)
)


class Scope:
    """The settings that one command knows; no two of them share a name.

    `select` lists sections (`"engine"`), single settings (`"front.log_level"`) and exceptions (`"-router.prefill"`).
    """

    def __init__(self, *select: str) -> None:
        chosen: dict[str, Setting] = {}
        for item in select:
            section, _, name = item.removeprefix("-").partition(".")
            matching = [s for s in SETTINGS if s.section == section and name in ("", s.name)]
            assert matching, f"no setting {item}"
            for setting in matching:
                if item.startswith("-"):
                    del chosen[setting.name]
                else:
                    assert setting.name not in chosen, f"{setting.name} is in this scope twice"
                    chosen[setting.name] = setting
        self._by_name = chosen

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Setting:
        return self._by_name[name]


LOGGING = ("front.log_level", "front.log_format")
# `serve` names its workers by the specs of the launch section, not by URL, and has several of them choose a port
SERVE = Scope(
    "engine",
    "transfer",
    "-transfer.tcp_port",
    "worker.heartbeat_s",
    "router",
    "-router.prefill",
    "-router.decode",
    "-router.both",
    "front",
    "observe",
    "launch",
)
WORKER = Scope("engine", "transfer", "worker", *LOGGING, "observe", "launch.drain_s")
ROUTER = Scope("router", "front", "observe", "launch.drain_s", "engine.tokenizer")
OFFLINE = Scope("engine", "transfer", "-transfer.tcp_port", "launch.prefill", "launch.decode", "launch.both", *LOGGING)


@dataclass(frozen=True)
class Resolved:
    """The values of one command: what was given, by setting name, and what that makes of the configs."""

    given: Mapping[str, Any]
    scope: Scope
    warnings: tuple[str, ...] = field(default=())

    def config(self, struct: type[Config]) -> Config:
        """The config of this type; settings outside the scope have their defaults."""
        section = next(name for name, known in SECTIONS.items() if known is struct)
        return struct(
            **{s.name: self.given[s.name] for s in self.scope if s.section == section and s.name in self.given}
        )


def resolve(
    scope: Scope,
    flags: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    config_file: str | None = None,
) -> Resolved:
    """The settings of one command.

    `flags` holds what the command line gave, by setting name: texts, lists of texts, or booleans; None is "not given".
    `environment` is os.environ unless given. Raises ConfigError.
    """
    environment = os.environ if environment is None else environment
    path = config_file or environment.get(CONFIG_VARIABLE) or None
    given = _from_file(scope, path) if path else {}
    from_variables, warnings = _from_environment(scope, environment)
    given.update(from_variables)
    for name, value in flags.items():
        if value is None or value == () or name not in scope:
            continue
        setting = scope[name]
        given[name] = (
            setting.parse(value, setting.flag) if isinstance(value, str) else setting.check(value, setting.flag)
        )
    return Resolved(given, scope, tuple(warnings))


def _from_environment(scope: Scope, environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    known = {setting.variable for setting in SETTINGS} | {CONFIG_VARIABLE}
    names = {name.removeprefix(PREFIX) for name in known}  # the prefix alone would make all of them alike
    given: dict[str, Any] = {}
    for setting in scope:
        text = environment.get(setting.variable)
        if text is not None:
            given[setting.name] = setting.parse(text, setting.variable)
    warnings = [
        f"the environment variable {name} is not known to slipstream"
        + nearest(name.removeprefix(PREFIX), names).replace("mean ", f"mean {PREFIX}")
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known
    ]
    return given, warnings


def _from_file(scope: Scope, path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: the file cannot be read ({error.strerror}).") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: this is not a TOML file: {error}.") from error
    given: dict[str, Any] = {}
    names = {setting.name for setting in SETTINGS}
    for key, value in document.items():
        if key in SECTIONS and isinstance(value, dict):
            given.update(_from_section(scope, path, key, value))
        elif key not in names:
            hint = nearest(key, names | set(SECTIONS))
            raise ConfigError(f"{path}: there is no setting or section {key!r}{hint or '.'}")
        elif key in scope:
            given[key] = scope[key].check(value, f"{path}: {key}")
    return given


def _from_section(scope: Scope, path: str, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {setting.name for setting in SETTINGS if setting.section == section}
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in names:
            raise ConfigError(f"{path}: section [{section}] has no setting {name!r}{nearest(name, names) or '.'}")
        if name in scope and scope[name].section == section:
            given[name] = scope[name].check(value, f"{path}: [{section}] {name}")
    return given


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the X in `known` that is most like `name`, "" when none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=SIMILAR)
    return f"; did you mean {close[0]}?" if close else ""


def to_flags(scope: Scope, *configs: msgspec.Struct, skip: Iterable[str] = ()) -> list[str]:
    """The flags by which a command of this scope gets the values of `configs` that differ from the defaults."""
    skipped = set(skip)
    arguments: list[str] = []
    for config in configs:
        section = next(name for name, struct in SECTIONS.items() if struct is type(config))
        for setting in scope:
            if setting.section != section or setting.name in skipped:
                continue
            value = getattr(config, setting.name)
            if value == setting.default:
                continue
            if setting.is_switch:
                arguments.append(setting.flag if value else "--no-" + setting.flag.removeprefix("--"))
            elif setting.is_list:
                arguments += [part for item in value for part in (setting.flag, item)]
            else:
                arguments += [setting.flag, str(value)]
    return arguments


# ------------------------------------------------------------------------------------------------------ documentation

INTRODUCTION = """\
# Configuration

<!-- Made from src/slipstream/config.py by `python -m slipstream.settings > docs/configuration.md`; a test compares. -->

Every setting can be given in three ways. The first that names it wins:

1. a flag: `--page-tokens 32` (switches: `--prefix-cache`, `--no-prefix-cache`; lists: the flag once for each item)
2. an environment variable: `SLIPSTREAM_PAGE_TOKENS=32` (lists: separated by commas)
3. a TOML file named by `--config FILE` or `SLIPSTREAM_CONFIG`, flat or by section:

```toml
page_tokens = 32

[front]
port = 9000
```

A wrong value ends the command with the place it came from and what is possible. A key of the file that is no setting is
an error too; an unknown `SLIPSTREAM_*` variable is a warning. Settings of the file that a command does not use are left
alone, so that one file can serve all commands.

`slipstream COMMAND --help` lists the flags of a command. `serve` passes the settings of the sections `engine`,
`transfer`, `worker` and `observe` on to every worker that it starts.
"""

SECTION_TITLES = {
    "engine": "`serve`, `worker`, `generate`, `slipstream.LLM`; `router` takes `--tokenizer` alone",
    "transfer": "`worker`; `serve`, `generate` and `slipstream.LLM` take all but `--tcp-port`",
    "worker": "`worker`; `serve` takes `--heartbeat-s` alone and chooses the rest for each worker",
    "router": "`router`; `serve` takes all but the lists of workers",
    "front": "`serve`, `router`; `worker` and `generate` take the two for logging",
    "observe": "`serve`, `router`, `worker`",
    "launch": "`serve`; `worker` and `router` take `--drain-s` alone",
}


def reference() -> str:
    """The text of docs/configuration.md."""
    parts = [INTRODUCTION]
    for section, struct in SECTIONS.items():
        summary = (struct.__doc__ or "").strip().splitlines()[0]
        parts.append(f"\n## {section}\n\n{summary} Used by {SECTION_TITLES[section]}.\n")
        parts.append("\n| flag | default | values | meaning |\n|---|---|---|---|\n")
        for setting in SETTINGS:
            if setting.section == section:
                cells = (f"`{setting.flag}`", _show(setting.default), setting.allowed, setting.description)
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def _show(default: Any) -> str:
    if default == "" or default == ():
        return "(empty)"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(reference(), end="")
