"""An OTLP collector of a test: takes spans over HTTP as protobuf and keeps them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class TakenSpan:
    """One span, ids in hexadecimal, times in seconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    kind: int
    failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any] = field(repr=False)


class Collector:
    """Listens while it is open; `spans` are all that came."""

    def __init__(self) -> None:
        self.spans: list[TakenSpan] = []
        self.paths: set[str] = set()
        taken = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                taken.paths.add(self.path)
                taken.take(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource_spans in request.resource_spans:
            resource = _plain(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self.spans.append(
                        TakenSpan(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9,
                            span.kind,
                            span.status.code == 2,
                            _plain(span.attributes),
                            resource,
                        )
                    )

    def of(self, trace: str) -> list[TakenSpan]:
        return [span for span in list(self.spans) if span.trace == trace]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _plain(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
