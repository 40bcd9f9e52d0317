"""The ASGI application: paths to handlers, and one form for everything that goes wrong.

Plain ASGI: the hot routes cost a dictionary look-up. A request passes the API key, finds its route, and is answered by
its handler; what the handler raises from the error tree becomes its JSON body, anything else a logged 500. The
lifespan loads the tokenizer in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry

from slipstream.config import FrontConfig, ObserveConfig
from slipstream.errors import (
    ClientGone,
    EngineFailure,
    MethodNotAllowed,
    NoWorkers,
    RequestError,
    RouteNotFound,
    SetupError,
    Unauthorized,
)
from slipstream.front.admin import Admin
from slipstream.front.backend import Backend
from slipstream.front.dashboard import Dashboard
from slipstream.front.exchange import Exchange, Receive, Scope, Send
from slipstream.front.generate import Generator
from slipstream.front.metrics import FrontMetrics
from slipstream.front.service import TokenizerService
from slipstream.front.tracing import FrontTraces
from slipstream.telemetry.compat import Compat
from slipstream.telemetry.trace import Spans

logger = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
NamedHandler = Callable[[Exchange, str], Awaitable[None]]

OPEN_PATHS = frozenset(("/health", "/metrics", "/version"))  # need no API key: probes and scrapers have none
TOKENIZER_RETRY_S = 2.0


class FrontApp:
    """One front. `drain` refuses new generation requests, `cut` ends those under way with an error.

    The router is started and stopped by whoever made it; the metrics go into its registry.
    """

    def __init__(
        self,
        backend: Backend,
        service: TokenizerService,
        config: FrontConfig,
        observe: ObserveConfig,
        spans: Spans | None = None,
    ) -> None:
        self.metrics = FrontMetrics()
        backend.metrics_registry.register(self.metrics)
        self.generator = Generator(backend, service, config, self.metrics, FrontTraces(spans))
        self._admin = Admin(backend, service, config, self.generator)
        if observe.metrics_compat != "none":
            natives = backend.metrics_registry.collect
            identity = lambda: (self.metrics.model, "both")  # noqa: E731
            self._admin.registries.append(CollectorRegistry())
            self._admin.registries[-1].register(Compat(observe.metrics_compat, "front", natives, identity))
        self._dashboard = Dashboard(backend, config.api_key, self._admin.reasons, self.metrics.collect)
        self._open = OPEN_PATHS | self._dashboard.open_paths
        self._backend = backend
        self._service = service
        self._key = config.api_key.encode()
        self._loading: asyncio.Task[None] | None = None
        self._routes = _routes(self.generator, self._admin, self._dashboard)
        self._named = _named_routes(self.generator, self._admin, self._dashboard)

    @property
    def _listed(self) -> list[str]:
        """Paths for people and programs; not those that only the dashboard's page asks for."""
        own = [path for path in self._routes if path != "/" and not path.startswith("/dashboard/")]
        return [*own, *(f"{prefix}{{id}}" for prefix in self._named if prefix != "/dashboard/")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(Exchange(scope, receive, send))
        else:
            await send({"type": "websocket.close", "code": 1002})

    @property
    def paths(self) -> list[str]:
        """All paths; those that end in a name end in a slash here."""
        return [*self._routes, *self._named]

    # ------------------------------------------------------------------------------------------ ending

    @property
    def in_flight(self) -> int:
        """Generation requests under way."""
        return len(self.generator.answers)

    def drain(self) -> None:
        """/health turns 503 and new generation requests are refused; those under way go on."""
        self._admin.draining = True

    def cut(self, reason: str) -> None:
        """Ends all generation requests with an error of this reason."""
        self.generator.cut(reason)

    # ------------------------------------------------------------------------------------------ one request

    async def _http(self, exchange: Exchange) -> None:
        try:
            self._authorize(exchange)
            await self._dispatch(exchange)
        except ClientGone:
            logger.info(
                "request %s: %s %s: 499, the client has gone", exchange.request_id, exchange.method, exchange.path
            )
            self._count(exchange, ClientGone.status)
            return
        except RequestError as error:
            await self._refuse(exchange, error)
        except Exception:  # the edge of the process: whatever it was, the client gets an answer and the log the rest
            logger.exception("request %s: %s %s failed", exchange.request_id, exchange.method, exchange.path)
            await self._refuse(exchange, EngineFailure("the server failed to answer this request; its log says why"))
        self._count(exchange, exchange.status)

    async def _dispatch(self, exchange: Exchange) -> None:
        methods = self._routes.get(exchange.path)
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if methods is not None:
            handler = methods.get(method)
            if handler is None:
                raise _wrong_method(exchange, methods)
            if self._admin.draining and handler in (self.generator.chat, self.generator.completions):
                raise NoWorkers("the server is shutting down; send the request again in a moment")
            await handler(exchange)
            return
        for prefix, named in self._named.items():
            if exchange.path.startswith(prefix) and len(exchange.path) > len(prefix):
                if method not in named:
                    raise _wrong_method(exchange, named)
                await named[method](exchange, exchange.path[len(prefix) :])
                return
        raise RouteNotFound(f"there is no {exchange.path} here; the paths are {', '.join(self._listed)}")

    def _authorize(self, exchange: Exchange) -> None:
        if not self._key or exchange.path in self._open:
            return
        given = exchange.headers.get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._key):
            problem = "the API key is wrong" if given else "an API key is needed"
            raise Unauthorized(f"{problem}; send the header 'Authorization: Bearer KEY' with the key of this server")

    async def _refuse(self, exchange: Exchange, error: RequestError) -> None:
        if error.status >= 500:
            logger.warning("request %s: %d %s: %s", exchange.request_id, error.status, error.code, error.message)
        if exchange.status:
            return  # the response has begun; the server closes the connection
        headers = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
        if isinstance(error, MethodNotAllowed):
            methods = self._routes.get(exchange.path) or next(
                (named for prefix, named in self._named.items() if exchange.path.startswith(prefix)), {}
            )
            headers.append((b"allow", ", ".join(methods).encode()))
        await exchange.error(error, headers)

    def _count(self, exchange: Exchange, status: int) -> None:
        path = exchange.path
        if path not in self._routes:
            path = next((prefix + "{id}" for prefix in self._named if path.startswith(prefix)), "other")
        self.metrics.statuses.add(1, path, str(status))

    # ------------------------------------------------------------------------------------------ lifespan

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = await receive()
            if event["type"] == "lifespan.startup":
                self._loading = asyncio.create_task(self._load())
                self._dashboard.start()
                await send({"type": "lifespan.startup.complete"})
            elif event["type"] == "lifespan.shutdown":
                if self._loading is not None:
                    self._loading.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await self._loading
                await self._dashboard.stop()
                self._service.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _load(self) -> None:
        """Loads the tokenizer once a model is known, and again until that works."""
        said = ""
        while True:
            card = self._backend.model_card()
            if card is not None:
                self.metrics.model = card.name
            if not self._service.ready and (self._service.model or card is not None):
                try:
                    await self._service.load(card.model if card is not None else "")
                except SetupError:
                    if self._service.problem != said:
                        said = self._service.problem
                        logger.error("%s", said)
                    await asyncio.sleep(TOKENIZER_RETRY_S)
            if self._service.ready and card is not None:
                return
            await asyncio.sleep(0.1)


