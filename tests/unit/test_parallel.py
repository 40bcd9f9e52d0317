"""Ranks that exchange numbers: sums and gatherings over shared memory, ends and silences, devices of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.run import parallel
from slipstream.run.parallel import Meeting, MemoryGroup, OutOfStep, rank_devices


def joined(size: int, **options: Any) -> list[MemoryGroup]:
    meeting = Meeting(size)
    groups = [MemoryGroup(meeting.take(rank), rank, **options) for rank in range(size)]
    meeting.close()
    return groups


def on_all(groups: list[MemoryGroup], work: Callable[[MemoryGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (700, 640)])
def test_every_rank_gets_the_same_sum_and_all_parts(size: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    groups = joined(size)
    generator = torch.Generator().manual_seed(size)
    rounds = [torch.randn(size, *shape, generator=generator).to(dtype) for _ in range(4)]

    def work(group: MemoryGroup) -> list[tuple[Tensor, Tensor]]:
        with torch.inference_mode():
            return [(group.reduce(parts[group.rank].clone()), group.gather(parts[group.rank])) for parts in rounds]

    found = on_all(groups, work)
    for number, parts in enumerate(rounds):
        exact = parts.double().sum(0)
        for rank in range(size):
            total, gathered = found[rank][number]
            assert torch.equal(total, found[0][number][0])
            assert torch.allclose(total.double(), exact, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=2e-2)
            assert torch.equal(gathered, parts)
    assert len({group.exchanges for group in groups}) == 1
    for group in groups:
        group.close()


def test_tensors_larger_than_a_slot_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SLOT_BYTES", 1024)
    groups = joined(2)
    whole = torch.arange(2 * 1000.0).view(2, 1000)
    found = on_all(groups, lambda group: (group.gather(whole[group.rank]), group.reduce(whole[group.rank].clone())))
    for gathered, total in found:
        assert torch.equal(gathered, whole)
        assert torch.equal(total, whole.sum(0))
    assert groups[0].exchanges == 8


def test_ranks_that_exchange_different_things_notice() -> None:
    groups = joined(2)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(groups[0].reduce, torch.zeros(4))
        other = pool.submit(groups[1].reduce, torch.zeros(5))
        for future in (one, other):
            with pytest.raises(OutOfStep, match="out of step"):
                future.result(60)


def test_a_silent_rank_is_waited_for_within_a_bound() -> None:
    groups = joined(2, silent_s=0.1)
    with pytest.raises(OutOfStep, match="has been silent"):
        groups[0].reduce(torch.zeros(4))


def test_abort_frees_a_thread_that_waits() -> None:
    groups = joined(2)
    timer = threading.Timer(0.1, groups[0].abort)
    timer.start()
    with pytest.raises(OutOfStep, match="is gone"):
        groups[0].reduce(torch.zeros(4))
    with pytest.raises(OutOfStep, match="is gone"):
        groups[0].reduce(torch.zeros(4))


CHILD = """
import sys, time, torch
from slipstream.run.parallel import MemoryGroup
group = MemoryGroup([int(fd) for fd in sys.argv[1].split(",")], 1)
print(group.reduce(torch.full((4,), 2.0)).tolist(), flush=True)
time.sleep(60)
"""


def test_a_rank_that_is_killed_ends_the_exchange_of_the_others_at_once() -> None:
    meeting = Meeting(2)
    fds = meeting.fds(1)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, ",".join(map(str, fds))], pass_fds=fds, stdout=subprocess.PIPE
    )
    group = MemoryGroup(meeting.take(0), 0)
    meeting.close()
    assert group.reduce(torch.full((4,), 1.0)).tolist() == [3.0] * 4
    assert child.stdout is not None
    assert child.stdout.readline() == b"[3.0, 3.0, 3.0, 3.0]\n"
    threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL)).start()
    with pytest.raises(OutOfStep, match="is gone"):  # and not that it has been silent for long
        group.reduce(torch.zeros(4))
    child.wait()


@pytest.mark.parametrize(
    ("device", "size", "expected"),
    [
        ("cpu", 1, ["cpu"]),
        ("auto", 1, ["auto"]),
        ("cuda:1", 1, ["cuda:1"]),
        ("GPU-3f0c", 1, ["GPU-3f0c"]),
        ("cpu", 3, ["cpu"] * 3),
        ("auto", 2, ["cpu", "cpu"]),
        ("cuda:0,cuda:1", 2, ["cuda:0", "cuda:1"]),
        ("cuda:0,1", 2, ["cuda:0", "cuda:1"]),
        ("cuda:4-7", 4, ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]),
        ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"]),
    ],
)
def test_each_rank_has_its_device(device: str, size: int, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_devices(device, size) == expected


@pytest.mark.parametrize(
    ("device", "size", "words"),
    [
        ("cuda:0", 2, "names 1 device"),
        ("cuda:0,cuda:1", 1, "names 2 device"),
        ("cuda:0,cuda:0", 2, "names a GPU twice"),
        ("cpu,cuda:0", 2, "all on GPUs or all on the CPU"),
        ("cuda", 2, "needs 2 GPUs, 0 are visible"),
    ],
)
def test_devices_that_do_not_fit_the_ranks_are_refused(
    device: str, size: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        rank_devices(device, size)
