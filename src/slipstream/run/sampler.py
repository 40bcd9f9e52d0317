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

Choosing and counting are two halves: `choose` gives the device all its work and waits for nothing, `finish` reads what
it found. What a row needs for its draw is in columns (`DrawTable`), so that a device can be given it with a step's
other numbers, and draw by other code (`run.cuda.sampling`).

The sampler is total: whatever numbers a request brings, no row disturbs another. Numbers beyond what float32 can carry
through are bounded, and a row whose logits are not finite, which only a broken model makes, gets no token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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


class Draw(Protocol):
    """Draws one token for each row of logits [rows, vocab], kept as they are: int64 [rows], NO_TOKEN where they are
    not finite."""

    def __call__(self, logits: Tensor, how: DrawColumns) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """How each of some rows is drawn; [rows] each, as numpy arrays or as tensors of one device."""

    temperature: Any  # float32; 0: the most likely token
    top_k: Any  # int32; 0: all
    log_min_p: Any  # float32; minus infinity: all
    top_p: Any  # float64; 1: all
    noise: Any  # float64, in (0, 1)

    def each(self, change: Callable[[Any], Any]) -> DrawColumns:
        return DrawColumns(*(change(getattr(self, name)) for name in DRAW_COLUMNS))


DRAW_COLUMNS = ("temperature", "top_k", "log_min_p", "top_p", "noise")


