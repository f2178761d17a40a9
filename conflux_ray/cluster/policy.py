"""The planner an instance runs, from its configuration."""

from __future__ import annotations

from conflux_ray.config import ConfluxConfig
from conflux_ray.planning.interface import Policy
from conflux_ray.planning.plain import PlainPolicy


def make_policy(config: ConfluxConfig) -> Policy:
    """The policy named by `scheduler.policy`."""
    return PlainPolicy(config.scheduler.max_prefill_tokens, config.instance.max_num_seqs)
