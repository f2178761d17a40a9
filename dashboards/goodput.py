"""*Goodput*: whether promises are kept, by how much, and what breaks them."""

from conflux_ray.metrics import definitions as m
from dashboards.panels import Dashboard, Panel, Query, Row, by, quantile, rate, ratio, select

KEPT = by(rate(m.GOODPUT), "slo_class")
BROKEN = by(rate(m.SLO_MISSES), "slo_class")
PROMISED = f"({KEPT} + {BROKEN})"


def _over_range(metric: m.Metric) -> str:
    return by(f"increase({select(metric)}[$__range])", "slo_class")


def _burn(window: str, **matchers: str) -> str:
    return f'conflux:slo_burn_rate:rate{window}{{ray_io_cluster=~"$cluster", model=~"$model", slo_class=~"$slo_class"}}'


def _target(target: str) -> Query:
    expression = by(select(m.SLO_TARGET, target=target), "slo_class", how="max")
    return Query(expression, "{{slo_class}} promised", dashed=True)


def _latency(title: str, metric: m.Metric, what: str, target: str | None) -> Panel:
    lines = [Query(quantile(q, metric, "slo_class"), f"{{{{slo_class}}}} P{q * 100:.0f}") for q in (0.5, 0.95, 0.99)]
    if target is not None:
        lines.append(_target(target))
    return Panel(title, what, lines, "s")


_ATTAINMENT_THRESHOLDS = ((0.95, "orange"), (0.99, "green"))

GOODPUT = Dashboard(
    uid="conflux-goodput",
    title="Conflux / Goodput",
    description="Are the promises kept? Goodput, attainment, error budget, and why requests missed.",
    variables=(("slo_class", m.SLO_OBJECTIVE),),
    rows=(
        Row(
            "Promises",
            (
                Panel(
                    "Attainment",
                    "Share of promised requests whose every token met its own deadline, over the time shown. Wrong "
                    "requests (4xx) and clients that left in time are not counted.",
                    (
                        Query(
                            ratio(_over_range(m.GOODPUT), f"({_over_range(m.GOODPUT)} + {_over_range(m.SLO_MISSES)})"),
                            "{{slo_class}}",
                        ),
                    ),
                    "percentunit",
                    kind="stat",
                    width=6,
                    base="red",
                    thresholds=_ATTAINMENT_THRESHOLDS,
                ),
                Panel(
                    "Error budget left",
                    "Of the misses that the objective allows over the time shown, the share not used up; below 0 the "
                    "objective was missed.",
                    (
                        Query(
                            "1 - "
                            + ratio(
                                _over_range(m.SLO_MISSES), f"({_over_range(m.GOODPUT)} + {_over_range(m.SLO_MISSES)})"
                            )
                            + f" / (1 - {by(select(m.SLO_OBJECTIVE), 'slo_class', how='max')})",
                            "{{slo_class}}",
                        ),
                    ),
                    "percentunit",
                    kind="stat",
                    width=6,
                    base="red",
                    thresholds=((0.0, "orange"), (0.25, "green")),
                    least=None,
                ),
                Panel(
                    "Goodput now",
                    "Requests per second that kept their promises.",
                    (Query(KEPT, "{{slo_class}}"),),
                    "reqps",
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Burn rate now",
                    "How many times faster than the objective allows the error budget is used, last five minutes. "
                    "Alerts: 14.4 over an hour, 6 over six hours.",
                    (Query(_burn("5m"), "{{slo_class}}"),),
                    "short",
                    kind="stat",
                    width=6,
                    thresholds=((1.0, "orange"), (6.0, "red")),
                ),
                Panel(
                    "Attainment against target",
                    "Share of promised requests that kept their promise, and the deployment's objective (dashed).",
                    (
                        Query(ratio(KEPT, PROMISED), "{{slo_class}}"),
                        Query(
                            by(select(m.SLO_OBJECTIVE), "slo_class", how="max"), "{{slo_class}} objective", dashed=True
                        ),
                    ),
                    "percentunit",
                    width=12,
                    most=1,
                ),
                Panel(
                    "Goodput",
                    "Requests per second that kept their promises, beside all that ended in any way.",
                    (
                        Query(KEPT, "{{slo_class}} goodput"),
                        Query(by(rate(m.REQUESTS), "slo_class"), "{{slo_class}} all requests", dashed=True),
                    ),
                    "reqps",
                    width=12,
                ),
                Panel(
                    "Burn rate",
                    "Speed at which the error budget is used, over three windows; 1 uses it up exactly at the end of "
                    "the objective's period. The lines are where alerts begin.",
                    tuple(Query(_burn(window), f"{{{{slo_class}}}} {window}") for window in ("5m", "1h", "6h")),
                    "short",
                    thresholds=((1.0, "yellow"), (6.0, "orange"), (14.4, "red")),
                ),
                Panel(
                    "Why requests missed",
                    "The first thing that went wrong with each: the first token late (ttft), a later one (tbt), or the "
                    "server did not serve it.",
                    (Query(by(rate(m.SLO_MISSES), "kind"), "{{kind}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "How requests ended",
                    "All requests of clients by outcome; `aborted` are clients that left.",
                    (Query(by(rate(m.REQUESTS), "outcome"), "{{outcome}}"),),
                    "reqps",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Delays",
            (
                _latency("Time to first token", m.TTFT, "From arrival at the ingress to the first token.", "ttft"),
                _latency(
                    "Time between tokens",
                    m.TBT,
                    "Gaps between tokens of a request. A gap above the promise is no miss if the token was in time.",
                    "tbt",
                ),
                _latency("End to end", m.E2E, "From arrival to the end of the answer, completed requests.", None),
                Panel(
                    "Tokens",
                    "Prompt tokens submitted and output tokens handed to clients.",
                    (
                        Query(by(rate(m.PROMPT_TOKENS)), "prompt"),
                        Query(by(rate(m.OUTPUT_TOKENS)), "output"),
                    ),
                    "short",
                    width=12,
                ),
                Panel(
                    "Tokens a request",
                    "Mean length of prompts and outputs.",
                    (
                        Query(ratio(by(rate(m.PROMPT_TOKENS)), by(rate(m.TTFT, "_count"))), "prompt"),
                        Query(ratio(by(rate(m.OUTPUT_TOKENS)), by(rate(m.TTFT, "_count"))), "output"),
                    ),
                    "short",
                    width=12,
                ),
            ),
        ),
    ),
)
