"""The IO thread of a worker: one asyncio loop for its HTTP port, its message port and all links.

Routers and prefill workers connect to the message port; the first message tells which. What they ask is posted to the
engine, all that came together in one go; what the engine hands out is sent by the thread that has its turn there, over
the links that are kept here. KV bytes never come this way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec
import uvicorn

from slipstream import wire
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import CopyPages, Effect, ToPeer, ToRouter
from slipstream.engine.http import WorkerViews, create_app
from slipstream.engine.loop import Event, Post
from slipstream.engine.metrics import WorkerMetrics
from slipstream.engine.peers import Peers
from slipstream.engine.timeline import Watcher
from slipstream.errors import SlipstreamError, WorkerLost
from slipstream.listen import listening_socket
from slipstream.plain_http import call, why_not
from slipstream.stream import Link
from slipstream.transfer.rank import Rank
from slipstream.types import Request

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.05
JOIN_S = 5.0
JOIN_RETRY_S = 0.25
HELLO_S = 10.0  # for a stranger to say who it is
LEAVING = "this worker ends"
REFUSED_S = 10.0  # before a router that has refused this worker is asked again
CLOSE_S = 3.0  # for what the ends of links ask for; a peer that is stopped could be waited for without end
T = TypeVar("T")

_to_worker = wire.Decoder(wire.ToWorker)


class WorkerServer:
    """Sockets and links of one worker.

    `start` binds and serves at once, so that `/health` can say "loading"; `attach` opens the message port's doors
    when there is an engine behind it.
    """

    def __init__(self, host: str, port: int, wire_port: int, heartbeat_s: float, metrics: WorkerMetrics) -> None:
        self.http_socket = listening_socket(host, port)
        self.wire_socket = listening_socket(host, wire_port)
        self.wire_socket.setblocking(False)
        self.http_socket.setblocking(False)
        self.metrics = metrics
        self.watcher: Watcher | None = None
        self.state = "loading"
        self.info: wire.WorkerInfo | None = None
        self._heartbeat_s = heartbeat_s
        self._routers: dict[str, Link] = {}
        self._dismissed: dict[str, wire.Goodbye] = {}  # routers that ended the link on purpose, and what they said
        self._wire_server: asyncio.Server | None = None
        self._informed: list[Link] = []  # those of them that have been told the whole prefix cache
        self._pending: dict[tuple[str, int], asyncio.Task[None]] = {}  # submits that wait for their peer's link
        self._tasks: set[asyncio.Task[Any]] = set()
        self._status_timer: asyncio.TimerHandle | None = None
        self._aio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="slipstream-io", daemon=True)
        self._stopping = threading.Lock()
        self._post: Post | None = None
        self._publishing = False  # a publication of the load is on its way
        self._peers: Peers | None = None
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        self._thread.start()
        self.call(self._serve_http()).result()

    def attach(
        self,
        info: wire.WorkerInfo,
        ranks: Sequence[Rank],
        wanted_transport: str,
        post: Post,
        take_way: Callable[[str, str], None],
        *,
        oldest_copy: Callable[[str], int | None] = lambda way: None,
        copy_timeout_s: float = 0.0,
    ) -> None:
        """Opens the message port. Called once, when the engine is there; for the rest see `Peers`."""

        async def open_port() -> None:
            self._post = post
            self._peers = Peers(
                info, ranks, wanted_transport, post, take_way, self._publish_soon,
                oldest_copy=oldest_copy, copy_timeout_s=copy_timeout_s,
            )  # fmt: skip
            self.info = info
            self._wire_server = await asyncio.start_server(self._accept, sock=self.wire_socket)
            self._spawn(self._heartbeat())

        self.call(open_port()).result()

    def drain(self) -> None:
        """Nothing new is taken from now on, and every router is told at once. From any thread, after `attach`."""
        assert self._post is not None
        self.state = "draining"
        self._post(EngineCore.drain, self._publish)

    def stop(self) -> None:
        """Closes all ports and links and ends the thread. May be called twice, and by two threads at once: a worker
        that fails may be told to end just then."""
        with self._stopping:
            if self._thread.is_alive():
                self.call(self._close()).result()
                self._aio.call_soon_threadsafe(self._aio.stop)
                self._thread.join()
        self.http_socket.close()
        self.wire_socket.close()

    def cut(self, reason: str) -> None:
        """Ends all links now, whatever the IO thread does: this worker hangs. From any thread."""
        self.state, self.info = f"failed: {reason}", None  # from now on nobody is told to come here
        for link in [*self._routers.values(), *(self._peers.links if self._peers is not None else ())]:
            link.cut()

    def closing_route(self) -> str | None:
        """The routes that have been closing for longest; None when none are. From any thread."""
        return self._peers.closing_route() if self._peers is not None else None

    def pulse(self, answer: Callable[[], None]) -> None:
        """Has the IO thread call `answer`. Raises RuntimeError when it has ended."""
        self._aio.call_soon_threadsafe(answer)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._aio)

    def _run(self) -> None:
        asyncio.set_event_loop(self._aio)
        self._aio.run_forever()
        self._aio.run_until_complete(self._aio.shutdown_asyncgens())
        self._aio.close()

    async def _close(self) -> None:
        self.state, self.info = "ended", None  # from now on nobody is told to come here
        if self._wire_server is not None:
            self._wire_server.close()
        if self._http is not None:
            self._http.should_exit = True
        for link in self._routers.values():
            link.close(LEAVING)
        if self._peers is not None:
            self._peers.say_goodbye(LEAVING)
        tasks = list(self._tasks)
        for task in tasks:
            if task is not self._http_task:
                task.cancel()
        if self._peers is not None:
            tasks.append(asyncio.ensure_future(self._peers.close()))
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    def _spawn(self, coroutine: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve_http(self) -> None:
        views = WorkerViews(
            state=lambda: self.state,
            info=lambda: self.info,
            status=self._ask_status,
            audit=self._ask_audit,
            routes=lambda: [msgspec.to_builtins(report) for report in self.routes()],
            registry=self.metrics.registry,
            chapter=lambda name: self.watcher.chapter(name) if self.watcher is not None else [],
        )
        config = uvicorn.Config(
            create_app(views), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._http = uvicorn.Server(config)
        self._http_task = self._spawn(self._http.serve(sockets=[self.http_socket]))

    # ---------------------------------------------------------------------------------------------- links

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        link = Link(reader, writer, _to_worker, name)
        self._spawn(self._serve(link))

    async def _serve(self, link: Link) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await link.receive()
        except TimeoutError:
            hello = None
        if not isinstance(hello, wire.Hello):
            logger.warning("%s did not begin with Hello; closing", link.label)
            link.close()
        elif hello.kind == "worker" and self._peers is not None:
            await self._peers.accept(link, hello)
        else:
            await self._serve_router(link, hello)

    async def _serve_router(self, link: Link, hello: wire.Hello) -> None:
        assert self.info is not None
        assert self._post is not None
        if hello.protocol != wire.PROTOCOL:
            text = f"protocol version differs: this worker speaks {wire.PROTOCOL}, the router {hello.protocol}"
            link.send(wire.Rejected(code="layout_mismatch", message=text))
            link.close()
            return
        link.label = f"router {hello.id}"
        link.send(wire.Welcome(info=self.info))
        self._routers[hello.id] = link
        if hello.id not in self._dismissed:
            logger.info("router %s connected", hello.id)
        self._post(lambda core: self._tell(link, core.status_for_new_router()))
        try:
            link.divert(partial(self._from_router, hello.id, link))
            while await link.receive() is not None:
                pass
        finally:
            self._router_gone(hello.id, link)
            if link in self._informed:
                self._informed.remove(link)
            if self._routers.get(hello.id) is link:
                del self._routers[hello.id]
                if self._peers is not None:
                    self._peers.forget_router(hello.id)
                self._post(partial(EngineCore.router_lost, router=hello.id))

    def _router_gone(self, router: str, link: Link) -> None:
        goodbye = link.farewell
        if self.state == "ended":
            logger.debug("router %s gone, since this worker ends", router)
        elif goodbye is None:
            logger.info("router %s gone: %s", router, link.lost_because or LEAVING)
        elif self._dismissed.get(router) != goodbye:
            logger.log(logging.WARNING if goodbye.dismissed else logging.INFO, "router %s: %s", router, goodbye.reason)
            self._dismissed[router] = goodbye

    def _from_router(self, router: str, link: Link, messages: Sequence[wire.Message]) -> Sequence[wire.Message]:
        """Takes all messages; what they ask of the engine is asked in one go, so that it may compute it in one step."""
        assert self._post is not None
        events: list[Event] = []
        for message in messages:
            match message:
                case wire.Submit():
                    self._submit(router, link, message, events)
                case wire.Abort(request=request, attempt=attempt):
                    pending = self._pending.pop((request, attempt), None)
                    if pending is not None:
                        pending.cancel()
                    events.append(partial(EngineCore.abort, request_id=request, attempt=attempt))
                case wire.Ping(n=n):
                    link.send(wire.Pong(n=n))
                case wire.Meet(peers=peers):
                    assert self._peers is not None
                    self._peers.meet(router, peers)
                case wire.Drain():
                    self.state = "draining"
                    events += [EngineCore.drain, self._publish]  # behind what was sent before
                case _:
                    logger.warning("router %s sent %s, which has no meaning here", router, type(message).__name__)
        if events:
            self._post(*events)
        return ()

    def _submit(self, router: str, link: Link, message: wire.Submit, events: list[Event]) -> None:
        assert self._peers is not None
        peer = None if message.decode_at is None else self._peers.met(message.decode_at)
        if message.decode_at is None or peer is not None:
            events.append(self._entry(message.request, router, peer))
            return
        key = (message.request.id, message.request.attempt)
        task = self._spawn(self._submit_to_peer(router, link, message, message.decode_at))
        self._pending[key] = task
        task.add_done_callback(lambda _: self._pending.pop(key, None))

    async def _submit_to_peer(self, router: str, link: Link, message: wire.Submit, address: str) -> None:
        assert self._peers is not None
        assert self._post is not None
        request = message.request
        try:
            peer = await self._peers.open(address)
        except SlipstreamError as error:
            link.send(
                wire.Failed(
                    request=request.id,
                    attempt=request.attempt,
                    code=WorkerLost.code,
                    message=error.message,
                    retriable=True,
                )
            )
            return
        self._post(self._entry(request, router, peer))

    def _entry(self, request: Request, router: str, decode_at: str | None) -> Event:
        """The event that gives a request to the engine; a fault in there is answered, so that nobody waits in vain."""

        def enter(core: EngineCore) -> None:
            try:
                core.submit(request, router, decode_at)
            except Exception as error:
                text = f"the engine could not take this request: {type(error).__name__}: {error}"
                failed = wire.Failed(
                    request=request.id, attempt=request.attempt, code="engine_failure", message=text, retriable=False
                )
                self.deliver([ToRouter(router, failed)])
                raise

        return enter

    # ---------------------------------------------------------------------------------------------- out

    def deliver(self, effects: list[Effect]) -> None:
        """Sends messages of the engine, those for one link together; called by whoever has the turn at the core."""
        if not effects or self._peers is None:
            return
        bags: dict[Link, list[wire.Message]] = {}
        for effect in effects:
            match effect:
                case ToRouter(router=router, message=message):
                    link = self._routers.get(router)
                case ToPeer(peer=peer, as_source=as_source, message=message):
                    link = self._peers.link(peer, as_source=as_source)
                case CopyPages():
                    raise AssertionError("copies go to the transfer agent")
            if link is not None:
                bags.setdefault(link, []).append(message)
        for link, messages in bags.items():
            link.send(*messages)
        if not self._publishing and self._routers:
            self._publishing = True
            self._aio.call_soon_threadsafe(self._publish_soon)

    def _publish_soon(self) -> None:
        """Has the load published at most every STATUS_INTERVAL_S."""
        if self._status_timer is None:
            self._publishing = bool(self._routers)
            if self._publishing:
                self._status_timer = self._aio.call_later(STATUS_INTERVAL_S, self._publish_now)

    def _publish_now(self) -> None:
        if self._status_timer is not None:
            self._status_timer.cancel()  # the heartbeat has come before it
        self._status_timer, self._publishing = None, False
        if self._post is not None:
            self._post(self._publish)

    def _publish(self, core: EngineCore) -> None:
        """Runs with the turn at the core: its load and cache changes, to every router."""
        status = core.status()
        self.metrics.status(status, core.stages())
        self._aio.call_soon_threadsafe(self._broadcast, status)

    def _broadcast(self, status: wire.Status) -> None:
        status.routes = self.routes()
        self.metrics.pace.tell(status)
        self.metrics.routes(status.routes)
        for link in self._informed:
            link.send(status)

    def _tell(self, link: Link, status: wire.Status) -> None:
        """Runs with the turn at the core: everything, to a router that knows nothing yet; it gets changes from then."""

        def send() -> None:
            status.routes = self.routes()
            self.metrics.pace.tell(status)
            link.send(status)
            self._informed.append(link)

        self._aio.call_soon_threadsafe(send)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._publish_now()

    def routes(self) -> list[wire.RouteReport]:
        return self._peers.routes if self._peers is not None else []

    # ---------------------------------------------------------------------------------------------- questions

    async def _ask_status(self) -> wire.Status:
        return await self._ask(lambda core: core.status_for_new_router())

    async def _ask_audit(self) -> dict[str, Any]:
        return await self._ask(lambda core: msgspec.to_builtins(core.audit()))

    async def _ask(self, question: Callable[[EngineCore], T]) -> T:
        """The answer of the core."""
        assert self._post is not None
        answer: asyncio.Future[T] = self._aio.create_future()

        def ask(core: EngineCore) -> None:
            value = question(core)
            self._aio.call_soon_threadsafe(lambda: answer.cancelled() or answer.set_result(value))

        self._post(ask)
        return await answer

    # ---------------------------------------------------------------------------------------------- joining

    def join(self, router_url: str, api_key: str) -> None:
        """Registers with a router, again and again until it has connected, and anew when it is gone."""
        self._aio.call_soon_threadsafe(lambda: self._spawn(self._join(router_url, api_key)))

    async def _join(self, url: str, api_key: str) -> None:
        assert self.info is not None
        joined = None
        said = ""
        while self.state == "ready":
            goodbye = None if joined is None or joined in self._routers else self._dismissed.get(joined)
            if goodbye is not None and goodbye.dismissed:
                logger.warning("not joining the router at %s again until it is told to add this worker", url)
                return
            if joined is None or joined not in self._routers:
                try:
                    joined = await register(url, self.info.http, api_key)
                    said = ""
                except (OSError, TimeoutError, ValueError) as error:
                    if (reason := why_not(error) or "it does not answer") != said:
                        said = reason
                        logger.info("waiting for the router at %s: %s", url, said)
            linked = joined in self._routers
            await asyncio.sleep(self._heartbeat_s if linked else REFUSED_S if goodbye is not None else JOIN_RETRY_S)


async def register(router_url: str, worker_url: str, api_key: str = "") -> str:
    """Asks a router to connect to this worker; returns the router's id. Raises OSError, TimeoutError or ValueError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = msgspec.json.encode({"url": worker_url, "joins": True})
    status, answer = await call("POST", f"{router_url}/workers", body=body, headers=headers, timeout_s=JOIN_S)
    if not 200 <= status < 300:
        raise ValueError(f"it answered {status}: {answer[:500].decode(errors='replace')}")
    try:
        return str(msgspec.json.decode(answer)["router"])
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("its answer does not name a router") from error
