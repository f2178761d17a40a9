"""What this project relies on in vLLM is still there and still takes what it is given (see also `test_compat`)."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import conflux_ray.vllm_compat

pytestmark = pytest.mark.heavy

SOURCES = sorted(Path(conflux_ray.vllm_compat.__path__[0]).glob("*.py"))


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def names_from_vllm(path: Path) -> list[tuple[str, str]]:
    """(module, name) of everything a file imports from vLLM."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    ]


def keywords_of_call(path: Path, name: str) -> set[str]:
    """Keyword arguments that a file gives to calls of `name`."""
    return {
        keyword.arg
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for keyword in node.keywords
        if keyword.arg
    }


def source(name: str) -> Path:
    return next(path for path in SOURCES if path.name == name)


@pytest.mark.parametrize("path", [p for p in SOURCES if names_from_vllm(p)], ids=lambda p: p.name)
def test_every_name_imported_from_vllm_exists(path: Path) -> None:
    missing = [(m, n) for m, n in names_from_vllm(path) if not hasattr(importlib.import_module(m), n)]
    assert missing == []


class TestPlatform:
    def test_it_is_ours_in_a_process_that_asked_for_it(self) -> None:
        from vllm.platforms import current_platform
        from vllm.platforms.interface import PlatformEnum

        assert type(current_platform).__name__ == "ConfluxCpuPlatform"
        assert (
            current_platform._enum is PlatformEnum.OOT
        )  # else custom operators would look for the CPU wheel's kernels
        assert not current_platform.is_cuda()

    def test_what_it_says_of_the_machine(self) -> None:
        import torch
        from vllm.platforms import current_platform

        assert current_platform.device_type == "cpu"
        assert current_platform.dist_backend == "gloo"
        assert torch.float32 in current_platform.supported_dtypes
        assert not current_platform.is_pin_memory_available()
        assert not current_platform.opaque_attention_op()
        assert current_platform.get_device_total_memory() > 0

    def test_the_classes_it_names_can_be_imported(self) -> None:
        from vllm.platforms import current_platform

        named = [current_platform.get_device_communicator_cls(), current_platform.get_attn_backend_cls(None, None)]
        for name in named:
            module, _, attribute = name.rpartition(".")
            assert inspect.isclass(getattr(importlib.import_module(module), attribute))

    def test_every_method_overrides_one_of_vllms_that_takes_the_same(self) -> None:
        from vllm.platforms.interface import Platform

        from conflux_ray.vllm_compat.platform import ConfluxCpuPlatform

        own = [name for name, value in vars(ConfluxCpuPlatform).items() if isinstance(value, classmethod)]
        assert "check_and_update_config" in own
        for name in own:
            assert parameters(getattr(ConfluxCpuPlatform, name)) == parameters(getattr(Platform, name)), name


class TestLoader:
    def test_engine_arguments(self) -> None:
        from vllm.engine.arg_utils import EngineArgs

        given = keywords_of_call(source("loader.py"), "EngineArgs")
        assert {"attention_backend", "distributed_executor_backend"} <= given
        assert given <= {field.name for field in dataclasses.fields(EngineArgs)}

    def test_set_up_before_a_model_loads(self) -> None:
        import vllm.ir
        from vllm.distributed import set_custom_all_reduce
        from vllm.model_executor.model_loader import get_model
        from vllm.v1.worker.workspace import init_workspace_manager

        assert parameters(vllm.ir.set_default_torch_wrap) == ["enable"]
        assert parameters(set_custom_all_reduce) == ["enable"]
        assert parameters(init_workspace_manager)[0] == "device"
        assert "vllm_config" in parameters(get_model)

    def test_attributes_of_a_process_group(self) -> None:
        from vllm.distributed.parallel_state import GroupCoordinator

        written = inspect.getsource(GroupCoordinator.__init__)
        assert "self.cpu_group = " in written
        assert "self.mq_broadcaster: MessageQueue | None" in written

    def test_attributes_of_a_configuration(self) -> None:
        from vllm.config import CompilationConfig, KernelConfig, ModelConfig

        assert "static_forward_context" in {field.name for field in dataclasses.fields(CompilationConfig)}
        assert "ir_op_priority" in {field.name for field in dataclasses.fields(KernelConfig)}
        assert callable(KernelConfig().ir_op_priority.set_default)
        for name in ("get_num_layers", "get_num_attention_heads", "get_num_kv_heads"):
            assert parameters(getattr(ModelConfig, name))[:2] == ["self", "parallel_config"]
        assert parameters(ModelConfig.get_head_size) == parameters(ModelConfig.get_vocab_size) == ["self"]


class TestAttention:
    def test_the_layer_builds_our_implementation_with_what_it_takes(self) -> None:
        from vllm.v1.attention.backend import AttentionImpl

        from conflux_ray.vllm_compat.backend import XPAttentionBackend, XPAttentionImpl

        assert XPAttentionBackend.get_impl_cls() is XPAttentionImpl
        assert XPAttentionBackend.get_name() == "CUSTOM"
        theirs = parameters(AttentionImpl.__init__)
        assert parameters(XPAttentionImpl.__init__)[: len(theirs)] == theirs

    @pytest.mark.parametrize(
        ("option", "feature"),
        [
            ({"sliding_window": 128}, "sliding window"),
            ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
            ({"kv_cache_dtype": "fp8"}, "KV cache dtype fp8"),
            ({"logits_soft_cap": 50.0}, "attention logit soft cap"),
            ({"attn_type": "encoder"}, "attention type encoder"),
            ({"kv_sharing_target_layer_name": "model.layers.0"}, "KV sharing between layers"),
            ({"sinks": object()}, "attention sinks"),
        ],
    )
    def test_a_feature_that_a_config_json_may_hide_is_refused_here_too(self, option: dict, feature: str) -> None:
        from conflux_ray.vllm_compat.backend import XPAttentionImpl

        with pytest.raises(ValueError, match=f"the model needs {feature}, which conflux-ray does not support"):
            XPAttentionImpl(4, 64, 0.125, 2, **option)


