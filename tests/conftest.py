"""What holds for all tests: the order of their files, and one compute thread in the process that runs them."""

from __future__ import annotations

import sys

import pytest

# The files that take longest begin first (with `--no-loadscope-reorder`, see the Makefile), so that none is left to one
# process alone at the end. Those that mostly wait for processes alternate with those that compute.
LONG_FILES = (
    "sim/test_handoff_sim.py",
    "proc/test_hangs.py",
    "proc/test_launch_cluster.py",
    "proc/test_observe.py",
    "unit/test_bench_serve.py",
    "browser/test_dashboard_alone.py",
    "unit/test_router_place_load.py",
    "proc/test_rank_faults.py",
    "unit/test_prompt_graphs.py",
    "proc/test_faults_under_load.py",
    "proc/test_equality.py",
    "unit/test_topo_damage.py",
    "browser/test_dashboard.py",
    "unit/test_kernels_runner.py",
    "proc/test_tensor_parallel.py",
    "unit/test_model_shard.py",
    "proc/test_hung_links.py",
    "proc/test_unread_output.py",
    "proc/test_bench_serve.py",
    "unit/test_watch.py",
    "unit/test_cli.py",
    "unit/test_transports_staged.py",
    "unit/test_router_silence.py",
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
