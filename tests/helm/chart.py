"""The chart through Helm's own engine, and what it renders."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "conflux"
VALUES_FILES = sorted(path.name for path in CHART.glob("values*.yaml"))
RELEASE, NAMESPACE = "demo", "llm"

EVERYTHING: dict[str, Any] = {
    "image": {"pullSecrets": ["pull"]},
    "apiKeys": {"secretName": "keys"},
    "hfToken": {"secretName": "hub"},
    "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
    "gcsFaultTolerance": {
        "enabled": True,
        "redisAddress": "redis:6379",
        "passwordSecretName": "redis",
        "username": "ray",
    },
    "auth": {"secretName": "token"},
    "autoscaler": {"enabled": True},
    "upgrade": {"strategy": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "istio"},
    "env": [{"name": "A", "value": "b"}],
    "head": {
        "nodeSelector": {"kind": "cpu"},
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "podLabels": {"team": "a"},
        "podAnnotations": {"note": "x"},
        "rayStartParams": {"block": "true"},
        "env": [{"name": "C", "value": "d"}],
    },
    "workerGroups": {
        "gpu": {
            "maxReplicas": 3,
            "nodeSelector": {"gpu": "h100"},
            "affinity": {"podAntiAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
            ],
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "podLabels": {"team": "a"},
            "podAnnotations": {"note": "x"},
            "rayStartParams": {"block": "true"},
            "env": [{"name": "E", "value": "f"}],
        },
        "ingress": {"replicas": 1, "cpu": 4, "memory": "8Gi", "tolerations": []},
    },
    "podDisruptionBudget": {"enabled": True},
    "networkPolicy": {"enabled": True, "clientNamespaceLabels": {"team": "a"}},
    "monitoring": {"dashboardNamespace": "monitoring"},
}
"""Every optional part at once."""


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def values_of(name: str) -> dict[str, Any]:
    """The values of a file of the chart, or `EVERYTHING`."""
    return EVERYTHING if name == "everything" else yaml.safe_load((CHART / name).read_text())


def merged(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, as several --values do."""
    result = dict(base)
    for change in changes:
        for key, value in change.items():
            below = result.get(key)
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def at(path: str, value: Any) -> dict[str, Any]:
    """As --set path=value."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects that `helm install` would send.

    Raises:
        helm_python.HelmError: Helm, the values' schema or a template refuses them.
    """
    chart().validate_schema(values)  # `helm install` does, rendering alone does not
    manifests = chart().render(values, name=RELEASE, namespace=NAMESPACE)
    return [
        document
        for path, text in sorted(manifests.items())
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


@functools.cache
def objects(name: str) -> list[dict[str, Any]]:
    """The objects of a values file, or of `EVERYTHING`; not to be changed."""
    return render(values_of(name))


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in found if document["kind"] == kind]


def one(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [document] = of_kind(found, kind)
    return document


def serve_config(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What Ray Serve gets."""
    return yaml.safe_load(one(found, "RayService")["spec"]["serveConfigV2"])


def pod_templates(found: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and pod template of the head and of each worker group."""
    cluster = one(found, "RayService")["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]
