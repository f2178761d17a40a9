"""Every metric of the server, once: name, kind, unit, labels, help. `docs/metrics.md` is generated from this file.

Label sets are bounded: each label takes its values from the deployment (SLO classes, ranks, GPUs, processes) or from
the tuples below, never from a request. `model` and `replica` are on every series: the served model, and the process
that counted.

Plain Python without dependencies: definitions can be read anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

COMMON_LABELS = ("model", "replica")
"""On every series: the served model's name, and the ingress or instance process that counted."""

RAY_PREFIX = "ray_"
"""What Ray's metrics agent puts before every name; dashboards and alerts use the names with it."""


class Kind(Enum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: without Ray's prefix; units are the base units of Prometheus (seconds, bytes, ratios 0..1).
        kind: its type.
        unit: in words, for the documentation.
        help: what it counts.
        where: who exports it, "ingress" or "instance".
        labels: beside `COMMON_LABELS`.
        buckets: upper bounds of a histogram; a deployment's SLO values are added to those that measure a promise.

    Raises:
        ValueError: the name does not say its kind, or buckets and kind disagree.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    where: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.startswith("conflux_"):
            raise ValueError(f"name={self.name!r} must start with conflux_")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"name={self.name!r}: counters, and only they, end in _total")
        if (self.kind is Kind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"name={self.name!r}: buckets={self.buckets} and kind={self.kind.value} disagree")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"name={self.name!r}: buckets={self.buckets} must ascend")

    @property
    def ray_name(self) -> str:
        """As Ray's metrics agent exports it."""
        return RAY_PREFIX + self.name


OUTCOMES = ("completed", "failed", "overloaded", "unavailable", "invalid", "aborted")
"""How a request of a client ends: with its last token; with an error; with 429; with 503; with another 4xx; with the
client leaving."""

MISSES = ("ttft", "tbt", "failed", "overloaded", "unavailable")
"""Why a request does not count as goodput: the first thing that went wrong."""

MIGRATIONS = ("instance_lost", "refused", "token_gap")
"""Why a request is tried again: its instance's session ended; the instance did not take it; output was missing."""

ITERATIONS = ("prefill", "decode", "mixed", "transfer")
"""What an iteration runs; `transfer` waits for KV transfers only."""

LABEL_VALUES: dict[str, tuple[str, ...]] = {
    "outcome": OUTCOMES,
    "kind": MISSES,
    "target": ("ttft", "tbt"),
    "reason": MIGRATIONS,
    "iteration": ITERATIONS,
    "phase": ("prefill", "decode"),
}
"""Labels with a fixed set of values: their series exist from the start, at zero, so that the first event counts."""

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_LONG = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)


def _ingress(name: str, kind: Kind, unit: str, help: str, *labels: str, buckets: tuple[float, ...] = ()) -> Metric:  # noqa: A002
    return Metric(f"conflux_{name}", kind, unit, help, "ingress", labels, buckets)


def _instance(name: str, kind: Kind, unit: str, help: str, *labels: str, buckets: tuple[float, ...] = ()) -> Metric:  # noqa: A002
    return Metric(f"conflux_{name}", kind, unit, help, "instance", labels, buckets)


# Requests and their promises

REQUESTS = _ingress(
    "requests_total", Kind.COUNTER, "requests", "Requests of clients that have ended, by how.", "slo_class", "outcome"
)
GOODPUT = _ingress(
    "goodput_requests_total",
    Kind.COUNTER,
    "requests",
    "Requests whose every token met its own deadline: arrival + TTFT + (i - 1) x TBT for token i.",
    "slo_class",
)
SLO_MISSES = _ingress(
    "slo_misses_total",
    Kind.COUNTER,
    "requests",
    "Requests that were promised something and did not get it, by what went wrong first: the first token was late, a "
    "later token was, or the server did not serve it. A client that leaves counts here if its request was late.",
    "slo_class",
    "kind",
)
SLO_TARGET = _ingress("slo_target_seconds", Kind.GAUGE, "seconds", "The deployment's promises.", "slo_class", "target")
SLO_OBJECTIVE = _ingress(
    "slo_objective_ratio",
    Kind.GAUGE,
    "ratio",
    "Share of requests that should meet their promises; the rest is the error budget.",
    "slo_class",
)
TTFT = _ingress(
    "ttft_seconds", Kind.HISTOGRAM, "seconds", "Arrival of the request to its first token.", "slo_class", buckets=_LONG
)
TBT = _ingress(
    "tbt_seconds", Kind.HISTOGRAM, "seconds", "Time between two tokens of a request.", "slo_class", buckets=_SHORT
)
E2E = _ingress(
    "e2e_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Arrival of the request to the end of its answer, completed requests.",
    "slo_class",
    buckets=_LONG,
)
PROMPT_TOKENS = _ingress("prompt_tokens_total", Kind.COUNTER, "tokens", "Prompt tokens submitted.", "slo_class")
OUTPUT_TOKENS = _ingress("output_tokens_total", Kind.COUNTER, "tokens", "Tokens handed to clients.", "slo_class")

