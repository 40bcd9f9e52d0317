"""Short copies of a GPU are started by whichever thread submits them: what its device must have been told there, and
what that thread must never wait for. The device is `device_queue.QueueDevice`; real ones are in tests/gpu."""

from __future__ import annotations

import queue
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.unit.device_queue import QueueDevice
from tests.unit.transfer_sides import WAIT_S, Outcomes, Side

from slipstream.config import TransferConfig
from slipstream.kv.layout import KVLayout
from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.cuda.lookout import Due, Lookout
from slipstream.transfer.cuda.memory import DeviceMemory
from slipstream.transfer.transports.base import Context
from slipstream.transfer.transports.cuda_ipc import SHORT_LISTS, CudaIpcTransport

LAYOUT = KVLayout(page_tokens=4, layers=1, kv_heads=2, head_dim=32, dtype="float32", total_kv_heads=2)
PAGES = 256
WAITING = ("allocate", "allocate_pinned", "free", "free_pinned", "stream", "wait", "fill", "read", "write", "pin")
CALLS = (*WAITING, "event", "record", "wait_for", "is_done", "copy", "copy_batch", "launch", "destroy_stream")


class StrictDevice(QueueDevice):
    """Refuses calls of threads that have not made it their current device, as a process with several GPUs would run
    them on another; `calls` are the names of those that each thread has made."""

    def __init__(self) -> None:
        super().__init__(3, slowest_s=0.0005)
        self._current = threading.local()
        self.calls: dict[int, set[str]] = {}
        for name in CALLS:
            setattr(self, name, self._strict(name, getattr(self, name)))

    def _strict(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any) -> Any:
            assert getattr(self._current, "chosen", False), f"{name} on a thread that has not chosen its device"
            self.calls.setdefault(threading.get_ident(), set()).add(name)
            return call(*arguments)

        return checked

    def use(self) -> None:
        self._current.chosen = True

    def export_handle(self, address: int) -> bytes:
        return address.to_bytes(8, "little") * 8

    def extent(self, address: int) -> tuple[int, int]:
        _, size, _ = self._memory[address]
        return address, size

    def reach_peer(self, uuid: str) -> str | None:
        return None


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side, StrictDevice]]:
    device = StrictDevice()
    made: list[Side] = []

    def load(names: Any, context: Context) -> Any:
        return {"cuda_ipc": CudaIpcTransport(context, device, device.copier)}, {}  # type: ignore[arg-type]

    for _ in range(2):
        memory = DeviceMemory(device, PAGES, LAYOUT.page_bytes, 64 << 10)  # type: ignore[arg-type]
        done: Outcomes = queue.Queue()
        agent = TransferAgent(
            memory.region,
            LAYOUT,
            TransferConfig(transport="cuda_ipc"),
            on_done=lambda job, error, done=done: done.put((job, error)),
            memory=memory,
            load=load,
        )
        view = device.view(memory.address, memory.region.bytes)
        made.append(Side(agent, memory, view, PAGES, device, done))
    source, destination = made
    destination.agent.admit("S", [source.exports])
    source.agent.connect("D", [destination.exports])
    source.fill(1)
    yield source, destination, device
    for side in made:
        side.release()


def test_copies_that_several_threads_start_arrive_and_wait_for_nothing_there(
    sides: tuple[Side, Side, StrictDevice],
) -> None:
    source, destination, device = sides
    order = random.Random(5).sample(range(PAGES), PAGES)
    starters: set[int] = set()

    def submit(thread: int) -> None:
        starters.add(threading.get_ident())
        for at in range(16 * thread, 16 * thread + 16):
            pages = order[4 * at : 4 * at + 4]
            source.agent.submit(CopyJob("D", at, pages, pages[::-1]))
            time.sleep(0.002)

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(submit, thread) for thread in range(4)]:
            one.result(WAIT_S)
    assert source.outcomes(64) == dict.fromkeys(range(64))
    for at in range(64):
        pages = order[4 * at : 4 * at + 4]
        assert np.array_equal(destination.pages[pages[::-1]], source.pages[pages])
    started = [device.calls[thread] for thread in starters if thread in device.calls]
    assert any("record" in calls for calls in started)
    for calls in started:
        assert not calls & set(WAITING), calls


def test_short_lists_need_no_memory_while_many_copies_are_under_way(sides: tuple[Side, Side, StrictDevice]) -> None:
    source, _, device = sides
    device.go.clear()
    before = len(device._pinned), len(device._memory)
    for number in range(SHORT_LISTS):
        source.agent.submit(CopyJob("D", number, [number, number + 64, 200], [number, 200, number + 65]))
    asked = threading.Event()
    source.agent._mover.ask(asked.set)
    assert asked.wait(WAIT_S)
    assert (len(device._pinned), len(device._memory)) == before
    assert source.done.empty()
    device.go.set()
    assert source.outcomes(SHORT_LISTS) == dict.fromkeys(range(SHORT_LISTS))


