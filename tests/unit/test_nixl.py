"""What of the nixl transport needs no nixl; the rest is in tests/proc/test_transfer_packages.py."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.errors import RouteUnavailable
from slipstream.transfer.copies import merged
from slipstream.transfer.transports.base import Runs
from slipstream.transfer.transports.nixl import _pages, _whole_pages, import_first


def test_runs_of_whole_pages_become_page_numbers_neighbours_included() -> None:
    runs = merged(Runs(np.array([0, 64, 256]), np.array([640, 704, 0]), np.array([64, 64, 128])))
    assert len(runs.length) == 2
    pages = _whole_pages(runs, 64)
    assert pages is not None
    assert [column.tolist() for column in pages] == [[0, 1, 4, 5], [10, 11, 0, 1]]
    assert pages[0].dtype == np.int32


@pytest.mark.parametrize("run", [(8, 0, 64), (0, 8, 64), (0, 0, 32), (0, 0, 65)])
def test_a_run_that_is_no_whole_page_is_not_taken_for_one(run: tuple[int, int, int]) -> None:
    columns = [np.array([good, value], np.int64) for good, value in zip((128, 128, 64), run, strict=True)]
    assert _whole_pages(Runs(*columns), 64) is None


def test_descriptors_of_pages_lie_side_by_side_from_the_pools_start() -> None:
    assert _pages(1 << 47, 3, 4096, 2).tolist() == [[(1 << 47) + at, 4096, 2] for at in (0, 4096, 8192)]


def test_a_package_that_is_not_installed_says_how_to_install_it() -> None:
    with pytest.raises(RouteUnavailable, match=r"the nopackage package is not installed: pip install .*nopackage"):
        import_first(("nopackage._api", "nopackage_other._api"))


def test_a_package_that_is_installed_and_does_not_load_says_why(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path)
    with open(f"{folder}/brokenpackage.py", "w") as file:
        file.write("raise ImportError('libibverbs.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(RouteUnavailable, match=r"brokenpackage package cannot be loaded: .*libibverbs"):
        import_first(("brokenpackage",))
