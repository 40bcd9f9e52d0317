"""Finds transports by name, importing each only when it is asked for.

What cannot be imported or used here is not an error but a reason, which the route report of every peer repeats.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from slipstream.errors import MissingExtra, RouteUnavailable
from slipstream.transfer.transports.base import Context, Transport

MODULES: Mapping[str, str] = MappingProxyType(
    {
        name: f"slipstream.transfer.transports.{name}"
        for name in ("local", "cuda_ipc", "shm", "nixl", "mooncake", "tcp", "fake")
    }
)

PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"nixl": ("nixl", "nixl_cu13", "nixl_cu12"), "mooncake": ("mooncake",)}
)
"""What transports over other projects' packages import: any one of these."""


def missing_package(name: str) -> MissingExtra | None:
    """The error that says how to install what the transport `name` needs, when none of it is; imports nothing."""
    modules = PACKAGES.get(name, ())
    if not modules or any(module in sys.modules or importlib.util.find_spec(module) for module in modules):
        return None
    return MissingExtra(name, name)


def load(name: str, context: Context, modules: Mapping[str, str] = MODULES) -> Transport:
    """The transport `name` of this agent. Raises RouteUnavailable with the reason when it cannot be used here."""
    if name not in modules:
        raise RouteUnavailable(f"there is no transport {name!r}; there are {', '.join(modules)}")
    try:
        module = importlib.import_module(modules[name])
    except ModuleNotFoundError as error:
        if error.name == modules[name]:
            raise RouteUnavailable(f"this version of slipstream has no {name} transport") from error
        raise RouteUnavailable(f"the package {error.name!r} is not installed") from error
    except (ImportError, OSError) as error:
        raise RouteUnavailable(f"cannot be imported: {error}") from error
    create = getattr(module, "create", None)
    if create is None:
        raise RouteUnavailable(f"{modules[name]} has no create(context)")
    return create(context)


def load_all(names: Sequence[str], context: Context) -> tuple[dict[str, Transport], dict[str, str]]:
    """Those of `names` that can be used here, in their order, and the reasons of the others."""
    usable: dict[str, Transport] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            usable[name] = load(name, context)
        except RouteUnavailable as error:
            refused[name] = error.message
    return usable, refused
