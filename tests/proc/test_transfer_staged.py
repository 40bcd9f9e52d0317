"""Staged memory between two real processes, one of which is killed or stopped in the middle.

The device is `tests.unit.device_queue`: its copies end some time after the call that queued them, on threads that die
with their process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.proc.test_transfer import WAIT_S, Child, pair, written_within  # noqa: F401  (pair is a fixture)

TRANSPORTS = ("shm@device", "tcp@device")
Pair = Callable[..., tuple[Any, Child]]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_page_lists_arrive_in_the_other_process(pair: Pair, transport: str) -> None:  # noqa: F811
    here, there = pair(transport)
    there.call("admit", "S", here.exports())
    assert here.connect("D", there.call("exports")) == [transport.partition("@")[0]]
    rng = np.random.default_rng(3)
    expected = there.call("read")
    for xfer in range(10):
        here.fill(xfer)
        count = int(rng.integers(1, 65))
        origin, to = rng.permutation(64)[:count].tolist(), rng.permutation(64)[:count].tolist()
        here.submit("D", xfer, origin, to)
        assert here.outcomes(1) == {xfer: None}
        expected[to] = here.pages[origin]
    assert np.array_equal(there.call("read"), expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_destination_killed_in_the_middle_fails_all_jobs_with_a_reason(pair: Pair, transport: str) -> None:  # noqa: F811
    here, there = pair(transport, pages=256, layers=64)
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    here.fill(1)
    order = list(range(256))
    for xfer in range(100):
        here.submit("D", xfer, order, order[::-1])
    assert here.done.get(timeout=WAIT_S) == (0, None)
    there.kill()
    errors = here.outcomes(99)
    assert any(word in (errors[99] or "") for word in ("has ended", "broke", "failed"))
    here.disconnect("D")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_killed_in_the_middle_is_proven_gone_and_writes_no_more(pair: Pair, transport: str) -> None:  # noqa: F811
    here, there = pair(transport, pages=256, layers=64)
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.call("fill", 1)
    there.ask("write_for_ever", "D")
    written_within(here)
    there.kill()
    assert here.source_gone("S")[0]
    here.pages[:] = 0  # reused at once
    time.sleep(0.2)
    assert not here.pages.any()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_source_is_cut_off_without_its_help(pair: Pair, transport: str) -> None:  # noqa: F811
    here, there = pair(transport, pages=256, layers=64)
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.call("fill", 1)
    there.ask("write_for_ever", "D")
    written_within(here)
    there.stop()
    assert here.source_gone("S")[0]
    here.pages[:] = 0
    there.go_on()
    time.sleep(0.2)
    assert not here.pages.any()
