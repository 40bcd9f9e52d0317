"""All loads of one call: finds out what the server takes, then runs every rate with every seed, one after another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from slipstream.bench.report import conditions
from slipstream.bench.serve.arrivals import Arrivals, due_times, trace_times
from slipstream.bench.serve.client import Client
from slipstream.bench.serve.figures import Figures, Slo, figures
from slipstream.bench.serve.load import LoadResult, Planned, Progress, run_load
from slipstream.bench.serve.prompts import PromptMaker, Sampling
from slipstream.bench.serve.report import ServeReport, asked, rows_of, short
from slipstream.bench.serve.target import Api, Target, UsageWay, characters_per_token, discover, parse_url
from slipstream.bench.serve.work import Conversations, Item, Work
from slipstream.errors import ConfigError

Say = Callable[[str], None]
Show = Callable[[str, Progress], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a call asks for. `rates` are requests a second, or, for arrivals by trace, multiples of its speed. At each
    rate `requests` are sent, or, if that is 0, as many as fall into `duration_s`."""

    url: str
    work: Work
    model: str = ""
    api: Api = "completions"
    headers: dict[str, str]
    arrivals: Arrivals = "poisson"
    rates: tuple[float, ...] = (1.0,)
    variation: float = 2.0
    duration_s: float = 30.0
    requests: int = 0
    warmup: int = 10
    seeds: tuple[int, ...] = (0,)
    slo: Slo | None = None
    timeout_s: float = 600.0
    drain_s: float = 60.0
    temperature: float | None = 0.0
    usage: UsageWay | None = None
    salt: int = 0
    max_input: int = 0
    max_output: int = 0
    label: str = ""
    raw: bool = False


