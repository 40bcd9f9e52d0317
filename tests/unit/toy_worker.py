"""A worker that speaks the wire and computes nothing: real sockets, toy tokens.

It does what a router can see of a worker: `/worker_info`, Hello, Submit, tokens, the handoff to another toy, Abort,
Status with prefix keys, Meet with routes. A toy token is a pure function of the prompt and the output index, so that
any worker can continue any request and a test knows the right answer. Each request is one task that passes through
stages; a test may stop it at one (`hold`), wait until one is there (`reached`), and kill the worker or cut its links.

    queued    submitted, nothing done
    prefill   granted by the destination, no token yet
    commit    first token sent, not handed over
    adopt     Commit arrived at the destination, not accepted
    decode    owned by the worker that decodes; before each token
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
import zlib
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from slipstream import wire
from slipstream.kv.prefix import block_keys, root_key
from slipstream.stream import Link
from slipstream.types import Request, Role, SamplingParams, Tokens

STAGES = ("queued", "prefill", "commit", "adopt", "decode")


def toy_token(prompt_ids: Sequence[int], index: int) -> int:
    return zlib.crc32(b"%d " % index + b" ".join(b"%d" % t for t in prompt_ids)) % 50000


def toy_answer(request: Request) -> list[int]:
    return [toy_token(request.prompt_ids, i) for i in range(request.sampling.max_tokens)]


def toy_request(name: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **rest: Any) -> Request:
    return Request(id=name, prompt_ids=list(prompt), sampling=SamplingParams(max_tokens=max_tokens), **rest)


class PeerGone(Exception):
    """The link to the destination ended."""


class ToyWorker:
    """One toy; `await start()` before use, `await kill()` or `await stop()` after. All on the running event loop."""

    def __init__(
        self,
        role: Role = "both",
        *,
        name: str = "",
        port: int = 0,
        served_name: str = "toy",
        layout: str = "toy page_tokens=4",
        page_tokens: int = 4,
        max_model_len: int = 100_000,
        max_sequences: int = 64,
        pages: int = 1000,
        step_s: float = 0.0,
        host: str = "",
        weights: str = "toy",
    ) -> None:
        self._port = port
        self._settings = {
            "role": role, "served_name": served_name, "fingerprint": layout, "fingerprint_text": layout,
            "page_tokens": page_tokens, "max_model_len": max_model_len, "max_sequences": max_sequences,
            "pages": pages, "host": host or socket.gethostname(), "weights": weights,
        }  # fmt: skip
        self.name = name or role
        self.step_s = step_s
        self.loading = False  # /worker_info answers 503
        self.mute = False  # pings are not answered
        self.rejects = ""  # answers Hello with Rejected
        self.reports_routes = True
        self.route_error = ""
        self.sends_first_token = True
        self.submitted: list[wire.Submit] = []
        self.aborted: list[wire.Abort] = []
        self.met: list[list[str]] = []
        self.drained = False
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._of: dict[tuple[str, int], str] = {}  # which router each task works for
        self.reservations: dict[tuple[str, int], tuple[str, int]] = {}  # (request, attempt) -> (source, xfer)
        self._gates: dict[str, asyncio.Event] = {stage: asyncio.Event() for stage in STAGES}
        self._counts: dict[str, int] = defaultdict(int)
        self._arrival = asyncio.Condition()
        for gate in self._gates.values():
            gate.set()
        self._keys: dict[bytes, None] = {}
        self._unsaid: list[bytes] = []
        self._routers: dict[str, Link] = {}
        self._destinations: dict[str, Link] = {}  # by wire address
        self._dialing = asyncio.Lock()
        self._dead = False
        self._replies: dict[int, asyncio.Future[wire.Message]] = {}
        self._by_address: dict[int, str] = {}
        self._routes: dict[str, wire.RouteReport] = {}
        self._xfer = 0
        self._transports: set[asyncio.StreamWriter] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._servers: list[asyncio.Server] = []

    # ------------------------------------------------------------------------------------------ for tests

    async def start(self) -> ToyWorker:
        http = await asyncio.start_server(self._http, "127.0.0.1", self._port)
        messages = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._servers = [http, messages]
        port, wire_port = (server.sockets[0].getsockname()[1] for server in self._servers)
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.info = msgspec.convert(
            {
                "id": uuid.uuid4().hex[:12], "name": self.name, "wire": f"127.0.0.1:{wire_port}", "http": self.url,
                "model": "toy", "devices": ["none"], "pid": 1, "version": "0", **self._settings,
            },
            wire.WorkerInfo,
        )  # fmt: skip
        return self

    async def kill(self) -> None:
        """As kill -9: every socket ends at once, nothing is said."""
        self._dead = True
        for server in self._servers:
            server.close()
        for task in [*self.tasks.values(), *self._background]:
            task.cancel()
        self.cut()
        await asyncio.gather(*self._background, return_exceptions=True)

    stop = kill

    async def leave(self) -> None:
        """As after SIGTERM: routers are told before the sockets end."""
        for link in self._routers.values():
            link.close("this worker ends")
        await asyncio.sleep(0.05)
        await self.kill()

    def cut(self) -> None:
        """Ends all connections; the process lives on."""
        for writer in list(self._transports):
            writer.transport.abort()
        for link in self._destinations.values():
            link.abort()

    def cut_routers(self) -> None:
        for link in self._routers.values():
            link.abort()

    def hold(self, *stages: str) -> None:
        for stage in stages:
            self._gates[stage].clear()

    def release(self, *stages: str) -> None:
        for stage in stages or STAGES:
            self._gates[stage].set()

    async def reached(self, stage: str, count: int = 1) -> None:
        """Waits until `count` requests in all have come to this stage."""
        async with asyncio.timeout(60), self._arrival:
            await self._arrival.wait_for(lambda: self._counts[stage] >= count)

    def say(self, message: wire.Message) -> None:
        """Sends a made-up message to all routers."""
        for link in self._routers.values():
            link.send(message)

    @property
    def linked(self) -> bool:
        return bool(self._routers)

    @property
    def idle(self) -> bool:
        return not self.tasks and not self.reservations

    # ------------------------------------------------------------------------------------------ sockets

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            status = "503 Service Unavailable" if self.loading else "200 OK"
            body = b'{"status": "loading"}' if self.loading else msgspec.json.encode(self.info)
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._dead:  # accepted by the system before the end, served by nobody after it
            writer.transport.abort()
            return
        self._transports.add(writer)
        link = Link(reader, writer, wire.Decoder(wire.ToWorker), self.name)
        try:
            hello = await link.receive()
            if not isinstance(hello, wire.Hello):
                return
            if self.rejects:
                link.send(wire.Rejected(code="layout_mismatch", message=self.rejects))
                return
            link.send(wire.Welcome(info=self.info))
            await (self._serve_router(link, hello) if hello.kind == "router" else self._serve_source(link, hello))
        finally:
            link.close()
            self._transports.discard(writer)

    async def _serve_router(self, link: Link, hello: wire.Hello) -> None:
        self._routers[hello.id] = link
        self._unsaid = list(self._keys)
        self._publish(reset=True)
        while (message := await link.receive()) is not None:
            self._from_router(hello.id, link, message)
        if self._routers.get(hello.id) is link:
            del self._routers[hello.id]
            for key in [key for key, of in self._of.items() if of == hello.id]:
                self._drop(key)

    def _from_router(self, router: str, link: Link, message: wire.Message) -> None:
        match message:
            case wire.Submit(request=request):
                self.submitted.append(message)
                self._begin((request.id, request.attempt), router, self._run(router, request, message.decode_at))
            case wire.Abort(request=request, attempt=attempt):
                self.aborted.append(message)
                self._drop((request, attempt))
            case wire.Ping(n=n) if not self.mute:
                link.send(wire.Pong(n=n))
            case wire.Meet(peers=peers):
                self.met.append(peers)
                for peer in peers:
                    self._spawn(self._meet(peer))
            case wire.Drain():
                self.drained = True
                self._publish()

    def _begin(self, key: tuple[str, int], router: str, work: Coroutine[Any, Any, None]) -> None:
        task = self.tasks[key] = self._spawn(work)
        self._of[key] = router
        task.add_done_callback(lambda _: (self.tasks.pop(key, None), self._of.pop(key, None)))

    def _drop(self, key: tuple[str, int]) -> None:
        self.reservations.pop(key, None)
        if task := self.tasks.get(key):
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _to_router(self, router: str, message: wire.Message) -> None:
        if link := self._routers.get(router):
            link.send(message)

    def _publish(self, reset: bool = False) -> None:
        added, self._unsaid = self._unsaid, []
        pages = self._settings["pages"]
        self.say(
            wire.Status(
                waiting=0, running=len(self.tasks), handing_off=0, waiting_tokens=0, pages_free=pages - len(self._keys),
                pages_cached=len(self._keys), pages_total=pages, draining=self.drained, added=added, reset=reset,
                routes=list(self._routes.values()) if self.reports_routes else [],
            )
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ requests

    async def _at(self, stage: str) -> None:
        async with self._arrival:
            self._counts[stage] += 1
            self._arrival.notify_all()
        await self._gates[stage].wait()
        await asyncio.sleep(self.step_s)

    def _compute(self, request: Request) -> int:
        """Takes the prompt into the prefix cache; returns how many of its tokens were there."""
        keys = block_keys(request.prompt_ids, self.info.page_tokens, root_key(self.info.fingerprint))
        known = 0
        while known < len(keys) and keys[known] in self._keys:
            known += 1
        new = [key for key in keys if key not in self._keys]
        self._keys.update(dict.fromkeys(new))
        self._unsaid += new
        if new:
            self._publish()
        return min(known * self.info.page_tokens, len(request.prompt_ids) - 1)

    async def _run(self, router: str, request: Request, decode_at: str | None) -> None:
        await self._at("queued")
        if decode_at is None:
            await self._at("prefill")
            cached = self._compute(request)
            await self._decode(router, request, list(request.output_ids), cached)
            return
        xfer = None
        try:
            link = await self._destination(decode_at)
            self._xfer += 1
            xfer = self._xfer
            await self._offer(link, decode_at, xfer, request)
            await self._at("prefill")
            outputs = self._first(router, request, self._compute(request))
            if len(outputs) >= request.sampling.max_tokens:
                return
            await self._at("commit")
            committed, xfer = xfer, None
            await self._commit(link, decode_at, committed, router, request, outputs)
        except PeerGone as error:
            failed = wire.Failed(
                request=request.id, attempt=request.attempt, code="worker_lost", message=str(error), retriable=True
            )
            self._to_router(router, failed)
        finally:
            if xfer is not None and decode_at in self._destinations:
                self._destinations[decode_at].send(wire.Cancel(xfer=xfer, code="ended"))
                self._destinations[decode_at].send(wire.Released(xfer=xfer, generation=0))

    def _first(self, router: str, request: Request, cached: int) -> list[int]:
        outputs = list(request.output_ids)
        token = toy_token(request.prompt_ids, len(outputs))
        last = len(outputs) + 1 >= request.sampling.max_tokens
        message = Tokens(
            request.id, request.attempt, len(outputs), [token], finish="length" if last else None, cached_tokens=cached
        )
        if self.sends_first_token:
            self._to_router(router, wire.StepOutput(tokens=[message]))
        return [*outputs, token]

    async def _decode(self, router: str, request: Request, outputs: list[int], cached: int | None) -> None:
        total = request.sampling.max_tokens
        while len(outputs) < total:
            await self._at("decode")
            token = toy_token(request.prompt_ids, len(outputs))
            finish = "length" if len(outputs) + 1 == total else None
            message = Tokens(request.id, request.attempt, len(outputs), [token], finish=finish, cached_tokens=cached)
            outputs.append(token)
            cached = None
            self._to_router(router, wire.StepOutput(tokens=[message]))

    # ------------------------------------------------------------------------------------------ as a source

    async def _meet(self, address: str) -> None:
        with contextlib.suppress(PeerGone):
            await self._destination(address)

    async def _destination(self, address: str) -> Link:
        async with self._dialing:  # one link a peer: the end of a second one would be taken for the end of this toy
            return await self._dial(address)

    async def _dial(self, address: str) -> Link:
        if link := self._destinations.get(address):
            return link
        try:
            link = await Link.connect(address, wire.Decoder(wire.FromDestination))
        except OSError as error:
            raise PeerGone(f"cannot reach {address}: {error}") from error
        link.send(wire.Hello(kind="worker", id=self.info.id, info=self.info))
        welcome = await link.receive()
        if not isinstance(welcome, wire.Welcome):
            link.close()
            raise PeerGone(f"{address} did not answer Hello")
        self._destinations[address] = link
        self._routes[address] = wire.RouteReport(
            peer=welcome.info.id, transport="fake", gb_per_s=1.0, error=self.route_error
        )
        self._spawn(self._read_destination(address, link))
        self._publish()
        return link

    async def _read_destination(self, address: str, link: Link) -> None:
        while (message := await link.receive()) is not None:
            future = self._replies.get(getattr(message, "xfer", -1))
            if future is not None and not future.done():
                future.set_result(message)
        self._destinations.pop(address, None)
        self._routes.pop(address, None)
        for xfer, future in self._replies.items():
            if self._by_address.get(xfer) == address and not future.done():
                future.set_exception(PeerGone(f"the decode worker at {address} is gone"))
        self._publish()

    async def _ask(self, link: Link, address: str, xfer: int, message: wire.Message) -> wire.Message:
        future = self._replies[xfer] = asyncio.get_running_loop().create_future()
        self._by_address[xfer] = address
        link.send(message)
        try:
            if address not in self._destinations:
                raise PeerGone(f"the decode worker at {address} is gone")
            return await future
        finally:
            self._replies.pop(xfer, None)
            self._by_address.pop(xfer, None)

    async def _offer(self, link: Link, address: str, xfer: int, request: Request) -> None:
        offer = wire.Offer(
            xfer=xfer,
            request=request.id,
            attempt=request.attempt,
            prompt_len=len(request.prompt_ids),
            block_keys=[],
            pages_needed=1,
            max_tokens=request.sampling.max_tokens,
        )
        await self._ask(link, address, xfer, offer)

    async def _commit(
        self, link: Link, address: str, xfer: int, router: str, request: Request, outputs: list[int]
    ) -> None:
        handed = msgspec.structs.replace(request, output_ids=outputs)
        answer = await self._ask(
            link, address, xfer, wire.Commit(xfer=xfer, generation=0, request=handed, router=router, cached_tokens=0)
        )
        if not isinstance(answer, wire.Accepted):
            raise PeerGone("the decode worker took the grant back")

    # ------------------------------------------------------------------------------------------ as a destination

    async def _serve_source(self, link: Link, hello: wire.Hello) -> None:
        while (message := await link.receive()) is not None:
            match message:
                case wire.Offer(xfer=xfer):
                    self.reservations[message.request, message.attempt] = (hello.id, xfer)
                    link.send(wire.Grant(xfer=xfer, skip_tokens=0, pages=[], generation=0))
                case wire.Commit(xfer=xfer, request=request):
                    if self.reservations.pop((request.id, request.attempt), None) is None:
                        link.send(wire.Revoke(xfer=xfer, code="abort"))
                    else:
                        self._begin((request.id, request.attempt), message.router, self._adopt(link, message))
                case wire.Cancel(xfer=xfer):
                    self._forget_source(hello.id, xfer)
        self._forget_source(hello.id)

    def _forget_source(self, source: str, xfer: int | None = None) -> None:
        for key, (of, number) in list(self.reservations.items()):
            if of == source and xfer in (None, number):
                del self.reservations[key]

    async def _adopt(self, link: Link, commit: wire.Commit) -> None:
        await self._at("adopt")
        request = commit.request
        link.send(wire.Accepted(xfer=commit.xfer))
        self._to_router(commit.router, wire.Adopted(request=request.id, attempt=request.attempt))
        await self._decode(commit.router, request, list(request.output_ids), None)
