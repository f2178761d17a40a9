"""The servers of a comparison as data: what each is, how it is started, and what the simulator calls it.

All of them get the same model, length and memory share, and no prefix cache unless they say so. What differs is in a
`Contender`: a list of them for any number of GPUs is `standard`, another comes from a YAML file (`read`).
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from conflux_ray.config import ConfigError, parse
from conflux_ray.serving.environment import serve_environment

VLLM_POLICIES = ("fcfs", "priority")
CONFLUX_POLICIES = ("slo", "fcfs", "srpt", "plain")
ITERATIONS = ".iterations.jsonl"
"""End of the names of iteration logs."""
_METRICS_OFFSET = 80
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class ContenderError(ValueError):
    """A contender that cannot be started; the message names it, the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Site:
    """What all contenders have in common.

    Args:
        folder: of the model.
        model: its name in the API.
        gpus: of the machine that a contender may take; on a CPU, worker processes.
        device: "cuda" or "cpu".
        max_model_len: tokens.
        load_format: of the weights: "auto" or "dummy".
        dtype: of the weights.
        memory_share: of each GPU's memory, 0..1.
        kv_memory_gib: of each CPU worker.
        ttft: promised to every request, seconds.
        tbt: promised to every request, seconds.
        port: of the first server; replicas take the next ones.
    """

    folder: str
    model: str
    gpus: int
    device: str
    max_model_len: int
    load_format: str = "auto"
    dtype: str = "bfloat16"
    memory_share: float = 0.9
    kv_memory_gib: float = 0.25
    ttft: float = 2.0
    tbt: float = 0.1
    port: int = 18400

    def describe(self) -> dict[str, Any]:
        """What points must share to be compared."""
        return {name: value for name, value in asdict(self).items() if name not in ("folder", "port", "ttft", "tbt")}


@dataclass(frozen=True, slots=True)
class Contender:
    """One server, or several replicas of it.

    Args:
        name: in reports and of its folder.
        kind: "vllm" or "conflux".
        policy: one of `VLLM_POLICIES` or `CONFLUX_POLICIES`. With "priority" every request says its prompt length.
        tensor_parallel: GPUs of a vLLM server; of one logical rank of Conflux, whose SP degree takes the rest.
        replicas: servers of vLLM behind the client's shortest queue; instances of Conflux behind its own router.
        budget: tokens of an iteration: vLLM's `--max-num-batched-tokens`, Conflux's `scheduler.max_prefill_tokens`.
        prefix_cache: of vLLM: automatic prefix caching.
        flags: added to vLLM's command line.
        args: of Conflux: sections of the deployment's args, and the keys to set in each.
        environment: variables to add.
        rates: requests per second; none: those of the command line.

    Raises:
        ContenderError: these do not make a server.
    """

    name: str
    kind: str
    policy: str
    tensor_parallel: int = 1
    replicas: int = 1
    budget: int = 2048
    prefix_cache: bool = False
    flags: tuple[str, ...] = ()
    args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ContenderError(f"name={self.name!r}: letters, digits and ._+- only; it names a folder")
        policies = {"vllm": VLLM_POLICIES, "conflux": CONFLUX_POLICIES}.get(self.kind)
        if policies is None:
            raise ContenderError(f"{self.name}: kind={self.kind!r} must be vllm or conflux")
        if self.policy not in policies:
            raise ContenderError(f"{self.name}: policy={self.policy!r} must be one of {', '.join(policies)}")
        if min(self.tensor_parallel, self.replicas, self.budget) < 1:
            raise ContenderError(f"{self.name}: tensor_parallel, replicas and budget must be at least 1")
        if self.kind == "conflux" and self.flags:
            raise ContenderError(f"{self.name}: flags are vLLM's; set args for Conflux")
        if self.kind == "conflux" and self.prefix_cache:
            raise ContenderError(f"{self.name}: Conflux has no prefix cache; leave prefix_cache out")
        if self.kind == "vllm" and self.args:
            raise ContenderError(f"{self.name}: args are Conflux's; set flags for vLLM")
        if any(rate <= 0 for rate in self.rates):
            raise ContenderError(f"{self.name}: rates={list(self.rates)} must be positive, requests per second")

    @property
    def prompt_priority(self) -> bool:
        """Whether requests carry their prompt length as priority."""
        return self.policy == "priority"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; a difference in it is a different contender. Rates are not part of what it is."""
        values = asdict(self)
        del values["rates"]
        if not self.prefix_cache:  # as in the folders from before there was one
            del values["prefix_cache"]
        return values | {"flags": list(self.flags)}


@dataclass(frozen=True, slots=True)
class Launch:
    """How one process of a contender is started.

    Args:
        command: its words.
        environment: variables to add to this process's.
        url: where it answers.
        deployment: the Ray Serve configuration that the command's last word names; None if there is none.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    url: str
    deployment: Mapping[str, Any] | None = None


