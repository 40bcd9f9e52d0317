"""`slipstream timeline`: where the time of requests went, in the terminal, as JSON, or as a trace for Perfetto."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.doctor.asking import Unreachable

LAST = 20
MOST = 1000  # that a front remembers
AT_ONCE = 8
ANSWER_S = 10.0
SUMMARY = frozenset(
    ("id", "model", "state", "created", "prompt_tokens", "output_tokens", "cached_tokens", "ttft_s", "attempts",
     "prefill_worker", "decode_worker", "e2e_s", "error")
)  # fmt: skip


@click.command("timeline")
@click.argument("name", metavar="[ID]", required=False)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, metavar="URL", help="The front to ask.")
@click.option("--api-key", envvar="SLIPSTREAM_API_KEY", metavar="TEXT", help="Bearer token for URL, if it wants one.")
@click.option("--last", type=click.IntRange(1, MOST), metavar="N", help=f"The last N requests.  [default: {LAST}]")
@click.option("--window", type=click.FloatRange(min=0.0), metavar="S", help="Those of the last S seconds.")
@click.option("--perfetto", metavar="FILE", help="Write a trace for ui.perfetto.dev and chrome://tracing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    name: str | None,
    url: str,
    api_key: str | None,
    last: int | None,
    window: float | None,
    perfetto: str | None,
    as_json: bool,
) -> None:
    """Show where the time of requests went: queues, prompt chunks, KV copies, handoff, decode steps.

    ID is the id of a response, of one of its choices, or the X-Request-ID; without it the last requests are shown, one
    bar each.

    \b
    slipstream timeline
    slipstream timeline chatcmpl-86476fccc86471aeb21c2980
    slipstream timeline --window 30 --perfetto trace.json
    """
    if window is not None and not math.isfinite(window):
        raise click.UsageError(f"--window {window:g} is no number of seconds.")
    if sum(value is not None for value in (name, last, window)) > 1:
        raise click.UsageError("ID, --last and --window exclude each other; give one of them.")
    client = _Client(url, api_key or "")
    timelines = [client.timeline(name)] if name is not None else client.several(last, window)
    if perfetto:
        _write(perfetto, timelines)
    if as_json:
        click.echo(json.dumps(timelines[0] if name is not None else timelines, indent=1))
    elif not perfetto:
        _draw(timelines, alone=name is not None)


def _write(name: str, timelines: list[dict[str, Any]]) -> None:
    from slipstream.telemetry import perfetto

    body = perfetto.trace(timelines)
    try:
        Path(name).write_text(json.dumps(body))
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}.") from error
    count = sum(event["ph"] != "M" for event in body["traceEvents"])
    click.echo(f"{name}: {count} events of {len(timelines)} requests; open it at ui.perfetto.dev", err=True)


def _draw(timelines: list[dict[str, Any]], *, alone: bool) -> None:
    from rich.console import Console

    from slipstream.telemetry import draw

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240
    console.print(draw.one(timelines[0], console.width) if alone else draw.many(timelines, console.width))


def _is_summary(found: object) -> bool:
    return isinstance(found, dict) and found.keys() >= SUMMARY


class _Client:
    """What is asked of a front."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/")
        self._key = api_key

    def timeline(self, name: str) -> dict[str, Any]:
        """Raises SlipstreamError when it is not remembered there."""
        status, answer = self._get(f"/v1/requests/{quote(name, safe='')}/timeline")
        if status != 200:
            raise self._refused(status, answer)
        if not (_is_summary(answer) and isinstance(answer.get("events"), list)):
            raise self._stranger(status)
        return answer

    def several(self, last: int | None, window: float | None) -> list[dict[str, Any]]:
        limit = last or (LAST if window is None else MOST)
        status, found = self._get(f"/v1/requests?limit={limit}")
        if status != 200:
            raise self._refused(status, found)
        now, data = found.get("now"), found.get("data")
        if not isinstance(now, float) or not isinstance(data, list) or not all(map(_is_summary, data)):
            raise self._stranger(status)
        if window is not None:
            data = [one for one in data if one["e2e_s"] is None or one["created"] + one["e2e_s"] >= now - window]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(self._still_there, (one["id"] for one in data))
            return [timeline for timeline in found if timeline is not None]

    def _still_there(self, name: str) -> dict[str, Any] | None:
        """None of a request that was forgotten since it was listed: a busy front keeps the last ones alone."""
        status, answer = self._get(f"/v1/requests/{quote(name, safe='')}/timeline")
        return answer if status == 200 and isinstance(answer.get("events"), list) else None

    def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Raises Unreachable, ConfigError."""
        from slipstream.doctor.asking import get

        status, body = get(self._url, path, self._key, ANSWER_S)
        if status == 401:
            raise ConfigError(f"{self._url} wants an API key: give --api-key or set SLIPSTREAM_API_KEY.")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._stranger(status)
        return status, answer

    def _stranger(self, status: int) -> Unreachable:
        from slipstream.doctor.asking import Unreachable

        return Unreachable(f"what answers at {self._url} ({status}) is no slipstream front.")

    def _refused(self, status: int, answer: dict[str, Any]) -> SlipstreamError:
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        return SlipstreamError(f"{message}.") if isinstance(message, str) else self._stranger(status)
