"""Which workers run on which devices: the values of `--prefill`, `--decode` and `--both`.

    2               two workers on devices that are free
    cpu  2xcpu      one or two workers on the CPU
    cuda:0          one worker on GPU 0
    cuda:0,1  0,1   two workers, one GPU each       cuda:0-3 is cuda:0,1,2,3
    2xcuda:0        two workers that share GPU 0
    GPU-3f0c...     one worker on the GPU with this UUID
    tp2@cuda:0,1    one worker of two tensor-parallel ranks, on these two GPUs      tp2@cuda:0-3 is two such workers
    tp2@cpu         one worker of two ranks on the CPU
    tp2  3xtp2      one or three workers of two ranks on GPUs that are free
    cpu,cuda:1      any of these, separated by commas

A number alone is a count; a list of numbers is a list of GPUs. Counts take GPUs that no spec names, in their order,
one a rank; where there is none left they are refused, and on a machine without GPUs they mean the CPU. `tpN@` takes the
next N devices; `--tp N` says the same for everything that does not.

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
MOST_WORKERS = 256  # of one number: what is more is a slip of the keyboard, and would take the machine down
_PART = re.compile(r"(?:(\d+)x)?(?:tp(\d+)@)?(.+)")
_COUNT = re.compile(r"(?:(\d+)x)?tp(\d+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Placement:
    """One worker to start: `name` is `prefill-0`, `decode-1`...; `device` is what `worker --device` takes: with `tp`
    ranks on GPUs, as many devices, separated by commas."""

    name: str
    role: Role
    device: str
    tp: int = 1

    @property
    def devices(self) -> list[str]:
        """One for each rank."""
        return ["cpu"] * self.tp if self.on_cpu else self.device.split(",")

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class _Where:
    """The devices of one worker, and its ranks."""

    device: str
    tp: int


@dataclass(frozen=True)
class _Count:
    """Workers on devices that are still to be found, `tp` ranks each."""

    number: int
    tp: int


def place(machine: Machine, prefill: str, decode: str, both: str, device: str = "auto", tp: int = 1) -> list[Placement]:
    """The workers that these specs ask for. `device` is where counts go: `auto`, `cpu`, `cuda` or one device.

    `tp` is the number of ranks of the workers of which no spec says it.

    Without any spec the machine is split: half of the GPUs prefill and half decode; one GPU, or one device by name,
    does both; without GPUs one CPU worker prefills and one decodes. Raises ConfigError.
    """
    specs: dict[Role, str] = {"prefill": prefill.strip(), "decode": decode.strip(), "both": both.strip()}
    if not any(specs.values()):
        specs = _default_specs(machine, device, tp)
    wanted: dict[Role, list[_Where] | _Count] = {
        role: _parse(f"--{role}", text, machine, tp) for role, text in specs.items() if text
    }
    lists = [workers for workers in wanted.values() if isinstance(workers, list)]
    named = {name for workers in lists for where in workers for name in where.device.split(",")}
    free = _free_devices(machine, device, named)
    missing = _missing_phase(wanted)
    if missing is not None and _has_room(wanted, missing, free, machine, tp):
        wanted[missing] = _Count(1, tp)
    placements: list[Placement] = [
        Placement(f"{role}-{number}", role, where.device, where.tp)
        for role, devices in sorted(wanted.items(), key=lambda item: ROLES.index(item[0]))
        for number, where in enumerate(
            devices if isinstance(devices, list) else _take(f"--{role}", devices, free, machine)
        )
    ]
    _refuse_what_cannot_serve(placements, [role for role in ROLES if role in wanted])
    return placements


def _default_specs(machine: Machine, device: str, tp: int) -> dict[Role, str]:
    if device == "cpu" or (device == "auto" and not machine.gpus):
        return {"prefill": "cpu", "decode": "cpu"}
    if device not in ("auto", "cuda"):
        return {"both": device}
    gpus = [gpu.device for gpu in machine.gpus]
    workers = len(gpus) // tp
    if workers < 2:
        return {"both": "1"}
    half = workers // 2 * tp
    return {"prefill": ",".join(gpus[:half]), "decode": ",".join(gpus[half : workers * tp])}


def _parse(flag: str, text: str, machine: Machine, tp: int) -> list[_Where] | _Count:
    """The workers whose devices a spec names, or the count that it is."""
    if text.isdigit():
        return _Count(_number(flag, text, text), tp)
    if match := _COUNT.fullmatch(text):
        return _Count(_number(flag, text, match[1] or "1"), _ranks(flag, text, match[2]))
    workers: list[_Where] = []
    size, times = tp, 1  # of the worker whose devices are being listed
    listed: list[str] = []
    on_gpu = all(part.strip().isdigit() for part in text.split(","))
    for part in (part.strip() for part in text.split(",")):
        match = _PART.fullmatch(part)
        if match is None:
            raise _wrong(flag, text, f"{part!r} is neither a count nor a device", machine)
        if match[1] or match[2]:
            _refuse_rest(flag, text, listed, size)
            size, times = _ranks(flag, text, match[2]) if match[2] else tp, _number(flag, text, match[1] or "1")
        elif not listed:
            size, times = tp, 1
        found, on_gpu = _devices(flag, text, match[3], machine, on_gpu or match[2] is not None)
        if found == ["cpu"]:
            _refuse_rest(flag, text, listed, size)
            workers += [_Where("cpu", size)] * times
            continue
        listed += found
        full = len(listed) // size * size
        workers += [_Where(_together(flag, text, listed[i : i + size]), size) for i in range(0, full, size)] * times
        listed = listed[full:]
    _refuse_rest(flag, text, listed, size)
    return workers


def _devices(flag: str, text: str, what: str, machine: Machine, on_gpu: bool) -> tuple[list[str], bool]:
    """The devices that one part names, and whether numbers alone go on naming GPUs behind it."""
    if what == "cpu":
        return ["cpu"], False
    if what.startswith("GPU-"):
        return [_by_uuid(flag, text, what, machine)], False
    if what.startswith("cuda:") or (on_gpu and what[:1].isdigit()):
        return list(_by_number(flag, text, what.removeprefix("cuda:"), machine)), True
    raise _wrong(flag, text, f"{what!r} is neither a count nor a device", machine)


def _number(flag: str, text: str, digits: str) -> int:
    if len(digits) > len(str(MOST_WORKERS)) or int(digits) > MOST_WORKERS:
        raise ConfigError(
            f"{flag} {text}: at most {MOST_WORKERS} workers are started at once, not {digits}. Ask for fewer, or start "
            "more yourself and let them join: slipstream worker --join."
        )
    return int(digits)


def _ranks(flag: str, text: str, digits: str) -> int:
    if not 1 <= int(digits) <= 64:
        raise ConfigError(f"{flag} {text}: a worker has 1 to 64 tensor-parallel ranks, not {digits}.")
    return int(digits)


def _together(flag: str, text: str, devices: list[str]) -> str:
    """The devices of one worker as `worker --device` takes them."""
    if len(set(devices)) < len(devices):
        raise ConfigError(f"{flag} {text}: a worker of {len(devices)} ranks needs as many different GPUs.")
    return ",".join(devices)


def _refuse_rest(flag: str, text: str, listed: list[str], size: int) -> None:
    if listed:
        raise ConfigError(
            f"{flag} {text}: a worker of {size} tensor-parallel ranks needs {size} devices, and only "
            f"{', '.join(listed)} is left for one. Name one for each rank: tp{size}@cuda:0-{size - 1}."
        )


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
    parsed = _parse("--device", device, machine, 1)
    if isinstance(parsed, list) and named >= {where.device for where in parsed}:
        return []
    if isinstance(parsed, _Count) or len(parsed) != 1:
        raise ConfigError(f"--device {device}: give one device; this machine has {machine.devices}.")
    return parsed[0].device


def _take(flag: str, count: _Count, free: list[str] | str, machine: Machine) -> list[_Where]:
    if free == "cpu":
        return [_Where("cpu", count.tp)] * count.number
    if isinstance(free, str):
        if count.tp > 1:
            raise ConfigError(f"{flag}: a worker of {count.tp} ranks does not fit on --device {free} alone.")
        return [_Where(free, 1)] * count.number
    needed = count.number * count.tp
    if needed > len(free):
        asked = str(count.number) if count.tp == 1 else f"{count.number} with {count.tp} ranks each"
        raise ConfigError(
            f"{flag} {asked}: only {len(free)} GPU(s) are not taken by other workers; this machine has "
            f"{machine.devices}. Ask for fewer, or let workers share one by name: 2xcuda:0."
        )
    taken = free[:needed]
    del free[:needed]
    return [_Where(",".join(taken[i : i + count.tp]), count.tp) for i in range(0, needed, count.tp)]


def _wrong(flag: str, text: str, reason: str, machine: Machine) -> ConfigError:
    return ConfigError(
        f"{flag} {text}: {reason}. Give a count (2) or devices (cpu, 2xcpu, cuda:0,1, tp2@cuda:0,1); this machine "
        f"has {machine.devices}."
    )


def _missing_phase(wanted: dict[Role, list[_Where] | _Count]) -> Role | None:
    """The phase that nothing said a word about while the other one has workers."""
    asked = {role for role, workers in wanted.items() if workers != [] and getattr(workers, "number", 1)}
    if asked == {"prefill"} and "decode" not in wanted:
        return "decode"
    if asked == {"decode"} and "prefill" not in wanted:
        return "prefill"
    return None


def _has_room(
    wanted: dict[Role, list[_Where] | _Count], missing: Role, free: list[str] | str, machine: Machine, tp: int
) -> bool:
    """Whether one more worker finds a device; False where already the counts do not, which is refused as such.

    Raises ConfigError when all devices are taken by what was asked for.
    """
    counts = sum(workers.number * workers.tp for workers in wanted.values() if isinstance(workers, _Count))
    if isinstance(free, str) or counts + tp <= len(free):
        return True
    if counts > len(free):
        return False
    present = "prefill" if missing == "decode" else "decode"
    raise ConfigError(
        f"--{present}: its workers take every GPU, and requests need a {missing} worker as well; this machine has "
        f"{machine.devices}. Ask for fewer, or say where the other one goes: --{missing} cuda:0 shares that GPU, "
        "--both does without the split."
    )


def _refuse_what_cannot_serve(placements: list[Placement], asked: list[Role]) -> None:
    """`asked` are the roles that flags were given for."""
    roles = {placement.role for placement in placements}
    if not placements:
        given = " and ".join(f"--{role} 0" for role in asked)
        work = {"prefill": "prefill", "decode": "decode", "both": "serve"}
        nobody = "serve" if len(asked) != 1 else work[asked[0]]
        raise ConfigError(
            f"with {given} nobody would {nobody}: leave it out, or give --prefill 1 --decode 1 for a worker of each "
            "phase, or --both 1 for one that does both."
        )
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
