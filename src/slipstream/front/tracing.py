"""The front's span of each generation request, with the attributes of the GenAI conventions.

Whether or not this process makes spans, the trace headers of the client go on to the workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import RequestError
from slipstream.front.answer import Answer
from slipstream.front.exchange import Exchange
from slipstream.telemetry.trace import Attribute, Spans, passed_on

if TYPE_CHECKING:
    from opentelemetry.trace import Span

OPERATIONS = {"chat": "chat", "completions": "text_completion"}


class FrontTraces:
    """`spans` is None when no traces are wanted."""

    def __init__(self, spans: Spans | None) -> None:
        self._spans = spans

    def begin(self, exchange: Exchange, endpoint: str, answer: Answer) -> Span | None:
        """Opens the span of an answer, and has its engine requests carry it."""
        trace = passed_on(exchange.headers)
        span = None
        if self._spans is not None:
            name = f"{OPERATIONS[endpoint]} {answer.shape.model}"
            span = self._spans.begin(name, trace, answer.started, _asked(exchange, endpoint, answer))
            trace = self._spans.carry(span)
        if trace:
            for choice in answer.choices:
                choice.request.trace = trace
        return span

    def end(self, span: Span | None, answer: Answer, error: RequestError | None) -> None:
        if span is None or self._spans is None:
            return
        error = error or answer.error
        self._spans.end(span, _answered(answer), (error.code, error.message) if error is not None else None)

    def refused(self, exchange: Exchange, endpoint: str, started: float, error: RequestError) -> None:
        """A request that was wrong before there was an answer to it."""
        if self._spans is None:
            return
        attributes = {"gen_ai.operation.name": OPERATIONS[endpoint], "slipstream.request_id": exchange.request_id}
        span = self._spans.begin(OPERATIONS[endpoint], passed_on(exchange.headers), started, attributes)
        self._spans.end(span, {}, (error.code, error.message))


def _asked(exchange: Exchange, endpoint: str, answer: Answer) -> dict[str, Attribute]:
    sampling = answer.choices[0].request.sampling
    facts: dict[str, Attribute] = {
        "gen_ai.operation.name": OPERATIONS[endpoint],
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": answer.shape.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.stream": answer.telling.stream,
        "slipstream.request_id": exchange.request_id,
    }
    if sampling.top_k:
        facts["gen_ai.request.top_k"] = sampling.top_k
    if len(answer.choices) > 1:
        facts["gen_ai.request.choice.count"] = len(answer.choices)
    if sampling.presence_penalty or sampling.frequency_penalty:
        facts["gen_ai.request.presence_penalty"] = sampling.presence_penalty
        facts["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if answer.telling.stop:
        facts["gen_ai.request.stop_sequences"] = list(answer.telling.stop)
    return facts


def _answered(answer: Answer) -> dict[str, Attribute]:
    usage = answer.usage()
    facts: dict[str, Attribute] = {
        "gen_ai.response.id": answer.shape.response_id,
        "gen_ai.response.model": answer.shape.model,
        "gen_ai.response.finish_reasons": [str(reason) for reason in answer.finishes],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
    }
    if answer.first_token_s is not None:
        facts["gen_ai.response.time_to_first_chunk"] = answer.first_token_s
        facts["gen_ai.latency.time_to_first_token"] = answer.first_token_s
    return facts
