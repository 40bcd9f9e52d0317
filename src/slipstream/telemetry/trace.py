"""Spans for OpenTelemetry, where it is installed and wanted.

A request is one trace: the front's span, below it one span a stage from whoever did it, the router (place), the prefill
worker (queue, prefill, kv_transfer) and the decode worker (decode). The W3C headers of the front's span travel with the
request, through the prefill worker to the decode worker. Spans of stages are made afterwards, from the times that the
timeline has noted anyway, so nothing is done for them while a request computes.

Tracing is on with `--otlp-endpoint`, or with the standard variables OTEL_EXPORTER_OTLP_ENDPOINT and
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; sampler, headers, service name and so on are those of the OTEL_* variables. Off, the
libraries are not even imported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slipstream.errors import ConfigError, MissingExtra, SetupError
from slipstream.telemetry import clock
from slipstream.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
CARRIED = ("traceparent", "tracestate")
CLOSE_S = 3.0

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]


def wanted(endpoint: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether traces are to be sent. Raises ConfigError on an endpoint that is none."""
    if endpoint:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--otlp-endpoint {endpoint!r} is no address of a collector. Give http://HOST:4318.")
    off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    )
    return not off and bool(endpoint or any(environment.get(name) for name in ENDPOINTS))


def check(endpoint: str) -> None:
    """Raises MissingExtra when `--otlp-endpoint` asks for what is not installed, ConfigError when it is no address."""
    if wanted(endpoint) and endpoint:
        _exporter(endpoint)


def open_tracing(endpoint: str, instance: str) -> Spans | None:
    """The spans of this process, which is called `instance`; None when nobody wants any.

    Raises MissingExtra, ConfigError. Without the flag, by the variables alone, a missing package is only a warning.
    """
    if not wanted(endpoint):
        return None
    try:
        return Spans(_exporter(endpoint), instance)
    except SetupError as error:
        if endpoint:
            raise
        logger.warning("no traces are sent, though the environment asks for them: %s", error.message)
        return None


def _exporter(endpoint: str) -> Any:
    protocol = next((value for name in PROTOCOLS if (value := os.environ.get(name))), HTTP)
    try:
        import opentelemetry.sdk.trace.export  # noqa: F401

        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # pyright: ignore[reportMissingImports]
                OTLPSpanExporter,
            )

            return OTLPSpanExporter(endpoint=endpoint or None)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        if protocol == "grpc":
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and the package for that is not installed: pip install "
                f"opentelemetry-exporter-otlp-proto-grpc, or set the variable to {HTTP}."
            ) from error
        raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otel") from error
    return OTLPSpanExporter(endpoint=traces_url(endpoint) if endpoint else None)


def traces_url(endpoint: str) -> str:
    """Where spans are posted: the path of the protocol, unless the address has one of its own."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def passed_on(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The trace headers of an HTTP request, as they go on to the workers."""
    if b"traceparent" not in headers:
        return {}
    return {name: headers[name.encode()].decode("latin-1") for name in CARRIED if name.encode() in headers}


class Spans:
    """Makes spans and hands them to `exporter` in batches, on a thread of the library. Times are `clock.now`'s."""

    def __init__(self, exporter: Any, instance: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        about = {"service.instance.id": instance, "service.version": __version__}
        if not named:
            about["service.name"] = "slipstream"
        self._provider: TracerProvider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("slipstream", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: Mapping[str, str], start: float, attributes: Attributes) -> Span:
        """A span of a server, to be ended with `end`. `parent` are W3C headers; without any it begins a trace."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(parent, Context())
        return self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=_nanoseconds(start))

    def end(self, span: Span, attributes: Attributes, error: tuple[str, str] | None = None) -> None:
        """`error` is a code and a message."""
        span.set_attributes(attributes)
        _fail(span, error)
        span.end()

    def carry(self, span: Span) -> dict[str, str]:
        """The headers by which others make children of this span."""
        from opentelemetry.trace import set_span_in_context

        headers: dict[str, str] = {}
        self._propagator.inject(headers, set_span_in_context(span))
        return headers

    def stage(
        self,
        name: str,
        parent: Mapping[str, str],
        start: float,
        end: float,
        attributes: Attributes,
        error: tuple[str, str] | None = None,
    ) -> None:
        """A span of something that is over. Without a parent there is none: a stage alone tells nothing."""
        from opentelemetry.context import Context

        if not parent:
            return
        context = self._propagator.extract(parent, Context())
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=_nanoseconds(start))
        _fail(span, error)
        span.end(_nanoseconds(end))

    def close(self) -> None:
        """Sends what is left, for up to CLOSE_S: a collector that does not answer holds nobody up."""
        ending = threading.Thread(target=self._provider.shutdown, name="slipstream-traces-end", daemon=True)
        ending.start()
        ending.join(CLOSE_S)


def _fail(span: Span, error: tuple[str, str] | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    if error is not None:
        span.set_attribute("error.type", error[0])
        span.set_status(Status(StatusCode.ERROR, error[1]))


def _nanoseconds(moment: float) -> int:
    return time.time_ns() - int((clock.now() - moment) * 1e9)
