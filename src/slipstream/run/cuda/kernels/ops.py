"""What the forward pass asks of a device, and the Triton kernels' answer.

`Ops` is the seam: the same forward pass runs on the kernels (`TritonOps`) and on their twins in plain torch
(`twins.TorchOps`), which is how its logic is tested without a GPU and each kernel against what it should compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.model.config import ModelConfig
from slipstream.model.layers import Linear, RMSNorm, Rotary
from slipstream.model.llama import DecoderLayer
from slipstream.run.attention import PagedPool
from slipstream.run.cuda.inputs import ROW_BLOCK, DecodeColumns, MixedColumns
from slipstream.run.cuda.kernels import hopper, shapes
from slipstream.run.cuda.kernels.launches import Call, Prepared, Tensors, current_stream
from slipstream.run.cuda.kernels.shares import NUMBERS
from slipstream.run.quantize import CODE

LOG2E = math.log2(math.e)
LAID_OUT_BYTES = 512 << 20  # keys and values of one layer that prefill attention may lay out; more stay in their pages
HEAD_DIMS = (32, 64, 128, 256)
WHOLE, KEYS, NOTHING = range(3)  # of the tensors of a layer: gains of queries and keys, and keys; the last; none


class Ops(Protocol):
    """Writes into `out` and returns it; all activations are [rows, features], contiguous, in the model's dtype."""

    def rms_norm(self, x: Tensor, norm: RMSNorm, out: Tensor) -> Tensor: ...

    def project(self, x: Tensor, linear: Linear, out: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """linear(norm(x))."""
        ...

    def add_project(self, x: Tensor, linear: Linear, out: Tensor) -> Tensor:
        """out += linear(x)."""
        ...

    def gated(self, x: Tensor, gate_up: Linear, out: Tensor, norm: RMSNorm) -> Tensor:
        """SiLU(gate) * up of linear(norm(x))."""
        ...

    def decode_attention(self, layer: DecoderLayer, qkv: Tensor, out: Tensor, step: DecodeColumns) -> Tensor:
        """Rotates, writes the new keys and values into the pool, attends; qkv may be overwritten."""
        ...

    def prefill_attention(self, layer: DecoderLayer, qkv: Tensor, out: Tensor, step: MixedColumns) -> Tensor:
        """Likewise for chunks of prompts."""
        ...

    def step_attention(self, qkv: Tensor, out: Tensor, step: MixedColumns) -> Callable[[DecoderLayer], None]:
        """Both, for all tokens of a step, to be called once for each layer: qkv and out stay in their places."""
        ...


class PromptAttention(Protocol):
    """Attention of chunks of prompts whose queries are rotated and whose keys and values are in the pool already."""

    def __call__(self, layer: int, qkv: Tensor, out: Tensor, step: MixedColumns) -> Tensor: ...


def power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


class TritonOps:
    """The kernels of `products`, `decode` and `prefill`, and Hopper's, over one pool.

    `rows` is the largest number of sequences of a decode step. `pdl` lets a kernel start, and fetch weights, before
    the one in front of it has ended (Hopper and newer; CUDA's programmatic dependent launch).
    """

    def __init__(self, config: ModelConfig, pool: PagedPool, rotary: Rotary, rows: int, *, pdl: bool) -> None:
        from slipstream.run.cuda.kernels import decode, prefill, products

        self.config, self.pool, self.rotary = config, pool, rotary
        self.streams = pool.dtype != torch.float16  # there x * gain could overflow
        self.prompts: PromptAttention | None = None  # instead of the kernels here
        self.modules: dict[str, Any] = {"products": products, "decode": decode, "prefill": prefill}
        self._pdl: dict[str, Any] = {"PDL": pdl, "launch_pdl": True} if pdl else {"PDL": False}
        self.one_row_shape = shapes.one_row_shape  # a benchmark may try others, of these
        self.paged_shape, self.gathered_shape = shapes.paged_shape, shapes.gathered_shape
        has_tensor_copies = hopper.capability(pool.device) >= (9, 0)
        self.gathers = has_tensor_copies and pool.dtype != torch.float32 and pool.layout.head_dim in (64, 128)
        self._hopper = hopper.usable(pool.device, pool.dtype)
        self._few = None
        if self._hopper:
            self.modules |= hopper.modules()
            self._few = hopper.FewRows(pool.device, pdl=pdl)
        self.few_rows_pay, self.prompt_shape = shapes.few_rows_pay, shapes.prompt_shape  # likewise
        self.room_laid_out = LAID_OUT_BYTES // (2 * pool.layout.kv_heads * pool.layout.head_dim * pool.dtype.itemsize)
        self._laid: tuple[tuple[int, int], tuple[Tensor, Tensor], tuple[Any, ...]] | None = None
        self._precision = "ieee" if pool.dtype == torch.float32 else "tf32"
        layout, device = pool.layout, pool.device
        self._numbers = pool.values.view(CODE) if pool.quantized else pool.values
        span = layout.block_bytes // self._numbers.itemsize
        self._layer_stride = 2 * span
        self._head_stride = layout.layers * self._layer_stride
        self._page_stride = layout.kv_heads * self._head_stride
        self._pages = {"PAGE": layout.page_tokens, "SPAN": span, "FP8": pool.quantized}
        self._scale = LOG2E / math.sqrt(layout.head_dim)
        self._group = config.heads // config.kv_heads
        room = config.heads * max(shapes.decode_programs(size, layout.kv_heads) for size in range(1, rows + 1))
        self._norm_eps = config.norm_eps if config.qk_norm else 0.0
        self._of_layers: dict[int, tuple[Tensors, Tensors, Tensors]] = {}
        self.known: dict[Any, Any] = {}  # compiled kernels, of `Prepared`
        self._partial = torch.empty(room * layout.head_dim, dtype=torch.float32, device=device)
        self._weights = torch.empty(room, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(rows * layout.kv_heads, dtype=torch.int32, device=device)

    # ------------------------------------------------------------------------------------------------------- products

    def rms_norm(self, x: Tensor, norm: RMSNorm, out: Tensor) -> Tensor:
        size = x.shape[1]
        block = power_of_two(size)
        self.modules["products"].rms_norm[(x.shape[0],)](
            x, norm.weight, out, size, norm.eps, BLOCK=block, num_warps=max(1, min(8, block // 256)), **self._pdl
        )
        return out

    def project(self, x: Tensor, linear: Linear, out: Tensor, norm: RMSNorm | None = None) -> Tensor:
        few = self._takes_few(x, linear)
        if not few and self._streams(x, linear):
            return self._stream(x, linear, out, norm)
        if norm is not None:
            x = self.rms_norm(x, norm, torch.empty_like(x))
        if few:
            return self._few_rows(x, linear, out)
        if linear.bias is None:
            return torch.mm(x, linear.transposed, out=out)
        return torch.addmm(linear.bias, x, linear.transposed, out=out)

    def add_project(self, x: Tensor, linear: Linear, out: Tensor) -> Tensor:
        if self._takes_few(x, linear, add=True):
            return self._few_rows(x, linear, out, add=True)
        if self._streams(x, linear):
            return self._stream(x, linear, out, add=True)
        out.addmm_(x, linear.transposed)
        return out if linear.bias is None else out.add_(linear.bias)

    def gated(self, x: Tensor, gate_up: Linear, out: Tensor, norm: RMSNorm) -> Tensor:
        if self._takes_few(x, gate_up, gated=True):
            return self._few_rows(self.rms_norm(x, norm, torch.empty_like(x)), gate_up, out, gated=True)
        if self._streams(x, gate_up):
            return self._stream(x, gate_up, out, norm, gated=True)
        both = self.project(x, gate_up, x.new_empty(x.shape[0], gate_up.weight.shape[0]), norm)
        size = out.shape[1]
        self.modules["products"].silu_mul[(x.shape[0], -(-size // 2048))](
            both, out, size, BLOCK=2048, num_warps=8, **self._pdl
        )
        return out

    def _takes_few(self, x: Tensor, linear: Linear, *, add: bool = False, gated: bool = False) -> bool:
        (rows, inputs), outputs = x.shape, linear.weight.shape[0] // (2 if gated else 1)
        return self._few is not None and self.few_rows_pay(outputs, inputs, rows, add=add, gated=gated)

    def _few_rows(self, x: Tensor, linear: Linear, out: Tensor, *, add: bool = False, gated: bool = False) -> Tensor:
        assert self._few is not None
        return self._few(self.modules["hopper_products"].few_rows, x, linear, out, add=add, gated=gated)

    def _streams(self, x: Tensor, linear: Linear) -> bool:
        return x.shape[0] == 1 and linear.weight.shape[1] % 8 == 0 and self.streams

    def _stream(
        self, x: Tensor, linear: Linear, out: Tensor, norm: RMSNorm | None = None, *, add: bool = False, gated=False
    ) -> Tensor:
        """A product with one row."""
        outputs, inputs = out.shape[1], x.shape[1]
        bias = linear.weight if linear.bias is None else linear.bias
        gain, eps = (linear.weight, 0.0) if norm is None else (norm.weight, norm.eps)
        count, block, warps = self.one_row_shape(outputs, inputs, gated)
        self.modules["products"].one_row[(-(-outputs // count),)](
            x,
            gain,
            linear.weight,
            bias,
            out,
            outputs,
            inputs,
            eps,
            NORM=norm is not None,
            BIAS=linear.bias is not None,
            ADD=add,
            GATED=gated,
            ROWS=count,
            BLOCK=block,
            EVEN=outputs % count == 0 and inputs % block == 0,
            num_warps=warps,
            **self._pdl,
        )
        return out

    # ------------------------------------------------------------------------------------------------------ attention

    def _of_layer(self, layer: DecoderLayer) -> tuple[Tensors, Tensors, Tensors]:
        """What kernels get of a layer: the gains of queries and keys (anything where it has none) with the pool from
        its first key on; the last alone; nothing."""
        if layer.index not in self._of_layers:
            keys = self._numbers[layer.index * self._layer_stride :]
            gains = self.rotary.cos, self.rotary.cos
            if layer.query_norm is not None and layer.key_norm is not None:
                gains = layer.query_norm.weight, layer.key_norm.weight
            self._of_layers[layer.index] = Tensors.of(*gains, keys), Tensors.of(keys), Tensors.of()
        return self._of_layers[layer.index]

    def decode_attention(self, layer: DecoderLayer, qkv: Tensor, out: Tensor, step: DecodeColumns) -> Tensor:
        self._decode_call(self._of_layer(layer)[WHOLE], qkv, out, step).launch()
        return out

    def prefill_attention(self, layer: DecoderLayer, qkv: Tensor, out: Tensor, step: MixedColumns) -> Tensor:
        of_layer = self._of_layer(layer)[WHOLE]
        self._rotate_call(of_layer, qkv, step).launch()
        if self.prompts is not None:
            return self.prompts(layer.index, qkv, out, step)
        for call, _ in self._prompt_calls(of_layer, qkv, out, step):
            call.launch()
        return out

    def step_attention(self, qkv: Tensor, out: Tensor, step: MixedColumns) -> Callable[[DecoderLayer], None]:
        return _StepCalls(self, qkv, out, step)

    def kinds_of_decodes(self, most: int) -> list[int]:
        """Of the numbers of sequences up to `most`, one for each kernel that `decode_attention` has for them."""
        kinds = {self._decode_kind(sequences): sequences for sequences in range(most, 0, -1)}
        return sorted(kinds.values())

    def _decode_kind(self, sequences: int) -> tuple[int, int, int, bool]:
        """(tokens at a time, warps, stages, whether the first of these are fetched ahead) of its kernel."""
        splits, tile, warps, stages = shapes.decode_shape(sequences * self.pool.layout.kv_heads)
        return tile, warps, stages, splits > 1

    def _decode_call(self, of_layer: Tensors, qkv: Tensor, out: Tensor, step: DecodeColumns) -> Call:
        layout, sequences = self.pool.layout, qkv.shape[0]
        programs = shapes.decode_programs(sequences, layout.kv_heads)
        tile, warps, stages, ahead = self._decode_kind(sequences)
        query_gain, key_gain, keys = of_layer.tensors
        columns = step.tables, step.width_at, step.shares
        sizes = self._scale, self._norm_eps, self._page_stride, self._head_stride, programs
        scratch = self._partial, self._weights, self._arrived
        return Call(
            self.modules["decode"].decode_attention,
            (programs, layout.kv_heads, 1),
            (qkv, query_gain, key_gain, out, *scratch, keys, self.rotary.cos, self.rotary.sin, *columns, *sizes),
            {
                "HEADS": self.config.heads,
                "GROUP": self._group,
                "ROWS": max(16, power_of_two(self._group)),
                "HALF": layout.head_dim // 2,
                **self._pages,
                "TILE": tile,
                "AHEAD": ahead,
                "SHARE_NUMBERS": NUMBERS,
                "PLACES": shapes.MOST_SPLITS,
                "MEMBERS": power_of_two(self._group),
                "QK_NORM": self.config.qk_norm,
                "PRECISION": self._precision,
                "PDL": self._pdl["PDL"],
            },
            {"num_warps": warps, "num_stages": stages, **({"launch_pdl": True} if self._pdl["PDL"] else {})},
        )

    def _rotate_call(self, of_layer: Tensors, qkv: Tensor, step: MixedColumns) -> Call:
        layout, heads = self.pool.layout, self.config.heads
        columns = self.rotary.cos, self.rotary.sin, step.positions, step.pages
        return Call(
            self.modules["prefill"].rotate_and_write,
            (qkv.shape[0], 1, 1),
            (qkv, *of_layer.tensors, *columns, self._norm_eps, self._page_stride, self._head_stride),
            {
                "HEADS": heads,
                "KV_HEADS": layout.kv_heads,
                "PLACES": power_of_two(heads),
                "KV_PLACES": power_of_two(layout.kv_heads),
                "HALF": layout.head_dim // 2,
                **self._pages,
                "QK_NORM": self.config.qk_norm,
            },
            {"num_warps": 4},
        )

    def _prompt_calls(
        self, of_layer: Tensors, qkv: Tensor, out: Tensor, step: MixedColumns
    ) -> list[tuple[Call, tuple[int, ...]]]:
        """Attention behind `rotate_and_write`: calls, and where in each the layer's first key is."""
        keys = of_layer.tensors[2]
        if self.gathers and step.laid_out <= self.room_laid_out:
            gather, attend = self._gathered_calls(keys, qkv, out, step)
            return [(gather, (0,)), (attend, ())]
        return [(self._paged_call(keys, qkv, out, step), (2,))]

    def _paged_call(self, keys: Tensor, qkv: Tensor, out: Tensor, step: MixedColumns) -> Call:
        layout, heads = self.pool.layout, self.config.heads
        rows, tile, warps, stages = self.paged_shape(layout.head_dim, self.pool.dtype)
        columns = step.query_start, step.lengths, step.tables
        return Call(
            self.modules["prefill"].prefill_attention,
            (-(-step.longest // rows), heads, step.lengths.shape[0]),
            (qkv, out, keys, *columns, step.width, self._scale, self._page_stride, self._head_stride),
            {
                "HEADS": heads,
                "GROUP": self._group,
                "DIM": layout.head_dim,
                **self._pages,
                "ROWS": rows,
                "TILE": tile,
                "PRECISION": self._precision,
            },
            {"num_warps": warps, "num_stages": stages},
        )

    def _gathered_calls(self, keys: Tensor, qkv: Tensor, out: Tensor, step: MixedColumns) -> tuple[Call, Call]:
        """Lays the sequences out first: a few microseconds that the tensor copy engine's speed is worth many times."""
        layout, heads, chunks = self.pool.layout, self.config.heads, step.lengths.shape[0]
        rows, tile, warps, stages = self.gathered_shape()
        if self._hopper:
            tile, stages = self.prompt_shape(layout.head_dim)
        laid, descriptors = self._laid_out(step.laid_out, tile)
        places = step.starts, step.lengths, step.tables, step.width, step.laid_out
        gather = Call(
            self.modules["prefill"].gather_pages,
            (-(-step.longest_context // ROW_BLOCK), layout.kv_heads, chunks),
            (keys, *laid, *places, self._page_stride, self._head_stride),
            {"DIM": layout.head_dim, **self._pages, "TILE": ROW_BLOCK},
            {"num_warps": 8},
        )
        columns = step.query_start, step.lengths, step.starts, step.laid_out, self._scale
        shape = {"HEADS": heads, "GROUP": self._group}
        if self._hopper:
            kernel = self.modules["hopper_prefill"].attend
            longest, dim = step.longest, layout.head_dim
            return gather, hopper.attend_call(kernel, qkv, descriptors, out, columns, longest, dim, shape, stages)
        attend = Call(
            self.modules["prefill"].prefill_gathered,
            (-(-step.longest // rows), heads, chunks),
            (qkv, out, *descriptors, *columns),
            {**shape, "DIM": layout.head_dim, "ROWS": rows, "TILE": tile},
            {"num_warps": warps, "num_stages": stages},
        )
        return gather, attend

    def _laid_out(self, total: int, tile: int) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
        """Room for keys and values [KV heads * total, dim] each, and their descriptors; the same for all layers."""
        if self._laid is None or self._laid[0] != (total, tile):
            heads, dim = self.pool.layout.kv_heads, self.pool.layout.head_dim
            self._laid = None  # its memory may serve again
            both = torch.empty(2, heads * total, dim, dtype=self.pool.dtype, device=self.pool.device)
            describe = hopper.describe if self._hopper else _describe
            descriptors = tuple(describe(one, [tile, dim]) for one in both)
            self._laid = (total, tile), (both[0], both[1]), descriptors
        return self._laid[1], self._laid[2]


class _StepCalls:
    """`Ops.step_attention`: the calls of a step are made ready with its first layer, and repeated for the others."""

    def __init__(self, ops: TritonOps, qkv: Tensor, out: Tensor, step: MixedColumns) -> None:
        self._ops, self._qkv, self._out, self._step = ops, qkv, out, step
        self._calls: list[tuple[Prepared, int]] | None = None

    def __call__(self, layer: DecoderLayer) -> None:
        of_layer = self._ops._of_layer(layer)
        if self._calls is None:
            self._calls = self._prepared(of_layer[WHOLE])
        for call, part in self._calls:
            call(of_layer[part])
        if self._step.longest and self._ops.prompts is not None:
            decodes = self._step.decodes
            self._ops.prompts(layer.index, self._qkv[decodes:], self._out[decodes:], self._step)

    def _prepared(self, first: Tensors) -> list[tuple[Prepared, int]]:
        """Calls in order, each with what of a layer's tensors it takes."""
        ops, step, decodes = self._ops, self._step, self._step.decodes
        stream = current_stream(ops.pool.device)
        found: list[tuple[Prepared, int]] = []
        if step.decode is not None:
            call = ops._decode_call(first, self._qkv[:decodes], self._out[:decodes], step.decode)
            found.append((Prepared(call, (1, 2, 7), ops.known, stream), WHOLE))
        if step.longest:
            qkv, out = self._qkv[decodes:], self._out[decodes:]
            call = ops._rotate_call(first, qkv, step)
            found.append((Prepared(call, (1, 2, 3), ops.known, stream), WHOLE))
            calls = [] if ops.prompts is not None else ops._prompt_calls(first, qkv, out, step)
            for call, places in calls:
                found.append((Prepared(call, places, ops.known, stream), KEYS if places else NOTHING))
        return found


def _describe(tensor: Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

    return TensorDescriptor.from_tensor(tensor, block)
