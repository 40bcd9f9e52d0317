"""Block keys, the index of prefixes, and the log of its changes."""

from __future__ import annotations

import random

import pytest

from slipstream.kv.prefix import PrefixIndex, block_keys, extend_keys, root_key

ROOT = root_key("fingerprint")


def key(n: int) -> bytes:
    return n.to_bytes(16, "little")


def test_only_full_pages_have_keys_of_16_bytes() -> None:
    keys = block_keys(range(11), 4, ROOT)
    assert len(keys) == 2
    assert all(len(k) == 16 for k in keys)
    assert block_keys([1, 2, 3], 4, ROOT) == []


def test_a_key_names_the_whole_prefix() -> None:
    one = block_keys([1, 2, 3, 4, 5, 6], 2, ROOT)
    other = block_keys([9, 2, 3, 4, 5, 6], 2, ROOT)
    longer = block_keys([1, 2, 3, 4, 7, 8, 9, 9], 2, ROOT)
    assert not set(one) & set(other)
    assert longer[:2] == one[:2]
    assert longer[2] != one[2]


def test_model_and_salt_part_the_chains() -> None:
    roots = {root_key("a"), root_key("b"), root_key("a", "salt"), root_key("as", "alt"), root_key("a", "other")}
    assert len(roots) == 5
    assert len({block_keys([1, 2], 2, root)[0] for root in roots}) == 5


def test_page_size_matters_through_the_tokens_of_each_page() -> None:
    assert block_keys([1, 2, 3, 4], 2, ROOT)[1] != block_keys([1, 2, 3, 4], 4, ROOT)[0]


def test_extending_token_by_token_gives_the_same_keys_as_all_at_once() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(200_000) for _ in range(37)]
    keys: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_keys(keys, tokens[:end], 5, ROOT)
    assert keys == block_keys(tokens, 5, ROOT)


def test_the_longest_known_prefix_is_matched() -> None:
    index = PrefixIndex()
    for n, page in ((1, 10), (2, 20), (4, 40)):
        assert index.insert(key(n), page)
    assert index.match([key(1), key(2), key(3), key(4)]) == [10, 20]
    assert index.match([key(4)]) == [40]
    assert index.match([key(9), key(1)]) == []


def test_a_second_page_for_a_known_key_stays_nameless() -> None:
    index = PrefixIndex()
    assert index.insert(key(1), 10)
    assert not index.insert(key(1), 11)
    assert index.match([key(1)]) == [10]
    assert index.key_of(11) is None


def test_the_least_recently_used_page_goes_first() -> None:
    index = PrefixIndex()
    for n in (1, 2, 3):
        index.insert(key(n), n * 10)
        index.retire(n * 10)
    index.revive(10)
    index.retire(10)
    assert [*index.evict(2), *index.evict()] == [20, 30, 10]
    assert len(index) == 0


def test_pages_of_a_chain_are_named_together_and_those_whose_key_is_known_stay_nameless() -> None:
    index = PrefixIndex()
    index.insert(key(2), 20)
    assert index.insert_all([key(1), key(2), key(3)], [10, 21, 30]) == 2
    assert index.match([key(1), key(2), key(3)]) == [10, 20, 30]
    assert [page in index.named for page in (10, 20, 21, 30)] == [True, True, False, True]
    assert index.take_changes().added == [key(2), key(1), key(3)]


def test_no_more_pages_are_given_up_than_nobody_holds() -> None:
    index = PrefixIndex()
    index.insert(key(1), 10)
    index.retire(10)
    with pytest.raises(KeyError):
        index.evict(2)


def test_changes_are_net_and_taken_once() -> None:
    index = PrefixIndex()
    index.insert(key(1), 10)
    index.insert(key(2), 20)
    index.retire(20)
    index.evict()
    changes = index.take_changes()
    assert (changes.added, changes.removed, changes.reset) == ([key(1)], [], False)
    index.retire(10)
    index.evict()
    index.insert(key(3), 10)
    changes = index.take_changes()
    assert (changes.added, changes.removed) == ([key(3)], [key(1)])
    assert index.take_changes().added == []


def test_a_key_that_goes_and_comes_back_is_no_change() -> None:
    index = PrefixIndex()
    index.insert(key(1), 10)
    index.take_changes()
    index.retire(10)
    index.evict()
    index.insert(key(1), 11)
    changes = index.take_changes()
    assert (changes.added, changes.removed) == ([], [])


def test_too_many_changes_become_a_reset_with_everything() -> None:
    index = PrefixIndex(change_bound=3)
    for n in range(5):
        index.insert(key(n), n + 1)
    changes = index.take_changes()
    assert changes.reset
    assert sorted(changes.added) == sorted(key(n) for n in range(5))
    assert changes.removed == []
    index.insert(key(9), 9)
    assert index.take_changes().added == [key(9)]


def test_applying_all_changes_gives_the_index_again() -> None:
    rng = random.Random(3)
    index = PrefixIndex(change_bound=6)
    known: set[bytes] = set()
    held: dict[int, bytes] = {}
    for step in range(500):
        if held and rng.random() < 0.5:
            page = rng.choice(list(held))
            del held[page]
            index.retire(page)
            index.evict()
        else:
            page, name = rng.randrange(1, 40), key(rng.randrange(60))
            if page not in held and index.insert(name, page):
                held[page] = name
        if step % 7 == 0:
            changes = index.take_changes()
            known = set() if changes.reset else known
            known = (known - set(changes.removed)) | set(changes.added)
            assert known == set(index.keys())
