"""Who computes next and who gets pages: order, preemption, head-room, patience."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import ToPeer, ToRouter
from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.engine.scheduler import LOOKAHEAD, PATIENCE, Scheduler
from slipstream.kv.layout import KVLayout
from slipstream.transfer.protocol import DestinationHandoff
from slipstream.types import Request, SamplingParams, Tokens

LAYOUT = KVLayout(page_tokens=4, layers=1, kv_heads=1, head_dim=4, dtype="float32", total_kv_heads=1)


class Bench:
    """One core whose model always says 7."""

    def __init__(self, pages: int, headroom: int = 0, **settings: object) -> None:
        numbers = {"chunk_tokens": 16, "max_sequences": 8, "max_model_len": 256, "prefix_cache": False, **settings}
        self.core = EngineCore(LAYOUT, pages, EngineConfig(**numbers), (), headroom_tokens=headroom)  # type: ignore[arg-type]
        self.tokens: list[Tokens] = []
        self.peer: list[wire.Message] = []
        self.failed: list[wire.Failed] = []

    def submit(self, name: str, prompt: int, max_tokens: int, **how) -> None:
        decode_at, priority = how.pop("decode_at", None), how.pop("priority", 0)
        request = Request(
            id=name, prompt_ids=[3] * prompt, sampling=SamplingParams(max_tokens=max_tokens), priority=priority
        )
        self.core.submit(request, "router", decode_at)

    def offer(self, xfer: int, prompt: int, max_tokens: int, **how) -> None:
        self.core.from_source("peer", wire.Offer(
            xfer=xfer, request=f"x{xfer}", attempt=0, prompt_len=prompt, block_keys=[], pages_needed=-(-prompt // 4),
            max_tokens=max_tokens, **how,
        ))  # fmt: skip

    def commit(self, grant: wire.Grant, prompt: int, max_tokens: int) -> None:
        request = Request(
            id=f"x{grant.xfer}", prompt_ids=[3] * prompt, output_ids=[7], sampling=SamplingParams(max_tokens=max_tokens)
        )
        self.core.from_source("peer", wire.Commit(
            xfer=grant.xfer, generation=grant.generation, request=request, router="router", cached_tokens=0
        ))  # fmt: skip

    def take(self) -> None:
        for effect in self.core.take_effects():
            match effect:
                case ToRouter(_, wire.StepOutput(tokens=tokens)):
                    self.tokens += tokens
                case ToRouter(_, wire.Failed() as failed):
                    self.failed.append(failed)
                case ToPeer(_, _, message):
                    self.peer.append(message)

    def step(self) -> StepPlan | None:
        plan = self.core.schedule()
        self.take()
        if plan is not None:
            outcome = StepOutcome(plan.step, np.where(plan.sample, 7, -1), [None] * plan.sequences)
            self.core.settle(plan, outcome)
            self.take()
            assert self.core.audit().problems == []
        return plan

    def run(self, most: int = 2000) -> int:
        for steps in range(most):
            if self.step() is None:
                return steps
        raise AssertionError(f"not done after {most} steps")

    def finished(self) -> list[str]:
        return [t.request for t in self.tokens if t.finish]

    def granted(self) -> list[int]:
        return [m.xfer for m in self.peer if isinstance(m, wire.Grant)]

    def grant(self, xfer: int) -> wire.Grant:
        return next(m for m in self.peer if isinstance(m, wire.Grant) and m.xfer == xfer)


# --------------------------------------------------------------------------------------------------- order and budget


def test_decoding_comes_first_and_prompts_get_what_is_left_of_the_budget() -> None:
    bench = Bench(100, chunk_tokens=8)
    bench.submit("a", 4, 50)
    bench.submit("b", 4, 50)
    bench.step()
    bench.submit("long", 40, 5)
    plan = bench.step()
    assert plan is not None
    assert np.diff(plan.query_start).tolist() == [1, 1, 6]


def test_a_prompt_beside_which_others_decode_moves_in_smaller_chunks() -> None:
    bench = Bench(100, chunk_tokens=32, mixed_chunk_tokens=6)
    bench.submit("a", 4, 50)
    plan = bench.step()
    assert plan is not None
    assert np.diff(plan.query_start).tolist() == [4]
    bench.submit("long", 70, 5)
    plan = bench.step()
    assert plan is not None
    assert np.diff(plan.query_start).tolist() == [1, 5]
    bench.core.abort("a", 0)
    plan = bench.step()
    assert plan is not None
    assert np.diff(plan.query_start).tolist() == [32]


def test_prompts_still_move_where_decoding_fills_the_budget() -> None:
    bench = Bench(200, chunk_tokens=4, max_sequences=8)
    for i in range(6):
        bench.submit(f"r{i}", 2, 60)
    for _ in range(8):
        bench.step()
    bench.submit("late", 12, 3)
    plan = bench.step()
    assert plan is not None
    assert np.diff(plan.query_start).tolist() == [1] * 6 + [4]
    assert len(plan.token_ids) <= bench.core.step_tokens


def test_higher_priority_is_served_first_then_the_earlier() -> None:
    bench = Bench(100, max_sequences=1)
    bench.submit("first", 4, 2)
    bench.step()
    for name, priority in (("later", 0), ("low", 5), ("high", -1)):
        bench.submit(name, 4, 2, priority=priority)
    bench.run()
    assert bench.finished() == ["first", "high", "later", "low"]


def test_no_more_sequences_run_than_there_are_rows() -> None:
    bench = Bench(200, max_sequences=3)
    for i in range(7):
        bench.submit(f"r{i}", 4, 5)
    most = 0
    while (plan := bench.step()) is not None:
        most = max(most, plan.sequences)
    assert most == 3
    assert len(bench.finished()) == 7


def test_several_prompts_share_one_step() -> None:
    bench = Bench(100)
    for i in range(4):
        bench.submit(f"r{i}", 5, 2)
    plan = bench.step()
    assert plan is not None
    assert np.diff(plan.query_start).tolist() == [5, 5, 5, 1]


# ----------------------------------------------------------------------------------------------------- preemption


def test_the_youngest_gives_way_and_goes_on_without_repeating_a_token() -> None:
    bench = Bench(9)
    bench.submit("old", 8, 12)
    bench.submit("young", 8, 12)
    bench.run()
    assert bench.core.preemptions > 0
    assert bench.finished() == ["old", "young"]
    for name in ("old", "young"):
        assert [t.index for t in bench.tokens if t.request == name] == list(range(12))


def test_a_request_of_low_priority_gives_way_even_if_it_is_older() -> None:
    bench = Bench(9)
    bench.submit("background", 8, 12, priority=9)
    bench.submit("urgent", 8, 12)
    bench.run()
    assert bench.finished() == ["urgent", "background"]


def test_nobody_is_preempted_while_a_peer_has_granted_pages_for_it() -> None:
    bench = Bench(8)
    bench.submit("local", 8, 20)
    bench.submit("away", 8, 20, decode_at="decode")
    bench.step()
    bench.core.from_destination("decode", wire.Grant(xfer=1, skip_tokens=0, pages=[1, 2], generation=1))
    for _ in range(20):
        bench.step()
    assert bench.core.preemptions == 0
    assert len([t for t in bench.tokens if t.request == "local"]) == 13  # it has paused for want of a page
    bench.core.copies_done("decode", 1, 2)
    bench.core.from_destination("decode", wire.Accepted(xfer=1))
    bench.run()
    assert bench.finished() == ["local"]


def test_one_that_needs_a_page_gives_way_to_an_older_one_that_needs_its_row() -> None:
    """With one row there is nobody else: an older sequence has come with the last pages, and waits for the row."""
    bench = Bench(8, max_sequences=1)
    bench.offer(1, 12, 8)
    bench.step()
    bench.submit("here", 12, 16)
    for _ in range(5):
        bench.step()
    assert bench.tokens, "it decodes beside the grant"
    bench.commit(bench.grant(1), 12, 8)
    bench.run()
    assert bench.finished() == ["x1", "here"]
    assert [t.index for t in bench.tokens if t.request == "here"] == list(range(16))
    assert bench.core.audit().settled


def test_one_that_waits_for_a_grant_gives_way_and_offers_again() -> None:
    bench = Bench(8)
    bench.submit("local", 8, 20)
    bench.submit("away", 8, 20, decode_at="decode")
    bench.run()
    assert bench.core.preemptions == 1
    assert [type(m).__name__ for m in bench.peer] == ["Offer", "Cancel", "Offer"]
    again = bench.peer[-1]
    assert isinstance(again, wire.Offer)
    assert (again.prompt_len, again.max_tokens) == (9, 19)
    assert [t.index for t in bench.tokens if t.request == "away"] == [0, 1]


@pytest.mark.parametrize("requests", [3, 6, 12])
def test_a_pool_that_holds_hardly_one_request_serves_many_one_behind_the_other(requests: int) -> None:
    bench = Bench(7)
    for i in range(requests):
        bench.submit(f"r{i}", 6, 18)
    bench.run()
    assert sorted(bench.finished()) == sorted(f"r{i}" for i in range(requests))
    assert bench.core.audit().settled


def test_headroom_keeps_preemption_rare() -> None:
    counts = []
    for headroom in (0, 16):
        bench = Bench(24, headroom)
        for i in range(12):
            bench.submit(f"r{i}", 8, 24)
        bench.run(5000)
        assert len(bench.finished()) == 12
        counts.append(bench.core.preemptions)
    assert counts[1] < counts[0] / 2


# ------------------------------------------------------------------------------------------------------- admission


def test_a_grant_leaves_headroom_for_the_growth_of_what_runs() -> None:
    bench = Bench(10, headroom=16)
    bench.submit("local", 8, 16)  # 2 pages now, 6 in the end
    bench.step()
    bench.offer(1, 16, 2)  # 4 pages: would fit into the 7 that are free, but not beside the 4 to come
    bench.step()
    assert bench.granted() == []
    assert [type(m).__name__ for m in bench.peer] == ["Defer"]
    bench.run()
    assert bench.granted() == [1]


def test_headroom_is_kept_for_granted_requests_too() -> None:
    bench = Bench(10, headroom=16)
    bench.offer(1, 8, 16)
    bench.step()
    bench.offer(2, 16, 2)
    bench.step()
    assert bench.granted() == [1]


def test_when_nothing_else_is_here_a_request_only_has_to_fit() -> None:
    bench = Bench(6, headroom=64)
    bench.submit("local", 8, 12)
    bench.run()
    bench.offer(1, 8, 12)
    bench.step()
    assert bench.finished() == ["local"]
    assert bench.granted() == [1]


def test_all_prompts_that_have_room_begin_in_one_step() -> None:
    bench = Bench(100, chunk_tokens=80, max_sequences=20)
    for i in range(24):
        bench.submit(f"r{i}", 4, 2)
    plan = bench.step()
    assert plan is not None
    assert plan.sequences == 20


def test_all_offers_that_have_room_are_granted_in_one_go() -> None:
    bench = Bench(100, max_sequences=40)
    for xfer in range(3 * LOOKAHEAD):
        bench.offer(xfer, 8, 4)
    bench.step()
    assert bench.granted() == list(range(3 * LOOKAHEAD))
    assert not any(isinstance(message, wire.Defer) for message in bench.peer)


def test_claims_without_room_do_not_keep_those_of_the_other_kind_from_being_looked_at() -> None:
    bench = Bench(100, max_sequences=2)
    for i in range(3 * LOOKAHEAD):
        bench.submit(f"r{i}", 16, 4)
    bench.offer(1, 8, 4)
    bench.step()
    assert bench.granted() == [1]


def test_a_small_offer_passes_a_large_one_that_does_not_fit() -> None:
    bench = Bench(10)
    bench.submit("local", 16, 20)
    bench.step()
    bench.offer(1, 28, 2)
    bench.offer(2, 8, 2)
    bench.step()
    assert bench.granted() == [2]


def test_small_offers_do_not_starve_a_large_one() -> None:
    bench = Bench(16)
    bench.offer(0, 8, 4)
    bench.step()
    bench.offer(1, 56, 4)  # needs nearly everything
    small = 2
    for _ in range(PATIENCE * 4):
        if 1 in bench.granted():
            break
        for xfer in [x for x in bench.granted() if x != 1]:
            bench.commit(bench.grant(xfer), 8, 4)
        bench.offer(small, 8, 4)
        small += 1
        bench.step()
    assert 1 in bench.granted()
    assert PATIENCE <= len(bench.granted()) <= PATIENCE + 3


def test_a_large_local_request_is_not_starved_by_offers_either() -> None:
    bench = Bench(16)
    bench.offer(0, 8, 4)
    bench.step()
    bench.submit("large", 56, 4)
    for xfer in range(1, PATIENCE * 4):
        for done in bench.granted():
            bench.commit(bench.grant(done), 8, 4)
        bench.offer(xfer, 8, 4)
        bench.step()
    assert "large" in bench.finished()


def test_offers_and_waiting_requests_are_served_in_the_order_of_their_arrival() -> None:
    bench = Bench(8)
    bench.submit("running", 20, 8)
    bench.step()
    bench.step()
    bench.offer(1, 20, 8)
    bench.submit("second", 20, 8)
    while not bench.granted():
        bench.step()
    assert bench.finished() == ["running"]
    bench.commit(bench.grant(1), 20, 8)
    bench.run()
    assert bench.finished() == ["running", "x1", "second"]


def test_an_offer_of_higher_priority_is_granted_first() -> None:
    bench = Bench(8)
    bench.submit("running", 20, 8)
    bench.step()
    bench.offer(1, 20, 8)
    bench.offer(2, 20, 8, priority=-1)
    bench.run()
    assert bench.granted() == [2]


def test_no_more_is_granted_than_rows_will_be_free_for() -> None:
    bench = Bench(400, max_sequences=4)
    for xfer in range(20):
        bench.offer(xfer, 4, 8)
    bench.step()
    assert len(bench.granted()) == 6


def test_two_workers_full_of_requests_for_each_other_do_not_wait_for_ever() -> None:
    bench = Bench(8)
    bench.submit("away1", 12, 9, decode_at="peer")
    bench.submit("away2", 12, 9, decode_at="peer")
    bench.run()
    assert bench.core.status().handing_off == 2
    bench.offer(1, 20, 4)
    bench.step()
    assert bench.granted() == [1]
    assert [m.xfer for m in bench.peer if isinstance(m, wire.Cancel)] == [2, 1]


def test_one_that_fills_the_pool_and_loses_its_pages_is_failed_and_not_kept_waiting_for_ever() -> None:
    bench = Bench(4)
    bench.submit("away", 12, 9, decode_at="peer")
    bench.run()
    bench.offer(1, 8, 2)
    bench.run()
    assert bench.granted() == [1]
    (failed,) = bench.failed
    assert (failed.request, failed.code, failed.retriable) == ("away", "engine_failure", True)
    assert "13 tokens have to be computed again, this worker has KV pages for 12" in failed.message


def test_a_step_does_not_cost_more_because_many_wait() -> None:
    """What is looked at in a step is bounded, whatever waits: counted, not timed."""
    looks = []
    for waiting in (20, 1000):
        bench = Bench(12)
        bench.submit("running", 20, 20)
        for i in range(waiting):
            bench.submit(f"w{i}", 30, 10)
        bench.step()
        bench.step()
        count = 0
        honest = bench.core._admission.attempt

        def counting(claim, honest=honest):
            nonlocal count
            count += 1
            return honest(claim)

        bench.core._admission.attempt = counting  # type: ignore[method-assign]
        for _ in range(10):
            bench.step()
        looks.append(count)
    assert looks[0] == looks[1]
    assert looks[1] <= 20


def test_nor_because_many_offers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those for which there is no seat only the first are looked at, and each is told to wait once."""
    seen, told = [], []
    claims, defer = Scheduler.claims, DestinationHandoff.defer
    monkeypatch.setattr(Scheduler, "claims", lambda *which: (seen.append(claim) or claim for claim in claims(*which)))
    monkeypatch.setattr(DestinationHandoff, "defer", lambda handoff: (told.append(handoff), defer(handoff))[1])
    looks = []
    for offers in (20, 1000):
        bench = Bench(400, max_sequences=2)
        for xfer in range(offers):
            bench.offer(xfer, 8, 8)
        bench.step()
        waiting = [message for message in bench.peer if isinstance(message, wire.Defer)]
        assert len(waiting) == offers - len(bench.granted())
        seen.clear()
        told.clear()
        for _ in range(10):
            bench.core.answer_offers()
        looks.append(len(seen))
        assert not told
    assert looks[0] == looks[1]


def test_an_offer_that_is_withdrawn_or_granted_before_it_was_told_to_wait_is_not() -> None:
    bench = Bench(400)
    bench.offer(1, 8, 8)
    bench.core.from_source("peer", wire.Cancel(xfer=1, code="client_closed_request"))
    bench.offer(2, 8, 8)
    bench.step()
    assert bench.granted() == [2]
    assert len(bench.peer) == 1
