"""The rendered `serveConfigV2` is a configuration of ours, and `serve run` serves the one for the CPU."""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from conflux_ray.cluster import leave
from conflux_ray.config import ConfluxConfig, check_model, parse
from conflux_ray.models import store
from conflux_ray.models.tiny import TinyModel
from tests.config.test_config import QWEN3_14B
from tests.e2e.server import running
from tests.helm.chart import ROOT, VALUES_FILES, objects, serve_config

MODELS = {"Qwen/Qwen3-14B": QWEN3_14B, "tiny-llama": TinyModel().config()}


def configuration(name: str) -> ConfluxConfig:
    [application] = serve_config(objects(name))["applications"]
    assert application["import_path"] == "conflux_ray.app:build"
    assert application["route_prefix"] == "/"
    return parse(application["args"])


@pytest.mark.parametrize("name", [*VALUES_FILES, "everything"])
def test_it_is_a_configuration_that_its_model_can_be_served_with(name: str) -> None:
    config = configuration(name)
    assert check_model(config, MODELS[config.model.path]).max_model_len > 0
    assert serve_config(objects(name))["http_options"]["host"] == "0.0.0.0"


def test_the_two_gpu_values_serve_what_the_deployment_of_that_name_does() -> None:
    deployment = yaml.safe_load((ROOT / "deployments" / "qwen3-14b-2gpu.yaml").read_text())
    theirs = parse(deployment["applications"][0]["args"]).model_dump()
    ours = configuration("values-qwen3-14b-2gpu.yaml").model_dump()
    differing = {
        f"{section}.{key}"
        for section, values in theirs.items()
        for key, value in values.items()
        if ours[section][key] != value
    }
    # What a cluster adds: more instances, time to download, keys.
    assert differing == {
        "instance.autoscaling",
        "instance.start_timeout_s",
        "ingress.api_key_file",
    }


@pytest.mark.heavy
def test_the_cpu_values_start_and_answer(tmp_path: Path) -> None:
    store.model_dir("tiny-llama")
    deployment = tmp_path / "rendered.yaml"
    deployment.write_text(yaml.safe_dump(serve_config(objects("values-cpu.yaml"))))
    with running(tmp_path, 18500, deployment=str(deployment)) as server:
        models = httpx.get(f"{server.url}/v1/models", timeout=10).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        body = {"model": "tiny", "prompt": [7, 8, 9, 10], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        # What a pod's preStop hook waits for goes by these names.
        titles = set()
        for process in server.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
                titles.add(" ".join(process.cmdline()))
        held = {title for title in titles if title.startswith(leave.SERVING)}
        for name in ("ServeReplica:conflux:ingress", "ServeReplica:conflux:instance", "HAProxyManager"):
            assert any(name in title for title in held), (name, titles)
