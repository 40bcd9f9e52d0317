"""A whole cluster on this machine: what `slipstream serve` does.

    check      settings, devices, model and port, before anything is started
    start      the router and all workers, at once; workers join the router when they are ready
    wait       until every worker is live and every pair has its route, and say so
    keep       whoever dies is started again; the others find it by themselves
    end        readiness off, requests under way finish within a bound, then router, then workers

The process holds three things for its children: the listening socket of the front, the lifeline, and their output.
"""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType
from urllib.parse import urlsplit

from slipstream.errors import SetupError
from slipstream.launch.banner import Member, banner, own_command, pairs, why_no_route
from slipstream.launch.commands import ROUTER_NAME, ClusterConfig, router_again, router_spec, with_port, worker_specs
from slipstream.launch.devices import Machine
from slipstream.launch.display import Display
from slipstream.launch.spec import Placement
from slipstream.launch.supervise import Child, RestartPolicy, Silences, State, Supervisor
from slipstream.launch.watch import Snapshot, Watcher
from slipstream.listen import listen, url_of
from slipstream.types import Role

logger = logging.getLogger(__name__)

ROUTES_GRACE_S = 5.0  # how long the banner waits for routes that are not measured yet
WORKER_GRACE_S = 5.0  # after the router has ended there is nothing left to drain in workers
NO_ROUTE_GRACE_S = 1.5  # how long no pair at all may be without a route, before that is taken for final
KEEPING_INTERVAL_S = 1.0
ACCEPT_AFTER_S = 5.0  # how long connections wait for a router that is started again to find its workers


