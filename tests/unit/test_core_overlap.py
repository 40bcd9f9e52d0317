"""The engine core with two steps under way: what is planned before a token is known, and what becomes of it then."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from tests.unit.test_core import EOS, Bench, request

from slipstream import wire
from slipstream.engine.plan import FROM_DEVICE, StepOutcome, StepPlan
from slipstream.kv.pages import PageState


class Overlapped(Bench):
    """A bench that launches a step before it settles the one in front of it, wherever the core has one."""

    def __init__(self, *args: int, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self.under_way: deque[StepPlan] = deque()

    def launch(self) -> StepPlan:
        plan = self.plan()
        assert plan is not None
        self.under_way.append(plan)
        return plan

    def land(self) -> None:
        self.settle(self.under_way.popleft())

    def run(self) -> list[StepPlan]:
        plans = []
        while True:
            plan = self.plan()
            if plan is not None:
                self.under_way.append(plan)
                plans.append(plan)
            if plan is None and not self.under_way:
                return plans
            if plan is None or len(self.under_way) == 2:
                self.land()


def test_a_sequence_decodes_ahead_of_tokens_that_only_the_device_knows() -> None:
    bench = Overlapped()
    bench.core.submit(request(max_tokens=4), "router", None)
    plans = bench.run()
    assert [plan.token_ids.tolist() for plan in plans[2:]] == [[FROM_DEVICE]] * 3
    assert [plan.positions.tolist() for plan in plans[1:]] == [[8, 9], [10], [11], [12]]
    assert [plan.context_lens.tolist() for plan in plans] == [[8], [10], [11], [12], [13]]
    assert bench.said("r") == [101, 102, 103, 104]
    assert bench.finish("r") == ["length"]
    assert bench.core.audit().settled


def test_the_next_chunk_and_the_first_decode_step_do_not_wait_for_the_chunk_before() -> None:
    bench = Overlapped()
    bench.core.submit(request("r", 20), "router", None)
    assert bench.launch().token_ids.tolist() == list(range(10, 18))
    assert bench.launch().token_ids.tolist() == list(range(18, 26))
    bench.land()
    last = bench.launch()
    assert last.token_ids.tolist() == list(range(26, 30))
    assert last.sample.tolist() == [True]
    bench.land()
    assert bench.launch().token_ids.tolist() == [FROM_DEVICE]


def test_a_known_token_is_given_when_there_is_one() -> None:
    bench = Overlapped()
    bench.core.submit(request("r", 4, max_tokens=9), "router", None)
    bench.launch()
    bench.land()
    assert bench.launch().token_ids.tolist() == [101]


def test_nothing_is_planned_behind_the_last_token_of_a_request() -> None:
    bench = Overlapped()
    bench.core.submit(request("r", 4, max_tokens=1), "router", None)
    bench.launch()
    assert bench.plan() is None
    bench.land()
    assert bench.finish("r") == ["length"]
    assert bench.plan() is None


def test_a_stop_makes_the_step_behind_it_void_for_its_sequence_alone() -> None:
    bench = Overlapped()
    bench.core.submit(request("a", 4, max_tokens=9), "router", None)
    bench.core.submit(request("b", 4, start=50, max_tokens=4), "router", None)
    bench.script = [EOS, 200]
    first = bench.launch()
    behind = bench.launch()
    assert behind.token_ids.tolist() == [FROM_DEVICE, FROM_DEVICE]
    pages = behind.block_tables[0].tolist()
    bench.land()
    assert bench.finish("a") == ["stop"]
    assert all(bench.core.page_state(page) is PageState.RUNNING for page in pages)
    assert not bench.core.idle
    third = bench.launch()
    assert third.rows.tolist() == [first.rows[1]]
    assert third.freed_rows == []
    bench.land()
    assert bench.said("a") == [EOS]
    assert [bench.core.page_state(page) for page in pages] == [PageState.CACHED, PageState.FREE]
    assert bench.launch().freed_rows == [first.rows[0]]
    bench.run()
    assert len(bench.said("b")) == 4
    assert bench.core.audit().settled


def test_the_row_of_an_ended_sequence_is_not_given_away_while_a_step_computes_it() -> None:
    bench = Overlapped(max_sequences=1)
    bench.core.submit(request("a", 4, max_tokens=9), "router", None)
    bench.core.submit(request("b", 4, start=50), "router", None)
    bench.script = [EOS]
    bench.launch()
    bench.launch()
    bench.land()
    assert bench.finish("a") == ["stop"]
    assert bench.plan() is None
    bench.land()
    after = bench.launch()
    assert (after.freed_rows, [row.row for row in after.new_rows]) == ([0], [0])
    bench.land()
    bench.run()
    assert len(bench.said("b")) == 3


def test_an_aborted_request_keeps_its_pages_until_both_steps_are_settled() -> None:
    bench = Overlapped()
    bench.core.submit(request("a", 6, max_tokens=9), "router", None)
    bench.launch()
    bench.launch()
    bench.core.abort("a", 0)
    assert bench.core.audit().running == 2
    bench.land()
    assert bench.core.audit().running == 2
    bench.land()
    assert bench.core.audit().settled
    assert bench.said("a") == []


HOST = [
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"logit_bias": {5: 1.0}},
    {"min_tokens": 2},
    {"logprobs": 0},
]


@pytest.mark.parametrize("how", HOST, ids=lambda how: next(iter(how)))
def test_a_sequence_whose_sampling_needs_the_last_token_waits_for_it(how: dict) -> None:
    bench = Overlapped()
    bench.core.submit(request("r", 4, max_tokens=4, **how), "router", None)
    bench.core.submit(request("free", 4, start=50, max_tokens=8), "router", None)
    plans = bench.run()
    row = plans[0].rows[0]
    fed = [plan.token_ids[plan.rows == row][0] for plan in plans[1:] if row in plan.rows]
    assert fed == bench.said("r")[:3]
    assert len(bench.said("free")) == 8
    assert any((plan.token_ids == FROM_DEVICE).any() for plan in plans)


def test_pages_of_a_chunk_are_copied_when_it_is_settled_while_the_next_computes() -> None:
    bench = Overlapped()
    bench.core.submit(request("r", 20, max_tokens=9), "router", "peer")
    bench.launch()
    offer = next(m for m in bench.peer if isinstance(m, wire.Offer))
    bench.core.from_destination(
        "peer", wire.Grant(xfer=offer.xfer, skip_tokens=0, pages=[7, 8, 9, 10, 11], generation=1)
    )
    bench.launch()
    bench.take()
    assert bench.copies == []
    bench.land()
    assert [job.destination_pages for job in bench.copies] == [[7, 8]]
    bench.launch()
    assert bench.plan() is None  # its last chunk is under way, and it goes elsewhere
    bench.land()
    bench.land()
    assert [job.destination_pages for job in bench.copies] == [[7, 8], [9, 10], [11]]
    assert bench.said("r") == [101]


def test_a_failed_step_makes_the_one_behind_it_void() -> None:
    bench = Overlapped(chunk_tokens=16)
    bench.core.submit(request("a", 4, max_tokens=6), "router", None)
    bench.core.submit(request("b", 24, start=50, max_tokens=6), "router", None)
    first = bench.launch()
    bench.launch()
    bench.core.step_failed(first, "once")
    bench.under_way.clear()
    assert bench.core.audit().problems == []
    alone = bench.launch()
    assert alone.token_ids.tolist() == [10, 11, 12, 13]
    assert bench.plan() is None  # nothing beside a step that may fail
    bench.land()
    chunk = bench.launch()
    assert chunk.token_ids.tolist() == list(range(50, 62))
    bench.land()
    bench.run()
    assert [len(bench.said(name)) for name in "ab"] == [6, 6]
    assert [t.index for t in bench.tokens if t.request == "a"] == list(range(6))
    assert bench.core.audit().settled


def test_rows_of_both_void_steps_are_told_again() -> None:
    bench = Overlapped(chunk_tokens=8)
    bench.core.submit(request("a", 8, max_tokens=6), "router", None)
    bench.core.submit(request("b", 4, start=50), "router", None)
    first = bench.launch()
    second = bench.launch()
    assert [len(plan.new_rows) for plan in (first, second)] == [1, 1]
    bench.core.step_failed(first, "once")
    assert sorted(new.row for new in bench.launch().new_rows) == [0, 1]


def test_pages_are_not_taken_from_what_is_being_computed() -> None:
    bench = Overlapped(7)
    bench.core.submit(request("old", 7, max_tokens=9), "router", None)
    bench.core.submit(request("young", 7, start=50, max_tokens=9), "router", None)
    bench.run()
    assert bench.core.preemptions > 0
    assert [len(bench.said(name)) for name in ("old", "young")] == [9, 9]
    assert bench.core.audit().settled


def test_a_sequence_without_finite_logits_fails_with_a_step_behind_it() -> None:
    bench = Overlapped()
    bench.core.submit(request("bad", 4, max_tokens=6), "router", None)
    bench.core.submit(request("good", 4, start=50, max_tokens=6), "router", None)
    first, _ = bench.launch(), bench.launch()
    bench.under_way.popleft()
    bench.core.settle(first, StepOutcome(first.step, np.array([-1, 200]), [None, None]))
    bench.take()
    assert [m.request for m in bench.others if isinstance(m, wire.Failed)] == ["bad"]
    bench.run()
    assert bench.said("bad") == []
    assert len(bench.said("good")) == 6
    assert bench.core.audit().settled
