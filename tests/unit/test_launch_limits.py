"""The limit of open files is raised as far as the system allows."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from slipstream.launch.limits import raise_open_files
print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def raised(soft: int, hard: int) -> list[str]:
    program = [sys.executable, "-c", PROGRAM.format(soft=soft, hard=hard)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()


def test_the_soft_limit_rises_to_the_hard_one() -> None:
    assert raised(200, 900) == ["900", "900"]


def test_a_limit_that_suffices_is_left_alone() -> None:
    assert raised(900, 900) == ["900", "900"]
