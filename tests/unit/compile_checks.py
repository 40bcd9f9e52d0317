"""All kernels of a model, compiled for a GPU that is not there as a runner compiles them, and what they take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.unit.launch_checks import Recorder
from tests.unit.no_device import SHAPES, config, kernels_of

from slipstream.run.cuda.graphs import graph_sizes
from slipstream.run.cuda.prepare import compile_ahead

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Taken(NamedTuple):
    """What a program of a kernel takes; `stack` are bytes a thread, which hold what registers do not."""

    kernel: str
    threads: int
    registers: int
    stack: int
    shared: int
    constants: str


def taken(files: dict[str, Path]) -> Taken:
    import triton

    about = json.loads(files[".json"].read_text())
    tool = triton.knobs.nvidia.cuobjdump.path
    listed = subprocess.run([tool, "--dump-resource-usage", str(files[".cubin"])], capture_output=True, text=True)
    registers, stack, static, local = map(int, USAGE.findall(listed.stdout)[0])
    ptx = files[".ptx"].read_text()
    threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    return Taken(about["name"], threads, registers, max(stack, local), max(static, about["shared"]), about["hash"][:6])


def compile_all(folder: str, shape: str, capability: tuple[int, int] = (9, 0), **given: Any) -> list[Taken]:
    """For up to 64 sequences of up to 32,768 tokens."""
    recorder = Recorder(Path(folder), capability=capability)
    changes = {name: given.pop(name) for name in list(given) if name in ("qk_norm", "mlp_bias", "layers")}
    model, ops, tokens = kernels_of(config(shape, **changes), "meta", **given)
    with torch.inference_mode():
        compile_ahead(ops, tokens, model, graph_sizes(64), sequences=64, context=32768)
    return [taken(files) for files in recorder.loaded]


def main() -> None:
    """compile_checks FOLDER SHAPE CAPABILITY [name=value ...]: prints one line a kernel, as JSON."""
    folder, shape, capability, *rest = sys.argv[1:]
    assert shape in SHAPES, f"{shape} is none of {', '.join(SHAPES)}"
    given: dict[str, Any] = {}
    for name, value in (part.split("=") for part in rest):
        given[name] = int(value) if value.isdigit() else getattr(torch, value) if name == "dtype" else value
    for kernel in compile_all(folder, shape, (int(capability[:-1]), int(capability[-1])), **given):
        print(json.dumps(kernel))


if __name__ == "__main__":
    main()
