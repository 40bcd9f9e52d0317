"""Launches of Triton kernels that cost the host little.

`kernel[grid](...)` looks at every argument each time to find the kernel that was compiled for such ones, and asks every
tensor for its address: 20 to 40 us on the host, several times in each layer. What differs from layer to layer are a few
tensors, always of the same alignment. So `Prepared` lets Triton find the kernel once, keeps it, and from then on gives
the compiled kernel plain addresses.

What a kernel is compiled for are types, alignments and constants (`variant`); a launch of another variant is found
anew. `variant` may tell apart what Triton compiles alike, never the other way round: tests/unit/test_launches.py
compares it with Triton's own rule, and what reaches the driver with what a plain launch gives it. Where nothing is
compiled, under Triton's interpreter, every launch is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # of addresses and numbers, that a kernel may rely on
INT_BOUNDS = (-(1 << 31), 1 << 31, 1 << 63)  # between them a whole number is an int32, an int64, an unsigned one


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel with all that it is given: arguments, its constants by name, and options of its compilation."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def launch(self) -> Any:
        """Returns the compiled kernel, or None where there is none."""
        return self.kernel[self.grid](*self.args, **self.constants, **self.options)

    def given(self, places: Sequence[int], tensors: Sequence[Tensor]) -> Call:
        """The same with other tensors at `places` of its arguments."""
        args = list(self.args)
        for place, tensor in zip(places, tensors, strict=True):
            args[place] = tensor
        return Call(self.kernel, self.grid, tuple(args), self.constants, self.options)


class Tensors(NamedTuple):
    """What one layer brings to a call, as `Prepared` needs it."""

    tensors: tuple[Tensor, ...]
    addresses: tuple[int, ...]
    variant: tuple[Any, ...]

    @classmethod
    def of(cls, *tensors: Tensor) -> Tensors:
        return cls(tensors, tuple(tensor.data_ptr() for tensor in tensors), tuple(map(variant, tensors)))


def current_stream(device: torch.device) -> int:
    """The stream that kernels are launched on, as compiled kernels want it; 0 where there is none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def variant(value: Any) -> tuple[Any, ...]:
    """What of an argument a kernel is compiled for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if type(value) is int:
        return sum(value >= bound for bound in INT_BOUNDS), value == 1, value % ALIGNMENT == 0
    if hasattr(value, "block_shape"):  # a tensor descriptor: of Triton, or of Gluon with a layout
        return value.base.dtype, tuple(value.block_shape), value.padding, repr(getattr(value, "layout", None))
    if type(value) is float:
        return (float,)
    return type(value), value  # whatever else there may be: for this value alone


class Prepared:
    """A call that is repeated for every layer of a step, with other tensors at `places` of its arguments.

    `known` keeps compiled kernels from step to step. The memory that `call` names has to stay while this is used.
    """

    def __init__(self, call: Call, places: tuple[int, ...], known: dict[Any, Any], stream: int) -> None:
        self._call, self._places, self._known, self._stream = call, places, known, stream
        fixed = tuple(variant(value) for place, value in enumerate(call.args) if place not in places)
        self._key = id(call.kernel), fixed, tuple(call.constants.values()), tuple(call.options.items())
        self._args: list[Any] = [value.data_ptr() if isinstance(value, Tensor) else value for value in call.args]
        self._args += (call.constants[name] for name in call.kernel.arg_names[len(call.args) :])
        self._runs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, given: Tensors) -> None:
        run = self._runs.get(given.variant) or self._found(given)
        if run is None:
            return
        for place, address in zip(self._places, given.addresses, strict=True):
            self._args[place] = address
        run(*self._args, stream=self._stream)

    def _found(self, given: Tensors) -> Callable[..., Any] | None:
        """What launches these from now on; None when they have just been launched."""
        key = self._key, given.variant
        compiled = self._known.get(key)
        if compiled is None:
            compiled = self._call.given(self._places, given.tensors).launch()
            if compiled is not None:
                self._known[key] = compiled
            return None
        return self._runs.setdefault(given.variant, compiled[self._call.grid])
