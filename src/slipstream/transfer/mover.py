"""The thread that drives the transports of a rank, and those that drive them in its stead.

The mover sleeps on one selector: its own bell, rung for commands of other threads, and the descriptors of the
transports, readable when something has happened to tickets. Each ticket has a function that is told of its end, once.

Whoever holds the turn does the mover's work, one at a time: the mover while it is awake, and while it sleeps whoever
has something short to do and would otherwise have to wake it (`instead`). Nobody waits for the turn but the mover, so
no order of locks can go wrong: a thread that cannot have it leaves a command.
"""

from __future__ import annotations

import logging
import selectors
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.errors import PeerLost
from slipstream.transfer.transports.base import Remote, Runs, Transport, awaits_events
from slipstream.transfer.transports.bell import Bell

logger = logging.getLogger(__name__)

CLOSED = "the transfer agent of this worker is closed"
Ended = Callable[[str | None], None]


class Mover:
    """Drives `transports`, which it shuts down at its end; a ticket that is then still under way has failed.

    `ask`, `instead` and `stop` are for any thread; `write` and `collect_written` for whoever has the turn, which is who
    runs a command or the work of `instead`. What these raise is logged: nothing of theirs ends the thread.
    """

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self._transports = transports
        self._lock = threading.Lock()  # of the commands
        self._commands: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()
        self._writes: dict[tuple[str, int], Ended] = {}
        self._written: set[str] = set()  # transports that got a write since they were last polled
        self._bell = Bell()
        self._running = True
        self._thread = threading.Thread(target=self._run, name="slipstream-mover", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> int:
        """Tickets that have not ended."""
        return len(self._writes)

    def ask(self, *commands: Callable[[], None]) -> None:
        """Has the mover do these, behind what was asked before. Raises PeerLost when it has ended."""
        with self._lock:
            if not self._running:
                raise PeerLost(CLOSED)
            self._commands.extend(commands)
        self._bell.ring()

    def instead(self, work: Callable[[], bool]) -> bool:
        """Runs `work` here, if the mover sleeps and nobody waits for it; what it returns, or False. Never waits."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            return not self._commands and self._running and work()
        finally:
            self._turn.release()

    def stop(self) -> None:
        """Ends the thread behind what was asked before, and waits for it."""

        def last() -> None:
            with self._lock:
                self._running = False

        self.ask(last)
        self.join()
        self._bell.close()

    def join(self) -> None:
        self._thread.join()

    # ------------------------------------------------------------------------------------------- with the turn

    def write(self, transport: str, remote: Remote, runs: Runs, after: Any, ended: Ended) -> None:
        """Starts a ticket; `ended` gets its error, or None, and is not called before this returns.

        Raises what the transport raises when it has started nothing.
        """
        ticket = self._transports[transport].write(remote, runs, after)
        self._writes[transport, ticket] = ended
        self._written.add(transport)

    def collect_written(self) -> None:
        """Hears of what has ended at once, which saves a turn of the selector."""
        written, self._written = self._written, set()
        for name in written:
            self._collect(self._transports[name])

    def look(self) -> bool:
        """Hears of what has ended on transports that are told of events (`ripe`) and have tickets under way; True."""
        for name in {name for name, _ in self._writes if awaits_events(self._transports[name])}:
            self._collect(self._transports[name])
        return True

    def _collect(self, transport: Transport) -> None:
        for completion in transport.poll():
            ended = self._writes.pop((transport.name, completion.ticket), None)
            if ended is None:
                logger.error("%s reported ticket %d, which is not under way", transport.name, completion.ticket)
            else:
                self._tell(ended, completion.error)

    def _tell(self, ended: Ended, error: str | None) -> None:
        try:
            ended(error)
        except Exception:
            logger.exception("the transfer agent failed at the end of a copy")

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell.fileno(), selectors.EVENT_READ, None)
            for transport in self._transports.values():
                selector.register(transport.fileno(), selectors.EVENT_READ, transport)
            while self._running:
                ready = selector.select()
                with self._turn:
                    for key, _ in ready:
                        if key.data is None:
                            self._bell.hush()
                            self._obey()
                        else:
                            self._collect(key.data)
        while self._commands:  # that came while the last one was being done
            self._obey()
        for transport in self._transports.values():
            try:
                transport.shutdown()
            except Exception:
                logger.exception("%s could not be shut down in order", transport.name)
        while self._writes:  # of a route that was opened while the agent was being closed
            self._tell(self._writes.popitem()[1], CLOSED)

    def _obey(self) -> None:
        """Does what has been asked so far; the ends of copies do not wait for what is asked meanwhile."""
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            try:
                command()
            except Exception:
                logger.exception("the transfer agent failed at a command")
        self.collect_written()
        if self._commands:
            self._bell.ring()
