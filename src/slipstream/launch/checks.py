"""What a launch refuses before a process is started or a weight is read; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.model.config import read_config, refuse_indivisible, refuse_length
from slipstream.model.files import locate
from slipstream.transfer.transports import missing_package


def refuse_transport(transport: str, devices: Iterable[str]) -> None:
    """Raises MissingExtra when the package behind a transport that was asked for is not installed, ConfigError when
    none of the workers' devices has memory that it moves."""
    if missing := missing_package(transport):
        raise missing
    if transport == "cuda_ipc" and all(device == "cpu" for device in devices):
        raise ConfigError(
            "--transport cuda_ipc moves memory of GPUs, and all workers here are on the CPU. Leave it out, which takes "
            "the best there is, or give another one: shm, tcp."
        )


def refuse_model(engine: EngineConfig, sizes: Iterable[int]) -> None:
    """Raises ConfigError when the model cannot be divided among as many tensor-parallel ranks or has not the context
    that was asked for, PoolTooSmall when the pool that was asked for does not hold that context, ModelError when the
    model cannot be read."""
    several = {size for size in sizes if size > 1}
    if not several and not engine.max_model_len:
        return
    config = read_config(locate(engine.model, need_weights=engine.load_format != "dummy"))
    for size in sorted(several):
        refuse_indivisible(config, size)
    pool_tokens = -(-engine.kv_tokens // engine.page_tokens) * engine.page_tokens
    refuse_length(config, engine.max_model_len, pool_tokens, engine.model)