def launches(contender: Contender, site: Site, folder: Path) -> list[Launch]:
    """How to start a contender.

    Args:
        contender: to start.
        site: what all have in common.
        folder: for a deployment file.

    Raises:
        ContenderError: it does not fit the site.
    """
    used = contender.tensor_parallel * contender.replicas
    if used > site.gpus or site.gpus % (contender.tensor_parallel if contender.kind == "vllm" else used):
        raise ContenderError(
            f"{contender.name}: tensor_parallel={contender.tensor_parallel} x replicas={contender.replicas} does not "
            f"fit {site.gpus} GPUs"
        )
    if contender.kind == "vllm":
        return [_vllm(contender, site, number) for number in range(contender.replicas)]
    return [_conflux(contender, site, folder)]


def _vllm(contender: Contender, site: Site, number: int) -> Launch:
    if site.device != "cuda":
        raise ContenderError(f"{contender.name}: the vLLM that is installed here runs on GPUs only; leave it out")
    port = site.port + number
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", site.folder),
        *("--served-model-name", site.model),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--load-format", site.load_format, "--dtype", site.dtype),
        *("--max-model-len", str(site.max_model_len)),
        *("--gpu-memory-utilization", str(site.memory_share)),
        *("--tensor-parallel-size", str(contender.tensor_parallel)),
        *("--max-num-batched-tokens", str(contender.budget)),
        *("--scheduling-policy", contender.policy),
        "--enable-prefix-caching" if contender.prefix_cache else "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
        *contender.flags,
    ]
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if contender.replicas > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = visible.split(",") if visible else [str(k) for k in range(site.gpus)]
        first = number * contender.tensor_parallel
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + contender.tensor_parallel])
    return Launch(tuple(command), environment | dict(contender.environment), f"http://127.0.0.1:{port}")


def deployment_of(contender: Contender, site: Site, folder: Path | None = None) -> dict[str, Any]:
    """The Ray Serve configuration of a Conflux contender.

    Args:
        contender: whose.
        site: what all have in common.
        folder: for its iteration log, NAME`ITERATIONS`; None keeps none, and neither do several instances.

    Raises:
        ContenderError: `args` are not the schema's.
    """
    instance: dict[str, Any] = {
        "sp_degree": site.gpus // (contender.tensor_parallel * contender.replicas),
        "tensor_parallel": contender.tensor_parallel,
        "device": site.device,
    }
    if contender.replicas > 1:
        instance["num_replicas"] = contender.replicas
    if site.device == "cuda":
        instance |= {"gpu_memory_utilization": site.memory_share, "max_num_seqs": 256}
    else:
        instance["kv_memory_gib"] = site.kv_memory_gib
    args: dict[str, dict[str, Any]] = {
        "model": {
            "path": site.folder,
            "served_model_name": site.model,
            "max_model_len": site.max_model_len,
            "load_format": site.load_format,
            "dtype": site.dtype,
        },
        "instance": instance,
        "slo": {"ttft_s": site.ttft, "tbt_s": site.tbt},
        "scheduler": {"policy": contender.policy, "max_prefill_tokens": contender.budget},
    }
    if folder is not None and {**instance, **contender.args.get("instance", {})}.get("num_replicas", 1) == 1:
        # Absolute: the instance works in a folder of Ray's.
        instance["iteration_log"] = str(folder.resolve() / f"{contender.name}{ITERATIONS}")
    for section, values in contender.args.items():
        args.setdefault(section, {}).update(values)
    try:
        parse(args)
    except ConfigError as error:
        raise ContenderError(f"{contender.name}: {error}") from None
    application = {"name": "conflux", "route_prefix": "/", "import_path": "conflux_ray.app:build", "args": args}
    return {"http_options": {"host": "127.0.0.1", "port": site.port}, "applications": [application]}


