"""Steps that hold pieces of prompts as CUDA graphs, but for attention.

What attention does depends on how many sequences a step has, how long they are and how they are cut; nothing else does.
From the end of one attention to the beginning of the next a layer works on rows alone: output product, residual, norm,
gate and up, SiLU, down, residual, norm, and the next layer's query, key and value. So this is captured, one graph for
each layer and each of a set of numbers of rows (`piece_sizes`), and a step runs as the next larger number: a graph,
attention of its real tokens, a graph, and so on. Rows behind the real ones hold the token 0 and whatever attention left
there before; no row reads another's, and attention never sees them.

Graphs share their activations and memory, since only one runs at a time, and are captured when the runner is made,
the largest first. Steps larger than all sizes run kernel by kernel: there the device is slower than the host. Where
there is no GPU a piece is a plain call, so that the same path can be tested. Of several ranks each captures the same
pieces in the same order, their sums included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slipstream.model.config import ModelConfig
from slipstream.model.llama import Llama
from slipstream.run.cuda.capture import captured
from slipstream.run.cuda.forward import add_sum
from slipstream.run.cuda.inputs import MixedColumns
from slipstream.run.cuda.kernels.ops import Ops

logger = logging.getLogger(__name__)

MOST_ROWS = 2048  # beyond it the device takes longer than the host: 5 us a row of a model of 1.5B, 12 to 16 ms
SMALL, SMALL_STEP, STEP = 512, 64, 128
GRAPH_BYTES = 256 << 10  # that a captured piece takes beside its activations: allowed for, not measured


def piece_sizes(most: int) -> list[int]:
    """Numbers of rows, ascending, the last of them at least `most`: multiples of 64 up to 512, of 128 beyond."""
    sizes = [*range(SMALL_STEP, SMALL + 1, SMALL_STEP)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + STEP)
    return [size for size in sizes if size - (SMALL_STEP if size <= SMALL else STEP) < most]


def piece_bytes(config: ModelConfig, item_bytes: int, most: int) -> int:
    """What `PieceGraphs` of up to `most` rows take at most, beside weights and pool."""
    sizes = piece_sizes(most)
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    kept = config.hidden + qkv + config.heads * config.head_dim
    passing = config.hidden + 3 * config.intermediate
    return sizes[-1] * (kept + passing) * item_bytes + len(sizes) * (config.layers + 1) * GRAPH_BYTES


class PieceGraphs:
    """Forward passes of steps of up to `most` tokens, 0 for none."""

    def __init__(self, model: Llama, ops: Ops, most: int) -> None:
        self.sizes = piece_sizes(most) if most else []
        self._model, self._ops = model, ops
        config, rows = model.config, max(self.sizes, default=0)
        place = {"dtype": model.dtype, "device": model.device}
        self._x = torch.zeros(rows, config.hidden, **place)
        self._qkv = torch.zeros(rows, (config.heads + 2 * config.kv_heads) * config.head_dim, **place)
        self._attended = torch.zeros(rows, config.heads * config.head_dim, **place)
        self._replay: dict[int, list[Callable[[], None]]] = {}
        self.capture_s, self.taken_bytes = 0.0, 0
        if self.sizes and model.device.type == "cuda":
            self._capture()
        else:
            numbers = range(config.layers + 1)
            self._replay = {size: [partial(self._compute, number, size) for number in numbers] for size in self.sizes}

    def size(self, tokens: int) -> int:
        """Rows of the pieces that a step of so many tokens runs as; 0 when it has none."""
        return next((size for size in self.sizes if size >= tokens), 0)

    def forward(self, step: MixedColumns, tokens: int) -> Tensor:
        """As `forward.mixed`, of a step whose token ids are as many as one of `sizes`, `tokens` of them its own.

        The rows returned are there until the next step.
        """
        size = len(step.token_ids)
        torch.index_select(self._model.embedding, 0, step.token_ids, out=self._x[:size])
        attend = self._ops.step_attention(self._qkv[:tokens], self._attended[:tokens], step)
        pieces = self._replay[size]
        for layer in self._model.layers:
            pieces[layer.index]()
            attend(layer)
        pieces[-1]()
        return self._x[:tokens]

    def _compute(self, number: int, size: int) -> None:
        """What lies in front of the attention of layer `number`, from that of the layer before on."""
        model, ops, layers = self._model, self._ops, self._model.layers
        x, qkv, attended = self._x[:size], self._qkv[:size], self._attended[:size]
        if number > 0:
            layer = layers[number - 1]
            add_sum(model, ops, attended, layer.output, x)
            activated = ops.gated(x, layer.gate_up, x.new_empty(size, model.config.intermediate), layer.mlp_norm)
            add_sum(model, ops, activated, layer.down, x)
        if number < len(layers):
            ops.project(x, layers[number].qkv, qkv, layers[number].input_norm)

    def _capture(self) -> None:
        """On the current stream, which may not be the device's default."""
        started, device, layers = time.perf_counter(), self._model.device, len(self._model.layers)
        torch.cuda.synchronize(device)
        free = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            for number in sorted({0, 1, layers}):  # of each kind one, so that all is loaded and compiled
                self._compute(number, size)
            torch.cuda.current_stream(device).synchronize()
            numbers = range(layers + 1)
            self._replay[size] = [captured(partial(self._compute, number, size), pool) for number in numbers]
        torch.cuda.current_stream(device).synchronize()
        self.capture_s = time.perf_counter() - started
        self.taken_bytes = free - torch.cuda.mem_get_info(device)[0]
        logger.info(
            "prompt graphs for %d sizes up to %d tokens, %d pieces: %.1f s, %.0f MiB",
            len(self.sizes),
            self.sizes[-1],
            len(self.sizes) * (layers + 1),
            self.capture_s,
            self.taken_bytes / 2**20,
        )
