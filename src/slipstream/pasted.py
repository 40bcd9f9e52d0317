"""Texts that people hand to commands: files, `-` for standard input, whatever encoding they were saved in.

A byte order mark decides between UTF-8 and UTF-16, as Windows shells write it; gzip is unpacked; bytes that fit no
encoding become U+FFFD. Nothing here takes more memory than its bound, whatever the file is.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from slipstream.errors import ConfigError

MOST_BYTES = 32 << 20  # of a text that is read as a whole
PART = 1 << 16  # characters: longer lines come in parts of exactly this length
_GZIP = b"\x1f\x8b"
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@contextlib.contextmanager
def opened(name: str) -> Iterator[io.TextIOWrapper]:
    """The text of a file, or of standard input (`-`). Raises ConfigError, also for what happens while it is read."""
    shown = "standard input" if name == "-" else name
    try:
        with contextlib.ExitStack() as stack:
            raw = sys.stdin.buffer if name == "-" else stack.enter_context(open(name, "rb"))
            file = _Peeked(raw)
            if file.head.startswith(_GZIP):
                file = _Peeked(cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=io.BufferedReader(file)))))
            encoding = next((name for mark, name in _MARKS if file.head.startswith(mark)), "utf-8")
            text = io.TextIOWrapper(io.BufferedReader(file), encoding, errors="replace", newline="")
            yield text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{shown} begins like a gzip file and cannot be unpacked: {error}.") from error
    except OSError as error:
        raise ConfigError(f"cannot read {shown}: {error.strerror or error}.") from error


def whole(name: str) -> str:
    """All of it. Raises ConfigError when it cannot be read, is no text, or is too much to be a pasted one."""
    with opened(name) as file:
        text = file.read(MOST_BYTES + 1)
    shown = "standard input" if name == "-" else name
    if "\0" in text:
        raise ConfigError(f"{shown} is no text: it holds zero bytes. Give what the tool printed, as UTF-8.")
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{shown} is longer than {MOST_BYTES >> 20} MiB: give the tool's output alone.")
    return text


def lines(file: io.TextIOWrapper) -> Iterator[str]:
    """Its lines, the longer ones in parts."""
    while line := file.readline(PART):
        yield line


class _Peeked(io.RawIOBase):
    """A stream whose first bytes, `head`, can be looked at before it is read."""

    def __init__(self, source: BinaryIO) -> None:
        super().__init__()
        self._source = source
        self.head = source.read(4)
        self._left = self.head

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # pyright: ignore[reportMissingParameterType]  a buffer has no name before 3.12
        data, self._left = (self._left or self._source.read1(len(buffer)), b"")  # pyright: ignore
        data, self._left = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)
