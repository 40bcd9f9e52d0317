"""Copies of runs between two memories of one process: the same bytes, whichever way they take."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from slipstream.transfer.transports import memory
from slipstream.transfer.transports.base import Runs
from slipstream.transfer.transports.memory import Copier

SIZE = 3 << 20


@pytest.fixture(params=["quiet", "busy", "busy, no process_vm_writev"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Copier:
    """As it is; as when each step had to wait for the interpreter lock; the same in a sandbox without the call."""
    if request.param != "quiet":
        monkeypatch.setattr(memory, "STALL_S", -1.0)
        monkeypatch.setattr(memory, "SLOWEST", 1e18)
    made = Copier()
    if request.param.endswith("writev"):
        made._vectored = lambda *arguments: -1
    return made


def copied(copier: Copier, source: list[int], destination: list[int], length: list[int]) -> None:
    """Copies, and compares every byte of the destination."""
    runs = Runs(*(np.array(column, np.int64) for column in (source, destination, length)))
    rng = np.random.default_rng(len(length))
    origin = rng.integers(0, 256, SIZE, dtype=np.uint8)
    found = rng.integers(0, 256, SIZE, dtype=np.uint8)
    expected = found.copy()
    for start, to, size in zip(source, destination, length, strict=True):
        expected[to : to + size] = origin[start : start + size]
    copier.copy(int(found.ctypes.data), int(origin.ctypes.data), runs)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("page", [64, 520, 1 << 10, 4 << 10, 8 << 10, 24 << 10, 192 << 10])
@pytest.mark.parametrize("order", ["scattered", "together at the source", "together at the destination"])
def test_pages_arrive_wherever_they_lie(copier: Copier, page: int, order: str) -> None:
    rng = np.random.default_rng(page)
    pages = SIZE // page - 1
    count = min(pages // 2, 600)
    scattered, other = rng.permutation(pages)[:count], np.sort(rng.permutation(pages)[:count])
    together = np.arange(count)
    source = together if order == "together at the source" else scattered
    destination = together if order == "together at the destination" else other
    shift = 8  # neither region starts with its pages
    copied(copier, (source * page + shift).tolist(), (destination * page + 3 * shift).tolist(), [page] * count)


@pytest.mark.parametrize("unit", [1, 24, 512, 4096])
def test_runs_of_all_lengths_in_one_copy(copier: Copier, unit: int) -> None:
    rng = np.random.default_rng(unit)
    for _ in range(4):
        count = int(rng.integers(2, 60))
        length = rng.integers(1, max(2, 60_000 // unit), count) * unit
        if length.sum() > SIZE // 2:
            length = length[np.cumsum(length) <= SIZE // 2]
        gaps = rng.integers(0, 3, (2, len(length))) * unit
        destination = np.cumsum(length + gaps[0]) - length
        order = rng.permutation(len(length))
        source = np.empty_like(destination)
        source[order] = np.cumsum(length[order] + gaps[1][order]) - length[order]
        fits = (destination + length <= SIZE) & (source + length <= SIZE)
        copied(copier, source[fits].tolist(), destination[fits].tolist(), length[fits].tolist())


def test_a_copy_gives_nothing_beyond_its_runs_to_the_last_page_of_a_mapping(copier: Copier) -> None:
    """Neither end may be looked at beyond what the runs name: behind it there may be nothing."""
    page, count = 4096, 64
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = (count + 2) * page
    places = [library.mmap(None, size, 3, 0x22, -1, 0) for _ in range(2)]
    try:
        for place in places:
            assert library.mprotect(place, page, 0) == 0
            assert library.mprotect(place + size - page, page, 0) == 0
        origin, target = (
            np.frombuffer((ctypes.c_uint8 * (count * page)).from_address(place + page), np.uint8) for place in places
        )
        origin[:] = np.random.default_rng(1).integers(0, 256, count * page, dtype=np.uint8)
        rng = np.random.default_rng(2)
        source, destination = rng.permutation(count), rng.permutation(count)
        runs = Runs(source * page, destination * page, np.full(count, page, np.int64))
        copier.copy(places[1] + page, places[0] + page, runs)
        assert np.array_equal(target.reshape(-1, page)[destination], origin.reshape(-1, page)[source])
    finally:
        for place in places:
            library.munmap(place, size)
