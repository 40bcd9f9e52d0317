"""The routes beside generation: models, health, metrics, tokens, workers.

`/health` is 200 when a request sent now would be answered, else 503 with the reasons. `/workers` shows and changes who
computes; a worker joins by POSTing its own URL there. `/audit` checks the router's books.
"""

from __future__ import annotations

import time
from urllib.parse import unquote, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from slipstream.config import FrontConfig
from slipstream.errors import ConfigError, ContextTooLong, InvalidRequest, ModelNotFound, RouteNotFound
from slipstream.front.ask import check_characters, check_prompt_ids
from slipstream.front.backend import Backend, Card
from slipstream.front.exchange import Exchange
from slipstream.front.generate import Generator
from slipstream.front.schema import BodyDecoder, DetokenizeBody, TokenizeBody, WorkerBody
from slipstream.front.service import TokenizerService
from slipstream.front.tokenizer import Tokenizer
from slipstream.version import __version__


def _token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    texts = {token: tokenizer.token_text(token) for token in set(ids)}
    return [texts[token] for token in ids]


class Admin:
    """Handlers of everything but generation. `draining` is set when the front takes no new requests; `registries` are
    shown by `/metrics`, one after the other."""

    def __init__(self, backend: Backend, service: TokenizerService, config: FrontConfig, generator: Generator) -> None:
        self.draining = False
        self.registries = [backend.metrics_registry]
        self._backend = backend
        self._service = service
        self._limit = config.max_body_bytes
        self._generator = generator
        self._created = int(time.time())
        self._tokenize_body = BodyDecoder(TokenizeBody)
        self._detokenize_body = BodyDecoder(DetokenizeBody)
        self._worker_body = BodyDecoder(WorkerBody)

    # ------------------------------------------------------------------------------------------ state

    async def health(self, exchange: Exchange) -> None:
        reasons = self.reasons()
        if reasons:
            await exchange.json({"status": "unavailable", "reasons": reasons}, 503, [(b"retry-after", b"1")])
        else:
            await exchange.json({"status": "ok"})

    def reasons(self) -> list[str]:
        """Why a request sent now would not be answered; empty when it would."""
        reasons = []
        if self.draining:
            reasons.append("the server is shutting down")
        if not self._service.ready:
            loading = "the tokenizer is not loaded yet" if self._backend.model_card() else "no worker has connected yet"
            reasons.append(self._service.problem or loading)
        if not self._backend.ready:
            reasons.append("no pair of prefill and decode workers can serve a request; see /workers")
            workers = self._backend.describe()["workers"]
            reasons += dict.fromkeys(problem for worker in workers for problem in worker.get("problems", ()))
        return reasons

    async def metrics(self, exchange: Exchange) -> None:
        text = b"".join(generate_latest(registry) for registry in self.registries)
        await exchange.reply(200, text, CONTENT_TYPE_LATEST.encode())

    async def targets(self, exchange: Exchange) -> None:
        """Whom to scrape, for Prometheus' HTTP service discovery: this front, as it was reached, and every worker."""
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        workers = [urlsplit(worker["url"]).netloc for worker in self._backend.describe()["workers"]]
        found = {"front": [host] if host else [], "worker": workers}
        await exchange.json(
            [{"targets": names, "labels": {"component": part}} for part, names in found.items() if names]
        )

    async def version(self, exchange: Exchange) -> None:
        await exchange.json({"version": __version__})

    # ------------------------------------------------------------------------------------------ models

    async def models(self, exchange: Exchange) -> None:
        card = self._backend.model_card()
        await exchange.json({"object": "list", "data": [self._model(card)] if card is not None else []})

    async def model(self, exchange: Exchange, name: str) -> None:
        card = self._backend.model_card()
        if card is None or card.name != unquote(name):
            served = f"{card.name!r} is" if card is not None else "none is yet"
            raise ModelNotFound(f"the model {unquote(name)!r} is not served here; {served}", param="model")
        await exchange.json(self._model(card))

    def _model(self, card: Card) -> dict[str, object]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "slipstream",
            "root": card.model,
            "max_model_len": card.max_model_len,
        }

    # ------------------------------------------------------------------------------------------ tokens

    async def tokenize(self, exchange: Exchange) -> None:
        body = self._tokenize_body(await exchange.body(self._limit))
        card, tokenizer = self._generator.card(body.model), self._service.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await self._generator.chat_ids(body, tokenizer, card.max_model_len)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
            check_characters(len(text), tokenizer, card.max_model_len, "prompt")
            ids = await self._service.run(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))
        strings = None
        if body.return_token_strs:
            strings = await self._service.run(len(ids), lambda: _token_texts(tokenizer, ids))
        answer = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids, "token_strs": strings}
        await exchange.json(answer)

    async def detokenize(self, exchange: Exchange) -> None:
        body = self._detokenize_body(await exchange.body(self._limit))
        card, tokenizer = self._generator.card(body.model), self._service.tokenizer
        tokens, skip = body.tokens, bool(body.skip_special_tokens)
        if len(tokens) > card.max_model_len:
            raise ContextTooLong(
                f"tokens holds {len(tokens)} ids; this model's context is {card.max_model_len} tokens. Send fewer",
                param="tokens",
            )
        if tokens:
            check_prompt_ids(tokens, tokenizer, "tokens")
        text = await self._service.run(len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=skip))
        await exchange.json({"prompt": text})

    # ------------------------------------------------------------------------------------------ workers

    async def workers(self, exchange: Exchange) -> None:
        await exchange.json(self._backend.describe())

    async def add_worker(self, exchange: Exchange) -> None:
        body = self._worker_body(await exchange.body(self._limit))
        try:
            worker = self._backend.add_worker(body.url, body.role, joins=bool(body.joins))
        except ConfigError as error:
            raise InvalidRequest(error.message, param="url") from error
        await exchange.json({"router": self._backend.id, "worker": worker})

    async def remove_worker(self, exchange: Exchange, name: str) -> None:
        drain = exchange.query("drain") or "true"
        if drain not in ("true", "false"):
            raise InvalidRequest(f"drain must be true or false; {drain!r} was given", param="drain")
        try:
            worker = self._backend.remove_worker(unquote(name), drain == "true")
        except ConfigError as error:
            raise RouteNotFound(error.message) from error
        await exchange.json({"router": self._backend.id, "worker": worker})

    async def audit(self, exchange: Exchange) -> None:
        await exchange.json(self._backend.audit())