class DrawTable:
    """The draw of each row, in numbers."""

    def __init__(self, rows: int, vocab: int) -> None:
        self._vocab = vocab
        self._temperature = np.zeros(rows, dtype=np.float32)
        self._top_k = np.zeros(rows, dtype=np.int32)
        self._log_min_p = np.full(rows, NEVER, dtype=np.float32)
        self._top_p = np.ones(rows, dtype=np.float64)
        self._seed = np.zeros(rows, dtype=np.uint64)

    def set(self, row: int, params: SamplingParams) -> None:
        """`params` are bounded."""
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if 0 < params.top_k < self._vocab else 0
        self._log_min_p[row] = np.log(np.float32(params.min_p)) if params.min_p > 0 else NEVER
        self._top_p[row] = min(params.top_p, 1.0)
        self._seed[row] = params.seed & MASK64

    def columns(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> DrawColumns:
        """For the tokens at `positions` of the sequences in `rows`."""
        return DrawColumns(
            self._temperature[rows],
            self._top_k[rows],
            self._log_min_p[rows],
            self._top_p[rows],
            uniforms(self._seed[rows], positions),
        )


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


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens that the device has chosen or will have: what `finish` reads. `tokens` [rows] int64 is on the device."""

    tokens: Tensor
    states: list[Row]
    wanted: list[int]  # those whose logprobs are asked for
    logprobs: FoundLogprobs | None
    on_host: Callable[[], NDArray[np.int64]]


class Sampler:
    """The sampling state of `rows` rows over a vocabulary of `vocab` tokens on one device.

    `draw` replaces the function that draws tokens from logits by columns. Tensors go to a GPU without waiting for it.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device, draw: Draw | None = None) -> None:
        self.vocab, self.device = vocab, device
        self.table = DrawTable(rows, vocab)
        self._rows: list[Row | None] = [None] * rows
        self._draw: Draw = draw or draw_tokens

    def add(self, new: NewRow) -> None:
        """Occupies a row. Ids outside of the vocabulary, which no logit stands for, have no effect."""
        params = bounded(new.sampling)
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < self.vocab}
        ends = {token for token in (*new.eos_ids, *params.stop_token_ids) if 0 <= token < self.vocab}
        row = Row(
            params=params,
            outputs=new.outputs,
            banned=self._ids(sorted(ends)) if params.min_tokens > 0 and 0 < len(ends) < self.vocab else None,
            bias_ids=self._ids(list(bias)) if bias else None,
            bias=self._there(torch.tensor(list(bias.values()), dtype=torch.float32)) if bias else None,
        )
        if params.penalized:
            outputs = self._ids(new.output_ids)
            row.counts = torch.zeros(self.vocab, dtype=torch.float32, device=self.device)
            row.counts.index_add_(0, outputs, torch.ones(len(outputs), device=self.device))
            row.seen = row.counts > 0
            row.seen.index_fill_(0, self._ids(new.prompt_ids), True)
        self._rows[new.row] = row
        self.table.set(new.row, params)

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
        chosen = self.choose(logits, rows, positions)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.finish(chosen)

    def choose(self, logits: Tensor, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Chosen:
        """The first half of `sample`: what the device has to do."""
        states = [self._row(int(row)) for row in rows]
        wanted = [index for index, state in enumerate(states) if state.params.logprobs is not None]
        at = self._there(torch.tensor(wanted, dtype=torch.int64))
        raw = logits.index_select(0, at) if wanted else None  # before anything is changed
        plain = all(state.plain for state in states)
        sound = None
        if not plain:
            sound = logits.amax(-1).isfinite()  # before it is bounded
            self._adjust(logits, states)
        tokens = self._draw(logits, self.table.columns(rows, positions))
        if sound is not None:
            tokens = tokens.masked_fill(~sound, NO_TOKEN)
        logprobs = None
        if raw is not None:
            counts = [states[index].params.logprobs or 0 for index in wanted]
            logprobs = find_logprobs(raw, tokens.index_select(0, at).clamp(min=0), counts)
        return Chosen(tokens, states, wanted, logprobs, on_host(tokens))

    def finish(self, chosen: Chosen) -> tuple[NDArray[np.int64], list[Logprob | None]]:
        """The second half, once the device has done the first: counts the tokens and returns what `sample` does."""
        ids = chosen.on_host()
        for state, token in zip(chosen.states, ids.tolist(), strict=True):
            if token != NO_TOKEN:
                _count(state, token)
        logprobs: list[Logprob | None] = [None] * len(ids)
        if chosen.logprobs is not None:
            for index, logprob in zip(chosen.wanted, chosen.logprobs.read(), strict=True):
                logprobs[index] = logprob if ids[index] != NO_TOKEN else None
        return ids, logprobs

    def _row(self, row: int) -> Row:
        state = self._rows[row]
        if state is None:
            raise IndexError(f"sampling row {row} is free")
        return state

    def _ids(self, ids: list[int]) -> Tensor:
        return self._there(torch.tensor([token for token in ids if 0 <= token < self.vocab], dtype=torch.int64))

    def _there(self, values: Tensor) -> Tensor:
        return to_device(values, self.device)

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


def _count(state: Row, token: int) -> None:
    state.outputs += 1
    if state.counts is not None and state.seen is not None:
        state.counts[token] += 1
        state.seen[token] = True


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device, without waiting for what it does."""
    if device.type == "cpu" or not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def on_host(values: Tensor) -> Callable[[], NDArray[Any]]:
    """Begins to fetch the values; the function returned gives them once the device's stream has come so far."""
    if values.device.type == "cpu":
        return values.numpy
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    return pinned.numpy


# ----------------------------------------------------------------------------------------------------------- drawing


def draw_tokens(logits: Tensor, how: DrawColumns) -> Tensor:
    """One token a row of logits [rows, vocab], which are kept; NO_TOKEN where they are not finite.

    `how` is in numpy or on a CPU: what no row asks for is not computed. On a GPU this waits for the device.
    """
    device = logits.device
    how = how.each(lambda column: column.numpy() if isinstance(column, Tensor) else column)
    sound = logits.amax(-1).isfinite()
    drawn = np.flatnonzero(how.temperature > 0)
    if len(drawn) < len(logits):
        tokens = logits.argmax(-1)
    else:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=device)
    if len(drawn):
        every = len(drawn) == len(logits)
        part = logits if every else logits[torch.from_numpy(drawn).to(device)]
        mine = how if every else how.each(lambda column: column[drawn])
        tokens[torch.from_numpy(drawn).to(device)] = _draw_all(part, mine)
    return tokens.masked_fill_(~sound, NO_TOKEN)


