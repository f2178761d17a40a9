"""The Ray Serve application that a deployment YAML imports: `import_path: conflux_ray.app:build`."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingPolicy

from conflux_ray.cluster.autoscaling import QueuedWorkPolicy
from conflux_ray.cluster.instance import Instance, instance_bundles
from conflux_ray.cluster.registry import OpenDirectory
from conflux_ray.config import (
    ConfluxConfig,
    InstanceConfig,
    SloConfig,
    check_model,
    parse,
    read_model_config,
    resolve_model,
)
from conflux_ray.serving.ingress import build_ingress
from conflux_ray.serving.options import IngressOptions
from conflux_ray.wire import Slo

LOOK_BACK_SECONDS = 15.0
"""Over how long Ray Serve averages what instances record for autoscaling."""


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application from the YAML's `args`, checked as `config.ConfluxConfig`.

    Raises:
        ConfigError: naming every wrong field; nothing has been started by then.
    """
    config = parse(args)
    folder = resolve_model(config.model.path)
    config = on_device(config)
    geometry = check_model(config, read_model_config(folder))
    device = config.instance.device
    instances = serve.deployment(
        name="instance",
        **_replicas(config.instance),
        max_ongoing_requests=16,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=config.instance.drain_timeout_s + 30,
        placement_group_bundles=instance_bundles(config, device),
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": instance_bundles(config, device)[0]["CPU"]},
    )(Instance).bind(config.model_dump())
    options = IngressOptions(
        model_path=folder,
        served_model_name=config.model.name,
        max_model_len=geometry.max_model_len,
        trust_remote_code=config.model.trust_remote_code,
        slo_classes=slo_classes(config.slo),
        slo_objective=config.slo.objective,
        max_in_flight=config.limits.max_requests_per_ingress,
        max_body_bytes=config.limits.max_body_bytes,
        no_instance_timeout=config.limits.no_instance_timeout_s,
        api_keys=config.ingress.api_keys(),
        routing=config.ingress.routing,
    )
    return build_ingress(
        options,
        OpenDirectory(config.model.name, instances),
        num_replicas=config.ingress.num_replicas,
        ray_actor_options={"num_cpus": 0.1 if device == "cpu" else 1},
        graceful_shutdown_timeout_s=config.instance.drain_timeout_s + 30,
    )


def slo_classes(slo: SloConfig) -> dict[str, Slo]:
    """The deployment's promises by class."""
    named = {name: Slo(one.ttft_s, one.tbt_s, name) for name, one in slo.classes.items()}
    return {"default": Slo(slo.ttft_s, slo.tbt_s), **named}


def _replicas(instance: InstanceConfig) -> dict[str, Any]:
    """Options of the instances' deployment that say how many there are."""
    scaling = instance.autoscaling
    if scaling is None:
        return {"num_replicas": instance.num_replicas}
    policy = AutoscalingPolicy(
        policy_function=QueuedWorkPolicy,
        policy_kwargs={"target_queued_s": scaling.target_queued_s, "target_kv_used": scaling.target_kv_used},
    )
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "initial_replicas": min(max(instance.num_replicas, scaling.min_replicas), scaling.max_replicas),
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
            "look_back_period_s": LOOK_BACK_SECONDS,
            "policy": policy,
        }
    }


def on_device(config: ConfluxConfig) -> ConfluxConfig:
    """`config` with the device `auto` decided: GPUs where the cluster has them, else the CPU."""
    if config.instance.device != "auto":
        return config
    gpus = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0
    device = "cuda" if gpus else "cpu"
    return config.model_copy(update={"instance": config.instance.model_copy(update={"device": device})})
