"""Asks the GPU driver, in a child with a time limit: `python -m slipstream.doctor.driver`.

What the topology needs is collected by `slipstream.topo.nvml`; beside it stand the facts that only a diagnosis wants:
compute mode, BAR1 window, rows that wait to be remapped, the brand. A GPU that hangs makes these calls hang, so the
parent never makes them itself.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Literal

import msgspec

from slipstream.topo import nvml as topology
from slipstream.topo.nvml import NvmlFacts

Trouble = Literal["", "hang", "crash", "no-package", "no-start"]
LIMIT_S = 15.0
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_GEFORCE, _TITAN = 5, 6  # nvmlBrandType_t
_GEFORCE_RTX, _TITAN_RTX = 11, 12


class Card(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU by NVML's index. Fields are None where the driver does not tell."""

    index: int
    compute_mode: str | None = None
    consumer: bool | None = None
    bar1_bytes: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the driver said. `trouble` is why it said nothing, `said` its own words for it."""

    nvml: NvmlFacts = NvmlFacts()
    cards: tuple[Card, ...] = ()
    trouble: Trouble = ""
    said: str = ""


def collect(nvml: Any) -> DriverFacts:
    """Facts from an initialised NVML-like object."""
    facts = topology.collect(nvml)
    return DriverFacts(nvml=facts, cards=tuple(_card(nvml, gpu.index) for gpu in facts.gpus))


def _card(nvml: Any, index: int) -> Card:
    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except (getattr(nvml, "NVMLError", RuntimeError), AttributeError):
            return None

    handle = ask("nvmlDeviceGetHandleByIndex", index)
    mode, brand = ask("nvmlDeviceGetComputeMode", handle), ask("nvmlDeviceGetBrand", handle)
    bar1, rows = ask("nvmlDeviceGetBAR1MemoryInfo", handle), ask("nvmlDeviceGetRemappedRows", handle)
    return Card(
        index=index,
        compute_mode=_COMPUTE_MODES.get(mode) if mode is not None else None,
        consumer=brand in (_GEFORCE, _TITAN, _GEFORCE_RTX, _TITAN_RTX) if brand is not None else None,
        bar1_bytes=int(bar1.bar1Total) if bar1 is not None else None,
        remap_pending=bool(rows[2]) if rows is not None else None,
        remap_failed=bool(rows[3]) if rows is not None else None,
    )


def collect_in_child(limit_s: float = LIMIT_S) -> DriverFacts:
    """Facts of this system; never raises and never takes longer than `limit_s`."""
    command = [sys.executable, "-m", "slipstream.doctor.driver"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return DriverFacts(trouble="hang", said=f"no answer within {limit_s:g} s")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        return DriverFacts(trouble="crash", said=last or f"exit code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=DriverFacts)


def main() -> int:
    """Prints the facts of this system as JSON."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        facts = DriverFacts(trouble="no-package", said="nvidia-ml-py is not installed")
    else:
        try:
            pynvml.nvmlInit()
            facts = collect(pynvml)
        except pynvml.NVMLError as error:
            facts = DriverFacts(trouble="no-start", said=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
