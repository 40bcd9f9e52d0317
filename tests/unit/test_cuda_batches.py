"""Lists of copies as the driver gets them, read by functions with the driver's own signatures."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.transfer.cuda.batches import BatchCopies, Words

LISTS = [ctypes.c_void_p] * 3
STREAM = 0x7F00_0000_1234


class Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("order", "from_kind", "from_id", "to_kind", "to_id", "flags")]


class Driver:
    """libcuda of one age: what it has been told, as (destination, source, size), call by call."""

    def __init__(self, age: str, code: int = 0) -> None:
        self.calls: list[list[tuple[int, int, int]]] = []
        self.streams: set[int] = set()
        self.code = code
        behind = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        new = ctypes.CFUNCTYPE(ctypes.c_int, *LISTS, ctypes.c_size_t, *behind, ctypes.c_void_p)
        old = ctypes.CFUNCTYPE(ctypes.c_int, *LISTS, ctypes.c_size_t, *behind, ctypes.c_void_p, ctypes.c_void_p)
        single = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        library: dict[str, Any] = {"cuMemcpyAsync": single(self.one)}
        if age != "12.7":
            library["cuMemcpyBatchAsync"] = old(self.refused_or_many)
        if age == "13.0":
            library["cuMemcpyBatchAsync_v2"] = new(self.many)
            library["cuMemcpyBatchAsync"] = old(lambda *_: 999)
        self.library = SimpleNamespace(**library)

    def one(self, to: int, origin: int, size: int, stream: int) -> int:
        self.calls.append([(to, origin, size)])
        self.streams.add(stream)
        return self.code

    def many(self, to: int, origin: int, size: int, count: int, how: int, first: int, kinds: int, on: int) -> int:
        columns = [(ctypes.c_uint64 * count).from_address(address) for address in (to, origin, size)]
        self.calls.append(list(zip(*columns, strict=True)))
        self.streams.add(on)
        given, since = Attributes.from_address(how), ctypes.c_size_t.from_address(first).value
        assert (given.order, given.flags, since, kinds) == (1, 0, 0, 1)
        return self.code

    def refused_or_many(self, *arguments: Any) -> int:
        *before, bad, on = arguments
        ctypes.c_size_t.from_address(bad).value = 7
        return self.many(*before, on)

    def copies(self) -> BatchCopies:
        return BatchCopies(self.library, self.fail)

    @staticmethod
    def fail(call: str, code: int) -> None:
        raise OSError(f"{call}: {code}")


def batch(count: int) -> tuple[Words, Words, Words]:
    """Addresses above 2^32, in strides, and one length broadcast from a single number."""
    to = (0x7FFF_0000_0000 + 4096 * np.arange(2 * count, dtype=np.int64))[::2]
    return to, to[::-1] + 64, np.broadcast_to(np.int64(2 << 20), count)


@pytest.mark.parametrize("age", ["12.7", "12.8", "13.0"])
@pytest.mark.parametrize("count", [1, 2, 16, 17, 2000])
def test_every_copy_of_a_list_is_queued_once(age: str, count: int):
    driver, (to, origin, size) = Driver(age), batch(count)
    driver.copies()(to, origin, size, STREAM)
    queued = [copy for call in driver.calls for copy in call]
    assert queued == list(zip(to.tolist(), origin.tolist(), size.tolist(), strict=True))
    assert driver.streams == {STREAM}


@pytest.mark.parametrize("age", ["12.8", "13.0"])
def test_the_copy_engine_begins_before_a_long_list_is_queued(age: str):
    driver = Driver(age)
    driver.copies()(*batch(2000), STREAM)
    assert [len(call) for call in driver.calls] == [16, 32, 64, 128, 256, 512, 512, 480]


@pytest.mark.parametrize(("age", "count"), [("12.7", 3), ("12.8", 3), ("13.0", 3), ("13.0", 1)])
def test_a_refusal_says_which_call_and_ends_the_list(age: str, count: int):
    driver = Driver(age, code=700)
    call = "cuMemcpyBatchAsync" if age != "12.7" and count > 1 else "cuMemcpyAsync"
    with pytest.raises(OSError, match=f"{call}: 700"):
        driver.copies()(*batch(count), STREAM)
    assert len(driver.calls) == 1


def test_threads_that_queue_at_the_same_time_do_not_mix_their_lists():
    driver, (to, origin, size) = Driver("13.0"), batch(600)
    inside, inner = driver.many, driver.copies()

    def nested(*arguments: Any) -> int:  # what another thread does while the driver reads this one's list
        if not driver.calls:
            driver.calls.append([])
            inner(origin, to, size, STREAM)
        return inside(*arguments)

    library = driver.library
    kinds = [*LISTS, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemcpyBatchAsync_v2 = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(nested)
    inner = driver.copies()
    inner(to, origin, size, STREAM)
    queued = sorted(copy for call in driver.calls for copy in call)
    columns = [column.tolist() for column in (to, origin, size)]
    there, back = zip(*columns, strict=True), zip(columns[1], columns[0], columns[2], strict=True)
    assert queued == sorted([*there, *back])


def test_lists_of_any_length_follow_each_other():
    driver = Driver("13.0")
    copies = driver.copies()
    for count in (3, 5000, 40, 1025):
        to, origin, size = batch(count)
        driver.calls.clear()
        copies(to, origin, size, STREAM)
        queued = [copy for call in driver.calls for copy in call]
        assert queued == list(zip(to.tolist(), origin.tolist(), size.tolist(), strict=True))
