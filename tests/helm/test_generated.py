"""What the chart takes from elsewhere is fresh: its schema, its tables, its dashboards, its versions."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml

import conflux_ray
from conflux_ray.config import ConfigError, ConfluxConfig, parse
from tests.helm.chart import CHART, ROOT, VALUES_FILES, at, chart, merged, render, values_of

_spec = importlib.util.spec_from_file_location("chart_generate", ROOT / "helm" / "generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


def test_generated_files_are_fresh() -> None:
    stale = [str(path.relative_to(ROOT)) for path in generate.stale()]
    assert stale == [], "run `make chart` and commit what it writes"


def test_a_value_without_a_description_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head\.new has no `# --` comment"):
        generate.chart_values("head:\n  # -- CPUs.\n  cpu: 2\n\n  new: 3\n")


def fields(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """All leaves of a configuration schema by path, references followed."""
    found: dict[str, dict[str, Any]] = {}
    for key, below in node["properties"].items():
        options = [o for o in below.get("anyOf", [below]) if o != {"type": "null"}]
        reference = options[0].get("$ref")
        if reference:
            section = schema.get("$defs", schema.get("definitions"))[reference.rpartition("/")[2]]
            found |= fields(schema, section, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = options[0]
    return found


def test_the_schema_of_the_deployment_is_the_configuration_s() -> None:
    """Same keys, and the same limits on each; the chart's own rule is only which keys must be there."""
    shipped = json.loads(generate.values_schema())
    ours = fields(shipped, shipped["definitions"]["ConfluxConfig"])
    pydantic = ConfluxConfig.model_json_schema()
    theirs = fields(pydantic, pydantic)
    assert ours.keys() == theirs.keys()
    limits = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    for path, field in theirs.items():
        assert {k: ours[path][k] for k in limits if k in ours[path]} == {k: field[k] for k in limits if k in field}, (
            path
        )
    for name, section in shipped["definitions"].items():
        if name[0].isupper():
            assert section["additionalProperties"] is False, name


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"path": "m", "max_model_len": 1}},
        {"model": {}},
        {"instance": {"sp_degree": 0}},
        {"instance": {"gpu_memory_utilization": 1.5}},
        {"instance": {"autoscaling": {}}},
        {"slo": {"ttft_s": 0}},
        {"scheduler": {"policy": "edf"}},
        {"limits": {"max_body_bytes": 1}},
        {"ingress": {"num_replicas": 0}},
        {"nothing": 1},
    ],
    ids=str,
)
def test_what_the_configuration_refuses_the_schema_refuses_too(change: dict[str, Any]) -> None:
    base = values_of("values.yaml")["conflux"]
    values = {**base, **{k: {**base.get(k, {}), **v} if isinstance(v, dict) and v else v for k, v in change.items()}}
    with pytest.raises(ConfigError):
        parse(values)
    schema = chart().schema
    assert schema is not None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, {"$ref": "#/definitions/ConfluxConfig", "definitions": schema["definitions"]})


def test_defaults_that_the_chart_repeats_are_the_configuration_s() -> None:
    theirs = {path: field.get("default", ...) for path, field in leaves(ConfluxConfig.model_json_schema())}
    differing = set()
    for path, value in walk(values_of("values.yaml")["conflux"]):
        if theirs[path] != value:
            differing.add(path)
    assert differing == {"model.path", "instance.sp_degree", "instance.device"}


def leaves(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(fields(schema, schema).items())


def walk(values: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in values.items():
        found += walk(value, f"{path}{key}.") if isinstance(value, dict) else [(f"{path}{key}", value)]
    return found


def test_the_readme_names_every_values_file() -> None:
    text = (CHART / "README.md").read_text()
    assert [name for name in VALUES_FILES if f"`{name}`" not in text] == []


def test_versions_agree() -> None:
    """Chart, image, and the Ray of both locks: KubeRay decides by rayVersion what it may ask of the pods."""
    assert chart().metadata["appVersion"] == conflux_ray.__version__
    ray = f"ray=={values_of('values.yaml')['rayVersion']}"
    for lock in ("cpu", "gpu"):
        lines = (ROOT / "locks" / f"{lock}.txt").read_text().splitlines()
        assert any(re.match(rf"{re.escape(ray)}(\[|$| )", line.replace("[serve]", "")) for line in lines), lock
    assert values_of("values-cpu.yaml")["image"]["tag"] == f"{conflux_ray.__version__}-cpu"


def test_the_image_s_files_exist_and_its_user_is_the_pods() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (ROOT / path).exists(), path
    security = values_of("values.yaml")["podSecurityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in text
    for variable in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert variable == "${PYTHON}"
    assert "ARG PYTHON=python:3.12-slim" in text


def test_tools_of_the_tests_stay_out_of_the_image() -> None:
    """What locks/cpu.in lists for development, but for what the product imports as well."""
    names = re.search(r"grep -vE '\^\(([^)]*)\)==' locks/cpu\.txt", (ROOT / "Dockerfile").read_text())
    assert names is not None
    tools = (ROOT / "locks" / "cpu.in").read_text().partition("# --- development")[2].splitlines()[1:]
    listed = {re.split(r"[=<>[]", line)[0].lower() for line in tools if not line.startswith("#")}
    assert set(names[1].split("|")) == listed - {"httpx", "jsonschema"}
    locked = {line.split("==")[0] for line in (ROOT / "locks" / "cpu.txt").read_text().splitlines()}
    assert listed <= locked


def helm_commands(document: str) -> list[list[str]]:
    """Words of each `helm install` or `helm upgrade` of this chart in a page's console blocks."""
    console = "\n".join(re.findall(r"```console\n(.*?)```", document, re.DOTALL)).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in console.splitlines() if line.startswith("$ helm ")]
    return [words for words in map(shlex.split, lines) if "helm/conflux" in words]


@pytest.mark.parametrize("page", ["docs/kubernetes.md", "helm/conflux/README.md"])
def test_the_documentation_s_commands_work(page: str) -> None:
    """Each renders with its values, or is refused where the page shows the refusal."""
    text = (ROOT / page).read_text()
    commands = helm_commands(text)
    assert commands
    installed: dict[str, Any] = {}
    for words in commands:
        values: dict[str, Any] = dict(installed) if "--reuse-values" in words else {}
        for option, argument in itertools.pairwise(words):
            if option == "--values":
                values = merged(values, yaml.safe_load((ROOT / argument).read_text()))
            elif option == "--set":
                values = merged(values, helm_python.parse_set_string(argument))
            elif option == "--set-json":
                path, _, value = argument.partition("=")
                values = merged(values, at(path, json.loads(value)))
        if "workerGroups.gpu.gpus=1" in words:
            with pytest.raises(helm_python.HelmError, match="STRICT_PACK"):
                render(values)
            assert "STRICT_PACK" in text
            continue
        render(values)
        if words[1] == "install" and not installed:
            installed = values
    for path in re.findall(r"\]\(([^):#]+)", text):
        assert (ROOT / page).parent.joinpath(path).exists(), path


def test_no_values_file_is_left_out() -> None:
    assert VALUES_FILES == ["values-cpu.yaml", "values-qwen3-14b-2gpu.yaml", "values.yaml"]
    assert all(isinstance(yaml.safe_load(Path(CHART / name).read_text()), dict) for name in VALUES_FILES)
