"""What the offline API stands on: an event loop in a thread, the sink of one answer, a progress bar."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from slipstream.errors import EngineFailure, RequestError, SlipstreamError
from slipstream.front.detokenizer import Detokenizer
from slipstream.front.tokenizer import Tokenizer
from slipstream.types import FinishReason, Logprob, SamplingParams, Tokens

Result = TypeVar("Result")


class Completion(msgspec.Struct, kw_only=True):
    """The answer to one prompt.

    `token_ids` holds all tokens, also a stop token and those of a stop string that `text` leaves out. `logprobs` has
    one entry a token when they were asked for, else None.
    """

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason = "stop"
    cached_tokens: int = 0
    logprobs: list[Logprob] | None = None


class Answer:
    """The sink of one request: makes its Completion. `finished` when the router says nothing more of it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: list[int],
        params: SamplingParams,
        stop: tuple[str, ...],
        on_text: Callable[[str], None] | None,
    ) -> None:
        self.over: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.finished = False
        self._completion = Completion(prompt_ids=ids, logprobs=None if params.logprobs is None else [])
        self._words = Detokenizer(tokenizer, stop=stop, min_tokens=params.min_tokens)
        self._on_text = on_text  # called on the event loop with each new piece of text

    def tokens(self, t: Tokens) -> None:
        if self.over.done():
            return
        if t.finish in ("abort", "error"):
            self.error(EngineFailure("the worker ended this request before its answer was complete"))
            return
        made = self._completion
        made.token_ids.extend(t.token_ids)
        made.cached_tokens = made.cached_tokens if t.cached_tokens is None else t.cached_tokens
        if made.logprobs is not None:
            made.logprobs.extend(t.logprobs or [])
        audible = t.token_ids if t.stop_token is None else t.token_ids[:-1]
        self._say(self._words.feed(audible))
        self.finished = t.finish is not None
        if self.finished or self._words.stopped is not None:
            self._say(self._words.finish())
            made.finish_reason = "stop" if self._words.stopped is not None else t.finish or "stop"
            self.over.set_result(made)

    def error(self, e: RequestError) -> None:
        self.finished = True
        if not self.over.done():
            self.over.set_exception(e)

    def _say(self, text: str) -> None:
        self._completion.text += text
        if text and self._on_text is not None:
            self._on_text(text)


class Background:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="slipstream-llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self._loop.is_closed():
            work.close()
            raise SlipstreamError("this LLM is closed; make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` on the loop and waits for it; an interrupted wait cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Bar:
    """Progress of a batch on standard error; nothing for a single prompt or where nobody looks."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        self._total = total
        self._wanted = wanted
        self._tokens = 0
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if self._wanted or (self._wanted is None and self._total > 1 and console.is_terminal):
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._progress.add_task("prompts", total=self._total, tokens=0)
            self._progress.start()
        return self

    def done(self, tokens: int) -> None:
        self._tokens += tokens
        if self._progress is not None:
            self._progress.update(self._task, advance=1, tokens=self._tokens)

    def __exit__(self, *_: Any) -> None:
        if self._progress is not None:
            self._progress.stop()
