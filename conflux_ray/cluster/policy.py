"""The planner an instance runs, from its configuration."""

from __future__ import annotations

import logging

from conflux_ray.config import DTYPE_BYTES, ConfigError, ConfluxConfig, ModelGeometry
from conflux_ray.planning.fallback import MACHINES, fallback_profile
from conflux_ray.planning.interface import Policy
from conflux_ray.planning.plain import PlainPolicy
from conflux_ray.planning.profile import Profile, ProfileError
from conflux_ray.planning.scheduler import Scheduler, SchedulerParams
from conflux_ray.profiling.registry import find_profile, shipped_profile

logger = logging.getLogger(__name__)


def make_policy(config: ConfluxConfig, geometry: ModelGeometry, machine: str) -> Policy:
    """The policy named by `scheduler.policy`, on the latency profile that fits the deployment.

    Args:
        config: of the deployment.
        geometry: of its model.
        machine: `cpu`, or `gpu_slug` of the instance's GPUs.

    Raises:
        ConfigError: the profile is unreadable, or of another shape of instance.
    """
    scheduler, instance = config.scheduler, config.instance
    if scheduler.policy == "plain":
        return PlainPolicy(scheduler.max_prefill_tokens, instance.max_num_seqs)
    params = SchedulerParams(
        quantum=scheduler.quantum,
        eta=scheduler.kv_threshold,
        headroom=scheduler.kv_headroom_blocks,
        max_decodes=instance.max_num_seqs,
        max_prefill_tokens=scheduler.max_prefill_tokens,
        idle_tau=config.slo.tbt_s,
        deadline_margin=scheduler.deadline_margin_s,
        starvation_after=scheduler.starvation_after_s,
        starvation_quantum=scheduler.starvation_quantum,
    )
    return Scheduler(choose_profile(config, geometry, machine).latency, scheduler.policy, params)


def choose_profile(config: ConfluxConfig, geometry: ModelGeometry, machine: str) -> Profile:
    """The configured profile, else the shipped one of this model and instance, else a stated fallback.

    Raises:
        ConfigError: the configured profile cannot be used.
    """
    instance, name = config.instance, config.scheduler.profile
    if name is not None:
        try:
            profile = find_profile(name)
        except (OSError, ProfileError) as error:
            raise ConfigError(f"scheduler.profile={name!r}: {error}") from None
        latency = profile.latency
        if (latency.num_ranks, latency.num_layers) != (instance.sp_degree, geometry.num_layers):
            raise ConfigError(
                f"scheduler.profile={name!r}: it is of {latency.num_layers} layers on {latency.num_ranks} ranks, the "
                f"instance has {geometry.num_layers} on {instance.sp_degree}; make one with `conflux profile`"
            )
        return profile
    shipped = shipped_profile(config.model.path, machine, instance.sp_degree, instance.tensor_parallel)
    if shipped is not None:
        logger.info("latency profile: %s", shipped.stem)
        return Profile.load(shipped)
    logger.warning(
        "no latency profile of %s on %s with sp_degree=%d, tensor_parallel=%d: planning with stated figures, corrected "
        "while serving; make a profile with `conflux profile`",
        config.model.name,
        machine,
        instance.sp_degree,
        instance.tensor_parallel,
    )
    return fallback_profile(
        num_layers=geometry.num_layers,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_size,
        vocab_size=geometry.vocab_size,
        num_ranks=instance.sp_degree,
        base_tp=instance.tensor_parallel,
        dtype_bytes=DTYPE_BYTES[geometry.dtype],
        machine=machine if machine in MACHINES else "h100",
        model=config.model.name,
    )
