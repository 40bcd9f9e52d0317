"""Keeps Python's garbage collector out of the way of a process that serves.

A full collection looks at every object there is, with the interpreter's lock held: 190,000 of them in a worker with
torch, 50,000 in a router, which took 40 to 200 ms on two busy cores, and no thread goes on meanwhile. What is there
when a process is ready stays until its end, so it need not be looked at again. `starting` has few collections while all
that is made; `settled` collects once and sets aside what is left (`gc.freeze`). From then on a full collection looks at
what serving has made since: under a millisecond for 20,000 objects, 2 for 40,000.

For processes that are ours alone: what is set here counts for the whole interpreter.
"""

from __future__ import annotations

import gc
import logging
import time

logger = logging.getLogger(__name__)

STARTING = (50_000, 20, 100)  # imports and models make little that a collection would find
SERVING = (5_000, 20, 20)  # objects made and not freed before the youngest are looked at; for each older generation,
# how many collections of the next younger one


def starting() -> None:
    """Called before the large imports; `settled` has to follow."""
    gc.set_threshold(*STARTING)


def settled() -> int:
    """Called when all is made that stays, before the first request; may be called again when more has been made.

    Returns how many objects are set aside.
    """
    began = time.perf_counter()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SERVING)
    aside = gc.get_freeze_count()
    logger.debug("%d objects set aside from garbage collection in %.0f ms", aside, 1e3 * (time.perf_counter() - began))
    return aside
