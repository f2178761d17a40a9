"""`python -m conflux_ray.metrics.document`: write docs/metrics.md from the definitions."""

from __future__ import annotations

from pathlib import Path

from conflux_ray.metrics.definitions import LABEL_VALUES, RAY_PREFIX, Metric, all_metrics
from conflux_ray.metrics.store import MAX_SERIES

PATH = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

_HEAD = f"""# Metrics

Generated from [conflux_ray/metrics/definitions.py](../conflux_ray/metrics/definitions.py) by `python -m
conflux_ray.metrics.document`; do not edit.

## Where to scrape

**Ray's metrics agents**, one on every node, have all metrics of all processes. Ray puts `{RAY_PREFIX}` before each
name: `conflux_requests_total` is `{RAY_PREFIX}conflux_requests_total` there, and the dashboards and alerts of
`dashboards/` use those names. On one machine `prometheus --config.file dashboards/prometheus.yml` finds the agents
through the file that Ray keeps in `/tmp/ray`; on Kubernetes a PodMonitor on KubeRay's `metrics` port does. Values reach
an agent once in `metrics_report_interval_ms` of Ray, 10 s by default, and a process hands them over once a second.

**`/metrics` of the server** is of one ingress replica: its metrics by the names below, and vLLM's `vllm:*`. Behind the
load balancer each scrape reaches some replica. So every series has the label `replica`; each belongs to one process and
only grows, and no counter runs backwards. With one replica it is complete; with more, each scrape shows one of them, so
it is for looking, not for alerts. Do not add up the two ways: they are the same events.

Histograms pass through Ray's agent as the series they consist of (`_bucket`, `_sum`, `_count`), with gauge as their
declared type, since Ray's own histograms lose the sum. `rate` and `histogram_quantile` read them as ever. An agent
takes in new values one by one: a scrape in these milliseconds sees buckets of two moments, and a quantile over a short
window can jump for that one point. Alerts use no histogram.

## What counts as goodput

Token i of a request, from 1, is due at arrival + TTFT + (i - 1) x TBT, on the monotonic clock of the ingress. A request
is compliant when every token of every choice was on time. For each class

    goodput + misses = requests - invalid - aborted in time

where *aborted in time* are clients that left before anything was late. A client that leaves after a deadline has passed
is a miss: it would have been one, and impatience must not look like success.

## Labels

`model` (the served model's name) and `replica` (an ingress, or the first characters of an instance's id) are on every
series. All label values come from the deployment, never from a request: unknown model names, classes or paths make no
series. One process keeps at most {MAX_SERIES} label sets of a metric; what would come after is counted as `other`.

| Label | Values |
|---|---|
"""

_LABELS = {
    "slo_class": "`default` and the names in `slo.classes`",
    "rank": "logical ranks, from 0",
    "instance_id": "first characters of an instance's id; the same as its `replica`",
    "holder": "`free`, `prefilling`, `transition`, `decoding`, `draining`, `retained`",
    "gpu": "GPUs of the instance as Ray numbers them; with Ray's `NodeAddress`",
}

_TITLES = {"ingress": "Counted by an ingress", "instance": "Counted by an instance"}


def text() -> str:
    """The whole document."""
    values = _LABELS | {name: ", ".join(f"`{value}`" for value in known) for name, known in LABEL_VALUES.items()}
    metrics = list(all_metrics())
    used = {label for metric in metrics for label in metric.labels}
    parts = [_HEAD, *(f"| `{label}` | {values[label]} |\n" for label in sorted(used))]
    for where, title in _TITLES.items():
        parts.append(f"\n## {title}\n\n| Name | Type | Unit | Labels | |\n|---|---|---|---|---|\n")
        parts += [_line(metric) for metric in metrics if metric.where == where]
    histograms = [metric for metric in metrics if metric.buckets]
    parts.append(
        "\n## Buckets\n\nThe deployment's TTFT and TBT values are added to those of the promises, so that a bucket "
        "ends exactly there.\n\n| Histogram | Upper bounds |\n|---|---|\n"
    )
    parts += [f"| `{h.name}` | {', '.join(f'{bound:g}' for bound in h.buckets)} |\n" for h in histograms]
    return "".join(parts)


def _line(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind.value} | {metric.unit} | {labels} | {metric.help} |\n"


def main() -> None:
    """Write the document."""
    PATH.write_text(text())


if __name__ == "__main__":
    main()
