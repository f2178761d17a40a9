"""A real Prometheus on a free port, with the shipped configuration and rules, made impatient for tests."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from dashboards.__main__ import DASHBOARDS, FOLDER

MISSING = "prometheus is missing; `make prometheus` installs it as root on Debian"
DISCOVERY = "prom_metrics_service_discovery.json"


def installed() -> bool:
    return shutil.which("prometheus") is not None


class Prometheus:
    """Asks a Prometheus server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=60)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        return self._get("query", query=expression)

    def range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series of a range query; times are seconds since the epoch."""
        return self._get("query_range", query=expression, start=start, end=end, step=step)

    def value(self, expression: str) -> float:
        """The value of a query with one series; 0 if it has none."""
        found = self.query(expression)
        assert len(found) <= 1, f"{expression}: {found}"
        return float(found[0]["value"][1]) if found else 0.0

    def _get(self, what: str, **parameters: Any) -> list[dict[str, Any]]:
        answer = self._http.get(f"/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]["result"]


def discovery_file(server: psutil.Process) -> Path:
    """The file in which the Ray cluster that the process started lists its metrics agents."""
    for child in server.children(recursive=True):
        if child.name() == "raylet":
            for word in child.cmdline():
                if match := re.match(r"--session[-_]dir=(.*)", word):
                    return Path(match[1]) / DISCOVERY
    raise AssertionError("serve run has no raylet")


@contextmanager
def running(folder: Path, discovery: Path, targets: Sequence[str] = (), seconds: int = 1) -> Iterator[Prometheus]:
    """Prometheus with dashboards/prometheus.yml and dashboards/alerts.yaml.

    Args:
        folder: for its configuration, log and data.
        discovery: takes the place of Ray's file in /tmp/ray, where another cluster may have put its own.
        targets: more to scrape.
        seconds: between scrapes and between evaluations.
    """
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{seconds}s", "evaluation_interval": f"{seconds}s"}
    (ray,) = config["scrape_configs"]
    (files,) = ray["file_sd_configs"]
    files["files"] = [str(discovery)]
    files["refresh_interval"] = "1s"
    if targets:
        config["scrape_configs"].append({"job_name": "more", "static_configs": [{"targets": list(targets)}]})
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    for group in rules["groups"]:
        group.pop("interval", None)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{url}/-/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, "prometheus does not become ready"
            time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(30)


def filled(expression: str, rate: str = "1m", shown: str = "10m") -> str:
    """A panel's query with its variables set to all there is."""
    values = {"$__rate_interval": rate, "$__range": shown, "$cluster": ".*", "$model": ".*", "$slo_class": ".*"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def panel_queries() -> dict[str, str]:
    """Every query of every panel, with what fills it where a healthy server under load does not."""
    return {filled(q.expression): q.empty_until for d in DASHBOARDS for p in d.panels for q in p.queries}


def rules(kind: str) -> dict[str, str]:
    """Name and expression of all rules of a kind: "record" or "alert"."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return {rule[kind]: rule["expr"] for group in groups for rule in group["rules"] if kind in rule}
