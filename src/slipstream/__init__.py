"""slipstream serves large language models with prefill and decode on separate workers."""

from slipstream.version import __version__

__all__ = ["__version__"]
