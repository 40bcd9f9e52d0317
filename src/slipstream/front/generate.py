"""POST /v1/chat/completions and /v1/completions, from the body to the last byte of the answer.

A request is validated whole, tokenized, and handed to the router. For a stream the response begins with the first
token: until then an error still has its own HTTP status. If nothing can be sent for `KEEP_ALIVE_S`, the response begins
all the same, with a comment line, so that no proxy between gives up; what fails after that is an error event, and the
stream ends without [DONE].

A second task waits for the client to leave and then aborts all engine requests of the answer, whatever the handler is
waiting for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from slipstream.config import FrontConfig
from slipstream.errors import ClientGone, ModelNotFound, NoWorkers, RequestError
from slipstream.front.answer import AT_ONCE, Answer
from slipstream.front.ask import (
    Ask,
    Prompt,
    answer_tokens,
    ask_of,
    check_characters,
    check_count,
    check_prompt_ids,
    messages_of,
    prompts_of,
)
from slipstream.front.backend import Backend, Card
from slipstream.front.exchange import Exchange, error_body
from slipstream.front.metrics import FrontMetrics
from slipstream.front.record import Record
from slipstream.front.schema import BodyDecoder, ChatBody, CompletionBody
from slipstream.front.service import TokenizerService
from slipstream.front.shapes import DONE, KEEP_ALIVE, ChatShape, CompletionShape, Shape, event
from slipstream.front.timeline import Stories
from slipstream.front.tokenizer import Tokenizer
from slipstream.front.tracing import FrontTraces

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
COMPLETION_TOKENS = 16  # max_tokens of a completion that names none, as in the API this follows
EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Generator:
    """The two generation endpoints of one front. `answers` are those under way."""

    def __init__(
        self,
        backend: Backend,
        service: TokenizerService,
        config: FrontConfig,
        metrics: FrontMetrics,
        traces: FrontTraces,
    ) -> None:
        self.answers: set[Answer] = set()
        self.keep_alive_s = KEEP_ALIVE_S
        self._backend = backend
        self._service = service
        self._config = config
        self._metrics = metrics
        self._record = Record()
        self.stories = Stories(backend)
        self._traces = traces
        self._chat_body = BodyDecoder(ChatBody)
        self._completion_body = BodyDecoder(CompletionBody)

    async def chat(self, exchange: Exchange) -> None:
        await self._counted(exchange, "chat", self._chat)

    async def completions(self, exchange: Exchange) -> None:
        await self._counted(exchange, "completions", self._completions)

    def cut(self, reason: str) -> None:
        """Ends all answers with an error now."""
        for answer in list(self.answers):
            answer.failed(NoWorkers(reason))

    # ------------------------------------------------------------------------------------------ preparing

    def card(self, model: str | None) -> Card:
        """The served model, if that is the one asked for. Raises NoWorkers, ModelNotFound."""
        card = self._backend.model_card()
        if card is None:
            raise NoWorkers("no worker has connected yet, so no model is served; try again in a moment")
        if model is not None and model != card.name:
            raise ModelNotFound(f"the model {model!r} is not served here; {card.name!r} is", param="model")
        return card

    async def _chat(self, exchange: Exchange, started: float) -> Answer:
        body = self._chat_body(await exchange.body(self._config.max_body_bytes))
        card, tokenizer = self.card(body.model), self._service.tokenizer
        ask = ask_of(body, tokenizer)
        ids = await self.chat_ids(body, tokenizer, card.max_model_len)
        answer = self._answer(ChatShape, "chatcmpl-", card, ask, tokenizer, started)
        default = self._config.default_max_tokens
        self._add(answer, Prompt(ids), ask, card, default, "messages")
        return answer

    async def chat_ids(self, body: Any, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
        """The prompt of a conversation. `body` has the fields of ChatBody that concern it."""
        source = tokenizer.chat_template.source if tokenizer.chat_template else ""
        messages = messages_of(body.messages, source)

        def work() -> list[int]:
            text = tokenizer.render_chat(
                messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                variables=body.chat_template_kwargs,
            )
            check_characters(len(text), tokenizer, max_model_len, "messages")
            return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

        return await self._service.run(sum(len(message["content"]) for message in messages), work)

    async def _completions(self, exchange: Exchange, started: float) -> Answer:
        body = self._completion_body(await exchange.body(self._config.max_body_bytes))
        card, tokenizer = self.card(body.model), self._service.tokenizer
        ask = ask_of(body, tokenizer)
        prompts = prompts_of(body.prompt)
        special = body.add_special_tokens is not False

        def read(prompt: str | list[int]) -> Prompt:
            if isinstance(prompt, str):
                return Prompt(tokenizer.encode(prompt, add_special_tokens=special), prompt)
            check_prompt_ids(prompt, tokenizer, "prompt")
            text = tokenizer.decode(prompt, skip_special_tokens=True) if ask.telling.echo else ""
            return Prompt(prompt, text)

        check_count(len(prompts), ask.n)
        for prompt in prompts:
            if isinstance(prompt, str):
                check_characters(len(prompt), tokenizer, card.max_model_len, "prompt")
        characters = sum(map(len, prompts))
        read_all = await self._service.run(characters, lambda: [read(prompt) for prompt in prompts])
        answer = self._answer(CompletionShape, "cmpl-", card, ask, tokenizer, started)
        for at, prompt in enumerate(read_all, 1):
            self._add(answer, prompt, ask, card, COMPLETION_TOKENS, "prompt")
            if at % AT_ONCE == 0:
                await asyncio.sleep(0)
        return answer

    def _answer(
        self, shape: type[Shape], prefix: str, card: Card, ask: Ask, tokenizer: Tokenizer, started: float
    ) -> Answer:
        response_id = prefix + os.urandom(12).hex()
        return Answer(
            shape=shape(response_id, int(time.time()), card.name, ask.telling, tokenizer),
            telling=ask.telling,
            tokenizer=tokenizer,
            backend=self._backend,
            metrics=self._metrics,
            started=started,
        )

    def _add(self, answer: Answer, prompt: Prompt, ask: Ask, card: Card, default: int, param: str) -> None:
        check_prompt_ids(prompt.ids, answer.tokenizer, param)
        limit = answer_tokens(len(prompt.ids), ask, card.max_model_len, default, param)
        answer.add(prompt, ask, replace(ask.sampling, max_tokens=limit, min_tokens=min(ask.sampling.min_tokens, limit)))

    # ------------------------------------------------------------------------------------------ answering

    async def _counted(self, exchange: Exchange, endpoint: str, prepare: Callable[..., Any]) -> None:
        started = time.monotonic()
        outcome = "internal_error"
        answer: Answer | None = None
        try:
            answer = await prepare(exchange, started)
            assert answer is not None
            await self._told(exchange, endpoint, answer)
            outcome = answer.error.code if answer.error else "ok"
        except RequestError as error:
            outcome = error.code
            if answer is None:
                self._traces.refused(exchange, endpoint, started, error)
            raise
        except asyncio.CancelledError:
            outcome = ClientGone.code
            raise
        finally:
            self._metrics.outcomes.add(1, endpoint, outcome)

    async def _told(self, exchange: Exchange, endpoint: str, answer: Answer) -> None:
        """Answers, and notes how: in metrics, in the log, in the list of recent requests."""
        self._metrics.in_flight += 1
        story = self.stories.open(exchange.request_id, endpoint, answer)
        span = self._traces.begin(exchange, endpoint, answer)
        error: RequestError | None = None
        cancelled = True  # unless it ends in another way
        try:
            await self._run(exchange, answer)
            cancelled = False
        except RequestError as refusal:
            error, cancelled = refusal, False
            raise
        finally:
            self._metrics.in_flight -= 1
            self._count(answer, answer.started)
            story.end(error, cancelled)
            self._traces.end(span, answer, error)
            self._record.request(exchange.request_id, answer.shape.model, answer)

    def _count(self, answer: Answer, started: float) -> None:
        usage, metrics = answer.usage(), self._metrics
        seconds = time.monotonic() - started
        metrics.prompt_tokens.add(usage.prompt_tokens)
        metrics.cached_tokens.add(usage.prompt_tokens_details.cached_tokens)
        metrics.generated_tokens.add(usage.completion_tokens)
        metrics.duration.observe(seconds)
        metrics.prompt_sizes.observe(usage.prompt_tokens)
        metrics.answer_sizes.observe(usage.completion_tokens)
        for reason in answer.finishes:
            metrics.finishes.add(1, reason)
        each = usage.completion_tokens / max(1, len(answer.choices))
        if answer.first_token_s is not None and each > 1:
            metrics.token_time.observe((seconds - answer.first_token_s) / (each - 1))

    async def _run(self, exchange: Exchange, answer: Answer) -> None:
        self.answers.add(answer)
        watcher = asyncio.create_task(self._watch(exchange, answer))
        try:
            await answer.submit()
            if answer.telling.stream:
                await self._stream(exchange, answer)
            else:
                await self._whole(exchange, answer)
        finally:
            watcher.cancel()
            answer.abort()
            self.answers.discard(answer)

    async def _watch(self, exchange: Exchange, answer: Answer) -> None:
        await exchange.gone()
        answer.leave()

    async def _whole(self, exchange: Exchange, answer: Answer) -> None:
        while not answer.done:
            await answer.wait()
        if answer.error is not None:
            raise answer.error
        await exchange.json(answer.whole())

    async def _stream(self, exchange: Exchange, answer: Answer) -> None:
        heart = _Heart(answer, self.keep_alive_s)
        try:
            while True:
                await answer.wait()
                data = answer.take()
                if answer.error is not None:
                    await self._break_off(exchange, answer.error, data)
                    return
                done = answer.done
                if done:
                    tail = answer.shape.usage_chunk(answer.usage()) if answer.telling.include_usage else b""
                    data = data + tail + DONE
                elif not data and answer.beating:
                    data = KEEP_ALIVE
                answer.beating = False
                if not data:
                    continue
                if not exchange.status:
                    await exchange.start(200, EVENT_STREAM, STREAM_HEADERS)
                await exchange.write(data, more=not done)
                if done:
                    return
                heart.last = time.monotonic()
        finally:
            heart.stop()

    async def _break_off(self, exchange: Exchange, error: RequestError, data: bytes) -> None:
        """Ends a stream that failed: by status if it has not begun, else by an error event and no [DONE]."""
        if not exchange.status and not data:
            raise error
        if isinstance(error, ClientGone):
            return
        if not exchange.status:
            await exchange.start(200, EVENT_STREAM, STREAM_HEADERS)
        level = logging.WARNING if error.status >= 500 else logging.INFO
        logger.log(level, "request %s: stream ended by %s: %s", exchange.request_id, error.code, error.message)
        await exchange.write(data + event(error_body(error)), more=False)


class _Heart:
    """Calls `answer.beat` whenever `last` is `interval_s` ago. One timer for a whole stream, not one a chunk."""

    def __init__(self, answer: Answer, interval_s: float) -> None:
        self.last = time.monotonic()
        self._answer = answer
        self._interval = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, self._tick)

    def _tick(self) -> None:
        left = self.last + self._interval - time.monotonic()
        if left <= 0:
            self._answer.beat()
            left = self._interval
        self._timer = self._loop.call_later(left, self._tick)

    def stop(self) -> None:
        self._timer.cancel()
