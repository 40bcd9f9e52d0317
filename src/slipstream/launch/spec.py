"""Which workers run on which devices: the values of `--prefill`, `--decode` and `--both`.

    2               two workers on devices that are free
    cpu  2xcpu      one or two workers on the CPU
    cuda:0          one worker on GPU 0
    cuda:0,1  0,1   two workers, one GPU each       cuda:0-3 is cuda:0,1,2,3
    2xcuda:0        two workers that share GPU 0
    GPU-3f0c...     one worker on the GPU with this UUID
    cpu,cuda:1      any of these, separated by commas

A number alone is a count; a list of numbers is a list of GPUs. Counts take GPUs that no spec names, in their order,
one each; where there is none left they are refused, and on a machine without GPUs they mean the CPU.

Requests need both phases: `--decode 2` alone gets one prefill worker as well, `--prefill cuda:0` alone one decode
worker, on the first device that is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.launch.devices import Machine
from slipstream.types import Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
_TIMES = re.compile(r"(\d+)x(.+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Placement:
    """One worker to start: `name` is `prefill-0`, `decode-1`...; `device` is what `worker --device` takes."""

    name: str
    role: Role
    device: str

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


def place(machine: Machine, prefill: str, decode: str, both: str, device: str = "auto") -> list[Placement]:
    """The workers that these specs ask for. `device` is where counts go: `auto`, `cpu`, `cuda` or one device.

    Without any spec the machine is split: half of the GPUs prefill and half decode; one GPU, or one device by name,
    does both; without GPUs one CPU worker prefills and one decodes. Raises ConfigError.
    """
    specs: dict[Role, str] = {"prefill": prefill.strip(), "decode": decode.strip(), "both": both.strip()}
    if not any(specs.values()):
        specs = _default_specs(machine, device)
    wanted: dict[Role, list[str] | int] = {
        role: _parse(f"--{role}", text, machine) for role, text in specs.items() if text
    }
    named = {d for devices in wanted.values() if isinstance(devices, list) for d in devices}
    free = _free_devices(machine, device, named)
    missing = _missing_phase(wanted)
    if missing is not None and _has_room(wanted, missing, free, machine):
        wanted[missing] = 1
    placements: list[Placement] = [
        Placement(f"{role}-{number}", role, where)
        for role, devices in sorted(wanted.items(), key=lambda item: ROLES.index(item[0]))
        for number, where in enumerate(
            devices if isinstance(devices, list) else _take(f"--{role}", devices, free, machine)
        )
    ]
    _refuse_what_cannot_serve(placements)
    return placements


def _default_specs(machine: Machine, device: str) -> dict[Role, str]:
    if device == "cpu" or (device == "auto" and not machine.gpus):
        return {"prefill": "cpu", "decode": "cpu"}
    if device not in ("auto", "cuda"):
        return {"both": device}
    gpus = [gpu.device for gpu in machine.gpus]
    if len(gpus) < 2:
        return {"both": "1"}
    half = len(gpus) // 2
    return {"prefill": ",".join(gpus[:half]), "decode": ",".join(gpus[half:])}


def _parse(flag: str, text: str, machine: Machine) -> list[str] | int:
    """The devices that a spec names, or the count that it is."""
    if text.isdigit():
        return int(text)
    devices: list[str] = []
    on_gpu = all(part.strip().isdigit() for part in text.split(","))
    for part in (part.strip() for part in text.split(",")):
        times = _TIMES.fullmatch(part)
        count, what = (int(times[1]), times[2]) if times else (1, part)
        if what == "cpu":
            found, on_gpu = ["cpu"], False
        elif what.startswith("GPU-"):
            found, on_gpu = [_by_uuid(flag, text, what, machine)], False
        elif what.startswith("cuda:") or on_gpu:
            found, on_gpu = list(_by_number(flag, text, what.removeprefix("cuda:"), machine)), True
        elif re.match(r"tp\d+@", what):
            raise ConfigError(
                f"{flag} {text}: one worker on several GPUs (tensor parallel) is not built yet. "
                "Give each worker one device, for example cuda:0,1 for two workers."
            )
        else:
            raise _wrong(flag, text, f"{part!r} is neither a count nor a device", machine)
        devices += found * count
    return devices


def _by_number(flag: str, text: str, numbers: str, machine: Machine) -> Iterator[str]:
    match = _RANGE.fullmatch(numbers)
    if match is None:
        raise _wrong(flag, text, f"{numbers!r} is no GPU number", machine)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _wrong(flag, text, f"the range {numbers} runs backwards", machine)
    for index in range(first, last + 1):
        if not any(gpu.index == index for gpu in machine.gpus):
            raise _wrong(flag, text, f"there is no cuda:{index} on this machine", machine)
        yield f"cuda:{index}"


def _by_uuid(flag: str, text: str, uuid: str, machine: Machine) -> str:
    matching = [gpu for gpu in machine.gpus if gpu.uuid.startswith(uuid)]
    if len(matching) != 1:
        raise _wrong(flag, text, f"{uuid} names {len(matching)} GPUs of this machine", machine)
    return matching[0].device


def _free_devices(machine: Machine, device: str, named: set[str]) -> list[str] | str:
    """Where counts go: a list to take from, or one device that any number of workers may share."""
    if device == "cpu" or (device == "auto" and not machine.gpus):
        return "cpu"
    if device in ("auto", "cuda"):
        return [gpu.device for gpu in machine.gpus if gpu.device not in named]
    parsed = _parse("--device", device, machine)
    if isinstance(parsed, int) or len(parsed) != 1:
        raise ConfigError(f"--device {device}: give one device; this machine has {machine.devices}.")
    return parsed[0]


def _take(flag: str, count: int, free: list[str] | str, machine: Machine) -> list[str]:
    if isinstance(free, str):
        return [free] * count
    if count > len(free):
        raise ConfigError(
            f"{flag} {count}: only {len(free)} GPU(s) are not taken by other workers; this machine has "
            f"{machine.devices}. Ask for fewer, or let workers share one by name: 2xcuda:0."
        )
    taken = free[:count]
    del free[:count]
    return taken


def _wrong(flag: str, text: str, reason: str, machine: Machine) -> ConfigError:
    return ConfigError(
        f"{flag} {text}: {reason}. Give a count (2) or devices (cpu, 2xcpu, cuda:0,1); this machine has "
        f"{machine.devices}."
    )


def _missing_phase(wanted: dict[Role, list[str] | int]) -> Role | None:
    """The phase that nothing said a word about while the other one has workers."""
    asked = {role for role, devices in wanted.items() if devices}
    if asked == {"prefill"} and "decode" not in wanted:
        return "decode"
    if asked == {"decode"} and "prefill" not in wanted:
        return "prefill"
    return None


def _has_room(wanted: dict[Role, list[str] | int], missing: Role, free: list[str] | str, machine: Machine) -> bool:
    """Whether one more worker finds a device; False where already the counts do not, which is refused as such.

    Raises ConfigError when all devices are taken by what was asked for.
    """
    counts = sum(devices for devices in wanted.values() if isinstance(devices, int))
    if isinstance(free, str) or counts < len(free):
        return True
    if counts > len(free):
        return False
    present = "prefill" if missing == "decode" else "decode"
    raise ConfigError(
        f"--{present}: its workers take every GPU, and requests need a {missing} worker as well; this machine has "
        f"{machine.devices}. Ask for fewer, or say where the other one goes: --{missing} cuda:0 shares that GPU, "
        "--both does without the split."
    )


def _refuse_what_cannot_serve(placements: list[Placement]) -> None:
    roles = {placement.role for placement in placements}
    if not placements:
        raise ConfigError("no worker is asked for: give --both 1, or --prefill 1 --decode 1.")
    for missing, present in (("decode", "prefill"), ("prefill", "decode")):
        if roles == {present}:
            raise ConfigError(
                f"--{missing} 0 leaves only {present} workers, and requests need both phases: leave it out or say "
                f"--{missing} 1, or use --both for workers that do either."
            )


def refuse_idle_transport(placements: list[Placement], transport: str) -> None:
    """Raises ConfigError for a transport that was asked for by name where no worker has another one to hand over to."""
    if transport != "auto" and len(placements) < 2:
        raise ConfigError(
            f"transport {transport!r} was asked for, but there is nothing to transfer: one worker does prefill and "
            "decode. Ask for two (prefill 1 and decode 1), or leave the transport out."
        )
