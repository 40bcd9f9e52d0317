"""From a decoded body to what the engine is asked: prompts, sampling, how the answer is to be told.

Here the fields that depend on each other are checked, the defaults are settled (the request's value, else what the
model's makers recommend, else the API's), and prompt plus answer are held against the model's context.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.errors import ContextTooLong, InvalidRequest
from slipstream.front.schema import MAX_PROMPTS, ChatBody, CompletionBody, GenerationBody, check_value, show
from slipstream.front.tokenizer import Tokenizer
from slipstream.types import SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE_FIELDS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call", "annotations")
) | frozenset(("reasoning_content", "reasoning"))
SEED_SPAN = 1 << 63


class Prompt(msgspec.Struct, frozen=True):
    """One prompt as tokens; `text` only where the answer repeats it."""

    ids: list[int]
    text: str = ""


class Telling(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer becomes text and JSON."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives to list beside each token; None is no log-probabilities at all
    echo: bool = False
    return_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    only_prompt: bool = False  # max_tokens 0: the engine makes one token that nobody is shown


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the prompts. `sampling.seed` is that of the first choice, the i-th adds i."""

    sampling: SamplingParams
    telling: Telling
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    max_tokens: int | None = None  # as given; None is "not given"


def ask_of(body: ChatBody | CompletionBody, tokenizer: Tokenizer) -> Ask:
    """Settles everything of the body but its prompt. Raises InvalidRequest."""
    given = _max_tokens(body)
    logprobs = _logprobs(body)
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    only_prompt = given == 0
    if only_prompt and not echo:
        unless = " (0 only together with echo)" if isinstance(body, CompletionBody) else ""
        raise InvalidRequest(f"max_tokens must be at least 1{unless}", param="max_tokens")
    min_tokens = body.min_tokens or 0
    if given is not None and min_tokens > max(given, 1):
        raise InvalidRequest(f"min_tokens ({min_tokens}) must not exceed max_tokens ({given})", param="min_tokens")
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed together with stream=true", param="stream_options")
    return Ask(
        sampling=_sampling(body, tokenizer, logprobs, echo, min_tokens),
        telling=Telling(
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=min_tokens,
            logprobs=logprobs,
            echo=echo,
            return_token_ids=bool(body.return_token_ids),
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            only_prompt=only_prompt,
        ),
        n=body.n or 1,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        max_tokens=1 if only_prompt else given,
    )


def _max_tokens(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.max_tokens
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) are two names of one limit; send one of them",
            param="max_tokens",
        )
    return old if new is None else new


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed together with logprobs=true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _sampling(
    body: GenerationBody, tokenizer: Tokenizer, logprobs: int | None, echo: bool, min_tokens: int
) -> SamplingParams:
    model = tokenizer.sampling_defaults

    def settle(name: str, default: float) -> float:
        value = getattr(body, name)
        return model.get(name, default) if value is None else value

    _check_ids(body.stop_token_ids or (), tokenizer, "stop_token_ids")
    _check_ids(body.logit_bias or (), tokenizer, "logit_bias")
    return SamplingParams(
        temperature=float(settle("temperature", 1.0)),
        top_k=max(0, int(settle("top_k", 0))),
        top_p=float(settle("top_p", 1.0)),
        min_p=float(settle("min_p", 0.0)),
        repetition_penalty=float(settle("repetition_penalty", 1.0)),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=secrets.randbelow(SEED_SPAN) if body.seed is None else body.seed % SEED_SPAN,
        logit_bias=body.logit_bias or {},
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )


CHECKED = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "logit_bias", "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos",
)  # fmt: skip


