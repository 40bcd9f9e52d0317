"""What the server under test is: its model, and which of the fields that a benchmark needs it takes.

A bare request must work. Each further field is then tried by a request of its own, and one that is refused is left out
of the benchmark's requests and named in its notes. For prompts as text the server's usage of two texts gives the tokens
a word, and those that its chat template adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from slipstream.bench.serve.client import Client
from slipstream.bench.serve.stream import Stream
from slipstream.bench.serve.words import WORDS
from slipstream.errors import ConfigError, SetupError

Api = Literal["completions", "chat"]
UsageWay = Literal["none", "final", "every"]
NAME_S = 15.0  # for the list of models, which costs a server nothing
PROBE_S = 120.0  # for a first answer, before which a server may compile
FULL_IDS, BYTE_IDS = (1000, 30000), (10, 250)  # plain tokens of large vocabularies, and of byte tokenizers


class NoServer(SetupError):
    """There is no usable server at the address; the message says what answered instead."""

    code = "no_server"


@dataclass(frozen=True)
class Target:
    """A server as the benchmark sees it. `ids` is the range (low, high exclusive) of token ids that prompts are made
    of; `words_per_token` and `overhead_tokens` describe prompts as text; `notes` are what it does not take;
    `patience_s` bounds each request that finds these out."""

    host: str
    port: int
    tls: bool
    path: str
    model: str
    api: Api = "completions"
    server: str = ""
    max_model_len: int = 0
    ids: tuple[int, int] = FULL_IDS
    takes_ids: bool = False
    takes_ignore_eos: bool = False
    takes_min_tokens: bool = False
    takes_token_ids: bool = False
    usage: UsageWay = "none"
    limit_field: str = "max_tokens"
    words_per_token: float = 1.0
    overhead_tokens: float = 0.0
    notes: tuple[str, ...] = field(default=())
    patience_s: float = PROBE_S

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"{self.path}/chat/completions" if self.api == "chat" else f"{self.path}/completions"

    def words_for(self, tokens: int) -> int:
        """Words of a text that the server counts as `tokens` tokens, template included."""
        return max(1, round((tokens - self.overhead_tokens) * self.words_per_token))


def parse_url(url: str) -> tuple[str, int, bool, str]:
    """(host, port, TLS?, path of the API) of http://host:port, with or without /v1. Raises ConfigError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:  # a bracket without its other one, a port out of range
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"--url {url!r} is no address of a server; write it like http://127.0.0.1:8000.")
    tls = parts.scheme == "https"
    return parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/") or "/v1"


async def discover(
    client: Client,
    url: str,
    *,
    model: str = "",
    api: Api = "completions",
    usage: UsageWay | None = None,
    patience_s: float = PROBE_S,
) -> Target:
    """Asks the server for its model and tries the fields, for `patience_s` each at most. Raises NoServer."""
    host, port, tls, path = parse_url(url)
    target = Target(host, port, tls, path, model, api, patience_s=min(PROBE_S, patience_s))
    target = await _named(client, target)
    problem = await _try(client, target, {})
    if problem and api == "chat" and await _try(client, replace(target, limit_field="max_completion_tokens"), {}) == "":
        target, problem = replace(target, limit_field="max_completion_tokens"), ""
    if problem:
        raise NoServer(
            f"a plain request to {target.url}{target.endpoint} for the model {target.model!r} failed: {problem}"
        )
    target = await _extras(client, target)
    target = await _usage_way(client, target, usage)
    if api == "completions":
        target = await _token_ids(client, target)
    return target if target.takes_ids else await measure_words(client, target)


async def _named(client: Client, target: Target) -> Target:
    """With the server's model; with one that was named, only its context if the server tells."""
    status, body = await client.get(f"{target.path}/models", NAME_S)
    if status == 0:
        raise NoServer(f"nothing answers at {target.url}: {body.decode(errors='replace')}")
    try:
        cards = msgspec.json.decode(body)["data"] if status == 200 else []
        cards = [card for card in cards if isinstance(card.get("id"), str)]
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, RecursionError):
        cards = []
    card = next((card for card in cards if card["id"] == target.model or not target.model), None)
    if card is None and not target.model:
        raise NoServer(
            f"{target.url}{target.path}/models answered {status} and names no model; give its name with --model."
        )
    if card is None:
        return target
    length = card.get("max_model_len")
    return replace(
        target,
        model=card["id"],
        server=str(card.get("owned_by") or ""),
        max_model_len=length if isinstance(length, int) else 0,
    )


