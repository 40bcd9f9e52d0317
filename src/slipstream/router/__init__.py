"""Chooses workers for requests and carries their tokens back, whatever happens to a worker on the way."""

from slipstream.router.audit import RouterAudit
from slipstream.router.life import Sink
from slipstream.router.router import ModelCard, Router
from slipstream.router.views import RouteView, WorkerView

__all__ = ["ModelCard", "RouteView", "Router", "RouterAudit", "Sink", "WorkerView"]
