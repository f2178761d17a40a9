"""The planner of a configuration."""

from __future__ import annotations

from conflux_ray.cluster.policy import make_policy
from conflux_ray.config import ModelGeometry, parse
from conflux_ray.planning.scheduler import Scheduler, SchedulerParams

GEOMETRY = ModelGeometry(32, 32, 8, 128, 4096, 14336, 128256, 131072, "bfloat16")


def test_every_key_of_the_configuration_arrives_at_the_planner() -> None:
    config = parse(
        {
            "model": {"path": "somewhere"},
            "slo": {"tbt_s": 0.04},
            "instance": {"sp_degree": 2, "max_num_seqs": 33},
            "scheduler": {
                "policy": "fcfs",
                "max_prefill_tokens": 777,
                "quantum": 8,
                "kv_threshold": 0.7,
                "kv_headroom_blocks": 5,
                "deadline_margin_s": 0.02,
                "starvation_after_s": 9.0,
                "starvation_quantum": 99,
            },
        }
    )
    policy = make_policy(config, GEOMETRY, "h200")
    assert isinstance(policy, Scheduler)
    assert policy.params == SchedulerParams(
        quantum=8,
        eta=0.7,
        headroom=5,
        max_decodes=33,
        max_prefill_tokens=777,
        idle_tau=0.04,
        deadline_margin=0.02,
        starvation_after=9.0,
        starvation_quantum=99,
    )
