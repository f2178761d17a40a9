"""vLLM's attention layer calls in here; the iteration's context decides what happens.

The runner puts one `Attend` callable per iteration into vLLM's forward context. Keys and values are written by it, so
vLLM's own KV-cache update is off.
"""

from __future__ import annotations

from typing import Protocol

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


class Attend(Protocol):
    """Attention of one layer of the running iteration."""

    def __call__(
        self, layer_name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Write the attention output of (tokens, heads, D) tensors into `output`."""
        ...


class XPAttentionImpl(AttentionImpl):
    """Hands a layer's Q, K and V to the iteration's `Attend`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra,
    ) -> None:
        unsupported = {
            "ALiBi": alibi_slopes is not None,
            "sliding window": sliding_window is not None,
            f"KV cache dtype {kv_cache_dtype}": kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            "attention logit soft cap": logits_soft_cap is not None,
            f"attention type {attn_type}": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            "attention sinks": extra.get("sinks") is not None,
        }
        found = [name for name, present in unsupported.items() if present]
        if found:
            raise ValueError(f"the model needs {', '.join(found)}, which conflux-ray does not support")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        if attn_metadata is None:  # a pass without requests, to size memory or warm up
            return output.zero_()
        attn_metadata(layer.layer_name, query, key, value, output)
        return output


@register_backend(AttentionBackendEnum.CUSTOM)
class XPAttentionBackend(AttentionBackend):
    """Conflux Parallelism as a vLLM attention backend."""

    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  vLLM declares it so

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[XPAttentionImpl]:
        return XPAttentionImpl

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError("the runner builds attention indices itself")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)
