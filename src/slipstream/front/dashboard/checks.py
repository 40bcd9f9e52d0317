"""What the page shows beside numbers: the machine's drawing and doctor's findings.

Both look at the system, which may take seconds: the machine is read in a thread, once, and doctor runs as a process of
its own, at the first look and whenever somebody asks for it again. Nothing of it holds up a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections import deque
from typing import Any

import msgspec

from slipstream.front.dashboard.snapshot import overlay
from slipstream.front.dashboard.watch import end
from slipstream.topo import choose, probe
from slipstream.topo.draw import svg
from slipstream.topo.graph import Machine

DOCTOR_S = 60.0
BAD = ("fail", "warn")


class Drawing:
    """The machine of this process, drawn with the workers that there are. `problem` says why there is none."""

    def __init__(self) -> None:
        self.problem = ""
        self._machine: Machine | None = None
        self._plan: choose.Plan | None = None
        self._reading: asyncio.Task[None] | None = None
        self._here = frozenset({socket.gethostname(), "localhost", "127.0.0.1", "::1", ""})

    def look(self) -> None:
        """Begins to read the machine, if that has not begun."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="dashboard machine")

    async def stop(self) -> None:
        await end(self._reading)

    def version(self, workers: list[dict[str, Any]]) -> str:
        """Changes when the drawing does; "" while the machine is being read."""
        if self._machine is None:
            return ""
        shown = overlay(workers, self._here)
        return f"{hash((shown.workers, shown.handoffs)) & 0xFFFFFFFFFFFF:012x}"

    def svg(self, workers: list[dict[str, Any]]) -> str | None:
        if self._machine is None or self._plan is None:
            return None
        return svg(self._machine, self._plan, overlay(workers, self._here))

    @property
    def handoff(self) -> str:
        return self._plan.handoff if self._plan is not None else ""

    async def _read(self) -> None:
        try:
            machine = await asyncio.to_thread(probe.live)
        except Exception as error:  # the edge of a machine: whatever a strange system does, the page lives without
            self.problem = f"this machine cannot be read: {type(error).__name__}: {error}"
            return
        self._plan = choose.plan(machine)
        self._machine = machine


class Findings:
    """Doctor's last findings. `key` opens the front to it."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._running: asyncio.Task[None] | None = None
        self._shown: dict[str, Any] = {"state": "none"}

    def look(self, url: str) -> None:
        """Runs doctor for the first time, against the front at `url`."""
        if self._running is None:
            self.again(url)

    def again(self, url: str) -> None:
        """Runs doctor, unless it runs."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(url), name="dashboard doctor")

    async def stop(self) -> None:
        await end(self._running)

    def view(self) -> dict[str, Any]:
        running = self._running is not None and not self._running.done()
        return {**self._shown, "running": running}

    async def _run(self, url: str) -> None:
        try:
            body = await self._doctor(url)
            results = msgspec.json.decode(body)["results"]
        except TimeoutError:
            self._shown = {"state": "failed", "problem": f"doctor took longer than {DOCTOR_S:g} s"}
        except (OSError, msgspec.MsgspecError, KeyError, TypeError, RecursionError) as error:
            self._shown = {"state": "failed", "problem": f"doctor could not be run: {error}"}
        else:
            counts: dict[str, int] = {}
            for result in results:
                counts[result["status"]] = counts.get(result["status"], 0) + 1
            bad = sorted((r for r in results if r["status"] in BAD), key=lambda r: BAD.index(r["status"]))
            self._shown = {"state": "done", "time": time.time(), "counts": counts, "results": bad}

    async def _doctor(self, url: str) -> bytes:
        """What `slipstream doctor --json` prints. Raises OSError, TimeoutError."""
        environment = {**os.environ, **({"SLIPSTREAM_API_KEY": self._key} if self._key else {})}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slipstream", "doctor", "--json", "--url", url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        try:
            async with asyncio.timeout(DOCTOR_S):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode not in (0, 1) or not output.strip():
            last = deque(errors.decode(errors="replace").strip().splitlines(), maxlen=1)
            raise OSError(last[0] if last else f"it ended with {process.returncode}")
        return output
