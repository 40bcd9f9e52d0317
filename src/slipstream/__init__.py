"""slipstream serves large language models with prefill and decode on separate workers.

`slipstream.LLM` is the offline API; it and the types it speaks of are loaded when they are first asked for, so that
`import slipstream` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.launch.offline import Completion
    from slipstream.llm import LLM
    from slipstream.types import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

_HOMES = {"LLM": "slipstream.llm", "Completion": "slipstream.launch.offline", "SamplingParams": "slipstream.types"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