class Session:
    """One server under several loads. `run` raises NoServer or ConfigError; failed requests are figures."""

    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self._runs = 0
        self.report: ServeReport | None = None  # grows by one rate after the other

    async def run(self, show: Show) -> ServeReport:
        settings = self._settings
        host, port, tls, _ = parse_url(settings.url)
        client = Client(host, port, tls=tls, headers=settings.headers)
        try:
            target = await discover(
                client,
                settings.url,
                model=settings.model,
                api=settings.api,
                usage=settings.usage,
                patience_s=settings.timeout_s,
            )
            if isinstance(settings.work, Conversations):
                await self._measure_characters(client, target, settings.work)
            self.report = report = self._report(target)
            self._say(f"{target.model} at {target.url}{target.endpoint}: {self._settings.work.describe()}")
            for rate in settings.rates:
                row = await self._rate(client, target, rate, report, show)
                report.rates.append(row)
                self._say(_line(report, row))
        finally:
            client.close()
        return report

    def interrupted(self) -> ServeReport | None:
        """What there is when `run` was ended from outside: the rates that were whole by then; None without any."""
        report = self.report
        if report is None or not report.rates:
            return None
        whole = {row.rate for row in report.rates}
        report.requests = [row for row in report.requests if row.rate in whole]
        missing = ", ".join(f"{rate:g}" for rate in self._settings.rates[len(report.rates) :])
        report.notes.append(f"it was interrupted: these were not measured: {missing}")
        return report

    async def _measure_characters(self, client: Client, target: Target, work: Conversations) -> None:
        texts = [question for question, _ in work.turns[:8]]
        work = replace(work, characters_per_token=await characters_per_token(client, target, texts))
        self._settings = replace(self._settings, work=work)

    async def _rate(self, client: Client, target: Target, rate: float, report: ServeReport, show: Show) -> Figures:
        settings = self._settings
        results: dict[int, LoadResult] = {}
        for seed in settings.seeds:
            plan, cut = self.plan(client, target, rate, seed)
            if cut:
                report.notes.append(f"{rate:g}, seed {seed}: {cut} of {len(plan)} requests were cut in length")
            name = f"{rate:g}{'x' if settings.arrivals == 'trace' else '/s'}, seed {seed}"
            result = await run_load(
                client,
                plan,
                window_s=self._window(plan),
                timeout_s=settings.timeout_s,
                drain_s=settings.drain_s,
                show=lambda progress, name=name: show(name, progress),
            )
            results[seed] = result
            report.requests += rows_of(rate, seed, result, raw=settings.raw)
        return figures(rate, results, settings.slo, told_usage=target.usage != "none")

    def _window(self, plan: list[Planned]) -> float:
        """How long requests are sent; of a number of requests, their span and one mean gap."""
        if not self._settings.requests and self._settings.arrivals != "trace":
            return self._settings.duration_s
        times = [planned.due_s for planned in plan if planned.measured]
        return max((times[-1] - times[0]) * len(times) / max(1, len(times) - 1), 1e-3)

    def plan(self, client: Client, target: Target, rate: float, seed: int) -> tuple[list[Planned], int]:
        """The requests of one load in order of time, and how many of them were cut in length.

        Arrivals and lengths depend on the seed alone, prompts also on the salt and on the number of the load.
        """
        settings = self._settings
        self._runs += 1
        maker = PromptMaker(target, settings.salt * 1_000_003 + self._runs, Sampling(settings.temperature))
        items, times = self._items(rate, seed)
        cut = 0
        planned = []
        for number, (item, time) in enumerate(zip(items, times, strict=True)):
            fitting = self._fitted(item, target)
            cut += fitting is not item
            payload = client.request("POST", target.endpoint, maker.body(fitting, number))
            planned.append(Planned(time, fitting, payload, measured=number >= settings.warmup))
        return planned, cut

    def _items(self, rate: float, seed: int) -> tuple[list[Item], list[float]]:
        """Items with their times, warm-up included."""
        settings = self._settings
        expected, exact = rate * settings.duration_s, settings.arrivals == "exact"
        wanted = settings.requests or (max(1, round(expected)) if exact else int(1.3 * expected + 8 * expected**0.5))
        available = settings.work.available
        by_trace = settings.arrivals == "trace"
        count = settings.warmup + (wanted if not by_trace or settings.requests else available or 0)
        count = min(count, available) if available is not None else count
        if count <= settings.warmup:
            raise ConfigError(
                f"{count} requests are there, and --warmup takes {settings.warmup} of them: none would be measured."
            )
        items = settings.work.items(count, np.random.default_rng((seed, 1)))
        if by_trace:
            times = trace_times([item.at_s or 0.0 for item in items], speed=rate)
        else:
            draws = np.random.default_rng((seed, 2))
            warm = settings.warmup if exact else 0  # each part has its exact number
            times = due_times(settings.arrivals, warm, rate, draws, variation=settings.variation)
            later = due_times(settings.arrivals, count - warm, rate, draws, variation=settings.variation)
            times += [warm / rate + time for time in later]
        if settings.requests or exact:
            return items, times
        end = times[settings.warmup] + settings.duration_s
        kept = [pair for pair in zip(items, times, strict=True) if pair[1] <= end]
        return [item for item, _ in kept], [time for _, time in kept]

    def _fitted(self, item: Item, target: Target) -> Item:
        """The item within the caps and the server's context."""
        settings = self._settings
        output = min(item.output, settings.max_output or item.output)
        input = min(item.input, settings.max_input or item.input)
        if target.max_model_len:
            output = min(output, target.max_model_len - 1)
            input = max(1, min(input, target.max_model_len - output))
        if (input, output) == (item.input, item.output):
            return item
        text = item.text[: len(item.text) * input // item.input] if item.text else ""
        return replace(item, input=input, output=output, text=text)

    def _report(self, target: Target) -> ServeReport:
        settings = self._settings
        return ServeReport(
            conditions=conditions(sys.argv, []),
            label=settings.label,
            target={
                "url": target.url,
                "endpoint": target.endpoint,
                "model": target.model,
                "server": target.server,
                "max_model_len": target.max_model_len,
                "prompts_as_ids": target.takes_ids,
                "ignore_eos": target.takes_ignore_eos,
                "min_tokens": target.takes_min_tokens,
                "token_ids": target.takes_token_ids,
                "usage": target.usage,
            },
            load={
                "work": settings.work.describe(),
                "arrivals": settings.arrivals,
                "variation": settings.variation if settings.arrivals == "burst" else 0.0,
                "duration_s": settings.duration_s,
                "requests": settings.requests,
                "warmup": settings.warmup,
                "seeds": len(settings.seeds),
                "salt": settings.salt,
                "temperature": -1.0 if settings.temperature is None else settings.temperature,
            },
            slo=settings.slo,
            notes=list(target.notes),
        )


def _line(report: ServeReport, row: Figures) -> str:
    good = f", goodput {row.good.value:.2f}" if row.good else ""
    return (
        f"{asked(report, row)} asked, {short(row.sent_per_s)}/s sent: {row.ok} of {row.requests} whole, "
        f"TTFT {short(row.ttft.p50)} / {short(row.ttft.p99)} ms, "
        f"ITL {short(row.itl.p50)} / {short(row.itl.p99)} ms (p50 / p99), {row.output_tokens_per_s:,.0f} tokens/s{good}"
    )
