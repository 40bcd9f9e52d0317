"""The numbering of one request's tokens and its stages, without sockets."""

from __future__ import annotations

from typing import Any

from tests.unit.toy_cluster import Client
from tests.unit.toy_worker import toy_request

from slipstream.router.life import Life, Verdict
from slipstream.router.place import Placement
from slipstream.types import Logprob, Tokens


def life(prefill: str = "p", decode: str = "d", **rest: Any) -> Life:
    it = Life(toy_request("r", max_tokens=20, **rest), Client(), 0.0)
    it.begin(Placement(prefill, decode, 3))
    return it


def tokens(index: int, ids: list[int], **rest: Any) -> Tokens:
    return Tokens("r", 0, index, ids, **rest)


def test_a_request_passes_from_prefill_over_the_handoff_to_decode() -> None:
    it = life()
    assert (it.stage, it.owner) == ("prefill", "p")
    assert it.receive(tokens(0, [1]), "p") is Verdict.DELIVER
    assert (it.stage, it.owner) == ("handoff", "p")
    it.adopt()
    assert (it.stage, it.owner) == ("decode", "d")
    assert it.receive(tokens(1, [2, 3]), "d") is Verdict.DELIVER
    assert it.delivered == [1, 2, 3]


def test_a_local_request_decodes_from_its_first_token_on() -> None:
    it = life("p", "p")
    assert it.receive(tokens(0, [1]), "p") is Verdict.DELIVER
    assert (it.stage, it.owner) == ("decode", "p")
    assert it.receive(tokens(2, [3]), "p") is Verdict.GAP


def test_tokens_of_the_decode_worker_are_a_handover_even_before_adopted() -> None:
    it = life()
    it.receive(tokens(0, [1]), "p")
    assert it.receive(tokens(1, [2]), "d") is Verdict.DELIVER
    assert (it.stage, it.owner) == ("decode", "d")


def test_tokens_that_overtake_the_first_are_held_until_it_is_here() -> None:
    it = life()
    assert it.receive(tokens(1, [2]), "d") is Verdict.HELD
    assert it.receive(tokens(2, [3, 4]), "d") is Verdict.HELD
    assert it.next_held() is None
    assert it.receive(tokens(5, [6]), "d") is Verdict.GAP
    assert it.receive(tokens(0, [1]), "p") is Verdict.DELIVER
    while (held := it.next_held()) is not None:
        assert it.receive(held, "d") is Verdict.DELIVER
    assert it.delivered == [1, 2, 3, 4]
    assert it.receive(tokens(6, [7]), "d") is Verdict.GAP


def test_the_prefill_worker_may_make_several_tokens_before_the_handover() -> None:
    it = life()
    it.receive(tokens(0, [1]), "p")
    assert it.receive(tokens(3, [4]), "d") is Verdict.HELD
    assert it.receive(tokens(1, [2, 3]), "p") is Verdict.DELIVER
    held = it.next_held()
    assert held is not None
    assert it.receive(held, "d") is Verdict.DELIVER
    assert it.delivered == [1, 2, 3, 4]


def test_the_prefill_worker_is_not_heard_once_the_decode_worker_has_spoken() -> None:
    it = life()
    it.receive(tokens(0, [1]), "p")
    it.receive(tokens(1, [2]), "d")
    assert it.receive(tokens(2, [9]), "p") is Verdict.STRANGER
    assert it.receive(tokens(2, [3]), "d") is Verdict.DELIVER
    assert it.delivered == [1, 2, 3]


def test_what_was_delivered_is_cut_off_with_its_log_probabilities() -> None:
    it = life("p", "p")
    it.receive(tokens(0, [1, 2]), "p")
    repeated = tokens(0, [1, 2, 3], logprobs=[Logprob(-1.0), Logprob(-2.0), Logprob(-3.0)])
    assert it.receive(repeated, "p") is Verdict.DELIVER
    assert (repeated.index, repeated.token_ids, repeated.logprobs) == (2, [3], [Logprob(-3.0)])
    assert it.receive(tokens(1, [2, 3]), "p") is Verdict.REPEATED
    last = tokens(1, [2, 3], finish="stop")
    assert it.receive(last, "p") is Verdict.DELIVER
    assert (last.index, last.token_ids, last.finish) == (3, [], "stop")


def test_strangers_are_not_heard() -> None:
    it = life()
    assert it.receive(tokens(0, [1]), "x") is Verdict.STRANGER
    it.withdraw()
    assert it.receive(tokens(0, [1]), "p") is Verdict.STRANGER
    assert it.delivered == []


def test_the_next_attempt_continues_behind_what_the_client_has() -> None:
    it = life()
    it.receive(tokens(0, [1], cached_tokens=2, prompt_logprobs=[None]), "p")
    it.receive(tokens(1, [2]), "d")
    it.withdraw()
    it.again()
    assert it.submission().output_ids == [1, 2]
    assert it.submission().attempt == 1
    assert list(it.prompt().token_ids) == [1, 2, 3, 1, 2]
    assert it.request.output_ids == []
    it.begin(Placement("q", "e", 5))
    first = tokens(2, [3], cached_tokens=3, prompt_logprobs=[None])
    assert it.receive(first, "q") is Verdict.DELIVER
    assert (first.cached_tokens, first.prompt_logprobs) == (None, None)


def test_an_attempt_that_begins_before_any_token_still_says_what_was_cached() -> None:
    it = life()
    it.withdraw()
    it.again()
    it.begin(Placement("q", "e", 5))
    first = tokens(0, [1], cached_tokens=3)
    it.receive(first, "q")
    assert first.cached_tokens == 3


def test_a_request_that_comes_with_tokens_is_numbered_behind_them() -> None:
    it = life(output_ids=[7, 8])
    assert it.submission() is it.request
    assert it.receive(tokens(2, [9]), "p") is Verdict.DELIVER
    assert it.delivered == [7, 8, 9]
