"""Sampling kernels against their twins in plain torch: the same checks under Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slipstream.run.cuda.sampling import PIECE, TorchTokens, TritonTokens
from slipstream.run.sampler import DrawColumns, DrawTable, bounded
from slipstream.types import SamplingParams

VOCAB = 2 * PIECE + 1234
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.4),
    SamplingParams(seed=3, top_k=1),
    SamplingParams(seed=4, top_k=50),
    SamplingParams(seed=5, top_p=0.9),
    SamplingParams(seed=6, top_p=0.3, temperature=1.7),
    SamplingParams(seed=7, min_p=0.05),
    SamplingParams(seed=8, top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(seed=9, top_k=3000, top_p=0.999),
    SamplingParams(seed=10, top_p=0.0),
    SamplingParams(seed=11, top_k=VOCAB + 5, top_p=1.0),
    SamplingParams(seed=12, temperature=1e6, top_p=0.5),
    SamplingParams(seed=13, temperature=1e-5),
    SamplingParams(seed=14, min_p=1e-9),
    SamplingParams(seed=15, min_p=1.0),
]


def columns(settings: list[SamplingParams], positions: list[int], device: torch.device) -> DrawColumns:
    table = DrawTable(len(settings), VOCAB)
    for row, params in enumerate(settings):
        table.set(row, bounded(params))
    found = table.columns(np.arange(len(settings)), np.array(positions))
    return found.each(lambda column: torch.from_numpy(column).to(device))


def draw(logits: Tensor, how: DrawColumns, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of kernels and twins."""
    count, rows = len(logits), torch.arange(len(logits), dtype=torch.int32).flip(0)
    found = []
    for on, tokens in (
        (device, TritonTokens(count, VOCAB, logits.dtype, device)),
        (torch.device("cpu"), TorchTokens()),
    ):
        chosen = torch.full((count,), -7, dtype=torch.int64, device=on)
        last = torch.full((count,), -7, dtype=torch.int32, device=on)
        tokens.draw(logits.to(on), how.each(lambda column, on=on: column.to(on)), chosen, rows.to(on), last)
        assert last.cpu().flip(0).tolist() == chosen.tolist()
        found.append(chosen.cpu())
    return found[0], found[1]


def compare(logits: Tensor, settings: list[SamplingParams], device: torch.device, rounds: int) -> None:
    how = columns(settings, list(range(len(settings))), device)
    for step in range(rounds):
        again = columns(settings, [100 * step + i for i in range(len(settings))], device)
        how = DrawColumns(how.temperature, how.top_k, how.log_min_p, how.top_p, again.noise)
        mine, twins = draw(logits, how, device)
        assert mine.tolist() == twins.tolist(), step


def peaked(rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Like a language model's: a few likely tokens and a long tail; equal values among them in short dtypes."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(rows, VOCAB, generator=generator) * 2.5
    values[:, :: VOCAB // 7] += 9
    return values.to(dtype).to(device)


def likely(device: torch.device, dtype: torch.dtype, rounds: int = 2) -> None:
    compare(peaked(len(SETTINGS), device, dtype), SETTINGS, device, rounds)


def flat(device: torch.device, dtype: torch.dtype, rounds: int = 2) -> None:
    """More likely tokens than are listed: whole rows are searched."""
    generator = torch.Generator().manual_seed(4)
    values = (torch.randn(len(SETTINGS), VOCAB, generator=generator) * 0.5).to(dtype).to(device)
    compare(values, SETTINGS, device, rounds)


def equal(device: torch.device, dtype: torch.dtype) -> None:
    """All logits the same, or of two values: nothing may be cut between equal ones."""
    values = torch.zeros(len(SETTINGS), VOCAB, dtype=dtype, device=device)
    values[1::2, ::5] = 1.5
    compare(values, SETTINGS, device, 1)


def unsound(device: torch.device, dtype: torch.dtype) -> None:
    """Rows without finite logits get no token, whatever they ask for; minus infinity among others is fine."""
    settings = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2, top_k=5, top_p=0.5)] * 4
    values = peaked(len(settings), device, dtype)
    values[0:3, 77] = float("nan")
    values[3:6, VOCAB - 1] = float("inf")
    values[6:9] = float("-inf")
    values[9:12, ::2] = float("-inf")
    mine, twins = draw(values, columns(settings, list(range(12)), device), device)
    assert mine.tolist() == twins.tolist()
    assert mine.tolist()[:9] == [-1] * 9
    assert (mine[9:] >= 0).all()


def first_of_equal(device: torch.device, dtype: torch.dtype) -> None:
    values = torch.zeros(2, VOCAB, dtype=dtype, device=device)
    values[0, [PIECE + 3, PIECE + 4, 2 * PIECE + 1]] = 2.0
    mine, _ = draw(values, columns([SamplingParams(temperature=0.0)] * 2, [0, 0], device), device)
    assert mine.tolist() == [PIECE + 3, 0]


def fed(device: torch.device, dtype: torch.dtype) -> None:
    ids = torch.tensor([5, -1, -1, 0, -1] + [7] * 300, dtype=torch.int32, device=device)
    rows = torch.arange(len(ids), dtype=torch.int32, device=device).flip(0)
    last = torch.arange(1000, 1000 + len(ids), dtype=torch.int32, device=device)
    last[int(rows[4])] = -1
    ids_too = ids.clone()
    TritonTokens(1, VOCAB, dtype, device).feed(ids, rows, last)
    TorchTokens().feed(ids_too, rows, last)
    assert ids.tolist() == ids_too.tolist()
    assert ids[:5].tolist() == [5, 1303, 1302, 0, 0]


CHECKS: dict[str, Callable[[torch.device, torch.dtype], None]] = {
    "likely": likely,
    "flat": flat,
    "equal": equal,
    "unsound": unsound,
    "first_of_equal": first_of_equal,
    "fed": fed,
}
