"""Builds a tokenizer from the metadata of a GGUF file.

Two families exist there. `gpt2`: byte-level BPE with its list of merges; the file names the pre-tokenizer (how text is
cut into words before merging) instead of carrying it, so the table below spells out the known ones. `llama`:
SentencePiece's BPE with a score for each piece and bytes as the last resort; its merges follow from the scores.

Added tokens (control, user defined) are found in the text before anything else, as whole units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from slipstream.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _modern(digits: str) -> str:
    """The cut of the newer byte-level vocabularies, which differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = _modern(r"\p{N}{1,3}")
_QWEN2 = _modern(r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Cut:
    """How text becomes words: these patterns, one after the other. `whole_words` looks a word up before merging;
    `bos` says whether the kind starts its prompts with the begin token when the file does not say; `nfc` whether it
    normalises."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_DIGITS_THEN_GPT2 = _Cut((r"\p{N}", _GPT2))
_CUTS: Mapping[str, _Cut] = {
    "gpt-2": _Cut((_GPT2,)),
    "mpt": _Cut((_GPT2,)),
    "olmo": _Cut((_GPT2,)),
    "phi-2": _Cut((_GPT2,)),
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "exaone": _DIGITS_THEN_GPT2,
    "llama-bpe": _Cut((_LLAMA3,), whole_words=True, bos=True),
    "llama3": _Cut((_LLAMA3,), whole_words=True, bos=True),
    "llama-v3": _Cut((_LLAMA3,), whole_words=True, bos=True),
    "falcon3": _Cut((_LLAMA3,), whole_words=True),
    "smaug-bpe": _Cut((_LLAMA3,)),
    "dbrx": _Cut((_LLAMA3,)),
    "qwen2": _Cut((_QWEN2,), nfc=True),
    "stablelm2": _Cut((_QWEN2,)),
    "deepseek-r1-qwen": _Cut((_QWEN2,), bos=True),
    "megrez": _Cut((_QWEN2,)),
    "tekken": _Cut((_TEKKEN,), whole_words=True, bos=True),
}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class GgufTokenizer:
    """What a GGUF file says of its words. `special` maps names as templates use them (`bos_token`) to token strings."""

    tokenizer: Tokenizer
    chat_template: str | None
    special: dict[str, str]
    add_bos: bool
    add_eos: bool
    sampling: dict[str, float]


def build(metadata: Mapping[str, Any], where: str) -> GgufTokenizer:
    """The tokenizer in this metadata; `where` names the file in errors. Raises ModelError."""
    family = metadata.get("tokenizer.ggml.model")
    pieces = cast("list[str] | None", metadata.get("tokenizer.ggml.tokens"))
    if family is None or pieces is None:
        raise ModelError(f"{where} holds no tokenizer (no tokenizer.ggml.tokens); give one with --tokenizer")
    kinds = cast("list[int]", metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces))
    if family == "gpt2":
        tokenizer, bos = _byte_level(metadata, pieces, where)
    elif family == "llama":
        tokenizer, bos = _sentence_piece(metadata, pieces, kinds, where), True
    else:
        raise ModelError(
            f"{where} has a tokenizer of the family {family!r}; `gpt2` (byte-level BPE) and `llama` (SentencePiece "
            "BPE) can be used. Give another tokenizer with --tokenizer"
        )
    _add_tokens(tokenizer, pieces, kinds)
    return GgufTokenizer(
        tokenizer=tokenizer,
        chat_template=cast("str | None", metadata.get("tokenizer.chat_template")),
        special=_special(metadata, pieces),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        sampling=sampling_defaults(metadata),
    )


def _byte_level(metadata: Mapping[str, Any], pieces: list[str], where: str) -> tuple[Tokenizer, bool]:
    merges = cast("list[str] | None", metadata.get("tokenizer.ggml.merges"))
    if merges is None:
        raise ModelError(f"{where} has no tokenizer.ggml.merges, which a gpt2 tokenizer needs")
    kind = str(metadata.get("tokenizer.ggml.pre", "default"))
    cut = _CUTS.get(kind)
    if cut is None:
        raise ModelError(
            f"{where} asks for the pre-tokenizer {kind!r}, which is not known; known are {', '.join(sorted(_CUTS))}. "
            "Give the model's own tokenizer folder with --tokenizer"
        )
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    pairs = [cast("tuple[str, str]", tuple(merge.split(" ", 1))) for merge in merges]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut.whole_words))
    except (ValueError, TypeError) as error:
        raise ModelError(f"the merges in {where} do not fit its vocabulary: {error}") from error
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.bos


def _sentence_piece(metadata: Mapping[str, Any], pieces: list[str], kinds: list[int], where: str) -> Tokenizer:
    scores = cast("list[float] | None", metadata.get("tokenizer.ggml.scores"))
    if scores is None or len(scores) != len(pieces):
        raise ModelError(f"{where} has no score for each of its {len(pieces)} pieces, which a llama tokenizer needs")
    unknown = pieces[kinds.index(UNKNOWN)] if UNKNOWN in kinds else None
    space_first = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return sentence_piece(pieces, scores, kinds, unknown=unknown, space_first=space_first)


def sentence_piece(
    pieces: list[str], scores: list[float], kinds: list[int], *, unknown: str | None, space_first: bool
) -> Tokenizer:
    """SentencePiece's BPE: always join the neighbours whose union scores best, until no union is a known piece."""
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    has_bytes = BYTE in kinds
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(pieces, scores, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space_first else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_first:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(pieces: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score of the union first."""
    usable = {piece for piece, kind in zip(pieces, kinds, strict=True) if kind in (NORMAL, USER_DEFINED)}
    ranked: list[tuple[float, int, str, str]] = []
    for token, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        if kind != NORMAL:
            continue
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in usable and right in usable:
                ranked.append((-scores[token], token, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, pieces: list[str], kinds: list[int]) -> None:
    control = [
        AddedToken(piece, special=True, normalized=False)
        for piece, kind in zip(pieces, kinds, strict=True)
        if kind in (CONTROL, UNKNOWN) and piece
    ]
    user = [
        AddedToken(piece, special=False, normalized=False)
        for piece, kind in zip(pieces, kinds, strict=True)
        if kind == USER_DEFINED and piece
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user)


def _special(metadata: Mapping[str, Any], pieces: list[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found: dict[str, str] = {}
    for key, name in names.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(pieces):
            found[name] = pieces[token]
    return found


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, float]:
    """What the file recommends (general.sampling.*), under our names."""
    keys = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in keys.items()}
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}