@pytest.mark.parametrize("ending", ["disconnect", "close", "destination closes"])
def test_threads_that_submit_while_the_route_ends_hear_of_every_job(
    sides: tuple[Side, Side, StrictDevice], ending: str
) -> None:
    source, destination, _ = sides
    begun = threading.Barrier(4)

    def submit(thread: int) -> None:
        begun.wait(WAIT_S)
        for number in range(100 * thread, 100 * thread + 60):
            source.agent.submit(CopyJob("D", number, [number % 50], [number % 50 + 60]))

    with ThreadPoolExecutor(3) as pool:
        submitting = [pool.submit(submit, thread) for thread in range(3)]
        begun.wait(WAIT_S)
        time.sleep(0.003)
        if ending == "disconnect":
            source.agent.disconnect("D")
        else:
            (source if ending == "close" else destination).agent.close()
        for one in submitting:
            one.result(WAIT_S)
    found = source.outcomes(180)
    assert len(found) == 180
    assert source.done.empty()


def test_who_looks_is_told_of_copies_that_have_ended_without_waiting_for_the_mover(
    sides: tuple[Side, Side, StrictDevice],
) -> None:
    source, _, device = sides
    seen: list[int] = []
    source.agent._on_done = lambda job, error: seen.append(threading.get_ident())

    def ended_here(number: int) -> bool:
        device.go.clear()
        source.agent.submit(CopyJob("D", number, [number], [number + 64]))
        source.agent.look()
        assert len(seen) == number
        device.go.set()
        end = time.monotonic() + WAIT_S
        while len(seen) == number and time.monotonic() < end:
            source.agent.look()
        return seen[number] == threading.get_ident()

    assert any(ended_here(number) for number in range(40))  # the mover may have been awake for some


# ---------------------------------------------------------------------------------------------------- when to look


