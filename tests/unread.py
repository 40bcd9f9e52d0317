"""A pipe that is full and that nobody reads: who writes into it waits, unless he takes care."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def nobody_reads() -> Iterator[int]:
    """Its write end. It waits for room, as descriptors do unless told otherwise."""
    reading, writing = os.pipe()
    fill(writing)
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


def fill(writing: int) -> int:
    """How many bytes fitted."""
    os.set_blocking(writing, False)
    written = 0
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                written += os.write(writing, b"x" * size)
    os.set_blocking(writing, True)
    return written
