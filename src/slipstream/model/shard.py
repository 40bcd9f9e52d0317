"""Which part of a model one tensor-parallel rank holds, and what the layers ask of the other ranks.

Attention is split by heads and the MLP by its intermediate width: a rank computes its part of both products of a pair
alone, and the sums of all ranks are added once behind each pair, two times a layer. The residual rides on rank 0's
part of the sum, and so do the biases of these products. With more ranks than KV heads, neighbouring ranks hold the
same KV head (`kv.layout.head_range`).

The head is split by vocabulary and its logits are gathered: on a large vocabulary it is a tenth of the weights that a
decode step reads. The embedding is whole on every rank: only single rows of it are read, a split one would cost one
more sum a step, and where it is tied to the head the head's part is a view of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kv.layout import HeadRange, head_range
from slipstream.model.config import ModelConfig, refuse_indivisible


class Parallel(Protocol):
    """The ranks of one worker, in the order of their numbers. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; equal to the bit everywhere."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """x [rows, n] of every rank as [ranks, rows, n]."""
        ...


class Alone:
    """A model that one rank holds as a whole."""

    rank = 0
    size = 1

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Part:
    """Numbers `first` to `first + size - 1` along dimension `dim` of a whole tensor."""

    dim: int
    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size

    def of(self, whole: Tensor) -> Tensor:
        """The part, as a view."""
        return whole.narrow(self.dim, self.first, self.size)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` of a model.

    Raises ConfigError when the heads, the KV heads or the intermediate width of the model cannot be divided so.
    """

    whole: ModelConfig
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        refuse_indivisible(self.whole, self.size)
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not one of {self.size}")

    @property
    def leads(self) -> bool:
        """Whether the residual and the biases of sums are this rank's."""
        return self.rank == 0

    @property
    def heads(self) -> HeadRange:
        count = self.whole.heads // self.size
        return HeadRange(self.rank * count, count)

    @property
    def kv_heads(self) -> HeadRange:
        return head_range(self.whole.kv_heads, self.size, self.rank)

    @property
    def vocab(self) -> HeadRange:
        """The token ids whose logits this rank computes; a last rank may have fewer, or none."""
        each = -(-self.whole.vocab // self.size)
        first = min(self.rank * each, self.whole.vocab)
        return HeadRange(first, min(each, self.whole.vocab - first))

    @property
    def vocab_each(self) -> int:
        """Logits that a rank brings to the gathering, padding included."""
        return -(-self.whole.vocab // self.size)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank computes it: its heads and its intermediate width; the vocabulary is whole."""
        return msgspec.structs.replace(
            self.whole,
            heads=self.heads.size,
            kv_heads=self.kv_heads.size,
            intermediate=self.whole.intermediate // self.size,
        )

    @property
    def parameters(self) -> int:
        """Number of weights that this rank keeps in memory."""
        count = self.config.parameters
        return count if self.whole.tied else count - (self.whole.vocab - self.vocab.size) * self.whole.hidden

    def part(self, name: str) -> Part | None:
        """What this rank holds of the tensor with this Hugging Face name; None for all of it."""
        if self.size == 1:
            return None
        dim = self.whole.head_dim
        kind = name.rsplit(".", 2)[-2]
        match kind:
            case "q_proj":
                return Part(0, self.heads.first * dim, self.heads.size * dim)
            case "k_proj" | "v_proj":
                return Part(0, self.kv_heads.first * dim, self.kv_heads.size * dim)
            case "o_proj" if name.endswith("weight"):
                return Part(1, self.heads.first * dim, self.heads.size * dim)
            case "gate_proj" | "up_proj":
                width = self.whole.intermediate // self.size
                return Part(0, self.rank * width, width)
            case "down_proj" if name.endswith("weight"):
                width = self.whole.intermediate // self.size
                return Part(1, self.rank * width, width)
            case "lm_head":
                return Part(0, self.vocab.first, self.vocab.size)
            case _:
                return None
