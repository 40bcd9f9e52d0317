"""`slipstream timeline`: where the time of requests went, in the terminal, as JSON, or as a trace for Perfetto."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from slipstream.errors import ConfigError, SlipstreamError

LAST = 20
MOST = 1000  # that a front remembers
AT_ONCE = 8
ANSWER_S = 10.0


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
    console.print(draw.one(timelines[0], console.width) if alone else draw.many(timelines))


class _Client:
    """What is asked of a front."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/")
        self._key = api_key

    def timeline(self, name: str) -> dict[str, Any]:
        return self._get(f"/v1/requests/{quote(name, safe='')}/timeline")

    def several(self, last: int | None, window: float | None) -> list[dict[str, Any]]:
        limit = last or (LAST if window is None else MOST)
        found = self._get(f"/v1/requests?limit={limit}")
        if window is not None:
            now = found["now"]
            found["data"] = [one for one in found["data"] if one["created"] + (one["e2e_s"] or now) >= now - window]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.timeline, (one["id"] for one in found["data"])))

    def _get(self, path: str) -> dict[str, Any]:
        from slipstream.doctor.routes import Unreachable, get

        status, body = get(self._url, path, self._key, ANSWER_S)
        if status == 401:
            raise ConfigError(f"{self._url} wants an API key: give --api-key or set SLIPSTREAM_API_KEY.")
        try:
            answer = json.loads(body)
        except ValueError:
            raise Unreachable(
                f"{self._url}{path} answered {status} and no JSON: this is no slipstream front."
            ) from None
        if status != 200:
            problem = answer.get("error", {}).get("message") or f"{self._url}{path} answered {status}"
            raise SlipstreamError(f"{problem}.")
        return answer
