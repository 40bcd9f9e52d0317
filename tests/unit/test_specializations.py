"""Everything that a step can need is compiled before the first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton (extra: gpu)")

CHECK = """
import json
from tests.unit.specialization_checks import CASES, check
for case in CASES:
    print(json.dumps([case, *check(case)]))
"""


@pytest.mark.timeout(300)
def test_no_kernel_is_compiled_when_a_step_needs_it():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, ahead, used in map(json.loads, done.stdout.splitlines()):
        assert ahead == used, f"{case}: {ahead} kernels are compiled and {used} of them launched"
