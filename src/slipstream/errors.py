"""Every error a user can meet, as one tree.

    SlipstreamError                 code, HTTP status, retriable?
    ├── RequestError                the request is wrong or cannot be served now; has `param`
    │   ├── InvalidRequest          400  a field is missing, unknown or out of range
    │   ├── ContextTooLong          400  prompt plus max_tokens exceed the model's context
    │   ├── Unauthorized            401  the API key is missing or wrong
    │   ├── ModelNotFound           404
    │   ├── RouteNotFound           404  no such path, or no such thing under it
    │   ├── MethodNotAllowed        405
    │   ├── UnsupportedMediaType    415  the body is not application/json
    │   ├── RequestTooLarge         413  body over the limit
    │   ├── QueueFull               429  the cluster has as much work as it admits; retry later
    │   ├── ClientGone              499  the client closed the connection
    │   ├── EngineFailure           500  a worker failed while it computed this request
    │   ├── WorkerLost              503  the worker died and the request could not be continued elsewhere
    │   ├── NoWorkers               503  no worker that could serve this is connected
    │   └── DeadlineExceeded        504
    ├── SetupError                  something is wrong before any request: configuration, model, memory
    │   ├── ConfigError             a flag, variable or file value; names the field and the remedy
    │   ├── ModelError              unsupported architecture, missing files, wrong shapes
    │   ├── MissingExtra            an optional package is not installed; says how to install it
    │   ├── PoolTooSmall            the KV pool has no room for even one request
    │   └── LayoutMismatch          two workers cannot exchange KV: both values are in the message
    └── TransferError               KV bytes did not arrive
        ├── RouteUnavailable        this transport cannot be used between these two ranks; has the reason
        └── PeerLost                the other side's process or link is gone

A code is the stable name on the wire and in the `code` field of an error body; the message is for people.
"""

from __future__ import annotations

from typing import ClassVar


class SlipstreamError(Exception):
    """Base of all errors that slipstream raises on purpose.

    `code` is stable across versions; `status` is the HTTP status it becomes; `retriable` says whether the same
    request may succeed if it is sent again.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    retriable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(SlipstreamError):
    """A request was refused or failed; `param` names the field at fault, where there is one."""

    code = "invalid_request"
    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    code = "invalid_value"


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    code = "model_not_found"
    status = 404


class Unauthorized(RequestError):
    code = "invalid_api_key"
    status = 401


class RouteNotFound(RequestError):
    code = "not_found"
    status = 404


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"
    status = 405


class UnsupportedMediaType(RequestError):
    code = "unsupported_media_type"
    status = 415


class RequestTooLarge(RequestError):
    code = "request_too_large"
    status = 413


class QueueFull(RequestError):
    code = "queue_full"
    status = 429
    retriable = True


class ClientGone(RequestError):
    code = "client_closed_request"
    status = 499


class EngineFailure(RequestError):
    code = "engine_failure"
    status = 500
    retriable = True


class WorkerLost(RequestError):
    code = "worker_lost"
    status = 503
    retriable = True


class NoWorkers(RequestError):
    code = "no_workers"
    status = 503
    retriable = True


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"
    status = 504
    retriable = True


class SetupError(SlipstreamError):
    code = "setup_error"


class ConfigError(SetupError):
    code = "config_error"


class ModelError(SetupError):
    code = "model_error"


class MissingExtra(SetupError):
    """An optional dependency is needed: `MissingExtra("nixl", "nixl")` says how to install it."""

    code = "missing_extra"

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"the package {package!r} is not installed; install it with: pip install 'slipstream[{extra}]'"
        )


class PoolTooSmall(SetupError):
    code = "pool_too_small"


class LayoutMismatch(SetupError):
    code = "layout_mismatch"


class TransferError(SlipstreamError):
    code = "transfer_failed"
    retriable = True


class RouteUnavailable(TransferError):
    code = "route_unavailable"


class PeerLost(TransferError):
    code = "peer_lost"


REQUEST_ERRORS: dict[str, type[RequestError]] = {
    cls.code: cls
    for cls in (
        RequestError,
        InvalidRequest,
        ContextTooLong,
        Unauthorized,
        ModelNotFound,
        RouteNotFound,
        MethodNotAllowed,
        UnsupportedMediaType,
        RequestTooLarge,
        QueueFull,
        ClientGone,
        EngineFailure,
        WorkerLost,
        NoWorkers,
        DeadlineExceeded,
    )
}


def request_error(code: str, message: str) -> RequestError:
    """Rebuilds a request error from its wire form; an unknown code becomes EngineFailure."""
    return REQUEST_ERRORS.get(code, EngineFailure)(message)
