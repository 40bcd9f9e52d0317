"""The offline API: whole clusters inside this process, with a tiny random model."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.tiny_models import tiny_model

import slipstream
from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError, ContextTooLong, InvalidRequest, ModelError, SlipstreamError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
PROMPTS = ["a", "The sky is", "x" * 100, "The sky is blue"]
SMALL = {"kv_tokens": 2048, "dtype": "float32", "threads": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("llm") / "tiny", tokenizer=True))


@pytest.fixture(scope="module")
def split(tiny: str) -> Iterator[LLM]:
    """One prefill and one decode worker."""
    with LLM(tiny, prefill=1, decode=1, **SMALL) as llm:
        yield llm


def sound(llm: LLM) -> bool:
    """No request is under way, and all books are right."""
    books = llm.audit()
    return not books["router"]["requests"] and not any(book["problems"] for book in books.values())


def settled(llm: LLM) -> bool:
    deadline = time.monotonic() + 60
    while not sound(llm):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_prompt_that_is_too_long_is_refused_in_words_of_what_was_given(split: LLM):
    with pytest.raises(ContextTooLong, match=r"^prompt 1 has \d+ tokens") as caught:
        split.generate(["a", "x" * 5000])
    assert "max_tokens" not in caught.value.message


def test_answers_come_in_the_order_of_the_prompts(split: LLM):
    together = split.generate(PROMPTS, GREEDY)
    one_by_one = [split.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [a.token_ids for a in together] == [a.token_ids for a in one_by_one]
    assert [len(a.token_ids) for a in together] == [12] * 4
    assert all(a.finish_reason == "length" for a in together)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_split_cluster_says_what_one_worker_says(tiny: str, split: LLM, sampling: SamplingParams):
    with LLM(tiny, **SMALL) as single:
        expected = single.generate(PROMPTS, sampling)
    assert [a.token_ids for a in split.generate(PROMPTS, sampling)] == [a.token_ids for a in expected]


def test_two_in_one_interpreter_do_not_meet(tmp_path: Path, split: LLM):
    other_model = str(tiny_model(tmp_path / "other", "qwen2", tokenizer=True, seed=5))
    before = split.generate("The sky is", GREEDY)[0].token_ids
    with LLM(other_model, **SMALL) as other:
        answers: dict[str, list[int]] = {}
        threads = [
            threading.Thread(target=lambda k=k, m=m: answers.update({k: m.generate("The sky is", GREEDY)[0].token_ids}))
            for k, m in (("split", split), ("other", other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers["split"] == before
    assert answers["other"] != before


def test_workers_of_one_process_copy_from_memory_to_memory(split: LLM):
    books = split.audit()
    assert set(books) == {"router", "prefill-0", "decode-0"}
    assert split.routes() == {("prefill-0", "decode-0"): "local"}


def test_prompts_may_be_token_ids(split: LLM):
    ids = split.tokenizer.encode("The sky is")
    by_text, by_ids = split.generate("The sky is", GREEDY), split.generate(ids, GREEDY)
    assert by_ids[0].token_ids == by_text[0].token_ids
    assert by_ids[0].prompt_ids == ids
    assert len(split.generate([ids, ids], GREEDY)) == 2


def test_a_stream_adds_up_to_the_answer(split: LLM):
    expected = split.generate("The sky is", GREEDY)[0].text
    assert "".join(split.stream("The sky is", GREEDY)) == expected


def test_a_stream_that_is_closed_ends_its_request(split: LLM):
    stream = split.stream("The sky is", SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True))
    next(stream)
    stream.close()
    assert settled(split)


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(split: LLM):
    whole = split.generate("The sky is", GREEDY)[0].text
    stop = whole[3:5]
    answer = split.generate("The sky is", GREEDY, stop=stop)[0]
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    assert settled(split)


def test_log_probabilities_come_one_a_token(split: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)
    answer = split.generate("The sky is", params)[0]
    assert answer.logprobs is not None
    assert [entry.top_ids[0] for entry in answer.logprobs] == answer.token_ids
    assert split.generate("The sky is", GREEDY)[0].logprobs is None


def test_a_conversation_goes_through_the_chat_template(split: LLM):
    messages = [{"role": "user", "content": "Hello"}]
    prompt = split.tokenizer.render_chat(messages)
    ids = split.tokenizer.encode(prompt, add_special_tokens=False)
    answer = split.chat(messages, GREEDY)
    assert answer.prompt_ids == ids
    assert answer.token_ids == split.generate(ids, GREEDY)[0].token_ids
    assert "".join(split.stream(messages, GREEDY)) == answer.text


def test_a_repeated_prompt_is_found_in_the_cache(split: LLM):
    prompt = "a long prompt that nobody else has asked about " * 4
    first, second = split.generate(prompt, GREEDY)[0], split.generate(prompt, GREEDY)[0]
    assert first.cached_tokens == 0
    assert second.cached_tokens > 100
    assert second.token_ids == first.token_ids


def test_a_batch_may_be_larger_than_the_queue(tiny: str):
    with LLM(tiny, max_waiting=4, max_sequences=2, **SMALL) as llm:
        answers = llm.generate([f"prompt {i}" for i in range(30)], SamplingParams(temperature=0.0, max_tokens=2))
    assert len(answers) == 30


@pytest.mark.parametrize(
    ("prompts", "sampling", "error"),
    [
        ("a", SamplingParams(max_tokens=100_000), ContextTooLong),
        ("x" * 5000, GREEDY, ContextTooLong),
        ([[1, 2, 999_999]], GREEDY, InvalidRequest),
        ([[]], GREEDY, InvalidRequest),
        (["a", "b"], [GREEDY], InvalidRequest),
        (5, GREEDY, InvalidRequest),
        (None, None, InvalidRequest),
        ([None], GREEDY, InvalidRequest),
        ([["a", "b"]], GREEDY, InvalidRequest),
        ([{"role": "user", "content": "a"}], GREEDY, InvalidRequest),
        ({"role": "user"}, GREEDY, InvalidRequest),
        (b"bytes", GREEDY, InvalidRequest),
        ("a", SamplingParams(temperature=-1.0), InvalidRequest),
        ("a", SamplingParams(max_tokens=0), InvalidRequest),
        ("a", SamplingParams(stop_token_ids=(999_999,)), InvalidRequest),
    ],
)
def test_wrong_input_is_refused_before_any_work(split: LLM, prompts, sampling, error):
    with pytest.raises(error):
        split.generate(prompts, sampling)
    assert sound(split)


def test_wrong_settings_are_refused_by_name(tiny: str):
    with pytest.raises(ConfigError, match=r"'page_token'.*did you mean page_tokens\?"):
        LLM(tiny, page_token=8)
    with pytest.raises(ConfigError, match=r"'prefil'.*did you mean prefill\?"):
        LLM(tiny, prefil=1)
    with pytest.raises(ConfigError, match=r"page_tokens=.*from 1 to 1024"):
        LLM(tiny, page_tokens=0)
    with pytest.raises(ConfigError, match="nothing to transfer"):
        LLM(tiny, transport="shm")
    with pytest.raises(ModelError, match="no/such"):
        LLM("./no/such/model")


def test_closing_ends_all_threads(tiny: str):
    before = set(threading.enumerate())
    llm = LLM(tiny, prefill=1, decode=1, **SMALL)
    llm.generate("a", GREEDY)
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(SlipstreamError, match="closed"):
        llm.generate("a", GREEDY)


def test_one_that_is_dropped_is_closed(tiny: str):
    before = set(threading.enumerate())
    llm = LLM(tiny, **SMALL)
    del llm
    assert set(threading.enumerate()) <= before


def test_one_that_is_left_to_the_end_of_the_program_is_closed_without_a_word(tiny: str):
    program = (
        "from slipstream import LLM, SamplingParams\n"
        f"llm = LLM({tiny!r}, prefill=1, decode=1, **{SMALL!r})\n"
        "print(llm.generate('a', SamplingParams(temperature=0.0, max_tokens=4))[0].finish_reason)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


def test_a_transport_that_serves_no_pair_is_an_error_with_its_reason(tiny: str):
    with pytest.raises(ConfigError, match="cuda_ipc moves memory of GPUs, and all workers here are on the CPU"):
        LLM(tiny, prefill=1, decode=1, transport="cuda_ipc", **SMALL)


def test_the_package_names_what_it_offers():
    assert slipstream.LLM is LLM
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = slipstream.nothing_like_this
