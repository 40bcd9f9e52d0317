"""Llama and the families of its shape: Mistral, Qwen2 (biases on q, k, v), Qwen3 (norms on each q and k head).

A decoder layer is norm, attention, residual, norm, gated MLP, residual; what differs between the families is in the
config, not in subclasses. The projections of q, k and v lie in one weight, those of gate and up in another.

One tensor-parallel rank holds a shard of it (`model.shard`): its config then has this rank's heads and width, and the
same code computes a part, which `parallel` makes whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.model.config import ModelConfig
from slipstream.model.layers import Attention, Linear, RMSNorm, Rotary
from slipstream.model.shard import ALONE, Parallel, Part, Shard


class DecoderLayer:
    """One layer: x [tokens, hidden] to x [tokens, hidden]. `leads`: the biases of the two sums are this rank's."""

    def __init__(
        self, config: ModelConfig, index: int, *, leads: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.index = index
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.rotated = config.heads + config.kv_heads
        self.intermediate = config.intermediate
        place = {"dtype": dtype, "device": device}
        self.input_norm = RMSNorm(config.hidden, config.norm_eps, **place)
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = Linear(config.hidden, width, bias=config.qkv_bias, **place)
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps, **place) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps, **place) if config.qk_norm else None
        self.output = Linear(config.heads * config.head_dim, config.hidden, bias=config.output_bias and leads, **place)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps, **place)
        self.gate_up = Linear(config.hidden, 2 * config.intermediate, bias=config.mlp_bias, **place)
        self.down = Linear(config.intermediate, config.hidden, bias=config.mlp_bias and leads, **place)

    def forward(
        self, x: Tensor, rotary: Rotary, angles: tuple[Tensor, Tensor], attention: Attention, parallel: Parallel
    ) -> Tensor:
        qkv = self.qkv(self.input_norm(x)).view(x.shape[0], -1, self.dim)
        rotating, value = qkv[:, : self.rotated], qkv[:, self.rotated :]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(rotating[:, : self.heads]), self.key_norm(rotating[:, self.heads :])
            rotating = torch.cat([query, key], 1)
        rotated = rotary.rotate(rotating, angles)
        attended = attention(self.index, rotated[:, : self.heads], rotated[:, self.heads :], value)
        x = self._sum(x, self.output, attended, parallel)
        gate_up = self.gate_up(self.mlp_norm(x))
        gate, up = gate_up[:, : self.intermediate], gate_up[:, self.intermediate :]
        return self._sum(x, self.down, F.silu(gate).mul_(up), parallel)

    @staticmethod
    def _sum(residual: Tensor, linear: Linear, x: Tensor, parallel: Parallel) -> Tensor:
        """residual plus what all ranks make of their parts; the residual goes in once, on rank 0."""
        return parallel.reduce(linear.add_to(residual, x) if parallel.rank == 0 else linear(x))

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, where it goes) of each weight: fused weights appear as the parts they are made of."""
        prefix = f"model.layers.{self.index}."
        yield prefix + "input_layernorm.weight", self.input_norm.weight
        yield prefix + "post_attention_layernorm.weight", self.mlp_norm.weight
        if self.query_norm is not None and self.key_norm is not None:
            yield prefix + "self_attn.q_norm.weight", self.query_norm.weight
            yield prefix + "self_attn.k_norm.weight", self.key_norm.weight
        query, key = self.heads * self.dim, self.kv_heads * self.dim
        yield from _parts(self.qkv, prefix + "self_attn.", {"q_proj": query, "k_proj": key, "v_proj": key})
        yield from _parts(self.output, prefix + "self_attn.", {"o_proj": config.hidden})
        gate_up = {"gate_proj": self.intermediate, "up_proj": self.intermediate}
        yield from _parts(self.gate_up, prefix + "mlp.", gate_up)
        yield from _parts(self.down, prefix + "mlp.", {"down_proj": config.hidden})


def _parts(linear: Linear, prefix: str, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in zip(sizes, linear.weight.split(list(sizes.values())), strict=True):
        yield f"{prefix}{name}.weight", weight
    if linear.bias is not None:
        for name, bias in zip(sizes, linear.bias.split(list(sizes.values())), strict=True):
            yield f"{prefix}{name}.bias", bias


class Llama:
    """A causal language model over flat tokens, or one rank's shard of it.

    The weights are uninitialised until a loader has filled `tensors()`. Knows neither sequences nor batches: which
    token sees which is the attention object's business. `config` has the sizes of the shard, with the whole
    vocabulary; `parallel` has to be set before a shard that is not the whole computes anything.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
    ) -> None:
        self.shard = shard or Shard(config)
        self.parallel: Parallel = ALONE
        self.config, self.dtype, self.device = self.shard.config, dtype, device
        place = {"dtype": dtype, "device": device}
        leads = self.shard.leads
        self.layers = [DecoderLayer(self.config, index, leads=leads, **place) for index in range(config.layers)]
        self.norm = RMSNorm(config.hidden, config.norm_eps, **place)
        self.embedding, self.head = self._vocabulary(**place)
        self.rotary = Rotary(config, **place)

    def _vocabulary(self, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Linear]:
        """The embedding of all token ids, and the head for those whose logits are this rank's."""
        config, mine = self.config, self.shard.vocab
        whole = config.vocab if config.tied else mine.size
        head = Linear(config.hidden, whole, bias=False, dtype=dtype, device=device)
        if not config.tied:
            return torch.empty(config.vocab, config.hidden, dtype=dtype, device=device), head
        embedding = head.weight
        if self.shard.size > 1:
            head.part_of(embedding.narrow(0, mine.first, mine.size))
        return embedding, head

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """The final hidden states [tokens, hidden] of token_ids [tokens] at positions [tokens]."""
        x = self.embedding.index_select(0, token_ids)
        angles = self.rotary.angles(positions)
        for layer in self.layers:
            x = layer.forward(x, self.rotary, angles, attention, self.parallel)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] in float32 of chosen rows of the final hidden states."""
        return self.gathered(self.head(hidden)).float()

    def gathered(self, mine: Tensor) -> Tensor:
        """Logits [rows, vocab] of all ranks from those [rows, shard.vocab.size] of each."""
        if self.shard.size == 1:
            return mine
        missing = self.shard.vocab_each - mine.shape[1]
        parts = self.parallel.gather(F.pad(mine, (0, missing)) if missing else mine.contiguous())
        return parts.transpose(0, 1).flatten(1)[:, : self.config.vocab]

    def wide_linears(self) -> list[Linear]:
        """Those that a second copy of their weights would make faster, most useful first."""
        linears = [self.head, *(layer.gate_up for layer in self.layers)]
        return [linear for linear in linears if linear.packable]

    def tensors(self) -> dict[str, Tensor]:
        """Hugging Face name to the (possibly strided) tensor that holds it, for loading and for comparing."""
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tied:
            found["lm_head.weight"] = self.head.weight
        for layer in self.layers:
            found.update(layer.tensors(self.config))
        return found

    def part(self, name: str) -> Part | None:
        """What of the whole tensor with this name is in `tensors()[name]`; None for all of it."""
        return self.shard.part(name)
