"""Text to tokens and back, and the prompt of a conversation, without torch.

A `Tokenizer` is loaded from a Hugging Face folder (tokenizer.json, tokenizer_config.json, chat template) or from a
GGUF file's own metadata. Encoding is the `tokenizers` library's. Decoding is done here, from a table of the bytes of
each token: text is then the concatenation of bytes, so that it can be built token by token and never differs from
the whole.

`TokenizerService` is what the front asks: it loads in the background and moves long inputs to threads, so that the
event loop goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from slipstream.errors import InvalidRequest, ModelError
from slipstream.front import tokenizer_gguf
from slipstream.front.template import ChatTemplate, Message
from slipstream.model.files import BUNDLED_MODEL, HUB_ID, locate
from slipstream.model.gguf import GGUFFile

_HUB_FILES = ("*.json", "*.jinja")
# What the makers of the bundled model recommend for it; its file carries no such fields.
BUNDLED_SAMPLING: Mapping[str, float] = {"temperature": 0.2, "top_p": 0.9}
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Tokenizer:
    """One model's words.

    `pieces[id]` is the bytes of a token (`longest_piece` of them at most), `special_ids` those that are left out of
    the text unless asked for. `sampling_defaults` is what the model's makers recommend (generation_config.json).
    `chat_template` is None for a model that has none.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
    ) -> None:
        self._encoder = encoder
        encoder.no_truncation()
        encoder.no_padding()
        encoder.encode_special_tokens = False
        self.special = dict(special or {})
        self.sampling_defaults = dict(sampling_defaults or {})
        self.chat_template = ChatTemplate(chat_template, self.special) if chat_template else None
        self.special_ids = frozenset(i for i, t in encoder.get_added_tokens_decoder().items() if t.special)
        self.pieces, self._strip_first_space = _pieces(encoder)
        self.longest_piece = max(map(len, self.pieces), default=1) or 1
        self._prefix, self._suffix = self._frame(add_bos, add_eos)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids are 0 to vocab_size - 1."""
        return len(self.pieces)

    def id_of(self, token: str) -> int | None:
        return self._encoder.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text; special tokens written in it are recognised.

        With `add_special_tokens` the model's begin (and end) token is put around it, where the model wants that.
        """
        try:
            ids = self._encoder.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(f"the text cannot be encoded as UTF-8 (a lone surrogate?): {error}") from error
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False, continued: bool = False) -> str:
        """The text of these tokens; bytes that are no UTF-8 become U+FFFD.

        SentencePiece vocabularies write a space before the first word: it is dropped here, unless the tokens are
        `continued`, behind other text.
        """
        pieces, special = self.pieces, self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(pieces[i] for i in ids if i not in special and 0 <= i < len(pieces))
        if self._strip_first_space and not continued and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """One token for people and clients: its text, or `bytes:\\xe2\\x82` when it is only part of a character."""
        piece = self.pieces[token] if 0 <= token < len(self.pieces) else b""
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. Raises InvalidRequest without a template, or when it refuses."""
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions with the prompt in the model's own format",
                param="messages",
            )
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def _frame(self, add_bos: bool | None, add_eos: bool | None) -> tuple[list[int], list[int]]:
        """What the model wants before and behind a prompt: told by its post-processor, unless its config says so."""
        bare = self._encoder.encode("a", add_special_tokens=False).ids
        full = self._encoder.encode("a", add_special_tokens=True).ids
        start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        prefix, suffix = full[:start], full[start + len(bare) :]
        if add_bos is not None:
            prefix = self._ids_of("bos_token") if add_bos else []
        if add_eos is not None:
            suffix = self._ids_of("eos_token") if add_eos else []
        return prefix, suffix

    def _ids_of(self, name: str) -> list[int]:
        token = self.id_of(self.special.get(name, ""))
        return [] if token is None else [token]


# ------------------------------------------------------------------------------------------------------ bytes of tokens


def byte_of_symbol() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: printable Latin-1 as itself, the rest from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update((chr(256 + at), byte) for at, byte in enumerate(others))
    return table


def _decoder_kinds(encoder: Encoder) -> list[str]:
    if encoder.decoder is None:
        return []
    state = json.loads(encoder.decoder.__getstate__())
    kinds: list[str] = []

    def walk(node: dict[str, Any]) -> None:
        kinds.append(str(node.get("type")))
        for child in node.get("decoders", ()):
            walk(child)

    walk(state)
    return kinds


def _pieces(encoder: Encoder) -> tuple[list[bytes], bool]:
    """The bytes of each token, and whether the first space of a text is the vocabulary's own."""
    kinds = _decoder_kinds(encoder)
    added = {token: entry.content for token, entry in encoder.get_added_tokens_decoder().items()}
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    pieces = [b""] * size
    if "ByteLevel" in kinds:
        symbols = byte_of_symbol()
        for text, token in vocabulary.items():
            pieces[token] = _symbols_to_bytes(text, symbols)
        strip = False
    elif "ByteFallback" in kinds or "Metaspace" in kinds or "Replace" in kinds:
        for text, token in vocabulary.items():
            pieces[token] = _sentence_piece_to_bytes(text)
        strip = "Strip" in kinds or "Metaspace" in kinds
    else:
        raise ModelError(
            f"this tokenizer decodes by {kinds or 'nothing'}; byte-level and SentencePiece vocabularies can be used"
        )
    for token, text in added.items():
        pieces[token] = text.encode("utf-8", "replace")
    return pieces, strip


