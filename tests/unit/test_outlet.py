"""Output that nobody waits for: who writes goes on, whoever does not read."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest
from tests.unread import fill, nobody_reads

from slipstream import outlet


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[outlet._Writer]:
    """One of the test's own, so that nothing that waits here holds up another test."""
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    own = outlet._Writer()
    monkeypatch.setattr(outlet, "_writer", own)
    return own


def test_lines_come_in_order_and_those_that_find_no_room_are_counted(
    writer: outlet._Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet, "MOST_WAITING", 10)
    reading, writing = os.pipe()
    filled = fill(writing)
    stream = outlet.to(os.fdopen(os.dup(writing), "w"))
    for number in range(50):
        stream.write(f"line {number}\n")
    assert not outlet.drain(0.05)
    got, done = bytearray(), threading.Event()

    def read() -> None:
        while data := os.read(reading, 65536):
            got.extend(data)
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert outlet.drain(30)
    stream.write("it flows again\n")
    assert outlet.drain(30)
    os.close(stream.fileno())
    os.close(writing)
    assert done.wait(30)
    os.close(reading)
    lines = got[filled:].decode().splitlines()
    kept = [line for line in lines if line.startswith("line ")]
    lost = [int(match[1]) for line in lines if (match := re.match(r"(\d+) lines were left out: nobody read", line))]
    assert kept == [f"line {number}" for number in range(len(kept))]
    assert 10 <= len(kept) <= 12
    assert sum(lost) == 50 - len(kept)
    assert lines[-1] == "it flows again"


def test_a_reader_who_has_gone_holds_up_nobody(writer: outlet._Writer) -> None:
    reading, writing = os.pipe()
    stream = outlet.to(os.fdopen(writing, "w"))
    os.close(reading)
    stream.write("for nobody\n")
    assert outlet.drain(30)


def test_streams_without_a_descriptor_are_left_as_they_are() -> None:
    stream = io.StringIO()
    assert outlet.to(stream) is stream


def test_a_child_that_was_forked_writes_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    program = """
import logging, os
from slipstream import logs
logs.set_up("info", "text", "p")
logging.getLogger("slipstream.x").info("parent")
if (child := os.fork()) == 0:
    logging.getLogger("slipstream.x").info("child")
    logging.shutdown()
    os._exit(0)
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
    text = capfd.readouterr().err
    assert text.count("x: parent") == 1
    assert text.count("x: child") == 1


FLOOD = """
import logging, os, signal, sys, threading
from slipstream import logs
logs.set_up("debug", "json", "p")
for number in range(20000):
    logging.getLogger("slipstream.x").error("line %d", number)
os.kill(os.getpid(), signal.SIGUSR1)
print("also a plain line", file=sys.stderr)
{end}
"""
ENDS = {"exit": ("sys.exit(3)", 3), "raises": ("raise ValueError('the last word')", 1), "at_once": ("os._exit(4)", 4)}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_whose_log_nobody_reads_goes_on_and_ends(end: str) -> None:
    with nobody_reads() as full:
        ended = subprocess.run(
            [sys.executable, "-c", FLOOD.format(end=ENDS[end][0])], stderr=full, timeout=60, check=False
        )
    assert ended.returncode == ENDS[end][1]


def test_its_last_lines_are_out_before_it_ends_and_what_is_missing_is_said_as_a_log_line() -> None:
    program = "from slipstream import outlet; outlet.MOST_WAITING = 500\n" + FLOOD.format(end="1 / 0")
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
    events = [msgspec.json.decode(line) for line in ended.stderr.splitlines() if line.startswith('{"time"')]
    numbers = [int(event["message"].split()[1]) for event in events if event["message"].startswith("line ")]
    lost = [int(event["message"].split()[0]) for event in events if "were left out" in event["message"]]
    assert numbers == sorted(numbers)
    plain = "also a plain line" not in ended.stderr
    assert len(numbers) + sum(lost) >= 20000 - plain
    assert all(event["level"] == "warning" for event in events if "were left out" in event["message"])


def test_the_interpreters_own_handler_shows_stacks_and_does_not_wait() -> None:
    program = FLOOD.format(end="")
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "(most recent call first)" in shown.stderr
