"""Results of a load as data, as a table in the terminal, and as curves; several of them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from slipstream.bench.plot import Curve, Panel, draw
from slipstream.bench.report import Conditions
from slipstream.bench.serve.figures import Figures, Slo, Spread, prompt_tokens
from slipstream.bench.serve.load import LoadResult, Sample
from slipstream.errors import ConfigError


class RequestRow(msgspec.Struct, array_like=True):
    """One measured request. `rate` as it was asked for. Times in milliseconds, `due_s` in seconds after the first
    measured one; -1 where there is none. `gaps_ms` only when raw data were asked for."""

    rate: float
    seed: int
    due_s: float
    input: int
    wanted_output: int
    output: int
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    late_ms: float
    problem: str
    gaps_ms: list[float] = []


class ServeReport(msgspec.Struct, kw_only=True):
    """All loads of one call. `load` describes what was sent, `target` what it was sent to."""

    kind: str = "serve"
    conditions: Conditions
    label: str
    target: dict[str, str | int | bool | list[str]]
    load: dict[str, str | int | float]
    slo: Slo | None = None
    notes: list[str] = []
    rates: list[Figures] = []
    requests: list[RequestRow] = []


def rows_of(rate: float, seed: int, result: LoadResult, *, raw: bool) -> list[RequestRow]:
    return [_row(rate, seed, sample, result.begin, raw) for sample in result.samples if sample.planned.measured]


def _row(rate: float, seed: int, sample: Sample, begin: float, raw: bool) -> RequestRow:
    def ms(value: float | None) -> float:
        return -1.0 if value is None else round(1e3 * value, 3)

    came = len(sample.stream.times) > 0
    return RequestRow(
        rate=rate,
        seed=seed,
        due_s=round(sample.due - begin, 6),
        input=prompt_tokens(sample),
        wanted_output=sample.planned.item.output,
        output=sample.output_tokens,
        ttft_ms=ms(sample.ttft_s if came else None),
        tpot_ms=ms(sample.tpot_s),
        e2e_ms=ms(sample.e2e_s if came else None),
        late_ms=ms(sample.lateness_s),
        problem=sample.stream.problem,
        gaps_ms=np.round(np.diff(sample.stream.times) * 1e3, 3).tolist() if raw else [],
    )


def load_report(path: Path) -> ServeReport:
    """Raises ConfigError when the file is none of these."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ServeReport)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is no result of `slipstream bench serve --json`: {error}") from None
    if found.kind != "serve":
        raise ConfigError(f"{path} is a result of {found.kind!r}, not of `slipstream bench serve`.")
    return msgspec.structs.replace(found, label=found.label or path.stem)


# -------------------------------------------------------------------------------------------------------------- tables


def cells(spread: Spread, percents: Sequence[int] = (50, 90, 99)) -> str:
    return " / ".join(short(getattr(spread, f"p{percent}")) for percent in percents) if spread.n else ""


