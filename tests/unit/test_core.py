"""The engine core: what a worker says and asks for during the life of a request, alone and in a pair."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import CopyPages, ToPeer, ToRouter
from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.engine.scheduler import PATIENCE
from slipstream.kv.layout import KVLayout
from slipstream.kv.prefix import block_keys, root_key
from slipstream.types import Logprob, Request, SamplingParams, Tokens

LAYOUT = KVLayout(page_tokens=4, layers=1, kv_heads=1, head_dim=4, dtype="float32", total_kv_heads=1, model="m")
EOS = 2


class Bench:
    """One core, driven by hand; every sampled token is the next of `script`, or 100 and up."""

    def __init__(
        self, pages: int = 33, eos: tuple[int, ...] = (EOS,), layout: KVLayout = LAYOUT, **settings: object
    ) -> None:
        numbers = {"chunk_tokens": 8, "max_sequences": 4, "max_model_len": 64, **settings}
        self.core = EngineCore(layout, pages, EngineConfig(**numbers), eos, headroom_tokens=4)  # type: ignore[arg-type]
        self.script: list[int] = []
        self.next_token = 100
        self.tokens: list[Tokens] = []
        self.others: list[wire.Message] = []  # what routers were told besides tokens
        self.peer: list[wire.Message] = []
        self.copies: list[CopyPages] = []
        self.batches: list[list[Tokens]] = []

    def take(self) -> None:
        for effect in self.core.take_effects():
            match effect:
                case ToRouter(_, wire.StepOutput(tokens=tokens)):
                    self.tokens += tokens
                    self.batches.append(tokens)
                case ToRouter(_, message):
                    self.others.append(message)
                case ToPeer(_, _, message):
                    self.peer.append(message)
                case CopyPages():
                    self.copies.append(effect)

    def plan(self) -> StepPlan | None:
        plan = self.core.schedule()
        self.take()
        return plan

    def settle(self, plan: StepPlan) -> None:
        sampled, logprobs = [], []
        for wanted in plan.sample.tolist():
            token = (self.script.pop(0) if self.script else self._invent()) if wanted else -1
            sampled.append(token)
            logprobs.append(Logprob(-float(token)) if wanted else None)
        asked = {i: [Logprob(float(t)) if t >= 0 else None for t in c] for i, c in plan.prompt_logprobs.items()}
        self.core.settle(plan, StepOutcome(plan.step, np.asarray(sampled), logprobs, asked))
        self.take()
        assert self.core.audit().problems == []

    def _invent(self) -> int:
        self.next_token += 1
        return self.next_token

    def step(self) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.settle(plan)
        return plan

    def run(self) -> list[StepPlan]:
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
        return plans

    def said(self, name: str) -> list[int]:
        return [token for t in self.tokens if t.request == name for token in t.token_ids]

    def finish(self, name: str) -> list[str | None]:
        return [t.finish for t in self.tokens if t.request == name and t.finish is not None]


def request(name: str = "r", prompt: int = 10, *, start: int = 10, outputs: list[int] | None = None, **how) -> Request:
    attempt, priority, salt = how.pop("attempt", 0), how.pop("priority", 0), how.pop("cache_salt", "")
    sampling = SamplingParams(**{"max_tokens": 3, **how})
    prompt_ids = list(range(start, start + prompt))
    return Request(
        id=name, prompt_ids=prompt_ids, sampling=sampling, output_ids=outputs or [], attempt=attempt,
        priority=priority, cache_salt=salt,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- a local request


def test_a_prompt_is_cut_into_chunks_and_then_decoded_token_by_token() -> None:
    bench = Bench()
    bench.core.submit(request(), "router", None)
    plans = bench.run()
    assert [len(p.token_ids) for p in plans] == [8, 2, 1, 1]
    assert [p.sample.tolist() for p in plans] == [[False], [True], [True], [True]]
    assert plans[1].positions.tolist() == [8, 9]
    assert plans[1].context_lens.tolist() == [10]
    assert plans[2].token_ids.tolist() == [101]
    assert plans[2].positions.tolist() == [10]
    assert bench.said("r") == [101, 102, 103]
    assert [t.index for t in bench.tokens] == [0, 1, 2]
    assert bench.finish("r") == ["length"]
    assert bench.core.idle
    assert bench.core.audit().settled


def test_a_row_is_announced_once_and_freed_with_the_next_plan() -> None:
    bench = Bench()
    bench.core.submit(request("a", max_tokens=1), "router", None)
    bench.core.submit(request("b", 4, start=50), "router", None)
    plans = bench.run()
    new = [[row.row for row in plan.new_rows] for plan in plans]
    assert new == [[0], [1], [], []]
    assert [plan.freed_rows for plan in plans] == [[], [], [0], []]
    assert plans[0].new_rows[0].eos_ids == (EOS,)


def test_columns_of_a_mixed_step_fit_together() -> None:
    bench = Bench()
    bench.core.submit(request("a", 4, max_tokens=9), "router", None)
    bench.step()
    bench.core.submit(request("b", 6, start=50), "router", None)
    plan = bench.plan()
    assert plan is not None
    assert plan.query_start.tolist() == [0, 1, 7]
    assert plan.token_ids.tolist() == [101, 50, 51, 52, 53, 54, 55]
    assert plan.positions.tolist() == [4, 0, 1, 2, 3, 4, 5]
    assert plan.context_lens.tolist() == [5, 6]
    assert plan.block_tables.shape == (2, 2)
    assert len(set(plan.block_tables.ravel().tolist())) == 4
    assert 0 not in plan.block_tables


def test_pages_of_later_chunks_are_not_in_the_table_yet() -> None:
    bench = Bench()
    bench.core.submit(request("a", 4, max_tokens=30), "router", None)
    for _ in range(14):
        bench.step()
    bench.core.submit(request("b", 16, start=50), "router", None)
    plan = bench.plan()
    assert plan is not None
    assert plan.context_lens.tolist() == [18, 7]
    assert (plan.block_tables[1] != 0).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("how", "script", "said", "finish", "stop"),
    [
        ({"max_tokens": 5}, [7, EOS], [7, EOS], "stop", EOS),
        ({"max_tokens": 5, "ignore_eos": True}, [7, EOS, 8, 9, 9], [7, EOS, 8, 9, 9], "length", None),
        ({"max_tokens": 5, "min_tokens": 2}, [EOS, EOS, EOS], [EOS, EOS, EOS], "stop", EOS),
        ({"max_tokens": 5, "stop_token_ids": (9,)}, [7, 9], [7, 9], "stop", 9),
        ({"max_tokens": 2, "stop_token_ids": (9,)}, [7, 9], [7, 9], "stop", 9),
        ({"max_tokens": 1}, [7], [7], "length", None),
    ],
)
def test_a_request_ends_where_it_should(how: dict, script: list, said: list, finish: str, stop: int | None) -> None:
    bench = Bench()
    bench.script = script
    bench.core.submit(request(**how), "router", None)
    bench.run()
    assert bench.said("r") == said
    assert bench.finish("r") == [finish]
    assert bench.tokens[-1].stop_token == stop


def test_the_models_context_ends_a_request() -> None:
    bench = Bench(max_model_len=12)
    bench.core.submit(request(prompt=10, max_tokens=50), "router", None)
    bench.run()
    assert bench.said("r") == [101, 102]
    assert bench.finish("r") == ["length"]


def test_tokens_of_one_step_go_to_each_router_as_one_message() -> None:
    bench = Bench()
    for i, router in enumerate(("east", "east", "west")):
        bench.core.submit(request(f"r{i}", 2, start=20 * i + 10, max_tokens=1), router, None)
    bench.step()
    assert [[t.request for t in batch] for batch in bench.batches] == [["r0", "r1"], ["r2"]]


def test_logprobs_come_with_each_token() -> None:
    bench = Bench()
    bench.core.submit(request(logprobs=0), "router", None)
    bench.run()
    assert [t.logprobs for t in bench.tokens] == [[Logprob(-101.0)], [Logprob(-102.0)], [Logprob(-103.0)]]


def test_prompt_logprobs_cover_every_prompt_token_but_the_first_and_ignore_the_cache() -> None:
    bench = Bench()
    bench.core.submit(request("warm"), "router", None)
    bench.run()
    bench.core.submit(request("r", prompt_logprobs=0), "router", None)
    plans = bench.run()
    assert len(plans[0].token_ids) == 8
    first, *rest = [t for t in bench.tokens if t.request == "r"]
    assert first.cached_tokens == 0
    assert first.prompt_logprobs == [None] + [Logprob(float(t)) for t in range(11, 20)]
    assert all(t.prompt_logprobs is None for t in rest)


def test_penalized_requests_bring_their_tokens_to_the_runner_and_others_do_not() -> None:
    bench = Bench()
    bench.core.submit(request("a", 3, outputs=[70], presence_penalty=1.0), "router", None)
    bench.core.submit(request("b", 3, outputs=[70]), "router", None)
    plan = bench.plan()
    assert plan is not None
    penalized, plain = plan.new_rows
    assert (penalized.prompt_ids, penalized.output_ids, penalized.outputs) == ([10, 11, 12], [70], 1)
    assert (plain.prompt_ids, plain.output_ids, plain.outputs) == ([], [], 1)


# -------------------------------------------------------------------------------------------------------- prefixes


def test_a_second_turn_finds_prompt_and_answer_of_the_first() -> None:
    bench = Bench()
    bench.core.submit(request("one", 10, max_tokens=7), "router", None)
    bench.run()
    history = list(range(10, 20)) + bench.said("one")
    turn = Request(id="two", prompt_ids=history + [90, 91], sampling=SamplingParams(max_tokens=1))
    bench.core.submit(turn, "router", None)
    plan = bench.step()
    assert plan is not None
    assert plan.positions.tolist() == [16, 17, 18]
    assert bench.tokens[-1].cached_tokens == 16


def test_a_hit_never_covers_the_whole_prompt() -> None:
    bench = Bench()
    bench.core.submit(request("one", 8, max_tokens=1), "router", None)
    bench.run()
    bench.core.submit(request("two", 8, max_tokens=1), "router", None)
    plan = bench.step()
    assert plan is not None
    assert plan.positions.tolist() == [4, 5, 6, 7]
    assert bench.tokens[-1].cached_tokens == 4


@pytest.mark.parametrize(("settings", "how"), [({"prefix_cache": False}, {}), ({}, {"cache_salt": "mine"})])
def test_without_cache_or_with_another_salt_nothing_is_shared(settings: dict, how: dict) -> None:
    bench = Bench(**settings)
    bench.core.submit(request("one"), "router", None)
    bench.run()
    bench.core.submit(request("two", **how), "router", None)
    bench.run()
    assert [t.cached_tokens for t in bench.tokens if t.cached_tokens is not None] == [0, 0]


def test_status_tells_the_keys_that_the_router_would_compute() -> None:
    bench = Bench()
    bench.core.submit(request(prompt=10, max_tokens=1), "router", None)
    bench.run()
    status = bench.core.status()
    keys = block_keys(list(range(10, 20)), 4, root_key(LAYOUT.fingerprint))
    assert sorted(status.added) == sorted(keys)
    assert bench.core.status().added == []
    full = bench.core.status_for_new_router()
    assert full.reset
    assert sorted(full.added) == sorted(keys)
    assert (status.pages_total, status.pages_free + status.pages_cached) == (32, 32)


# --------------------------------------------------------------------------------------- refusals and other endings


def refused(bench: Bench) -> wire.Failed:
    bench.take()
    (failed,) = bench.others
    assert isinstance(failed, wire.Failed)
    return failed


def test_a_request_that_can_never_fit_fails_at_once_with_numbers() -> None:
    bench = Bench(pages=5)
    bench.core.submit(request(prompt=10, max_tokens=20), "router", None)
    failed = refused(bench)
    assert (failed.code, failed.retriable) == ("context_length_exceeded", False)
    assert "8 KV pages of 4 tokens" in failed.message
    assert "has 4" in failed.message
    assert bench.core.idle


def test_a_prompt_beyond_the_context_fails_at_once() -> None:
    bench = Bench(max_model_len=10)
    bench.core.submit(request(prompt=10), "router", None)
    assert refused(bench).code == "context_length_exceeded"


def test_an_empty_prompt_fails() -> None:
    bench = Bench()
    bench.core.submit(request(prompt=0), "router", None)
    assert refused(bench).code == "invalid_value"


def test_a_full_queue_is_said() -> None:
    bench = Bench(max_waiting=2)
    for i in range(3):
        bench.core.submit(request(f"r{i}"), "router", None)
    failed = refused(bench)
    assert (failed.request, failed.code, failed.retriable) == ("r2", "queue_full", True)


def test_a_draining_worker_finishes_what_it_has_and_takes_no_more() -> None:
    bench = Bench()
    bench.core.submit(request("a"), "router", None)
    bench.core.drain()
    bench.core.submit(request("b"), "router", None)
    bench.run()
    assert bench.finish("a") == ["length"]
    assert [m.code for m in bench.others if isinstance(m, wire.Failed)] == ["no_workers"]
    assert bench.core.status().draining


def test_an_aborted_request_gets_no_answer() -> None:
    bench = Bench()
    bench.core.submit(request("a", max_tokens=9), "router", None)
    bench.core.submit(request("b", max_tokens=9), "router", None)
    bench.step()
    bench.core.abort("a", 0)
    bench.core.abort("b", 0)
    assert bench.run() == []
    assert bench.finish("a") == []
    assert bench.others == []
    assert bench.core.audit().settled


def test_an_abort_of_an_earlier_attempt_is_ignored() -> None:
    bench = Bench()
    bench.core.submit(request("a", attempt=1), "router", None)
    bench.core.abort("a", 0)
    bench.run()
    assert bench.finish("a") == ["length"]


def test_pages_of_a_request_that_ends_during_its_step_stay_until_it_is_settled() -> None:
    bench = Bench()
    bench.core.submit(request("a"), "router", None)
    plan = bench.plan()
    assert plan is not None
    bench.core.abort("a", 0)
    audit = bench.core.audit()
    assert (audit.running, audit.problems) == (3, [])
    assert not bench.core.idle
    bench.settle(plan)
    assert bench.core.audit().settled
    assert bench.tokens == []


def test_a_lost_router_takes_its_requests_with_it() -> None:
    bench = Bench()
    bench.core.submit(request("a"), "east", None)
    bench.core.submit(request("b"), "west", None)
    bench.step()
    bench.core.router_lost("east")
    bench.run()
    assert bench.finish("b") == ["length"]
    assert bench.said("a") == []
    assert bench.core.idle


def test_a_request_that_fails_twice_has_failed_and_rows_of_others_are_repeated() -> None:
    bench = Bench(max_sequences=2)
    bench.core.submit(request("a"), "router", None)
    plan = bench.plan()
    assert plan is not None
    bench.core.submit(request("b"), "router", None)
    bench.core.step_failed(plan, "out of memory")
    again = bench.plan()
    assert again is not None
    assert again.token_ids.tolist() == plan.token_ids.tolist()
    bench.core.step_failed(again, "out of memory")
    bench.run()
    failed = bench.others[0]
    assert isinstance(failed, wire.Failed)
    assert (failed.request, failed.code, failed.message, failed.retriable) == (
        "a", "engine_failure", "out of memory", False,
    )  # fmt: skip
    assert bench.finish("b") == ["length"]
    assert bench.core.audit().settled


def run_with_poison(bench: Bench, poison: int) -> list[list[int]]:
    """Runs all; a step that holds the token `poison` fails. Returns the tokens of each step."""
    steps = []
    while (plan := bench.plan()) is not None:
        steps.append(plan.token_ids.tolist())
        if poison in plan.token_ids:
            bench.core.step_failed(plan, "poisoned")
            bench.take()
            assert bench.core.audit().problems == []
        else:
            bench.settle(plan)
    return steps


def test_of_a_failed_step_only_the_request_that_fails_alone_has_failed() -> None:
    bench = Bench(chunk_tokens=16, max_sequences=4)
    for name, start in (("a", 20), ("bad", 40), ("c", 60)):
        bench.core.submit(request(name, 4, start=start, max_tokens=6), "router", None)
    steps = run_with_poison(bench, 43)
    assert [len(tokens) for tokens in steps[:4]] == [12, 4, 4, 4]  # all, then each by itself
    assert [(m.request, m.retriable) for m in bench.others if isinstance(m, wire.Failed)] == [("bad", False)]
    assert (bench.finish("a"), bench.finish("c")) == (["length"], ["length"])
    assert [len(bench.said(name)) for name in ("a", "c")] == [6, 6]
    assert bench.core.audit().settled


def test_a_failed_step_of_decoding_requests_costs_the_others_nothing() -> None:
    bench = Bench(chunk_tokens=16)
    for name, start in (("a", 20), ("bad", 40), ("c", 60)):
        bench.core.submit(request(name, 4, start=start, max_tokens=6), "router", None)
    bench.script = [200, 201, 202, 203, 666, 205]  # the second token of `bad` is what the runner cannot compute
    run_with_poison(bench, 666)
    assert [m.request for m in bench.others if isinstance(m, wire.Failed)] == ["bad"]
    assert bench.said("a")[:2] == [200, 203]
    assert [len(set(bench.said(name))) for name in ("a", "c")] == [6, 6]
    assert bench.core.audit().settled


def test_a_runner_hears_again_of_all_rows_of_a_failed_step() -> None:
    bench = Bench()
    bench.core.submit(request("a", 4, presence_penalty=1.0), "router", None)
    bench.core.submit(request("b", 4, start=50), "router", None)
    bench.step()
    plan = bench.plan()
    assert plan is not None
    assert plan.new_rows == []
    bench.core.step_failed(plan, "once")
    again = bench.plan()
    assert again is not None
    assert sorted(row.row for row in again.new_rows) == [0, 1]
    assert again.new_rows[0].output_ids == [101]


def test_a_request_that_is_aborted_after_a_failed_step_is_not_tried_again() -> None:
    bench = Bench(chunk_tokens=16)
    for name, start in (("a", 20), ("b", 40)):
        bench.core.submit(request(name, 4, start=start), "router", None)
    plan = bench.plan()
    assert plan is not None
    bench.core.step_failed(plan, "once")
    bench.core.abort("a", 0)
    alone = bench.plan()
    assert alone is not None
    assert alone.token_ids.tolist() == [40, 41, 42, 43]
    assert alone.freed_rows == [plan.rows[0]]  # the runner may have heard of it
    bench.settle(alone)
    bench.run()
    assert bench.said("a") == []
    assert bench.finish("b") == ["length"]
    assert bench.core.audit().settled


def test_a_request_without_finite_logits_fails_and_the_others_of_its_step_go_on() -> None:
    bench = Bench(chunk_tokens=16)
    for name, start in (("a", 20), ("bad", 40), ("c", 60)):
        bench.core.submit(request(name, 4, start=start), "router", None)
    bench.script = [200, -1, 202]
    bench.run()
    (failed,) = [m for m in bench.others if isinstance(m, wire.Failed)]
    assert (failed.request, failed.code, failed.retriable) == ("bad", "engine_failure", False)
    assert "not finite" in failed.message
    assert (bench.finish("a"), bench.said("bad"), bench.finish("c")) == (["length"], [], ["length"])
    assert bench.core.audit().settled


@pytest.mark.parametrize(("vocab", "token"), [(50, 50), (50, -1), (None, 1 << 31), (None, 1 << 63), (50, 1 << 80)])
@pytest.mark.parametrize("where", ["prompt_ids", "output_ids"])
def test_token_ids_that_the_model_does_not_have_are_refused(vocab: int | None, token: int, where: str) -> None:
    bench = Bench()
    bench.core = EngineCore(LAYOUT, 33, EngineConfig(max_model_len=64), (EOS,), vocab=vocab)
    bench.core.submit(msgspec.structs.replace(request(), **{where: [7] * 8 + [token]}), "router", None)
    failed = refused(bench)
    assert (failed.code, failed.retriable) == ("invalid_value", False)
    assert f"{token} was given" in failed.message
    assert bench.run() == []
    assert bench.core.audit().settled


def test_plans_are_settled_in_turn() -> None:
    bench = Bench()
    bench.core.submit(request(), "router", None)
    plan = bench.plan()
    assert plan is not None
    assert bench.core.schedule() is not None
    with pytest.raises(AssertionError, match="under way already"):
        bench.core.schedule()
    bench.settle(plan)
    with pytest.raises(ValueError, match="step 1 has ended, but the oldest under way is 2"):
        bench.settle(plan)


def test_a_resubmitted_request_goes_on_behind_its_tokens() -> None:
    bench = Bench()
    bench.core.submit(request(outputs=[70, 71], attempt=1, max_tokens=4), "router", None)
    plans = bench.run()
    assert sum(len(p.token_ids) for p in plans[:2]) == 12
    assert bench.said("r") == [101, 102]
    assert [(t.index, t.attempt) for t in bench.tokens] == [(2, 1), (3, 1)]
    assert bench.finish("r") == ["length"]


def test_a_newer_attempt_takes_the_place_of_an_older_one() -> None:
    bench = Bench()
    bench.core.submit(request(max_tokens=9), "router", None)
    bench.step()
    bench.step()
    bench.core.submit(request(outputs=[101], attempt=1, max_tokens=3), "router", None)
    bench.run()
    assert [(t.index, t.attempt) for t in bench.tokens] == [(0, 0), (1, 1), (2, 1)]
    assert bench.core.audit().settled


# ------------------------------------------------------------------------------------------------------ as source


def test_the_offer_leaves_with_the_first_chunk_and_not_earlier() -> None:
    bench = Bench(max_sequences=1)
    bench.core.submit(request("a", max_tokens=5), "router", None)
    bench.core.submit(request("b", 10, start=50, max_tokens=5), "router", "decode")
    bench.step()
    assert bench.peer == []
    while not bench.finish("a"):
        bench.step()
    plan = bench.plan()
    assert plan is not None
    (offer,) = bench.peer
    assert isinstance(offer, wire.Offer)
    assert (offer.request, offer.prompt_len, offer.pages_needed, offer.max_tokens) == ("b", 10, 3, 5)
    assert offer.block_keys == block_keys(list(range(50, 60)), 4, root_key(LAYOUT.fingerprint))


def test_the_prompt_is_computed_without_waiting_for_the_grant_and_the_first_token_goes_straight_out() -> None:
    bench = Bench()
    bench.core.submit(request(max_tokens=5), "router", "decode")
    bench.run()
    assert bench.said("r") == [101]
    assert bench.copies == []
    bench.core.from_destination("decode", wire.Grant(xfer=1, skip_tokens=4, pages=[8, 9], generation=6))
    bench.take()
    (job,) = bench.copies
    assert (job.peer, job.xfer, job.destination_pages, len(job.source_pages)) == ("decode", 1, [8, 9], 2)
    bench.core.copies_done("decode", 1, 2)
    bench.take()
    commit = bench.peer[-1]
    assert isinstance(commit, wire.Commit)
    assert (commit.generation, commit.request.output_ids, commit.router) == (6, [101], "router")
    bench.core.from_destination("decode", wire.Accepted(xfer=1))
    assert bench.core.idle
    assert bench.core.audit().cached == 2


def test_chunks_are_copied_as_they_complete() -> None:
    bench = Bench(chunk_tokens=5)
    bench.core.submit(request(prompt=14, max_tokens=5), "router", "decode")
    plan = bench.plan()
    assert plan is not None
    bench.core.from_destination("decode", wire.Grant(xfer=1, skip_tokens=0, pages=[5, 6, 7, 8], generation=1))
    bench.settle(plan)
    bench.step()
    bench.step()
    assert [job.destination_pages for job in bench.copies] == [[5], [6], [7, 8]]


def test_pages_of_a_handoff_are_kept_until_it_is_accepted() -> None:
    bench = Bench()
    bench.core.submit(request(max_tokens=5), "router", "decode")
    bench.run()
    assert bench.core.audit().running == 3
    assert bench.core.status().handing_off == 1
    bench.core.from_destination("decode", wire.Grant(xfer=1, skip_tokens=0, pages=[7, 8, 9], generation=1))
    bench.core.copies_done("decode", 1, 3)
    assert bench.core.audit().running == 3
    bench.core.from_destination("decode", wire.Accepted(xfer=1))
    assert bench.core.audit().running == 0


@pytest.mark.parametrize("how", [{"max_tokens": 1}, {"max_tokens": 9, "outputs": list(range(200, 208))}])
def test_a_request_that_ends_with_its_next_token_is_never_offered(how: dict) -> None:
    bench = Bench()
    bench.core.submit(request(**how), "router", "decode")
    bench.run()
    assert bench.peer == []
    assert bench.finish("r") == ["length"]


def test_a_stop_at_the_first_token_gives_the_grant_back() -> None:
    bench = Bench()
    bench.script = [EOS]
    bench.core.submit(request(max_tokens=5), "router", "decode")
    plan = bench.plan()
    assert plan is not None
    bench.core.from_destination("decode", wire.Grant(xfer=1, skip_tokens=0, pages=[7, 8, 9], generation=4))
    bench.settle(plan)
    bench.step()
    assert bench.finish("r") == ["stop"]
    assert isinstance(bench.peer[-1], wire.Cancel)
    bench.core.copies_done("decode", 1, 2)
    bench.take()
    assert bench.peer[-1] == wire.Released(xfer=1, generation=4)
    assert bench.core.idle


@pytest.mark.parametrize("when", ["computing", "handing off"])
def test_a_refusal_or_a_lost_destination_is_answered_as_retriable(when: str) -> None:
    for end in ("refuse", "lost"):
        bench = Bench()
        bench.core.submit(request(max_tokens=5), "router", "decode")
        if when == "computing":
            bench.step()
        else:
            bench.run()
        if end == "refuse":
            refuse = wire.Refuse(xfer=1, code="no_workers", message="draining")
            bench.core.from_destination("decode", refuse)
        else:
            bench.core.destination_lost("decode")
        failed = refused(bench)
        assert (failed.code, failed.retriable) == ("no_workers" if end == "refuse" else "worker_lost", True)
        assert bench.run() == []
        assert bench.core.audit().settled


def test_a_lost_destination_fails_those_that_wait_for_it_and_no_others() -> None:
    bench = Bench(max_sequences=1)
    bench.core.submit(request("a", max_tokens=5), "router", "gone")
    bench.core.submit(request("b", max_tokens=5), "router", "gone")
    bench.core.submit(request("c", max_tokens=1), "router", "gone")
    bench.core.submit(request("d", max_tokens=5), "router", "other")
    bench.step()
    bench.core.destination_lost("gone")
    bench.run()
    assert sorted(m.request for m in bench.others if isinstance(m, wire.Failed)) == ["a", "b"]
    assert bench.finish("c") == ["length"]
    assert len(bench.said("d")) == 1


def test_a_failed_copy_is_answered_as_retriable_and_released() -> None:
    bench = Bench()
    bench.core.submit(request(max_tokens=5), "router", "decode")
    bench.run()
    bench.core.from_destination("decode", wire.Grant(xfer=1, skip_tokens=0, pages=[7, 8, 9], generation=4))
    bench.core.copies_failed("decode", 1, "no route")
    failed = refused(bench)
    assert (failed.code, failed.retriable) == ("engine_failure", True)
    assert "no route" in failed.message
    assert bench.peer[-1] == wire.Released(xfer=1, generation=4)
    assert bench.core.idle


# -------------------------------------------------------------------------------------------------- as destination


def offer_of(prompt: int = 10, xfer: int = 1, max_tokens: int = 5, start: int = 10) -> wire.Offer:
    tokens = list(range(start, start + prompt))
    return wire.Offer(
        xfer=xfer, request=f"x{xfer}", attempt=0, prompt_len=prompt, pages_needed=-(-prompt // 4),
        block_keys=block_keys(tokens, 4, root_key(LAYOUT.fingerprint)), max_tokens=max_tokens,
    )  # fmt: skip


def commit_of(offer: wire.Offer, generation: int, start: int = 10) -> wire.Commit:
    request = Request(
        id=offer.request, prompt_ids=list(range(start, start + offer.prompt_len)), output_ids=[77],
        sampling=SamplingParams(max_tokens=offer.max_tokens),
    )  # fmt: skip
    return wire.Commit(xfer=offer.xfer, generation=generation, request=request, router="router", cached_tokens=0)


def grants(bench: Bench) -> list[wire.Grant]:
    bench.plan()
    return [m for m in bench.peer if isinstance(m, wire.Grant)]


def test_an_adopted_request_is_announced_and_decoded_behind_its_first_token() -> None:
    bench = Bench()
    offer = offer_of()
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    assert (grant.skip_tokens, len(grant.pages)) == (0, 3)
    assert bench.core.audit().reserved == 3
    bench.core.from_source("prefill", commit_of(offer, grant.generation))
    bench.take()
    assert isinstance(bench.peer[-1], wire.Accepted)
    assert isinstance(bench.others[-1], wire.Adopted)
    assert bench.core.audit().landed == 3
    plans = bench.run()
    assert plans[0].token_ids.tolist() == [77]
    assert plans[0].positions.tolist() == [10]
    assert plans[0].block_tables.tolist() == [grant.pages]
    assert plans[0].new_rows[0].outputs == 1
    assert [(t.index, t.token_ids, t.cached_tokens) for t in bench.tokens] == [
        (1, [101], None), (2, [102], None), (3, [103], None), (4, [104], None),
    ]  # fmt: skip
    assert bench.finish("x1") == ["length"]
    assert bench.core.audit().settled


def test_prefix_pages_held_here_are_skipped_and_kept_from_grant_to_adoption() -> None:
    bench = Bench(pages=9)
    bench.core.submit(request("warm", 10, max_tokens=1), "router", None)
    bench.run()
    offer = offer_of(14, start=10)
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    assert (grant.skip_tokens, len(grant.pages)) == (8, 2)
    bench.core.submit(request("greedy", 16, start=90, max_tokens=1), "router", None)
    bench.run()  # takes every other page
    bench.core.from_source("prefill", commit_of(offer, grant.generation))
    assert bench.core.audit().problems == []
    plan = bench.plan()
    assert plan is not None
    assert plan.block_tables[0, 2:].tolist() == grant.pages


def test_adopted_pages_and_those_completed_in_decode_become_prefix_cache() -> None:
    bench = Bench()
    offer = offer_of(10, max_tokens=7)
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    bench.core.from_source("prefill", commit_of(offer, grant.generation))
    bench.run()
    history = list(range(10, 20)) + [77] + bench.said("x1")
    keys = block_keys(history, 4, root_key(LAYOUT.fingerprint))
    assert set(keys) <= set(bench.core.status().added)


def test_a_revoked_grant_is_not_reused_before_release() -> None:
    bench = Bench()
    bench.core.from_source("prefill", offer_of())
    (grant,) = grants(bench)
    bench.core.abort("x1", 0)
    bench.take()
    assert isinstance(bench.peer[-1], wire.Revoke)
    assert bench.core.audit().reserved == 3
    bench.core.from_source("prefill", wire.Released(xfer=1, generation=grant.generation + 1))
    assert bench.core.audit().reserved == 3
    bench.core.from_source("prefill", wire.Released(xfer=1, generation=grant.generation))
    assert bench.core.audit().settled


def test_a_lost_source_frees_its_grants_and_leaves_what_was_adopted() -> None:
    bench = Bench()
    adopted, open_ = offer_of(xfer=1), offer_of(xfer=2, start=40)
    bench.core.from_source("prefill", adopted)
    bench.core.from_source("prefill", open_)
    first, _ = grants(bench)
    bench.core.from_source("prefill", commit_of(adopted, first.generation))
    bench.core.source_lost("prefill")
    assert bench.core.audit().reserved == 0
    bench.run()
    assert bench.finish("x1") == ["length"]
    assert bench.core.audit().settled


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt_len": 80, "pages_needed": 20, "block_keys": []}, "context_length_exceeded"),
        ({"max_tokens": 900}, None),
        ({"pages_needed": 9}, "engine_failure"),
        ({"block_keys": [b"k" * 16]}, "engine_failure"),
    ],
)
def test_an_offer_that_can_never_be_served_is_refused(change: dict, code: str | None) -> None:
    bench = Bench(max_model_len=64)
    bench.core.from_source("prefill", msgspec.structs.replace(offer_of(), **change))
    bench.plan()
    assert [m.code for m in bench.peer if isinstance(m, wire.Refuse)] == ([code] if code else [])


def test_a_draining_destination_refuses_new_and_deferred_offers_and_honours_grants() -> None:
    bench = Bench(pages=5)
    granted, deferred = offer_of(10, 1), offer_of(10, 2, start=40)
    bench.core.from_source("prefill", granted)
    bench.core.from_source("prefill", deferred)
    (grant,) = grants(bench)
    assert any(isinstance(m, wire.Defer) and m.xfer == 2 for m in bench.peer)
    bench.core.drain()
    bench.core.from_source("prefill", offer_of(4, 3))
    bench.take()
    assert sorted(m.xfer for m in bench.peer if isinstance(m, wire.Refuse)) == [2, 3]
    bench.core.from_source("prefill", commit_of(granted, grant.generation))
    bench.run()
    assert bench.finish("x1") == ["length"]


def test_messages_without_a_meaning_are_ignored() -> None:
    bench = Bench()
    bench.core.from_source("prefill", offer_of())
    (grant,) = grants(bench)
    bench.core.from_source("prefill", offer_of())
    bench.core.from_source("prefill", wire.Ping(n=1))
    bench.core.from_source("prefill", wire.Commit(
        xfer=9, generation=1, request=request(), router="router", cached_tokens=0
    ))  # fmt: skip
    bench.core.from_destination("decode", wire.Pong(n=1))
    bench.core.from_destination("decode", wire.Accepted(xfer=9))
    assert bench.plan() is None
    assert bench.core.audit().reserved == len(grant.pages)
    assert len(grants(bench)) == 1


def test_a_commit_with_token_ids_that_the_model_does_not_have_fails_its_request_alone() -> None:
    bench = Bench()
    offer = offer_of()
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    commit = commit_of(offer, grant.generation)
    commit.request.prompt_ids[3] = 1 << 40
    bench.core.from_source("prefill", commit)
    failed = refused(bench)
    assert (failed.request, failed.code, failed.retriable) == ("x1", "invalid_value", False)
    assert bench.run() == []
    assert bench.core.idle
    assert bench.core.audit().settled


def small_offer(number: int, tokens: int = 8) -> wire.Offer:
    return wire.Offer(
        xfer=number, request=f"o{number}", attempt=0, prompt_len=tokens, block_keys=[], pages_needed=-(-tokens // 4),
        max_tokens=8,
    )  # fmt: skip


def small_commit(number: int, generation: int, tokens: int = 8) -> wire.Commit:
    asked = Request(
        id=f"o{number}", prompt_ids=list(range(10, 10 + tokens)), output_ids=[99], sampling=SamplingParams(max_tokens=8)
    )
    return wire.Commit(xfer=number, generation=generation, router="router", cached_tokens=0, request=asked)


@pytest.mark.parametrize("between", [False, True], ids=["when a step is planned", "between steps"])
def test_a_large_prompt_is_not_passed_over_for_ever_by_offers_that_come_while_steps_are_under_way(
    between: bool,
) -> None:
    bench = Bench(pages=33, max_sequences=16, max_model_len=128, prefix_cache=False)
    heard = grants = 0
    for number in range(1, 120):
        plan = bench.plan()
        if number == 20:
            bench.core.submit(request("big", 88, max_tokens=4), "router", None)
            grants = 0
        bench.core.from_source("P", small_offer(number))
        if between:
            bench.core.answer_offers()
            bench.take()
        if plan is not None:
            bench.settle(plan)
        for message in bench.peer[heard:]:
            if isinstance(message, wire.Grant):
                grants += 1
                bench.core.from_source("P", small_commit(message.xfer, message.generation))
        heard = len(bench.peer)
        if bench.said("big"):
            break
    assert bench.said("big")
    assert grants <= 2 * PATIENCE


def test_a_commit_before_its_grant_says_nothing_of_the_pages() -> None:
    def block_table(*early: wire.Commit) -> list[list[int]]:
        bench = Bench(pages=9, prefix_cache=False)
        bench.core.submit(request("here", 16, max_tokens=12), "router", None)
        bench.step()
        bench.core.from_source("P", small_offer(1, 16))
        bench.step()
        assert not any(isinstance(message, wire.Grant) for message in bench.peer)
        for commit in early:
            bench.core.from_source("P", commit)
        for _ in range(40):
            if granted := [message for message in bench.peer if isinstance(message, wire.Grant)]:
                break
            bench.step()
        for commit in early:
            bench.core.from_source("P", commit)
        bench.core.from_source("P", small_commit(1, granted[0].generation, 16))
        plan = bench.plan()
        assert plan is not None
        return plan.block_tables.tolist()

    plain = block_table()
    assert block_table(small_commit(1, 0, 16)) == plain
    assert block_table(small_commit(1, 7, 16)) == plain


def test_an_offer_of_no_tokens_is_refused() -> None:
    for length in (0, -8):
        bench = Bench()
        offer = msgspec.structs.replace(offer_of(), prompt_len=length, pages_needed=length // 4, block_keys=[])
        bench.core.from_source("prefill", offer)
        bench.plan()
        assert [m.code for m in bench.peer if isinstance(m, wire.Refuse)] == ["engine_failure"]
