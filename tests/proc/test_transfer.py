"""Transfers between two real processes: contents, and what the survivor knows when the other one is killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.proc import transfer_pair
from tests.proc.transfer_pair import Pair, joined, written_to

from slipstream.transfer.transports.base import Exports
from slipstream.transfer.transports.door import Address

TRANSPORTS = ("shm", "tcp")
every_transport = pytest.mark.parametrize("transport", TRANSPORTS)


@every_transport
def test_random_page_lists_arrive_in_the_other_process(pair: Pair, transport: str) -> None:
    transfer_pair.random_lists_arrive(pair, transport, rounds=40)


def test_the_fake_transport_fails_some_copies_and_never_lies_about_the_rest(pair: Pair) -> None:
    here, there = joined(pair, "fake")
    here.fill(1)
    order = np.random.default_rng(1).permutation(64).tolist()
    for xfer in range(64):
        here.submit("D", xfer, [xfer], [order[xfer]])
    errors = here.outcomes(64)
    found = there.call("read")
    for xfer, error in errors.items():
        if error is None:
            assert np.array_equal(found[order[xfer]], here.pages[xfer])
        else:
            assert "lost a part" in error


@every_transport
def test_both_directions_at_once(pair: Pair, transport: str) -> None:
    transfer_pair.both_directions_at_once(pair, transport)


# ------------------------------------------------------------------------------------------------------- kill -9


@every_transport
def test_a_destination_killed_in_the_middle_fails_all_jobs_with_a_reason(pair: Pair, transport: str) -> None:
    transfer_pair.a_killed_destination_fails_all_jobs(pair, transport, 200, ("has ended", "broke", "failed"))


@every_transport
def test_a_source_killed_in_the_middle_is_proven_gone_and_writes_no_more(pair: Pair, transport: str) -> None:
    transfer_pair.a_killed_source_is_proven_gone(pair, transport)


def test_a_stopped_source_over_shm_is_not_proven_gone_until_it_is(pair: Pair) -> None:
    here, there = written_to(pair, "shm")
    transfer_pair.a_stopped_source_is_waited_for(here, there, there.go_on)
    transfer_pair.assert_stays_empty(here)


def test_a_stopped_source_over_tcp_is_cut_off_without_its_help(pair: Pair) -> None:
    transfer_pair.a_stopped_source_is_cut_off_without_its_help(pair, "tcp")


def test_a_stopped_source_over_shm_that_is_killed_is_proven_gone(pair: Pair) -> None:
    here, there = pair("shm")
    here.admit("S", there.call("exports"))
    there.call("connect", "D", here.exports())
    transfer_pair.a_stopped_source_is_waited_for(here, there, there.kill)


def test_nothing_is_left_over_after_kill_9(pair: Pair) -> None:
    here, there = pair("shm")
    there.call("admit", "S", here.exports())
    here.connect("D", there.call("exports"))
    here.admit("D", there.call("exports"))
    there.call("connect", "S", here.exports())
    doors = [door_of(here.exports()), door_of(there.call("exports"))]
    assert all(door in Path("/proc/net/unix").read_text() for door in doors)
    assert named_memory(there.process.pid) == []
    there.kill()
    here.disconnect("D")
    assert here.source_gone("D")[0]
    assert doors[1] not in Path("/proc/net/unix").read_text()
    here.close()
    assert doors[0] not in Path("/proc/net/unix").read_text()


def door_of(exports: bytes) -> str:
    details = {d.transport: d.detail for d in msgspec.msgpack.decode(exports, type=Exports).descriptions}
    return "@" + msgspec.msgpack.decode(details["shm"], type=Address).name


def named_memory(pid: int) -> list[str]:
    """Files that a process has open or mapped for writing and that have a name which could outlive it."""
    opened = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.append(os.readlink(fd))
    maps = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    opened += [columns[5] for columns in maps if len(columns) == 6 and columns[1].startswith("rw-s")]
    kept = ("/dev/shm/", "/tmp/", "/run/", "/var/")
    return [path for path in opened if path.startswith(kept) and not path.endswith(" (deleted)")]
