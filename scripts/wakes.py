"""How long this machine takes to wake a thread that sleeps, by what it sleeps on: what control paths are made of.

    python scripts/wakes.py

Microseconds, median and 90 %, after pauses of 0.3 and 5 ms. The figures are between threads of one process: a queue, a
descriptor in select, an asyncio loop, a TCP connection over loopback in select, a timer.
"""

from __future__ import annotations

import asyncio
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable

from slipstream.transfer.cuda.alarm import Alarm

COUNT = 200
clock = time.perf_counter


def sleeper(wait: Callable[[], object]) -> tuple[threading.Thread, list[float]]:
    """A thread that sleeps COUNT times, and when it was awake again."""
    woken: list[float] = []

    def run() -> None:
        for _ in range(COUNT):
            wait()
            woken.append(clock())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, woken


def measure(name: str, pause: float, wait: Callable[[], object], wake: Callable[[], object]) -> None:
    thread, woken = sleeper(wait)
    sent = []
    for _ in range(COUNT):
        time.sleep(pause)
        sent.append(clock())
        wake()
    thread.join()
    show(name, pause, [after - before for before, after in zip(sent, woken, strict=True)])


def from_loop(loop: asyncio.AbstractEventLoop, pause: float) -> list[float]:
    taken: list[float] = []
    for _ in range(COUNT):
        time.sleep(pause)
        loop.call_soon_threadsafe(lambda at: taken.append(clock() - at), clock())
    time.sleep(0.01)
    return taken


def show(name: str, pause: float, taken: list[float]) -> None:
    taken.sort()
    middle, slow = taken[len(taken) // 2], taken[int(0.9 * len(taken))]
    print(f"{name:12} after {1e3 * pause:3.1f} ms: {1e6 * middle:6.1f} us (90 % {1e6 * slow:.1f})", flush=True)


def main() -> None:
    inbox: queue.SimpleQueue[None] = queue.SimpleQueue()
    bell = os.eventfd(0)
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    receiver = listener.accept()[0]
    loop = asyncio.new_event_loop()
    runner = threading.Thread(target=loop.run_forever, daemon=True)
    runner.start()
    alarm = Alarm()

    def from_bell() -> None:
        select.select([bell], [], [])
        os.read(bell, 8)

    def from_socket() -> None:
        select.select([receiver], [], [])
        receiver.recv(100)

    for pause in (0.0003, 0.005):
        measure("queue", pause, inbox.get, lambda: inbox.put(None))
        measure("descriptor", pause, from_bell, lambda: os.write(bell, (1).to_bytes(8, "little")))
        measure("tcp", pause, from_socket, lambda: sender.send(b"x"))
        show("event loop", pause, from_loop(loop, pause))
        late = []
        for _ in range(COUNT):
            due = clock() + pause
            alarm.set(pause)
            select.select([alarm], [], [])
            late.append(clock() - due)
        show("timer", pause, late)
    loop.call_soon_threadsafe(loop.stop)
    runner.join()
    for thing in (listener, sender, receiver):
        thing.close()


if __name__ == "__main__":
    main()
