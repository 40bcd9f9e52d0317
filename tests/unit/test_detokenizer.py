"""The incremental detokenizer against the decoding of the whole, for any text, any cut and any stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scripted import byte_tokenizer

from slipstream.front.detokenizer import Detokenizer
from slipstream.front.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()
END = 256  # a special token


def fed(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """The pieces, for tokens that come in messages of these lengths (the rest one by one)."""
    pieces, at = [], 0
    for length in [*cuts, *[1] * len(ids)]:
        if at < len(ids):
            pieces.append(detokenizer.feed(ids[at : at + length]))
            at += length
    pieces.append(detokenizer.finish())
    return pieces


def expected(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """What may be seen of `text`: up to the first stop string that is complete, the longest of those ending there."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


ids = st.lists(st.one_of(st.integers(0, 258), st.sampled_from(list("ab€🎉é".encode()))), max_size=60)
cuts = st.lists(st.integers(1, 7), max_size=20)


@given(ids=ids, cuts=cuts, skip=st.booleans())
def test_pieces_add_up_to_the_decoding_of_the_whole(ids: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert "".join(fed(detokenizer, ids, cuts)) == whole
    assert detokenizer.tokens == len(ids)
    assert detokenizer.length == len(whole)


@given(text=st.text(max_size=40), cuts=cuts)
def test_no_replacement_character_is_shown_for_half_a_character(text: str, cuts: list[int]) -> None:
    for piece in fed(Detokenizer(TOKENIZER), TOKENIZER.encode(text), cuts):
        assert piece.count("\ufffd") <= text.count("\ufffd")


stops = st.lists(st.text(alphabet="ab€ ", min_size=1, max_size=4), max_size=4)


@settings(max_examples=300)
@given(text=st.text(alphabet="ab€ ", max_size=40), cuts=cuts, stop=stops, include=st.booleans())
def test_the_answer_ends_at_the_first_complete_stop_string(
    text: str, cuts: list[int], stop: list[str], include: bool
) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=stop, include_stop=include)
    shown, matched = expected(text, stop, include)
    assert "".join(fed(detokenizer, TOKENIZER.encode(text), cuts)) == shown
    assert detokenizer.stopped == matched


@given(text=st.text(alphabet="ab ", max_size=30), stop=stops)
def test_nothing_that_belongs_to_a_stop_string_is_ever_shown(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=stop)
    shown, _ = expected(text, stop, include=False)
    seen = ""
    for token in TOKENIZER.encode(text):
        seen += detokenizer.feed([token])
        assert shown.startswith(seen)


def test_text_is_held_back_only_while_it_can_become_a_stop_string() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["END"])
    shown = [detokenizer.feed([byte]) for byte in b"xEyENz"]
    assert shown == ["x", "", "Ey", "", "", "ENz"]


def test_tokens_behind_a_stop_string_are_ignored_and_not_counted() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["b"])
    assert detokenizer.feed(list(b"abcd")) == "a"
    assert detokenizer.tokens == 2
    assert detokenizer.feed(list(b"more")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.tokens == 2


def test_stop_strings_count_from_min_tokens_on() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["a"], min_tokens=3)
    assert detokenizer.feed(list(b"aaaa")) == "aa"
    assert detokenizer.stopped == "a"
    assert detokenizer.tokens == 3


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|end|>b")])
def test_special_tokens_are_left_out_unless_asked_for(skip: bool, text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    assert detokenizer.feed([ord("a"), END, ord("b")]) == text


def test_a_token_id_beyond_the_vocabulary_has_no_text() -> None:
    assert Detokenizer(TOKENIZER).feed([ord("a"), 100_000, ord("b")]) == "ab"


def test_half_a_character_at_the_end_becomes_one_replacement_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.feed(list("é🎉".encode())[:-1]) == "é"
    assert detokenizer.finish() == "\ufffd"


def test_two_answers_of_one_tokenizer_do_not_share_state() -> None:
    tokenizer: Tokenizer = TOKENIZER
    one, other = Detokenizer(tokenizer), Detokenizer(tokenizer)
    one.feed(list("🎉".encode())[:2])
    assert other.feed([ord("x")]) == "x"