def serve_command(path: Path) -> tuple[str, ...]:
    """`serve run` of a deployment file."""
    # Not the `serve` script: where packages lie in a folder of their own there is none.
    return (sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(path))


def _conflux(contender: Contender, site: Site, folder: Path) -> Launch:
    deployment = deployment_of(contender, site, folder)
    path = folder / f"{contender.name}.yaml"
    environment = {
        **serve_environment(),
        # HAProxy's own pages, which another server on this machine may have on their usual ports.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(site.port + _METRICS_OFFSET),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(site.port + _METRICS_OFFSET + 1),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **contender.environment,
    }
    return Launch(serve_command(path), environment, f"http://127.0.0.1:{site.port}", deployment)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulator calls a contender.

    Args:
        system: its name there.
        options: of the system.
        gpus: of one instance.
        instances: behind the global router.
    """

    system: str
    options: dict[str, Any]
    gpus: int
    instances: int = 1


def simulated(contender: Contender, gpus: int) -> Simulated | None:
    """What the simulator calls a contender on so many GPUs; None if it has no such system."""
    if contender.kind == "conflux":
        name = {"slo": "conflux", "fcfs": "conflux-fcfs", "srpt": "conflux-srpt"}.get(contender.policy)
        options: dict[str, Any] = {"base_tp": contender.tensor_parallel}
        if not contender.args.get("instance", {}).get("late_planning", True):
            options["lead"] = math.inf
        if name is None:
            return None
        return Simulated(name, options, gpus // contender.replicas, contender.replicas)
    suffix = "-priority" if contender.prompt_priority else ""
    system = "data-parallel" if contender.replicas > 1 else "chunked"
    options = {"tp": contender.tensor_parallel, "budget": contender.budget}
    return Simulated(f"{system}{suffix}", options, contender.tensor_parallel * contender.replicas)


def standard(
    gpus: int, device: str, budgets: Sequence[int], conflux_budget: int, prefix_cache: bool = False
) -> list[Contender]:
    """The contenders of a machine: Conflux over all GPUs and as instances of one, vLLM the same, FCFS and by priority.

    Args:
        gpus: of the machine.
        device: "cuda" or "cpu".
        budgets: token budgets of vLLM, each a contender.
        conflux_budget: most prefill tokens of a Conflux iteration; its scheduler takes fewer to keep the TBT.
        prefix_cache: whether every vLLM is there twice, without and, its name ending in `-cached`, with its cache.
    """
    found = [Contender(f"conflux-{policy}", "conflux", policy, budget=conflux_budget) for policy in ("slo", "fcfs")]
    if device != "cuda":
        return found
    if gpus > 1:
        found.append(Contender(f"conflux-{gpus}x-slo", "conflux", "slo", 1, gpus, conflux_budget))
    for budget in budgets:
        for policy, mark in (("fcfs", ""), ("priority", "-priority")):
            found.append(Contender(f"vllm-tp{gpus}{mark}-{budget}", "vllm", policy, gpus, 1, budget))
            if gpus > 1:
                found.append(Contender(f"vllm-{gpus}x{mark}-{budget}", "vllm", policy, 1, gpus, budget))
    if prefix_cache:
        found += [replace(c, name=f"{c.name}-cached", prefix_cache=True) for c in found if c.kind == "vllm"]
    return found


def read(path: Path) -> list[Contender]:
    """Contenders from a YAML file: a list of objects with the fields of `Contender`.

    Raises:
        ContenderError: it is none.
    """
    try:
        rows = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ContenderError(f"{path}: cannot be read ({error})") from None
    if not isinstance(rows, list) or not rows:
        raise ContenderError(f"{path}: must be a list of contenders")
    known = [f.name for f in fields(Contender)]
    found = []
    for row in rows:
        if not isinstance(row, dict) or not {"name", "kind", "policy"} <= row.keys():
            raise ContenderError(f"{path}: {row!r} needs name, kind and policy")
        unknown = sorted(row.keys() - set(known))
        if unknown:
            raise ContenderError(f"{path}: {row['name']}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
        lists = {key: tuple(row[key]) for key in ("flags", "rates") if key in row}
        found.append(Contender(**{**row, **lists}))
    names = [c.name for c in found]
    if len(set(names)) < len(names):
        raise ContenderError(f"{path}: names must differ: {', '.join(names)}")
    return found
