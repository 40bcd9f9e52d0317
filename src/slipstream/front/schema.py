"""The bodies of /v1/chat/completions and /v1/completions, and what is said about a wrong one.

Every field has its type, its range and, as its description, that range in words: the same words are in the error of a
wrong value and in docs/http-api.md. A field that is not here is an error that names its nearest neighbour. A field of
the OpenAI API whose feature does not exist here is listed with the values that ask for nothing; any other value is an
error, so that nothing is dropped silently. Fields that only concern the provider's bookkeeping (`user`, `store`, ...)
are accepted.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from slipstream.errors import InvalidRequest

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 2048

_Bool = Annotated[bool, Meta(description="true or false")]
_Count = Annotated[int, Meta(ge=1, description="an integer of at least 1")]
_Text = Annotated[str, Meta(description="a string")]
_Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2")]
_Object = Annotated[dict[str, Any], Meta(description="an object")]
_TokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, description="a token id")]],
    Meta(max_length=1024, description="a list of up to 1024 token ids"),
]
_StopString = Annotated[
    str, Meta(min_length=1, max_length=MAX_STOP_LENGTH, description="a string of 1 to 1024 characters")
]
_LogitBias = Annotated[
    dict[int, Annotated[float, Meta(ge=-100, le=100, description="a number from -100 to 100")]],
    Meta(max_length=4096, description="an object that maps token ids to numbers from -100 to 100"),
]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`include_obfuscation` is accepted: there is no obfuscation to include."""

    include_usage: _Bool | None = None
    continuous_usage_stats: _Bool | None = None
    include_obfuscation: _Bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request share. None is "not given": the default follows from the model or the endpoint."""

    model: _Text | None = None
    max_tokens: Annotated[int, Meta(ge=0, description="an integer of at least 1")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="a number from 0 to 2")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number over 0, up to 1")] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")] | None = None
    stop: (
        Annotated[
            _StopString | Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)],
            Meta(description=f"a string or a list of up to {MAX_STOP_STRINGS} strings, each of 1 to 1024 characters"),
        ]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1, description="a 64-bit integer")] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _LogitBias | None = None
    stream: _Bool | None = None
    stream_options: StreamOptions | None = None
    # beyond OpenAI's
    top_k: (
        Annotated[int, Meta(ge=-1, lt=1 << 31, description="a 32-bit integer of at least 1, or 0 or -1 for off")] | None
    ) = None
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10, description="a number over 0, up to 10")] | None = None
    stop_token_ids: _TokenIds | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31, description="a 32-bit integer of at least 0")] | None = None
    ignore_eos: _Bool | None = None
    skip_special_tokens: _Bool | None = None
    include_stop_str_in_output: _Bool | None = None
    add_special_tokens: _Bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31, description="a 32-bit integer")] | None = None
    cache_salt: (
        Annotated[str, Meta(min_length=1, max_length=256, description="a string of 1 to 256 characters")] | None
    ) = None
    return_token_ids: _Bool | None = None
    # bookkeeping of providers, accepted without effect
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Any], Meta(min_length=1, description="a list of at least one message")]
    max_completion_tokens: _Count | None = None
    logprobs: _Bool | None = None
    top_logprobs: (
        Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS, description=f"an integer from 0 to {MAX_TOP_LOGPROBS}")] | None
    ) = None
    chat_template_kwargs: _Object | None = None
    add_generation_prompt: _Bool | None = None
    continue_final_message: _Bool | None = None
    parallel_tool_calls: Any = None
    # features that do not exist here; see ASKS_NOTHING
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Any | UnsetType = UNSET
    echo: _Bool | None = None
    logprobs: (
        Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS, description=f"an integer from 0 to {MAX_TOP_LOGPROBS}")] | None
    ) = None
    # features that do not exist here; see ASKS_NOTHING
    suffix: Any = None
    best_of: Any = None
    response_format: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or the messages of a conversation."""

    model: _Text | None = None
    prompt: _Text | None = None
    messages: Annotated[list[Any], Meta(min_length=1, description="a list of at least one message")] | None = None
    add_special_tokens: _Bool | None = None
    add_generation_prompt: _Bool | None = None
    continue_final_message: _Bool | None = None
    chat_template_kwargs: _Object | None = None
    return_token_strs: _Bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: _Text | None = None
    tokens: Annotated[
        list[Annotated[int, Meta(ge=0, description="a token id")]], Meta(description="a list of token ids")
    ]
    skip_special_tokens: _Bool | None = None


class WorkerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /workers: the HTTP address of a worker to add."""

    url: Annotated[str, Meta(min_length=1, description="a URL such as http://127.0.0.1:8101")]
    role: Annotated[typing.Literal["prefill", "decode", "both"], Meta(description="prefill, decode or both")] | None = (
        None
    )
    joins: Annotated[bool, Meta(description="true or false")] | None = (
        None  # the worker itself asks, until it is linked
    )


# The values of unsupported fields that ask for nothing; null, false, "", [] and {} always do.
ASKS_NOTHING: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "tools": ("tool calling", ()),
    "tool_choice": ("tool calling", ("none", "auto")),
    "functions": ("tool calling", ()),
    "function_call": ("tool calling", ("none", "auto")),
    "response_format": ("structured output", ({"type": "text"},)),
    "audio": ("audio output", ()),
    "modalities": ("output other than text", (["text"],)),
    "prediction": ("predicted output", ()),
    "web_search_options": ("web search", ()),
    "reasoning_effort": ("a reasoning effort", ("none",)),
    "verbosity": ("a verbosity", ("medium",)),
    "suffix": ("text insertion", ()),
    "best_of": ("choosing the best of several answers", (1,)),
}

Body = TypeVar("Body", bound=msgspec.Struct)


class BodyDecoder(typing.Generic[Body]):
    """Decodes request bodies of one kind; InvalidRequest names the field, what was given, and what is allowed."""

    def __init__(self, kind: type[Body]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    def __call__(self, body: bytes) -> Body:
        try:
            try:
                decoded = self._decoder.decode(body)
            except msgspec.ValidationError as error:
                raise explain(body, self._kind, str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        check_unsupported(decoded)
        return decoded


def check_unsupported(body: msgspec.Struct) -> None:
    """Refuses whatever asks for a feature that does not exist here."""
    choice = getattr(body, "tool_choice", None)
    for name, (feature, harmless) in ASKS_NOTHING.items():
        value = getattr(body, name, None)
        if not value or value in harmless:
            continue
        if name == "tools" and choice == "none":
            continue
        instead = " or ".join(["absent", *(show(entry) for entry in harmless)])
        raise InvalidRequest(
            f"{name}: {feature} is not supported by this server; {show(value)} was given, the field must be {instead}",
            param=name,
        )


def check_value(name: str, value: Any, kind: type[msgspec.Struct] = GenerationBody) -> None:
    """Holds a value that did not come in a body against the bounds of the body's field. Raises InvalidRequest."""
    wrong = isinstance(value, float) and not math.isfinite(value)  # NaN is in all bounds, as no bound is over it
    with contextlib.suppress(msgspec.ValidationError):
        if not wrong:
            msgspec.convert(value, _hints(kind)[name])
            return
    shown = str(value) if wrong else show(value)
    raise InvalidRequest(f"{name} must be {allowed(kind, name)}; {shown} was given", param=name)


# ----------------------------------------------------------------------------------------------------------- explaining


def explain(body: bytes, kind: type[msgspec.Struct], complaint: str) -> InvalidRequest:
    """The error for a body that is valid JSON but does not fit `kind`; `complaint` is the decoder's own."""
    value = msgspec.json.decode(body)
    if not isinstance(value, dict):
        return InvalidRequest(f"the body must be a JSON object; {show(value)} was given")
    match = re.search(r"(?: - at | in )`(?:key` in `)?\$\.?(?P<path>[^`]*)`$", complaint)
    path = match["path"] if match else ""
    top = re.split(r"[.\[]", path, maxsplit=1)[0]
    unknown = re.search(r"unknown field `(?P<name>[^`]*)`", complaint)
    if unknown:
        owner = _struct_at(kind, top) if top else kind
        return _unknown_field(unknown["name"], top, owner)
    missing = re.search(r"missing required field `(?P<name>[^`]*)`", complaint)
    if missing and not path:
        name = missing["name"]
        return InvalidRequest(f"{name} is missing; it must be {allowed(kind, name)}", param=name)
    if not top:
        return InvalidRequest(complaint)
    given = value.get(top)
    if isinstance(given, dict) and path.startswith(top + ".") and _struct_at(kind, top) is not kind:
        inner = path[len(top) + 1 :]
        words = allowed(_struct_at(kind, top), inner)
        return InvalidRequest(f"{path} must be {words}; {show(given.get(inner))} was given", param=path)
    return InvalidRequest(f"{top} must be {allowed(kind, top)}; {show(given)} was given", param=top)


def _unknown_field(name: str, owner: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    fields = kind.__struct_fields__
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
    path = f"{owner}.{name}" if owner else name
    hint = f"did you mean {near[0]}?" if near else "docs/http-api.md lists the fields that are known"
    return InvalidRequest(f"unknown field {path}; {hint}", param=path)


def _struct_at(kind: type[msgspec.Struct], field: str) -> type[msgspec.Struct]:
    """The struct that a field holds, or `kind` when it holds none."""
    for option in _options(_hints(kind).get(field)):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option
    return kind


def allowed(kind: type[msgspec.Struct], field: str) -> str:
    """The description of a field's values, in words."""
    for option in _options(_hints(kind).get(field)):
        for note in getattr(option, "__metadata__", ()):
            if isinstance(note, Meta) and note.description:
                return note.description
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return "an object with the fields " + ", ".join(option.__struct_fields__)
    return "of another type"


def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def show(value: Any, limit: int = 80) -> str:
    """A value for an error message: as JSON, cut where it gets long."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= limit else text[:limit] + "..."
