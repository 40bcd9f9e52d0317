"""nixl and mooncake between two real processes, where the packages are installed: contents, and every end."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.proc.test_transfer import WAIT_S, Child, pair, written_within  # noqa: F401  (pair is a fixture)

from slipstream.errors import RouteUnavailable
from slipstream.transfer.transports.base import Exports

MODULES = {"nixl": ("nixl._api", "nixl_cu13._api", "nixl_cu12._api"), "mooncake": ("mooncake.engine",)}


def missing(package: str) -> str:
    """Empty when the package can be imported, else why not."""
    reasons = []
    for name in MODULES[package]:
        try:
            importlib.import_module(name)
            return ""
        except (ImportError, OSError) as error:
            reasons.append(str(error))
    return f"{package} is not installed: {reasons[-1]}"


PACKAGES = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason := missing(name)), reason=reason)) for name in MODULES
]
Pair = Callable[..., tuple[Any, Child]]


@pytest.mark.parametrize("package", PACKAGES)
def test_random_page_lists_arrive_in_the_other_process(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package)
    there.call("admit", "S", here.exports())
    assert here.connect("D", there.call("exports")) == [package]
    rng = np.random.default_rng(3)
    expected = there.call("read")
    for xfer in range(40):
        here.fill(xfer)
        count = int(rng.integers(1, 65))
        origin, to = rng.permutation(64)[:count].tolist(), rng.permutation(64)[:count].tolist()
        here.submit("D", xfer, origin, to)
        assert here.outcomes(1) == {xfer: None}
        expected[to] = here.pages[origin]
        if xfer % 8 == 7:
            assert np.array_equal(there.call("read"), expected)


@pytest.mark.parametrize("package", PACKAGES)
def test_thousands_of_pages_in_many_jobs_arrive(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package, pages=6000, layers=1)
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    here.fill(1)
    order = np.random.default_rng(2).permutation(6000)
    here.submit("D", 0, order[:5000].tolist(), order[:5000][::-1].tolist())
    for xfer in range(1, 11):
        part = order[4900 + 100 * xfer : 5000 + 100 * xfer].tolist()
        here.submit("D", xfer, part, part)
    assert here.outcomes(11) == dict.fromkeys(range(11))
    found = there.call("read")
    assert np.array_equal(found[order[:5000][::-1]], here.pages[order[:5000]])
    assert np.array_equal(found[order[5000:]], here.pages[order[5000:]])


@pytest.mark.parametrize("package", PACKAGES)
def test_both_directions_at_once(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package)
    there.call("admit", "here", here.exports())
    here.admit("there", there.call("exports"))
    here.connect("there", there.call("exports"))
    there.call("connect", "here", here.exports())
    here.fill(1)
    there.call("fill", 2)
    sent, theirs = here.read(), there.call("read")
    there.ask("submit", "here", 1, list(range(32)), list(range(32, 64)))
    here.submit("there", 1, list(range(32)), list(range(32, 64)))
    assert here.outcomes(1) == {1: None}
    assert there.receive() == (True, None)
    assert there.call("outcomes", 1) == {1: None}
    assert np.array_equal(here.pages[32:], theirs[:32])
    assert np.array_equal(there.call("read")[32:], sent[:32])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_stranger_gets_no_landing(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package)
    with pytest.raises(RouteUnavailable, match="does not know this worker"):
        here.connect("D", there.call("exports"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_source_that_was_cut_off_writes_no_more_and_may_come_back(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package, pages=256, layers=64)
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    here.fill(1)
    order = list(range(256))
    for xfer in range(40):
        here.submit("D", xfer, order, order[::-1])
    assert here.done.get(timeout=WAIT_S) == (0, None)
    gone, seconds = there.call("source_gone", "S")
    there.call("zero")
    errors = here.outcomes(39)
    assert gone
    assert seconds < 10
    assert "has cut this worker off" in (errors[39] or "")
    time.sleep(0.2)
    assert not there.call("read").any()
    here.disconnect("D")
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    here.submit("D", 100, [1], [2])
    assert here.outcomes(1) == {100: None}
    assert np.array_equal(there.call("read")[2], here.pages[1])


@pytest.mark.parametrize("package", PACKAGES)
def test_disconnect_returns_when_every_job_is_reported(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package, pages=256, layers=64)
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    order = list(range(256))
    for xfer in range(20):
        here.submit("D", xfer, order, order[::-1])
    here.disconnect("D")
    assert here.done.qsize() == 20


@pytest.mark.parametrize("package", PACKAGES)
def test_a_destination_killed_in_the_middle_fails_all_jobs_with_a_reason(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package, pages=256, layers=64)
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    here.fill(1)
    order = list(range(256))
    for xfer in range(200):
        here.submit("D", xfer, order, order[::-1])
    assert here.done.get(timeout=WAIT_S) == (0, None)
    there.kill()
    killed = time.monotonic()
    errors = here.outcomes(199)
    assert time.monotonic() - killed < 10  # seconds at most, of a bound of 3
    assert errors[199] is not None
    assert any(word in errors[199] for word in ("has ended", "failed", "refuses"))
    here.disconnect("D")
    here.submit("D", 500, [0], [0])
    assert here.outcomes(1) == {500: "there is no route to D"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_source_killed_in_the_middle_is_proven_gone_and_writes_no_more(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package, pages=256, layers=64)
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.call("fill", 1)
    there.ask("write_for_ever", "D")
    written_within(here)
    there.kill()
    gone, _ = here.source_gone("S")
    assert gone
    here.pages[:] = 0  # reused at once
    time.sleep(0.3)
    assert not here.pages.any()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_stopped_source_is_not_proven_gone_until_it_is(pair: Pair, package: str) -> None:  # noqa: F811
    here, there = pair(package, pages=256, layers=64)
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    there.call("fill", 1)
    there.ask("write_for_ever", "D")
    written_within(here)
    there.stop()
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(here.source_gone, "S")
        wait([gone], 0.3)
        assert not gone.done()  # it may stand in the middle of a write into our memory
        there.kill()
        assert gone.result(WAIT_S)[0]
    here.pages[:] = 0
    time.sleep(0.2)
    assert not here.pages.any()


@pytest.mark.parametrize("package", [name for name in MODULES if missing(name)])
def test_a_package_that_is_not_installed_is_a_reason(pair: Pair, package: str) -> None:  # noqa: F811
    here, _ = pair("shm")
    exports = msgspec.msgpack.decode(here.exports(), type=Exports)
    asked = pair(package)[0]
    reason = msgspec.msgpack.decode(asked.exports(), type=Exports).refused[package]
    assert reason.startswith(f"the {package} package")
    assert package not in {description.transport for description in exports.descriptions}
