"""The files in dashboards/ and docs/metrics.md are what the code makes, and speak only of metrics that exist."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from conflux_ray.metrics import definitions as m
from conflux_ray.metrics import document
from dashboards.__main__ import DASHBOARDS, FOLDER, path_of, text_of
from dashboards.panels import Dashboard

REPOSITORY = FOLDER.parent
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
LEGACY_PANELS = {"graph", "singlestat", "table-old", "grafana-piechart-panel", "grafana-worldmap-panel"}
COMMON = {*m.COMMON_LABELS, "ray_io_cluster", "le"}

dashboards = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.uid)


@dashboards
def test_the_json_is_fresh(dashboard: Dashboard) -> None:
    assert path_of(dashboard).read_text() == text_of(dashboard), "run `python -m dashboards` and commit what it writes"


def test_there_are_no_other_dashboards() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {path_of(dashboard).name for dashboard in DASHBOARDS}


def test_the_list_of_metrics_is_fresh() -> None:
    assert document.PATH.read_text() == document.text(), "run `python -m conflux_ray.metrics.document`"


@dashboards
def test_panels_are_described_and_have_units_and_no_legacy_type(dashboard: Dashboard) -> None:
    content = json.loads(text_of(dashboard))
    panels = [panel for panel in content["panels"] if panel["type"] != "row"]
    assert panels
    for panel in panels:
        assert panel["type"] not in LEGACY_PANELS
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert all(target["expr"] for target in panel["targets"])
    identities = [panel["id"] for panel in content["panels"]]
    assert len(set(identities)) == len(identities)
    assert {"datasource", "cluster", "model"} <= {v["name"] for v in content["templating"]["list"]}


@dashboards
def test_panels_fill_the_grid_without_overlap(dashboard: Dashboard) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(text_of(dashboard))["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= own


def expressions() -> list[str]:
    panels = [q.expression for d in DASHBOARDS for p in d.panels for q in p.queries]
    return panels + [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]


def test_queries_name_metrics_and_labels_that_exist() -> None:
    known = {metric.ray_name: metric for metric in m.all_metrics()}
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    for expression in expressions():
        used: set[str] = set()
        for name in re.findall(r"\bray_conflux_\w+", expression):
            base = name if name in known else re.sub(r"_(bucket|sum|count)$", "", name)
            assert base in known, name
            assert (known[base].kind is m.Kind.HISTOGRAM) == (base != name), name
            used |= set(known[base].labels)
        for name in re.findall(r"\bconflux:[\w:]+", expression):
            assert name in recorded, name
            used.add("slo_class")
        labels = re.findall(r"(\w+)=~?\"", expression)
        labels += [x.strip() for found in re.findall(r"by \(([^)]*)\)", expression) for x in found.split(",")]
        assert set(labels) <= used | COMMON, expression


def test_every_metric_is_shown_or_watched() -> None:
    text = "\n".join(expressions())
    assert [metric.name for metric in m.all_metrics() if metric.ray_name not in text] == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_runbook(alert: dict) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    path, anchor = alert["annotations"]["runbook_url"].split("#")
    headings = re.findall(r"^#+ (.*)$", (REPOSITORY / path).read_text(), re.MULTILINE)
    assert anchor in [re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing; `make prometheus` installs it as root on Debian")
    result = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr


def test_rules_and_scrape_configuration_are_valid() -> None:
    promtool("check", "rules", FOLDER / "alerts.yaml")
    promtool("check", "config", FOLDER / "prometheus.yml")


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    tests = Path(__file__).with_name("alerts_test.yaml")
    fired = {
        expected["alertname"]
        for test in yaml.safe_load(tests.read_text())["tests"]
        for expected in test["alert_rule_test"]
        if expected.get("exp_alerts")
    }
    assert fired == {rule["alert"] for rule in ALERTS}, "an alert without a test that makes it fire"
    bare = copy.deepcopy(RULES)
    for group in bare["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(bare))
    promtool("test", "rules", shutil.copy(tests, tmp_path))