# Ingress and router

INGRESS_IN_FLIGHT = _ingress(
    "ingress_in_flight_requests", Kind.GAUGE, "requests", "HTTP requests to the model that have not ended."
)
INGRESS_WAITING = _ingress(
    "ingress_waiting_requests", Kind.GAUGE, "requests", "Requests that wait because no instance can take them."
)
ROUTER_READY = _ingress("router_ready_instances", Kind.GAUGE, "instances", "Instances that take requests.")
ROUTER_DRAINING = _ingress(
    "router_draining_instances", Kind.GAUGE, "instances", "Instances that end their requests and take no new ones."
)
ROUTER_QUEUED_WORK = _ingress(
    "router_queued_work_seconds",
    Kind.GAUGE,
    "seconds",
    "Queued work of an instance as the router sees it: its report, and what was dispatched since.",
    "instance_id",
)
ROUTER_REQUESTS = _ingress(
    "router_in_flight_requests",
    Kind.GAUGE,
    "requests",
    "Requests that this ingress has on an instance.",
    "instance_id",
)
ROUTER_REPORT_AGE = _ingress(
    "router_report_age_seconds", Kind.GAUGE, "seconds", "Age of an instance's latest load report.", "instance_id"
)
ROUTER_DISPATCHES = _ingress(
    "router_dispatches_total", Kind.COUNTER, "requests", "Requests sent to an instance, migrations included."
)
ROUTER_SESSIONS_OPENED = _ingress(
    "router_sessions_opened_total", Kind.COUNTER, "sessions", "Sessions with instances that were opened."
)
ROUTER_SESSIONS_ENDED = _ingress(
    "router_sessions_ended_total",
    Kind.COUNTER,
    "sessions",
    "Sessions that ended: the instance left, was lost or was restarted.",
)
MIGRATED = _ingress(
    "migrations_total", Kind.COUNTER, "requests", "Requests tried again on another instance, by why.", "reason"
)
STALE_OUTPUTS = _ingress(
    "stale_outputs_total", Kind.COUNTER, "outputs", "Outputs dropped: of an attempt that is over, or a repeated token."
)

# Instance

INSTANCE_RUNNING = _instance("instance_running_requests", Kind.GAUGE, "requests", "Requests that hold KV.")
INSTANCE_WAITING = _instance("instance_waiting_requests", Kind.GAUGE, "requests", "Requests that hold no KV yet.")
INSTANCE_QUEUED_WORK = _instance(
    "instance_queued_work_seconds", Kind.GAUGE, "seconds", "Queued work by the instance's own latency model."
)
INSTANCE_CAPACITY = _instance(
    "instance_capacity_tokens_per_second", Kind.GAUGE, "tokens/s", "Prompt tokens it can prefill beside its decodes."
)
INSTANCE_DRAINING = _instance("instance_draining", Kind.GAUGE, "0 or 1", "Whether it takes no new requests.")
INSTANCE_START = _instance(
    "instance_start_seconds", Kind.GAUGE, "seconds", "From the start of the process until it served."
)
FINISHED = _instance("engine_finished_requests_total", Kind.COUNTER, "requests", "Requests that ran to their end.")
ABORTED = _instance("engine_aborted_requests_total", Kind.COUNTER, "requests", "Requests dropped before their end.")
PREEMPTIONS = _instance(
    "preemptions_total", Kind.COUNTER, "preemptions", "Decodes that gave up their KV for want of blocks."
)
PAUSES = _instance("pauses_total", Kind.COUNTER, "pauses", "Decodes held back so that they can be preempted.")
DISCARDED_TOKENS = _instance(
    "discarded_tokens_total", Kind.COUNTER, "tokens", "Tokens computed for requests that had ended."
)

# Iterations and ranks

