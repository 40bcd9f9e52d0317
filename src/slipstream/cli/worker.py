"""`slipstream worker`: one worker, to be joined to a router by either side."""

from __future__ import annotations

import sys
from typing import Any

import click

from slipstream import logs
from slipstream.cli.options import SettingsCommand, find_model, resolve
from slipstream.config import EngineConfig, FrontConfig, LaunchConfig, ObserveConfig, TransferConfig, WorkerConfig
from slipstream.lifeline import die_with_parent
from slipstream.listen import listen
from slipstream.settings import WORKER


@click.command("worker", cls=SettingsCommand, scope=WORKER)
@click.argument("model_argument", metavar="[MODEL]", required=False)
@click.option("--parent-fd", type=int, hidden=True)
def command(model_argument: str | None, parent_fd: int | None, **options: Any) -> None:
    """Run one worker, to be joined to a router.

    MODEL is `smollm2`, a folder with config.json and safetensors, a .gguf file, or a hub id.

    \b
    slipstream worker smollm2 --role prefill --port 7000 --join http://127.0.0.1:8000
    slipstream worker smollm2 --role decode --port 7001 --join http://127.0.0.1:8000
    """
    if parent_fd is not None:
        die_with_parent(parent_fd)
    resolved = resolve(WORKER, model_argument, options)
    worker, log = resolved.config(WorkerConfig), resolved.config(FrontConfig)
    logs.set_up(log.log_level, log.log_format, worker.name or f"worker-{worker.role}")

    from slipstream.launch.checks import refuse_model, refuse_transport
    from slipstream.launch.devices import this_machine
    from slipstream.launch.worker_process import run_worker

    engine, transfer = resolved.config(EngineConfig), resolved.config(TransferConfig)
    for flag, port in (("--port", worker.port), ("--wire-port", worker.wire_port)):
        listen(worker.host, port, flag).close()  # it listens for good when torch is loaded, which takes long
    on_cpu = engine.device == "cpu" or (engine.device == "auto" and not this_machine().gpus)
    refuse_transport(transfer.transport, ["cpu" if on_cpu else engine.device])
    find_model(engine)
    refuse_model(engine, [engine.tp])
    observe = resolved.config(ObserveConfig)
    sys.exit(run_worker(engine, worker, transfer, resolved.config(LaunchConfig).drain_s, observe))