async def _usage_way(client: Client, target: Target, wanted: UsageWay | None) -> Target:
    if wanted == "none":
        return replace(target, usage="none")
    asked: UsageWay = wanted or "final"
    options = {"include_usage": True, **({"continuous_usage_stats": True} if asked == "every" else {})}
    stream = await _sent(client, target, {"stream_options": options})
    if not _problem(stream) and stream.output_tokens is not None:
        return replace(target, usage=asked)
    return _noted(target, "it gives no usage in streams: tokens are counted by events, lengths of prompts as asked")


async def _extras(client: Client, target: Target) -> Target:
    if await _try(client, target, {"ignore_eos": True}) == "":
        target = replace(target, takes_ignore_eos=True)
    elif await _try(client, target, {"min_tokens": 2}) == "":
        target = _noted(replace(target, takes_min_tokens=True), "it takes min_tokens, but not ignore_eos")
    else:
        target = _noted(target, "it takes neither ignore_eos nor min_tokens: answers may end before the wanted length")
    stream = await _sent(client, target, {"return_token_ids": True})
    return replace(target, takes_token_ids=not _problem(stream) and stream.told_ids)


async def _token_ids(client: Client, target: Target) -> Target:
    for ids in (FULL_IDS, BYTE_IDS):
        prompt = [ids[0], ids[1] - 1, *range(ids[0], ids[0] + 30)]
        stream = await _sent(client, target, {"prompt": prompt})
        if not _problem(stream) and stream.prompt_tokens in (None, len(prompt)):
            return replace(target, takes_ids=True, ids=ids)
    return _noted(target, "it does not take prompts as token ids: they are texts, of about the wanted length")


async def measure_words(client: Client, target: Target) -> Target:
    """Learns from the usage of two texts how many words make how many tokens."""
    counts = []
    texts = WORDS[::3], WORDS  # apart by words from all over the list, as prompts draw them
    for words in texts:
        stream = await _sent(client, target, _prompt(target, " ".join(words)))
        counts.append(stream.prompt_tokens)
    few, many = counts
    if few is None or many is None or many <= few:
        return _noted(target, "it tells no prompt lengths: a word is taken for a token")
    slope = (many - few) / (len(texts[1]) - len(texts[0]))
    return replace(target, words_per_token=1 / slope, overhead_tokens=few - len(texts[0]) * slope)


async def characters_per_token(client: Client, target: Target, texts: list[str]) -> float:
    """Of these texts, by the server's usage; 4 when it tells none."""
    sample = "\n".join(texts)[:4000]
    stream = await _sent(client, target, _prompt(target, sample))
    tokens = (stream.prompt_tokens or 0) - target.overhead_tokens
    return len(sample) / tokens if tokens > 0 and not _problem(stream) else 4.0


def _noted(target: Target, note: str) -> Target:
    return replace(target, notes=(*target.notes, note))


def _prompt(target: Target, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if target.api == "chat" else {"prompt": text}


async def _try(client: Client, target: Target, fields: dict[str, Any]) -> str:
    """What is wrong with a small request that has these fields; "" when nothing is."""
    return _problem(await _sent(client, target, fields))


def _problem(stream: Stream) -> str:
    """An answer without a token is one: a model may end at once."""
    return f"{stream.problem}: {stream.detail}" if stream.problem not in ("", "empty") else ""


async def _sent(client: Client, target: Target, fields: dict[str, Any]) -> Stream:
    stream = Stream()
    body: dict[str, Any] = {"model": target.model, "stream": True, target.limit_field: 2, **_prompt(target, "one two")}
    if target.usage != "none":
        body["stream_options"] = {"include_usage": True}
    if target.takes_ignore_eos:
        body["ignore_eos"] = True
    payload = client.request("POST", target.endpoint, msgspec.json.encode({**body, **fields}))
    await client.exchange(payload, stream, target.patience_s)
    return stream
