"""Tiny random Llama and Qwen3 models whose tokens depend on every block of their context.

The usual initialisation (sigma 0.02, or vLLM's `load_format: dummy`) gives nearly uniform attention that hardly moves
the residual stream: a server that loses a whole KV block still returns the right tokens. Here each matrix is normal
with sigma = gain / sqrt(fan-in), the gains chosen so that attention scores have a standard deviation of about 3 and
attention outweighs the token's own embedding. A wrong block, head, position or order then changes most greedy tokens,
while the gap between the two best logits stays far above float32 noise. tests/models/test_tiny.py measures this.

The weights depend only on the fields of `TinyModel`, tensor by tensor, and need neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from conflux_ray.models.folder import build_once, write_json
from conflux_ray.models.heads import copy_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Standard deviation of each projection's output for an input of unit variance.
_GAINS = {
    "embed_tokens": 1.0,
    "q_proj": 1.8,
    "k_proj": 1.8,
    "v_proj": 1.0,
    "o_proj": 2.0,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 1.0,
    "lm_head": 2.0,
}
# Qwen3 normalises each query and key, so their norms' weights take the place of the projections' gains.
_QK_NORM = 1.8
_NORM_SPREAD = 0.1

UNKNOWN, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (UNKNOWN, CHAT_START, CHAT_END)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PRINTABLE = "".join(map(chr, range(33, 127)))
_SMALLEST_VOCAB = len(_SPECIAL) + 256
_LARGEST_VOCAB = _SMALLEST_VOCAB + len(_PRINTABLE) ** 2


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The shape and seed of a tiny model. Embeddings are untied; `max_position` is in tokens.

    The end token is a token like any other, so a greedy continuation contains it now and then.

    Raises:
        ValueError: An unknown architecture or an impossible shape.
    """

    architecture: str = "llama"
    num_layers: int = 3
    hidden_size: int = 64
    intermediate_size: int = 128
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 16
    vocab_size: int = 512
    max_position: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture={self.architecture!r} is not one of {', '.join(ARCHITECTURES)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("architecture", "seed") and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.architecture == "llama" and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}: transformers refuses "
                "such a Llama even where head_dim is given; change one, or use qwen3"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")

    @property
    def name(self) -> str:
        """A folder name: `tiny-llama`, followed by every field that is not at its default."""
        changed = [
            f"{field.name}{getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "architecture" and getattr(self, field.name) != field.default
        ]
        return "-".join([f"tiny-{self.architecture}", *changed])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight under its Hugging Face name; matrices are [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if self.architecture == "qwen3":
            layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        return {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            **{
                f"model.layers.{index}.{name}.weight": shape
                for index in range(self.num_layers)
                for name, shape in layer.items()
            },
            "model.norm.weight": (hidden,),
            "lm_head.weight": (self.vocab_size, hidden),
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights, float32, each drawn from its own stream so that one shape does not shift another's."""
        return {name: self._draw(name, shape) for name, shape in self.shapes().items()}

    def config(self) -> dict[str, Any]:
        """Return `config.json`."""
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dtype": "float32",
            "bos_token_id": _SPECIAL.index(CHAT_START),
            "eos_token_id": _SPECIAL.index(CHAT_END),
            "pad_token_id": _SPECIAL.index(CHAT_END),
        }

    def _draw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        stream = np.random.default_rng([self.seed, zlib.crc32(f"{self.architecture} {name}".encode())])
        values = stream.standard_normal(shape, dtype=np.float32)
        kind = name.split(".")[-2]
        if len(shape) == 1:
            centre = _QK_NORM if kind in ("q_norm", "k_norm") else 1.0
            return (centre * (1 + _NORM_SPREAD * values)).astype(np.float32)
        fan_in = 1 if kind == "embed_tokens" else shape[1]
        return values * np.float32(_GAINS[kind] / math.sqrt(fan_in))


def write(dest: Path, model: TinyModel, tokenizer_from: Path | None = None) -> Path:
    """Make `dest` the Hugging Face folder of `model`; at once if it already is.

    Args:
        dest: The folder.
        model: Shape and seed.
        tokenizer_from: A model folder whose tokenizer and chat template to use. By default the folder gets a byte-level
            tokenizer of `vocab_size` tokens, every one of which decodes: 3 special tokens, 256 bytes, and pairs of
            printable characters.

    Returns:
        `dest`, absolute.

    Raises:
        ValueError: `vocab_size` is smaller than the given tokenizer's, or outside what the byte-level one can fill.
        FileExistsError: `dest` holds something else.
    """

    def build(folder: Path) -> None:
        from safetensors.numpy import save_file

        config = model.config()
        if tokenizer_from is None:
            write_byte_tokenizer(folder, model.vocab_size)
        else:
            copy_tokenizer(tokenizer_from, folder)
            config |= _special_ids(tokenizer_from)
        write_json(folder / "config.json", config)
        write_json(
            folder / "generation_config.json",
            {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        )
        save_file(model.weights(), folder / "model.safetensors", metadata={"format": "pt"})

    if tokenizer_from is None:
        if not _SMALLEST_VOCAB <= model.vocab_size <= _LARGEST_VOCAB:
            raise ValueError(
                f"vocab_size={model.vocab_size} is outside {_SMALLEST_VOCAB} to {_LARGEST_VOCAB}, which the byte-level "
                "tokenizer can fill: name another, or give tokenizer_from"
            )
    elif model.vocab_size < (needed := _tokenizer_size(tokenizer_from)):
        raise ValueError(
            f"vocab_size={model.vocab_size} is smaller than the {needed} tokens of {tokenizer_from}: "
            f"use vocab_size={needed}"
        )
    recipe = {
        "format": 1,
        "model": asdict(model),
        "gains": [_GAINS, _QK_NORM, _NORM_SPREAD],
        "tokenizer": None if tokenizer_from is None else zlib.crc32((tokenizer_from / "tokenizer.json").read_bytes()),
    }
    return build_once(dest, json.dumps(recipe, sort_keys=True), build)


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer of `vocab_size` tokens and a chat template into a model folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pair_count = vocab_size - _SMALLEST_VOCAB
    pairs = sorted(
        ((left, right) for left in _PRINTABLE for right in _PRINTABLE),
        # Letters first: those are the pairs that text contains.
        key=lambda pair: (not pair[0].islower(), not pair[1].islower(), pair),
    )[:pair_count]
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in pairs)]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": CHAT_START,
            "eos_token": CHAT_END,
            "pad_token": CHAT_END,
            "unk_token": UNKNOWN,
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)


def _tokenizer_size(folder: Path) -> int:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True)


def _special_ids(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
