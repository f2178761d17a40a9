"""One server for all end-to-end tests of this folder: the README's own configuration, a real model on three ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conflux_ray.models import store
from conflux_ray.serving.environment import serve_environment
from tests.e2e.server import Server, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the shared server go last: HAProxy has fixed ports, so while it runs no other test can have a server."""

    def shares(item: pytest.Item) -> bool:
        return "server" in getattr(item, "fixturenames", ()) and not hasattr(getattr(item, "module", None), "server")

    here = [k for k, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    for k, item in zip(here, sorted((items[k] for k in here), key=shares), strict=True):
        items[k] = item


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("server")
    store.model_dir(store.SMOLLM2)
    # Ray hands out metrics every 10 s by default, and tests would wait for them.
    environment = {**serve_environment(), "RAY_metrics_report_interval_ms": "1000"}
    with running(folder, port=18000, environment=environment) as server:
        yield server


@pytest.fixture(scope="package")
def reference():
    from conflux_ray.models.reference import Reference

    return Reference(store.model_dir(store.SMOLLM2))
