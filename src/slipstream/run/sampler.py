"""Chooses tokens from logits.

A row is the place of one running sequence. Its sampling parameters, and the counts that penalties need, are set when
the sequence comes and cleared when it goes; a step then names the rows to sample. When all of them are greedy and plain
a step is one argmax. Otherwise, in this order: penalties, logit bias, the ban on ending before min_tokens, temperature,
top_k, top_p, min_p, and one draw by the inverse of the cumulative distribution in the order of the vocabulary.

The draw for position p of a sequence uses one uniform number, a function of (seed, p) alone: the p-th output of the
SplitMix64 generator (https://doi.org/10.1145/2660193.2660195) seeded with the mixed seed. So neither batch composition
nor the worker that samples changes an answer.

Meanings follow the OpenAI API and transformers: the repetition penalty divides positive and multiplies negative logits
of all tokens in prompt and output; presence and frequency penalties count outputs only.

The sampler is total: whatever numbers a request brings, no row disturbs another. Numbers beyond what float32 can carry
through are bounded, and a row whose logits are not finite, which only a broken model makes, gets no token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.plan import NewRow
from slipstream.types import Logprob, SamplingParams

MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
NUCLEUS_GUESS = 512  # most likely tokens among which a nucleus is looked for before all are sorted
NEVER = float("-inf")
NO_TOKEN = -1  # in place of a token id where the logits are not finite
LEAST_TEMPERATURE = 1e-5  # below it sampling is greedy
MOST = 1e6  # bound of temperature, penalties and biases
WIDEST = 1e30  # bound of adjusted logits: their differences divided by LEAST_TEMPERATURE are finite in float32


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in (0, 1) for each (seed, position), on a grid of 2^-32."""
    state = mix64(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN_GAMMA)
    return ((mix64(state) >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32


def bounded(params: SamplingParams) -> SamplingParams:
    """The same settings where every number is one that float32 can compute with; what is no number is off."""
    return msgspec.structs.replace(
        params,
        temperature=min(params.temperature, MOST) if params.temperature >= LEAST_TEMPERATURE else 0.0,
        repetition_penalty=_within(params.repetition_penalty, 1.0 / MOST, 1.0),
        presence_penalty=_within(params.presence_penalty, -MOST, 0.0),
        frequency_penalty=_within(params.frequency_penalty, -MOST, 0.0),
        top_p=_within(params.top_p, 0.0, 1.0),
        min_p=min(_within(params.min_p, 0.0, 0.0), 1.0),
        logit_bias={token: _within(value, -MOST, 0.0) for token, value in params.logit_bias.items()},
    )


def _within(value: float, least: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else min(max(value, least), MOST)


@dataclass(slots=True)
class Row:
    """The sampling state of one running sequence."""

    params: SamplingParams
    outputs: int  # tokens generated so far
    banned: Tensor | None  # ids that may not be chosen before min_tokens
    bias_ids: Tensor | None
    bias: Tensor | None
    seen: Tensor | None = None  # [vocab] bool: in prompt or output
    counts: Tensor | None = None  # [vocab] float32: times in the output

    @property
    def plain(self) -> bool:
        """Whether its logits are used as they are."""
        return self.counts is None and self.bias is None and not self.held

    @property
    def held(self) -> bool:
        """Whether it may not end yet."""
        return self.banned is not None and self.outputs < self.params.min_tokens


class Sampler:
    """The sampling state of `rows` rows over a vocabulary of `vocab` tokens on one device."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self._rows: list[Row | None] = [None] * rows

    def add(self, new: NewRow) -> None:
        """Occupies a row. Ids outside of the vocabulary, which no logit stands for, have no effect."""
        params = bounded(new.sampling)
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < self.vocab}
        banned = self._ids([*new.eos_ids, *params.stop_token_ids]) if params.min_tokens > 0 else None
        row = Row(
            params=params,
            outputs=new.outputs,
            banned=banned if banned is not None and 0 < len(banned.unique()) < self.vocab else None,
            bias_ids=self._ids(list(bias)) if bias else None,
            bias=torch.tensor(list(bias.values()), dtype=torch.float32, device=self.device) if bias else None,
        )
        if params.penalized:
            outputs = self._ids(new.output_ids)
            row.counts = torch.zeros(self.vocab, dtype=torch.float32, device=self.device)
            row.counts.index_add_(0, outputs, torch.ones(len(outputs), device=self.device))
            row.seen = row.counts > 0
            row.seen[self._ids(new.prompt_ids)] = True
        self._rows[new.row] = row

    def free(self, row: int) -> None:
        self._rows[row] = None

    def params(self, row: int) -> SamplingParams:
        return self._row(row).params

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[Logprob | None]]:
        """Draws one token for each of `rows`.

        logits [rows, vocab] float32 may be overwritten; positions [rows] are the indices of the new tokens in their
        sequences. Returns the token ids, NO_TOKEN where a row's logits are not finite, and, where asked for, their
        log-probabilities.
        """
        states = [self._row(int(row)) for row in rows]
        wanted = [index for index, state in enumerate(states) if state.params.logprobs is not None]
        raw = logits[wanted] if wanted else None  # a copy, before anything is changed
        sound = logits.amax(-1).isfinite()
        if not all(state.plain for state in states):
            self._adjust(logits, states)
        drawn = [index for index, state in enumerate(states) if state.params.temperature > 0]
        if len(drawn) < len(states):
            tokens = logits.argmax(-1)
        else:
            tokens = torch.empty(len(states), dtype=torch.int64, device=self.device)
        if drawn:
            part = logits if len(drawn) == len(states) else logits[drawn]
            tokens[drawn] = self._draw(part, [states[index].params for index in drawn], positions[drawn])
        ids = tokens.masked_fill_(~sound, NO_TOKEN).cpu().numpy()
        for state, token in zip(states, ids.tolist(), strict=True):
            if token != NO_TOKEN:
                _count(state, token)
        logprobs: list[Logprob | None] = [None] * len(states)
        if raw is not None:
            counts = [states[index].params.logprobs or 0 for index in wanted]
            for index, logprob in zip(wanted, top_logprobs(raw, ids[wanted].clip(0), counts), strict=True):
                logprobs[index] = logprob if ids[index] != NO_TOKEN else None
        return ids, logprobs

    def _row(self, row: int) -> Row:
        state = self._rows[row]
        if state is None:
            raise IndexError(f"sampling row {row} is free")
        return state

    def _ids(self, ids: list[int]) -> Tensor:
        known = [token for token in ids if 0 <= token < self.vocab]
        return torch.tensor(known, dtype=torch.int64, device=self.device)

    def _adjust(self, logits: Tensor, states: list[Row]) -> None:
        for values, state in zip(logits, states, strict=True):
            params = state.params
            if state.counts is not None and state.seen is not None:
                if params.repetition_penalty != 1.0:
                    penalty = params.repetition_penalty
                    punished = torch.where(values > 0, values / penalty, values * penalty)
                    values.copy_(torch.where(state.seen, punished, values))
                if params.frequency_penalty != 0.0:
                    values.sub_(state.counts, alpha=params.frequency_penalty)
                if params.presence_penalty != 0.0:
                    values.sub_(state.counts.clamp(max=1.0), alpha=params.presence_penalty)
            if state.bias_ids is not None and state.bias is not None:
                values.index_add_(0, state.bias_ids, state.bias)
            if not state.plain:
                values.clamp_(-WIDEST, WIDEST)
            if state.held and state.banned is not None:
                values.index_fill_(0, state.banned, NEVER)

    def _draw(self, logits: Tensor, params: list[SamplingParams], positions: NDArray[np.int64]) -> Tensor:
        """One token a row of logits [rows, vocab]."""
        temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=self.device)
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]
        weights = scaled.exp().double()
        reached = weights.cumsum(-1)
        floor = _floor(scaled, reached[:, -1], params)
        if floor is not None:
            reached = weights.masked_fill_(scaled < floor[:, None], 0.0).cumsum(-1)
        seeds = np.array([p.seed & MASK64 for p in params], dtype=np.uint64)
        noise = torch.from_numpy(uniforms(seeds, positions)).to(self.device)
        found = torch.searchsorted(reached, (noise * reached[:, -1])[:, None], right=True).squeeze(-1)
        return found.clamp_(max=logits.shape[-1] - 1)  # beyond it only where logits are not finite


def _count(state: Row, token: int) -> None:
    state.outputs += 1
    if state.counts is not None and state.seen is not None:
        state.counts[token] += 1
        state.seen[token] = True


def _floor(scaled: Tensor, totals: Tensor, params: list[SamplingParams]) -> Tensor | None:
    """The least logit [rows] that top_k, top_p and min_p leave in each row; equal logits stay or go together.

    scaled [rows, vocab] has its largest value at 0 and totals [rows] is the sum of its exponentials. None when no row
    is cut.
    """
    vocab = scaled.shape[-1]
    floor = None
    cut = [index for index, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
    if cut:
        floor = torch.full((len(params),), NEVER, device=scaled.device)
        floor[cut] = _truncate(scaled[cut], totals[cut], [params[index] for index in cut])
    if any(p.min_p > 0.0 for p in params):
        least = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=scaled.device).log()
        floor = least if floor is None else torch.maximum(floor, least)
    return floor


def _truncate(scaled: Tensor, totals: Tensor, params: list[SamplingParams]) -> Tensor:
    """The least logit of the smallest set of most likely tokens whose share reaches top_p, within the top_k."""
    vocab, device = scaled.shape[-1], scaled.device
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    bounded = [limit for limit in limits if limit < vocab]
    size = min(vocab, max([*bounded, NUCLEUS_GUESS if len(bounded) < len(limits) else 1]))
    best = scaled.topk(size, -1).values
    limit = torch.tensor(limits, device=device)
    shares = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    reached = best.exp().double().cumsum(-1)
    within = reached.gather(-1, (limit.clamp(max=size) - 1)[:, None]).squeeze(-1)
    target = shares * torch.where(limit < vocab, within, totals)
    if bool((target > within).any()):  # a nucleus wider than the guess
        best = scaled.sort(-1, descending=True).values
        reached = best.exp().double().cumsum(-1)
    kept = (reached < target[:, None]).sum(-1) + 1  # one more: the token that reaches the share
    kept = torch.minimum(kept, limit.clamp(max=best.shape[-1]))
    return best.gather(-1, (kept - 1)[:, None]).squeeze(-1)


def top_logprobs(logits: Tensor, tokens: NDArray[np.int64], counts: list[int]) -> list[Logprob]:
    """Log-softmax of raw logits [rows, vocab] at `tokens` [rows], with the counts[row] most likely tokens."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.from_numpy(tokens).to(logits.device)[:, None]).squeeze(-1).tolist()
    most = min(max(counts, default=0), logits.shape[-1])
    if most == 0:
        return [Logprob(value) for value in chosen]
    best = logprobs.topk(most, -1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [Logprob(chosen[row], ids[row][:count], values[row][:count]) for row, count in enumerate(counts)]
