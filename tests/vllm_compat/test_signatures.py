"""What this project relies on in vLLM is still there and still takes what it is given."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

pytestmark = pytest.mark.heavy


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_platform_is_ours() -> None:
    from vllm.platforms import current_platform

    assert type(current_platform).__name__ == "ConfluxCpuPlatform"
    assert current_platform.device_type == "cpu"
    assert current_platform.dist_backend == "gloo"


def test_loading_and_groups() -> None:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model

    assert parameters(init_distributed_environment)[:5] == [
        "world_size",
        "rank",
        "distributed_init_method",
        "local_rank",
        "backend",
    ]
    assert parameters(ensure_model_parallel_initialized)[:2] == [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    ]
    assert "vllm_config" in parameters(get_model)
    assert {"attn_metadata", "vllm_config", "num_tokens", "cudagraph_runtime_mode"} <= set(
        parameters(set_forward_context)
    )
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"attention_backend", "distributed_executor_backend", "block_size", "enforce_eager"} <= fields


def test_the_attention_layer_builds_its_implementation_as_ours_expects() -> None:
    from vllm.model_executor.layers.attention.attention import Attention, unified_attention_with_output

    from conflux_ray.vllm_compat.backend import XPAttentionBackend, XPAttentionImpl

    assert parameters(Attention.__init__)[1:5] == ["num_heads", "head_size", "scale", "num_kv_heads"]
    assert parameters(unified_attention_with_output)[:5] == ["query", "key", "value", "output", "layer_name"]
    assert XPAttentionBackend.get_impl_cls() is XPAttentionImpl
    assert XPAttentionBackend.forward_includes_kv_cache_update


def test_an_attention_feature_that_is_not_there_is_refused_by_the_backend_too() -> None:
    from conflux_ray.vllm_compat.backend import XPAttentionImpl

    with pytest.raises(ValueError, match="sliding window"):
        XPAttentionImpl(4, 64, 0.125, 2, sliding_window=128)


def test_the_sampler_and_its_metadata() -> None:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    assert [field.name for field in dataclasses.fields(SamplingMetadata)][:7] == [
        "temperature",
        "all_greedy",
        "all_random",
        "top_p",
        "top_k",
        "generators",
        "max_num_logprobs",
    ]
    assert parameters(Sampler.forward)[1:3] == ["logits", "sampling_metadata"]
