"""The spans of a worker, made of its records: queue, prefill, kv_transfer, decode.

The loop thread only puts an ended record into a queue; a thread of its own makes the spans, because making one takes
longer than a decoding sequence's share of a step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from slipstream.engine.timeline import Record
from slipstream.telemetry.trace import Attribute, Spans

Stage = tuple[str, float, float, dict[str, Attribute]]
GOOD = ("finished", "handed_over", "superseded", "client_closed_request")


class WorkerTraces:
    """Sends spans until `close`. `identity` gives the worker's name and its model's."""

    def __init__(self, spans: Spans, identity: Callable[[], tuple[str, str]]) -> None:
        self._spans = spans
        self._identity = identity
        self._ended: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slipstream-traces", daemon=True)
        self._thread.start()

    def ended(self, record: Record) -> None:
        if record.trace:
            self._ended.put(record)

    def close(self) -> None:
        self._ended.put(None)
        self._thread.join()
        self._spans.close()

    def _run(self) -> None:
        while (record := self._ended.get()) is not None:
            name, model = self._identity()
            stages = list(stages_of(record))
            for at, (stage, start, end, attributes) in enumerate(stages):
                facts: dict[str, Attribute] = {
                    "slipstream.worker": name,
                    "slipstream.request": record.id,
                    "slipstream.attempt": record.attempt + 1,
                    "gen_ai.request.model": model,
                    "gen_ai.provider.name": "slipstream",
                }
                failed = record.outcome not in GOOD and at == len(stages) - 1
                error = (record.outcome, record.message or record.outcome) if failed else None
                self._spans.stage(stage, record.trace, start, end, facts | attributes, error)


def stages_of(record: Record) -> Iterator[Stage]:
    """What the request went through here, in order."""
    if not record.adopted:
        yield "queue", record.arrived, record.admitted or record.ended, {}
        if record.admitted:
            attributes: dict[str, Attribute] = {
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
                "slipstream.chunks": sum(note[2] == "prefill_chunk" for note in record.notes),
            }
            yield "prefill", record.admitted, record.first or record.ended, attributes
    copies = [note for note in record.notes if note[2] == "copy_chunk"]
    if copies or record.handed_over:
        start = min([note[0] for note in copies] or [record.committed])
        yield (
            "kv_transfer",
            start,
            record.ended,
            {
                "slipstream.transfer.bytes": record.copied_bytes,
                "slipstream.transfer.copies": len(copies),
                "slipstream.transfer.transport": ",".join(sorted(record.transports)),
            },
        )
    if record.runs:
        tokens = sum(run[2] for run in record.runs)
        yield (
            "decode",
            record.runs[0][0],
            record.ended,
            {
                "gen_ai.usage.output_tokens": record.outputs,
                "slipstream.decoded_tokens": tokens,
            },
        )
    elif record.adopted:
        yield "decode", record.admitted, record.ended, {"gen_ai.usage.output_tokens": record.outputs}