class TestSampler:
    def test_every_required_field_of_the_metadata_is_given_and_no_other(self) -> None:
        from vllm.v1.sample.metadata import SamplingMetadata

        given = keywords_of_call(source("sampler.py"), "SamplingMetadata")
        every = dataclasses.fields(SamplingMetadata)
        required = {f.name for f in every if f.default is f.default_factory is dataclasses.MISSING}
        assert required <= given <= {field.name for field in every}

    def test_what_takes_the_place_of_the_topk_topp_sampler_is_called_as_before(self) -> None:
        import torch
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

        from conflux_ray.vllm_compat.sampler import KeyedTopKTopPSampler, SampleRow, TokenSampler
        from conflux_ray.wire import Sampling

        theirs = parameters(TopKTopPSampler.forward_native)
        assert theirs == ["self", "logits", "generators", "k", "p"]
        assert parameters(KeyedTopKTopPSampler.forward) == ["keys" if n == "generators" else n for n in theirs]
        assert parameters(apply_top_k_top_p) == ["logits", "k", "p"]

        calls = []

        class Recorder(torch.nn.Module):
            def forward(self, logits, keys, k, p):
                calls.append((keys, k, p))
                return torch.zeros(len(logits), dtype=torch.int64), None

        sampler = TokenSampler(torch.device("cpu"), 5, lambda array: torch.from_numpy(array.copy()))
        assert isinstance(sampler._sampler.topk_topp_sampler, KeyedTopKTopPSampler)
        sampler._sampler.topk_topp_sampler = Recorder()
        batch = sampler.prepare([SampleRow(Sampling(1, top_k=2, top_p=0.5), 3, 4)])
        sampler.sample(torch.zeros(1, 5), batch)
        ((keys, k, p),) = calls
        assert (keys is batch.metadata.generators, k is batch.metadata.top_k, p is batch.metadata.top_p) == (True,) * 3
        assert isinstance(keys, torch.Tensor)

    def test_what_comes_back(self) -> None:
        from vllm.v1.outputs import SamplerOutput

        assert {"sampled_token_ids", "logprobs_tensors"} <= {field.name for field in dataclasses.fields(SamplerOutput)}


class TestGraphs:
    def test_a_capture_on_the_callers_stream(self) -> None:
        from vllm.distributed.parallel_state import GraphCaptureContext, graph_capture

        assert parameters(graph_capture)[:2] == ["device", "graph_capture_context"]
        assert [field.name for field in dataclasses.fields(GraphCaptureContext)][:1] == ["stream"]


class TestOffline:
    def test_the_engine_that_is_measured_beside_ours(self) -> None:
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        given = keywords_of_call(source("offline.py"), "LLM")
        assert given
        assert given <= {field.name for field in dataclasses.fields(EngineArgs)}
        assert parameters(LLM.__init__)[1] == "model"
        assert parameters(LLMEngine.add_request)[1:4] == ["request_id", "prompt", "params"]
        assert callable(LLMEngine.step)
        assert callable(LLMEngine.has_unfinished_requests)


class TestFrontEnd:
    def test_the_core_client_overrides_methods_that_vllm_has(self) -> None:
        from vllm.v1.engine.core_client import EngineCoreClient

        from conflux_ray.vllm_compat.frontend import DispatcherCoreClient

        shared = {"slo_of", "__init__"}
        own = [n for n, v in vars(DispatcherCoreClient).items() if inspect.isfunction(v) and not n.startswith("_")]
        for name in set(own) - shared:
            assert parameters(getattr(DispatcherCoreClient, name)) == parameters(getattr(EngineCoreClient, name)), name

    def test_the_application_is_built_and_filled_as_before(self) -> None:
        from vllm.entrypoints.openai.api_server import build_app, init_app_state

        assert parameters(build_app)[:3] == ["args", "supported_tasks", "model_config"]
        assert parameters(init_app_state)[:4] == ["engine_client", "state", "args", "supported_tasks"]


def test_no_wake_up_of_an_idle_reader_is_dropped() -> None:
    """With vLLM's own limit of one, two plans within a millisecond left the reader asleep for a second."""
    import zmq

    from conflux_ray.vllm_compat.channel import Writer

    writer = Writer(1)
    condition = writer._queue._spin_condition
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.LINGER, 0)
        listener.subscribe(b"")
        listener.connect(writer.handle.local_notify_addr)
        while not listener.poll(10):  # until the subscription has reached the writer
            condition.notify()
        while listener.poll(200):
            listener.recv()
        for _ in range(50):
            condition.notify()
        received = 0
        while received < 50 and listener.poll(5000):
            listener.recv()
            received += 1
    writer.close()
    assert received == 50
