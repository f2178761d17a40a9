"""The one configuration schema: of the deployment YAML, the Helm values and the command line.

A configuration is checked twice before any weights load: its own values when it is parsed, and, by `check_model`,
against the model's `config.json`. Every error names the field, the value and the remedy. Imports no torch or vLLM.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from conflux_ray.kv import KVGeometry
from conflux_ray.models import store

GIB = 1 << 30
MAX_SLO_CLASSES = 16
"""Each is a label value of the ingress's metrics."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PREFILL_PAGE = 128
"""Tokens of a prefill page below which FlashAttention 3 leaves its fast path (6 to 15 % of prefill attention)."""

_UNSUPPORTED_KEYS = {
    "kv_cache_dtype": "a KV cache in FP8 or another dtype than the model's",
    "enable_lora": "LoRA",
    "lora_modules": "LoRA",
    "speculative_config": "speculative decoding",
    "limit_mm_per_prompt": "multimodal input",
    "enable_expert_parallel": "mixture-of-experts models",
    "pipeline_parallel_size": "pipeline parallelism",
}


class ConfigError(ValueError):
    """A configuration that cannot be served; the message names field, value and remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key, feature in _UNSUPPORTED_KEYS.items():
                if key in values:
                    raise ValueError(
                        f"{key}={values[key]!r}: conflux-ray does not support {feature} yet; remove the key"
                    )
        return values


class ModelConfig(_Section):
    """Which model, and how it is loaded."""

    path: str = Field(description="A folder, a Hugging Face id, or the name of a model that conflux-ray can build.")
    served_model_name: str | None = Field(None, description="Name in the API; default: the last part of `path`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(None, ge=2, description="Most tokens of prompt and output; default: the model's.")
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    trust_remote_code: bool = False

    @property
    def name(self) -> str:
        """Name in the API."""
        return self.served_model_name or Path(self.path).name


class AutoscalingConfig(_Section):
    """How many instances there are; the unit is one instance, all its workers."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1)
    target_queued_s: float = Field(1.0, gt=0, description="Queued work that an instance may have, seconds.")
    target_kv_used: float = Field(0.8, gt=0, le=1, description="Share of its KV that may be in use.")
    upscale_delay_s: float = Field(10.0, ge=0, description="How long more are wanted before more are started.")
    downscale_delay_s: float = Field(300.0, ge=0, description="How long fewer are wanted before one is drained.")

    @model_validator(mode="after")
    def _check_order(self) -> AutoscalingConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is below min_replicas={self.min_replicas}; raise it")
        return self


