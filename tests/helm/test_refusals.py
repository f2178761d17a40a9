"""Values that cannot work are refused before anything reaches a cluster, with field, value and remedy."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.helm.chart import at, merged, render, values_of


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("conflux.instance.tensor_paralel", 2, "additional properties 'tensor_paralel' not allowed"),
        ("conflux.planner", {}, "at '/conflux': additional properties 'planner' not allowed"),
        ("conflux.model.enable_lora", True, "at '/conflux/model': additional properties 'enable_lora' not allowed"),
        ("conflux.model.path", 3, "at '/conflux/model/path': got number, want string"),
        ("conflux.model.path", None, "at '/conflux/model': missing property 'path'"),
        ("conflux.model.dtype", "float8", "at '/conflux/model/dtype': value must be one of 'auto', 'float32'"),
        ("conflux.model.max_model_len", 1, "at '/conflux/model/max_model_len': minimum: got 1, want 2"),
        ("conflux.instance.sp_degree", 0, "at '/conflux/instance/sp_degree': minimum: got 0, want 1"),
        ("conflux.instance.sp_degree", None, "at '/conflux/instance': missing property 'sp_degree'"),
        ("conflux.instance.sp_degree", "2", "at '/conflux/instance/sp_degree': got string, want integer"),
        (
            "conflux.instance.drain_timeout_s",
            -1,
            "'/conflux/instance/drain_timeout_s': exclusiveMinimum: got -1, want 0",
        ),
        ("conflux.instance.autoscaling", {"min_replicas": 2}, "missing property 'max_replicas'"),
        ("conflux.instance.kv_memory_gib", 0, "'/conflux/instance/kv_memory_gib': exclusiveMinimum: got 0, want 0"),
        ("conflux.scheduler.policy", "edf", "at '/conflux/scheduler/policy': value must be one of 'slo', 'fcfs'"),
        ("imagee", {}, "additional properties 'imagee' not allowed"),
        ("image.tag", 1.5, "at '/image/tag': got number, want string"),
        ("rayVersion", "latest", "at '/rayVersion': 'latest' does not match pattern"),
        ("service.port", 80, "at '/service/port': minimum: got 80, want 1,024"),
        ("modelCache.size", "200GB", "at '/modelCache/size': '200GB' does not match pattern"),
        ("modelCache.accessModes", [], "at '/modelCache/accessModes': minItems: got 0, want 1"),
        ("head.rayStartParams", {"port": 6379}, "at '/head/rayStartParams/port': got number, want string"),
        ("workerGroups.gpu.cpu", "8", "at '/workerGroups/gpu/cpu': got string, want integer"),
        ("workerGroups.gpu.gpu", 2, "additional properties 'gpu' not allowed"),
        (
            "workerGroups.second",
            {"gpus": 2},
            "at '/workerGroups/second': missing properties 'replicas', 'cpu', 'memory'",
        ),
        ("workerGroups.Second", {}, "'Second' does not match pattern"),
        (
            "gcsFaultTolerance.redisAddress",
            "redis",
            "at '/gcsFaultTolerance/redisAddress': 'redis' does not match pattern",
        ),
        ("upgrade.strategy", "Recreate", "at '/upgrade/strategy': value must be one of 'NewCluster'"),
        ("monitoring.interval", "often", "at '/monitoring/interval': 'often' does not match pattern"),
        ("monitoring.labels", {"release": 1}, "at '/monitoring/labels/release': got number, want string"),
    ],
)
def test_the_schema_names_the_place_and_the_rule(path: str, value: object, expected: str) -> None:
    assert expected in refusal(at(path, value))


CPU = values_of("values-cpu.yaml")
NONE = at("workerGroups.gpu.enabled", False)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            at("workerGroups.gpu.gpus", 1),
            "workerGroups.gpu.gpus=1: all workers of an instance share one node (STRICT_PACK), and an instance has "
            "sp_degree x tensor_parallel = 2 x 1 = 2 with a GPU each; raise it to a multiple of 2, or lower "
            "conflux.instance.sp_degree or tensor_parallel",
        ),
        (
            merged(at("conflux.instance.sp_degree", 4), at("conflux.instance.tensor_parallel", 2)),
            "sp_degree x tensor_parallel = 4 x 2 = 8 with a GPU each; raise it to a multiple of 8",
        ),
        (
            at("workerGroups.gpu.cpu", 2),
            "workerGroups.gpu.cpu=2: 1 instance(s) in a pod take a CPU for each of 2 workers and one more each; raise "
            "it to at least 3",
        ),
        (
            at("conflux.instance.num_replicas", 2),
            "conflux.instance.num_replicas=2: the worker groups have GPUs for 1 instance(s) of 2 workers; raise "
            "replicas or the size of a group",
        ),
        (
            at("conflux.instance.autoscaling", {"max_replicas": 3}),
            "conflux.instance.autoscaling.max_replicas=3: the worker groups have GPUs for 1 instance(s) of 2 workers; "
            "raise replicas or the size of a group, or set autoscaler.enabled",
        ),
        (
            merged(at("autoscaler.enabled", True), at("conflux.instance.autoscaling", {"max_replicas": 3})),
            "conflux.instance.autoscaling.max_replicas=3: the worker groups have GPUs for 1 instance(s) of 2 workers; "
            "raise maxReplicas",
        ),
        (
            at("conflux.instance.autoscaling", {"min_replicas": 3, "max_replicas": 1}),
            "conflux.instance.autoscaling.max_replicas=1: below min_replicas=3; raise it",
        ),
        (
            at("conflux.ingress.num_replicas", 20),
            "conflux.ingress.num_replicas=20: instances and ingresses take 23 CPUs, the worker groups have 12; "
            "raise cpu of a group",
        ),
        (
            at("conflux.instance.device", "auto"),
            "conflux.instance.device=auto: the head would decide before GPU workers",
        ),
        (at("conflux.instance.device", "cpu"), "workerGroups.gpu.gpus=2: conflux.instance.device=cpu uses none"),
        (NONE, "workerGroups: none is enabled; add one"),
        (
            merged(NONE, at("workerGroups.cpu", {"replicas": 2, "cpu": 8, "memory": "8Gi"})),
            "conflux.instance.num_replicas=1: the worker groups have GPUs for 0 instance(s) of 2 workers",
        ),
        (
            merged(CPU, at("conflux.instance.sp_degree", 30)),
            "conflux.instance.num_replicas=1: the worker groups have CPUs for 0 instance(s) of 30 workers",
        ),
        (
            merged(at("autoscaler.enabled", True), at("workerGroups.gpu.replicas", 5)),
            "workerGroups.gpu.replicas=5: not between minReplicas=1 and maxReplicas=1; correct one of them",
        ),
        (
            at("drain.terminationGracePeriodSeconds", 600),
            "drain.terminationGracePeriodSeconds=600: shorter than the longest stream, "
            "conflux.instance.drain_timeout_s=600, and 90 s to stop; raise it to at least 690",
        ),
        (
            at("conflux.instance.drain_timeout_s", 1200.5),
            "drain.terminationGracePeriodSeconds=720: shorter than the longest stream, "
            "conflux.instance.drain_timeout_s=1201, and 90 s to stop; raise it to at least 1291",
        ),
        (
            at("upgrade.clusterDeletionDelaySeconds", 60),
            "upgrade.clusterDeletionDelaySeconds=60: the old cluster would go before the longest stream has ended, "
            "conflux.instance.drain_timeout_s=600; raise it to at least 600",
        ),
        (
            at("upgrade", {"strategy": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "istio"}),
            "upgrade.strategy=NewClusterWithIncrementalUpgrade: KubeRay needs Ray's autoscaler for it",
        ),
        (
            merged(
                at("autoscaler.enabled", True),
                at("upgrade", {"strategy": "NewClusterWithIncrementalUpgrade", "maxSurgePercent": 10}),
            ),
            "upgrade.stepSizePercent=20: above maxSurgePercent=10; lower it",
        ),
        (
            merged(at("apiKeys.secretName", "keys"), at("conflux.ingress.api_key_file", "/keys")),
            'conflux.ingress.api_key_file="/keys": apiKeys.secretName="keys" mounts the keys and names their file',
        ),
        (at("gcsFaultTolerance.enabled", True), 'gcsFaultTolerance.redisAddress="": Ray\'s state needs a Redis'),
        (
            at("gcsFaultTolerance", {"enabled": True, "redisAddress": "r:1", "externalStorageNamespace": "one"}),
            'gcsFaultTolerance.externalStorageNamespace="one": the two clusters of an upgrade would write the same',
        ),
        (at("head.rayStartParams.num-cpus", "4"), "head.rayStartParams.num-cpus: follows from the pod's resources"),
        (
            at("workerDefaults.rayStartParams.object-store-memory", "4"),
            "workerGroups.gpu.rayStartParams.object-store-memory: follows from the pod's resources",
        ),
        (
            at("workerGroups.gpu.sharedMemory", "512Mi"),
            "workerGroups.gpu.sharedMemory=512Mi: Ray's object store lies in it, objectStoreMemory=1024 MiB; raise it",
        ),
        (
            at("objectStoreMemory", 1 << 32),
            "head.sharedMemory=2Gi: Ray's object store lies in it, objectStoreMemory=4096",
        ),
        (at("fullnameOverride", "x" * 48), "KubeRay needs a name of at most 47 lower-case letters"),
        (at("fullnameOverride", "3b"), 'fullnameOverride="3b": KubeRay needs a name'),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_rule_between_values_names_both_and_a_remedy(values: dict[str, Any], expected: str) -> None:
    assert expected in refusal(values)


def test_all_broken_rules_are_named_at_once() -> None:
    message = refusal(
        merged(
            at("workerGroups.gpu.gpus", 1), at("drain.terminationGracePeriodSeconds", 90), at("fullnameOverride", "B")
        )
    )
    assert message.count("\n  - ") == 3
    assert message.index("These values cannot be served:") >= 0
