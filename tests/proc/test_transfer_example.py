"""The example of docs/transfer.md runs and prints what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "transfer_two_processes.py"


def test_the_example_of_two_processes_moves_its_pages() -> None:
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "wrote 3 pages of 196608 bytes over shm; error: None" in ran.stdout
    assert "received pages [40, 7, 21]; their first bytes are [10, 20, 30]" in ran.stdout
