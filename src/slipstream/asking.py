"""One GET of a server that may be anything, for commands in a terminal.

Whatever listens at an address that somebody typed (another program, a server that hangs or drips, one that never stops
sending), the answer is there in time and of bounded size, or the reason why there is none. No proxy is ever asked.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from urllib.parse import urlsplit

from slipstream.errors import ConfigError, SlipstreamError

ANSWER_S = 3.0
MOST_BYTES = 64 << 20
_PIECE = 1 << 16
_SHOWN = 120  # characters of what was received that a message repeats


class Unreachable(SlipstreamError):
    """No slipstream answers at a URL; the message says what does, if anything."""


def base_url(text: str) -> str:
    """`text` as http://host:port; a bare host:port will do. Raises ConfigError."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except (ValueError, UnicodeError):
        parts, host, port = urlsplit(""), "", None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{text!r} is no URL of a running slipstream; it looks like http://127.0.0.1:8000.")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port else "")


def get(url: str, path: str, api_key: str = "", timeout_s: float = ANSWER_S) -> tuple[int, bytes]:
    """Status and body of a GET, all of it within `timeout_s`. Raises Unreachable, ConfigError."""
    if not all(0x20 < ord(letter) < 0x7F for letter in api_key):
        raise ConfigError("the API key has characters that no HTTP header can hold; is something pasted beside it?")
    visit = _Visit(url, path, api_key, timeout_s)
    thread = threading.Thread(target=visit.run, name=f"GET {path}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        visit.sever()
        raise _unreachable(url, f"no whole answer within {timeout_s:g} s")
    if visit.strange:
        raise Unreachable(f"what answers at {url} is no slipstream: {visit.problem}")
    if visit.problem:
        raise _unreachable(url, visit.problem)
    return visit.status, visit.body


def _unreachable(url: str, why: str) -> Unreachable:
    return Unreachable(f"nothing answers at {url}: {why}. Is `slipstream serve` running there?")


class _TooLong(OSError):
    """An answer of more than MOST_BYTES."""


class _Visit:
    """One request on a thread of its own, since name resolution knows no time limit and a socket's is for each read."""

    def __init__(self, url: str, path: str, api_key: str, timeout_s: float) -> None:
        parts = urlsplit(base_url(url))
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.status, self.body, self.problem = 0, b"", ""
        self.strange = False  # there was an answer, but none that slipstream gives
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        self._path = path
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._until = time.monotonic() + timeout_s

    def run(self) -> None:
        try:
            self._connection.request("GET", self._path, headers=self._headers)
            answer = self._connection.getresponse()
            self.body = self._read(answer)
            self.status = answer.status
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.strange = isinstance(error, (ValueError, _TooLong, http.client.HTTPException)) and not isinstance(
                error, http.client.RemoteDisconnected
            )
            self.problem = _printable(getattr(error, "strerror", None) or str(error)) or type(error).__name__
        finally:
            self._connection.close()

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        """Raises OSError when it is too long, cut, or takes too long."""
        pieces: list[bytes] = []
        size = 0
        while piece := answer.read1(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                raise _TooLong(f"it sends more than {MOST_BYTES >> 20} MiB")
            if time.monotonic() > self._until:
                raise TimeoutError("timed out")
        if answer.length:
            raise OSError(f"the answer ended {answer.length} bytes too early")
        return b"".join(pieces)

    def sever(self) -> None:
        """Ends a read that is under way on the thread."""
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _printable(text: str) -> str:
    """On one line and without what would steer a terminal; what a stranger has sent may be anything."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(clean.split())[:_SHOWN]
