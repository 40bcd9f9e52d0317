"""Where requests go: the policy alone, without sockets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from slipstream import wire
from slipstream.kv.prefix import block_keys, root_key
from slipstream.router.place import Avoid, KnownKeys, Pace, Placement, Prompt, Standing, place
from slipstream.types import Role

PAGE = 4


def standing(name: str, role: Role = "both", **rest: Any) -> Standing:
    settings: dict[str, Any] = {"max_sequences": 64, "pages_total": 1000, "pages_free": 1000, **rest}
    return Standing(id=name, role=role, fingerprint="f", page_tokens=PAGE, keys=KnownKeys(1000), **settings)


def status(**rest: Any) -> wire.Status:
    base: dict[str, Any] = {
        "waiting": 0, "running": 0, "handing_off": 0, "waiting_tokens": 0,
        "pages_free": 1000, "pages_cached": 0, "pages_total": 1000,
    }  # fmt: skip
    return wire.Status(**{**base, **rest})


def knows(s: Standing, token_ids: list[int], salt: str = "") -> None:
    s.keys.update(status(added=block_keys(token_ids, PAGE, root_key("f", salt))))


def always(p: str, d: str) -> bool:
    return True


def pairs(*standings: Standing, count: int, prompt: int = 10, end: bool = False, **rest: Any) -> list[tuple[str, str]]:
    """Places `count` equal prompts one after the other, charging each as the router does."""
    by_id = {s.id: s for s in standings}
    found = []
    for turn in range(1, count + 1):
        placement = place(Prompt(range(prompt)), standings, always, **rest)
        assert placement is not None
        p, d = by_id[placement.prefill], by_id[placement.decode]
        if not end:
            p.prefill_tokens += placement.to_compute
            d.sequences += 1
        p.chosen = d.chosen = turn
        found.append((p.id, d.id))
    return found


def chosen(*standings: Standing, prompt: list[int] | range = range(10), **rest: Any) -> Placement | None:
    return place(Prompt(prompt), standings, rest.pop("can_meet", always), **rest)


def test_nobody_is_no_placement() -> None:
    assert chosen() is None
    assert chosen(standing("p", "prefill", usable=False), standing("d", "decode")) is None


def test_equal_workers_take_turns_also_when_each_request_ends_before_the_next() -> None:
    workers = [standing(f"p{i}", "prefill") for i in range(3)] + [standing(f"d{i}", "decode") for i in range(2)]
    found = pairs(*workers, count=12, end=True)
    assert Counter(p for p, _ in found) == {"p0": 4, "p1": 4, "p2": 4}
    assert Counter(d for _, d in found) == {"d0": 6, "d1": 6}


def test_prefill_goes_where_the_fewest_tokens_are_queued() -> None:
    a, b = standing("a", "prefill", prefill_tokens=500), standing("b", "prefill", foreign_tokens=400)
    placement = chosen(a, b, standing("d", "decode"))
    assert placement is not None
    assert placement.prefill == "b"


def test_one_long_prompt_outweighs_many_short_ones() -> None:
    a, b, d = standing("a", "prefill", prefill_tokens=1000), standing("b", "prefill"), standing("d", "decode")
    assert Counter(p for p, _ in pairs(a, b, d, count=100))["b"] == 100


def test_a_known_prefix_wins_until_the_queue_before_it_costs_more() -> None:
    a, b, d = standing("a", "prefill"), standing("b", "prefill"), standing("d", "decode")
    knows(a, list(range(100)))
    for queued, expected in ((0, "a"), (99, "a"), (111, "b")):
        a.prefill_tokens = queued
        placement = chosen(a, b, d, prompt=range(104))
        assert placement is not None
        assert placement.prefill == expected
        assert placement.to_compute == (4 if expected == "a" else 104)


def test_only_leading_whole_pages_are_known_and_the_last_token_is_always_computed() -> None:
    a, d = standing("a", "prefill"), standing("d", "decode")
    knows(a, list(range(8)))
    for prompt, to_compute in ((range(8), 4), (range(9), 1), ([*range(7), 99, 8], 5), ([99, *range(1, 9)], 9)):
        placement = chosen(a, d, prompt=prompt)
        assert placement is not None
        assert placement.to_compute == to_compute


def test_prefixes_of_another_salt_are_unknown() -> None:
    a = standing("a")
    knows(a, list(range(8)), salt="one")
    assert Prompt(range(9), "one").known(a) == 8
    assert Prompt(range(9), "two").known(a) == 0
    assert Prompt(range(9)).known(a) == 0


def test_decode_goes_where_the_fewest_sequences_are() -> None:
    p, a, b = standing("p", "prefill"), standing("a", "decode", sequences=3), standing("b", "decode")
    assert Counter(d for _, d in pairs(p, a, b, count=9)) == {"a": 3, "b": 6}


def test_decode_load_is_measured_against_what_the_worker_can_hold() -> None:
    p = standing("p", "prefill")
    small, large = standing("small", "decode", max_sequences=8), standing("large", "decode", max_sequences=64)
    assert Counter(d for _, d in pairs(p, small, large, count=36))["small"] == 4


def test_pages_that_hold_live_kv_count_as_load_and_cached_ones_do_not() -> None:
    p = standing("p", "prefill")
    busy = standing("busy", "decode", pages_free=200, pages_cached=0)
    cached = standing("cached", "decode", pages_free=200, pages_cached=800)
    placement = chosen(p, busy, cached)
    assert placement is not None
    assert placement.decode == "cached"


def test_a_popular_prefix_does_not_pile_up_on_one_decode_worker() -> None:
    p = standing("p", "prefill")
    decodes = [standing(f"d{i}", "decode") for i in range(4)]
    knows(decodes[0], list(range(100)))
    counts = Counter(d for _, d in pairs(p, *decodes, count=40, prompt=101))
    assert counts["d0"] > counts["d1"]
    assert counts["d0"] <= min(counts.values()) + 3


def test_a_worker_without_room_comes_last() -> None:
    p = standing("p", "prefill")
    full = standing("full", "decode", pages_free=1, pages_cached=1, pages_total=1000, max_sequences=1000)
    crowded = standing("crowded", "decode", max_sequences=4, sequences=4)
    roomy = standing("roomy", "decode", sequences=60)
    placement = chosen(p, full, crowded, roomy, prompt=range(20))
    assert placement is not None
    assert placement.decode == "roomy"
    placement = chosen(p, full, crowded, prompt=range(20))
    assert placement is not None, "no room now is a place to wait, not a refusal"


def test_pairs_that_cannot_meet_are_not_made() -> None:
    workers = [standing("p0", "prefill"), standing("p1", "prefill", prefill_tokens=900), standing("d", "decode")]
    placement = chosen(*workers, can_meet=lambda p, d: p == "p1")
    assert placement is not None
    assert (placement.prefill, placement.decode) == ("p1", "d")
    assert chosen(*workers, can_meet=lambda p, d: False) is None


def test_workers_for_both_keep_what_they_prefill_unless_another_is_clearly_freer() -> None:
    a, b = standing("a"), standing("b")
    assert all(p == d for p, d in pairs(a, b, count=10))
    a, b = standing("a", "both", sequences=20), standing("b", "decode")
    assert pairs(a, b, count=1) == [("a", "b")]
    b.sequences = 19
    assert pairs(a, b, count=1)[0] == ("a", "a")


def test_decoding_sequences_of_a_worker_for_both_slow_its_prefills() -> None:
    a, b = standing("a", sequences=30), standing("b")
    assert pairs(a, b, count=1)[0][0] == "b"


@pytest.mark.parametrize(("role", "missing"), [("decode", "prefill"), ("prefill", "decode")])
def test_borrowing_is_local_and_only_when_allowed_and_needed(role: Role, missing: str) -> None:
    workers = [standing("x", role, prefill_tokens=50, sequences=5), standing("y", role)]
    allowed: dict[str, Any] = {f"borrow_{missing}": True}
    assert chosen(*workers) is None
    useless: dict[str, Any] = {f"borrow_{role}": True}
    assert chosen(*workers, **useless) is None
    placement = chosen(*workers, **allowed)
    assert placement == Placement("y", "y", 10, borrowed=missing)  # type: ignore[arg-type]
    other = standing("z", "prefill" if missing == "prefill" else "decode", usable=False)
    assert chosen(*workers, other, **allowed) == placement
    other.usable = True
    placement = chosen(*workers, other, **allowed)
    assert placement is not None
    assert placement.borrowed is None
    assert "z" in (placement.prefill, placement.decode)


def test_what_failed_is_avoided_while_there_is_anything_else() -> None:
    ps, ds = [standing(f"p{i}", "prefill") for i in range(2)], [standing(f"d{i}", "decode") for i in range(2)]
    avoid = Avoid()
    seen = set()
    for _ in range(4):
        placement = chosen(*ps, *ds, avoid=avoid)
        assert placement is not None
        seen.add((placement.prefill, placement.decode))
        avoid = avoid.but(placement.prefill, placement.decode)
    assert len(seen) == 4
    assert chosen(*ps, *ds, avoid=avoid) is not None
    placement = chosen(*ps, *ds, avoid=Avoid().but_worker("p0").but_worker("d1"))
    assert placement is not None
    assert (placement.prefill, placement.decode) == ("p1", "d0")


def test_a_status_says_what_other_routers_have_sent() -> None:
    s = standing("a", prefill_tokens=100, sequences=2)
    s.update(status(waiting_tokens=150, running=5))
    assert (s.foreign_tokens, s.foreign_sequences) == (50, 3)
    s.update(status(waiting_tokens=10, running=0))
    assert (s.foreign_tokens, s.foreign_sequences) == (0, 0)


def test_known_keys_follow_the_worker_and_stay_bounded() -> None:
    known = KnownKeys(3)
    a, b, c, d = (bytes([i]) * 16 for i in range(4))
    known.update(status(added=[a, b, c]))
    assert known.leading([a, b, c, d]) == 3
    known.update(status(removed=[b, d]))
    assert known.leading([a, b, c]) == 1
    known.update(status(added=[b, d]))
    assert len(known) == 3
    assert known.leading([a]) == 0
    known.update(status(reset=True, added=[a]))
    assert len(known) == 1
    assert known.leading([a, c]) == 1


# --------------------------------------------------------------------------------------- prompts beside sequences


def test_a_prompt_keeps_away_from_sequences_until_the_wait_elsewhere_is_longer_than_its_harm() -> None:
    a, b = standing("a", pace=FAST), standing("b", sequences=10)
    for queued, expected in ((0, "a"), (5000, "a"), (8000, "b")):
        a.prefill_tokens = queued
        placement = chosen(a, b, prompt=range(1000))
        assert placement is not None
        assert placement.prefill == expected


def test_sequences_keep_away_from_a_worker_whose_time_goes_to_prompts() -> None:
    p = standing("p", "prefill")
    busy, idle = standing("busy"), standing("idle", sequences=20)
    assert [d for _, d in pairs(p, busy, idle, count=1)] == ["busy"]
    busy.busy = 1.0
    assert [d for _, d in pairs(p, busy, idle, count=1)] == ["idle"]


def test_the_busy_share_of_a_worker_follows_its_prompts() -> None:
    s = standing("a")
    s.charge(100, 10.0)
    s.reckon(11.0)
    early = s.busy
    s.reckon(60.0)
    assert 0.1 < early < 0.5 < 0.99 < s.busy
    s.discharge(100, 60.0)
    s.reckon(120.0)
    assert s.busy < 0.01


FAST = Pace(prompt_rate=10_000.0, mixed_rate=5_000.0, mixed_step_s=0.02, decode_step_s=0.01)


def test_what_a_worker_does_not_tell_of_its_pace_is_taken_from_others_or_guessed() -> None:
    assert Pace().known([]) == Pace().known([Pace()])
    guess = Pace().known([])
    assert guess.prompt_rate > guess.mixed_rate > 0
    assert 0 < guess.slowed < 1
    assert Pace().known([Pace(), FAST]) == FAST
    half = Pace(prompt_rate=300.0).known([FAST])
    assert (half.prompt_rate, half.mixed_rate) == (300.0, 300.0), "beside sequences prompts are never faster"
    crowded = Pace(mixed_rate=100.0).known([])
    assert crowded.lost > 0, "one that is never without sequences might be faster without them"
    noisy = Pace(100.0, 50.0, 0.01, 0.02).known([])
    assert noisy.slowed == 0.0


def test_the_pace_of_a_worker_comes_with_its_status() -> None:
    s = standing("a")
    s.update(status(prompt_rate=10_000.0, mixed_rate=5_000.0, mixed_step_s=0.02, decode_step_s=0.01))
    assert s.pace == FAST


def test_prompts_of_this_router_are_not_taken_for_sequences_of_others() -> None:
    s = standing("a")
    s.charge(100, 1.0)
    s.charge(100, 1.0)
    s.update(status(running=2, waiting_tokens=200))
    assert (s.foreign_sequences, s.decoding) == (0, 0)
    s.discharge(100, 2.0)
    s.update(status(running=2))
    assert s.decoding == 1


def test_the_faster_worker_gets_the_prompt() -> None:
    slow, fast = standing("slow", pace=Pace(1000.0)), standing("fast", pace=Pace(4000.0), prefill_tokens=1000)
    assert pairs(slow, fast, count=1, prompt=500)[0][0] == "fast"


def helped(queued: int, *, prompts: int = 0, pressed: float = 0.0, sequences: int = 0, **rest: Any) -> bool:
    """Whether a decode worker takes a prompt of 1,000 tokens, by itself 0.1 s, when so many are queued."""
    p = standing("p", "prefill", prefill_tokens=queued, prompts=prompts, pressed=pressed, pace=FAST)
    d = standing("d", "decode", sequences=sequences)
    placement = chosen(p, d, prompt=range(1000), **{"help_out": True, **rest})
    assert placement is not None
    assert placement.decode == "d"
    assert placement.helping == (placement.prefill == "d")
    return placement.helping


def test_a_decode_worker_helps_only_when_waiting_costs_more_than_its_sequences_lose() -> None:
    assert not helped(1000)
    assert helped(5000), "nothing decodes there, and the wait is long"
    assert not helped(5000, sequences=4)
    assert helped(20_000, sequences=4)
    assert not helped(20_000, sequences=20)
    assert not helped(20_000, sequences=4, help_out=False)


def test_a_decode_worker_helps_sooner_when_prompts_leave_the_prefill_worker_no_pause() -> None:
    assert not helped(3000, prompts=5, pressed=0.4, sequences=6)
    assert helped(3000, prompts=5, pressed=1.0, sequences=6)


def test_sequences_whose_prompts_wait_elsewhere_do_not_keep_a_decode_worker_from_helping() -> None:
    p = standing("p", "prefill", prefill_tokens=20_000, pace=FAST)
    for coming, expected in ((0, "p"), (20, "d")):
        placement = chosen(p, standing("d", "decode", sequences=20, coming=coming), prompt=range(1000), help_out=True)
        assert placement is not None
        assert placement.prefill == expected


def test_a_helping_worker_keeps_the_request() -> None:
    p = standing("p", "prefill", prefill_tokens=90_000, pace=FAST)
    d, e = standing("d", "decode", sequences=5), standing("e", "decode", sequences=4, prefill_tokens=90_000)
    placement = chosen(p, d, e, prompt=range(500), help_out=True)
    assert placement is not None
    assert (placement.prefill, placement.decode) == ("d", "d")


def test_sequences_stay_together_where_prompts_would_lose_by_them() -> None:
    a, b = standing("a", sequences=5, pace=FAST), standing("b", sequences=20)
    p = standing("p", "prefill")
    a.busy = b.busy = 1.0
    assert pairs(p, a, b, count=1)[0][1] == "b"
    a.busy = b.busy = 0.0
    a.sequences, b.sequences = 5, 20
    assert pairs(p, a, b, count=1)[0][1] == "a", "no prompts, nothing to lose: the freer one"


# ----------------------------------------------------------------------------------------------------- KV's travel


def test_a_slow_route_is_taken_only_when_the_worker_behind_it_is_much_freer() -> None:
    p = standing("p", "prefill", token_bytes=100_000)
    near, far = standing("near", "decode", sequences=16), standing("far", "decode")

    def seconds(p: str, d: str) -> float:
        return 1e-9 if d == "far" else 1e-11

    for length, expected in ((100, "far"), (5000, "near")):
        placement = chosen(p, near, far, prompt=range(length), seconds_per_byte=seconds)
        assert placement is not None
        assert placement.decode == expected


def test_what_a_decode_worker_holds_already_does_not_travel() -> None:
    p = standing("p", "prefill", token_bytes=100_000)
    near, far = standing("near", "decode", sequences=16), standing("far", "decode")
    knows(far, list(range(2996)))
    for length, expected in ((3000, "far"), (9000, "near")):
        placement = chosen(
            p, near, far, prompt=range(length), seconds_per_byte=lambda p, d: 1e-9 if d == "far" else 1e-11
        )
        assert placement is not None
        assert placement.decode == expected


# ------------------------------------------------------------------------------------------------- equal prompts


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    a, b, d = standing("a", "prefill"), standing("b", "prefill"), standing("d", "decode")
    first = chosen(a, b, d, prompt=range(101))
    assert first is not None
    by_id = {"a": a, "b": b}
    there = by_id[first.prefill]
    there.charge(first.to_compute, 1.0)
    there.keys.promise(first.keys)
    there.chosen = 1
    second = chosen(a, b, d, prompt=range(101))
    assert second is not None
    assert (second.prefill, second.to_compute) == (first.prefill, 1)
    other = chosen(a, b, d, prompt=range(500, 601))
    assert other is not None
    assert other.prefill != first.prefill
    there.discharge(first.to_compute, 2.0)
    there.keys.settle(first.keys)
    third = chosen(a, b, d, prompt=range(101))
    assert third is not None
    assert third.to_compute == 101, "a promise ends with its request; from then on the worker tells"


def test_a_promise_of_two_requests_ends_with_the_second() -> None:
    known = KnownKeys(10)
    a, b = bytes(16), bytes([1]) * 16
    known.promise([a, b])
    known.promise([a])
    known.settle([a, b])
    assert known.leading([a, b]) == 1
    known.settle([a])
    assert known.leading([a, b]) == 0
    assert len(known) == 0
