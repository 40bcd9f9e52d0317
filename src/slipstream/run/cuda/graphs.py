"""Decode steps as CUDA graphs, one for each of a set of batch sizes.

A step of n sequences runs as the graph of the next larger size, padded with sequences of one token in the scratch page.
A graph begins with the tokens that only the device knows and ends with those that it has drawn for each row.
Graphs share their inputs, activations and memory, since only one runs at a time. They are captured when the runner is
made, the largest first; what a captured step did not compile yet is compiled by running it once before. Where there is
no GPU a size is a plain call, so that the same path can be tested.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slipstream.engine.plan import StepPlan
from slipstream.model.llama import Llama
from slipstream.run.cuda.capture import captured
from slipstream.run.cuda.forward import Scratch, decode
from slipstream.run.cuda.inputs import DecodeInputs
from slipstream.run.cuda.kernels.ops import Ops
from slipstream.run.cuda.sampling import TokenOps
from slipstream.run.sampler import DrawColumns

logger = logging.getLogger(__name__)


def graph_sizes(most: int) -> list[int]:
    """Batch sizes, ascending, up to `most`: each at most about a quarter above the one before."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + sizes[-1] // 256 * 64)
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """Runs plans in which every sequence has one new token, of up to `max_pages` pages, in batches of `sizes`.

    `most` is the largest size that there may be. `last` [rows + 1] int32 are the last tokens of all rows, and of one
    that nobody has.
    """

    def __init__(
        self, model: Llama, ops: Ops, tokens: TokenOps, last: Tensor, sizes: list[int], most: int, max_pages: int
    ) -> None:
        self.sizes = sizes
        self._model, self._ops, self._tokens, self._last = model, ops, tokens, last
        self._inputs = DecodeInputs(most, max_pages, model.config.kv_heads, model.device, spare=len(last) - 1)
        self._scratch = Scratch(model, most)
        self._chosen = torch.empty(most, dtype=torch.int64, device=model.device)
        self._replay: dict[int, Callable[[], None]] = {}
        if model.device.type == "cuda":
            self._capture()
        else:
            self._replay = {size: partial(self._compute, size) for size in self.sizes}

    @property
    def most(self) -> int:
        """The largest batch that there is a graph for; 0 without any."""
        return max(self.sizes, default=0)

    def launch(self, plan: StepPlan, how: DrawColumns) -> None:
        """Starts the step; its logits and tokens are there when the stream has done it, until the next."""
        size = next(size for size in self.sizes if size >= plan.sequences)
        self._inputs.fill(plan, size, how)
        self._replay[size]()

    def logits(self, rows: int) -> Tensor:
        """Logits [rows, vocab] of the step that was launched last."""
        return self._scratch.logits[:rows]

    def chosen(self, rows: int) -> Tensor:
        """The token [rows] drawn for each sequence of the step that was launched last."""
        return self._chosen[:rows]

    def _compute(self, size: int) -> None:
        columns, how = self._inputs.columns.first(size), self._inputs.how.each(lambda column: column[:size])
        self._tokens.feed(columns.token_ids, columns.rows, self._last)
        decode(self._model, self._ops, columns, self._scratch)
        self._tokens.draw(self.logits(size), how, self.chosen(size), columns.rows, self._last)

    def _capture(self) -> None:
        started = time.perf_counter()
        device = self._model.device
        before = torch.cuda.memory_reserved(device)
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(device)  # weights have come on another stream
        for size in reversed(self.sizes):
            with torch.cuda.stream(stream):
                self._compute(size)
                stream.synchronize()
                self._replay[size] = captured(partial(self._compute, size), pool)
        stream.synchronize()
        logger.info(
            "decode graphs for %d batch sizes up to %d: %.1f s, %.0f MiB",
            len(self.sizes),
            self.most,
            time.perf_counter() - started,
            (torch.cuda.memory_reserved(device) - before) / 2**20,
        )
