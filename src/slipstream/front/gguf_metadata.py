"""Reads the metadata of a GGUF file, and nothing behind it.

A GGUF file opens with a magic number, counts, and a list of typed key-value pairs; the tensors come after them. The
tokenizer needs a dozen of these values, among them arrays of a hundred thousand strings, so this reader walks the
pairs once over a memory map. (The `gguf` package makes a numpy view for every string and takes seconds for that.)
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import ModelError

_NUMBERS: Mapping[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

Value = int | float | bool | str | list["Value"]


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def count(self) -> int:
        (value,) = struct.unpack_from("<Q", self.data, self.at)
        self.at += 8
        return value

    def string(self) -> str:
        length = self.count()
        start = self.at
        self.at = start + length
        if self.at > len(self.data):
            raise struct.error("a string reaches beyond the end of the file")
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        code = _NUMBERS.get(kind)
        if code is None:
            raise struct.error(f"unknown value type {kind}")
        return self.number(code)

    def array(self) -> list[Value]:
        kind = int(self.number("<I"))
        count = self.count()
        code = _NUMBERS.get(kind)
        if code is None:
            return [self.value(kind) for _ in range(count)]
        packed = f"<{count}{code[1]}"
        values = list(struct.unpack_from(packed, self.data, self.at))
        self.at += struct.calcsize(packed)
        return values


def read_metadata(path: str | Path) -> dict[str, Value]:
    """All key-value pairs of the file. Raises ModelError when it is no GGUF file or is cut short."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if data[:4] != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it starts with {data[:4]!r} instead of b'GGUF'")
            cursor.at = 4
            version = cursor.number("<I")
            if version not in (2, 3):
                raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) can be read")
            cursor.count()  # tensors
            pairs = cursor.count()
            metadata: dict[str, Value] = {}
            for _ in range(pairs):
                key = cursor.string()
                metadata[key] = cursor.value(int(cursor.number("<I")))
            return metadata
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    except (struct.error, MemoryError) as error:
        raise ModelError(f"the metadata of {path} is damaged or cut short: {error}") from error
