"""What is installed: slipstream's own needs, and whether transfer packages were built for this machine."""

from __future__ import annotations

import re

from slipstream.doctor.case import Case, some
from slipstream.doctor.checks.gpu import torch_cuda
from slipstream.doctor.system import Package
from slipstream.doctor.verdict import Verdict, absent, check, fail, ok, warn

_OLDEST, _NEWEST = (3, 11), (3, 13)
_MOONCAKE = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda")
_NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
_UCX_HELPERS = ("tcp", "self", "sm", "cuda_copy")


@check("packages.python", "Python version")
def python(case: Case) -> Verdict:
    version = case.system.python
    seen = ".".join(map(str, version))
    if _OLDEST <= version <= _NEWEST:
        return ok(seen)
    return fail(
        seen,
        wanted="3.11 to 3.13",
        why="slipstream is made and tested for these",
        remedy="make a virtual environment with one of them",
    )


@check("packages.required", "What slipstream needs is installed")
def required(case: Case) -> Verdict:
    own = case.system.package("slipstream")
    if own is None:
        return absent("run from its source folder, not installed")
    wrong = [text for text in (_shortfall(case, line) for line in own.requires) if text]
    where = f"slipstream {own.version}" + (f", editable from {own.editable}" if own.editable else "")
    if not wrong:
        return ok(where)
    return fail(
        f"{where}; {some(wrong)}",
        wanted="every requirement at its version",
        why="commands fail when they first need it",
        remedy="pip install --upgrade slipstream, in this environment",
    )


def _shortfall(case: Case, requirement: str) -> str:
    """What is wrong with one requirement; "" when it is met or only for an extra or another system."""
    line, _, marker = requirement.partition(";")
    if "extra" in marker:
        return ""
    match = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?(?:>=\s*([\d.]+))?", line)
    if not match:
        return ""
    name, least = match.group(1), match.group(2)
    found = case.system.package(name)
    if found is None:
        return f"{name} is not installed"
    if least and version_numbers(found.version) < version_numbers(least):
        return f"{name} {found.version} is older than {least}"
    return ""


