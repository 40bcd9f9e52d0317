"""nixl and mooncake between two real processes, where the packages are installed: contents, and every end."""

from __future__ import annotations

import importlib
import time

import msgspec
import numpy as np
import pytest
from tests.proc import transfer_pair
from tests.proc.transfer_pair import Pair, jobs_under_way, joined, written_to

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
every_package = pytest.mark.parametrize("package", PACKAGES)


@every_package
def test_random_page_lists_arrive_in_the_other_process(pair: Pair, package: str) -> None:
    transfer_pair.random_lists_arrive(pair, package, rounds=40)


@every_package
def test_thousands_of_pages_in_many_jobs_arrive(pair: Pair, package: str) -> None:
    here, there = joined(pair, package, pages=6000, layers=1)
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


@every_package
def test_both_directions_at_once(pair: Pair, package: str) -> None:
    transfer_pair.both_directions_at_once(pair, package)


@every_package
def test_a_stranger_gets_no_landing(pair: Pair, package: str) -> None:
    here, there = pair(package)
    with pytest.raises(RouteUnavailable, match="does not know this worker"):
        here.connect("D", there.call("exports"))


@every_package
def test_a_source_that_was_cut_off_writes_no_more_and_may_come_back(pair: Pair, package: str) -> None:
    here, there = jobs_under_way(pair, package, 40)
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


@every_package
def test_disconnect_returns_when_every_job_is_reported(pair: Pair, package: str) -> None:
    here, _ = joined(pair, package, pages=256, layers=64)
    order = list(range(256))
    for xfer in range(20):
        here.submit("D", xfer, order, order[::-1])
    here.disconnect("D")
    assert here.done.qsize() == 20


@every_package
def test_a_destination_killed_in_the_middle_fails_all_jobs_with_a_reason(pair: Pair, package: str) -> None:
    transfer_pair.a_killed_destination_fails_all_jobs(pair, package, 200, ("has ended", "failed", "refuses"))


@every_package
def test_a_source_killed_in_the_middle_is_proven_gone_and_writes_no_more(pair: Pair, package: str) -> None:
    transfer_pair.a_killed_source_is_proven_gone(pair, package)


@every_package
def test_a_stopped_source_is_not_proven_gone_until_it_is(pair: Pair, package: str) -> None:
    here, there = written_to(pair, package)
    transfer_pair.a_stopped_source_is_waited_for(here, there, there.kill)
    transfer_pair.assert_stays_empty(here)


@pytest.mark.parametrize("package", [name for name in MODULES if missing(name)])
def test_a_package_that_is_not_installed_is_a_reason(pair: Pair, package: str) -> None:
    here, _ = pair("shm")
    exports = msgspec.msgpack.decode(here.exports(), type=Exports)
    asked = pair(package)[0]
    reason = msgspec.msgpack.decode(asked.exports(), type=Exports).refused[package]
    assert reason.startswith(f"the {package} package")
    assert package not in {description.transport for description in exports.descriptions}
