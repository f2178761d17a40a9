"""`conflux`: the command line.

A subcommand is one line of `COMMANDS`: its words, the function that runs it, and its help. The function takes the
arguments after the words and returns an exit status or None; its module is imported when it is called.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conflux_ray import __version__


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    Args:
        words: as typed.
        target: `module:function`.
        summary: for the help text.
    """

    words: str
    target: str
    summary: str

    def load(self) -> Callable[[list[str]], int | None]:
        """Import the function."""
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)


COMMANDS = (
    Command("serve", "conflux_ray.launch:serve_main", "serve a deployment; on SIGTERM, let running requests end first"),
    Command("drain", "conflux_ray.launch:drain_main", "let a running server take no new requests, and wait"),
    Command("profile", "conflux_ray.profiling.command:main", "measure a latency profile of this machine, or check one"),
    Command("models", "conflux_ray.models.__main__:main", "write one of the package's models into a folder"),
    Command("simulate", "conflux_ray.simulator.commands.simulate:main", "serve a workload in simulated time"),
    Command("goodput", "conflux_ray.simulator.commands.goodput:main", "the largest rate at which promises are kept"),
    Command("plan", "conflux_ray.simulator.commands.plan:main", "the best system and layout for so many GPUs"),
    Command("figures", "conflux_ray.simulator.commands.figures:main", "the paper's figures, ours beside its numbers"),
    Command("bench scheduler", "conflux_ray.bench.scheduler:main", "what one scheduling step costs"),
    Command("bench gpu", "conflux_ray.bench.gpu:main", "how near an iteration comes to its own lower bound"),
    Command("bench compare", "conflux_ray.bench.compare:main", "Conflux and vLLM on this machine by the same requests"),
    Command("bench serve", "conflux_ray.bench.serve:main", "the rate at which a running server keeps its promises"),
    Command("bench routing", "conflux_ray.bench.routing:main", "spreading by queued work against by count or in turn"),
    Command("bench replay", "conflux_ray.bench.replay:main", "one trace through a live server and the simulator"),
    Command(
        "bench timeline", "conflux_ray.bench.timeline:main", "how an instance spent its time, from its iteration log"
    ),
    Command("bench metrics", "conflux_ray.metrics.bench:main", "what metrics cost an iteration and a token"),
    Command("bench stack", "conflux_ray.bench.stack:main", "what HTTP and Ray Serve add to an instance's delays"),
)


def build_parser() -> argparse.ArgumentParser:
    """All subcommands; each parses its own options."""
    parser = argparse.ArgumentParser(
        prog="conflux",
        description="ConfluxServe on Ray: LLM serving with Conflux Parallelism.",
        epilog="`conflux COMMAND --help` describes a command. `serve run deployments/conflux.yaml` starts a server.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"conflux {__version__}")
    root = parser.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for command in COMMANDS:
        group, _, name = command.words.rpartition(" ")
        if group and group not in groups:
            names = [c.words.removeprefix(f"{group} ") for c in COMMANDS if c.words.startswith(f"{group} ")]
            summary = f"one of: {', '.join(names)}"
            inner = root.add_parser(group, help=summary, description=summary.capitalize(), allow_abbrev=False)
            groups[group] = inner.add_subparsers(metavar="WHAT", required=True)
        leaf = groups.get(group, root).add_parser(name, help=command.summary, add_help=False, allow_abbrev=False)
        leaf.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: without the program's name; default: the process's.

    Returns:
        Exit status.
    """
    chosen, rest = build_parser().parse_known_args(argv)
    try:
        return chosen.command.load()(rest) or 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