ITERATION_SECONDS = _instance(
    "iteration_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Measured time of an iteration on its slowest worker.",
    "iteration",
    buckets=_SHORT,
)
OVERLAPPED = _instance(
    "overlapped_iterations_total",
    Kind.COUNTER,
    "iterations",
    "Mixed iterations whose decode attention ran beside prefill attention.",
)
SCHEDULED_TOKENS = _instance(
    "scheduled_tokens_total", Kind.COUNTER, "tokens", "Tokens computed, by phase and logical rank.", "phase", "rank"
)
RANK_BUSY = _instance(
    "rank_busy_seconds_total",
    Kind.COUNTER,
    "seconds",
    "Measured time of all iterations on a logical rank (its slowest worker).",
    "rank",
)
RANK_DECODES = _instance("rank_decodes", Kind.GAUGE, "requests", "Resident decodes of a logical rank.", "rank")
RANK_CONTEXT = _instance(
    "rank_context_tokens", Kind.GAUGE, "tokens", "Context of the resident decodes of a logical rank.", "rank"
)

# KV and transitions

KV_USED = _instance("kv_used_ratio", Kind.GAUGE, "ratio", "Share of a logical rank's KV blocks in use.", "rank")
KV_BLOCKS = _instance(
    "kv_blocks", Kind.GAUGE, "blocks", "KV blocks of a logical rank by what holds them.", "rank", "holder"
)
KV_DRAINING = _instance(
    "kv_draining_allocations",
    Kind.GAUGE,
    "allocations",
    "KV of ended requests that something in flight may still touch.",
)
TRANSITIONS = _instance(
    "transitions_total", Kind.COUNTER, "transitions", "Prefill-to-decode transitions that were started."
)
TRANSITION_TOKENS = _instance(
    "transition_tokens_total", Kind.COUNTER, "tokens", "Tokens whose KV moved to its decode rank."
)
TRANSITION_BYTES = _instance(
    "transition_bytes_total", Kind.COUNTER, "bytes", "KV that crossed from one logical rank to another."
)
TRANSITION_SECONDS = _instance(
    "transition_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From issuing the iteration with a transition to its acknowledgement by all workers.",
    buckets=_SHORT,
)
TRANSITIONS_OPEN = _instance(
    "transitions_in_flight", Kind.GAUGE, "transitions", "Transitions not acknowledged by all workers."
)

# Planner

PREDICTED = _instance(
    "planner_predicted_seconds_total", Kind.COUNTER, "seconds", "Predicted time of iterations that had a prediction."
)
MEASURED = _instance("planner_measured_seconds_total", Kind.COUNTER, "seconds", "Measured time of the same iterations.")
PREDICTION_RATIO = _instance(
    "planner_measured_to_predicted_ratio",
    Kind.HISTOGRAM,
    "ratio",
    "Measured over predicted time of an iteration; 1 is a perfect prediction.",
    buckets=_RATIOS,
)
CORRECTION = _instance(
    "planner_correction_ratio",
    Kind.GAUGE,
    "ratio",
    "Factor on the latency model that was learnt while serving, for iterations with prefill and for decodes alone.",
    "phase",
)
BUDGET = _instance(
    "planner_budget_tokens_total",
    Kind.COUNTER,
    "tokens",
    "TBT-safe prefill budget B_0 of the iterations that prefilled.",
)
BUDGET_USED = _instance(
    "planner_budget_used_tokens_total", Kind.COUNTER, "tokens", "Prefill tokens scheduled in the same iterations."
)
REJECTED = _instance(
    "planner_rejected_requests",
    Kind.GAUGE,
    "requests",
    "Pending requests that the latest step did not expect to meet their deadline.",
)
TBT_VIOLATIONS = _instance(
    "planner_tbt_violations_total",
    Kind.COUNTER,
    "iterations",
    "Iterations planned although they were predicted to miss a resident decode's TBT.",
)
STARVATION_AGE = _instance(
    "planner_starvation_age_seconds",
    Kind.GAUGE,
    "seconds",
    "How long the longest overdue pending request is past its deadline; 0 if none is.",
)

# GPUs, through NVML; absent without a GPU

GPU_USE = _instance("gpu_utilization_ratio", Kind.GAUGE, "ratio", "Share of time with a kernel running.", "gpu")
GPU_MEMORY_USED = _instance("gpu_memory_used_bytes", Kind.GAUGE, "bytes", "Device memory in use.", "gpu")
GPU_MEMORY = _instance("gpu_memory_total_bytes", Kind.GAUGE, "bytes", "Device memory.", "gpu")
GPU_POWER = _instance("gpu_power_watts", Kind.GAUGE, "watts", "Power drawn.", "gpu")
GPU_POWER_LIMIT = _instance("gpu_power_limit_watts", Kind.GAUGE, "watts", "Power limit in force.", "gpu")


def all_metrics() -> Iterator[Metric]:
    """Every metric, in the order of this file."""
    for value in globals().values():
        if isinstance(value, Metric):
            yield value
