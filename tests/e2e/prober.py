"""Answers each line of standard input, a number of instances, with the stats of as many, as one line of JSON.

A process of its own for each server: Ray Serve's client keeps state of the first cluster that a process connects to.
"""

import json
import sys

import ray
from ray import serve


def main() -> None:
    ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="ERROR")
    handle = serve.get_deployment_handle("instance", "conflux")
    for line in sys.stdin:
        # A handle asks a replica of its own choice, so ask until all have answered.
        found: dict[str, dict] = {}
        for _ in range(60):
            stats = handle.stats.remote().result(timeout_s=20)
            found[stats["instance_id"]] = stats
            if len(found) == int(line):
                break
        print("stats " + json.dumps(list(found.values())), flush=True)


if __name__ == "__main__":
    main()