class InstanceConfig(_Section):
    """One XP instance: N logical ranks of `tensor_parallel` workers each."""

    num_replicas: int = Field(1, ge=1, description="Instances; the first number of them with `autoscaling`.")
    autoscaling: AutoscalingConfig | None = Field(None, description="Let load decide how many there are.")
    tensor_parallel: int = Field(1, ge=1, description="Base TP: workers of one logical rank.")
    sp_degree: int = Field(1, ge=1, description="N: logical ranks; prefill runs with Ulysses SP over them.")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: int | None = Field(
        None,
        ge=1,
        description="Tokens of all KV heads in one block; default: 16, and on GPUs what makes a prefill page of 128.",
    )
    kv_memory_gib: float | None = Field(
        None,
        gt=0,
        description="KV memory of one worker; default: 0.5 on a CPU, what `gpu_memory_utilization` leaves on a GPU.",
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    cuda_graphs: bool = Field(
        True,
        description="Capture the shared linear regions, and iterations of decodes alone, as CUDA graphs (device cuda).",
    )
    attention_graphs: bool = Field(
        True, description="Capture the attention region of an iteration, repeat it for all layers (device cuda)."
    )
    peer_memory: bool = Field(
        True,
        description="Exchange heads by writing into the other GPUs' memory where they reach it, not by NCCL (device "
        "cuda).",
    )
    late_planning: bool = Field(
        True, description="Plan an iteration shortly before the running one ends, not as soon as it has begun."
    )
    iteration_log: str | None = Field(
        None,
        description="File that gets a line of JSON an iteration: plan, prediction, measured times; `{id}` in it "
        "becomes the instance's id. Grows without end.",
    )
    max_num_seqs: int = Field(128, ge=1, description="Most resident decodes of one logical rank.")
    cpu_threads: int = Field(1, ge=1, description="Compute threads of one CPU worker.")
    iteration_timeout_s: float = Field(60.0, gt=0, description="An iteration that takes longer counts as hung.")
    start_timeout_s: float = Field(600.0, gt=0)
    drain_timeout_s: float = Field(600.0, gt=0, description="Longest a stopping instance lets its streams run on.")

    @property
    def num_workers(self) -> int:
        """Workers of one instance, N x base TP."""
        return self.sp_degree * self.tensor_parallel

    @property
    def block_tokens(self) -> int:
        """`block_size` or its default, tokens."""
        if self.block_size is not None:
            return self.block_size
        return max(16, -(-PREFILL_PAGE // self.sp_degree)) if self.device == "cuda" else 16


class SloClassConfig(_Section):
    """The promises of one class."""

    ttft_s: float = Field(gt=0)
    tbt_s: float = Field(gt=0)


class SloConfig(_Section):
    """Default promises; a request may bring its own, or name a class."""

    ttft_s: float = Field(2.0, gt=0)
    tbt_s: float = Field(0.1, gt=0)
    classes: dict[str, SloClassConfig] = Field(
        {}, max_length=MAX_SLO_CLASSES, description="More classes by name; `default` is the two keys above."
    )
    objective: float = Field(
        0.99, gt=0, lt=1, description="Share of requests that should meet their promises; alerts watch the rest."
    )

    @model_validator(mode="after")
    def _check_names(self) -> SloConfig:
        for name in self.classes:
            if name == "default" or not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", name):
                raise ValueError(
                    f"classes.{name}: a class is named by up to 32 lower-case letters, digits, - and _, not `default`"
                )
        return self


class SchedulerConfig(_Section):
    """The planner (paper, section 6)."""

    policy: Literal["slo", "fcfs", "srpt", "plain"] = Field(
        "slo", description="Algorithm 1, or FCFS or SRPT order over the same dispatch; plain: no latency model."
    )
    max_prefill_tokens: int = Field(2048, ge=1, description="Most prefill tokens of one iteration, all ranks together.")
    profile: str | None = Field(None, description="Latency profile: a name in conflux_ray/profiles or a file.")
    quantum: int = Field(16, ge=1, description="q: water levels are multiples of it, tokens.")
    kv_threshold: float = Field(
        0.8, ge=0, le=1, description="eta: KV utilization at which placement turns to best-fit."
    )
    kv_headroom_blocks: int = Field(4, ge=0, description="h: blocks that placement leaves free on a rank.")
    deadline_margin_s: float = Field(
        0.05,
        ge=0,
        description="Admission plans to have a first token so long before its deadline; promises nearer than this and "
        "a TBT count as lost.",
    )
    starvation_after_s: float = Field(30.0, ge=0, description="A request this far past its deadline goes first.")
    starvation_quantum: int = Field(
        128, ge=1, description="Tokens that the longest overdue request gets in every step."
    )


class LimitsConfig(_Section):
    """What keeps an overloaded or attacked server answering."""

    max_queued_requests: int = Field(1024, ge=1, description="Of one instance; beyond, requests are rejected with 429.")
    max_requests_per_ingress: int = Field(4096, ge=1)
    reject_hopeless: bool = Field(
        False, description="Answer 429 at once where what is served before a request leaves no way to meet its TTFT."
    )
    max_body_bytes: int = Field(16 << 20, ge=1024)
    no_instance_timeout_s: float = Field(
        120.0, ge=0, description="Longest a request waits while no instance is ready: time for one to start again."
    )


class IngressConfig(_Section):
    """The OpenAI-compatible front end."""

    num_replicas: int = Field(
        1,
        ge=1,
        description="Processes of the front end: one for every 1500 tokens a second, or more where cores are slow.",
    )
    api_key_file: str | None = Field(
        None, description="A file with one API key a line; requests need one of them. None: everyone may ask."
    )
    routing: Literal["queued_work", "shortest_queue", "round_robin"] = Field(
        "queued_work", description="How requests are spread over instances; the other two are there to compare with."
    )

    def api_keys(self) -> tuple[str, ...]:
        """The keys in `api_key_file`.

        Raises:
            ConfigError: the file cannot be read, or has none.
        """
        if self.api_key_file is None:
            return ()
        try:
            lines = Path(self.api_key_file).expanduser().read_text().splitlines()
        except OSError as error:
            raise ConfigError(
                f"ingress.api_key_file={self.api_key_file!r}: {error.strerror}; name a readable file"
            ) from None
        keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if not keys:
            raise ConfigError(f"ingress.api_key_file={self.api_key_file!r}: no key in it; write one a line")
        return keys


class ConfluxConfig(_Section):
    """Everything `conflux_ray.app:build` takes."""

    model: ModelConfig
    instance: InstanceConfig = InstanceConfig()
    slo: SloConfig = SloConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    limits: LimitsConfig = LimitsConfig()
    ingress: IngressConfig = IngressConfig()


def parse(values: Any) -> ConfluxConfig:
    """Check a configuration by itself.

    Raises:
        ConfigError: one line per wrong field.
    """
    try:
        return ConfluxConfig.model_validate(values)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            field = ".".join(str(part) for part in item["loc"]) or "configuration"
            if item["type"] == "extra_forbidden":
                known = ", ".join(_known_fields(item["loc"][:-1]))
                lines.append(f"{field}={item['input']!r}: unknown key; known here: {known}")
            elif item["type"] == "value_error":
                lines.append(f"{field}.{item['msg'].removeprefix('Value error, ')}")
            else:
                lines.append(f"{field}={item['input']!r}: {item['msg']}")
        raise ConfigError("\n".join(lines)) from None


def _known_fields(location: tuple[Any, ...]) -> list[str]:
    section: type[BaseModel] = ConfluxConfig
    for part in location:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    return list(section.model_fields)


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What serving needs to know of a model before it loads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int  # tokens, as served
    dtype: str


def resolve_model(path: str) -> str:
    """Folder of a local model or of one that conflux-ray builds (on first use); any other name is a hub id as it is."""
    if path in store.NAMES:
        return str(store.model_dir(path))
    return str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path


def read_model_config(folder: str) -> dict[str, Any]:
    """The model's config.json, from its folder or the hub's cache.

    Raises:
        ConfigError: there is none.
    """
    local = Path(folder) / "config.json"
    if local.is_file():
        return json.loads(local.read_text())
    if Path(folder).exists():
        raise ConfigError(
            f"model.path={folder!r}: no config.json in this folder; point it at a Hugging Face model folder"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return json.loads(Path(hf_hub_download(folder, "config.json")).read_text())
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(
            f"model.path={folder!r}: neither a folder nor a model that can be fetched ({type(error).__name__}); "
            f"give a folder, a Hugging Face id, or one of {', '.join(store.NAMES)}"
        ) from error


def check_model(config: ConfluxConfig, hf: dict[str, Any]) -> ModelGeometry:
    """Check the configuration against the model's config.json.

    Raises:
        ConfigError: the model needs something unsupported, or its heads or length do not fit the instance.
    """
    _refuse_features(config, hf)
    instance = config.instance
    num_heads = int(hf["num_attention_heads"])
    num_kv_heads = int(hf.get("num_key_value_heads") or num_heads)
    limit = int(hf.get("max_position_embeddings") or 0)
    max_model_len = config.model.max_model_len or limit
    if limit and max_model_len > limit:
        raise ConfigError(
            f"model.max_model_len={max_model_len}: the model has {limit} positions; lower it to at most {limit}"
        )
    if max_model_len < 2:
        raise ConfigError("model.max_model_len: the model does not state its length; set it")
    tp, n = instance.tensor_parallel, instance.sp_degree
    for name, heads in (("query", num_heads), ("KV", num_kv_heads)):
        if heads % (tp * n):
            fits = [f"{d}" for d in range(1, 9) if num_heads % (tp * d) == 0 and num_kv_heads % (tp * d) == 0]
            hint = (
                f"for tensor_parallel={tp} it can be {', '.join(fits)}"
                if fits
                else f"tensor_parallel={tp} cannot be used"
            )
            raise ConfigError(
                f"instance.sp_degree={n}, instance.tensor_parallel={tp}: {heads} {name} heads do not divide by "
                f"{tp} x {n}; {hint}"
            )
    if instance.device == "cuda" and instance.block_tokens * n < PREFILL_PAGE:
        raise ConfigError(
            f"instance.block_size={instance.block_size}: on GPUs a prefill page, block_size x sp_degree tokens, has at "
            f"least {PREFILL_PAGE}; leave it out, or raise it to {-(-PREFILL_PAGE // n)}"
        )
    dtype: str = config.model.dtype
    if dtype == "auto":
        dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return ModelGeometry(
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=int(hf.get("head_dim") or hf["hidden_size"] // num_heads),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf.get("intermediate_size") or 4 * int(hf["hidden_size"])),
        vocab_size=int(hf["vocab_size"]),
        max_model_len=max_model_len,
        dtype=dtype,
    )


def _refuse_features(config: ConfluxConfig, hf: dict[str, Any]) -> None:
    layer_types = hf.get("layer_types") or []
    sliding = "sliding_attention" in layer_types or (
        hf.get("sliding_window") is not None and hf.get("use_sliding_window", True) and not layer_types
    )
    experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if hf.get(k)), None)
    other = [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]
    found = {
        "MLA (kv_lora_rank)": hf.get("kv_lora_rank") is not None,
        "attention sinks": hf.get("model_type") == "gpt_oss" or bool(hf.get("attention_sinks")),
        "ALiBi": bool(hf.get("alibi")) or hf.get("model_type") in ("bloom", "mpt"),
        "an attention logit soft cap (attn_logit_softcapping)": bool(hf.get("attn_logit_softcapping")),
        "sliding-window attention (sliding_window)": sliding,
        f"mixture of experts ({experts})": experts is not None,
        "multimodal input (vision_config or audio_config)": "vision_config" in hf or "audio_config" in hf,
        f"attention layers of type {', '.join(sorted(set(other)))}": bool(other),
        "encoder-decoder attention": bool(hf.get("is_encoder_decoder")),
    }
    names = [name for name, present in found.items() if present]
    if names:
        raise ConfigError(
            f"model.path={config.model.path!r}: the model needs {', '.join(names)}, which conflux-ray does not support;"
            " use a dense decoder-only model with full attention (Llama, Qwen2, Qwen3, ...)"
        )
    if "num_attention_heads" not in hf:
        raise ConfigError(
            f"model.path={config.model.path!r}: its config.json has no num_attention_heads; use a decoder-only"
            " transformer"
        )


def block_bytes(geometry: ModelGeometry, instance: InstanceConfig) -> int:
    """Bytes of one KV block, all layers, on one worker."""
    heads = geometry.num_kv_heads // instance.tensor_parallel
    element = DTYPE_BYTES.get(geometry.dtype)
    if element is None:
        raise ConfigError(f"model.dtype={geometry.dtype!r}: not served; use one of {', '.join(DTYPE_BYTES)}")
    return geometry.num_layers * 2 * instance.block_tokens * heads * geometry.head_size * element


def size_pool(geometry: ModelGeometry, instance: InstanceConfig, memory_bytes: float) -> KVGeometry:
    """The KV pool that fits `memory_bytes` on every worker.

    Raises:
        ConfigError: a request of max_model_len could not make its prefill-to-decode transition in it.
    """
    size = block_bytes(geometry, instance)
    pool = KVGeometry(instance.block_tokens, instance.sp_degree, max(2, int(memory_bytes // size)))
    try:
        pool.check_pool(geometry.max_model_len)
    except ValueError as error:
        needed = pool.min_blocks(geometry.max_model_len) * size / GIB
        raise ConfigError(
            f"instance.kv_memory_gib={memory_bytes / GIB:.3f}: {error}. One request of "
            f"model.max_model_len={geometry.max_model_len} needs {needed:.3f} GiB on each worker"
        ) from None
    return pool
