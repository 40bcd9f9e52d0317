"""`slipstream router`: the router with its HTTP front, in front of workers that run already or come later."""

from __future__ import annotations

from typing import Any

import click

from slipstream import logs
from slipstream.cli.options import SettingsCommand, resolve
from slipstream.config import EngineConfig, FrontConfig, LaunchConfig, ObserveConfig, RouterConfig
from slipstream.lifeline import die_with_parent
from slipstream.settings import ROUTER


@click.command("router", cls=SettingsCommand, scope=ROUTER)
@click.option("--parent-fd", type=int, hidden=True)
@click.option("--listen-fd", type=int, hidden=True)
@click.option("--accept-after", type=float, default=0.0, hidden=True)
def command(parent_fd: int | None, listen_fd: int | None, accept_after: float, **options: Any) -> None:
    """Run one router with its HTTP front, in front of workers.

    Workers are named here or join by themselves, now or later, in any order; the ports are the workers' HTTP ports.

    \b
    slipstream router --port 8000 --prefill http://127.0.0.1:7000 --decode http://127.0.0.1:7001
    """
    if parent_fd is not None:
        die_with_parent(parent_fd)
    resolved = resolve(ROUTER, None, options)
    front = resolved.config(FrontConfig)
    logs.set_up(front.log_level, front.log_format, "router")

    from slipstream.launch.router_process import run_router

    run_router(
        resolved.config(RouterConfig),
        front,
        observe=resolved.config(ObserveConfig),
        tokenizer=resolved.config(EngineConfig).tokenizer,
        drain_s=resolved.config(LaunchConfig).drain_s,
        listen_fd=listen_fd,
        accept_after_s=accept_after,
    )