def _routes(generator: Generator, admin: Admin, dashboard: Dashboard) -> dict[str, dict[str, Handler]]:
    return {
        "/v1/chat/completions": {"POST": generator.chat},
        "/v1/completions": {"POST": generator.completions},
        "/v1/models": {"GET": admin.models},
        "/health": {"GET": admin.health},
        "/metrics": {"GET": admin.metrics},
        "/metrics/targets": {"GET": admin.targets},
        "/version": {"GET": admin.version},
        "/tokenize": {"POST": admin.tokenize},
        "/detokenize": {"POST": admin.detokenize},
        "/v1/tokenize": {"POST": admin.tokenize},
        "/v1/detokenize": {"POST": admin.detokenize},
        "/v1/requests": {"GET": generator.stories.index},
        "/workers": {"GET": admin.workers, "POST": admin.add_worker},
        "/audit": {"GET": admin.audit},
        "/": {"GET": dashboard.root},
        "/dashboard": {"GET": dashboard.page},
        "/dashboard/": {"GET": dashboard.slash},
        "/dashboard/state": {"GET": dashboard.state},
        "/dashboard/machine": {"GET": dashboard.machine},
        "/dashboard/metrics": {"GET": dashboard.metrics},
        "/dashboard/doctor": {"POST": dashboard.doctor},
    }


def _named_routes(generator: Generator, admin: Admin, dashboard: Dashboard) -> dict[str, dict[str, NamedHandler]]:
    """Paths that end in a name, which may itself hold slashes."""
    return {
        "/v1/models/": {"GET": admin.model},
        "/v1/requests/": {"GET": generator.stories.one},
        "/workers/": {"DELETE": admin.remove_worker},
        "/dashboard/": {"GET": dashboard.file},
    }


def _wrong_method(exchange: Exchange, methods: dict[str, Handler] | dict[str, NamedHandler]) -> MethodNotAllowed:
    return MethodNotAllowed(f"{exchange.path} takes {' or '.join(methods)}, not {exchange.method}")


def create_app(
    router: Backend,
    tokenizer: TokenizerService,
    config: FrontConfig | None = None,
    observe: ObserveConfig | None = None,
    spans: Spans | None = None,
) -> FrontApp:
    """The ASGI application of a front before this router.

    The tokenizer is loaded when the application starts (at once if the service knows its model, else when the first
    worker has named it). Starting and stopping the router is the caller's.
    """
    return FrontApp(router, tokenizer, config or FrontConfig(), observe or ObserveConfig(), spans)
