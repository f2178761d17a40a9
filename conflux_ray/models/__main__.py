"""`python -m conflux_ray.models NAME DEST`: write one of the package's models into a folder."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from conflux_ray.models import smollm2, store, tiny


def main(arguments: list[str] | None = None) -> None:
    """Build the model that the command line names and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m conflux_ray.models", description=__doc__)
    models = parser.add_subparsers(dest="model", required=True)
    models.add_parser("smollm2", help="SmolLM2-135M-Instruct in float32, from its PyPI package").add_argument(
        "dest", type=Path
    )
    padded = models.add_parser("smollm2-12-6", help="its equivalent form with 12 query and 6 KV heads")
    padded.add_argument("dest", type=Path)
    padded.add_argument("--original", type=Path, help="a folder made by `smollm2` (default: the shared model store's)")
    for architecture in tiny.ARCHITECTURES:
        _add_tiny(models.add_parser(f"tiny-{architecture}", help=f"a random {architecture} with peaked attention"))

    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        folder = _build(options)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(folder)
    print(f"{options.model}: ready in {time.monotonic() - started:.1f} s", file=sys.stderr)


def _add_tiny(parser: argparse.ArgumentParser) -> None:
    shape = tiny.TinyModel()
    parser.add_argument("dest", type=Path)
    parser.add_argument("--layers", type=int, default=shape.num_layers)
    parser.add_argument("--hidden", type=int, default=shape.hidden_size)
    parser.add_argument("--intermediate", type=int, default=shape.intermediate_size)
    parser.add_argument("--heads", type=int, default=shape.num_heads)
    parser.add_argument("--kv-heads", type=int, default=shape.num_kv_heads)
    parser.add_argument("--head-dim", type=int, default=shape.head_dim)
    parser.add_argument("--vocab", type=int, default=shape.vocab_size)
    parser.add_argument("--max-position", type=int, default=shape.max_position, help="tokens")
    parser.add_argument("--seed", type=int, default=shape.seed)
    parser.add_argument("--tokenizer-from", type=Path, help="a model folder whose tokenizer to use")


def _build(options: argparse.Namespace) -> Path:
    if options.model == "smollm2":
        return smollm2.fetch(options.dest)
    if options.model == "smollm2-12-6":
        return smollm2.fetch_padded(options.dest, options.original or store.model_dir(store.SMOLLM2), 12, 6)
    shape = tiny.TinyModel(
        architecture=options.model.removeprefix("tiny-"),
        num_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        vocab_size=options.vocab,
        max_position=options.max_position,
        seed=options.seed,
    )
    return tiny.write(options.dest, shape, tokenizer_from=options.tokenizer_from)


if __name__ == "__main__":
    main()
