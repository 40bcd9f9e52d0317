"""What a destination does of a handoff before the commit and behind the step that it begins; early, late or never."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.unit.test_core import EOS, LAYOUT, Bench, commit_of, grants, offer_of

from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import ToRouter
from slipstream.kv.prefix import block_keys, root_key
from slipstream.types import Request


def offer_with_prompt(prompt: int = 10, *, start: int = 10, **how: int) -> wire.Offer:
    """As workers send it: with the ids, so that the commit needs not bring them."""
    offer = offer_of(prompt, start=start, **how)
    return msgspec.structs.replace(offer, prompt=np.arange(start, start + prompt, dtype="<i4").tobytes())


def short_commit(offer: wire.Offer, generation: int, outputs: tuple[int, ...] = (77,)) -> wire.Commit:
    commit = commit_of(offer, generation)
    lean: Request = msgspec.structs.replace(commit.request, prompt_ids=[], output_ids=list(outputs))
    return msgspec.structs.replace(commit, request=lean)


def keys_of(offer: wire.Offer) -> set[bytes]:
    return set(offer.block_keys)


def known(bench: Bench, offer: wire.Offer) -> int:
    return len(bench.core._index.match(offer.block_keys))


@pytest.mark.parametrize("catches_up", [(), ("grant",), ("commit",), ("grant", "commit"), ("offer", "grant", "commit")])
@pytest.mark.parametrize("whole_commit", [False, True])
def test_a_handoff_is_the_same_whenever_the_engine_catches_up(catches_up: tuple[str, ...], whole_commit: bool) -> None:
    bench = Bench()
    offer = offer_with_prompt()
    bench.core.from_source("prefill", offer)
    if "offer" in catches_up:
        bench.core.catch_up()
    (grant,) = grants(bench)
    if "grant" in catches_up:
        bench.core.catch_up()
    commit = commit_of(offer, grant.generation) if whole_commit else short_commit(offer, grant.generation)
    bench.core.from_source("prefill", commit)
    plan = bench.plan()
    if "commit" in catches_up:
        bench.core.catch_up()
    assert plan is not None
    assert plan.token_ids.tolist() == [77]
    assert plan.context_lens.tolist() == [11]
    assert plan.block_tables.tolist() == [grant.pages]
    bench.settle(plan)
    bench.run()
    assert bench.said("x1") == [101, 102, 103, 104]
    assert bench.core.audit().settled
    history = [*range(10, 20), 77, 101, 102, 103]
    assert set(block_keys(history, 4, root_key(LAYOUT.fingerprint))) == set(bench.core.status().added)


def test_an_adopted_prompt_is_named_behind_its_first_step_and_not_in_front_of_it() -> None:
    bench = Bench()
    offer = offer_with_prompt()
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    bench.core.from_source("prefill", short_commit(offer, grant.generation))
    bench.plan()
    assert known(bench, offer) == 0
    bench.core.catch_up()
    assert known(bench, offer) == 2
    assert bench.core.audit().problems == []


def test_routers_hear_of_an_adopted_prompt_though_nobody_has_caught_up() -> None:
    bench = Bench()
    offer = offer_with_prompt()
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    bench.core.from_source("prefill", short_commit(offer, grant.generation))
    assert keys_of(offer) == set(bench.core.status_for_new_router().added)
    assert keys_of(offer) == set(bench.core.status().added)


@pytest.mark.parametrize("seated", [False, True])
def test_a_prompt_whose_request_is_aborted_before_it_has_a_name_stays_cached(seated: bool) -> None:
    bench = Bench()
    offer = offer_with_prompt()
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    bench.core.from_source("prefill", short_commit(offer, grant.generation))
    plan = bench.plan() if seated else None
    bench.core.abort("x1", 0)
    if plan is not None:
        bench.settle(plan)
    audit = bench.core.audit()
    assert audit.settled
    assert (audit.cached, known(bench, offer)) == (2, 2)
    bench.core.catch_up()
    assert bench.core.audit().settled


def test_a_prompt_whose_request_is_preempted_before_it_has_a_name_is_found_again() -> None:
    bench = Bench()
    offer = offer_with_prompt(8, max_tokens=20)
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    bench.core.from_source("prefill", short_commit(offer, grant.generation))
    sequence = bench.core._live["x1"]
    bench.core._scheduler.preempt(sequence)
    assert (sequence.pages, sequence.page_ids, sequence.reservation) == ([], None, None)
    assert known(bench, offer) == 2
    assert bench.core.audit().problems == []


@pytest.mark.parametrize("end", ["released", "lost", "cancelled"])
@pytest.mark.parametrize("caught_up", [False, True])
def test_what_was_read_of_a_grant_that_ends_without_a_commit_is_dropped(end: str, caught_up: bool) -> None:
    bench = Bench()
    bench.core.from_source("prefill", offer_with_prompt())
    (grant,) = grants(bench)
    if caught_up:
        bench.core.catch_up()
    if end == "lost":
        bench.core.source_lost("prefill")
    elif end == "released":
        bench.core.abort("x1", 0)
        bench.core.from_source("prefill", wire.Released(xfer=1, generation=grant.generation))
    else:
        bench.core.from_source("prefill", wire.Cancel(xfer=1, code="client_closed_request"))
        bench.core.from_source("prefill", wire.Released(xfer=1, generation=grant.generation))
    bench.core.catch_up()
    assert bench.core.idle
    assert bench.core.audit().settled
    assert bench.core._incoming._unread == []
    bench.core.from_source("prefill", short_commit(offer_with_prompt(), grant.generation))
    assert bench.plan() is None
    assert bench.core.idle


@pytest.mark.parametrize("caught_up", [False, True])
@pytest.mark.parametrize(("vocab", "ids", "outputs", "bad"), [
    (50, [7, 7, 50, 60], (1,), 50),
    (50, [7, -1, 7, 7], (1,), -1),
    (50, [7, 7, 7, 7], (99,), 99),
    (None, [7, 7, 7, 7], (1 << 31,), 1 << 31),
])  # fmt: skip
def test_token_ids_that_the_model_does_not_have_are_found_in_an_offer_or_behind_it(
    caught_up: bool, vocab: int | None, ids: list[int], outputs: tuple[int, ...], bad: int
) -> None:
    bench = Bench()
    bench.core = EngineCore(LAYOUT, 33, EngineConfig(max_model_len=64), (EOS,), vocab=vocab)
    offer = msgspec.structs.replace(offer_of(4), prompt=np.asarray(ids, dtype="<i4").tobytes())
    bench.core.from_source("prefill", offer)
    (grant,) = grants(bench)
    if caught_up:
        bench.core.catch_up()
    bench.core.from_source("prefill", short_commit(offer, grant.generation, outputs))
    (failed,) = [e.message for e in bench.core.take_effects() if isinstance(e, ToRouter)]
    assert isinstance(failed, wire.Failed)
    assert (failed.request, failed.code, failed.retriable) == ("x1", "invalid_value", False)
    assert f"{bad} was given" in failed.message
    assert bench.core.idle
    assert bench.core.audit().settled
