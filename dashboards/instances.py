"""*Instances and ranks*: what iterations cost, whether the prediction holds, how evenly ranks and KV are used."""

from conflux_ray.metrics import definitions as m
from dashboards.panels import Dashboard, Panel, Query, Row, by, quantile, rate, ratio, select

NO_GPU = "an instance on a node with an NVIDIA GPU"
RANK = "{{replica}} rank {{rank}}"


def _of(metric: m.Metric, *labels: str) -> str:
    return by(rate(metric), "replica", *labels)


def _gauge(metric: m.Metric, *labels: str, how: str = "max") -> str:
    return by(select(metric), "replica", *labels, how=how)


_PREDICTED_COUNT = by(rate(m.PREDICTION_RATIO, "_count"), "replica")
_ITERATIONS = by(rate(m.ITERATION_SECONDS, "_count"), "replica")
_MIXED = by(rate(m.ITERATION_SECONDS, "_count", iteration="mixed"), "replica")
_BUSY_MEAN = f"avg by (replica) ({_of(m.RANK_BUSY, 'rank')})"

INSTANCES = Dashboard(
    uid="conflux-instances",
    title="Conflux / Instances and ranks",
    description="Iterations against their prediction, the balance of ranks, KV, transitions, GPUs.",
    rows=(
        Row(
            "Iterations and planner",
            (
                Panel(
                    "Iteration time, predicted and measured",
                    "Mean time of iterations that had a prediction, as planned (dashed) and on the slowest worker.",
                    (
                        Query(ratio(_of(m.MEASURED), _PREDICTED_COUNT), "{{replica}} measured"),
                        Query(ratio(_of(m.PREDICTED), _PREDICTED_COUNT), "{{replica}} predicted", dashed=True),
                    ),
                    "s",
                ),
                Panel(
                    "Measured over predicted",
                    "1 is a perfect prediction. Above it promises are planned that cannot be kept; below it capacity "
                    "is left unused.",
                    (
                        Query(quantile(0.5, m.PREDICTION_RATIO, "replica"), "{{replica}} P50"),
                        Query(quantile(0.95, m.PREDICTION_RATIO, "replica"), "{{replica}} P95"),
                        Query(_gauge(m.CORRECTION, "phase"), "{{replica}} {{phase}} correction", dashed=True),
                    ),
                    "short",
                    thresholds=((1.5, "orange"),),
                ),
                Panel(
                    "Iteration time by kind",
                    "95th percentile: prefill only, decode only, both in one.",
                    (
                        Query(
                            f"{quantile(0.95, m.ITERATION_SECONDS, 'replica', 'iteration')} > 0",
                            "{{replica}} {{iteration}}",
                        ),
                    ),
                    "s",
                ),
                Panel(
                    "Iterations",
                    "Iterations per second by what they ran.",
                    (Query(by(rate(m.ITERATION_SECONDS, "_count"), "iteration"), "{{iteration}}"),),
                    "ops",
                    stacked=True,
                ),
                Panel(
                    "Use of the prefill budget",
                    "Prefill tokens scheduled over the TBT-safe budget B_0, in iterations that prefilled. Low: there "
                    "was little to prefill. At 1: decodes leave no more room.",
                    (Query(ratio(_of(m.BUDGET_USED), _of(m.BUDGET)), "{{replica}}"),),
                    "percentunit",
                ),
                Panel(
                    "Requests that will be late",
                    "Pending requests that the planner does not expect to meet their deadline, and iterations per "
                    "second planned beyond a resident decode's TBT.",
                    (
                        Query(_gauge(m.REJECTED), "{{replica}} given up"),
                        Query(_of(m.TBT_VIOLATIONS), "{{replica}} TBT broken, per s"),
                    ),
                    "short",
                ),
                Panel(
                    "Longest overdue request",
                    "How far the longest overdue pending request is past its deadline.",
                    (Query(_gauge(m.STARVATION_AGE), "{{replica}}"),),
                    "s",
                    thresholds=((30.0, "orange"), (60.0, "red")),
                ),
                Panel(
                    "Overlap",
                    "Share of iterations that mix prefill and decode, and of those the share in which decode attention "
                    "ran beside prefill attention.",
                    (
                        Query(ratio(_MIXED, _ITERATIONS), "{{replica}} mixed"),
                        Query(ratio(_of(m.OVERLAPPED), _MIXED), "{{replica}} of them overlapped"),
                    ),
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Queued work",
                    "Seconds of work before a new request, by the instance's own latency model.",
                    (Query(_gauge(m.INSTANCE_QUEUED_WORK), "{{replica}}"),),
                    "s",
                ),
            ),
        ),
        Row(
            "Balance of ranks",
            (
                Panel(
                    "Busy share",
                    "Share of time that a rank computes iterations.",
                    (Query(_of(m.RANK_BUSY, "rank"), RANK),),
                    "percentunit",
                ),
                Panel(
                    "Imbalance",
                    "Busiest rank over the mean of its instance; 1 is even. The other ranks wait for the busiest.",
                    (Query(ratio(f"max by (replica) ({_of(m.RANK_BUSY, 'rank')})", _BUSY_MEAN), "{{replica}}"),),
                    "short",
                    thresholds=((1.25, "orange"), (1.5, "red")),
                    least=1,
                ),
                Panel(
                    "Tokens computed",
                    "Prefill and decode tokens per second and rank.",
                    (Query(_of(m.SCHEDULED_TOKENS, "rank", "phase"), f"{RANK} {{{{phase}}}}"),),
                    "short",
                    stacked=True,
                ),
                Panel(
                    "Resident decodes",
                    "Requests that decode on a rank.",
                    (Query(_gauge(m.RANK_DECODES, "rank"), RANK),),
                    "short",
                    width=12,
                ),
                Panel(
                    "Decode context",
                    "Tokens attended by the resident decodes of a rank: what its decode attention reads.",
                    (Query(_gauge(m.RANK_CONTEXT, "rank"), RANK),),
                    "short",
                    width=12,
                ),
            ),
        ),
        Row(
            "KV and transitions",
            (
                Panel(
                    "KV in use",
                    "Share of a rank's KV blocks that are held.",
                    (Query(_gauge(m.KV_USED, "rank"), RANK),),
                    "percentunit",
                    thresholds=((0.8, "orange"), (0.95, "red")),
                    most=1,
                ),
                Panel(
                    "KV by holder",
                    "Blocks of all ranks by what holds them.",
                    (Query(by(select(m.KV_BLOCKS), "holder"), "{{holder}}"),),
                    "short",
                    stacked=True,
                ),
                Panel(
                    "Preemptions",
                    "Decodes that gave up their KV, decodes held back for it, tokens computed for nothing; per second.",
                    (
                        Query(_of(m.PREEMPTIONS), "{{replica}} preempted"),
                        Query(_of(m.PAUSES), "{{replica}} paused"),
                        Query(_of(m.DISCARDED_TOKENS), "{{replica}} tokens discarded"),
                    ),
                    "short",
                ),
                Panel(
                    "Transitions",
                    "Prefill-to-decode transitions per second.",
                    (Query(_of(m.TRANSITIONS), "{{replica}}"),),
                    "ops",
                ),
                Panel(
                    "Tokens a transition",
                    "Mean length of what moves.",
                    (Query(ratio(_of(m.TRANSITION_TOKENS), _of(m.TRANSITIONS)), "{{replica}}"),),
                    "short",
                ),
                Panel(
                    "KV moved",
                    "KV that crosses from one rank to another, per second; none with a single rank.",
                    (Query(_of(m.TRANSITION_BYTES), "{{replica}}"),),
                    "Bps",
                ),
                Panel(
                    "Transition time",
                    "From issuing the iteration that carries it to all workers' acknowledgement.",
                    (
                        Query(quantile(0.5, m.TRANSITION_SECONDS, "replica"), "{{replica}} P50"),
                        Query(quantile(0.95, m.TRANSITION_SECONDS, "replica"), "{{replica}} P95"),
                    ),
                    "s",
                    width=12,
                ),
                Panel(
                    "Transitions in flight",
                    "Transitions not acknowledged, and KV of ended requests that something may still touch.",
                    (
                        Query(_gauge(m.TRANSITIONS_OPEN), "{{replica}} transitions"),
                        Query(_gauge(m.KV_DRAINING), "{{replica}} draining"),
                    ),
                    "short",
                    width=12,
                ),
            ),
        ),
        Row(
            "GPUs",
            (
                Panel(
                    "GPU use",
                    "Share of time with a kernel running (NVML). No data without a GPU.",
                    (Query(_gauge(m.GPU_USE, "gpu"), "{{replica}} GPU {{gpu}}", empty_until=NO_GPU),),
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "GPU memory",
                    "Device memory in use, and what there is (dashed).",
                    (
                        Query(_gauge(m.GPU_MEMORY_USED, "gpu"), "{{replica}} GPU {{gpu}}", empty_until=NO_GPU),
                        Query(_gauge(m.GPU_MEMORY, "gpu"), "{{replica}} GPU {{gpu}} total", NO_GPU, dashed=True),
                    ),
                    "bytes",
                ),
                Panel(
                    "GPU power",
                    "Power drawn, and the limit in force (dashed).",
                    (
                        Query(_gauge(m.GPU_POWER, "gpu"), "{{replica}} GPU {{gpu}}", empty_until=NO_GPU),
                        Query(_gauge(m.GPU_POWER_LIMIT, "gpu"), "{{replica}} GPU {{gpu}} limit", NO_GPU, dashed=True),
                    ),
                    "watt",
                ),
            ),
        ),
    ),
)
