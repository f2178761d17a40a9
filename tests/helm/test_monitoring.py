"""Prometheus finds the pods and the rules, Grafana the dashboards. Without a schema of them, each field is named."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.helm.chart import NAMESPACE, ROOT, at, objects, of_kind, one, pod_templates, render

ALERTS = ROOT / "dashboards" / "alerts.yaml"


@pytest.mark.parametrize("name", ["values.yaml", "everything"])
def test_the_pod_monitor_selects_head_and_workers_and_keeps_the_cluster_s_name(name: str) -> None:
    found = objects(name)
    monitor = one(found, "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    spec = monitor["spec"]
    assert set(spec) == {"namespaceSelector", "selector", "podMetricsEndpoints"}
    assert spec["namespaceSelector"] == {"matchNames": [NAMESPACE]}
    wanted = spec["selector"]["matchLabels"].items()
    for _, template in pod_templates(found):
        assert wanted <= template["metadata"]["labels"].items()
    endpoints = spec["podMetricsEndpoints"]
    [scrape] = yaml.safe_load((ROOT / "dashboards" / "prometheus.yml").read_text())["scrape_configs"]
    assert [e["port"] for e in endpoints] == ["metrics", *(["as-metrics"] if name == "everything" else [])]
    for endpoint in endpoints:
        assert set(endpoint) == {"port", "interval", "relabelings", "metricRelabelings"}
        assert endpoint["relabelings"] == [
            {
                "action": "replace",
                "sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"],
                "targetLabel": "ray_io_cluster",
            }
        ]
        assert endpoint["metricRelabelings"] == scrape["metric_relabel_configs"]
    ports = {p["name"] for _, t in pod_templates(found) for p in t["spec"]["containers"][0]["ports"]}
    assert {e["port"] for e in endpoints} <= ports


def test_every_pod_has_the_metrics_port() -> None:
    for _, template in pod_templates(objects("everything")):
        ports = {p["name"]: p["containerPort"] for p in template["spec"]["containers"][0]["ports"]}
        assert ports["metrics"] == 8080


def test_the_rules_are_those_of_the_alert_file() -> None:
    rule = one(objects("values.yaml"), "PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert set(rule["spec"]) == {"groups"}
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert rule["spec"]["groups"]
    for group in rule["spec"]["groups"]:
        assert set(group) <= {"name", "interval", "rules", "limit", "query_offset", "labels"}
        for entry in group["rules"]:
            assert ("alert" in entry) != ("record" in entry)
            assert isinstance(entry["expr"], str)


def test_each_dashboard_is_a_config_map_that_grafana_s_sidecar_finds() -> None:
    sources = {path.name: json.loads(path.read_text()) for path in (ROOT / "dashboards").glob("*.json")}
    shipped = {}
    for document in of_kind(objects("values.yaml"), "ConfigMap"):
        if "-dashboard-" not in document["metadata"]["name"]:
            continue
        assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert document["metadata"]["annotations"]["grafana_folder"] == "ConfluxServe"
        [(name, text)] = document["data"].items()
        assert len(text) < 1_000_000, "a ConfigMap holds 1 MiB"
        shipped[name] = json.loads(text)
    assert shipped
    assert shipped == sources


def test_each_part_can_be_left_out() -> None:
    for part, kind in (("podMonitor", "PodMonitor"), ("prometheusRule", "PrometheusRule")):
        assert of_kind(render(at(f"monitoring.{part}", False)), kind) == []
    maps = of_kind(render(at("monitoring.dashboards", False)), "ConfigMap")
    assert [m["metadata"]["name"] for m in maps] == ["demo-conflux-serve"]


def test_the_network_policy_lets_prometheus_and_kuberay_in() -> None:
    rules = one(objects("everything"), "NetworkPolicy")["spec"]["ingress"]
    ports = {
        tuple(rule["from"][0].get("namespaceSelector", {}).get("matchLabels", {}).values()): [
            p["port"] for p in rule.get("ports", [])
        ]
        for rule in rules
    }
    assert ports == {(): [], ("a",): [8000], ("kuberay-system",): [8265, 8000], ("monitoring",): [8080, 44217]}
