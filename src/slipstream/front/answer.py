"""One response in the making: its engine requests, from submission to the last token of the last choice.

The router calls a `Choice` with tokens on the event loop. The choice makes text of them at once, and lets it lie until
the handler, which it wakes, has taken it: for a client that reads slowly the handler waits in its write, and what
lies there meanwhile leaves as one chunk. A stop string, an error of one choice, or the client's leaving ends the engine
requests that are still running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec.structs import replace

from slipstream.errors import ClientGone, EngineFailure, RequestError
from slipstream.front.ask import SEED_SPAN, Ask, Prompt, Telling
from slipstream.front.backend import Backend
from slipstream.front.detokenizer import Detokenizer
from slipstream.front.metrics import FrontMetrics
from slipstream.front.shapes import Mark, Part, PromptDetails, Shape, Usage
from slipstream.front.tokenizer import Tokenizer
from slipstream.types import FinishReason, Logprob, Request, SamplingParams, Tokens

AT_ONCE = 64  # engine requests of one answer that are made or submitted without letting others go first


class Choice:
    """One choice of the answer, and the sink of its engine request.

    What it has said lies there until somebody takes it. `over` is set with the last token, after a stop string, an
    error or an abort; whatever comes then is ignored.
    """

    __slots__ = (
        "_answer", "_detokenizer", "_last", "_part", "_pieces", "cached_tokens", "completion_tokens", "index", "over",
        "prompt", "request",
    )  # fmt: skip

    def __init__(self, answer: Answer, index: int, prompt: Prompt, request: Request) -> None:
        telling = answer.telling
        self._answer = answer
        self._detokenizer = Detokenizer(
            answer.tokenizer,
            stop=telling.stop,
            include_stop=telling.include_stop,
            skip_special_tokens=telling.skip_special_tokens,
            min_tokens=telling.min_tokens,
        )
        self._last = 0.0  # when the last token came; 0 before the first
        self.index = index
        self.prompt = prompt
        self.request = request
        self._part = Part(first=True)  # not taken yet; its text is in pieces until then
        self._pieces: list[str] = []
        self.over = False
        self.cached_tokens = 0
        self.completion_tokens = 0

    @property
    def sayable(self) -> bool:
        """Whether there is anything to take: a token may have no text yet."""
        part = self._part
        return bool(self._pieces or part.finish or part.marks or part.token_ids)

    def take(self) -> Part:
        """What has been said since the last call."""
        part, pieces = self._part, self._pieces
        if len(pieces) > 1:
            self._answer.metrics.merged.add(len(pieces) - 1)
        part.text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        pieces.clear()
        self._part = Part()
        return part

    # ------------------------------------------------------------------------------------------ the router's calls

    def tokens(self, t: Tokens) -> None:
        if self.over:
            return
        answer = self._answer
        if t.finish in ("abort", "error"):
            self.error(EngineFailure("the worker ended this request before its answer was complete; send it again"))
            return
        self._count(t, answer)
        if not answer.telling.only_prompt:
            self._say(t)
        finish: FinishReason | None = t.finish
        if self._detokenizer.stopped is not None:
            finish = "stop"
        if answer.telling.only_prompt and finish:
            finish = "length"
        if finish is not None:
            self.over = True
            self._add(self._detokenizer.finish())
            self._part.finish = finish
            answer.finishes.append(finish)
            answer.ended(self, None if t.finish else finish)
        elif answer.telling.stream and self.sayable:
            answer.wake()

    def error(self, e: RequestError) -> None:
        if not self.over:
            self.over = True
            self._answer.failed(e)

    # ------------------------------------------------------------------------------------------ inside

    def _add(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _count(self, t: Tokens, answer: Answer) -> None:
        now = time.monotonic()
        metrics = answer.metrics
        if self._last:
            metrics.itl.observe((now - self._last) / max(1, len(t.token_ids)), len(t.token_ids))
        else:
            metrics.ttft.observe(now - answer.started)
            if answer.first_token_s is None:
                answer.first_token_s = now - answer.started
            self.cached_tokens = t.cached_tokens or 0
            if answer.telling.echo:
                self._echo(t.prompt_logprobs)
        self._last = now

    def _say(self, t: Tokens) -> None:
        """Adds the text of these tokens, and what else the client wants to know of them."""
        answer, detokenizer = self._answer, self._detokenizer
        telling, ids = answer.telling, t.token_ids
        mute = 1 if t.stop_token is not None and not telling.include_stop else 0  # the stop token is no text
        if telling.logprobs is None and not mute:
            self._add(detokenizer.feed(ids))
        elif telling.logprobs is None:
            self._add(detokenizer.feed(ids[:-1]))
            if detokenizer.stopped is None:
                detokenizer.skip()
        else:
            self._say_marked(t, len(ids) - mute)
        used = detokenizer.tokens - self.completion_tokens
        self.completion_tokens = detokenizer.tokens
        if telling.return_token_ids:
            self._part.token_ids.extend(ids[:used])

    def _say_marked(self, t: Tokens, audible: int) -> None:
        detokenizer, part = self._detokenizer, self._part
        start = len(self.prompt.text) if self._answer.telling.echo else 0
        found: Sequence[Logprob | None] = t.logprobs or [None] * len(t.token_ids)
        for at, (token, logprob) in enumerate(zip(t.token_ids, found, strict=False)):
            part.marks.append(Mark(token, logprob, start + detokenizer.length))
            if at < audible:
                self._add(detokenizer.feed((token,)))
            else:
                detokenizer.skip()
            if detokenizer.stopped is not None:
                return

    def _echo(self, logprobs: Sequence[Logprob | None] | None) -> None:
        """The prompt itself, ahead of the answer; the first of its tokens has no log-probability."""
        answer, part = self._answer, self._part
        self._add(self.prompt.text)
        if answer.telling.logprobs is None:
            return
        ids = self.prompt.ids
        found = list(logprobs or [])
        if len(found) == len(ids) - 1:
            found.insert(0, None)
        found.extend([None] * (len(ids) - len(found)))
        reader = Detokenizer(answer.tokenizer, skip_special_tokens=answer.telling.skip_special_tokens)
        for token, logprob in zip(ids, found, strict=True):
            part.marks.append(Mark(token, logprob, min(reader.length, len(self.prompt.text))))
            reader.feed((token,))


class Answer:
    """All choices of one response.

    `wait` returns when there is something to take, everything is over, or `beat` was called. `error` is the first
    failure; the other choices are aborted then. `started` is the time (monotonic) when the HTTP request came,
    `first_token_s` how long after it the first token of any choice did.
    """

    def __init__(
        self,
        *,
        shape: Shape,
        telling: Telling,
        tokenizer: Tokenizer,
        backend: Backend,
        metrics: FrontMetrics,
        started: float,
    ) -> None:
        self.shape = shape
        self.telling = telling
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.started = started
        self.choices: list[Choice] = []
        self.error: RequestError | None = None
        self.first_token_s: float | None = None
        self.finishes: list[FinishReason] = []
        self.beating = False
        self._backend = backend
        self._n = 1
        self._open = 0
        self._submitted = 0
        self._waiter: asyncio.Future[None] | None = None

    def add(self, prompt: Prompt, ask: Ask, sampling: SamplingParams) -> None:
        """`ask.n` choices for one prompt; the seed grows by one for each."""
        self._n = ask.n
        for at in range(ask.n):
            index = len(self.choices)
            params = sampling if at == 0 else replace(sampling, seed=(sampling.seed + at) % SEED_SPAN)
            request = Request(
                id=f"{self.shape.response_id}-{index}",
                prompt_ids=prompt.ids,
                sampling=params,
                priority=ask.priority,
                cache_salt=ask.cache_salt,
            )
            self.choices.append(Choice(self, index, prompt, request))

    async def submit(self) -> None:
        """Hands all engine requests to the router, a few at a time; if it refuses one, none remains.

        Raises RequestError.
        """
        self._open = len(self.choices)
        for choice in self.choices:
            if self._submitted % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
                if self.error is not None:
                    return
            self._submitted += 1
            try:
                self._backend.submit(choice.request, choice)
            except RequestError:
                choice.over = True
                self.abort()
                raise
            if self.error is not None:
                return

    @property
    def done(self) -> bool:
        return self._open == 0 or self.error is not None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def beat(self) -> None:
        """Wakes the handler although there is nothing to take, for a sign of life."""
        self.beating = True
        self.wake()

    async def wait(self) -> None:
        if self.done or self.beating or (self.telling.stream and self._sayable()):
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _sayable(self) -> bool:
        for choice in self.choices:  # noqa: SIM110  a generator costs more than all else here
            if choice.sayable:
                return True
        return False

    def ended(self, choice: Choice, here: FinishReason | None) -> None:
        """`here`: why it has ended, if its workers do not know that."""
        self._open -= 1
        if here is not None:
            self._backend.abort(choice.request.id, here)
        if self.telling.stream or self._open == 0:
            self.wake()

    def failed(self, error: RequestError) -> None:
        if self.error is None:
            self.error = error
            self.abort()
            self.wake()

    def leave(self) -> None:
        """The client has gone."""
        self.failed(ClientGone("the client closed the connection before its answer was complete"))

    def abort(self) -> None:
        """Ends whatever still runs, at once and for good."""
        for choice in self.choices[: self._submitted]:
            if not choice.over:
                choice.over = True
                self._backend.abort(choice.request.id)

    # ------------------------------------------------------------------------------------------ telling

    def take(self) -> bytes:
        """The chunks of all that has been said since the last call."""
        chunks = []
        for choice in self.choices:
            if not choice.sayable:
                continue
            part = choice.take()
            usage = self.usage() if self.telling.continuous_usage else None
            chunks.append(self.shape.chunk(choice.index, part, choice.prompt.ids, usage))
        return b"".join(chunks) if len(chunks) != 1 else chunks[0]

    def whole(self) -> dict[str, object]:
        """The complete answer as one JSON object."""
        root = self.shape.head()
        root["choices"] = [self.shape.choice(c.index, c.take(), c.prompt.ids, root) for c in self.choices]
        root["usage"] = self.usage()
        return root

    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        firsts = self.choices[:: self._n]
        prompt = sum(len(c.prompt.ids) for c in firsts)
        completion = sum(c.completion_tokens for c in self.choices)
        return Usage(prompt, completion, prompt + completion, PromptDetails(sum(c.cached_tokens for c in firsts)))
