"""Asks NVML what only the GPU driver knows: identities, NVLink, fabric, peer access.

`collect` works on anything that has NVML's functions (the `nvidia-ml-py` package, or a recording of it) and returns
plain facts; a question that a driver does not know leaves its field empty. On a live system it runs in a child
process with a time limit (`collect_in_child`), because a GPU that hangs makes these calls hang too. NVML ignores
CUDA_VISIBLE_DEVICES: all GPUs of the container appear, in PCI order, and UUIDs connect them with CUDA's devices.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import msgspec

_LINK_SLOTS = 36
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2  # the package's own READ constant is a tuple by a stray comma
_P2P_WORDS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_REMOTE = {0: "gpu", 2: "switch"}
_FABRIC_STATES = {0: "Not Supported", 1: "Not Started", 2: "In Progress", 3: "Completed"}
_FIELD_SPEED_LINK, _FIELD_SPEED_COMMON = 164, 90  # NVLINK_GET_SPEED (by link), NVLINK_SPEED_MBPS_COMMON
_NOMINAL_GBPS = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0, 8: 50.0}  # a link, one way, by version
_HEALTH_BITS = {  # shift: (bad value, what it means); two bits each, nvml.h NVML_GPU_FABRIC_HEALTH_MASK_*
    0: "degraded bandwidth",
    2: "route recovery in progress",
    4: "route unhealthy",
    6: "access timeout recovery",
}
_MISCONFIGURED_SHIFT, _MISCONFIGURED_NONE = 8, (0, 1)


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One NVLink slot; `remote` is "gpu", "switch" or "" (not told, as in guests)."""

    slot: int
    active: bool
    remote: str = ""
    remote_pci: str = ""
    version: int | None = None


class FabricFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The GPU's fabric as NVML tells it; `status` 0 is success; `problems` are from the health mask."""

    state: str
    status: int = 0
    clique: int = 0
    cluster: str = ""
    problems: tuple[str, ...] = ()


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    model: str = ""
    uuid: str = ""
    pci: str = ""
    memory_bytes: int | None = None
    memory_node: int | None = None
    mig: bool | None = None
    virtual: bool | None = None
    links: tuple[LinkFacts, ...] = ()
    gbps_per_link: float | None = None
    fabric: FabricFacts | None = None


class NvmlFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All GPUs, and per ordered pair of indices ("0,1") the PCIe level and the peer words for read, write, NVLink."""

    driver: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    levels: dict[str, str] = {}
    peer_read: dict[str, str] = {}
    peer_write: dict[str, str] = {}
    peer_nvlink: dict[str, str] = {}
    problems: tuple[str, ...] = ()


class _Asker:
    """Calls NVML functions; what the driver or an older package does not know is None."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._error = getattr(nvml, "NVMLError", RuntimeError)

    def __call__(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._error, AttributeError):
            return None


def collect(nvml: Any) -> NvmlFacts:
    """Facts from an initialised NVML-like object."""
    ask = _Asker(nvml)
    count = ask("nvmlDeviceGetCount") or 0
    handles = [ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    problems = [
        f"GPU{i}: NVML gives no handle (lost, or not permitted)" for i, handle in enumerate(handles) if handle is None
    ]
    present = [(index, handle) for index, handle in enumerate(handles) if handle is not None]
    facts: dict[str, dict[str, str]] = {"levels": {}, "read": {}, "write": {}, "nvlink": {}}
    for i, a in present:
        for j, b in present:
            if i != j:
                _pair(ask, a, b, f"{i},{j}", facts)
    return NvmlFacts(
        driver=_text(ask("nvmlSystemGetDriverVersion")),
        gpus=tuple(_gpu(nvml, ask, index, handle) for index, handle in present),
        levels=facts["levels"],
        peer_read=facts["read"],
        peer_write=facts["write"],
        peer_nvlink=facts["nvlink"],
        problems=tuple(problems),
    )


def _pair(ask: _Asker, a: Any, b: Any, key: str, facts: dict[str, dict[str, str]]) -> None:
    ancestor = ask("nvmlDeviceGetTopologyCommonAncestor", a, b)
    if ancestor in _ANCESTORS:
        facts["levels"][key] = _ANCESTORS[ancestor]
    for name, index in (("read", _P2P_READ), ("write", _P2P_WRITE), ("nvlink", _P2P_NVLINK)):
        status = ask("nvmlDeviceGetP2PStatus", a, b, index)
        if status is not None:
            facts[name][key] = _P2P_WORDS.get(status, "U")


def _gpu(nvml: Any, ask: _Asker, index: int, handle: Any) -> GpuFacts:
    pci = ask("nvmlDeviceGetPciInfo", handle)
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    virtualization = ask("nvmlDeviceGetVirtualizationMode", handle)
    links = _links(ask, handle)
    return GpuFacts(
        index=index,
        model=_text(ask("nvmlDeviceGetName", handle)),
        uuid=_text(ask("nvmlDeviceGetUUID", handle)),
        pci=pci_address(_text(pci.busId)) if pci is not None else "",
        memory_bytes=int(memory.total) if memory is not None else None,
        memory_node=ask("nvmlDeviceGetNumaNodeId", handle),
        mig=bool(mig[0]) if mig is not None else None,
        virtual=virtualization == 2 if virtualization is not None else None,
        links=links,
        gbps_per_link=_link_rate(ask, handle, links),
        fabric=_fabric(nvml, ask, handle),
    )


def _links(ask: _Asker, handle: Any) -> tuple[LinkFacts, ...]:
    links = []
    for slot in range(_LINK_SLOTS):
        state = ask("nvmlDeviceGetNvLinkState", handle, slot)
        if state is None:
            break
        remote = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, slot) if state else None
        pci = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, slot) if state else None
        links.append(
            LinkFacts(
                slot=slot,
                active=bool(state),
                remote=_REMOTE.get(remote, "") if remote is not None else "",
                remote_pci=_far_end(_text(pci.busId)) if pci is not None else "",
                version=ask("nvmlDeviceGetNvLinkVersion", handle, slot),
            )
        )
    return tuple(links)


