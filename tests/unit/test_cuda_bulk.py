"""The kernel of bulk copies without a GPU: compiled for the host, and what its launcher makes of a launch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.transfer.cuda import bulk
from slipstream.transfer.cuda.bulk import SOURCE, BulkShape, Pieces, Unavailable, pieces
from slipstream.transfer.cuda.launcher import BULK_BYTES, CopySettings, KernelLauncher, Launch

HOST = Path(__file__).with_name("bulk_host.cpp")
SHAPES = [BulkShape(2, 4, 1024, 3), BulkShape(1, 4, 512, 2), BulkShape(2, 2, 2048, 1)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[BulkShape, Path]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("bulk")
    found = {}
    for number, shape in enumerate(SHAPES):
        found[shape] = folder / f"bulk{number}"
        names = [f"-D{name.upper()}={value}" for name, value in shape._asdict().items()]
        command = [compiler, "-std=c++20", "-O1", "-pthread", *names, f'-DSOURCE="{SOURCE}"', str(HOST)]
        done = subprocess.run([*command, "-o", str(found[shape])], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    return found


def moved(program: Path, shape: BulkShape, columns: list[np.ndarray], length: int, late: bool, blocks: int) -> None:
    """Runs the kernel and compares all of the destination."""
    size = 1 << 17
    random = np.random.default_rng(len(columns[0]) + length)
    source, destination = (random.integers(0, 256, size, np.uint8) for _ in range(2))
    want = destination.copy()
    lengths = columns[2] if not length else np.full(len(columns[0]), length)
    for s, d, n in zip(columns[0], columns[1], lengths, strict=True):
        want[d : d + n] = source[s : s + n]
    cut = pieces(int(lengths.max()), shape.stage_bytes)
    numbers = [blocks, int(late), length, len(columns[0]), *cut]
    data = np.int64(size).tobytes() + source.tobytes() + destination.tobytes()
    data += b"".join(column.astype(np.int64).tobytes() for column in (columns if not length else columns[:2]))
    done = subprocess.run([str(program), *map(str, numbers)], input=data, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout[-200:]
    assert (np.frombuffer(done.stdout, np.uint8) == want).all()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_runs_of_one_length_arrive_whole(programs: dict[BulkShape, Path], shape: BulkShape, late: bool):
    random = np.random.default_rng(1)
    for length, count in ((16, 100), (48, 70), (1024, 40), (1040, 11), (5008, 7), (1 << 14, 3), (256, 1)):
        places = [random.permutation((1 << 17) // length)[:count] * length for _ in range(2)]
        moved(programs[shape], shape, places, length, late, 2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_runs_of_many_lengths_arrive_whole(programs: dict[BulkShape, Path], shape: BulkShape, late: bool):
    random = np.random.default_rng(2)
    for longest in (256, 1008, 6000):
        lengths = random.integers(1, longest // 16, 20) * 16
        ends = [np.cumsum(lengths + random.integers(0, 3, 20) * 16) for _ in range(2)]
        places = [end - lengths for end in ends]
        order = random.permutation(20)
        moved(programs[shape], shape, [places[0][order], places[1][order], lengths[order]], 0, late, 3)


def test_short_runs_share_a_stage_and_long_ones_are_cut():
    assert pieces(1024, 4096) == Pieces(parts=1, part_bytes=1024, group=4)
    assert pieces(1536, 4096) == Pieces(1, 1536, 2)
    assert pieces(16, 4096) == Pieces(1, 16, 16)
    assert pieces(4096, 4096) == Pieces(1, 4096, 1)
    assert pieces(10_000, 4096) == Pieces(3, 4096, 1)


def test_a_gpu_without_bulk_copies_is_told_apart():
    with pytest.raises(Unavailable, match=r"8\.0 has no bulk copies"):
        bulk.compiled((8, 0), BulkShape())


class Gpu:
    """Notes what is launched; a GPU of the given capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability, self.index = capability, 0
        self.launched: list[tuple[Any, ...]] = []

    def use(self) -> None: ...

    def load_kernel(self, code: bytes, name: str, shared_bytes: int) -> int:
        return 77

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)


def test_what_the_bulk_kernel_cannot_take_goes_to_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bulk, "compiled", lambda capability, shape: b"code")
    gpu = Gpu((9, 0))
    launcher: Any = KernelLauncher(gpu)  # type: ignore[arg-type]
    others: list[Launch] = []
    launcher._triton = lambda launch, stream, settings: others.append(launch)
    settings = CopySettings(programs=16, bulk=BulkShape(4, 4, 4096, 3))
    launcher(Launch(1 << 20, 1 << 21, 1 << 22, 100, 1024, 1024), 5, settings)
    launcher(Launch(1 << 20, 1 << 21, 1 << 22, 2, 1024, 1024), 5, settings)
    launcher(Launch(1 << 20, 1 << 21, 1 << 22, 3, 0, 1 << 16), 5, settings)
    assert [launched[:5] for launched in gpu.launched] == [
        (77, 16, 128, 64 << 10, 5),
        (77, 1, 128, 64 << 10, 5),
        (77, 16, 128, 64 << 10, 5),
    ]
    odd = Launch(1 << 20, 1 << 21, 1 << 22, 3, 0, 0)
    short = Launch(1 << 20, 1 << 21, 1 << 22, 3, BULK_BYTES - 16, BULK_BYTES - 16)
    for launch in (odd, short):
        launcher(launch, 5, settings)
    whole = Launch(1 << 20, 1 << 21, 1 << 22, 100, 1024, 1024)
    launcher(whole, 5, CopySettings(bulk=None))
    assert others == [odd, short, whole]


def test_without_the_kernel_every_launch_goes_to_triton():
    launcher: Any = KernelLauncher(Gpu((8, 9)))  # type: ignore[arg-type]
    others: list[Launch] = []
    launcher._triton = lambda launch, stream, settings: others.append(launch)
    whole = Launch(1 << 20, 1 << 21, 1 << 22, 100, 1024, 1024)
    launcher(whole, 5, CopySettings())
    launcher(whole, 5, CopySettings())
    assert others == [whole, whole]
