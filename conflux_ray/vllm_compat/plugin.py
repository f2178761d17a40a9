"""Entry point `vllm.platform_plugins`: the CPU platform, for a process that asks for it by an environment variable.

vLLM's CUDA wheel finds no platform on a machine without a GPU. Ingress and instance processes never need one, and
CPU workers do without; GPU workers must not see this plugin, so nothing but the variable switches it on.
"""

import os

PLATFORM_VARIABLE = "CONFLUX_VLLM_PLATFORM"
GRAPHS_VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
"""vLLM's: set it to 1 where `graphs` is to capture, before vLLM is imported."""


def activate() -> str | None:
    """The platform class's qualified name if this process asked for it, else None."""
    if os.environ.get(PLATFORM_VARIABLE) == "cpu":
        return "conflux_ray.vllm_compat.platform.ConfluxCpuPlatform"
    return None


def use_cpu_platform() -> None:
    """Make vLLM use the CPU platform in this process. Call before vLLM is imported."""
    os.environ[PLATFORM_VARIABLE] = "cpu"
