"""The one view of the system that checks have: files, environment, limits, driver, packages, network, nothing else.

A check never calls the operating system by itself. On a real machine `live.system()` makes the view; a test makes one
from a list of files and a few values, and every check runs on it without knowing. All calls are short or have a time
limit of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipstream.doctor.driver import DriverFacts
from slipstream.topo.tree import ListTree, Tree

UNLIMITED = None


@dataclass(frozen=True)
class Package:
    """An installed distribution. `requires` are its requirements as written in its metadata; `editable` is the source
    folder of an editable install, "" otherwise; `folder` is where its modules lie."""

    name: str
    version: str
    folder: str = ""
    editable: str = ""
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limit:
    """A resource limit of this process; None is unlimited."""

    soft: int | None
    hard: int | None

    def reaches(self, wanted: int) -> bool:
        return self.soft is None or self.soft >= wanted


@dataclass(frozen=True)
class Space:
    """Of a file system, in bytes."""

    total: int
    free: int


class NoAnswer(Exception):
    """Nothing answers at an address; the text says why."""


def _nothing(name: str) -> None:
    return None


def _none_of(name: str) -> tuple[str, ...]:
    return ()


def _free(host: str, port: int) -> str:
    return ""


def _silence(url: str, path: str) -> tuple[int, bytes]:
    raise NoAnswer("connection refused")


def _no_log() -> list[str] | None:
    return None


@dataclass(frozen=True)
class System:
    """What a check may ask.

    `limits` has memlock (bytes), nofile and nproc. `driver` is None where there is no GPU driver. `libraries(name)`
    are absolute paths of the shared objects of a distribution; `needed(path)` lists the libraries that a shared object
    asks for, None when it is none. `space(path)` is None when nothing is mounted or found there. `addresses` maps the
    network interfaces of this namespace to their addresses, `down` are those of them that are down. `resolve(name)`
    gives addresses, () when the name is not known in time. `bind(host, port)` returns "" when the port is free, else
    the reason. `get(url, path)` returns HTTP status and body, or raises NoAnswer. `kernel_log()` is None when it may
    not be read. `cpus` are those that this process may use. `writable(path)`: whether a file could be made in that
    folder, or in the nearest one above.
    """

    tree: Tree = field(default_factory=lambda: ListTree({}))
    environ: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    driver: DriverFacts | None = None
    package: Callable[[str], Package | None] = _nothing
    libraries: Callable[[str], tuple[str, ...]] = _none_of
    space: Callable[[str], Space | None] = _nothing
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    down: frozenset[str] = frozenset()
    hostname: str = "localhost"
    resolve: Callable[[str], tuple[str, ...]] = _none_of
    bind: Callable[[str, int], str] = _free
    get: Callable[[str, str], tuple[int, bytes]] = _silence
    kernel_log: Callable[[], list[str] | None] = _no_log
    needed: Callable[[str], tuple[str, ...] | None] = _nothing
    writable: Callable[[str], bool] = lambda path: True
    cpus: frozenset[int] = frozenset({0})
    python: tuple[int, int] = (3, 11)
    home: str = "/root"
    root_user: bool = False
