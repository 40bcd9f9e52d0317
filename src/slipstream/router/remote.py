"""One worker as the router sees it: finds it, links to it, listens to it, notices its end, and begins again.

`RemoteWorker.run` goes round for as long as the worker is registered: ask `/worker_info` at its URL until it answers,
open the link to the wire address found there, say Hello, take the Welcome, then read messages until the link ends.
The next round may find another process at the same URL: it has a new id, and nothing is carried over to it.

What a message means is not decided here: the fleet judges who may join and what the pairs are worth, and the requests'
lives take the tokens.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Literal, Protocol

from slipstream import wire
from slipstream.plain_http import why_not
from slipstream.router.fetch import NotAWorker, NotReady, worker_info
from slipstream.router.place import Standing
from slipstream.stream import Link
from slipstream.types import Role
from slipstream.version import __version__

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
REFUSED_RETRY_S = 5.0
ANSWER_S = 5.0  # for /worker_info, for the connection, and for the Welcome

WorkerState = Literal["connecting", "live", "unhealthy", "silent", "draining", "leaving", "refused"]


class WorkerEvents(Protocol):
    """What the owner of a RemoteWorker is told; all on the event loop."""

    def admit(self, worker: RemoteWorker, info: wire.WorkerInfo) -> str | None:
        """Whether `info` may join: None, or why not."""
        ...

    def up(self, worker: RemoteWorker) -> None: ...

    def down(self, worker: RemoteWorker, reason: str) -> None: ...

    def left(self, worker: RemoteWorker) -> None:
        """The worker ended the link on purpose, because it ends itself."""
        ...

    def message(self, worker: RemoteWorker, message: wire.Message) -> None: ...

    def changed(self, worker: RemoteWorker) -> None: ...


class Refused(Exception):
    """The worker, or the fleet, will not have this pairing of router and worker; the message says why."""


class RemoteWorker:
    """A registered URL and the worker process behind it, if there is one.

    `info`, `standing` and `link` belong to the current process: set while linked, None otherwise. `id` stays that of
    the last process. `problem` says why the worker is not linked or not used, "" when all is well. `silent`: it
    has answered nothing for too long, so its link was cut, if it had one, and it has not answered since.
    """

    def __init__(self, url: str, role: Role | None, router_id: str, events: WorkerEvents) -> None:
        self.url = url
        self.wanted_role: Role | None = role
        self.id = ""
        self.info: wire.WorkerInfo | None = None
        self.link: Link | None = None
        self.standing: Standing | None = None
        self.status: wire.Status | None = None
        self.routes: dict[str, list[wire.RouteReport]] = {}  # what this worker, as a source, said of each peer
        self.met: dict[str, float] = {}  # wire address of each peer in the last Meet -> when it was first named
        self.problem = ""
        self.refused = False
        self.silent = False
        self.leaving = False
        self.joins = False  # it was registered by the worker itself, which does so again whenever it is not linked
        self.seen = 0.0  # when it was last registered or linked
        self.healthy = True
        self.missed = 0
        self.unanswered_s = 0.0  # for how long it has been asked for an answer without a link, and gave none
        self.pings = 0
        self.left_behind: tuple[str, list[wire.Abort]] = ("", [])  # process id, and what it had when its link ended
        self._router_id = router_id
        self._events = events
        self._heard = True
        self._farewell = False  # whether the last link was ended on purpose by the worker
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------ what others ask

    @property
    def role(self) -> Role:
        if self.wanted_role is not None:
            return self.wanted_role
        return self.info.role if self.info is not None else "both"

    @property
    def label(self) -> str:
        return self.info.name if self.info is not None and self.info.name else self.url

    @property
    def name(self) -> str:
        """For sentences that give its URL too."""
        return self.info.name if self.info is not None and self.info.name else "a worker"

    @property
    def state(self) -> WorkerState:
        if self.link is None:
            return "refused" if self.refused else "silent" if self.silent else "connecting"
        if self.leaving:
            return "leaving"
        if self.status is not None and self.status.draining:
            return "draining"
        return "live" if self.healthy else "unhealthy"

    @property
    def said_goodbye(self) -> bool:
        return self.link is None and self._farewell

    @property
    def usable(self) -> bool:
        return self.state == "live"

    @property
    def wire_address(self) -> str:
        """Where the worker takes messages. A worker that listens on every address is reached at the URL's host."""
        if self.info is None:
            return ""
        host, _, port = self.info.wire.rpartition(":")
        if host.strip("[]") not in ("0.0.0.0", "::", ""):
            return self.info.wire
        return f"{self.url.removeprefix('http://').rpartition(':')[0]}:{port}"

    @property
    def same_machine(self) -> bool:
        return self.info is not None and self.info.host in (socket.gethostname(), "localhost", "127.0.0.1", "::1", "")

    def send(self, message: wire.Message) -> None:
        """Queues a message on the link; nothing without one."""
        if self.link is not None:
            self.link.send(message)

    def ping(self) -> int:
        """Sends a Ping and returns its number; the Pong follows everything that the worker sent before it."""
        self.pings += 1
        self.send(wire.Ping(n=self.pings))
        return self.pings

    # ------------------------------------------------------------------------------------------ its life

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"worker {self.url}")

    def retry_now(self) -> None:
        """Ends the present pause between two attempts; the worker has shown a sign of life elsewhere."""
        self._wake.set()

    def cut(self, reason: str) -> None:
        """Ends the link at once, without waiting for a peer that may never answer again; it gets nothing more."""
        if self.link is not None:
            self.healthy = False
            self.link.lost_because = reason
            self.link.abort()

    async def stop(self, reason: str, *, dismissed: bool) -> None:
        """Ends the link (what is queued is still sent) and the rounds; `down` is told if there was a link.

        A `dismissed` worker does not join again by itself.
        """
        if self._task is None:
            return
        task, self._task = self._task, None
        self._lose(reason, dismissed=dismissed)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def beat(self, unhealthy_after: int, lost_after: int, silent_after: int) -> None:
        """One heartbeat: judges the silence since the last one and pings again. `silent_after` 0 is never.

        Beats are counted, not seconds, so that a router that was itself held up does not blame its workers. A worker
        that has missed half of what it may gets nothing new, so that whoever falls silent together with one that is
        given up is not handed its requests. The owner is told nothing here: it judges all workers first.
        """
        if self.link is None:
            return
        self.missed = 0 if self._heard else self.missed + 1
        self._heard = False
        bounds = [silent_after] if silent_after > 0 else []
        bounds += [lost_after] if not self.same_machine else []
        unhealthy_after = min([unhealthy_after, *(max(1, bound // 2) for bound in bounds)])
        if not self.same_machine and self.missed >= lost_after:
            return self.cut(f"{self.label} on {self.info.host if self.info else '?'} missed {self.missed} heartbeats")
        if 0 < silent_after <= self.missed:
            self.silent = True
            return self.cut(f"it has answered none of {self.missed} heartbeats (worker_silence_s); it is given up")
        healthy = self.missed < unhealthy_after
        if healthy != self.healthy:
            self.healthy = healthy
            self.problem = "" if healthy else f"it has not answered {self.missed} heartbeats; it gets nothing new"
            logger.log(
                logging.INFO if healthy else logging.WARNING, "%s: %s", self.label, self.problem or "it answers again"
            )
        self.ping()

    async def _run(self) -> None:
        pause = FIRST_RETRY_S
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                await self._round()
                if loop.time() - begun > LAST_RETRY_S:
                    pause = FIRST_RETRY_S  # it lasted; one that falls again and again is asked less often
            except (OSError, TimeoutError, UnicodeError, NotReady, NotAWorker, Refused) as error:
                self._explain(error)
            except Exception:  # the edge between one worker and the rest: its link begins anew, the others go on
                logger.exception("%s: the link ended by a fault of this router; its requests go elsewhere", self.url)
            self._wake.clear()
            try:
                async with asyncio.timeout(REFUSED_RETRY_S if self.refused else pause):
                    await self._wake.wait()
            except TimeoutError:
                pause = min(pause * 1.6, LAST_RETRY_S)

    async def _round(self) -> None:
        """One process from first sign to end of link."""
        self.info = await worker_info(self.url, ANSWER_S)
        link = await Link.connect(self.wire_address, wire.Decoder(wire.ToRouter), timeout_s=ANSWER_S)
        try:
            welcome = await self._greet(link)
            self._linked(link, welcome.info)
            await self._listen(link)
        except Refused as refusal:
            link.close(str(refusal))
            raise
        finally:
            link.close()
            self._lose(link.lost_because or "the link was closed")
        if link.farewell:
            self._events.left(self)

    async def _greet(self, link: Link) -> wire.Welcome:
        link.send(wire.Hello(kind="router", id=self._router_id, version=__version__))
        async with asyncio.timeout(ANSWER_S):
            answer = await link.receive()
        match answer:
            case wire.Welcome() if answer.protocol == wire.PROTOCOL:
                if problem := self._events.admit(self, answer.info):
                    raise Refused(problem)
                return answer
            case wire.Welcome():
                raise Refused(
                    f"it speaks protocol {answer.protocol} (version {answer.info.version}), this router protocol "
                    f"{wire.PROTOCOL} (version {__version__}). Start both from the same version."
                )
            case wire.Rejected():
                raise Refused(f"it refused this router: {answer.message} ({answer.code})")
            case None:
                raise NotAWorker(f"{link.lost_because}, instead of a Welcome")
            case _:
                raise NotAWorker(f"it answered Hello with {type(answer).__name__}")

    def _linked(self, link: Link, info: wire.WorkerInfo) -> None:
        if self.wanted_role is not None and self.wanted_role != info.role:
            logger.warning(
                "%s says role=%s, but was given to this router for role=%s; it is used as %s",
                self.url, info.role, self.wanted_role, self.wanted_role,
            )  # fmt: skip
        self.id, self.info, self.link = info.id, info, link
        link.label = self.label
        self.standing = Standing.of(info, self.role)
        self.status = None
        self.routes.clear()
        self.met.clear()
        self.problem, self.refused, self.silent, self.healthy = "", False, False, True
        self.missed, self.unanswered_s, self._heard = 0, 0.0, True
        self._events.up(self)

    async def _listen(self, link: Link) -> None:
        message = self._events.message
        while (received := await link.receive()) is not None:
            self._heard = True
            message(self, received)

    def _lose(self, reason: str, *, dismissed: bool = False) -> None:
        if self.link is None:
            return
        self._farewell = self.link.farewell is not None
        self.link.close(reason, dismissed=dismissed)
        self.link = None
        self.problem = reason
        self._events.down(self, reason)
        self.standing = None

    def _explain(self, error: Exception) -> None:
        self.refused = isinstance(error, Refused)
        mute = isinstance(error, TimeoutError)
        self.silent = self.silent and mute
        self.unanswered_s = self.unanswered_s + ANSWER_S if mute else 0.0
        text = why_not(error) or type(error).__name__
        if text == self.problem:
            return
        self.problem = text
        if isinstance(error, (Refused, NotAWorker)):
            logger.warning("%s: not linked, trying again: %s", self.url, text)
        else:
            logger.info("waiting for %s at %s: %s", self.name, self.url, text)
        self._events.changed(self)
