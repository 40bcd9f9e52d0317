"""One line in the log for each request that was answered, or broke off.

    request 4f1c (chatcmpl-86e4): smollm2, 31 prompt tokens (16 cached), 120 tokens, first after 0.084 s, 1.9 s: stop

Behind the X-Request-ID stands the id of the response, under which the router and the workers know it. In JSON the
numbers are fields of their own.

A busy server answers more than anybody reads: of more than `LINES_A_SECOND` the rest is logged at debug, and the next
line that is shown says how many were left out.
"""

from __future__ import annotations

import logging
import time

from slipstream.front.answer import Answer

logger = logging.getLogger(__name__)

LINES_A_SECOND = 20


class Record:
    """The lines of one front."""

    def __init__(self) -> None:
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def request(self, request_id: str, model: str, answer: Answer) -> None:
        """To be called once for each answer, when nothing more will be said of it."""
        shown = self._has_room(time.monotonic())
        if not shown and not logger.isEnabledFor(logging.DEBUG):
            return
        usage = answer.usage()
        first = "no token" if answer.first_token_s is None else f"first after {answer.first_token_s:.3f} s"
        seconds = time.monotonic() - answer.started
        outcome = answer.error.code if answer.error is not None else ",".join(dict.fromkeys(answer.finishes))
        logger.log(
            logging.INFO if shown else logging.DEBUG,
            "request %s (%s): %s, %d prompt tokens (%d cached), %d tokens, %s, %.3f s in all: %s%s",
            request_id,
            answer.shape.response_id,
            model,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
            first,
            seconds,
            outcome or "not finished",
            self._remark() if shown else "",
            extra={
                "request_id": request_id,
                "response_id": answer.shape.response_id,
                "model": model,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "output_tokens": usage.completion_tokens,
                "ttft_s": answer.first_token_s,
                "seconds": round(seconds, 6),
                "outcome": outcome or "not finished",
            },
        )

    def _has_room(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._lines = int(now), 0
        self._lines += 1
        if self._lines > LINES_A_SECOND:
            self._left_out += 1
            return False
        return True

    def _remark(self) -> str:
        left_out, self._left_out = self._left_out, 0
        return f" ({left_out} requests before this one are only logged at debug)" if left_out else ""
