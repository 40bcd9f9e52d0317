"""Staged memory between two real processes, one of which is killed or stopped in the middle.

The device is `tests.unit.device_queue`: its copies end some time after the call that queued them, on threads that die
with their process.
"""

from __future__ import annotations

import pytest
from tests.proc import transfer_pair
from tests.proc.transfer_pair import Pair

every_transport = pytest.mark.parametrize("transport", ["shm@device", "tcp@device"])


@every_transport
def test_random_page_lists_arrive_in_the_other_process(pair: Pair, transport: str) -> None:
    transfer_pair.random_lists_arrive(pair, transport, rounds=10)


@every_transport
def test_a_destination_killed_in_the_middle_fails_all_jobs_with_a_reason(pair: Pair, transport: str) -> None:
    transfer_pair.a_killed_destination_fails_all_jobs(pair, transport, 100, ("has ended", "broke", "failed"))


@every_transport
def test_a_source_killed_in_the_middle_is_proven_gone_and_writes_no_more(pair: Pair, transport: str) -> None:
    transfer_pair.a_killed_source_is_proven_gone(pair, transport)


@every_transport
def test_a_stopped_source_is_cut_off_without_its_help(pair: Pair, transport: str) -> None:
    transfer_pair.a_stopped_source_is_cut_off_without_its_help(pair, transport)
