"""The fake transport on a virtual clock: trouble of every kind, and none that breaks the contract of a ticket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from slipstream.errors import PeerLost
from slipstream.transfer.transports.base import Completion, Exports, Runs
from slipstream.transfer.transports.fake import FakeTransport

SIZE = 4096
PROBE = 3072


class Memory:
    """A peer's memory."""

    def __init__(self) -> None:
        self.bytes = SIZE
        self.array = np.zeros(SIZE, np.uint8)


class Direct:
    """Copies at once and reports at the next poll: the simplest honest transport."""

    name = "direct"
    open_blocks = False

    def __init__(self, source: np.ndarray, remote: Memory) -> None:
        self._source, self._remote = source, remote
        self._done: list[Completion] = []
        self._next = 0
        self._pipe = os.pipe()

    def export(self) -> bytes:
        return b""

    def admit(self, agent: str) -> None: ...

    def cut_off(self, agent: str) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def fileno(self) -> int:
        return self._pipe[0]

    def open(self, exports: Exports, detail: bytes) -> Memory:
        return self._remote

    def write(self, remote: Memory, runs: Runs, after: Any = None) -> int:
        for origin, to, length in zip(runs.source, runs.destination, runs.length, strict=True):
            remote.array[to : to + length] = self._source[origin : origin + length]
        self._next += 1
        self._done.append(Completion(self._next))
        return self._next

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def close(self, remote: Memory) -> None: ...

    def shutdown(self) -> None:
        for fd in self._pipe:
            os.close(fd)


class World:
    """A fake transport over a direct one, and the clock that both obey."""

    def __init__(self, seed: int, **settings: float) -> None:
        rng = np.random.default_rng(seed)
        self.now = 0.0
        self.source = rng.integers(1, 256, SIZE, dtype=np.uint8)
        self.memory = Memory()
        direct = Direct(self.source, self.memory)
        self.fake = FakeTransport(
            {"direct": direct}, SIZE, seed=seed, virtual_clock=lambda: self.now, **{"trouble": 0.0, **settings}
        )
        exports = Exports(
            rank=0,
            first_head=0,
            heads=1,
            kind="cpu",
            device="cpu",
            bytes=SIZE,
            page_bytes=64,
            pages=PROBE // 64,
            probe_offset=PROBE,
            probe_bytes=SIZE - PROBE,
            machine="m",
            process="p",
            agent="a",
            descriptions=[],
        )
        self.remote = self.fake.open(exports, self.fake.export())

    def until_quiet(self, tickets: set[int]) -> dict[int, str | None]:
        """Runs the clock until all tickets have ended."""
        ended: dict[int, str | None] = {}
        while set(ended) != tickets:
            for completion in self.fake.poll():
                assert completion.ticket not in ended
                ended[completion.ticket] = completion.error
            self.now += 0.001
            assert self.now < 1000
        return ended


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.fake.shutdown()


def page_runs(pages: list[int]) -> Runs:
    at = np.array(pages, np.int64) * 64
    return Runs(at, at, np.full(len(pages), 64, np.int64))


def in_place(world: World, pages: list[int]) -> bool:
    return all(
        np.array_equal(world.memory.array[64 * p : 64 * p + 64], world.source[64 * p : 64 * p + 64]) for p in pages
    )


@pytest.mark.parametrize("seed", range(150))
def test_done_means_in_place_and_failed_means_nothing_more_arrives(worlds: list[World], seed: int) -> None:
    world = World(seed, trouble=0.8, mortality=0.02)
    worlds.append(world)
    order = np.random.default_rng(seed).permutation(PROBE // 64).tolist()
    given: dict[int, list[int]] = {}
    for start in range(0, len(order), 4):
        pages = order[start : start + 4]
        try:
            given[world.fake.write(world.remote, page_runs(pages))] = pages
        except PeerLost:
            assert world.remote.dead
    open_tickets = set(given)
    while open_tickets:
        for completion in world.fake.poll():
            open_tickets.remove(completion.ticket)
            pages = given[completion.ticket]
            if completion.error is None:
                assert in_place(world, pages)
            else:  # the memory may be used again from here on: what is put there must stay
                for page in pages:
                    world.memory.array[64 * page : 64 * page + 64] = 0
                    world.source[64 * page : 64 * page + 64] = 255
        world.now += 0.001
    world.now += 10
    world.fake.poll()
    for pages in given.values():
        for page in pages:
            if (world.source[64 * page : 64 * page + 64] == 255).all():
                assert not world.memory.array[64 * page : 64 * page + 64].any()


def test_trouble_has_every_face(worlds: list[World]) -> None:
    late, lost, reordered, dead = 0, 0, 0, 0
    for seed in range(60):
        world = World(seed, trouble=0.7, mortality=0.02)
        worlds.append(world)
        tickets: list[int] = []
        for page in range(16):
            try:
                tickets.append(world.fake.write(world.remote, page_runs([page, page + 16, page + 32])))
            except PeerLost:
                break
        ended = world.until_quiet(set(tickets))
        late += world.now > 0.01
        lost += sum("lost a part" in (error or "") for error in ended.values())
        dead += world.remote.dead
        reordered += list(ended) != sorted(ended)
    assert min(late, lost, reordered, dead) > 5


def test_the_same_seed_makes_the_same_trouble(worlds: list[World]) -> None:
    def story(seed: int) -> list[tuple[int, str | None]]:
        world = World(seed, trouble=0.9)
        worlds.append(world)
        tickets = {world.fake.write(world.remote, page_runs([page, page + 20])) for page in range(20)}
        return list(world.until_quiet(tickets).items())

    assert story(3) == story(3)
    assert story(3) != story(4)


def test_preflight_writes_are_left_alone(worlds: list[World]) -> None:
    world = World(1, trouble=1.0, mortality=1.0)
    worlds.append(world)
    probe = page_runs([PROBE // 64, PROBE // 64 + 3])
    for _ in range(20):
        ticket = world.fake.write(world.remote, probe)
        assert world.until_quiet({ticket}) == {ticket: None}
    assert in_place(world, [PROBE // 64, PROBE // 64 + 3])


def test_a_partial_loss_writes_some_of_its_bytes(worlds: list[World]) -> None:
    partial = 0
    for seed in range(100):
        world = World(seed, trouble=1.0)
        worlds.append(world)
        pages = list(range(16))
        ticket = world.fake.write(world.remote, page_runs(pages))
        if world.until_quiet({ticket})[ticket] is not None:
            written = sum(in_place(world, [page]) for page in pages)
            partial += 0 < written < 16
    assert partial > 10
