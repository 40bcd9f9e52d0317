"""The running system as a `System`. Everything that a check asks of the operating system is asked here."""

from __future__ import annotations

import errno
import fcntl
import functools
import ipaddress
import os
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from slipstream.asking import Unreachable
from slipstream.asking import get as http_get
from slipstream.doctor import driver, elf
from slipstream.doctor.system import Limit, NoAnswer, Package, Space, System
from slipstream.topo.tree import FolderTree

RESOLVE_S = 2.0
HTTP_S = 2.0
_SIOCGIFADDR, _SIOCGIFFLAGS, _IFF_UP = 0x8915, 0x8913, 1
_LOG_RECORDS = 20000
_LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
Value = TypeVar("Value")


def system(api_key: str = "") -> System:
    """This machine, as this process sees it. Takes as long as NVML, which has a time limit."""
    tree = FolderTree("/")
    has_driver = tree.exists("/proc/driver/nvidia/version") or tree.exists("/dev/nvidiactl")
    return System(
        tree=tree,
        environ=dict(os.environ),
        limits={name: _limit(number) for name, number in _LIMITS.items()},
        driver=driver.collect_in_child() if has_driver else None,
        package=functools.cache(package),
        libraries=libraries,
        space=space,
        addresses=addresses(tree),
        down=interfaces_down(),
        hostname=socket.gethostname(),
        resolve=resolve,
        bind=bind,
        get=lambda url, path: _get(url, path, api_key),
        kernel_log=kernel_log,
        needed=elf.needed,
        writable=writable,
        cpus=frozenset(os.sched_getaffinity(0)),
        python=(sys.version_info[0], sys.version_info[1]),
        home=os.path.expanduser("~"),
        root_user=os.geteuid() == 0,
    )


def within(seconds: float, work: Callable[[], Value], otherwise: Value) -> Value:
    """`work`'s value, or `otherwise` when it takes longer: the thread is then left behind. For calls of the system
    that know no time limit (names, dead network file systems)."""
    found: list[Value] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise


def _limit(number: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
    return Limit(soft, hard)


def package(name: str) -> Package | None:
    """An installed distribution by its name."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Package(
        name=name,
        version=found.version,
        folder=str(found.locate_file("")),
        editable=_editable(found),
        requires=tuple(found.requires or ()),
    )


def libraries(name: str) -> tuple[str, ...]:
    """Shared objects of an installed distribution; () when it is not installed or does not list its files."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return ()
    listed = [file for file in found.files or () if ".so" in file.name and not file.name.endswith((".py", ".pyi"))]
    return tuple(str(found.locate_file(file)) for file in listed)


def _editable(found: metadata.Distribution) -> str:
    text = found.read_text("direct_url.json") or ""
    return text.partition('"url": "file://')[2].partition('"')[0] if '"editable": true' in text else ""


def space(path: str) -> Space | None:
    """Size and free bytes of the file system at a path."""
    try:
        told = os.statvfs(path)
    except OSError:
        return None
    return Space(told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize)


def addresses(tree: FolderTree) -> dict[str, tuple[str, ...]]:
    """Interfaces of this network namespace with their IPv4 and IPv6 addresses."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, listed in found.items():
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            listed.append(socket.inet_ntoa(reply[20:24]))
    for line in (tree.read("/proc/net/if_inet6") or "").splitlines():
        words = line.split()
        if len(words) == 6 and words[5] in found:
            found[words[5]].append(str(ipaddress.IPv6Address(int(words[0], 16))))
    return {name: tuple(listed) for name, listed in found.items()}


def interfaces_down() -> frozenset[str]:
    """Interfaces of this network namespace that are not up. The files below /sys/class/net may be those of another."""
    down = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if not struct.unpack_from("<H", reply, 16)[0] & _IFF_UP:
                down.add(name)
    return frozenset(down)


def resolve(name: str) -> tuple[str, ...]:
    """Addresses of a host name; () when it has none or the resolver is slow."""

    def ask() -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))
        except (OSError, UnicodeError):
            return ()

    return within(RESOLVE_S, ask, ())


def bind(host: str, port: int) -> str:
    """ "" when a server could listen there, else the reason."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "in use"
        return error.strerror or str(error)
    return ""


def _get(url: str, path: str, api_key: str) -> tuple[int, bytes]:
    try:
        return http_get(url, path, api_key, HTTP_S)
    except Unreachable as error:
        raise NoAnswer(error.message) from error


def kernel_log() -> list[str] | None:
    """The kernel's messages, oldest first; None when this user may not read them."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while len(lines) < _LOG_RECORDS:
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:  # records were overwritten meanwhile: the next read goes on behind them
                continue
            except OSError:
                break
            if not record:
                break
            lines.append(record.decode(errors="replace").split(";", 1)[-1].split("\n", 1)[0])
    finally:
        os.close(fd)
    return lines


def writable(path: str) -> bool:
    """Whether a file could be made in a folder, or the folder itself."""
    folder = Path(path)
    while not within(1.0, folder.exists, True) and folder != folder.parent:
        folder = folder.parent
    return within(1.0, lambda: os.access(folder, os.W_OK | os.X_OK), False)
