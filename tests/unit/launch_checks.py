"""What reaches the driver of a launch: of a plain one by Triton, and of one that is kept (`run.cuda.kernels.launches`).

Triton's own launchers are compiled and used, linked to a driver that has no device and writes down what it is given
(recorded_cuda.c): grid, threads, shared memory, stream, attributes, and every byte of every parameter, as many as the
compiled kernel itself says that it takes. Kernels are those of Hopper, compiled for it.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.unit.no_device import STREAM, config, kernels_of, use
from tests.unit.tiny_models import make_plan
from torch import Tensor

from slipstream.kv.layout import KVLayout
from slipstream.run.cuda.inputs import MixedColumns, MixedInputs
from slipstream.run.cuda.kernels import ops as ops_module
from slipstream.run.cuda.kernels.ops import TritonOps

SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4, "f64": 8}
PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w+)[^\[\],)]*(?:\[(\d+)\])?")


@dataclass
class Launch:
    """One launch as the driver got it."""

    kernel: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    stream: int
    attributes: list[bytes]
    parameters: list[bytes]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


ATTRIBUTE_BYTES = 72  # of a CUlaunchAttribute: what it is, a gap, and 64 bytes of value
LISTENER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Config), ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p))


def parameter_sizes(ptx: str, name: str) -> list[int]:
    """Bytes of each parameter of a compiled kernel."""
    head = ptx[ptx.index(f".entry {name}(") :]
    head = head[: head.index("{")]
    return [SIZES[kind] * int(count or 1) for kind, count in PARAMETER.findall(head)]


@dataclass
class Recorder:
    """Triton's driver on a libcuda that records. `found` has the launches since it was cleared, `loaded` the files of
    each kernel that was loaded, by their endings."""

    folder: Path
    found: list[Launch] = field(default_factory=list)
    loaded: list[dict[str, Path]] = field(default_factory=list)
    capability: tuple[int, int] = (9, 0)

    def __post_init__(self) -> None:
        import triton
        from triton.backends.nvidia import driver
        from triton.backends.nvidia.driver import CudaDriver

        library = self.folder / "libcuda.so.1"
        include = [f"-I{folder}" for folder in driver.include_dirs]
        source = Path(__file__).with_name("recorded_cuda.c")
        flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["gcc", *flags, *include, str(source), "-o", str(library)], check=True)
        cuda = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # before Triton's modules look for one
        self._listener = LISTENER(self._launched)
        cuda.listen_to_launches(self._listener)
        triton.knobs.nvidia.libcuda_path = str(self.folder)
        self._names: dict[int, tuple[str, list[int]]] = {}
        triton.knobs.runtime.kernel_load_end_hook.add(self._loaded)
        recorder = self

        class Driver(CudaDriver):
            capability = recorder.capability

            def __init__(self) -> None:
                super().__init__()
                self.get_current_device = lambda: 0
                self.get_current_stream = lambda device: STREAM
                self.get_device_capability = lambda device: recorder.capability

        use(Driver())
        ops_module.current_stream = lambda device: STREAM

    def _loaded(self, module: Any, function: int, name: str, group: dict[str, str], hash: str) -> None:
        files = {Path(file).suffix: Path(path) for file, path in group.items()}
        self.loaded.append(files)
        self._names[function] = f"{name} {hash[:8]}", parameter_sizes(files[".ptx"].read_text(), name)

    def _launched(self, config: Any, function: int, parameters: Any) -> None:
        given = config.contents
        name, sizes = self._names[function]
        attributes = [
            ctypes.string_at(given.attributes + ATTRIBUTE_BYTES * index, ATTRIBUTE_BYTES)
            for index in range(given.attribute_count)
        ]
        values = [ctypes.string_at(parameters[index], size) for index, size in enumerate(sizes)]
        grid, threads = (given.x, given.y, given.z), (given.threads_x, given.threads_y, given.threads_z)
        self.found.append(Launch(name, grid, threads, given.shared, given.stream, attributes, values))

    def of(self, run: Callable[[], object]) -> list[Launch]:
        self.found.clear()
        run()
        return list(self.found)


def plain(ops: TritonOps, layers: list[Any], qkv: Tensor, out: Tensor, step: MixedColumns) -> None:
    """Attention of a step as `forward.mixed` has it."""
    decodes = step.decodes
    for layer in layers:
        if step.decode is not None:
            ops.decode_attention(layer, qkv[:decodes], out[:decodes], step.decode)
        if step.longest:
            ops.prefill_attention(layer, qkv[decodes:], out[decodes:], step)


def kept(ops: TritonOps, layers: list[Any], qkv: Tensor, out: Tensor, step: MixedColumns) -> None:
    """As `pieces` has it."""
    attend = ops.step_attention(qkv, out, step)
    for layer in layers:
        attend(layer)


def step_of(decodes: int, chunks: list[int], layout: KVLayout, rng: np.random.Generator) -> MixedColumns:
    page_tokens = layout.page_tokens
    counts = [1] * decodes + chunks
    firsts = rng.integers(0, 150, len(counts)).tolist()
    tables = [rng.integers(1, 20, -(-(f + n) // page_tokens)).tolist() for f, n in zip(firsts, counts, strict=True)]
    parts = [(row, [3] * n, firsts[row], tables[row]) for row, n in enumerate(counts)]
    return MixedInputs(page_tokens, layout.kv_heads, torch.device("cpu")).fill(make_plan(parts))


SMALL = {"hidden": 64, "intermediate": 96, "vocab": 300, "layers": 4}
CASES: dict[str, dict[str, Any]] = {
    "laid out by Hopper's kernels": {"shape": config("smollm2", **SMALL)},
    "pages out of step, codes, norms of heads": {
        "shape": config("smollm2", **SMALL, qk_norm=True), "kv_dtype": "fp8", "page_tokens": 3, "room": 0
    },
}  # fmt: skip
STEPS = [(3, [33, 1, 90]), (1, [16]), (0, [130, 9]), (3, []), (2, [7])]


def check(folder: str, case: str) -> int:
    """Compares both kinds of launches for several steps; returns how many there were."""
    recorder = Recorder(Path(folder))
    given = dict(CASES[case])
    room = given.pop("room", None)
    model, ops, _ = kernels_of(given.pop("shape"), "cpu", pages=20, **given)
    ops.room_laid_out = ops.room_laid_out if room is None else room
    rng, count = np.random.default_rng(1), 0
    for decodes, chunks in STEPS * 2:  # again: all is known then
        step = step_of(decodes, chunks, ops.pool.layout, rng)
        tokens = len(step.token_ids)
        qkv = torch.zeros(tokens, model.layers[0].qkv.weight.shape[0], dtype=torch.bfloat16)
        out = torch.zeros(tokens, model.config.heads * model.config.head_dim, dtype=torch.bfloat16)
        wanted = recorder.of(lambda: plain(ops, model.layers, qkv, out, step))  # noqa: B023
        found = recorder.of(lambda: kept(ops, model.layers, qkv, out, step))  # noqa: B023
        # A step with both has each layer's decode launch in front of those of its chunks either way.
        for one, other in zip(found, wanted, strict=True):
            assert one == other, f"{one}\nis not\n{other}"
        count += len(found)
        assert all(launch.stream == STREAM for launch in found)
        assert {bool(launch.attributes) for launch in found if launch.kernel.startswith("decode")} <= {True}
        of_layers = [launch for launch in found if not launch.kernel.startswith("attend")]
        assert len({tuple(launch.parameters) for launch in of_layers}) == len(of_layers), "each has its layer's keys"
    assert ops.known
    return count
