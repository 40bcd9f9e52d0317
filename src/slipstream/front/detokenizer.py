"""Turns the tokens of one answer into text as they come, and ends it at a stop string.

Each token is bytes. Whole characters go on, the bytes of a half one wait for the rest. Of the text, what could still
become a stop string waits too; everything else may be shown at once. Whatever the cut into calls, the pieces add up to
the text of the whole, up to the first stop string that is complete (the longest, if two are complete at the same
character).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from slipstream.front.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer.

    `stop` are the strings that end it; with `include_stop` the string itself is still shown. They count from the
    `min_tokens`-th token on. After a match `stopped` is the string, and everything fed later is ignored. `tokens`
    counts what was consumed (the token that completed a stop string included), `length` the characters decoded.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_longest",
        "_min_tokens",
        "_partial",
        "_pieces",
        "_skip",
        "_stop",
        "length",
        "stopped",
        "tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._pieces = tokenizer.pieces
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _utf8("replace")
        self._partial = False  # bytes of a half character wait in the decoder
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.stopped: str | None = None
        self.tokens = 0
        self.length = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Consumes tokens, up to the one that completes a stop string; returns the text that may be shown now."""
        if len(token_ids) == 1:
            return self._one(token_ids[0])
        shown = []
        for token in token_ids:
            if self.stopped is not None:
                break
            shown.append(self._one(token))
        return "".join(shown)

    def skip(self, count: int = 1) -> None:
        """Counts tokens that have no text to show, such as the stop token."""
        self.tokens += count

    def finish(self) -> str:
        """The end of the answer: what was held back, half a character as U+FFFD."""
        if self.stopped is not None:
            return ""
        tail = self._decoder.decode(b"", True) if self._partial else ""
        self._partial = False
        self.length += len(tail)
        if not self._stop:
            return tail
        shown = self._match(tail)
        if self.stopped is None:
            shown += self._held
        self._held = ""
        return shown

    def _one(self, token: int) -> str:
        if self.stopped is not None:
            return ""
        self.tokens += 1
        if token in self._skip or not 0 <= token < len(self._pieces):
            return ""
        text = self._decode(self._pieces[token])
        self.length += len(text)
        if not self._stop:
            return text
        if self.tokens < self._min_tokens:
            return text
        return self._match(text) if text else ""

    def _decode(self, piece: bytes) -> str:
        if not self._partial:
            if piece.isascii():
                return piece.decode("ascii")
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(piece)
        self._partial = bool(self._decoder.getstate()[0])
        return text

    def _match(self, text: str) -> str:
        """Adds decoded text behind what is held; returns what no stop string can reach any more."""
        window = self._held + text
        end, start = self._first_stop(window)
        if end >= 0:
            self._held = ""
            self.stopped = window[start:end]
            return window[: end if self._include_stop else start]
        keep = self._possible_prefix(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def _first_stop(self, window: str) -> tuple[int, int]:
        """(end, start) of the stop string that is complete first; the longest of those that end there."""
        found = (-1, -1)
        for stop in self._stop:
            start = window.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if found[0] < 0 or end < found[0] or (end == found[0] and start < found[1]):
                found = (end, start)
        return found

    def _possible_prefix(self, window: str) -> int:
        """Length of the longest end of `window` that begins a stop string."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
