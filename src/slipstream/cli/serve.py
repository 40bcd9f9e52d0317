"""`slipstream serve`: a whole cluster on this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from slipstream import logs
from slipstream.cli.options import SettingsCommand, find_model, resolve
from slipstream.config import (
    EngineConfig,
    FrontConfig,
    LaunchConfig,
    ObserveConfig,
    RouterConfig,
    TransferConfig,
    WorkerConfig,
)
from slipstream.settings import SERVE


@click.command("serve", cls=SettingsCommand, scope=SERVE)
@click.argument("model_argument", metavar="[MODEL]", required=False)
def command(model_argument: str | None, **options: Any) -> None:
    """Serve MODEL on this machine: a router and workers, started and supervised.

    MODEL is `smollm2` (the default), a folder with config.json and safetensors, a .gguf file, or a hub id.

    \b
    Which workers run where is said by --prefill, --decode and --both:
      2              two workers on devices that are free
      cpu, 2xcpu     one or two workers on the CPU
      cuda:0,1       two workers, one GPU each (0,1 is the same)
      2xcuda:0       two workers that share GPU 0
      tp2@cuda:0,1   one worker of two tensor-parallel ranks
    Without any of them half of the GPUs prefill and half decode; one GPU does both; without GPUs one CPU worker
    prefills and one decodes.
    """
    resolved = resolve(SERVE, model_argument, options)
    front = resolved.config(FrontConfig)
    logs.set_up(front.log_level, front.log_format, "serve")

    from slipstream.front.tokenizer import load_tokenizer
    from slipstream.launch.checks import refuse_model, refuse_transport
    from slipstream.launch.cluster import Cluster
    from slipstream.launch.commands import ClusterConfig
    from slipstream.launch.devices import this_machine
    from slipstream.launch.spec import place
    from slipstream.telemetry.trace import check

    config = ClusterConfig(
        engine=resolved.config(EngineConfig),
        transfer=resolved.config(TransferConfig),
        worker=resolved.config(WorkerConfig),
        router=resolved.config(RouterConfig),
        front=front,
        launch=resolved.config(LaunchConfig),
        observe=resolved.config(ObserveConfig),
    )
    check(config.observe.otlp_endpoint)
    machine = this_machine()
    launch = config.launch
    placements = place(machine, launch.prefill, launch.decode, launch.both, config.engine.device, config.engine.tp)
    refuse_transport(config.transfer.transport, [name for placement in placements for name in placement.devices])
    find_model(config.engine)
    refuse_model(config.engine, [placement.tp for placement in placements])
    chats = load_tokenizer(config.engine.model, config.engine.tokenizer).chat_template is not None
    sys.exit(Cluster(config, placements, machine, chats=chats).run())
