"""A real Chromium without a window, spoken to over the pipe of its DevTools protocol: no driver, package or port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_S = 60.0


def installed() -> str | None:
    """The path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process with a profile of its own, which is removed at the end."""

    def __init__(self, executable: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._ids = itertools.count(1)
        self._waiting: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', executable, *FLAGS,
             f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._profile},
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol. Raises RuntimeError with what the browser says."""
        number = next(self._ids)
        answer = self._waiting[number] = queue.Queue()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        try:
            told = answer.get(timeout=ANSWER_S)
        except queue.Empty:
            raise RuntimeError(f"{method}: the browser does not answer") from None
        finally:
            del self._waiting[number]
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']['message']}")
        return told["result"]

    def page(self, width: int = 1280, height: int = 900, *, scale: float = 1, mobile: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        page.call("Page.enable")
        page.call("Runtime.enable")
        page.call("Log.enable")
        page.call("Network.enable")
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as if each tab were the one in front
        page.size(width, height, scale=scale, mobile=mobile)
        return page

    def close(self) -> None:
        with suppress(RuntimeError, OSError):
            self.call("Browser.close")
        with suppress(OSError):
            os.close(self._commands)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _read(self) -> None:
        left = b""
        while block := os.read(self._answers, 1 << 16):
            *messages, left = (left + block).split(b"\0")
            for message in messages:
                told = json.loads(message)
                if "id" in told:
                    if (waiting := self._waiting.get(told["id"])) is not None:
                        waiting.put(told)
                elif (page := self._pages.get(told.get("sessionId", ""))) is not None:
                    page.note(told["method"], told["params"])
        os.close(self._answers)


class Page:
    """One tab. `problems` are console errors, uncaught exceptions and what the content security policy refused;
    `urls` everything that was asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.problems: list[str] = []
        self.urls: list[str] = []
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def close(self) -> None:
        self.call("Page.close")

    def note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int, *, scale: float = 1, mobile: bool = False) -> None:
        options = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **options)

    def prefer(self, **features: str) -> None:
        """Media features, as prefers_color_scheme="dark"."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited. Raises RuntimeError with its exception."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return told["result"].get("value")

    def until(self, expression: str, limit_s: float = 60.0) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + limit_s
        while not self.run(f"!!({expression})"):
            assert time.monotonic() < deadline, f"in vain: {expression}\n{self.run('document.body.innerText')[:3000]}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
                 "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip
        code = codes.get(key, ord(key.upper()) if len(key) == 1 else 0)
        name = key if len(key) > 1 else ""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=name,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of the viewport, or of the whole page."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    executable = installed()
    assert executable is not None
    running = Browser(executable)
    try:
        yield running
    finally:
        running.close()


def retried(look: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """The first result without an AssertionError; the last error when that takes too long."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return look()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