def _draw_all(logits: Tensor, how: DrawColumns) -> Tensor:
    device = logits.device
    temperatures = torch.from_numpy(how.temperature).to(device)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]
    weights = scaled.exp().double()
    reached = weights.cumsum(-1)
    floor = _floor(scaled, reached[:, -1], how)
    if floor is not None:
        reached = weights.masked_fill_(scaled < floor[:, None], 0.0).cumsum(-1)
    noise = torch.from_numpy(how.noise).to(device)
    found = torch.searchsorted(reached, (noise * reached[:, -1])[:, None], right=True).squeeze(-1)
    return found.clamp_(max=logits.shape[-1] - 1)  # beyond it only where logits are not finite


def _floor(scaled: Tensor, totals: Tensor, how: DrawColumns) -> Tensor | None:
    """The least logit [rows] that top_k, top_p and min_p leave in each row; equal logits stay or go together.

    scaled [rows, vocab] has its largest value at 0 and totals [rows] is the sum of its exponentials. None when no row
    is cut.
    """
    floor = None
    cut = np.flatnonzero((how.top_k > 0) | (how.top_p < 1.0))
    if len(cut):
        rows = torch.from_numpy(cut).to(scaled.device)
        floor = torch.full((len(scaled),), NEVER, device=scaled.device)
        floor[rows] = _truncate(scaled[rows], totals[rows], how.top_k[cut], how.top_p[cut])
    if (how.log_min_p > NEVER).any():
        least = torch.from_numpy(how.log_min_p).to(scaled.device)
        floor = least if floor is None else torch.maximum(floor, least)
    return floor


def _truncate(scaled: Tensor, totals: Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float64]) -> Tensor:
    """The least logit of the smallest set of most likely tokens whose share reaches top_p, within the top_k."""
    vocab, device = scaled.shape[-1], scaled.device
    limits = np.where(top_k > 0, top_k, vocab).astype(np.int64)
    bounded = limits[limits < vocab]
    size = min(vocab, max([*bounded.tolist(), NUCLEUS_GUESS if len(bounded) < len(limits) else 1]))
    best = scaled.topk(size, -1).values
    limit = torch.from_numpy(limits).to(device)
    shares = torch.from_numpy(top_p).to(device)
    reached = best.exp().double().cumsum(-1)
    within = reached.gather(-1, (limit.clamp(max=size) - 1)[:, None]).squeeze(-1)
    target = shares * torch.where(limit < vocab, within, totals)
    if bool((target > within).any()):  # a nucleus wider than the guess
        best = scaled.sort(-1, descending=True).values
        reached = best.exp().double().cumsum(-1)
    kept = (reached < target[:, None]).sum(-1) + 1  # one more: the token that reaches the share
    kept = torch.minimum(kept, limit.clamp(max=best.shape[-1]))
    return best.gather(-1, (kept - 1)[:, None]).squeeze(-1)


# --------------------------------------------------------------------------------------------------------- logprobs


@dataclass(frozen=True, slots=True)
class FoundLogprobs:
    """Log-probabilities that the device has found or will have: of the tokens, and of the `counts` most likely."""

    counts: list[int]
    chosen: Callable[[], NDArray[Any]]  # [rows]
    best: tuple[Callable[[], NDArray[Any]], Callable[[], NDArray[Any]]] | None  # ids and values [rows, most]

    def read(self) -> list[Logprob]:
        """Once the device's stream has come so far."""
        chosen = self.chosen().tolist()
        if self.best is None:
            return [Logprob(value) for value in chosen]
        ids, values = (part().tolist() for part in self.best)
        return [Logprob(chosen[row], ids[row][:count], values[row][:count]) for row, count in enumerate(self.counts)]


def find_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> FoundLogprobs:
    """Log-softmax of raw logits [rows, vocab] at `tokens` [rows], with the counts[row] most likely tokens."""
    logprobs = logits.log_softmax(-1)
    chosen = on_host(logprobs.gather(-1, tokens[:, None]).squeeze(-1))
    most = min(max(counts, default=0), logits.shape[-1])
    if most == 0:
        return FoundLogprobs(counts, chosen, None)
    best = logprobs.topk(most, -1)
    return FoundLogprobs(counts, chosen, (on_host(best.indices), on_host(best.values)))