def checked_sampling(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters of a caller in Python, held against the bounds of the API's fields, as a worker takes them.

    Raises InvalidRequest.
    """
    for name in CHECKED:
        check_value(name, getattr(params, name))
    if params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1; {params.max_tokens} was given", param="max_tokens")
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})", param="min_tokens"
        )
    for count in (params.logprobs, params.prompt_logprobs):
        check_value("logprobs", count, CompletionBody)
    _check_ids(params.stop_token_ids, tokenizer, "stop_token_ids")
    _check_ids(params.logit_bias, tokenizer, "logit_bias")
    return msgspec.structs.replace(params, top_k=max(0, params.top_k), seed=params.seed % SEED_SPAN)


def _check_ids(ids: Sequence[int] | Mapping[int, float], tokenizer: Tokenizer, param: str) -> None:
    size = tokenizer.vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise InvalidRequest(f"{param}: token ids are 0 to {size - 1}; {token} was given", param=param)


def answer_tokens(prompt: int, ask: Ask, max_model_len: int, default: int, param: str = "messages") -> int:
    """How many tokens the answer to a prompt of this length may have.

    `default` is for a request that names no limit; 0 is all that the context leaves. `param` is the field that
    holds the prompt. Raises ContextTooLong.
    """
    room = max_model_len - prompt
    wanted = ask.max_tokens
    if wanted is None and room < 1:
        raise prompt_too_long(prompt, max_model_len, param)
    if wanted is None:
        wanted = min(default or room, room)
    if wanted > room:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens and max_tokens is {wanted}, together {prompt + wanted}; this model's "
            f"context is {max_model_len} tokens. Shorten the prompt or ask for fewer tokens",
            param=param if room < 1 else "max_tokens",
        )
    return wanted


def prompt_too_long(prompt: int, max_model_len: int, param: str, which: str = "the prompt") -> ContextTooLong:
    """The refusal of a prompt that leaves no token for an answer, where nothing was said of the answer's length."""
    return ContextTooLong(
        f"{which} has {prompt} tokens; this model's context is {max_model_len} tokens for prompt and answer together. "
        "Shorten the prompt",
        param=param,
    )


def check_characters(characters: int, tokenizer: Tokenizer, max_model_len: int, param: str) -> None:
    """Refuses, before it is tokenized, a text that cannot fit whatever its tokens are. Raises ContextTooLong."""
    least = -(-characters // tokenizer.longest_piece)
    if least > max_model_len:
        raise ContextTooLong(
            f"the prompt has {characters} characters, which are at least {least} tokens; this model's context is "
            f"{max_model_len} tokens. Shorten the prompt",
            param=param,
        )


# -------------------------------------------------------------------------------------------------------------- prompts


def messages_of(messages: Sequence[Any], template: str) -> list[dict[str, Any]]:
    """The conversation in the form that chat templates expect: text content as one string, `developer` as `system`.

    Raises InvalidRequest naming the message, and when `template` (its source) knows nothing of tool calls that the
    conversation has.
    """
    return [_message(message, f"messages[{at}]", template) for at, message in enumerate(messages)]


def _message(message: Any, where: str, template: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object with role and content; {show(message)} was given", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}; {show(role)} was given", param=f"{where}.role"
        )
    for name in message:
        if name not in _MESSAGE_FIELDS:
            raise InvalidRequest(
                f"unknown field {where}.{name}; known are {', '.join(sorted(_MESSAGE_FIELDS))}", param=f"{where}.{name}"
            )
    if message.get("audio") or message.get("function_call"):
        name = "audio" if message.get("audio") else "function_call"
        raise InvalidRequest(f"{where}.{name} is not supported by this server", param=f"{where}.{name}")
    kept = {
        name: value for name, value in message.items() if value is not None and name not in ("audio", "function_call")
    }
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _content(message, where)
    if kept.get("tool_calls"):
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], where, template)
    return kept


def _content(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise InvalidRequest(
            f"{where}.content must be a string or a list of text parts; {show(content)} was given",
            param=f"{where}.content",
        )
    texts = []
    for at, part in enumerate(content):
        path = f"{where}.content[{at}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(kind, str) and kind != "text":
            raise InvalidRequest(
                f"{path}: parts of type {show(kind)} are not supported by this server, only text is", param=path
            )
        else:
            raise InvalidRequest(
                f'{path} must be {{"type": "text", "text": "..."}}; {show(part)} was given', param=path
            )
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str, template: str) -> list[Any]:
    """Earlier tool calls; templates expect the arguments as an object, the API has them as JSON text."""
    if "tool_calls" not in template:
        raise InvalidRequest(
            f"{where}.tool_calls: the model's chat template knows nothing of tool calls", param=f"{where}.tool_calls"
        )
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    ):
        raise InvalidRequest(f"{where}.tool_calls must be a list of tool calls", param=f"{where}.tool_calls")
    settled = []
    for call in calls:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise InvalidRequest(
                    f"{where}.tool_calls: arguments must be JSON; {show(function['arguments'])} was given",
                    param=f"{where}.tool_calls",
                ) from None
        settled.append({**call, "function": function})
    return settled


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion body: one or several, each text or token ids. Raises InvalidRequest."""
    wanted = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if isinstance(prompt, str):
        return [prompt]
    if prompt is msgspec.UNSET or prompt is None:
        raise InvalidRequest(f"prompt is missing; it must be {wanted}", param="prompt")
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"prompt must be {wanted}; {show(prompt)} was given", param="prompt")
    if _is_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt")
    if all(isinstance(entry, str) for entry in prompt) or all(
        isinstance(entry, list) and _is_ids(entry) for entry in prompt
    ):
        return prompt
    raise InvalidRequest(f"prompt must be {wanted}; {show(prompt)} was given", param="prompt")


def check_count(prompts: int, n: int) -> None:
    """Raises InvalidRequest for more answers than one request may ask for."""
    if prompts * n > MAX_PROMPTS:
        raise InvalidRequest(
            f"{prompts} prompts with n={n} are {prompts * n} answers; one request may ask for {MAX_PROMPTS}", param="n"
        )


def _is_ids(entry: list[Any]) -> bool:
    return bool(entry) and all(type(token) is int for token in entry)


def check_prompt_ids(ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """Raises InvalidRequest for an empty prompt or an id outside the vocabulary."""
    if not ids:
        raise InvalidRequest(f"{param} is empty: the model needs at least one token to start from", param=param)
    if min(ids) < 0 or max(ids) >= tokenizer.vocab_size:
        bad = next(token for token in ids if not 0 <= token < tokenizer.vocab_size)
        raise InvalidRequest(f"{param}: token ids are 0 to {tokenizer.vocab_size - 1}; {bad} was given", param=param)
