"""Makes the Grafana board of slipstream: `python deploy/grafana/board.py > deploy/grafana/slipstream.json`.

The board is data below, a row of panels a subject; a test compares the file with what this prints, and every expression
with what a running cluster shows. Import the file in Grafana (Dashboards, New, Import) and choose the Prometheus that
scrapes the front and the workers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

WIDTH = 24  # of Grafana's grid
HEIGHT = 8
CHOSEN = 'job=~"$job",instance=~"$instance"'

Query = tuple[str, str]  # expression and legend; # stands for the label filters
Panel = tuple[str, str, Sequence[Query]]  # title, unit, queries


def rate(metric: str, by: str = "", more: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum "
    return f"{grouped}(rate({metric}{{#{more}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{#}}[$__rate_interval])))"


def quantiles(metric: str, by: str = "") -> list[Query]:
    legend = f" {{{{{by}}}}}" if by else ""
    return [(quantile(share, metric, by), f"p{round(share * 100)}{legend}") for share in (0.5, 0.9, 0.99)]


def mean(metric: str, by: str) -> str:
    return f"{rate(metric + '_sum', by)} / {rate(metric + '_count', by)}"


def gauge(metric: str, by: str) -> str:
    return f"sum by ({by}) ({metric}{{#}})"


W = "slipstream_worker_"
R = "slipstream_router_"
ROWS: tuple[tuple[str, Sequence[Panel]], ...] = (
    (
        "Service",
        (
            ("Requests by outcome", "reqps", [(rate("slipstream_requests_total", "outcome"), "{{outcome}}")]),
            ("Requests under way by stage", "short", [(gauge(R + "requests", "stage"), "{{stage}}")]),
            (
                "Tokens",
                "short",
                [
                    (rate("slipstream_prompt_tokens_total"), "prompt"),
                    (rate("slipstream_cached_prompt_tokens_total"), "of it cached"),
                    (rate("slipstream_generated_tokens_total"), "generated"),
                ],
            ),
            ("Time to first token", "s", quantiles("slipstream_time_to_first_token_seconds")),
            ("Between tokens", "s", quantiles("slipstream_inter_token_latency_seconds")),
            ("Whole request", "s", quantiles("slipstream_request_duration_seconds")),
            ("Waiting for a place", "s", quantiles(R + "queue_wait_seconds")),
            ("HTTP responses", "reqps", [(rate("slipstream_http_responses_total", "status"), "{{status}}")]),
            (
                "Sizes",
                "short",
                [
                    (quantile(0.5, "slipstream_request_prompt_tokens"), "prompt, p50"),
                    (quantile(0.99, "slipstream_request_prompt_tokens"), "prompt, p99"),
                    (quantile(0.5, "slipstream_request_generated_tokens"), "answer, p50"),
                    (quantile(0.99, "slipstream_request_generated_tokens"), "answer, p99"),
                ],
            ),
        ),
    ),
    (
        "Troubles",
        (
            ("Requests that failed, by code", "reqps", [(rate(R + "failures_total", "code"), "{{code}}")]),
            ("Continued elsewhere, by cause", "reqps", [(rate(R + "resubmissions_total", "cause"), "{{cause}}")]),
            ("Workers by state", "short", [(gauge(R + "workers", "state"), "{{state}}")]),
            (
                "Handoffs that failed, by reason",
                "reqps",
                [(rate(W + "handoff_failures_total", "worker, reason"), "{{worker}} {{reason}}")],
            ),
            (
                "Copies that failed",
                "cps",
                [(rate(W + "copy_failures_total", "worker, transport"), "{{worker}} {{transport}}")],
            ),
            (
                "Engine faults",
                "cps",
                [
                    (rate(W + "failed_steps_total", "worker"), "{{worker}} steps"),
                    (rate(W + "failed_events_total", "worker"), "{{worker}} events"),
                    (rate(W + "retried_sequences_total", "worker"), "{{worker}} sequences again"),
                ],
            ),
            ("Roles borrowed", "reqps", [(rate(R + "borrowed_total", "role"), "{{role}}")]),
        ),
    ),
    (
        "Workers",
        (
            ("Requests by stage", "short", [(gauge(W + "requests", "worker, stage"), "{{worker}} {{stage}}")]),
            ("KV pool in use", "percentunit", [(gauge(W + "kv_usage_ratio", "worker"), "{{worker}}")]),
            ("KV pages", "short", [(gauge(W + "pages", "worker, state"), "{{worker}} {{state}}")]),
            ("Queue time, p99", "s", [(quantile(0.99, W + "queue_seconds", "worker"), "{{worker}}")]),
            ("Prefill time, p99", "s", [(quantile(0.99, W + "prefill_seconds", "worker"), "{{worker}}")]),
            ("Between tokens, p99", "s", [(quantile(0.99, W + "inter_token_seconds", "worker"), "{{worker}}")]),
            (
                "Tokens computed",
                "short",
                [(rate(W + "tokens_total", "worker, stage"), "{{worker}} {{stage}}")],
            ),
            ("Step time", "s", [(mean(W + "step_seconds", "worker"), "{{worker}}")]),
            ("Tokens a step", "short", [(mean(W + "step_tokens", "worker"), "{{worker}}")]),
            ("Preemptions", "cps", [(rate(W + "preemptions_total", "worker"), "{{worker}}")]),
            (
                "Prompt tokens found in the prefix cache",
                "percentunit",
                [
                    (
                        f"{rate(W + 'cached_prompt_tokens_total', 'worker')} / "
                        f"{rate(W + 'prompt_tokens_total', 'worker')}",
                        "{{worker}}",
                    )
                ],
            ),
            (
                "Requests that left",
                "reqps",
                [(rate(W + "requests_ended_total", "worker, outcome"), "{{worker}} {{outcome}}")],
            ),
        ),
    ),
    (
        "Handoff and transfer",
        (
            (
                "KV bytes sent",
                "Bps",
                [(rate(W + "transfer_bytes_total", "worker, transport"), "{{worker}} {{transport}}")],
            ),
            (
                "Rate of single copies",
                "Bps",
                [
                    (quantile(0.5, W + "copy_bytes_per_second", "transport"), "p50 {{transport}}"),
                    (quantile(0.05, W + "copy_bytes_per_second", "transport"), "p5 {{transport}}"),
                ],
            ),
            ("Copies: on the wire", "s", quantiles(W + "copy_wire_seconds", "transport")),
            ("Copies: queued before", "s", quantiles(W + "copy_queue_seconds", "transport")),
            ("First token to handed over", "s", quantiles(W + "handoff_seconds")),
            (
                "Offer to grant",
                "s",
                [*quantiles(W + "grant_seconds"), (quantile(0.99, W + "reserve_seconds"), "p99 at D")],
            ),
            ("Handoffs", "reqps", [(rate(W + "handoffs_total", "worker, side"), "{{worker}} {{side}}")]),
            ("Offers without room", "reqps", [(rate(W + "deferred_offers_total", "worker"), "{{worker}}")]),
            (
                "Measured routes",
                "Bps",
                [
                    (
                        gauge(R + "route_bytes_per_second", "source, destination, transport"),
                        "{{source}} > {{destination}} {{transport}}",
                    )
                ],
            ),
        ),
    ),
    (
        "Processes",
        (
            (
                "Versions",
                "short",
                [
                    (
                        "count by (component, version, python) (slipstream_build_info{#})",
                        "{{component}} {{version}}, Python {{python}}",
                    )
                ],
            ),
            ("Workers in use", "short", [(gauge(R + "worker_up", "worker, role"), "{{worker}}")]),
            ("Chunks merged for slow clients", "cps", [(rate("slipstream_merged_chunks_total"), "chunks")]),
        ),
    ),
)


def board() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}}
        )
        y += 1
        for at, panel in enumerate(row):
            place = {"h": HEIGHT, "w": WIDTH // 3, "x": WIDTH // 3 * (at % 3), "y": y + HEIGHT * (at // 3)}
            panels.append(_panel(panel, place))
        y += HEIGHT * -(-len(row) // 3)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "title": "slipstream",
        "uid": "slipstream",
        "description": "Prefill and decode on separate workers: service, workers, handoff, transfer.",
        "tags": ["llm", "slipstream"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    title, unit, queries = panel
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {"drawStyle": "line", "fillOpacity": 8, "lineWidth": 1, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": source,
                "expr": expression.replace("#", CHOSEN),
                "legendFormat": legend,
                "editorMode": "code",
                "range": True,
            }
            for at, (expression, legend) in enumerate(queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${datasource}"}

    def labels(name: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "type": "query",
            "datasource": source,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }

    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "refresh": 1},
        labels("job", "label_values(slipstream_build_info, job)"),
        labels("instance", 'label_values(slipstream_build_info{job=~"$job"}, instance)'),
    ]


if __name__ == "__main__":
    print(json.dumps(board(), indent=1))
