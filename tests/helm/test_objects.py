"""What the chart makes is what Kubernetes and KubeRay take, for every values file and for all options at once."""

from __future__ import annotations

import functools
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.helm.chart import (
    CHART,
    NAMESPACE,
    ROOT,
    VALUES_FILES,
    at,
    merged,
    objects,
    of_kind,
    one,
    pod_templates,
    render,
    serve_config,
    values_of,
)

CRD = ROOT.parent / "shared" / "data" / "crds" / "ray.io_rayservices.yaml"
KUBERNETES = "1.30"
EVERY = [*VALUES_FILES, "everything"]
GPU = "nvidia.com/gpu"


@functools.cache
def rayservice_schema() -> dict[str, Any]:
    """KubeRay's schema of a RayService v1, that refuses unknown fields: the API server would drop them silently."""
    versions = yaml.load(CRD.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    [schema] = [v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1"]

    def close(node: Any) -> None:
        if isinstance(node, dict):
            if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
                node.setdefault("additionalProperties", False)
            for below in node.values():
                close(below)
        elif isinstance(node, list):
            for below in node:
                close(below)

    close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def path_of(error: jsonschema.ValidationError) -> str:
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


@pytest.mark.parametrize("name", EVERY)
def test_helm_lints_it(name: str) -> None:
    report = helm_python.lint(CHART, values_of(name), strict=True, namespace=NAMESPACE, kube_version=f"v{KUBERNETES}.0")
    assert report["errors"] == []
    assert {m["error"] for m in report["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("name", EVERY)
def test_the_rayservice_has_the_form_of_kuberay_s_crd(name: str) -> None:
    if not CRD.exists():
        pytest.skip("KubeRay's CRD is not beside the repository; CI that has it checks the RayService against it")
    errors = jsonschema.Draft202012Validator(rayservice_schema()).iter_errors(one(objects(name), "RayService"))
    assert [path_of(error) for error in errors] == []


def test_an_unknown_field_would_be_found() -> None:
    if not CRD.exists():
        pytest.skip("KubeRay's CRD is not beside the repository; CI that has it checks the RayService against it")
    service = merged(one(objects("values.yaml"), "RayService"), at("spec.rayClusterConfig.autoscaling", True))
    [error] = jsonschema.Draft202012Validator(rayservice_schema()).iter_errors(service)
    assert "autoscaling" in error.message


@pytest.mark.parametrize("name", EVERY)
def test_everything_else_has_the_form_of_kubernetes(name: str) -> None:
    checked = 0
    for document in objects(name):
        if document["apiVersion"].startswith(("ray.io/", "monitoring.coreos.com/")):
            continue
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        checked += 1
    assert checked


@pytest.mark.parametrize("name", EVERY)
def test_pods_have_the_form_of_kubernetes(name: str) -> None:
    for group, template in pod_templates(objects(name)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group} | template["metadata"]}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", EVERY)
def test_names_and_namespaces(name: str) -> None:
    found = objects(name)
    names = [(d["kind"], d["metadata"]["name"]) for d in found]
    assert len(names) == len(set(names))
    for document in found:
        namespace = document["metadata"]["namespace"]
        grafana = "monitoring" if name == "everything" and "-dashboard-" in document["metadata"]["name"] else NAMESPACE
        assert namespace == grafana


@pytest.mark.parametrize("name", EVERY)
def test_pods_run_without_root_and_write_only_to_volumes(name: str) -> None:
    for _, template in pod_templates(objects(name)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 1000
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        [container] = spec["containers"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert set(volumes) == {mount["name"] for mount in container["volumeMounts"]}
        assert "emptyDir" in mounts["/tmp"]  # Ray's sessions, HAProxy's sockets
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        home = next(e["value"] for e in container["env"] if e["name"] == "HOME")
        assert "emptyDir" in mounts[home]


@pytest.mark.parametrize("name", EVERY)
def test_an_instance_fits_into_a_pod(name: str) -> None:
    """STRICT_PACK: all GPUs and CPUs of an instance on one node."""
    from conflux_ray.config import parse

    found = objects(name)
    instance = parse(serve_config(found)["applications"][0]["args"]).instance
    for _, template in list(pod_templates(found))[1:]:
        limits = template["spec"]["containers"][0]["resources"]["limits"]
        assert limits == template["spec"]["containers"][0]["resources"]["requests"]
        if instance.device == "cuda" and GPU in limits:
            assert int(limits[GPU]) >= instance.num_workers
            assert int(limits["cpu"]) >= instance.num_workers + 1


@pytest.mark.parametrize("name", EVERY)
def test_no_stop_is_shorter_than_the_longest_stream(name: str) -> None:
    from conflux_ray.config import parse

    found = objects(name)
    longest = parse(serve_config(found)["applications"][0]["args"]).instance.drain_timeout_s
    assert one(found, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] >= longest
    for group, template in pod_templates(found):
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace >= longest + 90
        container = template["spec"]["containers"][0]
        hard_stop = next(e["value"] for e in container["env"] if e["name"] == "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S")
        assert int(hard_stop) >= longest
        if group == "head" and name in ("everything", "values-qwen3-14b-2gpu.yaml"):
            assert "lifecycle" not in container  # Ray's state is in Redis: the workers outlive the head
            continue
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert longest < int(command[command.index("--grace") + 1]) < grace


def test_the_commands_of_pods_exist() -> None:
    """`conflux drain` and the leave module take the arguments that the hooks give them."""
    from conflux_ray.cli import COMMANDS
    from conflux_ray.cluster import leave

    commands = [
        template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        for _, template in pod_templates(objects("values.yaml"))
    ]
    head, worker = commands
    assert head[:2] == ["conflux", "drain"]
    assert "drain" in {command.words for command in COMMANDS}
    assert worker[:3] == ["python", "-m", leave.__name__]
    with pytest.raises(SystemExit) as ended:
        leave.main([*worker[3:], "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize("name", EVERY)
def test_the_head_s_copy_of_the_serve_configuration_is_the_same(name: str) -> None:
    found = objects(name)
    [copy] = [d for d in of_kind(found, "ConfigMap") if "serve.yaml" in d["data"]]
    assert yaml.safe_load(copy["data"]["serve.yaml"]) == serve_config(found)
    head = dict(pod_templates(found))["head"]["spec"]
    [volume] = [v for v in head["volumes"] if v["name"] == "serve-config"]
    assert volume["configMap"]["name"] == copy["metadata"]["name"]


def test_keys_and_tokens_come_from_secrets() -> None:
    found = objects("everything")
    path = serve_config(found)["applications"][0]["args"]["ingress"]["api_key_file"]
    for _, template in pod_templates(found):
        [volume] = [v for v in template["spec"]["volumes"] if v["name"] == "api-keys"]
        assert volume["secret"]["secretName"] == "keys"
        container = template["spec"]["containers"][0]
        [mount] = [m for m in container["volumeMounts"] if m["name"] == "api-keys"]
        assert mount["readOnly"]
        assert path == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
        [token] = [e for e in container["env"] if e["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    cluster = one(found, "RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "token"}
    redis = cluster["gcsFaultToleranceOptions"]
    assert redis["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}
    assert "value" not in redis["redisPassword"]


def test_one_cluster_may_have_a_state_of_a_given_name() -> None:
    given = {"enabled": True, "redisAddress": "redis:6379", "externalStorageNamespace": "mine"}
    found = render(merged(at("gcsFaultTolerance", given), at("upgrade.strategy", "None")))
    options = one(found, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options == {"backend": "redis", "redisAddress": "redis:6379", "externalStorageNamespace": "mine"}


def test_without_secrets_none_is_asked_for() -> None:
    found = objects("values.yaml")
    assert "api_key_file" not in serve_config(found)["applications"][0]["args"]["ingress"]
    for _, template in pod_templates(found):
        assert "api-keys" not in {v["name"] for v in template["spec"]["volumes"]}
        assert "HF_TOKEN" not in {e["name"] for e in template["spec"]["containers"][0]["env"]}


def test_the_autoscaler_is_version_2_and_bounded_by_the_groups() -> None:
    cluster = one(objects("values-qwen3-14b-2gpu.yaml"), "RayService")["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
    [group] = cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 1, 4)


def test_without_the_autoscaler_a_group_has_its_replicas() -> None:
    found = render(at("workerGroups.gpu", {"replicas": 2, "minReplicas": 0, "maxReplicas": 5}))
    cluster = one(found, "RayService")["spec"]["rayClusterConfig"]
    assert not cluster["enableInTreeAutoscaling"]
    [group] = cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 2)


def test_a_group_has_the_defaults_that_it_does_not_change() -> None:
    templates = dict(pod_templates(objects("everything")))
    assert templates["gpu"]["spec"]["tolerations"][0]["key"] == GPU
    assert "tolerations" not in templates["ingress"]["spec"]
    assert GPU not in templates["ingress"]["spec"]["containers"][0]["resources"]["limits"]


def test_the_model_cache_is_kept_shared_and_replaceable() -> None:
    claim = one(objects("values.yaml"), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    for _, template in pod_templates(objects("values.yaml")):
        [volume] = [v for v in template["spec"]["volumes"] if v["name"] == "models"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mine = render(at("modelCache.existingClaim", "mine"))
    assert of_kind(mine, "PersistentVolumeClaim") == []
    assert "mine" in str(dict(pod_templates(mine))["gpu"]["spec"]["volumes"])


def test_a_change_of_the_deployment_leaves_the_cluster_as_it_is() -> None:
    """KubeRay makes a second cluster, with GPUs of its own, for any change below rayClusterConfig."""
    before = one(objects("values.yaml"), "RayService")["spec"]
    after = one(render(at("conflux.slo.tbt_s", 0.05)), "RayService")["spec"]
    assert before["serveConfigV2"] != after["serveConfigV2"]
    assert before["rayClusterConfig"] == after["rayClusterConfig"]


def test_ray_starts_behind_haproxy(tmp_path) -> None:
    """The shell command that KubeRay makes of the container's, on this machine: the variables reach `ray start`."""
    import subprocess
    import sys

    template = dict(pod_templates(objects("values.yaml")))["gpu"]
    [command] = template["spec"]["containers"][0]["command"]
    # As ray-operator's BuildPod joins them (`cmd && ulimit ...; ray start ...`), with `env` in the place of Ray.
    joined = f" {command}  && ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-1024}}; env"
    path = f"{sys.prefix}/bin:/usr/bin:/bin"
    shell = ["/bin/bash", "-c", "--", joined]
    done = subprocess.run(shell, capture_output=True, text=True, env={"PATH": path}, cwd=ROOT, check=True)
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert variables["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    failed = subprocess.run(shell, capture_output=True, text=True, env={"PATH": f"{tmp_path}:{path}"}, check=False)
    assert failed.returncode == 3, "Ray must not start without the variables"
    assert failed.stdout == ""


def test_notes_say_what_an_upgrade_costs_and_what_is_missing() -> None:
    import tests.helm.chart as this

    notes = this.chart().render({}, name="demo", namespace="llm")["conflux/templates/NOTES.txt"]
    for part in ("twice its GPUs", "apiKeys.secretName", "gcsFaultTolerance", "demo-conflux-serve-svc"):
        assert part in notes
    odd = merged(at("workerGroups.gpu.gpus", 5), at("workerGroups.gpu.cpu", 12))
    notes = this.chart().render(odd, name="demo", namespace="llm")["conflux/templates/NOTES.txt"]
    assert "1 GPU(s) of each pod are never used" in notes
