"""The proof of the dashboards: a real server under load, a real Prometheus, every query of every panel and rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from conflux_ray.metrics import definitions as m
from conflux_ray.metrics.exposition import StoreCollector
from conflux_ray.metrics.gpu import GpuSampler
from conflux_ray.metrics.store import Store
from tests.e2e.server import Server, wait_for
from tests.metrics import prometheus as shipped
from tests.metrics.load import Clients, Job
from tests.metrics.prometheus import Prometheus, panel_queries, rules

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(not shipped.installed(), reason=shipped.MISSING)]

ONTIME = {"x-conflux-ttft-ms": "600000", "x-conflux-tbt-ms": "600000"}
LATE = {"x-conflux-ttft-ms": "0.001", "x-conflux-tbt-ms": "600000"}


class TwoGpus:
    """NVML of a node with two GPUs, of which the second tells no power."""

    NVMLError = type("NVMLError", (Exception,), {})

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=50 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=60 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError("not supported")
        return 350_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000


class _AsRay(StoreCollector):
    """With the prefix that Ray's agent gives every name."""

    def collect(self) -> Iterator[Any]:
        for family in super().collect():
            family.name = m.RAY_PREFIX + family.name
            family.samples = [sample._replace(name=m.RAY_PREFIX + sample.name) for sample in family.samples]
            yield family


@pytest.fixture(scope="module")
def gpu_node() -> Iterator[str]:
    """An exporter of a node with GPUs: what fills the panels that a machine without one leaves empty."""
    store = Store({"model": "smollm2-135m-instruct", "replica": "gpu-node"})
    GpuSampler(store, ["0", "1"], TwoGpus).sample()
    registry = CollectorRegistry()
    registry.register(_AsRay(store))
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)


@pytest.fixture(scope="module")
def prometheus(server: Server, gpu_node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder: Path = tmp_path_factory.mktemp("prometheus")
    discovery = shipped.discovery_file(psutil.Process(server.process.pid))
    with shipped.running(folder, discovery, [gpu_node]) as prometheus:
        wait_for(lambda: prometheus.query(m.SLO_OBJECTIVE.ray_name), 60, lambda: "Ray's agent is not scraped")
        yield prometheus


def counted(server: Server) -> dict[str, float]:
    """What the only ingress says of itself, now: requests by outcome, and the other counters without labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=30).text):
        for sample in family.samples:
            if sample.name.startswith("conflux_") and sample.name.endswith("_total"):
                name = sample.labels.get("outcome") or sample.name
                found[name] = found.get(name, 0) + sample.value
    return found


@pytest.fixture(scope="module")
def load(server: Server, prometheus: Prometheus) -> tuple[Clients, dict[str, float]]:
    """Everything a client can do, done; and what the server had counted before."""
    clients = Clients(server.url, server.model)
    before = counted(server)
    jobs = [Job(20 + 15 * i, 6, ONTIME, stream=i % 2 == 0) for i in range(16)]
    jobs += [Job(30, 3, LATE)] * 12  # twelve misses of forty promises: the alert on fast burning wants ten
    jobs += [Job(-10)] * 5
    clients.run(jobs)
    return clients, before


def test_the_server_counts_what_its_clients_count(
    server: Server, prometheus: Prometheus, load: tuple[Clients, dict[str, float]]
) -> None:
    clients, before = load
    after = counted(server)
    seen = clients.seen
    assert {o: after[o] - before[o] for o in m.OUTCOMES} == {o: seen.outcomes[o] for o in m.OUTCOMES}
    assert after[m.GOODPUT.name] - before[m.GOODPUT.name] == 16
    assert after[m.SLO_MISSES.name] - before[m.SLO_MISSES.name] == 12
    assert after[m.PROMPT_TOKENS.name] - before[m.PROMPT_TOKENS.name] == seen.prompt_tokens
    assert after[m.OUTPUT_TOKENS.name] - before[m.OUTPUT_TOKENS.name] == seen.output_tokens == 16 * 6 + 12 * 3

    def agree() -> bool:
        outcomes = prometheus.query(f"sum by (outcome) ({m.REQUESTS.ray_name})")
        found = {series["metric"]["outcome"]: float(series["value"][1]) for series in outcomes}
        found |= {
            metric.name: prometheus.value(f"sum({metric.ray_name})")
            for metric in (m.GOODPUT, m.SLO_MISSES, m.PROMPT_TOKENS, m.OUTPUT_TOKENS)
        }
        return found == {name: after[name] for name in found}

    wait_for(agree, 60, lambda: f"Prometheus has not got {after}")


def test_every_query_of_every_panel_and_rule_returns_data(prometheus: Prometheus, load: object) -> None:
    queries = [*panel_queries(), *rules("record").values()]

    def empty() -> list[str]:
        return [query for query in queries if not prometheus.query(query)]

    wait_for(lambda: not empty(), 90, lambda: "no data:\n" + "\n".join(empty()))
    assert not [name for name in rules("record") if not prometheus.query(name)]


def test_panels_that_are_empty_by_design_say_what_fills_them(prometheus: Prometheus) -> None:
    by_design = {query: event for query, event in panel_queries().items() if event}
    assert set(by_design.values()) == {"an instance on a node with an NVIDIA GPU"}
    own = 'replica!="gpu-node", model'  # without the exporter that stands for such a node
    assert all(not prometheus.query(query.replace("model", own, 1)) for query in by_design)
    assert {s["metric"]["gpu"] for s in prometheus.query(m.GPU_POWER.ray_name)} == {"0"}
    assert prometheus.value(f'{m.GPU_USE.ray_name}{{gpu="1"}}') == 0.51


def test_alerts_are_silent_until_something_happens(prometheus: Prometheus, load: object) -> None:
    """The misses of the load are an event; promtool makes the others (tests/metrics/alerts_test.yaml)."""
    expressions = rules("alert")
    wait_for(lambda: prometheus.query(expressions["ConfluxSloBurnFast"]), 60, lambda: "12 misses do not burn")
    for quiet in ("ConfluxNoInstance", "ConfluxMetricsAbsent", "ConfluxRequestsFailing", "ConfluxInstanceSilent"):
        assert not prometheus.query(expressions[quiet]), quiet
