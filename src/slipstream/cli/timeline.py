"""`slipstream timeline`: where the time of requests went, in the terminal, as JSON, or as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from slipstream import outfile
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.asking import Unreachable

LAST = 20
MOST = 1000  # that a front remembers
ANSWER_S = 15.0  # the front itself gives up on workers after 6
UNKNOWN_WIDTH = 240  # of what is no terminal
SUMMARY = frozenset(
    ("id", "model", "state", "created", "prompt_tokens", "output_tokens", "cached_tokens", "ttft_s", "attempts",
     "prefill_worker", "decode_worker", "e2e_s", "error")
)  # fmt: skip


@click.command("timeline")
@click.argument("name", metavar="[ID]", required=False)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, metavar="URL", help="The front to ask.")
@click.option("--api-key", envvar="SLIPSTREAM_API_KEY", metavar="TEXT", help="Bearer token for URL, if it wants one.")
@click.option("--last", type=click.IntRange(1, MOST), metavar="N", help=f"The last N requests.  [default: {LAST}]")
@click.option(
    "--window",
    type=click.FloatRange(min=0.0),
    metavar="S",
    help="Those of the last S seconds; with --last, the last N of them.",
)
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
    if window is not None and not 0 <= window <= 1e9:
        raise click.UsageError(f"--window {window:g} is no number of seconds from 0 to 1e9.")
    if name is not None and (last is not None or window is not None):
        raise click.UsageError("ID names one request, --last and --window choose among all; give one or the other.")
    if perfetto is not None:
        outfile.check(Path(perfetto))
    client = _Client(url, api_key or "")
    timelines = [client.timeline(name)] if name is not None else client.several(last, window)
    if perfetto:
        _write(perfetto, timelines)
    if as_json:
        click.echo(json.dumps(timelines[0] if name is not None else timelines, indent=1))
    if not perfetto and not as_json:
        _draw(timelines, alone=name is not None)
    else:
        from slipstream.telemetry import draw

        click.echo("".join(f"{line}\n" for line in draw.gaps(timelines)), err=True, nl=False)


def _write(name: str, timelines: list[dict[str, Any]]) -> None:
    from slipstream.telemetry import perfetto

    body = perfetto.trace(timelines)
    count = sum(event["ph"] != "M" for event in body["traceEvents"])
    what = f"{count} events of {len(timelines)} request{'s' * (len(timelines) != 1)}, for ui.perfetto.dev,"
    outfile.write(Path(name), json.dumps(body).encode(), what)


def _draw(timelines: list[dict[str, Any]], *, alone: bool) -> None:
    from slipstream.telemetry import draw

    console = outfile.terminal(UNKNOWN_WIDTH, highlight=False)
    console.print(draw.one(timelines[0], console.width) if alone else draw.many(timelines, console.width))


def _is_timeline(found: object) -> bool:
    return isinstance(found, dict) and found.keys() >= SUMMARY and isinstance(found.get("events"), list)


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
        if not _is_timeline(answer):
            raise self._stranger(status)
        return answer

    def several(self, last: int | None, window: float | None) -> list[dict[str, Any]]:
        limit = last or (LAST if window is None else MOST)
        recent = "" if window is None else f"&window={window!r}"
        status, found = self._get(f"/v1/requests?limit={limit}&events=true{recent}")
        if status != 200:
            raise self._refused(status, found)
        data = found.get("data")
        if not isinstance(data, list) or not all(map(_is_timeline, data)):
            raise self._stranger(status)
        return data

    def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Raises Unreachable, ConfigError."""
        from slipstream.asking import get

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
        from slipstream.asking import Unreachable

        return Unreachable(f"what answers at {self._url} ({status}) is no slipstream front.")

    def _refused(self, status: int, answer: dict[str, Any]) -> SlipstreamError:
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        return SlipstreamError(f"{message}.") if isinstance(message, str) else self._stranger(status)