def _far_end(bus_id: str) -> str:
    """The address of what a link leads to; guests are shown one of all ones, which is none."""
    address = pci_address(bus_id)
    return "" if address.startswith("ffffffff:") else address


def _link_rate(ask: _Asker, handle: Any, links: tuple[LinkFacts, ...]) -> float | None:
    """GB/s of one link, one way: as the driver tells it, else the nominal one of the link's version."""
    first = next((link for link in links if link.active), None)
    if first is None:
        return None
    for field in ((_FIELD_SPEED_LINK, first.slot), (_FIELD_SPEED_COMMON, 0)):
        values = ask("nvmlDeviceGetFieldValues", handle, [field])
        if values is not None and values[0].nvmlReturn == 0 and values[0].value.uiVal:
            return values[0].value.uiVal / 1000
    return _NOMINAL_GBPS.get(first.version or 0)


def _fabric(nvml: Any, ask: _Asker, handle: Any) -> FabricFacts | None:
    kind = getattr(nvml, "c_nvmlGpuFabricInfo_v2_t", None)
    if kind is None:
        return None
    info = kind()
    reference = ctypes.byref(info) if isinstance(info, ctypes.Structure) else info
    if ask("nvmlDeviceGetGpuFabricInfoV", handle, reference) is None:
        return None
    mask = int(info.healthMask)
    problems = [text for shift, text in _HEALTH_BITS.items() if mask >> shift & 3 == 1]
    if mask >> _MISCONFIGURED_SHIFT & 15 not in _MISCONFIGURED_NONE:
        problems.append(f"incorrect configuration ({mask >> _MISCONFIGURED_SHIFT & 15})")
    return FabricFacts(
        state=_FABRIC_STATES.get(int(info.state), f"state {info.state}"),
        status=int(info.status),
        clique=int(info.cliqueId),
        cluster=bytes(info.clusterUuid).hex(),
        problems=tuple(problems),
    )


def pci_address(bus_id: str) -> str:
    """NVML's 00000000:1B:00.0 as sysfs writes it: lower case, a domain of four digits unless it needs more."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest and domain else bus_id.lower()


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def collect_in_child(timeout_s: float = 15.0) -> NvmlFacts:
    """Facts of this system from a child process that is given up after `timeout_s`; `problems` says what failed."""
    command = [sys.executable, "-m", "slipstream.topo.nvml"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return NvmlFacts(problems=(f"NVML did not answer within {timeout_s:g} s: a GPU may hang (see the kernel log)",))
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        return NvmlFacts(problems=(f"NVML failed: {last or f'exit code {done.returncode}'}",))
    return msgspec.json.decode(done.stdout, type=NvmlFacts)


def main() -> int:
    """Prints the facts of this system as JSON; the child of `collect_in_child`."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        facts = NvmlFacts(problems=("nvidia-ml-py is not installed: pip install 'slipstream[gpu]'",))
        sys.stdout.buffer.write(msgspec.json.encode(facts))
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        facts = NvmlFacts(problems=(f"NVML does not start: {error}",))
    else:
        facts = collect(pynvml)
    sys.stdout.buffer.write(msgspec.json.encode(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
