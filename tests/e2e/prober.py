"""Answers each line of standard input with one line, what an operator of the server asks and does:

    stats N           the stats of N instances, or of those that answer, as JSON
    replicas N        have Ray Serve run N instances
    drain MODEL on    have the instances take no new requests, or, with off, take some again

A process of its own for each server, whose Ray address is its argument: Ray Serve's client keeps state of the first
cluster that a process connects to.
"""

import json
import sys
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME

from conflux_ray.bench.server import connect
from conflux_ray.cluster.registry import registry_handle


def stats(handle: Any, count: int) -> list[dict]:
    """`Instance.stats` of `count` instances, or of those that answer."""
    # A handle asks a replica of its own choice, so ask until all have answered.
    found: dict[str, dict] = {}
    for _ in range(60):
        try:
            answer = handle.stats.remote().result(timeout_s=20)
        except (ray.exceptions.RayError, TimeoutError):
            continue  # it chose one that is gone
        found[answer["instance_id"]] = answer
        if len(found) == count:
            break
    return list(found.values())


def main() -> None:
    connect(sys.argv[1])
    handle = serve.get_deployment_handle("instance", "conflux")
    for line in sys.stdin:
        answer: Any = "done"
        match line.split():
            case ["stats", count]:
                answer = stats(handle, int(count))
            case ["replicas", count]:
                # What POST /api/v1/applications/conflux/deployments/instance/scale does; there is no dashboard here.
                controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace="serve")
                ray.get(controller.update_deployment_replicas.remote(DeploymentID("instance", "conflux"), int(count)))
            case ["drain", model, switch]:
                ray.get(registry_handle(model).drain.remote(switch == "on"))
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
