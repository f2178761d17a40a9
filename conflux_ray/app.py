"""The Ray Serve application that a deployment YAML imports: `import_path: conflux_ray.app:build`."""

from __future__ import annotations

from typing import Any

from ray import serve

from conflux_ray.cluster.instance import Instance, instance_bundles
from conflux_ray.cluster.registry import OpenDirectory
from conflux_ray.config import ConfigError, ConfluxConfig, check_model, parse, read_model_config, resolve_model
from conflux_ray.serving.ingress import build_ingress
from conflux_ray.serving.options import IngressOptions
from conflux_ray.wire import Slo


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application from the YAML's `args`, checked as `config.ConfluxConfig`.

    Raises:
        ConfigError: naming every wrong field; nothing has been started by then.
    """
    config = parse(args)
    folder = resolve_model(config.model.path)
    geometry = check_model(config, read_model_config(folder))
    device = pick_device(config)
    instances = serve.deployment(
        name="instance",
        num_replicas=config.instance.num_replicas,
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
        slo_classes={"default": Slo(config.slo.ttft_s, config.slo.tbt_s)},
        max_in_flight=config.limits.max_requests_per_ingress,
        max_body_bytes=config.limits.max_body_bytes,
        no_instance_timeout=config.limits.no_instance_timeout_s,
    )
    return build_ingress(
        options,
        OpenDirectory(config.model.name, instances),
        num_replicas=config.ingress.num_replicas,
        ray_actor_options={"num_cpus": 0.1 if device == "cpu" else 1},
        graceful_shutdown_timeout_s=config.instance.drain_timeout_s + 30,
    )


def pick_device(config: ConfluxConfig) -> str:
    """The device that `instance.device` names; `auto` is the CPU until the server runs on GPUs.

    Raises:
        ConfigError: `cuda` is asked for.
    """
    if config.instance.device == "cuda":
        raise ConfigError(
            "instance.device='cuda': the workers run on GPUs, the server does not start them there yet; use cpu"
        )
    return "cpu"
