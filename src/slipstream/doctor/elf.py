"""Which libraries a shared object asks for: the DT_NEEDED entries of its dynamic section.

Read from the file, so that nothing of it is loaded or run, as `ldd` would.
"""

from __future__ import annotations

import mmap
import struct

_DYNAMIC, _LOAD = 2, 1  # segment types
_NEEDED, _STRINGS = 1, 5  # dynamic tags


def needed(path: str) -> tuple[str, ...] | None:
    """Names such as "libcudart.so.12", in order; None when the file is no 64-bit little-endian ELF file."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:6] != b"\x7fELF\x02\x01":
                return None
            return _needed(data)
    except (OSError, ValueError, struct.error):
        return None


def _needed(data: mmap.mmap) -> tuple[str, ...]:
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, table + index * size)
        if kind == _LOAD:
            loads.append((address, offset, length))
        elif kind == _DYNAMIC:
            dynamic = (offset, length)
    if dynamic is None:
        return ()
    entries = [struct.unpack_from("<qQ", data, dynamic[0] + at) for at in range(0, dynamic[1], 16)]
    strings = next((value for tag, value in entries if tag == _STRINGS), 0)
    start = next((strings - a + o for a, o, length in loads if a <= strings < a + length), strings)
    return tuple(_text(data, start + value) for tag, value in entries if tag == _NEEDED)


def _text(data: mmap.mmap, start: int) -> str:
    end = data.find(b"\0", start)
    return data[start:end].decode(errors="replace")
