"""The page account: who holds what, and that nothing is lost or given twice."""

from __future__ import annotations

import random

import pytest

from slipstream.kv.pages import PageAccount, PageState
from slipstream.kv.prefix import PrefixIndex


def account(pages: int = 8) -> PageAccount:
    return PageAccount(pages, PrefixIndex())


def name(pages: PageAccount, held: list[int], start: int = 0) -> list[bytes]:
    keys = [bytes([start + i]) * 16 for i in range(len(held))]
    for key, page in zip(keys, held, strict=True):
        assert pages.index.insert(key, page)
    return keys


def test_the_scratch_page_is_never_given_out() -> None:
    pages = account(8)
    taken = pages.take(7)
    assert sorted(taken) == list(range(1, 8))
    assert pages.available == 0


def test_more_than_available_cannot_be_taken() -> None:
    pages = account(4)
    pages.take(2)
    with pytest.raises(AssertionError, match="2 pages taken, 1 available"):
        pages.take(2)


def test_a_pool_without_a_usable_page_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        account(1)


def test_an_unnamed_page_becomes_free_and_a_named_one_cached() -> None:
    pages = account()
    held = pages.take(3)
    name(pages, held[:2])
    pages.drop(held)
    assert [pages.state(page) for page in held] == [PageState.CACHED, PageState.CACHED, PageState.FREE]
    assert (pages.free, pages.cached) == (5, 2)


def test_a_shared_page_stays_until_its_last_holder_drops_it() -> None:
    pages = account()
    held = pages.take(2)
    keys = name(pages, held)
    assert pages.index.match(keys) == held
    pages.hold(held)
    pages.drop(held)
    assert pages.state(held[0]) is PageState.RUNNING
    pages.drop(held)
    assert pages.state(held[0]) is PageState.CACHED


def test_a_cached_page_is_given_up_only_when_free_ones_run_out_and_loses_its_name() -> None:
    pages = account(4)
    held = pages.take(2)
    keys = name(pages, held)
    pages.drop(held)
    assert len(pages.take(1)) == 1
    assert pages.index.match(keys) == held
    taken = pages.take(1)  # the end of the chain goes first
    assert taken == [held[1]]
    assert pages.index.match(keys) == held[:1]


def test_a_held_cached_page_is_not_given_up() -> None:
    pages = account(3)
    held = pages.take(1)
    keys = name(pages, held)
    pages.drop(held)
    pages.hold(pages.index.match(keys))
    assert pages.available == 1
    assert pages.take(1) != held


def test_dropping_what_nobody_holds_is_a_programming_error() -> None:
    pages = account()
    held = pages.take(1)
    pages.drop(held)
    with pytest.raises(AssertionError, match="dropped by nobody"):
        pages.drop(held)


def test_reserved_pages_land_and_then_run_while_shared_ones_keep_their_state() -> None:
    pages = account()
    shared = pages.take(1)
    reservation = pages.reserve(2)
    both = shared + reservation.pages
    assert [pages.state(p) for p in both] == [PageState.RUNNING, PageState.RESERVED, PageState.RESERVED]
    reservation.land()
    assert [pages.state(p) for p in both] == [PageState.RUNNING, PageState.LANDED, PageState.LANDED]
    reservation.run()
    assert {pages.state(p) for p in both} == {PageState.RUNNING}


def test_a_page_that_was_let_go_and_taken_again_has_nothing_to_do_with_the_reservation_it_was_in() -> None:
    pages = account(4)
    reservation = pages.reserve(3)
    name(pages, reservation.pages[:1])
    pages.drop(reservation.pages)
    assert sorted(pages.state(page) for page in (1, 2, 3)) == [PageState.FREE, PageState.FREE, PageState.CACHED]
    taken = pages.take(3)
    reservation.run()
    second = pages.reserve(0)
    assert {pages.state(page) for page in taken} == {PageState.RUNNING}
    pages.drop(taken)
    assert pages.audit([("second", second.pages)]).settled


def test_reserved_pages_cannot_land_twice() -> None:
    reservation = account().reserve(2)
    reservation.land()
    with pytest.raises(AssertionError, match="landed while LANDED"):
        reservation.land()


def test_the_audit_of_a_sound_account_counts_every_page_once() -> None:
    pages = account(10)
    running, reserved, cached = pages.take(2), pages.reserve(3).pages, pages.take(1)
    name(pages, cached)
    pages.drop(cached)
    audit = pages.audit([("a", running), ("b", reserved)])
    assert audit.problems == []
    assert (audit.total, audit.free, audit.cached, audit.running, audit.landed, audit.reserved) == (9, 3, 1, 2, 0, 3)
    assert not audit.settled


@pytest.mark.parametrize(
    ("holders", "words"),
    [
        ([], "counts 1 holders, 0 hold it"),
        ([("a", [1]), ("b", [1])], "counts 1 holders, 2 hold it"),
        ([("a", [1, 1])], "holds a page twice"),
        ([("a", [1]), ("b", [0])], "holds page 0, which cannot be held"),
        ([("a", [1]), ("b", [3])], "page 3 (FREE) counts 0 holders, 1 hold it"),
    ],
)
def test_the_audit_says_in_words_what_is_wrong(holders: list[tuple[str, list[int]]], words: str) -> None:
    pages = account(8)
    assert pages.take(1) == [1]
    assert any(words in problem for problem in pages.audit(holders).problems)


def test_a_lost_page_is_found() -> None:
    pages = account(4)
    pages._free.remove(2)
    assert any("page 2" in problem for problem in pages.audit([]).problems)


@pytest.mark.parametrize("seed", range(20))
def test_random_use_never_loses_a_page(seed: int) -> None:
    rng = random.Random(seed)
    pages = account(rng.randint(4, 30))
    holders: list[list[int]] = []
    fresh = 0
    reservations = []
    for _ in range(400):
        kind = rng.random()
        if reservations and rng.random() < 0.2:
            reservations.pop().land()
        if kind < 0.4:
            count = rng.randint(0, pages.available)
            if rng.random() < 0.5:
                reservations.append(pages.reserve(count))
                held = reservations[-1].pages.copy()
            else:
                held = pages.take(count)
            holders.append(held)
            for page in held[: rng.randint(0, len(held))]:
                fresh += 1
                pages.index.insert(fresh.to_bytes(16, "little"), page)
        elif kind < 0.6 and holders:
            shared = [p for p in rng.choice(holders) if rng.random() < 0.5]
            pages.hold(shared)
            holders.append(shared)
        elif kind < 0.7 and pages.index.idle_pages():
            cached = [rng.choice(pages.index.idle_pages())]
            pages.hold(cached)
            holders.append(cached)
        elif holders:
            pages.drop(holders.pop(rng.randrange(len(holders))))
        assert pages.audit([(str(i), held) for i, held in enumerate(holders)]).problems == []
    while holders:
        pages.drop(holders.pop())
    assert pages.audit([]).settled
