"""What can be served is accepted with the right numbers; everything else is refused by field, value and remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conflux_ray.config import (
    GIB,
    ConfigError,
    ConfluxConfig,
    InstanceConfig,
    ModelGeometry,
    block_bytes,
    check_model,
    parse,
    read_model_config,
    size_pool,
)
from conflux_ray.models.tiny import TinyModel

MIB = 1 << 20

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "max_window_layers": 40,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}


def serving(sp_degree: int = 1, tensor_parallel: int = 1, **model) -> ConfluxConfig:
    return parse(
        {
            "model": {"path": "some/model", **model},
            "instance": {"sp_degree": sp_degree, "tensor_parallel": tensor_parallel},
        }
    )


def refusal(values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    return str(caught.value)


def model_refusal(hf: dict, sp_degree: int = 1, tensor_parallel: int = 1, **model) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(serving(sp_degree, tensor_parallel, **model), hf)
    return str(caught.value)


class TestParsing:
    def test_the_model_path_is_all_that_must_be_given(self):
        config = parse({"model": {"path": "meta-llama/Llama-3.1-8B-Instruct"}})
        assert config.model.name == "Llama-3.1-8B-Instruct"
        assert config.instance.num_workers == 1
        assert config.scheduler.policy == "slo"

    def test_served_model_name_overrides_the_path(self):
        assert serving(served_model_name="assistant").model.name == "assistant"

    def test_an_instance_has_sp_degree_times_tensor_parallel_workers(self):
        assert serving(sp_degree=3, tensor_parallel=2).instance.num_workers == 6

    def test_an_unknown_key_is_named_with_its_value_and_the_known_ones(self):
        message = refusal({"model": {"path": "m"}, "instance": {"tensor_paralel": 2}})
        assert message.startswith("instance.tensor_paralel=2: unknown key")
        assert "tensor_parallel, sp_degree" in message

    def test_an_unknown_section_is_named_with_the_known_ones(self):
        message = refusal({"model": {"path": "m"}, "planner": {"policy": "slo"}})
        assert message.startswith("planner={'policy': 'slo'}: unknown key")
        assert "model, instance, slo, scheduler, limits, ingress" in message

    def test_slo_classes_have_names_that_metrics_can_carry(self):
        config = parse({"model": {"path": "m"}, "slo": {"classes": {"chat": {"ttft_s": 1, "tbt_s": 0.05}}}})
        assert config.slo.classes["chat"].tbt_s == 0.05
        for name in ("default", "Chat", "", "a b", "x" * 33):
            message = refusal({"model": {"path": "m"}, "slo": {"classes": {name: {"ttft_s": 1, "tbt_s": 0.05}}}})
            assert message.startswith(f"slo.classes.{name}: a class is named by")
        many = {f"class-{i}": {"ttft_s": 1, "tbt_s": 0.05} for i in range(17)}
        assert "at most 16" in refusal({"model": {"path": "m"}, "slo": {"classes": many}})

    def test_every_wrong_field_has_its_own_line(self):
        message = refusal(
            {"model": {"path": "m"}, "instance": {"sp_degree": 0, "block_sise": 8}, "slo": {"ttft_s": -1.0}}
        )
        lines = sorted(message.split("\n"))
        assert [line.split(":")[0] for line in lines] == [
            "instance.block_sise=8",
            "instance.sp_degree=0",
            "slo.ttft_s=-1.0",
        ]

    @pytest.mark.parametrize(
        ("section", "key", "value", "remedy"),
        [
            ("instance", "num_replicas", 0, "greater than or equal to 1"),
            ("instance", "tensor_parallel", 0, "greater than or equal to 1"),
            ("instance", "block_size", 0, "greater than or equal to 1"),
            ("instance", "kv_memory_gib", 0, "greater than 0"),
            ("instance", "gpu_memory_utilization", 1.5, "less than or equal to 1"),
            ("instance", "device", "tpu", "'auto', 'cpu' or 'cuda'"),
            ("model", "dtype", "float8", "'auto', 'float32', 'bfloat16' or 'float16'"),
            ("model", "max_model_len", 1, "greater than or equal to 2"),
            ("slo", "tbt_s", 0, "greater than 0"),
            ("slo", "objective", 1, "less than 1"),
            ("scheduler", "policy", "edf", "'slo', 'fcfs', 'srpt' or 'plain'"),
            ("scheduler", "kv_threshold", 2, "less than or equal to 1"),
            ("limits", "max_body_bytes", 1, "greater than or equal to 1024"),
            ("ingress", "num_replicas", 0, "greater than or equal to 1"),
        ],
    )
    def test_a_value_out_of_range_is_named_with_the_range(self, section: str, key: str, value: object, remedy: str):
        values = {"model": {"path": "m"}}
        values.setdefault(section, {})[key] = value
        message = refusal(values)
        assert message.startswith(f"{section}.{key}={value!r}: ")
        assert remedy in message

    def test_a_configuration_without_a_model_is_refused(self):
        assert refusal({"instance": {}}).startswith("model=")

    def test_what_is_not_a_mapping_is_refused(self):
        assert refusal("llama").startswith("configuration='llama': ")

    def test_a_parsed_configuration_cannot_change(self):
        with pytest.raises(ValueError, match="frozen"):
            serving().instance.sp_degree = 2

    @pytest.mark.parametrize(
        ("section", "key", "value", "feature"),
        [
            ("model", "enable_lora", True, "LoRA"),
            ("model", "lora_modules", ["a=b"], "LoRA"),
            ("model", "limit_mm_per_prompt", {"image": 1}, "multimodal input"),
            ("model", "speculative_config", {"num_speculative_tokens": 3}, "speculative decoding"),
            ("instance", "speculative_config", {"method": "ngram"}, "speculative decoding"),
            ("instance", "kv_cache_dtype", "fp8", "a KV cache in FP8"),
            ("instance", "enable_expert_parallel", True, "mixture-of-experts models"),
            ("instance", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ],
    )
    def test_a_key_of_an_unsupported_feature_is_refused(self, section: str, key: str, value: object, feature: str):
        values = {"model": {"path": "m"}}
        values.setdefault(section, {})[key] = value
        message = refusal(values)
        assert message.startswith(f"{section}.{key}={value!r}: ")
        assert feature in message
        assert message.endswith("remove the key")

    def test_an_unsupported_key_at_the_top_is_refused(self):
        message = refusal({"model": {"path": "m"}, "enable_lora": True})
        assert "enable_lora=True" in message
        assert message.endswith("remove the key")

    def test_the_example_deployment_is_a_good_configuration(self):
        deployment = Path(__file__).parents[2] / "deployments" / "conflux.yaml"
        applications = yaml.safe_load(deployment.read_text())["applications"]
        assert [a["import_path"] for a in applications] == ["conflux_ray.app:build"]
        config = parse(applications[0]["args"])
        assert config.model.name == "smollm2-135m-instruct"
        assert config.instance.num_workers == 3

    @pytest.mark.parametrize(
        "path", sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml")), ids=lambda path: path.name
    )
    def test_every_deployment_fits_its_model(self, path: Path):
        config = parse(yaml.safe_load(path.read_text())["applications"][0]["args"])
        known = {"Qwen/Qwen3-14B": QWEN3_14B, "smollm2-135m-instruct": SMOLLM2, "tiny-llama": TinyModel().config()}
        assert check_model(config, known[config.model.path]).max_model_len == config.model.max_model_len


class TestBlocks:
    @pytest.mark.parametrize(
        ("device", "sp_degree", "block_size", "expected"),
        [
            ("cpu", 3, None, 16),
            ("cuda", 1, None, 128),
            ("cuda", 2, None, 64),
            ("cuda", 16, None, 16),
            ("cuda", 4, 48, 48),
        ],
    )
    def test_a_gpu_s_prefill_page_has_128_tokens_by_default(self, device, sp_degree, block_size, expected):
        instance = InstanceConfig(device=device, sp_degree=sp_degree, block_size=block_size)
        assert instance.block_tokens == expected

    def test_a_smaller_page_is_refused_on_gpus(self):
        values = {"model": {"path": "m"}, "instance": {"device": "cuda", "sp_degree": 2, "block_size": 32}}
        with pytest.raises(ConfigError, match=r"instance\.block_size=32: .* raise it to 64"):
            check_model(parse(values), QWEN3_14B)


class TestModels:
    @pytest.mark.parametrize(
        ("hf", "sp_degree", "tensor_parallel", "expected"),
        [
            (LLAMA_3_1_8B, 4, 1, ModelGeometry(32, 32, 8, 128, 4096, 14336, 128256, 131072, "bfloat16")),
            (LLAMA_3_1_8B, 8, 1, ModelGeometry(32, 32, 8, 128, 4096, 14336, 128256, 131072, "bfloat16")),
            (QWEN3_14B, 4, 1, ModelGeometry(40, 40, 8, 128, 5120, 17408, 151936, 40960, "bfloat16")),
            (QWEN3_14B, 2, 2, ModelGeometry(40, 40, 8, 128, 5120, 17408, 151936, 40960, "bfloat16")),
            (QWEN3_32B, 2, 4, ModelGeometry(64, 64, 8, 128, 5120, 25600, 151936, 40960, "bfloat16")),
            (QWEN3_32B, 4, 2, ModelGeometry(64, 64, 8, 128, 5120, 25600, 151936, 40960, "bfloat16")),
        ],
    )
    def test_geometry_of_known_models(self, hf: dict, sp_degree: int, tensor_parallel: int, expected: ModelGeometry):
        assert check_model(serving(sp_degree, tensor_parallel), hf) == expected

    def test_max_model_len_is_the_configured_one(self):
        assert check_model(serving(max_model_len=4096), LLAMA_3_1_8B).max_model_len == 4096

    def test_max_model_len_beyond_the_models_positions_is_refused(self):
        message = model_refusal(QWEN3_14B, max_model_len=65536)
        assert message.startswith("model.max_model_len=65536: the model has 40960 positions")
        assert "lower it to at most 40960" in message

    def test_a_model_that_states_no_length_needs_max_model_len(self):
        hf = {k: v for k, v in LLAMA_3_1_8B.items() if k != "max_position_embeddings"}
        assert "model.max_model_len" in model_refusal(hf)
        assert check_model(serving(max_model_len=2048), hf).max_model_len == 2048

    def test_a_configured_dtype_overrides_the_models(self):
        assert check_model(serving(dtype="float32"), LLAMA_3_1_8B).dtype == "float32"

    def test_without_key_value_heads_every_query_head_has_its_own(self):
        hf = {k: v for k, v in LLAMA_3_1_8B.items() if k != "num_key_value_heads"}
        assert check_model(serving(sp_degree=16), hf).num_kv_heads == 32

    def test_a_window_that_no_layer_uses_is_no_window(self):
        full = {**QWEN3_14B, "layer_types": ["full_attention"] * 40, "sliding_window": 4096}
        unused = {**QWEN3_14B, "sliding_window": 131072, "use_sliding_window": False}
        assert check_model(serving(), full) == check_model(serving(), unused) == check_model(serving(), QWEN3_14B)


class TestHeads:
    @pytest.mark.parametrize(
        ("hf", "sp_degree", "tensor_parallel", "heads", "remedy"),
        [
            (LLAMA_3_1_8B, 3, 1, "32 query heads", "for tensor_parallel=1 it can be 1, 2, 4, 8"),
            (LLAMA_3_1_8B, 16, 1, "8 KV heads", "for tensor_parallel=1 it can be 1, 2, 4, 8"),
            (LLAMA_3_1_8B, 8, 2, "8 KV heads", "for tensor_parallel=2 it can be 1, 2, 4"),
            (QWEN3_14B, 5, 1, "8 KV heads", "for tensor_parallel=1 it can be 1, 2, 4, 8"),
            (QWEN3_14B, 1, 16, "40 query heads", "tensor_parallel=16 cannot be used"),
            (QWEN3_32B, 4, 4, "8 KV heads", "for tensor_parallel=4 it can be 1, 2"),
            (QWEN3_32B, 1, 3, "64 query heads", "tensor_parallel=3 cannot be used"),
        ],
    )
    def test_heads_that_do_not_divide_are_refused_with_degrees_that_do(
        self, hf: dict, sp_degree: int, tensor_parallel: int, heads: str, remedy: str
    ):
        message = model_refusal(hf, sp_degree, tensor_parallel)
        assert message.startswith(f"instance.sp_degree={sp_degree}, instance.tensor_parallel={tensor_parallel}: ")
        assert f"{heads} do not divide by {tensor_parallel} x {sp_degree}" in message
        assert message.endswith(remedy)

    def test_three_ranks_serve_a_model_of_nine_and_three_heads(self):
        hf = {**LLAMA_3_1_8B, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
        assert check_model(serving(sp_degree=3), hf).head_size == 64


class TestUnsupportedModels:
    @pytest.mark.parametrize(
        ("fields", "feature"),
        [
            ({"model_type": "deepseek_v2", "kv_lora_rank": 512}, "MLA (kv_lora_rank)"),
            ({"model_type": "gpt_oss"}, "attention sinks"),
            ({"attention_sinks": 4}, "attention sinks"),
            ({"attn_logit_softcapping": 50.0}, "attention logit soft cap"),
            ({"model_type": "bloom"}, "ALiBi"),
            ({"model_type": "mpt"}, "ALiBi"),
            ({"model_type": "falcon", "alibi": True}, "ALiBi"),
            ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window attention (sliding_window)"),
            ({"sliding_window": 4096, "use_sliding_window": True}, "sliding-window attention (sliding_window)"),
            ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding-window attention (sliding_window)"),
            ({"model_type": "qwen3_moe", "num_experts": 128}, "mixture of experts (num_experts)"),
            ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts (num_local_experts)"),
            ({"n_routed_experts": 64}, "mixture of experts (n_routed_experts)"),
            ({"vision_config": {"depth": 32}}, "multimodal input (vision_config or audio_config)"),
            ({"audio_config": {}}, "multimodal input (vision_config or audio_config)"),
            ({"layer_types": ["linear_attention", "full_attention"]}, "attention layers of type linear_attention"),
            ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder attention"),
        ],
    )
    def test_a_model_that_needs_an_unsupported_feature_is_refused(self, fields: dict, feature: str):
        message = model_refusal({**LLAMA_3_1_8B, **fields})
        assert message.startswith("model.path='some/model': the model needs ")
        assert feature in message
        assert "use a dense decoder-only model with full attention" in message

    def test_all_unsupported_features_of_a_model_are_named_at_once(self):
        message = model_refusal({**LLAMA_3_1_8B, "kv_lora_rank": 512, "n_routed_experts": 64})
        assert "MLA (kv_lora_rank), mixture of experts (n_routed_experts)" in message

    def test_a_model_without_attention_heads_is_refused(self):
        hf = {k: v for k, v in LLAMA_3_1_8B.items() if k != "num_attention_heads"}
        message = model_refusal({**hf, "model_type": "mamba"})
        assert message.startswith("model.path='some/model': ")
        assert "no num_attention_heads; use a decoder-only transformer" in message

    def test_a_folder_without_config_json_is_refused(self, tmp_path: Path):
        with pytest.raises(ConfigError, match=r"no config.json in this folder; point it at a Hugging Face model"):
            read_model_config(str(tmp_path))

    def test_config_json_is_read_from_the_folder(self, tmp_path: Path):
        (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
        assert read_model_config(str(tmp_path)) == {"num_hidden_layers": 2}


class TestPoolSize:
    @pytest.mark.parametrize(
        ("hf", "tensor_parallel", "block_size", "dtype", "expected"),
        [
            # layers x (K and V) x tokens x KV heads of one worker x head_dim x bytes of an element
            (LLAMA_3_1_8B, 1, 16, "auto", 2_097_152),  # 32 x 2 x 16 x 8 x 128 x 2
            (LLAMA_3_1_8B, 1, 16, "float32", 4_194_304),  # 32 x 2 x 16 x 8 x 128 x 4
            (LLAMA_3_1_8B, 4, 64, "auto", 2_097_152),  # 32 x 2 x 64 x 2 x 128 x 2
            (QWEN3_14B, 1, 16, "auto", 2_621_440),  # 40 x 2 x 16 x 8 x 128 x 2
            (QWEN3_14B, 2, 16, "auto", 1_310_720),  # 40 x 2 x 16 x 4 x 128 x 2
            (QWEN3_32B, 4, 16, "auto", 1_048_576),  # 64 x 2 x 16 x 2 x 128 x 2
        ],
    )
    def test_bytes_of_a_block(self, hf: dict, tensor_parallel: int, block_size: int, dtype: str, expected: int):
        geometry = check_model(serving(tensor_parallel=tensor_parallel, dtype=dtype), hf)
        instance = InstanceConfig(tensor_parallel=tensor_parallel, block_size=block_size)
        assert block_bytes(geometry, instance) == expected

    def test_a_dtype_that_is_not_served_is_refused(self):
        geometry = check_model(serving(), {**LLAMA_3_1_8B, "torch_dtype": "float64"})
        with pytest.raises(ConfigError, match=r"model\.dtype='float64': not served; use one of float32, bfloat16"):
            block_bytes(geometry, InstanceConfig())

    def test_the_pool_holds_the_blocks_that_fit(self):
        geometry = check_model(serving(sp_degree=4, max_model_len=4096), LLAMA_3_1_8B)
        pool = size_pool(geometry, InstanceConfig(sp_degree=4), 10.5 * GIB)
        assert (pool.block_size, pool.sp_degree, pool.num_blocks) == (16, 4, 5376)

    def test_part_of_a_block_is_no_block(self):
        geometry = check_model(serving(max_model_len=16), LLAMA_3_1_8B)
        assert size_pool(geometry, InstanceConfig(), 12 * MIB - 1).num_blocks == 5

    def test_the_smallest_pool_holds_the_longest_request_in_both_views(self):
        # 4096 tokens: 256 blocks of 16 in the decode view, 128 pages of 32 in the prefill view, and the null block.
        geometry = check_model(serving(sp_degree=2, max_model_len=4096), LLAMA_3_1_8B)
        assert size_pool(geometry, InstanceConfig(sp_degree=2), 385 * 2 * MIB).num_blocks == 385

    def test_a_smaller_pool_is_refused_with_the_memory_it_needs(self):
        geometry = check_model(serving(sp_degree=2, max_model_len=4096), LLAMA_3_1_8B)
        with pytest.raises(ConfigError) as caught:
            size_pool(geometry, InstanceConfig(sp_degree=2), 384 * 2 * MIB)
        message = str(caught.value)
        assert message.startswith("instance.kv_memory_gib=0.750: num_blocks=384 per rank is too few")
        assert "model.max_model_len=4096 needs 0.752 GiB on each worker" in message
        assert "lower max_model_len" in message

    def test_no_memory_at_all_is_refused_by_the_same_message(self):
        geometry = check_model(serving(), QWEN3_32B)
        with pytest.raises(ConfigError, match=r"instance\.kv_memory_gib=0\.000: .* needs .* GiB on each worker"):
            size_pool(geometry, InstanceConfig(), 0)


def test_importing_the_configuration_loads_no_torch_ray_vllm_or_transformers():
    code = (
        "import sys, conflux_ray.config; "
        "print(sorted({'torch', 'ray', 'vllm', 'transformers'}.intersection(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
