"""The same model with more heads: KV heads duplicated, query groups padded with heads that contribute nothing.

A model runs at a degree only if the degree divides its heads. Giving a model more heads without changing what it
computes lets real weights run at degrees that the original forbids.

Each KV head is copied `num_kv_heads / original` times, and the query heads that read it are spread evenly over the
copies. Every copy then serves `num_heads / num_kv_heads` query heads, of which the ones left over have zero query rows
and zero output columns. With 9 query heads on 3 KV heads, asked for 12 on 6:

    original    kv0: q0 q1 q2
    result      kv0: q0 q1      kv0: q2 pad
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conflux_ray.models.folder import write_json

if TYPE_CHECKING:
    import torch

_ATTENTION = re.compile(r"\.self_attn\.(?P<projection>[qkvo])_proj\.(?P<kind>weight|bias)$")
_PADDING = -1


def pad_heads(
    config: Mapping[str, Any], state_dict: Mapping[str, torch.Tensor], num_heads: int, num_kv_heads: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the configuration and weights of an equivalent model with `num_heads` and `num_kv_heads`.

    Args:
        config: A Llama or Qwen3 `config.json`.
        state_dict: Its weights under their Hugging Face names: `q_proj` [heads x head_dim, hidden], `k_proj` and
            `v_proj` [KV heads x head_dim, hidden], `o_proj` [hidden, heads x head_dim]. Other weights pass through,
            q/k norms too, since these hold one head's width and apply to every head alike.
        num_heads: Query heads of the result.
        num_kv_heads: KV heads of the result.

    Raises:
        ValueError: The result would not be equivalent: `num_kv_heads` is not a multiple of the original's,
            `num_heads` is not a multiple of `num_kv_heads`, or a group of query heads does not fit on its copies. Or
            transformers would not load it: a Llama's hidden size must be a multiple of its heads.
    """
    if config.get("model_type") == "llama" and num_heads > 0 and config["hidden_size"] % num_heads:
        raise ValueError(
            f"num_heads={num_heads} does not divide hidden_size={config['hidden_size']}: transformers refuses such a "
            "Llama even where head_dim is given"
        )
    old_heads, old_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // old_heads
    query_sources, kv_sources = head_sources(old_heads, old_kv_heads, num_heads, num_kv_heads)
    result = {}
    for name, tensor in state_dict.items():
        match = _ATTENTION.search(name)
        if match is None or (match["projection"] == "o" and match["kind"] == "bias"):
            result[name] = tensor
        else:
            sources = kv_sources if match["projection"] in "kv" else query_sources
            result[name] = _pick(tensor, sources, head_dim, axis=1 if match["projection"] == "o" else 0)
    padded = {
        **config,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        # Readers derive it as hidden / heads when it is absent, which no longer holds.
        "head_dim": head_dim,
    }
    return padded, result


def head_sources(old_heads: int, old_kv_heads: int, num_heads: int, num_kv_heads: int) -> tuple[list[int], list[int]]:
    """Return the original head that each new query head and each new KV head is made of; -1 is a padding head.

    Raises:
        ValueError: See `pad_heads`.
    """
    if num_kv_heads < 1 or num_kv_heads % old_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} is not a multiple of the model's {old_kv_heads}: every KV head is copied "
            "equally often"
        )
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}: every KV head serves equally "
            "many query heads"
        )
    old_group, copies, group = old_heads // old_kv_heads, num_kv_heads // old_kv_heads, num_heads // num_kv_heads
    if copies * group < old_group:
        raise ValueError(
            f"num_heads={num_heads} is too few: the {old_group} query heads of a KV head need as many places on its "
            f"{copies} copies, which have {group} each; use at least "
            f"{num_kv_heads * -(-old_group // copies)} with num_kv_heads={num_kv_heads}"
        )
    query_sources: list[int] = []
    for kv_head in range(old_kv_heads):
        first = kv_head * old_group
        for copy in range(copies):
            share = range(first + -(-copy * old_group // copies), first + -(-(copy + 1) * old_group // copies))
            query_sources += [*share, *[_PADDING] * (group - len(share))]
    return query_sources, [kv_head for kv_head in range(old_kv_heads) for _ in range(copies)]


def convert(source: Path, dest: Path, num_heads: int, num_kv_heads: int) -> None:
    """Write the equivalent form of the model folder `source` into the existing folder `dest`, tokenizer included.

    Raises:
        ValueError: See `pad_heads`.
        FileNotFoundError: `source` has no single `model.safetensors`.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    padded, state = pad_heads(config, load_file(source / "model.safetensors"), num_heads, num_kv_heads)
    save_file(state, dest / "model.safetensors", metadata={"format": "pt"})
    write_json(dest / "config.json", padded)
    copy_tokenizer(source, dest)
    if (source / "generation_config.json").exists():
        shutil.copy(source / "generation_config.json", dest)


def copy_tokenizer(source: Path, dest: Path) -> None:
    """Copy the tokenizer and the chat template of a model folder, where it has them."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, dest)


def _pick(tensor: torch.Tensor, sources: list[int], head_dim: int, axis: int) -> torch.Tensor:
    """Arrange the heads of `tensor` along `axis` after `sources`, zeros where it names the padding head."""
    import torch

    heads = tensor.split(head_dim, dim=axis)
    zeros = torch.zeros_like(heads[0])
    return torch.cat([zeros if source == _PADDING else heads[source] for source in sources], dim=axis)
