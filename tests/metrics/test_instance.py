"""An instance's numbers from plans and results written out by hand."""

from __future__ import annotations

import pytest

from conflux_ray.execution.plan import Chunk, Decode, IterationPlan, Shard, Transfer, WorkerResult
from conflux_ray.metrics import definitions as m
from conflux_ray.metrics.bench import busy_engine
from conflux_ray.metrics.instance import InstanceMetrics, MeteredWorkers
from conflux_ray.planning.interface import Decision
from conflux_ray.wire import LoadReport

MIXED = IterationPlan(
    0,
    decodes=((Decode(1, 10), Decode(2, 20)), ()),
    chunks=(Chunk(3, b"", (Shard(0, 0, 30), Shard(1, 30, 100))), Chunk(4, b"", (Shard(1, 0, 8),))),
    transfers=(Transfer(7, 3, 0, 100, 1),),
)
DECODE = IterationPlan(1, decodes=((Decode(1, 11),), (Decode(3, 100),)))
REPORT = LoadReport(0.25, 1234.0, 5, 2, 0.5)


@pytest.fixture
def metrics() -> InstanceMetrics:
    return InstanceMetrics("tiny", "i", busy_engine(ranks=2, decodes=4), kv_token_bytes=1000)


def value(metrics: InstanceMetrics, metric: m.Metric, *labels: str) -> float:
    return metrics.store.value(metric, *labels).value


def result(worker: int, elapsed: float, acknowledged: list[int] | None = None) -> WorkerResult:
    return WorkerResult(0, worker, acknowledged=acknowledged or [], elapsed=elapsed)


def run(metrics: InstanceMetrics, plan: IterationPlan, elapsed: tuple[float, float], **decision: float) -> None:
    metrics._engine.last_decision = Decision(**decision)  # type: ignore[arg-type]
    metrics.issued(plan, 10.0)
    metrics.collected([result(0, elapsed[0]), result(1, elapsed[1])], 10.5)


def test_tokens_are_counted_where_they_are_computed(metrics: InstanceMetrics) -> None:
    run(metrics, MIXED, (0.02, 0.03))
    assert value(metrics, m.SCHEDULED_TOKENS, "decode", "0") == 2
    assert value(metrics, m.SCHEDULED_TOKENS, "decode", "1") == 0
    assert value(metrics, m.SCHEDULED_TOKENS, "prefill", "0") == 30
    assert value(metrics, m.SCHEDULED_TOKENS, "prefill", "1") == 78


def test_an_iteration_takes_as_long_as_its_slowest_rank(metrics: InstanceMetrics) -> None:
    run(metrics, MIXED, (0.02, 0.03))
    run(metrics, DECODE, (0.01, 0.005))
    assert metrics.store.distribution(m.ITERATION_SECONDS, "mixed").total == 0.03
    assert metrics.store.distribution(m.ITERATION_SECONDS, "decode").total == 0.01
    assert value(metrics, m.RANK_BUSY, "0") == pytest.approx(0.03)
    assert value(metrics, m.RANK_BUSY, "1") == pytest.approx(0.035)


def test_predictions_are_compared_with_what_was_measured(metrics: InstanceMetrics) -> None:
    run(metrics, MIXED, (0.02, 0.03), predicted=0.02, budget=256)
    run(metrics, DECODE, (0.01, 0.005), predicted=0.0)  # no prediction: says nothing
    assert value(metrics, m.PREDICTED) == 0.02
    assert value(metrics, m.MEASURED) == 0.03
    ratios = metrics.store.distribution(m.PREDICTION_RATIO)
    assert sum(ratios.counts) == 1
    assert ratios.total == pytest.approx(1.5)
    assert value(metrics, m.BUDGET) == 256
    assert value(metrics, m.BUDGET_USED) == 108


def test_a_transition_lasts_until_every_worker_has_acknowledged_it(metrics: InstanceMetrics) -> None:
    metrics.issued(MIXED, 10.0)
    metrics.collected([result(0, 0.1, [7]), result(1, 0.1)], 10.2)
    assert sum(metrics.store.distribution(m.TRANSITION_SECONDS).counts) == 0
    metrics.issued(DECODE, 10.2)
    metrics.collected([result(0, 0.1), result(1, 0.1, [7])], 10.7)
    assert metrics.store.distribution(m.TRANSITION_SECONDS).total == pytest.approx(0.7)
    assert value(metrics, m.TRANSITION_TOKENS) == 100
    assert value(metrics, m.TRANSITION_BYTES) == 100 * 1000 / 2  # half of it is on the decode rank already


def test_overlap_counts_in_mixed_iterations_only(metrics: InstanceMetrics) -> None:
    run(metrics, MIXED, (0.02, 0.03))
    run(metrics, DECODE, (0.02, 0.03))
    assert value(metrics, m.OVERLAPPED) == 1


def test_the_engines_state_is_read_once_a_second(metrics: InstanceMetrics) -> None:
    metrics.sample(REPORT, 5.0)
    assert value(metrics, m.INSTANCE_RUNNING) == 5
    assert value(metrics, m.RANK_DECODES, "0") == value(metrics, m.RANK_DECODES, "1") == 4
    assert value(metrics, m.RANK_CONTEXT, "0") >= 4 * 64
    assert 0 < value(metrics, m.KV_USED, "0") < 1
    held = value(metrics, m.KV_BLOCKS, "0", "decoding") + value(metrics, m.KV_BLOCKS, "0", "free")
    assert held == metrics._engine.kv.geometry.usable_blocks
    metrics.sample(LoadReport(0.25, 1234.0, 9, 2, 0.5), 5.9)
    assert value(metrics, m.INSTANCE_RUNNING) == 5
    metrics.sample(LoadReport(0.25, 1234.0, 9, 2, 0.5), 6.0)
    assert value(metrics, m.INSTANCE_RUNNING) == 9


def test_a_group_of_workers_is_counted_on_the_way() -> None:
    class Workers:
        def broadcast(self, plan: IterationPlan) -> None:
            assert plan.iteration == 0

        def ready(self) -> bool:
            return True

        def collect(self, timeout: float) -> list[WorkerResult]:
            return [result(0, 0.25)]

    metrics = InstanceMetrics("tiny", "i", busy_engine(ranks=1, decodes=2), 0)
    metered = MeteredWorkers(Workers(), metrics, lambda: 1.0)
    metered.broadcast(IterationPlan(0, decodes=((Decode(1, 10),),)))
    assert metered.ready()
    assert metered.collect(1.0)[0].elapsed == 0.25
    assert value(metrics, m.RANK_BUSY, "0") == 0.25
    assert value(metrics, m.TRANSITION_BYTES) == 0


def test_every_metric_of_an_instance_is_set_by_somebody(metrics: InstanceMetrics) -> None:
    run(metrics, MIXED, (0.02, 0.03), predicted=0.02)
    metrics.sample(REPORT, 5.0)
    found = {metric for metric, _, _ in metrics.store.values()} | {d for d, _, _ in metrics.store.distributions()}
    elsewhere = {m.INSTANCE_START, m.CORRECTION}  # at the start; of a policy with a latency model
    gpus = {metric for metric in m.all_metrics() if metric.labels == ("gpu",)}
    assert {metric for metric in m.all_metrics() if metric.where == "instance"} - found == elsewhere | gpus
