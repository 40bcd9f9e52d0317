"""Sampling on the device: what the runner asks for, and the Triton kernels' answer.

The runner keeps the last token of every row on the device, so that a step can be launched whose tokens the host has not
read: `feed` puts them in their places, `draw` replaces them. The twins in plain torch do the same bookkeeping on a CPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.run.sampler import DrawColumns, draw_tokens

PIECE = 4096  # tokens of the vocabulary that one program looks at
LISTED = 128  # likely tokens of a piece that are listed at most
BLOCK = 8192  # of a row at a time, while it is searched


class TokenOps(Protocol):
    """`last` [rows] int32 holds the last token of each row."""

    def feed(self, token_ids: Tensor, rows: Tensor, last: Tensor) -> None:
        """Replaces each negative one of token_ids [sequences] by the last token of its row; 0 where that is none."""
        ...

    def draw(
        self, logits: Tensor, how: DrawColumns, chosen: Tensor, rows: Tensor | None = None, last: Tensor | None = None
    ) -> None:
        """Draws a token from each row of logits [n, vocab] into chosen [n] int64, and into `last` at `rows`; NO_TOKEN
        where they are not finite."""
        ...


class TritonTokens:
    """The kernels of `kernels.sampling`, for up to `most` rows of `vocab` logits at a time."""

    def __init__(self, most: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        from slipstream.run.cuda.kernels import sampling

        self.kernels: Any = sampling
        self.vocab, self._pieces = vocab, -(-vocab // PIECE)
        size = most * self._pieces
        self._tops = torch.empty(size, dtype=torch.float32, device=device)
        self._places = torch.empty(size, dtype=torch.int32, device=device)
        self._masses = torch.empty(size, dtype=torch.float64, device=device)
        self._bounds = torch.empty(size, dtype=torch.float32, device=device)
        self._ids = torch.empty(size * LISTED, dtype=torch.int32, device=device)
        self._likely = {kind: torch.empty(size * LISTED, dtype=kind, device=device) for kind in {dtype, torch.float32}}

    def feed(self, token_ids: Tensor, rows: Tensor, last: Tensor) -> None:
        count = len(token_ids)
        self.kernels.feed[(-(-count // 256),)](token_ids, rows, last, count, BLOCK=256, num_warps=2)

    def draw(
        self, logits: Tensor, how: DrawColumns, chosen: Tensor, rows: Tensor | None = None, last: Tensor | None = None
    ) -> None:
        kernels, pieces, count = self.kernels, self._pieces, len(logits)
        stride = logits.stride(0) if count > 1 else self.vocab  # of one row it may be anything, and is compiled for
        places = max(16, 1 << (pieces - 1).bit_length())
        likely = self._likely[logits.dtype]
        cuts = how.temperature, how.top_k, how.log_min_p, how.top_p
        shape = {"PIECE": PIECE, "PIECES": places, "LISTED": LISTED}
        kernels.survey[(count, pieces)](
            logits, stride, self._tops, self._places, self.vocab, pieces, PIECE=PIECE, num_warps=4
        )
        kernels.weigh[(count, pieces)](
            logits,
            stride,
            *cuts,
            self._tops,
            self._masses,
            self._bounds,
            likely,
            self._ids,
            self.vocab,
            pieces,
            **shape,
            num_warps=4,
        )
        kernels.pick[(count,)](
            logits,
            stride,
            *cuts,
            how.noise,
            self._tops,
            self._places,
            self._masses,
            self._bounds,
            likely,
            self._ids,
            chosen,
            chosen if rows is None else rows,
            chosen if last is None else last,
            self.vocab,
            pieces,
            **shape,
            BLOCK=BLOCK,
            KEEP=last is not None,
            num_warps=16,
        )


class TorchTokens:
    """The same in plain torch, on a CPU."""

    def feed(self, token_ids: Tensor, rows: Tensor, last: Tensor) -> None:
        token_ids.copy_(torch.where(token_ids < 0, last[rows.long()].clamp(min=0), token_ids))

    def draw(
        self, logits: Tensor, how: DrawColumns, chosen: Tensor, rows: Tensor | None = None, last: Tensor | None = None
    ) -> None:
        chosen.copy_(draw_tokens(logits.float(), how))
        if rows is not None and last is not None:
            last[rows.long()] = chosen.to(last.dtype)