class Cluster:
    """One `serve`. `run` returns the exit code; it raises SetupError when the cluster cannot start or keep running.

    `chats` says whether the model has a chat template, so that a chat is what to try first.
    """

    def __init__(
        self, config: ClusterConfig, placements: list[Placement], machine: Machine, *, chats: bool = True
    ) -> None:
        self._config = config
        self._chats = chats
        self._placements = placements
        self._began = time.monotonic()
        self._interrupts = 0
        self._routes_awaited_since = 0.0
        self._routeless_since = 0.0
        self._silences = Silences()
        self._live: dict[str, Member] = {}  # as they were last seen, by name
        self._former: set[str] = set()  # addresses that workers have left for others
        self._socket = listen(config.front.host, config.front.port)
        self.port: int = self._socket.getsockname()[1]
        self.url = url_of(config.front.host, self.port)
        self._display = Display(
            [ROUTER_NAME, *(placement.name for placement in placements)],
            config.front.log_format,
            table=config.front.log_level in ("info", "warning", "error"),
        )
        self._supervisor = Supervisor(self._display.line, RestartPolicy(max_failures=config.launch.max_failures))
        parent_fd = self._supervisor.lifeline_fd
        self._router_spec = router_spec(config, port=self.port, listen_fd=self._socket.fileno(), parent_fd=parent_fd)
        self._worker_specs = worker_specs(config, placements, machine, router_url=self.url, parent_fd=parent_fd)

    def run(self) -> int:
        self._take_signals()
        watcher = Watcher(self.url, self._config.front.api_key, self._supervisor.wake)
        try:
            for spec in (self._router_spec, *self._worker_specs.values()):
                self._supervisor.start(spec)
            if self._wait_until_ready(watcher):
                self._display.ready()
                self._announce(watcher)
                self._keep(watcher)
            self._display.ready()
            watcher.close()
            self._end()
        finally:
            watcher.close()
            self._display.close()
            # whoever still runs here does so because another one failed, and may end in its own way
            self._supervisor.stop(list(self._supervisor.children), WORKER_GRACE_S, lambda: self._interrupts > 0)
            self._supervisor.close()
            self._socket.close()
        return 0 if self._interrupts < 2 else 130

    # ---------------------------------------------------------------------------------------------- starting

    def _wait_until_ready(self, watcher: Watcher) -> bool:
        """True when all is there; False when the user has had enough before that."""
        deadline = self._began + self._config.launch.start_timeout_s
        while not self._interrupts:
            self._supervisor.poll(0.5)
            self._note_members(watcher)
            if self._complete(watcher):
                return True
            self._refuse_without_routes(watcher)
            if time.monotonic() > deadline:
                raise SetupError(
                    f"not ready after {self._config.launch.start_timeout_s:g} s: {self._missing(watcher)}. "
                    "Give it more time with --start-timeout-s, or see what it does with --log-level debug."
                )
        return False

    def _complete(self, watcher: Watcher) -> bool:
        snapshot = watcher.latest
        live = {member.name for member in snapshot.members if member.state == "live"}
        if not snapshot.serving or not live.issuperset(placement.name for placement in self._placements):
            return False
        if all(route is not None for _, _, route in pairs(snapshot.members)):
            return True
        self._routes_awaited_since = self._routes_awaited_since or time.monotonic()
        return time.monotonic() - self._routes_awaited_since > ROUTES_GRACE_S

    def _refuse_without_routes(self, watcher: Watcher) -> None:
        """Raises SetupError when everybody is there and KV has no way between any two of them."""
        snapshot = watcher.latest
        live = {member.name for member in snapshot.members if member.state == "live"}
        everybody = live.issuperset(placement.name for placement in self._placements)
        reason = "" if snapshot.serving or not everybody else why_no_route(snapshot.members)
        if not reason:
            self._routeless_since = 0.0
            return
        self._routeless_since = self._routeless_since or time.monotonic()
        if time.monotonic() - self._routeless_since > NO_ROUTE_GRACE_S:
            raise SetupError(
                f"no request can be served, because KV has no route from any prefill to any decode worker: {reason}"
            )

    def _missing(self, watcher: Watcher) -> str:
        states = {member.name: member.state for member in watcher.latest.members}
        absent = [p.name for p in self._placements if states.get(p.name) != "live"]
        problems = [f"{m.name}: {m.problem}" for m in watcher.latest.members if m.problem]
        if not watcher.latest.reached:
            return "the router does not answer"
        return "; ".join(problems) or f"still waiting for {', '.join(absent) or 'a pair that can serve'}"

    def _announce(self, watcher: Watcher) -> None:
        members = [m for name in self._worker_specs for m in watcher.latest.members if m.name == name]
        seconds = time.monotonic() - self._began
        if self._config.front.log_format == "json":
            facts = {
                "url": self.url,
                "seconds": round(seconds, 1),
                "workers": len(members),
                "model": members[0].served_name,
                "context": min(member.max_model_len for member in members),
            }
            logger.info("ready", extra=facts)
            return
        text = banner(
            members,
            url=self.url,
            page_tokens=self._config.engine.page_tokens,
            seconds=seconds,
            router_pid=self._supervisor.children[ROUTER_NAME].pid,
            chats=self._chats,
            with_key=bool(self._config.front.api_key),
            command=own_command(),
        )
        self._display.banner(text)

    # ---------------------------------------------------------------------------------------------- keeping

    def _keep(self, watcher: Watcher) -> None:
        watcher.interval_s = KEEPING_INTERVAL_S
        while not self._interrupts:
            self._supervisor.poll(5.0)
            self._note_members(watcher)
            self._end_silent(watcher)

    def _end_silent(self, watcher: Watcher) -> None:
        """Kills who lives and answers nobody, so that it is started again: a worker that the router has given up, as
        long again after that; a router that does not answer; a worker whose new start takes longer than a start may.

        A worker that the router does not list was taken out on purpose. If it has answered in this life it is let be.
        """
        limit_s, children, snapshot = self._config.router.worker_silence_s, self._supervisor.children, watcher.latest
        silent: dict[tuple[str, int], float] = {}
        for member in snapshot.members:
            if member.state == "silent" and (child := self._child_of(member)) is not None:
                silent[child.name, child.pid] = limit_s
        router = children[ROUTER_NAME]
        if router.up and not snapshot.reached:
            silent[ROUTER_NAME, router.pid] = 2 * limit_s
        for (name, pid), seconds in self._silences.look(set(silent)).items():
            if 0 < silent[name, pid] <= seconds and children[name].pid == pid:
                self._supervisor.end(name, f"has answered nothing for {2 * limit_s:g} s (worker_silence_s, twice)")
        for name in self._worker_specs if snapshot.reached else ():
            child = children[name]
            if child.running and not child.heard and child.age_s > self._config.launch.start_timeout_s:
                self._supervisor.end(name, f"was not ready {child.age_s:.0f} s after its start (start_timeout_s)")

    def _child_of(self, member: Member) -> Child | None:
        """The process that this is; by its address, where the router has been started again and has heard no name."""
        known = next((live for live in self._live.values() if live.url == member.url), None)
        if not member.pid and known is not None:
            member = known
        child = self._supervisor.children.get(member.name)
        return child if child is not None and child.pid == member.pid else None

    def _note_members(self, watcher: Watcher) -> None:
        """Who is live is up, and is found at the same port in its next life, as long as that port can be had."""
        snapshot, children = watcher.latest, self._supervisor.children
        children[ROUTER_NAME].up |= snapshot.reached
        news = False
        for member in snapshot.members:
            child = self._child_of(member)
            if child is None or not child.running:
                continue
            child.heard = True
            if member.state != "live":
                continue
            child.up = True
            if self._live.get(member.name) != member:
                news = True
                self._note_live(child, member)
        if news:
            watcher.former = frozenset(self._former)
        self._note_known(snapshot)
        for child in children.values():
            if child.state is State.WAITING and child.failures > 1 and child.name in self._worker_specs:
                child.spec = self._worker_specs[child.name]

    def _note_known(self, snapshot: Snapshot) -> None:
        """Whom the router is told of in its next life: all that it had, without those that it was told to take out."""
        if not snapshot.reached or not self._live:
            return
        there, children = {m.url for m in snapshot.members if m.state != "leaving"}, self._supervisor.children
        known: list[tuple[Role, str]] = [
            (member.role, member.url)
            for name, member in self._live.items()
            if member.url in there or children[name].pid != member.pid
        ]
        children[ROUTER_NAME].spec = router_again(self._router_spec, known, ACCEPT_AFTER_S)

    def _note_live(self, child: Child, member: Member) -> None:
        before = self._live.get(member.name)
        if before is not None and before.pid != member.pid:
            logger.info("%s is back: pid %d at %s", member.name, member.pid, member.url)
            self._former.add(before.url)
        self._former.discard(member.url)
        self._live[member.name] = member
        child.spec = with_port(self._worker_specs[member.name], urlsplit(member.url).port or 0)

    # ---------------------------------------------------------------------------------------------- ending

    def _take_signals(self) -> None:
        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupts += 1
            self._supervisor.wake()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, interrupt)

    def _end(self) -> None:
        """The first interrupt has come. A second one at any point here ends everything at once."""

        def hurry() -> bool:
            return self._interrupts > 1

        drain_s = self._config.launch.drain_s
        logger.info("ending: requests under way may take up to %g s; Ctrl-C again ends at once", drain_s)
        self._supervisor.stop([ROUTER_NAME], drain_s + WORKER_GRACE_S, hurry)
        self._socket.close()  # who still connects, as workers do that miss their router, is refused from now on
        self._supervisor.stop(list(self._worker_specs), 0.0 if hurry() else WORKER_GRACE_S, hurry)
        logger.info("all processes have ended")
