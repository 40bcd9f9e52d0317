"""Reads what people paste: `read_text` recognises the tool by the text and returns its `Reading`.

`read_all` is for files that hold several outputs: each known kind in it is read on its own. A text that nothing
recognises is an InputError that lists what can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.topo.read import gpus, host, matrix, rdma, snapshot, verbs
from slipstream.topo.read.reading import Matrix, Reading, XidEvent, plain_devices
from slipstream.topo.read.text import Text, clean

__all__ = ["KINDS", "Matrix", "Reading", "XidEvent", "plain_devices", "read_all", "read_text"]


@dataclass(frozen=True)
class Kind:
    """One tool's output. `prefixes` are beginnings of file names that stand for it when the text is empty."""

    name: str
    looks_like: Callable[[Text], bool]
    read: Callable[[Text], Reading]
    prefixes: tuple[str, ...]


KINDS = (
    Kind("PCI and RDMA sysfs list", snapshot.looks_like, snapshot.read_snapshot, ("sysfs",)),
    Kind("nvidia-smi topo", matrix.looks_like, matrix.read_matrix, ("topo",)),
    Kind("nvidia-smi nvlink -s", gpus.looks_like_nvlink, gpus.read_nvlink, ("nvlink",)),
    Kind("nvidia-smi -q (Fabric)", gpus.looks_like_fabric, gpus.read_fabric, ("fabric",)),
    Kind("kernel log with Xid", gpus.looks_like_dmesg, gpus.read_dmesg, ("dmesg",)),
    Kind("ibv_devinfo", verbs.looks_like_devinfo, verbs.read_devinfo, ("ibv_devinfo",)),
    Kind("ibstat", verbs.looks_like_ibstat, verbs.read_ibstat, ("ibstat",)),
    Kind("ibstatus", verbs.looks_like_ibstatus, verbs.read_ibstatus, ("ibstatus",)),
    Kind("rdma link", rdma.looks_like_link, rdma.read_link, ("rdma_link",)),
    Kind("ibdev2netdev", rdma.looks_like_ibdev, rdma.read_ibdev, ("ibdev2netdev",)),
    Kind("show_gids", rdma.looks_like_gids, rdma.read_gids, ("show_gids",)),
    Kind("lsmod", host.looks_like_lsmod, host.read_lsmod, ("lsmod",)),
    Kind("ulimit", host.looks_like_ulimit, host.read_ulimit, ("ulimit",)),
    Kind("device files", host.looks_like_dev, host.read_dev, ("dev",)),
)


def read_all(raw: str, name: str = "") -> list[Reading]:
    """Readings of every kind of output in `raw`. `name` (a file name) decides only when the text is empty.

    Raises ConfigError when nothing in it is known.
    """
    text = clean(raw)
    kinds = [kind for kind in KINDS if kind.looks_like(text)]
    if not kinds and not raw.strip():
        stem = name.rsplit("/", 1)[-1]
        kinds = [kind for kind in KINDS if stem.startswith(kind.prefixes)]
    if not kinds:
        known = ", ".join(kind.name for kind in KINDS)
        raise ConfigError(f"cannot tell which tool wrote {name or 'this text'}; known are: {known}.")
    return [kind.read(text) for kind in kinds]


def read_text(raw: str, name: str = "") -> Reading:
    """The reading of a text that holds one output (the first kind, when it holds more)."""
    return read_all(raw, name)[0]