class Clock:
    """`now` is set by the test."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watched() -> Iterator[tuple[Lookout, Clock]]:
    clock = Clock()
    lookout = Lookout(clock)
    yield lookout, clock
    lookout.close()


def run_alone(lookout: Lookout, clock: Clock, expected: float, taken: float) -> Due:
    """One copy that takes `taken` seconds, looked at every 10 us from when it is due on."""
    due = lookout.started(clock.now, expected)
    end = clock.now + taken
    clock.now = max(clock.now, due.at)
    while clock.now < end:
        lookout.under_way()
        clock.now += 10e-6
    lookout.done(due)
    lookout.look_again()
    clock.now += 0.01
    return due


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.5, 3.0])
def test_copies_that_keep_taking_another_time_are_looked_for_then(
    watched: tuple[Lookout, Clock], factor: float
) -> None:
    lookout, clock = watched
    for _ in range(25):
        due = run_alone(lookout, clock, 400e-6, factor * 400e-6)
    assert due.at - due.began == pytest.approx(factor * 400e-6, rel=0.1)
    other = lookout.started(clock.now, 40e-3)  # of another size, nothing is known
    assert other.at - other.began == pytest.approx(0.97 * 40e-3)


def test_a_look_that_came_late_teaches_nothing(watched: tuple[Lookout, Clock]) -> None:
    lookout, clock = watched
    due = lookout.started(clock.now, 400e-6)
    clock.now += 0.5  # the mover was at something else
    lookout.done(due)
    lookout.look_again()
    due = lookout.started(clock.now, 400e-6)
    assert due.at - due.began == pytest.approx(0.97 * 400e-6)


def test_copies_behind_one_that_ends_late_are_due_later(watched: tuple[Lookout, Clock]) -> None:
    lookout, clock = watched
    first, second = lookout.started(clock.now, 1e-3), lookout.started(clock.now, 1e-3)
    assert second.at == pytest.approx(first.at + 0.97e-3)
    clock.now = first.at + 0.4e-3
    lookout.under_way()
    clock.now += 0.1e-3
    lookout.done(first)
    assert second.at == pytest.approx(clock.now + 0.97e-3)


def test_a_copy_that_waits_is_due_when_what_it_waits_for_has_happened(watched: tuple[Lookout, Clock]) -> None:
    lookout, clock = watched
    waiting = lookout.waiting(clock.now, 2e-3)
    other = lookout.started(clock.now, 1e-3)
    assert other.at == pytest.approx(clock.now + 0.97e-3)  # not behind the one that waits
    lookout.done(other)
    lookout.look_again()
    assert select.select([lookout.alarm], [], [], 60)[0]  # now and then, should nobody tell
    clock.now += 0.2
    lookout.look_again()
    lookout.ripe(waiting)
    assert (waiting.began, waiting.at) == (clock.now, pytest.approx(clock.now + 0.97 * 2e-3))


def test_a_copy_that_was_done_before_anybody_told_teaches_nothing(watched: tuple[Lookout, Clock]) -> None:
    lookout, clock = watched
    waiting, other = lookout.waiting(clock.now, 2e-3), lookout.started(clock.now, 1e-3)
    at = other.at
    lookout.done(waiting)
    assert other.at == at


def test_the_next_look_is_for_the_first_that_has_not_ended(watched: tuple[Lookout, Clock]) -> None:
    lookout, clock = watched
    set_for: list[float] = []
    lookout.alarm.set = set_for.append  # type: ignore[method-assign]
    dues = [lookout.started(clock.now, 1e-3) for _ in range(50)]
    lookout.look_again()
    lookout.look_again()
    assert len(set_for) == 1  # one that is set already stays
    clock.now = dues[1].at
    lookout.under_way()
    lookout.done(dues[1])  # before the first, which is on another lane
    assert dues[0].at < clock.now
    lookout.done(dues[0])
    lookout.look_again()
    assert set_for[-1] == pytest.approx(dues[2].at - clock.now, abs=100e-6)
    for due in dues[2:]:
        lookout.done(due)
    lookout.look_again()
    assert len(set_for) == 2


def test_the_first_of_many_copies_is_looked_for_when_it_should_be_over_and_the_last_in_time(
    watched: tuple[Lookout, Clock],
) -> None:
    lookout, clock = watched
    first, second = lookout.started(clock.now, 1e-3), lookout.started(clock.now, 1e-3)
    lookout.look_again()
    assert first.at < lookout._set_for <= first.at + 60e-6
    clock.now = first.at + 20e-6  # and found under way then
    lookout.under_way()
    lookout.look_again()
    assert not select.select([lookout.bell], [], [], 0)[0]  # no reason to stay awake
    lookout.done(first)
    lookout.look_again()
    assert second.at - 60e-6 < lookout._set_for < second.at
    clock.now = second.at
    lookout.under_way()
    lookout.look_again()
    assert select.select([lookout.bell], [], [], 0)[0]


def test_few_short_copies_are_looked_for_in_time_too_since_the_link_would_stand_still(
    watched: tuple[Lookout, Clock],
) -> None:
    lookout, clock = watched
    first = lookout.started(clock.now, 90e-6)
    lookout.started(clock.now, 90e-6)
    lookout.look_again()
    assert first.at - 60e-6 < lookout._set_for < first.at


def looks_a_copy(count: int, under_way: int, takes: float) -> float:
    """How often a mover that is woken 60 us late, and takes 25 us a look, looks for copies that end one by one."""
    clock, looks = Clock(), 0
    lookout = Lookout(clock)
    try:
        left: deque[tuple[Due, float]] = deque()
        link = clock.now
        for number in range(count):
            while number + len(left) < count and len(left) < under_way:
                link = max(link, clock.now) + takes
                left.append((lookout.started(clock.now, takes), link))
            lookout.look_again()
            while left and left[0][1] > clock.now:
                rung = bool(select.select([lookout.bell], [], [], 0)[0])
                clock.now = clock.now + 25e-6 if rung else lookout._set_for + 85e-6
                lookout.woken([lookout.bell.fileno() if rung else lookout.alarm.fileno()])
                looks += 1
                if left[0][1] > clock.now:
                    lookout.under_way()
                    lookout.look_again()
            lookout.done(left.popleft()[0])
        return looks / count
    finally:
        lookout.close()


def test_copies_of_a_busy_link_take_about_a_look_each() -> None:
    assert looks_a_copy(200, 32, 360e-6) < 1.3
    assert looks_a_copy(1000, 32, 45e-6) < 0.6
    assert looks_a_copy(200, 1, 360e-6) > 2  # the end of one alone is worth waiting for


def test_the_mover_sleeps_while_who_settles_a_step_looks_for_the_copies_behind_it(
    watched: tuple[Lookout, Clock],
) -> None:
    lookout, clock = watched
    copy = lookout.waiting(clock.now, 50e-6)
    lookout.ripe(copy)
    lookout.look_again()
    assert copy.at - clock.now < 50e-6
    assert lookout._set_for - clock.now > 300e-6
    assert not select.select([lookout.bell], [], [], 0)[0]
    lookout.done(copy)
    lookout.look_again()
    time.sleep(0.002)
    assert not select.select([lookout.alarm, lookout.bell], [], [], 0)[0]
    late = lookout.waiting(clock.now, 50e-6)
    lookout.ripe(late)
    clock.now += 500e-6
    lookout.look_again()
    assert lookout._set_for - clock.now < 150e-6
