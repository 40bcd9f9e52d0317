"""The offline API: a whole cluster inside this process.

    from slipstream import LLM

    with LLM("smollm2") as llm:
        for answer in llm.generate(["The sky is", "Water is"]):
            print(answer.text)

An `LLM` starts its workers, each with the threads that a worker process has, and a router on an event loop in a thread
of its own; prompts go through that router as those of a server do. Nothing is shared between two of them, so that
several can live in one interpreter. The caller's threads only wait.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from numbers import Integral
from typing import Any

import msgspec

from slipstream.config import EngineConfig, RouterConfig, TransferConfig, WorkerConfig
from slipstream.engine.worker import Worker
from slipstream.errors import ConfigError, ContextTooLong, EngineFailure, InvalidRequest
from slipstream.front.ask import checked_sampling, messages_of, prompt_too_long
from slipstream.front.tokenizer import Tokenizer, load_tokenizer
from slipstream.launch.checks import refuse_model, refuse_transport
from slipstream.launch.devices import this_machine
from slipstream.launch.offline import Answer, Background, Bar, Completion
from slipstream.launch.spec import Placement, place, refuse_idle_transport
from slipstream.launch.watch import http_call
from slipstream.router import Router
from slipstream.settings import OFFLINE, WORKER_SPECS, nearest
from slipstream.transfer.transports.local import Neighbourhood
from slipstream.types import Request, SamplingParams

READY_S = 60.0  # for links and preflights between workers of one process; loading is over by then
NO_ROUTE_GRACE_S = 1.5  # a pair that cannot be served in is tried again once before that is taken for final
DEFAULT_TOKENS = 256  # of an answer when the caller says nothing of sampling

Prompt = str | Sequence[int]


class LLM:
    """A model, ready to answer.

    `prefill`, `decode` and `both` are numbers of workers or specs as of `slipstream serve` (`"cuda:0"`); `both` is 1
    unless one of the others is given; `prefill` alone gets one worker that decodes, and the other way round. All
    further keywords are settings of the sections `engine` and `transfer` of docs/configuration.md:
    `LLM("smollm2", page_tokens=32, dtype="float32")`. `loading(done, total)` is called with bytes of the weights while
    they are loaded.

    Raises ConfigError for a wrong setting, ModelError and PoolTooSmall when the model cannot be loaded. The methods may
    be called from several threads. `close` (or leaving the `with` block) ends all threads and frees all memory; an LLM
    that is dropped or left to the end of the program is closed too.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        prefill: int | str = 0,
        decode: int | str = 0,
        both: int | str | None = None,
        loading: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        if both is None:
            both = 0 if prefill or decode else 1
        engine, transfer = _configs(model, settings)
        machine = this_machine()
        placements = place(machine, str(prefill or ""), str(decode or ""), str(both), engine.device, engine.tp)
        refuse_idle_transport(placements, transfer.transport)
        refuse_transport(transfer.transport, [name for placement in placements for name in placement.devices])
        refuse_model(engine, [placement.tp for placement in placements])
        self._closing = ExitStack()
        self._finalizer = weakref.finalize(self, self._closing.close)
        _at_the_end(self._finalizer)
        try:
            self._start(engine, transfer, placements, machine.cores, loading)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        engine: EngineConfig,
        transfer: TransferConfig,
        placements: list[Placement],
        cores: int,
        loading: Callable[[int, int], None] | None,
    ) -> None:
        self._tokenizer = load_tokenizer(engine.model, engine.tokenizer)
        threads = engine.threads or max(1, cores // sum(placement.tp for placement in placements))
        self._workers: list[Worker] = []
        self._closing.callback(_stop_all, self._workers)
        neighbours = Neighbourhood()
        for placement in placements:
            config = msgspec.structs.replace(engine, device=placement.device, tp=placement.tp, threads=threads)
            role = WorkerConfig(role=placement.role, name=placement.name)
            worker = Worker(config, role, transfer, neighbours=neighbours)
            worker.start(_part_of(loading, len(self._workers), len(placements)))
            self._workers.append(worker)
        self._background = Background()
        self._closing.callback(self._background.stop)
        self._router = self._background.call(_started_router())
        self._closing.callback(_stop_router, self._background, self._router)
        self._background.call(_add(self._router, [worker.info.http for worker in self._workers]))
        if not self._background.call(_paired(self._router, len(self._workers))):
            problems = list(dict.fromkeys(p for w in self._router.workers() for p in (w.problem, *w.problems) if p))
            raise EngineFailure(
                "the workers of this LLM did not come together: " + "; ".join(problems or ["no reason"])
            )
        self._in_flight = max(1, engine.max_waiting // 2)
        card = self._router.model_card()
        assert card is not None
        self.max_model_len: int = card.max_model_len

    # ---------------------------------------------------------------------------------------------- asking

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continues each prompt (text or token ids); the answers come in the order of the prompts.

        `sampling` is one for all or one a prompt; None is what the model's makers recommend, up to 256 tokens. `stop`
        are texts that end an answer and do not belong to it. A bar shows the progress of several prompts when standard
        error is a terminal, unless `progress` says otherwise. Raises RequestError (ContextTooLong, InvalidRequest)
        before any prompt is computed.
        """
        batch = [self._ids(prompt) for prompt in _as_batch(prompts)]
        params = self._sampling(batch, sampling)
        return self._run(batch, params, _as_stops(stop), progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> Completion:
        """The next message of a conversation, by the model's chat template. Raises as `generate` does."""
        ids = self.chat_ids(messages)
        return self._run([ids], self._sampling([ids], sampling), _as_stops(stop), False)[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """The answer to one prompt, or the next message of a conversation, piece by piece as it is made.

        Closing the iterator ends the request. Raises as `generate` does, at the first step.
        """
        conversation = not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)
        ids = self.chat_ids(prompt) if conversation else self._ids(prompt)  # pyright: ignore[reportArgumentType]
        (params,) = self._sampling([ids], sampling)
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        running = self._background.submit(self._answer(ids, params, _as_stops(stop), pieces.put))
        running.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            running.result()
        finally:
            running.cancel()

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens that the chat template makes of a conversation. Raises InvalidRequest."""
        template = self._tokenizer.chat_template
        conversation = messages_of(messages, template.source if template is not None else "")
        return self._tokenizer.encode(self._tokenizer.render_chat(conversation), add_special_tokens=False)

    def routes(self) -> dict[tuple[str, str], str]:
        """The transport in use from each worker to each other that it hands requests to, by their names."""
        members = self._background.call(_describe(self._router))["workers"]
        return {(m["name"], route["peer"]): route["transport"] for m in members for route in m["routes"]}

    def audit(self) -> dict[str, Any]:
        """The books of the router and of each worker by name; every `problems` is empty when they are right."""
        books = {"router": msgspec.to_builtins(self._background.call(_audit(self._router)))}
        for worker in self._workers:
            _, body = http_call("GET", worker.info.http, "/audit")
            books[worker.info.name] = msgspec.json.decode(body)
        return books

    # ---------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Ends whatever is under way and frees everything. May be called twice."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- inside

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, (str, Iterable)):
            raise _no_prompt(prompt)
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if (stranger := next((token for token in ids if not isinstance(token, Integral)), None)) is not None:
            raise _no_prompt(stranger)
        if not ids:
            raise InvalidRequest("a prompt must have at least one token", param="prompts")
        wrong = next((token for token in ids if not 0 <= token < self._tokenizer.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"token ids are 0 to {self._tokenizer.vocab_size - 1}; {wrong} was given", param="prompts"
            )
        return ids

    def room(self, ids: Sequence[int], which: str = "the prompt") -> int:
        """Tokens of an answer of which nothing was said: up to DEFAULT_TOKENS. Raises ContextTooLong."""
        if len(ids) >= self.max_model_len:
            raise prompt_too_long(len(ids), self.max_model_len, "prompts", which)
        return min(DEFAULT_TOKENS, self.max_model_len - len(ids))

    def _sampling(
        self, batch: list[list[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """One for each prompt, checked by itself and against the context. Raises ContextTooLong, InvalidRequest."""
        if sampling is None:
            room = [self.room(ids, f"prompt {at}") for at, ids in enumerate(batch)]
            recommended = self._tokenizer.sampling_defaults
            params = [msgspec.convert({**recommended, "max_tokens": r}, SamplingParams, strict=False) for r in room]
        elif isinstance(sampling, SamplingParams):
            params = [sampling] * len(batch)
        else:
            params = list(sampling)
            if len(params) != len(batch):
                raise InvalidRequest(
                    f"{len(params)} sampling parameters were given for {len(batch)} prompts", param="sampling"
                )
        params = [checked_sampling(chosen, self._tokenizer) for chosen in params]
        for at, (ids, chosen) in enumerate(zip(batch, params, strict=True)):
            if len(ids) + chosen.max_tokens > self.max_model_len:
                raise ContextTooLong(
                    f"prompt {at} has {len(ids)} tokens and max_tokens is {chosen.max_tokens}; this model's context is "
                    f"{self.max_model_len} tokens. Shorten the prompt or ask for fewer tokens",
                    param="prompts",
                )
        return params

    def _run(
        self, batch: list[list[int]], params: list[SamplingParams], stop: tuple[str, ...], progress: bool | None
    ) -> list[Completion]:
        with Bar(len(batch), progress) as bar:
            return self._background.call(self._answer_all(batch, params, stop, bar))

    async def _answer_all(
        self, batch: list[list[int]], params: list[SamplingParams], stop: tuple[str, ...], bar: Bar
    ) -> list[Completion]:
        """On the event loop: all prompts, no more at a time than the workers' queues take."""
        gate = asyncio.Semaphore(self._in_flight)

        async def one(ids: list[int], chosen: SamplingParams) -> Completion:
            async with gate:
                completion = await self._answer(ids, chosen, stop)
            bar.done(len(completion.token_ids))
            return completion

        tasks = [asyncio.create_task(one(ids, chosen)) for ids, chosen in zip(batch, params, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(
        self,
        ids: list[int],
        params: SamplingParams,
        stop: tuple[str, ...],
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """On the event loop: one prompt; aborted if nobody waits for it any more."""
        request = Request(id=f"llm-{uuid.uuid4().hex}", prompt_ids=ids, sampling=params)
        answer = Answer(self._tokenizer, ids, params, stop, on_text)
        self._router.submit(request, answer)
        try:
            return await answer.over
        finally:
            if not answer.finished:
                self._router.abort(request.id)


# ---------------------------------------------------------------------------------------------------- on the event loop


def _part_of(
    loading: Callable[[int, int], None] | None, number: int, workers: int
) -> Callable[[int, int], None] | None:
    """Tells `loading` how far all workers are together while number `number` of them loads."""
    if loading is None:
        return None
    return lambda done, total: loading(number * total + done, workers * total)


def _at_the_end(close: Callable[[], Any]) -> None:
    """Has `close` called when the program ends, while threads still take work.

    Functions of `atexit` run later, when the executors behind `asyncio.to_thread` refuse work already, so that links
    could not be ended properly. The hook by which these executors end (last registered, first called) comes before.
    """
    assert ThreadPoolExecutor  # its module has registered its own end by now
    register: Callable[[Callable[[], Any]], Any] = getattr(threading, "_register_atexit", atexit.register)
    register(close)


async def _started_router() -> Router:
    router = Router(RouterConfig(max_queue=1 << 20, request_timeout_s=1e9))
    await router.start()
    return router


def _stop_router(background: Background, router: Router) -> None:
    background.call(router.stop())


def _stop_all(workers: list[Worker]) -> None:
    """Prefill workers first: a decode worker does not miss them."""
    for worker in workers:
        worker.stop()


async def _add(router: Router, urls: list[str]) -> None:
    for url in urls:
        router.add_worker(url)


async def _describe(router: Router) -> dict[str, Any]:
    return router.describe()


async def _audit(router: Router) -> Any:
    return router.audit()


async def _paired(router: Router, workers: int) -> bool:
    """Waits until all workers are linked and a request can be served."""
    loop = asyncio.get_running_loop()
    end = loop.time() + READY_S
    while loop.time() < end:
        fleet = router.workers()
        linked = sum(worker.state == "live" for worker in fleet) == workers
        if router.ready and linked:
            return True
        if linked and any(worker.problems for worker in fleet):
            end = min(end, loop.time() + NO_ROUTE_GRACE_S)
        await asyncio.sleep(0.01)
    return False


# ---------------------------------------------------------------------------------------------------- arguments


def _configs(model: str, settings: dict[str, Any]) -> tuple[EngineConfig, TransferConfig]:
    given: dict[str, dict[str, Any]] = {"engine": {"model": model}, "transfer": {}}
    known = {setting.name for setting in OFFLINE if setting.section in given} - {"model"}
    for name, value in settings.items():
        if name not in known:
            close = nearest(name, {*known, *WORKER_SPECS})
            raise ConfigError(f"LLM has no setting {name!r} (docs/configuration.md lists them){close}")
        setting = OFFLINE[name]
        given[setting.section][name] = setting.check(value, f"LLM({name}=...)")
    return EngineConfig(**given["engine"]), TransferConfig(**given["transfer"])


def _no_prompt(given: object) -> InvalidRequest:
    return InvalidRequest(
        f"a prompt is a text or a list of token ids, and prompts are a list of such; {given!r} was given. For the "
        "messages of a conversation use chat",
        param="prompts",
    )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]  # pyright: ignore[reportReturnType]
    return items  # pyright: ignore[reportReturnType]


def _as_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not isinstance(text, str) or not text for text in stops):
        raise InvalidRequest("stop must be texts that are not empty", param="stop")
    return stops


__all__ = ["LLM", "Completion", "SamplingParams"]
