"""A CPU platform for vLLM's CUDA wheel: plain torch operations, gloo, no compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch
from vllm.platforms.interface import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ConfluxCpuPlatform(Platform):
    """Out-of-tree, so that vLLM's custom operators take their plain torch path instead of the CPU wheel's kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "CPU_VISIBLE_MEMORY_NODES"
    # Inductor would take half a minute to compile a few one-line helpers.
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def import_kernels(cls) -> None:
        """The wheel's kernels are CUDA's: none to import."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """The wheel's kernels are CUDA's: none to import."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        return "conflux_ray.vllm_compat.backend.XPAttentionBackend"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cpu.set_device(device)

    @classmethod
    def inference_mode(cls):
        return torch.inference_mode()

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        cache = vllm_config.cache_config
        if not cache.user_specified_block_size:
            cache.block_size = 16

    @classmethod
    def opaque_attention_op(cls) -> bool:
        # The model runs eagerly, so attention is called directly.
        return False

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
