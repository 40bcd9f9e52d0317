"""docs/metrics.md, made of the meters themselves: `python -m slipstream.telemetry.reference > docs/metrics.md`.

Lists what each part of slipstream shows, and under which names `--metrics-compat` shows it again. A test compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from slipstream.engine.metrics import WorkerMetrics
from slipstream.front.metrics import FrontMetrics
from slipstream.router.metrics import FleetMetrics, RouterMetrics
from slipstream.telemetry.compat import ALIASES, Alias
from slipstream.telemetry.meters import Spec

INTRODUCTION = """\
# Metrics

<!-- Made from the code by `python -m slipstream.telemetry.reference > docs/metrics.md`; a test compares. -->

Every process shows its own metrics, as Prometheus likes it: the front (with the router in it) at `/metrics` of its
port, each worker at `/metrics` of its own HTTP port. The front does not add workers up and does not pass their metrics
on: of each worker it shows, by name, what the worker last reported (queues, pages, measured routes), which is what the
router decides by. Everything else about a worker is at the worker. `GET /metrics/targets` of the front lists all of
them for Prometheus' HTTP service discovery, so that ports need not be known:

```yaml
scrape_configs:
  - job_name: slipstream
    http_sd_configs:
      - url: http://127.0.0.1:8000/metrics/targets
```

`deploy/grafana/slipstream.json` is a board made of these metrics; see [observability.md](observability.md).

Units are in the names: `_seconds`, `_bytes`, `_ratio` (0 to 1). Counters end in `_total`; each histogram has
`_bucket`, `_sum` and `_count`. The histograms of first tokens begin at 1 ms, those of times between tokens at 2 ms.
"""

COMPAT = """
## Names of other engines

`--metrics-compat vllm` or `--metrics-compat sglang` shows some of these numbers a second time, under the names that
boards, autoscalers and the endpoint picker of the Kubernetes inference gateway read. An alias is computed from the
native metric at each scrape, so it is as fresh. vllm's have the labels `model_name` and `engine`, sglang's
`model_name`, `engine_type` (`prefill`, `decode`, `unified`), `tp_rank` and `pp_rank`; further labels are named below.

The front shows what a client sees of the whole cluster, a worker what it did itself. A name that both have would be
added up twice if both were scraped as one job: scrape the front alone for boards that look at the service, workers
alone for boards that look at engines.
"""


def reference() -> str:
    """The text of docs/metrics.md."""
    front, worker = FrontMetrics(), WorkerMetrics()
    fleet = FleetMetrics(list)
    router = RouterMetrics(CollectorRegistry(), dict, dict)
    parts = [
        INTRODUCTION,
        _section("Front", "All have the label `model_name`.", front.specs),
        _section("Router", "At the front's `/metrics`.", [*_wrapped(router), *fleet.specs]),
        _section("Worker", f"All have the labels {_ticked(worker.base_labels)}.", worker.specs),
        COMPAT,
        *(_aliases(flavour, part, found) for flavour, parts in ALIASES.items() for part, found in parts.items()),
    ]
    return "".join(parts)


def _wrapped(metrics: RouterMetrics) -> list[Spec]:
    """Those that are prometheus_client's own, and those that are read."""
    found = [
        Spec(metric._name, metric._type, metric._documentation, tuple(metric._labelnames))  # type: ignore[arg-type]
        for metric in vars(metrics).values()
        if isinstance(metric, MetricWrapperBase)
    ]
    return [*found, *(Spec(gauge.name, "gauge", gauge.text, (gauge.label,)) for gauge in metrics.gauges)]


def _section(title: str, note: str, specs: Sequence[Spec]) -> str:
    rows = []
    for spec in specs:
        name = spec.name + ("_total" if spec.kind == "counter" else "")
        rows.append(f"| `{name}` | {spec.kind} | {_ticked(spec.labels)} | {spec.text} |")
    return "\n".join(["", f"## {title}", "", note, "", "| name | kind | labels | |", "|---|---|---|---|", *rows, ""])


def _aliases(flavour: str, part: str, aliases: Iterable[Alias]) -> str:
    rows = []
    for alias in aliases:
        labels = [*alias.keep.values(), *(label for source in alias.sources for label in source.add)]
        sources = []
        for source in alias.sources:
            chosen = f" of {source.label} {' or '.join(source.values)}" if source.label and not source.but else ""
            chosen = f" but {source.label} {' or '.join(source.values)}" if source.but else chosen
            sources.append(f"`{source.name}`{chosen}")
        rows.append(f"| `{alias.name}` | {_ticked(dict.fromkeys(labels))} | {'; '.join(dict.fromkeys(sources))} |")
    columns = "| name (counters without `_total`) | labels | made of |"
    head = ["", f"### {flavour}, {part}", "", columns, "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _ticked(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    print(reference(), end="")
