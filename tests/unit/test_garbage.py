"""What is there when a process is ready is no longer the garbage collector's business."""

from __future__ import annotations

import json
import subprocess
import sys

SETTLE = """
import gc, json, slipstream.errors
from slipstream import garbage
garbage.starting()
during = gc.get_threshold()
kept = [[number] for number in range(1000)]
loop = []
loop.append(loop)
del loop
aside = garbage.settled()
print(json.dumps({
    "during": during, "after": gc.get_threshold(), "aside": aside, "frozen": gc.get_freeze_count(),
    "left": len(gc.get_objects()), "kept": len(kept), "enabled": gc.isenabled(), "found": gc.collect(),
}))
"""


def settle() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", SETTLE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_what_stays_is_set_aside_and_what_is_garbage_is_not():
    found = settle()
    assert found["aside"] == found["frozen"]
    assert isinstance(found["aside"], int)
    assert found["aside"] > 1000
    assert isinstance(found["left"], int)
    assert found["left"] < 100
    assert found["found"] == 0


def test_collections_are_rarer_while_a_process_starts_and_go_on_when_it_serves():
    found = settle()
    assert isinstance(found["during"], list)
    assert isinstance(found["after"], list)
    assert found["during"][0] > found["after"][0] > 700
    assert found["enabled"] is True
