"""A router that plays a script instead of asking workers: for tests and measurements of the front alone.

It keeps the contract of `backend.Backend` and of a sink: tokens are numbered, the last call is a finish or an error,
and an aborted request hears nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from slipstream.errors import ConfigError, RequestError
from slipstream.front.backend import Sink
from slipstream.front.tokenizer import Tokenizer, byte_of_symbol
from slipstream.types import FinishReason, Logprob, Request, Role, Tokens


@dataclass(frozen=True)
class ScriptedCard:
    name: str
    model: str
    max_model_len: int


@dataclass
class ScriptedHistory:
    """Nothing happens at workers that do not exist."""

    events: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, list[dict[str, str]]] = field(default_factory=dict)


class Stage:
    """Where a script speaks for one request."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.closed = False
        self._sink = sink
        self._index = 0

    def say(
        self,
        token_ids: Sequence[int],
        *,
        finish: FinishReason | None = None,
        stop_token: int | None = None,
        logprobs: list[Logprob] | None = None,
        cached_tokens: int | None = None,
        prompt_logprobs: list[Logprob | None] | None = None,
    ) -> None:
        """New tokens; after an abort or the end nobody listens."""
        if self.closed:
            return
        self.closed = finish is not None
        tokens = Tokens(
            request=self.request.id,
            attempt=0,
            index=self._index,
            token_ids=list(token_ids),
            finish=finish,
            logprobs=logprobs,
            stop_token=stop_token,
            cached_tokens=cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
        self._index += len(token_ids)
        self._sink.tokens(tokens)

    def fail(self, error: RequestError) -> None:
        if not self.closed:
            self.closed = True
            self._sink.error(error)


Script = Callable[[Stage], Awaitable[None]]


class ScriptedRouter:
    """Plays `script` for each request. `requests` and `aborted` (ids) are what it was asked; `refusal`, when set, is
    raised by `submit`."""

    def __init__(self, script: Script, *, name: str = "scripted", model: str = "", max_model_len: int = 4096) -> None:
        self.id = "router-scripted"
        self.metrics_registry = CollectorRegistry()
        self.ready = True
        self.card: ScriptedCard | None = ScriptedCard(name, model or name, max_model_len)
        self.script = script
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.finished_here: list[FinishReason] = []  # what `abort` was told of those
        self.refusal: RequestError | None = None
        self.urls: dict[str, Role | None] = {}
        self.problems: list[str] = []
        self._running: dict[str, tuple[Stage, asyncio.Task[None]]] = {}

    @property
    def running(self) -> set[str]:
        return set(self._running)

    def model_card(self) -> ScriptedCard | None:
        return self.card

    def submit(self, request: Request, sink: Sink) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        stage = Stage(request, sink)
        self._running[request.id] = stage, asyncio.create_task(self._play(stage))

    async def _play(self, stage: Stage) -> None:
        try:
            await self.script(stage)
        finally:
            self._running.pop(stage.request.id, None)

    def abort(self, request_id: str, finish: FinishReason | None = None) -> None:
        stage, task = self._running.pop(request_id, (None, None))
        if stage is not None and task is not None:
            self.aborted.append(request_id)
            if finish is not None:
                self.finished_here.append(finish)
            stage.closed = True
            if task is not asyncio.current_task():  # a script whose token ended the request goes on, unheard
                task.cancel()

    def add_worker(self, url: str, role: Role | None = None, *, joins: bool = False) -> dict[str, Any]:
        if not url.startswith("http://"):
            raise ConfigError(f"{url!r} is not a worker's address. Give http://HOST:PORT")
        self.urls[url] = role
        return {"url": url, "role": role}

    def remove_worker(self, url_or_id: str, drain: bool = True) -> dict[str, Any]:
        if url_or_id not in self.urls:
            raise ConfigError(f"there is no worker {url_or_id!r}")
        return {"url": url_or_id, "role": self.urls.pop(url_or_id), "drain": drain}

    def entry(self, request_id: str) -> None:
        return None

    async def history(self, request_ids: Sequence[str]) -> ScriptedHistory:
        return ScriptedHistory()

    def describe(self) -> dict[str, Any]:
        problems = {"problems": self.problems} if self.problems else {}
        workers = [{"url": url, **problems} for url in self.urls]
        return {"router": self.id, "ready": self.ready, "workers": workers}

    def audit(self) -> dict[str, Any]:
        return {"problems": [], "stages": {"decode": len(self._running)}}


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(chat_template: str | None = CHATML) -> Tokenizer:
    """A vocabulary of the 256 bytes (id = byte), the special tokens `SPECIAL_TOKENS` from 256 on, and no merges."""
    encoder = Encoder(models.BPE(vocab=byte_of_symbol(), merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return Tokenizer(encoder, chat_template=chat_template, special={"eos_token": "<|end|>"})
