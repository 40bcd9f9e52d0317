"""The host's side of Hopper's kernels, `hopper_products` and `hopper_prefill`: descriptors of tensors, scratch memory.

A tensor descriptor tells the copy engine where a tensor lies; making one takes microseconds, so those of weights are
kept, and captured graphs hold theirs by value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.model.layers import Linear
from slipstream.run.cuda.kernels.launches import Call
from slipstream.run.cuda.kernels.shapes import LEAST_ROOM, few_rows_shape

PARTIAL_BYTES = 16 << 20  # room for the shares of divided products
COUNTERS = 4096
PROMPT_ROWS = 128  # query rows of a program of `attend`
GROUP_ROWS = 64  # of one group of warps
PROMPT_REGISTERS = 168  # a thread, of 12 warps: 240 for those that compute, 24 for those that fetch


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels can run: Hopper, and a triton that speaks Gluon."""
    if capability(device) != (9, 0):
        return False
    try:
        modules()
    except ImportError:
        return False
    return dtype in (torch.bfloat16, torch.float16)


def modules() -> dict[str, Any]:
    """Those of the kernels, by their names."""
    from slipstream.run.cuda.kernels import hopper_prefill, hopper_products

    return {"hopper_products": hopper_products, "hopper_prefill": hopper_prefill}


def describe(tensor: Tensor, block: list[int]) -> Any:
    """A descriptor of a row-major matrix in blocks, swizzled as the matrix units want it."""
    from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # pyright: ignore[reportMissingImports]

    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


class FewRows:
    """Products with up to MOST_ROWS rows: out = act(x W^T + b), or out += x W^T + b."""

    def __init__(self, device: torch.device, *, pdl: bool) -> None:
        self._pdl: dict[str, Any] = {"PDL": pdl, "launch_pdl": pdl}
        self._partial = torch.empty(PARTIAL_BYTES // 4, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._described: dict[tuple[int, int, int], Any] = {}
        self.shape = few_rows_shape  # a benchmark may try others

    def __call__(
        self, kernel: Any, x: Tensor, linear: Linear, out: Tensor, *, add: bool = False, gated: bool = False
    ) -> Tensor:
        (rows, inputs), outputs = x.shape, out.shape[1]
        count, block, stages, splits = self.shape(outputs, inputs, rows, gated)
        room = max(LEAST_ROOM, 1 << (rows - 1).bit_length())
        tiles = -(-outputs // count)
        assert tiles <= COUNTERS
        assert tiles * splits * count * room * 4 * (1 + gated) <= PARTIAL_BYTES or splits == 1
        key = (linear.weight.data_ptr(), count, block)
        if key not in self._described:
            self._described[key] = describe(linear.weight, [count, block])
        kernel[(tiles, splits)](
            self._described[key],
            describe(x, [room, block]),
            x if linear.bias is None else linear.bias,
            out,
            self._partial,
            self._arrived,
            rows,
            outputs,
            inputs,
            splits,
            STAGES=stages,
            BIAS=linear.bias is not None,
            ADD=add,
            GATED=gated,
            SPLIT=splits > 1,
            num_warps=4,
            **self._pdl,
        )
        return out


def attend_call(
    kernel: Any,
    qkv: Tensor,
    laid: tuple[Any, ...],
    out: Tensor,
    columns: tuple[Any, ...],
    longest: int,
    dim: int,
    shape: dict[str, int],
    stages: int,
) -> Call:
    """Attention of chunks of up to `longest` new tokens over laid-out keys and values (descriptors); columns:
    query_start, lengths, starts, rows laid out, scale; shape: HEADS and GROUP."""
    return Call(
        kernel,
        (shape["HEADS"], -(-longest // PROMPT_ROWS), columns[1].shape[0]),
        (describe(qkv, [GROUP_ROWS, dim]), *laid, out, *columns),
        {**shape, "STAGES": stages},
        {"num_warps": 4, "maxnreg": PROMPT_REGISTERS},
    )
