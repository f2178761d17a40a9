"""Makes the pictures of the dashboards for the documentation, from real runs on this machine.

    python -m tests.metrics.picture --minutes 5 --out docs/img

First the README's deployment, SmolLM2 on three ranks, with two more SLO classes and load that goes up and down:
*Goodput* and *Instances and ranks*. Then two instances of a tiny model, of which one is killed on the way: *Router and
lifecycle*. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from conflux_ray.models import store
from conflux_ray.serving.environment import serve_environment
from dashboards.goodput import GOODPUT
from dashboards.instances import INSTANCES
from dashboards.lifecycle import LIFECYCLE
from dashboards.panels import Dashboard
from dashboards.render import Span, draw_all
from tests.e2e.chaos import INSTANCE, find
from tests.e2e.server import running
from tests.metrics import prometheus
from tests.metrics.load import Clients, Job

CLASSES = {
    "chat": {"ttft_s": 2.0, "tbt_s": 0.3},
    "batch": {"ttft_s": 10.0, "tbt_s": 1.0},
}


@dataclass(frozen=True)
class Run:
    """One server under load.

    Args:
        deployment: file in deployments/.
        changes: to its args.
        instances: how many it has.
        phases: (share of the run until which, requests at once).
        longest: prompt, tokens.
        kill: an instance, after three quarters of the run.
        dashboards: to draw.
    """

    deployment: str
    changes: dict[str, dict[str, Any]]
    instances: int
    phases: tuple[tuple[float, int], ...]
    longest: int
    kill: bool
    dashboards: tuple[Dashboard, ...]


def runs() -> tuple[Run, ...]:
    """What is drawn from what."""
    tiny = {"path": str(store.model_dir("tiny-llama")), "served_model_name": "tiny-llama"}
    one = ((0.3, 1), (0.5, 3), (0.75, 8), (1.0, 2))
    two = ((0.25, 4), (0.45, 10), (0.6, 28), (1.0, 6))
    return (
        Run("conflux.yaml", {"slo": {"classes": CLASSES}}, 1, one, 400, False, (GOODPUT, INSTANCES)),
        Run(
            "two-instances.yaml",
            {"slo": {"classes": CLASSES}, "model": tiny, "instance": {"sp_degree": 2}},
            2,
            two,
            900,
            True,
            (LIFECYCLE,),
        ),
    )


def job(rng: random.Random, longest: int) -> Job:
    """Some request: most chats, some batches, few that are wrong or leave."""
    kind = rng.random()
    if kind < 0.02:
        return Job(-5)
    headers = {"x-conflux-slo-class": rng.choices(["chat", "batch", "default"], [6, 3, 1])[0]}
    prompt = min(longest, int(rng.lognormvariate(4.3, 0.9)) + 4)
    leave = 1.5 if kind < 0.05 else None
    return Job(prompt, rng.randint(8, 60), headers, stream=rng.random() < 0.8, leave=leave)


def load(run: Run, url: str, model: str, seconds: float) -> None:
    """Keep as many requests in progress as the phase says."""
    started = time.monotonic()

    def client(number: int) -> None:
        rng = random.Random(number)
        clients = Clients(url, model, at_once=1)
        while (share := (time.monotonic() - started) / seconds) < 1:
            if number < next(count for until, count in run.phases if share <= until):
                clients.run([job(rng, run.longest)])
            else:
                time.sleep(0.2)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(max(n for _, n in run.phases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def draw(run: Run, seconds: float, port: int, out: Path) -> None:
    """Serve, load, draw."""
    environment = {**serve_environment(), "RAY_metrics_report_interval_ms": "1000"}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        running(Path(name), port, environment, deployment=run.deployment, **run.changes) as server,
        prometheus.running(Path(name), prometheus.discovery_file(psutil.Process(server.process.pid)), seconds=2) as db,
    ):
        server.wait_idle(120, count=run.instances)
        time.sleep(10)
        began = time.time()
        killer = threading.Timer(seconds * 0.75, lambda: os.kill(find(server, INSTANCE)[0].pid, signal.SIGKILL))
        if run.kill:
            killer.start()
        load(run, server.url, server.model, seconds)
        killer.cancel()
        time.sleep(5)
        for path in draw_all(db.url, Span(began, time.time()), out, "20s", run.dashboards):
            print(path, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5, help="of load in each run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for number, run in enumerate(runs()):
        draw(run, args.minutes * 60, 18800 + number, args.out)


if __name__ == "__main__":
    main()
