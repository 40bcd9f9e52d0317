"""One answer as it arrives: pieces of a body to server-sent events, events to tokens with their times.

Nothing is assumed about where the body is cut. Servers differ in what they send besides tokens: a first chunk that has
only a role, a last one that has only usage or a finish_reason, comments, errors in the middle of a stream in several
forms. Only what brings tokens gets a time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

MOST_ERROR_BYTES = 1 << 16
MOST_SHOWN = 1 << 10  # bytes of a body of status 200 that are kept until its first token, in case it holds none


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """What is read of an event; anything else in it is skipped."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_chunk = msgspec.json.Decoder(Chunk, strict=False).decode


@dataclass(slots=True)
class Stream:
    """One answer as it arrives. Times are `time.perf_counter` seconds.

    `times[i]` is when the i-th event with tokens came, `counts[i]` how many tokens it brought: by `token_ids`, or by
    the growth of a usage in every event, else 1. An event of a completion brings tokens even when its text is empty
    (half a character has none); one of a chat only when there is content. `problem` is the kind of error, "" when the
    answer is whole; `detail` says more.
    """

    times: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    problem: str = ""
    detail: str = ""
    finish: str = ""
    done: bool = False
    told_ids: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    _tail: bytes = b""
    _data: bytes = b""
    _named: bytes = b""
    _body: bytes = b""

    @property
    def counted(self) -> int:
        return sum(self.counts)

    def take(self, data: bytes, now: float) -> None:
        """A piece of the body, cut anywhere."""
        if self.status != 200:
            self._body = (self._body + data)[:MOST_ERROR_BYTES]
            return
        if not self.times and len(self._body) < MOST_SHOWN:
            self._body += data[:MOST_SHOWN]
        data = self._tail + data if self._tail else data
        *lines, self._tail = data.split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                value = line[6:] if line[5:6] == b" " else line[5:]
                self._data = self._data + b"\n" + value if self._data else value
            elif not line:
                if self._data:
                    self._event(self._data, now)
                self._data = self._named = b""
            elif line.startswith(b"event:"):
                self._named = line[6:].strip()

    def finished(self, now: float) -> None:
        """The body is complete as HTTP sees it."""
        self.ended = now
        if self.status != 200:
            self.fail(f"http_{self.status}", message_of(self._body))
        elif self.problem:
            return
        elif not self.finish and not self.times and not self.done:
            said = message_of(self._body).strip()
            self.fail("no_events", f"the answer of status 200 held no events{f', but: {said}' if said else ''}")
        elif not self.finish:
            self.fail("cut", "the stream ended without a finish_reason")
        elif not self.times:
            self.fail("empty", f"the answer held no token; finish_reason is {self.finish!r}")

    def broken(self, why: str, now: float) -> None:
        """The connection ended before the body did."""
        self.ended = now
        if self.problem:
            return
        if not self.status:
            self.fail("no_answer", why)
        elif not (self.done and self.finish):
            self.fail("cut", f"{why} after {self.counted} tokens")

    def fail(self, problem: str, detail: str = "") -> None:
        if not self.problem:
            self.problem, self.detail = problem, detail[:300]

    # ------------------------------------------------------------------------------------------ events

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _chunk(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.fail("bad_event", f"{error}: {data[:120]!r}")
            return
        if chunk.error or chunk.object == "error" or self._named == b"error":
            self.fail("error_event", message_of(data))
            return
        tokens = 0
        for choice in chunk.choices or ():
            tokens += _tokens_of(choice)
            if choice.finish_reason:
                self.finish = choice.finish_reason
            if choice.token_ids:
                self.told_ids = True
        if chunk.usage is not None:
            tokens = self._usage(chunk.usage, tokens, bool(chunk.choices))
        if tokens:
            self.times.append(now)
            self.counts.append(tokens)

    def _usage(self, usage: Usage, tokens: int, beside_choices: bool) -> int:
        """Keeps the totals; the tokens of this event by them, if they are given with each event."""
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens is None:
            return tokens
        before = self.output_tokens or 0
        self.output_tokens = usage.completion_tokens
        return usage.completion_tokens - before if beside_choices and usage.completion_tokens > before else tokens


def _tokens_of(choice: Choice) -> int:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    if choice.text is not None:
        return 1 if choice.text or not choice.finish_reason else 0
    delta = choice.delta
    if delta is None:
        return 0
    return int(bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))


def message_of(body: bytes) -> str:
    """The message of an error body, in any of its usual forms; else the body's beginning."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body[:200].decode(errors="replace")
    inner = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(inner, dict):
        return str(inner.get("message") or inner.get("detail") or inner)
    return str(inner)


@dataclass(slots=True)
class Whole(Stream):
    """An answer that is no stream: its body as it is."""

    body: bytes = b""

    def take(self, data: bytes, now: float) -> None:
        self.body += data

    def finished(self, now: float) -> None:
        self.ended = now
