"""Counts what the front does, for /metrics.

Plain numbers, touched by the event loop alone and read when somebody scrapes: a token costs one bisect. Bounds reach
from 1 ms (first token) and 2 ms (between tokens), where small models on fast GPUs are, up to minutes.
"""

from __future__ import annotations

from slipstream.telemetry.meters import COUNT_BOUNDS, DURATION_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS, Meters, build_info


class FrontMetrics(Meters):
    """All counts of one front. `model` labels them once it is known."""

    def __init__(self) -> None:
        super().__init__("slipstream_", lambda: {"model_name": self.model})
        self.model = ""
        self.in_flight = 0
        self.ttft = self.histogram(
            "time_to_first_token_seconds", "Seconds from the request to its first token, as the front sees it.",
            TTFT_BOUNDS,
        ).only()  # fmt: skip
        self.itl = self.histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of one answer, as the front sees it.", ITL_BOUNDS
        ).only()
        self.token_time = self.histogram(
            "time_per_output_token_seconds", "Mean seconds between the tokens of one answer.", ITL_BOUNDS
        ).only()
        self.duration = self.histogram(
            "request_duration_seconds", "Seconds from the request to the end of its answer.", DURATION_BOUNDS
        ).only()
        self.prompt_sizes = self.histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNT_BOUNDS).only()
        self.answer_sizes = self.histogram("request_generated_tokens", "Tokens of an answer.", COUNT_BOUNDS).only()
        self.outcomes = self.counter("requests", "Generation requests by how they ended.", "endpoint", "outcome")
        self.finishes = self.counter("finished_choices", "Choices that ended in full, by finish reason.", "reason")
        self.statuses = self.counter("http_responses", "Responses by status.", "path", "status")
        self.prompt_tokens = self.counter("prompt_tokens", "Tokens of the prompts of answered requests.")
        self.cached_tokens = self.counter("cached_prompt_tokens", "Prompt tokens whose KV was in a prefix cache.")
        self.generated_tokens = self.counter("generated_tokens", "Tokens generated.")
        self.merged = self.counter(
            "merged_chunks", "Chunks that waited, as for a slow client, and left together with a later one."
        )
        self.gauge("requests_in_flight", "Generation requests being answered.", read=lambda: {(): self.in_flight})
        self.gauge(
            "build_info", "Version; always 1.", "component", "version", "python", read=lambda: build_info("front")
        )