def version_numbers(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version; (2, 13, 0) of 2.13.0+cpu."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


@check("packages.torch", "PyTorch fits this machine", causes=("packages.required",))
def torch(case: Case) -> Verdict:
    found = case.system.package("torch")
    if found is None:
        return fail(
            "torch is not installed",
            wanted="torch 2.11 or newer",
            why="workers compute with it",
            remedy="pip install torch (the CUDA build where there are GPUs)",
        )
    cuda = torch_cuda(case)
    if not case.machine.gpus or case.system.driver is None:
        return ok(f"{found.version}{f' (CUDA {cuda})' if cuda else ''}")
    if cuda:
        return ok(f"{found.version} (CUDA {cuda})")
    return fail(
        f"torch {found.version} is a build without CUDA, and there are {len(case.machine.gpus)} GPUs",
        wanted="a CUDA build",
        why="the GPUs stay unused: slipstream serves from the CPU",
        remedy="reinstall torch from its index for CUDA (the default wheel has it; +cpu wheels do not)",
    )


@check("packages.gpu-extra", "What GPU workers need beside PyTorch", causes=("packages.torch",))
def gpu_extra(case: Case) -> Verdict:
    if not case.machine.gpus or case.system.driver is None or not torch_cuda(case):
        return absent("no GPU that PyTorch can use")
    missing = [name for name in ("triton", "cuda-bindings") if case.system.package(name) is None]
    if not missing:
        return ok("triton, cuda-bindings")
    return fail(
        f"{some(missing)} is not installed",
        wanted="the gpu extra",
        why="cuda_ipc, the way over NVLink and PCIe, needs both",
        remedy="pip install 'slipstream[gpu]'",
    )


@check("packages.nvml", "The right package for NVML")
def nvml(case: Case) -> Verdict:
    wrong, right = case.system.package("pynvml"), case.system.package("nvidia-ml-py")
    if wrong is None:
        return ok(f"nvidia-ml-py {right.version}") if right else absent("not installed")
    if right is not None or version_numbers(wrong.version) >= (12,):
        return ok(f"pynvml {wrong.version} beside nvidia-ml-py")
    return warn(
        f"pynvml {wrong.version} without nvidia-ml-py",
        wanted="nvidia-ml-py",
        why="the old package called pynvml shadows it and lacks calls for NVLink fabrics",
        remedy="pip uninstall pynvml; pip install nvidia-ml-py",
    )


@check("packages.mooncake", "Mooncake was built for this machine")
def mooncake(case: Case) -> Verdict:
    found = case.first(*_MOONCAKE)
    if found is None:
        return absent("not installed")
    listed = case.system.libraries(found.name)
    engine = [path for path in listed if re.search(r"/(engine|store)[^/]*\.so", path)] or list(listed)
    wants = {name for path in engine for name in case.system.needed(path) or ()}
    with_cuda = {name for name in wants if name.startswith(("libcudart", "libcuda.so"))}
    seen = _installed(found) + (", with CUDA" if with_cuda else ", without CUDA")
    runtimes = {int(m.group(1)) for name in wants if (m := re.match(r"libcudart\.so\.(\d+)", name))}
    cuda = torch_cuda(case)
    if not case.machine.gpus:
        return ok(seen)
    if runtimes and cuda and int(cuda.split(".")[0]) not in runtimes:
        return warn(
            f"{seen} {min(runtimes)}, PyTorch has CUDA {cuda}",
            wanted="both for one major version of CUDA",
            why="it ends at import with `libcudart.so: cannot open shared object file`",
            remedy=f"install the Mooncake wheel for CUDA {cuda.split('.')[0]}",
        )
    if with_cuda:
        return ok(seen)
    return (fail if case.transfer.transport == "mooncake" else warn)(
        seen,
        wanted="a build with CUDA where KV lies on GPUs",
        why="it takes GPU addresses for host memory: Bad address over TCP, or a segmentation fault",
        remedy="install the CUDA wheel of mooncake-transfer-engine; slipstream's own tcp stages GPU memory",
    )


@check("packages.nixl", "nixl has the plug-ins that this machine needs")
def nixl(case: Case) -> Verdict:
    found = [package for name in _NIXL if (package := case.system.package(name))]
    if not found:
        return absent("not installed")
    libraries = [path for package in found for path in case.system.libraries(package.name)]
    plugins = sorted({m.group(1) for path in libraries if (m := re.search(r"libplugin_(\w+)\.so", path))})
    seen = f"{_installed(found[0])}; plug-ins: {some(plugins, 12) or 'none found'}"
    if "UCX" not in plugins:
        return warn(
            seen,
            wanted="the UCX plug-in",
            why="agents end with NIXL_ERR_BACKEND at creation",
            remedy="pip install --force-reinstall nixl; a build from source needs UCX when it is configured",
        )
    if case.machine.gpus and not any("libuct_cuda" in path for path in libraries):
        return warn(
            f"{seen}; UCX inside has no CUDA part",
            wanted="libuct_cuda beside the plug-in",
            why="GPU memory cannot be moved by it (NIXL_ERR_BACKEND)",
            remedy="install the nixl wheel for this CUDA version (nixl-cu12, nixl-cu13)",
        )
    return ok(seen)


@check("packages.ucx-transports", "UCX may use what it needs")
def ucx_transports(case: Case) -> Verdict:
    asked = case.env("UCX_TLS")
    if not asked:
        return absent("UCX_TLS is not set")
    value = asked[0][1]
    names = {part.strip() for part in value.lstrip("^").split(",")}
    if value.startswith("^") or "all" in names:
        return ok(value)
    helpers = _UCX_HELPERS if case.machine.gpus else _UCX_HELPERS[:3]
    shared = {"sm", "shm", "posix", "sysv", "cma"}
    missing = [name for name in helpers if name not in names and not (name == "sm" and names & shared)]
    if not missing:
        return ok(value)
    return warn(
        f"UCX_TLS={value} leaves out {some(missing)}",
        wanted="unset, or with the helper transports",
        why="nixl then says `no active messages transport: Destination is unreachable`",
        remedy=f"unset UCX_TLS, or add {','.join(missing)}",
    )


@check("packages.engines", "Other engines beside slipstream")
def engines(case: Case) -> Verdict:
    found = case.engines()
    return ok("; ".join(map(_installed, found))) if found else absent("none")


@check("packages.cache", "Compiled kernels can be kept")
def cache(case: Case) -> Verdict:
    if not case.machine.gpus or case.system.driver is None:
        return absent("no kernels are compiled on the CPU")
    folder = case.system.environ.get("TRITON_CACHE_DIR") or f"{case.system.home}/.triton"
    if case.system.writable(folder):
        return ok(folder)
    return warn(
        f"{folder} cannot be written",
        wanted="a folder that lasts from start to start",
        why="kernels are compiled anew at each start, or start fails; first requests may run into time limits",
        remedy="set TRITON_CACHE_DIR to a folder that this user may write, on a volume",
    )


def _installed(package: Package) -> str:
    how = f"editable from {package.editable}" if package.editable else "wheel"
    return f"{package.name} {package.version} ({how})"


CHECKS = (python, required, torch, gpu_extra, nvml, mooncake, nixl, ucx_transports, engines, cache)
