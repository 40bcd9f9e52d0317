"""The tokenizer of the served model, loaded in the background and used without holding up the event loop.

Short texts are encoded at once: that takes less time than going to a thread and back. Long ones go to a thread; the
`tokenizers` library lets go of the interpreter lock while it works.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.errors import NoWorkers, RequestError, SetupError
from slipstream.front.detokenizer import Detokenizer
from slipstream.front.tokenizer import Tokenizer, load_tokenizer

INLINE_CHARACTERS = 1000

Result = TypeVar("Result")


class TokenizerService:
    """`model` and `tokenizer` are names as in EngineConfig; `tokenizer` wins for the words, the model's folder for the
    recommended sampling. Without a model the name comes later, with `load`. A Tokenizer can be given instead. `on_load`
    is called on the event loop when one has been loaded, before anybody can use it.

    `problem` is the reason why there is no tokenizer, "" while none is known.
    """

    def __init__(
        self,
        model: str = "",
        tokenizer: str | Tokenizer = "",
        *,
        threads: int = 2,
        on_load: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_load = on_load
        self.model = model
        self.problem = ""
        self._name = tokenizer if isinstance(tokenizer, str) else ""
        self._tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    @property
    def ready(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises NoWorkers while it is not loaded."""
        if self._tokenizer is None:
            raise NoWorkers(self.problem or "the tokenizer is still being loaded; try again in a moment")
        return self._tokenizer

    async def load(self, model: str = "") -> None:
        """Loads it, if it is not there; raises SetupError, which stays visible as `problem`."""
        if self._tokenizer is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(self._threads, _loaded, self.model or model, self._name)
            self._on_load()
            self._tokenizer, self.problem = loaded, ""
        except SetupError as error:
            self.problem = f"the tokenizer cannot be loaded: {error.message}"
            raise

    async def run(self, characters: int, work: Callable[[], Result]) -> Result:
        """Runs `work`, in a thread when there are many characters to go through."""
        if characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _loaded(model: str, name: str) -> Tokenizer:
    """A tokenizer that has done once what requests ask of it, so that none of them waits for what is made then."""
    tokenizer = load_tokenizer(model, name)
    text = "Why is the sky blue?"
    with contextlib.suppress(RequestError):  # a template may refuse these words, or be missing
        text = tokenizer.render_chat([{"role": "user", "content": text}])
    words = Detokenizer(tokenizer)
    words.feed(tokenizer.encode(text))
    words.finish()
    return tokenizer
