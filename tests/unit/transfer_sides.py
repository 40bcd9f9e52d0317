"""One end of a transfer inside a test: an agent, its pages, and what its jobs came to."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.job import Route
from slipstream.transfer.transports.base import Exports

WAIT_S = 60.0
Outcomes = queue.Queue[tuple[CopyJob, str | None]]


@dataclass
class Side:
    """`memory` is its pool, whose bytes `view` shows from the first of `count` pages on; `device` is the GPU that it
    lies on, if any."""

    agent: TransferAgent
    memory: Any
    view: np.ndarray
    count: int
    device: Any = None
    done: Outcomes = field(default_factory=queue.Queue)

    @property
    def exports(self) -> Exports:
        return self.agent.exports()

    @property
    def pages(self) -> np.ndarray:
        """[pages, page_bytes]"""
        page = self.agent.layout.page_bytes
        return self.view[: self.count * page].reshape(self.count, page)

    def outcomes(self, count: int) -> dict[int, str | None]:
        """Of the next `count` jobs, by transfer number."""
        found = [self.done.get(timeout=WAIT_S) for _ in range(count)]
        return {job.xfer: error for job, error in found}

    def fill(self, seed: int) -> None:
        self.pages[:] = np.random.default_rng(seed).integers(1, 256, self.pages.shape, dtype=np.uint8)

    def release(self) -> None:
        if self.device is not None:
            self.device.go.set()
        self.agent.close()
        self.view = np.empty(0, np.uint8)
        self.memory.close()


def join(source: Side, destination: Side, name: str = "D") -> Route:
    """`source` may write into `destination`, by that name."""
    destination.agent.admit("S", [source.exports])
    return source.agent.connect(name, [destination.exports])[0]


def many_jobs_end_once_each(source: Side, destination: Side, jobs: int) -> None:
    """Of four pages each, in an order that mixes them."""
    join(source, destination)
    source.fill(1)
    order = np.random.default_rng(2).permutation(4 * jobs)
    parts = [order[4 * xfer : 4 * xfer + 4] for xfer in range(jobs)]
    for xfer, part in enumerate(parts):
        source.agent.submit(CopyJob("D", xfer, part, part[::-1]))
    assert source.outcomes(jobs) == dict.fromkeys(range(jobs))
    for part in parts:
        assert np.array_equal(destination.pages[part[::-1]], source.pages[part])
    assert source.done.empty()
