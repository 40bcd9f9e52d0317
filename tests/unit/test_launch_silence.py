"""Whom `serve` kills because nothing is heard of it, and whom it lets be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.test_launch_commands import config

from slipstream.config import LaunchConfig, RouterConfig
from slipstream.launch.banner import Member
from slipstream.launch.cluster import Cluster
from slipstream.launch.devices import Machine
from slipstream.launch.spec import place
from slipstream.launch.supervise import Child, State
from slipstream.launch.watch import Snapshot, Watcher

URLS = {"prefill-0": "http://127.0.0.1:7000", "decode-0": "http://127.0.0.1:7001"}
PIDS = {"router": 1, "prefill-0": 10, "decode-0": 11}
SILENCE_S = 4.0


def member(who: str, state: str = "live", **changes: Any) -> Member:
    role = cast(Any, who.partition("-")[0])
    return Member(**{"url": URLS[who], "state": state, "role": role, "name": who, "pid": PIDS[who], **changes})


class Serve:
    """A cluster of one pair whose processes and router are what the test says; `ended` is whom it has killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = Machine(cores=8)
        settings = config(router=RouterConfig(worker_silence_s=SILENCE_S), launch=LaunchConfig(start_timeout_s=20.0))
        self.cluster = Cluster(settings, place(machine, "1", "1", ""), machine)
        self.watcher = SimpleNamespace(latest=Snapshot(), former=frozenset())
        self.ended: list[str] = []
        self.now = time.monotonic()
        monkeypatch.setattr("slipstream.launch.supervise.time.monotonic", lambda: self.now)
        supervisor = self.supervisor = self.cluster._supervisor
        monkeypatch.setattr(supervisor, "end", lambda name, why: self.ended.append(name))
        for spec in (self.cluster._router_spec, *self.cluster._worker_specs.values()):
            supervisor.children[spec.name] = Child(spec)
            self.begin(spec.name, PIDS[spec.name])

    def begin(self, name: str, pid: int) -> None:
        """Another life of a process."""
        child = self.supervisor.children[name]
        child.process, child.state, child.started_at = cast(Any, SimpleNamespace(pid=pid)), State.RUNNING, self.now
        child.up = child.heard = False

    def look(self, *members: Member, seconds: float = 0.0) -> list[str]:
        """What the router lists for so many seconds; returns whom that has killed."""
        until = self.now + seconds
        while True:
            self.watcher.latest = Snapshot(True, True, members)
            self.cluster._note_members(cast(Watcher, self.watcher))
            self.cluster._end_silent(cast(Watcher, self.watcher))
            if self.now >= until:
                return self.ended
            self.now += 1.0

    @property
    def next_router(self) -> str:
        return " ".join(self.supervisor.children["router"].spec.argv)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    it = Serve(monkeypatch)
    yield it
    it.cluster._display.close()
    for child in it.supervisor.children.values():
        child.process, child.state = None, State.ENDED
    it.supervisor.close()
    it.cluster._socket.close()


def test_a_worker_that_was_taken_out_on_purpose_lives_and_no_next_router_is_told_of_it(serve: Serve) -> None:
    assert serve.look(member("prefill-0"), member("decode-0"), seconds=5) == []
    assert URLS["decode-0"] in serve.next_router
    assert serve.look(member("prefill-0"), member("decode-0", "leaving"), seconds=5) == []
    assert serve.look(member("prefill-0"), seconds=300) == []
    assert URLS["decode-0"] not in serve.next_router
    assert URLS["prefill-0"] in serve.next_router
    assert serve.look(member("prefill-0"), member("decode-0"), seconds=5) == []
    assert URLS["decode-0"] in serve.next_router, "it was added again"


def test_one_that_was_only_ever_seen_draining_or_refused_has_answered_too(serve: Serve) -> None:
    assert serve.look(member("prefill-0", "draining"), member("decode-0", "refused"), seconds=1) == []
    assert serve.look(seconds=300) == []


def test_a_start_that_takes_too_long_is_ended_each_time_anew(serve: Serve) -> None:
    assert serve.look(member("prefill-0"), seconds=20) == []
    assert serve.look(member("prefill-0"), seconds=2) == ["decode-0"] * 2
    serve.begin("decode-0", 12)
    serve.ended.clear()
    assert serve.look(member("prefill-0"), member("decode-0", pid=12), seconds=40) == []
    serve.begin("decode-0", 13)
    assert serve.look(member("prefill-0"), member("decode-0", "connecting", pid=12), seconds=20) == []
    assert set(serve.look(member("prefill-0"), member("decode-0", "connecting", pid=12), seconds=2)) == {"decode-0"}


def test_after_a_new_router_a_stopped_worker_has_the_whole_time_of_the_silent(serve: Serve) -> None:
    serve.look(member("prefill-0"), member("decode-0"), seconds=300)
    unheard = member("decode-0", "connecting", name="", pid=0)
    assert serve.look(member("prefill-0"), unheard, seconds=300) == []
    silent = member("decode-0", "silent", name="", pid=0)
    assert serve.look(member("prefill-0"), silent, seconds=SILENCE_S - 1) == []
    assert set(serve.look(member("prefill-0"), silent, seconds=2)) == {"decode-0"}


def test_a_new_life_is_not_killed_for_the_silence_of_the_one_before(serve: Serve) -> None:
    serve.look(member("prefill-0"), member("decode-0"), seconds=5)
    serve.begin("decode-0", 12)
    assert serve.look(member("prefill-0"), member("decode-0", "silent"), seconds=15) == []
    assert serve.look(member("prefill-0"), member("decode-0", "silent", name="", pid=0), seconds=4) == []