def _symbols_to_bytes(text: str, symbols: Mapping[str, int]) -> bytes:
    try:
        return bytes([symbols[symbol] for symbol in text])
    except KeyError:
        return b"".join(bytes((symbols[s],)) if s in symbols else s.encode("utf-8", "replace") for s in text)


def _sentence_piece_to_bytes(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes((int(text[3:5], 16),))
        except ValueError:
            pass
    return text.replace("▁", " ").encode("utf-8", "replace")


# -------------------------------------------------------------------------------------------------------------- loading


def tokenizer_from_gguf(path: str | Path) -> Tokenizer:
    """The tokenizer that a GGUF file carries. Raises ModelError."""
    found = tokenizer_gguf.build(_gguf_metadata(path), str(path))
    return Tokenizer(
        found.tokenizer,
        chat_template=found.chat_template,
        special=found.special,
        add_bos=found.add_bos,
        add_eos=found.add_eos,
        sampling_defaults=found.sampling,
    )


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises ModelError, naming the file that is missing or broken."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json. Save the tokenizer in that format (a `fast` tokenizer), or give another "
            "one with --tokenizer"
        )
    try:
        encoder = Encoder.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ModelError(f"{path} cannot be read: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    _add_missing_tokens(encoder, config.get("added_tokens_decoder") or {})
    return Tokenizer(
        encoder,
        chat_template=_chat_template(folder, config),
        special=_special_tokens(_read_json(folder / "special_tokens_map.json"), config),
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
        sampling_defaults=read_sampling_defaults(folder),
    )


def read_sampling_defaults(folder: str | Path) -> dict[str, float]:
    """What generation_config.json recommends, under our names; empty without such a file."""
    config = _read_json(Path(folder) / "generation_config.json")
    return {name: config[name] for name in _SAMPLING_FIELDS if isinstance(config.get(name), (int, float))}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


def _add_missing_tokens(encoder: Encoder, entries: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json lists; added in order of their ids, which must come out as written."""
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        content = entry["content"]
        if encoder.token_to_id(content) is not None:
            continue
        flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        token = AddedToken(content, special=bool(entry.get("special")), **flags)
        (encoder.add_special_tokens if token.special else encoder.add_tokens)([token])
        if encoder.token_to_id(content) != int(key):
            raise ModelError(
                f"tokenizer_config.json gives {content!r} the id {key}, tokenizer.json has room for it only at "
                f"{encoder.token_to_id(content)}: the two files do not belong together"
            )


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in sources:
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Newest form first: a file of its own, a JSON file, tokenizer_config.json (one template, or several by name)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default") or next(iter(named.values()), None)
    if entry is not None and not isinstance(entry, str):
        raise ModelError(f"the chat template of {folder} is no text but {type(entry).__name__}")
    return entry


def load_tokenizer(model: str, tokenizer: str = "") -> Tokenizer:
    """The tokenizer of a model by its name (`smollm2`, a folder, a .gguf file, a hub id), or another one for it.

    Of a hub id only the small text files are fetched, not the weights. Raises ModelError.
    """
    if not tokenizer:
        return _load(model)
    other = _load(tokenizer)
    if model:
        other.sampling_defaults = _sampling_defaults_of(model)
    return other


def _load(name: str) -> Tokenizer:
    path = _find(name)
    tokenizer = tokenizer_from_gguf(path) if path.is_file() else tokenizer_from_folder(path)
    if name == BUNDLED_MODEL:
        tokenizer.sampling_defaults = {**BUNDLED_SAMPLING, **tokenizer.sampling_defaults}
    return tokenizer


def _sampling_defaults_of(model: str) -> dict[str, float]:
    path = _find(model)
    if path.is_file():
        found = tokenizer_gguf.sampling_defaults(_gguf_metadata(path))
        return {**BUNDLED_SAMPLING, **found} if model == BUNDLED_MODEL else found
    return read_sampling_defaults(path)


def _find(name: str) -> Path:
    """The folder or GGUF file that holds the words of a model."""
    path = Path(name).expanduser()
    if (path / "tokenizer.json").is_file():
        return path
    if HUB_ID.fullmatch(name) and not name.endswith(".gguf") and not path.exists():
        return _hub_folder(name)
    files = locate(name, need_weights=False)
    return Path(files.weights[0]) if files.kind == "gguf" else Path(files.folder)


def _hub_folder(name: str) -> Path:
    """The snapshot of a hub model with its tokenizer files, from the cache if they are there."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), local_files_only=True))
        if (folder / "tokenizer.json").is_file():
            return folder
    except (OSError, ValueError):
        pass  # not in the cache
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise ModelError(
            f"the tokenizer of {name} is not in the hub's cache and cannot be fetched "
            f"({type(error).__name__}: {error}). "
            "Download it where there is a network, or give a folder with --tokenizer"
        ) from error


def _gguf_metadata(path: str | Path) -> Mapping[str, Any]:
    try:
        return GGUFFile(str(path)).metadata
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
