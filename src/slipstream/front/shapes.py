"""The JSON of answers: chunks of a stream, whole answers, log-probabilities, usage.

A chunk is mostly the same bytes as the one before: everything around the text is rendered once for each choice, and a
plain chunk is prefix, encoded text, suffix. `logprobs` and `finish_reason` are always there, null when there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.front.ask import Telling
from slipstream.front.tokenizer import Tokenizer
from slipstream.types import FinishReason, Logprob

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has no number for

_json = msgspec.json.encode


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of one response. `cached_tokens` are those of the prompt whose KV was there already."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Mark(msgspec.Struct, array_like=True):
    """One token with its log-probability (None for the first of a prompt) and the offset of its text."""

    token: int
    logprob: Logprob | None
    offset: int


class Part(msgspec.Struct):
    """What one choice has to say since the last time."""

    text: str = ""
    token_ids: list[int] = []
    marks: list[Mark] = []
    finish: FinishReason | None = None
    first: bool = False


def event(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _clamped(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


class Shape:
    """How one endpoint words its answers. One object a response; subclasses fill in the endpoint's own forms."""

    object = ""
    chunk_object = ""

    def __init__(self, response_id: str, created: int, model: str, telling: Telling, tokenizer: Tokenizer) -> None:
        self.response_id = response_id
        self.created = created
        self.model = model
        self.telling = telling
        self.tokenizer = tokenizer
        head = {"id": response_id, "object": self.chunk_object, "created": created, "model": model}
        self._open = b"data: " + _json(head)[:-1]
        self._before = self._open + b',"choices":[{"index":'
        null_usage = b',"usage":null' if telling.include_usage and not telling.continuous_usage else b""
        self._after = b"}]" + null_usage + b"}\n\n"
        self._plain = telling.logprobs is None and not telling.return_token_ids and not telling.continuous_usage

    def head(self) -> dict[str, Any]:
        return {"id": self.response_id, "object": self.object, "created": self.created, "model": self.model}

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._open + b',"choices":[],"usage":' + _json(usage) + b"}\n\n"

    def chunk(self, index: int, part: Part, prompt_ids: Sequence[int], usage: Usage | None) -> bytes:
        """One server-sent event. `usage` is given for `continuous_usage_stats` alone."""
        said = self._said(part)
        if self._plain:
            finish = b"null" if part.finish is None else _json(part.finish)
            return b'%b%d,%b,"logprobs":null,"finish_reason":%b%b' % (self._before, index, said, finish, self._after)
        body: dict[str, Any] = {"logprobs": self.logprobs(part.marks), "finish_reason": part.finish}
        extra: dict[str, Any] = {}
        if self.telling.return_token_ids:
            body["token_ids"] = part.token_ids
            if part.first:
                self.put_prompt_ids(body, extra, prompt_ids)
        if usage is not None:
            extra["usage"] = usage
        elif self.telling.include_usage:
            extra["usage"] = None
        inner = b"%b%d,%b,%b]" % (self._before, index, said, _json(body)[1:])
        return inner + (b"," + _json(extra)[1:] if extra else b"}") + b"\n\n"

    def choice(self, index: int, part: Part, prompt_ids: Sequence[int], root: dict[str, Any]) -> dict[str, Any]:
        """One choice of a whole answer; `root` is the answer, for what belongs there."""
        value: dict[str, Any] = {"index": index, **self._whole(part)}
        value["logprobs"] = self.logprobs(part.marks)
        value["finish_reason"] = part.finish
        if self.telling.return_token_ids:
            value["token_ids"] = part.token_ids
            self.put_prompt_ids(value, root, prompt_ids)
        return value

    def _said(self, part: Part) -> bytes:
        raise NotImplementedError

    def _whole(self, part: Part) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, marks: Sequence[Mark]) -> dict[str, Any] | None:
        raise NotImplementedError

    def put_prompt_ids(self, choice: dict[str, Any], root: dict[str, Any], prompt_ids: Sequence[int]) -> None:
        raise NotImplementedError


class ChatShape(Shape):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _said(self, part: Part) -> bytes:
        if part.first:
            return b'"delta":{"role":"assistant","content":' + _json(part.text) + b"}"
        if not part.text and part.finish is not None:
            return b'"delta":{}'
        return b'"delta":{"content":' + _json(part.text) + b"}"

    def _whole(self, part: Part) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": part.text, "refusal": None}}

    def logprobs(self, marks: Sequence[Mark]) -> dict[str, Any] | None:
        count = self.telling.logprobs
        if count is None:
            return None
        return {"content": [self._token(mark, count) for mark in marks], "refusal": None}

    def _token(self, mark: Mark, count: int) -> dict[str, Any]:
        found = mark.logprob or Logprob(LEAST_LOGPROB)
        others = list(zip(found.top_ids, found.top_logprobs, strict=True))[:count]
        return {
            **self._entry(mark.token, found.logprob),
            "top_logprobs": [self._entry(token, logprob) for token, logprob in others],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        pieces = self.tokenizer.pieces
        data = pieces[token] if 0 <= token < len(pieces) else b""
        return {"token": self.tokenizer.token_text(token), "logprob": _clamped(logprob), "bytes": list(data)}

    def put_prompt_ids(self, choice: dict[str, Any], root: dict[str, Any], prompt_ids: Sequence[int]) -> None:
        root["prompt_token_ids"] = prompt_ids


class CompletionShape(Shape):
    object = "text_completion"
    chunk_object = "text_completion"

    def _said(self, part: Part) -> bytes:
        return b'"text":' + _json(part.text)

    def _whole(self, part: Part) -> dict[str, Any]:
        return {"text": part.text}

    def logprobs(self, marks: Sequence[Mark]) -> dict[str, Any] | None:
        count = self.telling.logprobs
        if count is None:
            return None
        text = self.tokenizer.token_text
        return {
            "tokens": [text(mark.token) for mark in marks],
            "token_logprobs": [None if mark.logprob is None else _clamped(mark.logprob.logprob) for mark in marks],
            "top_logprobs": [self._top(mark, count) for mark in marks],
            "text_offset": [mark.offset for mark in marks],
        }

    def _top(self, mark: Mark, count: int) -> dict[str, float] | None:
        """The most likely tokens, and the chosen one, which may not be among them."""
        found = mark.logprob
        if found is None:
            return None
        text = self.tokenizer.token_text
        pairs = list(zip(found.top_ids, found.top_logprobs, strict=True))[:count]
        top = {text(token): _clamped(logprob) for token, logprob in reversed(pairs)}
        ordered = dict(reversed(top.items()))  # of two tokens with one text, the likelier counts
        ordered.setdefault(text(mark.token), _clamped(found.logprob))
        return ordered

    def put_prompt_ids(self, choice: dict[str, Any], root: dict[str, Any], prompt_ids: Sequence[int]) -> None:
        choice["prompt_token_ids"] = prompt_ids
