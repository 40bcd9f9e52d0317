"""What holds for all tests: the order of their files, and one compute thread in the process that runs them."""

from __future__ import annotations

import sys

import pytest

# Files that take the longest (seconds alone, 2 cores) come first, so that none is left for one worker at the end.
# Those that wait for processes and those that compute all the time take turns: together they keep the cores busy.
LONG_FILES = (
    "sim/test_handoff_sim.py",
    "proc/test_hangs.py",
    "proc/test_launch_cluster.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {f"tests/{name}": place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: first.get(item.nodeid.partition("::")[0], len(first)))


@pytest.fixture(autouse=True)
def _one_compute_thread() -> None:
    """A model that some test opened with the threads of a whole machine leaves them behind: they would spin between
    the small steps of tests behind it, on cores that other tests need."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
