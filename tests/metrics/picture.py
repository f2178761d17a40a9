"""Makes the pictures of the dashboards for the documentation, from a real run on this machine.

    python -m tests.metrics.picture --minutes 3 --out docs/img

Two instances of two ranks of a tiny model, three SLO classes, load that goes up and down; one instance is killed on the
way. There is no latency profile of that model: predictions are the fallback's. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil

from conflux_ray.models import store
from conflux_ray.serving.environment import serve_environment
from dashboards.render import Span, draw_all
from tests.e2e.chaos import INSTANCE, find
from tests.e2e.server import running
from tests.metrics import prometheus
from tests.metrics.load import Clients, Job

CLASSES = {"chat": {"ttft_s": 1.0, "tbt_s": 0.15}, "batch": {"ttft_s": 10.0, "tbt_s": 1.0}}
PHASES = ((0.25, 4), (0.45, 10), (0.6, 28), (1.0, 6))
"""(share of the run until which, requests at once)."""


def job(rng: random.Random) -> Job:
    """Some request: most chats, some batches, few that are wrong or leave."""
    kind = rng.random()
    if kind < 0.02:
        return Job(-5)
    headers = {"x-conflux-slo-class": rng.choices(["chat", "batch", "default"], [6, 3, 1])[0]}
    prompt = min(900, int(rng.lognormvariate(4.3, 0.9)) + 4)
    leave = 1.5 if kind < 0.05 else None
    return Job(prompt, rng.randint(8, 60), headers, stream=rng.random() < 0.8, leave=leave)


def load(url: str, model: str, seconds: float) -> None:
    """Keep as many requests in progress as the phase says."""
    started = time.monotonic()

    def client(number: int) -> None:
        rng = random.Random(number)
        clients = Clients(url, model, at_once=1)
        while (share := (time.monotonic() - started) / seconds) < 1:
            if number < next(count for until, count in PHASES if share <= until):
                clients.run([job(rng)])
            else:
                time.sleep(0.2)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(max(n for _, n in PHASES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3, help="of load")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = {**serve_environment(), "RAY_metrics_report_interval_ms": "1000"}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        running(
            Path(name),
            18800,
            environment,
            deployment="two-instances.yaml",
            model={"path": str(store.model_dir("tiny-llama")), "served_model_name": "tiny-llama"},
            instance={"sp_degree": 2},
            slo={"classes": CLASSES},
        ) as server,
        prometheus.running(Path(name), prometheus.discovery_file(psutil.Process(server.process.pid)), seconds=2) as db,
    ):
        server.wait_idle(120, count=2)
        time.sleep(10)
        began, seconds = time.time(), args.minutes * 60
        killer = threading.Timer(seconds * 0.7, lambda: os.kill(find(server, INSTANCE)[0].pid, signal.SIGKILL))
        killer.start()
        load(server.url, server.model, seconds)
        killer.join()
        time.sleep(5)
        for path in draw_all(db.url, Span(began, time.time()), args.out, rate="20s"):
            print(path)


if __name__ == "__main__":
    main()
