"""Plays seeds of the simulation: `python -m tests.sim.replay SEED [LAST_SEED]`; one seed prints its trace."""

from __future__ import annotations

import sys
import time
import traceback

from .model import Violation
from .scenario import Result, Scenario, play


def main(arguments: list[str]) -> int:
    first = int(arguments[0])
    if len(arguments) > 1:
        return _many(first, int(arguments[1]))
    scenario = Scenario(first, trace=True)
    try:
        print(scenario.run())
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        print("\n".join(scenario.world.lines))


def _many(first: int, last: int) -> int:
    total, failed, started = Result(), 0, time.process_time()
    for seed in range(first, last + 1):
        try:
            total.add(play(seed))
        except Violation as violation:
            failed += 1
            print(str(violation).splitlines()[0])
    print(f"{last - first + 1} seeds, {failed} failed, {time.process_time() - started:.1f} s of CPU, {total}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
