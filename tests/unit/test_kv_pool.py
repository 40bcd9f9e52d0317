"""The KV memory of a CPU rank."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from slipstream.errors import PoolTooSmall
from slipstream.kv import pool as pool_module
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool, in_words

LAYOUT = KVLayout(page_tokens=4, layers=2, kv_heads=1, head_dim=8, dtype="float32", total_kv_heads=1)


def test_pages_come_first_and_the_probe_area_behind_them() -> None:
    pool = HostPool.allocate(LAYOUT, 5, 10_000)
    region = pool.region
    assert region.kind == "cpu"
    assert region.page_bytes == LAYOUT.page_bytes == 512
    assert region.pages == 5
    assert region.probe_offset >= 5 * 512
    assert region.bytes >= region.probe_offset + 10_000
    assert region.array is not None
    assert region.array.shape == (region.bytes,)
    assert region.array.ctypes.data == region.address
    assert not region.array.any()
    pool.close()


def test_another_mapping_of_the_file_sees_the_same_bytes() -> None:
    pool = HostPool.allocate(LAYOUT, 3, 4096)
    assert pool.region.fd is not None
    with mmap.mmap(pool.region.fd, pool.bytes) as other:
        pool.array[512:516] = (1, 2, 3, 4)
        assert other[512:516] == bytes((1, 2, 3, 4))
        other[0:1] = b"\x09"
    assert pool.array[0] == 9
    pool.close()


def test_closing_twice_is_no_error_and_the_pool_is_gone() -> None:
    pool = HostPool.allocate(LAYOUT, 3, 0)
    fd = pool.fd
    pool.close()
    pool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"):
        _ = pool.array


def test_a_view_outlives_the_pool() -> None:
    pool = HostPool.allocate(LAYOUT, 3, 0)
    view = pool.array[:512].view(np.float32)
    view[:] = 1.5
    pool.close()
    assert float(view.sum()) == 1.5 * 128


def test_fewer_than_two_pages_are_too_few_and_the_message_says_what_is_missing() -> None:
    with pytest.raises(PoolTooSmall, match=r"0\.50 KiB more"):
        HostPool.allocate(LAYOUT, 1, 0)


def test_more_than_the_machine_has_is_refused_with_the_missing_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 512 * 10)
    with pytest.raises(PoolTooSmall, match=r"1.00 KiB are missing.*--kv-tokens to at most 40"):
        HostPool.allocate(LAYOUT, 12, 0)


def test_without_memory_files_a_temporary_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    pool = HostPool.allocate(LAYOUT, 3, 0)
    pool.array[100] = 7
    with mmap.mmap(pool.fd, pool.bytes) as other:
        assert other[100] == 7
    assert os.fstat(pool.fd).st_nlink == 0
    pool.close()


def test_this_machine_says_how_much_memory_it_has() -> None:
    found = pool_module.available_bytes()
    assert found is None or found > 0


def test_sizes_are_said_in_units_that_people_read() -> None:
    sizes = (5, 1024, 200 << 20, 3 << 30, 5 << 40)
    assert [in_words(size) for size in sizes] == ["5 bytes", "1.00 KiB", "0.20 GiB", "3.00 GiB", "5,120.00 GiB"]