def short(value: float) -> str:
    """Three significant digits, no exponents."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


LATENCIES: tuple[str, ...] = ("TTFT", "ITL", "TPOT", "E2E")
HEADINGS: tuple[str, ...] = ("asked", "sent/s", "done/s", "prompt tok/s", "tok/s", *LATENCIES, "goodput", "failed")


def print_table(reports: Sequence[ServeReport], console: Console) -> None:
    """A row for each rate; latencies in milliseconds, p50 / p90 / p99. Two tables where one would be too wide."""
    title = "latencies in ms: p50 / p90 / p99"
    whole = _table(reports, title, HEADINGS)
    if console.measure(whole, options=console.options.update(max_width=1000)).maximum <= console.width:
        console.print(whole)
        return
    console.print(_table(reports, "", tuple(name for name in HEADINGS if name not in LATENCIES)))
    console.print(_table(reports, title, ("asked", *LATENCIES)))


def _table(reports: Sequence[ServeReport], title: str, headings: Sequence[str]) -> Table:
    drawn = Table(title=title, title_justify="left")
    several = len(reports) > 1
    for heading in ("load", *headings) if several else headings:
        drawn.add_column(heading, justify="left" if heading == "load" else "right", overflow="fold")
    for report in reports:
        for row in report.rates:
            shown = dict(zip(HEADINGS, _cells(report, row), strict=True))
            drawn.add_row(*([report.label] if several else []), *(shown[heading] for heading in headings))
        drawn.add_section()
    return drawn


def _cells(report: ServeReport, row: Figures) -> list[str]:
    """Those of HEADINGS."""
    good = row.good
    return [
        asked(report, row),
        short(row.sent_per_s),
        short(row.done_per_s),
        f"{row.prompt_tokens_per_s:,.0f}",
        f"{row.output_tokens_per_s:,.0f}",
        *map(cells, (row.ttft, row.itl, row.tpot, row.e2e)),
        f"{good.value:.2f} ({good.low:.2f}-{good.high:.2f})" if good else "",
        f"[red]{row.requests - row.ok}" if row.ok < row.requests else "0",
    ]


def asked(report: ServeReport, row: Figures) -> str:
    """What `--rate` or, for a trace, `--speed` asked for."""
    return f"{row.rate:g} x" if _of_trace(report) else f"{row.rate:g}/s"


def _of_trace(report: ServeReport) -> bool:
    return report.load["arrivals"] == "trace"


def print_reports(reports: Sequence[ServeReport], console: Console) -> None:
    """The table of all, and below it what has to be known of each to read it: bounds of goodput, errors, warnings."""
    print_table(reports, console)
    for report in reports:
        name = f"{report.label}: " if len(reports) > 1 else ""

        def say(text: str, style: str = "", name: str = name) -> None:
            console.print(name + text, style=style, highlight=False, markup=False)

        if report.slo is not None:
            say(f"goodput: share of requests with {report.slo}; 95 % interval")
        for row in report.rates:
            for kind, count in row.errors.items():
                say(f"{asked(report, row)}: {count} x {kind}: {row.error_examples.get(kind, '')}", "red")
            for note in row.notes:
                say(f"{asked(report, row)}: {note}")
        for note in report.notes:
            say(note)


# -------------------------------------------------------------------------------------------------------------- curves


def plot(reports: Sequence[ServeReport], path: Path, title: str = "") -> None:
    """Curves over the rate; with a single rate each, the distributions of requests instead."""
    single = all(len(report.rates) == 1 for report in reports)
    panels = _distributions(reports) if single else _over_rates(reports)
    draw(panels, path, title=title or "; ".join(dict.fromkeys(_what(r) for r in reports)), note=_note(reports))


def _over_rates(reports: Sequence[ServeReport]) -> list[Panel]:
    """Over the asked rate; where a trace is among them, which has none, over the sent one."""
    x = "requests/s sent" if any(map(_of_trace, reports)) else "requests/s asked"

    def places(report: ServeReport) -> list[float]:
        return [row.sent_per_s if x == "requests/s sent" else row.rate for row in report.rates]

    def curves(pick: str) -> list[Curve]:
        found = []
        for report in reports:
            at_rates = places(report)
            spreads = [getattr(row, pick) for row in report.rates]
            sound = all(s.low for s in spreads)
            for at, percent in ((0, 50), (3, 99)):
                y = [getattr(s, f"p{percent}") for s in spreads]
                low, high = ([s.low[at] for s in spreads], [s.high[at] for s in spreads]) if sound else ((), ())
                found.append(Curve(report.label, at_rates, y, low=low, high=high, dashed=percent == 99))
        return found

    def rate_of(pick: str) -> list[Curve]:
        return [Curve(r.label, places(r), [getattr(f, pick) for f in r.rates]) for r in reports]

    panels = [
        Panel("time to first token, p50 and p99 (dashed)", x, "ms", curves("ttft"), log_y=True),
        Panel("time between tokens, p50 and p99 (dashed)", x, "ms", curves("itl"), log_y=True),
        Panel("time per output token, p50 and p99 (dashed)", x, "ms", curves("tpot")),
        Panel("whole answer, p50 and p99 (dashed)", x, "ms", curves("e2e"), log_y=True),
        Panel("output tokens", x, "tokens/s", rate_of("output_tokens_per_s")),
    ]
    goods = [report for report in reports if all(row.good for row in report.rates)]
    if goods:
        panels.append(
            Panel(
                f"goodput: {goods[0].slo}", x, "share of requests", [_good(report, places(report)) for report in goods]
            )
        )
    return panels


def _good(report: ServeReport, places: Sequence[float]) -> Curve:
    shares = [row.good for row in report.rates if row.good]
    return Curve(
        report.label,
        places,
        [share.value for share in shares],
        low=[share.low for share in shares],
        high=[share.high for share in shares],
    )


def _distributions(reports: Sequence[ServeReport]) -> list[Panel]:
    def curves(pick: str) -> list[Curve]:
        found = []
        for report in reports:
            values = sorted(
                getattr(row, pick) for row in report.requests if not row.problem and getattr(row, pick) >= 0
            )
            if values:
                at = np.unique(np.linspace(0, len(values) - 1, 200).astype(int))
                found.append(
                    Curve(report.label, [values[i] for i in at], ((at + 1) / len(values)).tolist(), marks=False)
                )
        return found

    return [
        Panel("time to first token", "ms", "share of requests", curves("ttft_ms")),
        Panel("time per output token", "ms", "share of requests", curves("tpot_ms")),
        Panel("whole answer", "ms", "share of requests", curves("e2e_ms")),
    ]


def _what(report: ServeReport) -> str:
    return f"{report.target['model']}: {report.load['work']}"


def _note(reports: Sequence[ServeReport]) -> str:
    said = []
    for report in reports:
        where = ", ".join(report.conditions.devices) or f"{report.conditions.cpu}, {report.conditions.cores} cores"
        said.append(f"{report.label}: client on {where}, {report.conditions.when}, {report.conditions.command}")
    return "\n".join(said)
