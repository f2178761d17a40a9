"""How many instances: Ray Serve's autoscaling on what instances say of themselves.

Serve counts requests that pass through its handles, and none does here. So each instance records its queued work and
its KV use (`Instance.record_autoscaling_stats`), and this policy turns them into a number of replicas. Serve applies
the configured delays and bounds to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

QUEUED_WORK = "queued_work_s"
KV_USED = "kv_used_fraction"


def replicas_for(
    queued_work: Mapping[Any, float], kv_used: Mapping[Any, float], target_s: float, target_kv: float
) -> int:
    """The fewest instances over which the present load stays within the targets.

    Args:
        queued_work: seconds of queued work of each instance.
        kv_used: share of its KV in use, 0..1.
        target_s: seconds of queued work that an instance may have.
        target_kv: share of its KV that may be in use.
    """
    by_work = math.ceil(sum(queued_work.values()) / target_s)
    by_memory = math.ceil(sum(kv_used.values()) / target_kv)
    return max(1, by_work, by_memory)


class QueuedWorkPolicy:
    """An autoscaling policy of Ray Serve.

    Args:
        target_queued_s, target_kv_used: see `replicas_for`.
    """

    def __init__(self, target_queued_s: float, target_kv_used: float) -> None:
        self._target_s = target_queued_s
        self._target_kv = target_kv_used

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas, and no state; as many as now while instances have not spoken."""
        metrics = context.aggregated_metrics or {}
        queued, kv = metrics.get(QUEUED_WORK) or {}, metrics.get(KV_USED) or {}
        if not queued:
            return context.target_num_replicas, {}
        return replicas_for(queued, kv, self._target_s, self._target_kv), {}
