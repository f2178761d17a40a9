"""How many instances the load asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from conflux_ray.cluster.autoscaling import KV_USED, QUEUED_WORK, QueuedWorkPolicy, replicas_for


@pytest.mark.parametrize(
    ("queued", "kv", "expected"),
    [
        ([0.0], [0.0], 1),
        ([0.9], [0.1], 1),
        ([3.2], [0.1], 4),
        ([0.5, 0.4], [0.1, 0.1], 1),  # one instance could do both shares
        ([2.0, 2.0], [0.1, 0.1], 4),
        ([0.0, 0.0], [0.8, 0.8], 2),  # nothing is queued, and the decodes do not fit into one
        ([0.0, 0.0], [0.3, 0.4], 1),
    ],
)
def test_the_load_is_shared_out_within_the_targets(queued: list[float], kv: list[float], expected: int) -> None:
    assert replicas_for(dict(enumerate(queued)), dict(enumerate(kv)), target_s=1.0, target_kv=0.8) == expected


def context(metrics: dict | None, target: int = 3) -> SimpleNamespace:
    return SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)


def test_the_policy_reads_what_instances_record() -> None:
    policy = QueuedWorkPolicy(target_queued_s=2.0, target_kv_used=0.8)
    assert policy(context({QUEUED_WORK: {"a": 3.0, "b": 4.0}, KV_USED: {"a": 0.1, "b": 0.1}})) == (4, {})


@pytest.mark.parametrize("metrics", [None, {}, {QUEUED_WORK: {}}])
def test_while_instances_have_not_spoken_nothing_changes(metrics: dict | None) -> None:
    assert QueuedWorkPolicy(1.0, 0.8)(context(metrics)) == (3, {})
