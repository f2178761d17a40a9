"""Shapes of real models without their weights, for runs of speed alone (`load_format: dummy`).

Random weights attend nearly evenly and hide wrong attention: nothing about correctness is shown with them. The
tokenizer is a small byte-level one; most token ids lie beyond it and decode to nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conflux_ray.models.folder import build_once, write_json
from conflux_ray.models.tiny import write_byte_tokenizer

TOKENIZER_SIZE = 512

_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "head_dim": 128,
    "num_key_value_heads": 8,
}

# From the models' config.json on the Hugging Face hub.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-14b-shape": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3-32b-shape": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "llama-3.1-8b-shape": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


def write(dest: Path, name: str) -> Path:
    """Make `dest` a model folder of one of `SHAPES`, without weights; at once if it already is.

    Returns:
        `dest`, absolute.

    Raises:
        FileExistsError: `dest` holds something else.
    """
    config = _COMMON | SHAPES[name]

    def build(folder: Path) -> None:
        write_byte_tokenizer(folder, TOKENIZER_SIZE)
        write_json(folder / "config.json", config)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(folder / "generation_config.json", {key: config[key] for key in keys})

    recipe = {"format": 1, "config": config, "tokenizer": TOKENIZER_SIZE}
    return build_once(dest, json.dumps(recipe, sort_keys=True), build)
