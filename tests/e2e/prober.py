"""Answers each line of standard input with the instance's stats, as one line of JSON.

A process of its own for each server: Ray Serve's client keeps state of the first cluster that a process connects to.
"""

import json
import sys

import ray
from ray import serve


def main() -> None:
    ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="ERROR")
    handle = serve.get_deployment_handle("instance", "conflux")
    for _ in sys.stdin:
        print("stats " + json.dumps(handle.stats.remote().result(timeout_s=20)), flush=True)


if __name__ == "__main__":
    main()
