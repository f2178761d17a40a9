"""A node that leaves waits for its streams: as long as there are any, and no longer than it may."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conflux_ray.cluster import leave as leave_module
from conflux_ray.cluster.leave import leave


class Node:
    """A node in time that its own waiting moves on: when replicas end, clients go, and the head is lost."""

    def __init__(self, replicas_until: float, clients_until: float = 0, head_until: float = 1e9, heard: bool = True):
        self.time = 0.0
        self.replicas_until = replicas_until
        self.clients_until = clients_until
        self.head_until = head_until
        self.heard = heard
        self.announced_for: float | None = None

    def leave(self, grace: float) -> bool:
        return leave(
            grace,
            8000,
            announced=self.announce,
            busy=lambda: self.time < self.replicas_until,
            clients=lambda port: int(port == 8000 and self.time < self.clients_until),
            head_answers=lambda: self.time < self.head_until,
            now=lambda: self.time,
            sleep=self.sleep,
        )

    def announce(self, grace: float) -> bool:
        self.announced_for = grace
        return self.heard

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def test_it_ends_when_the_replicas_have_ended() -> None:
    node = Node(replicas_until=300)
    assert node.leave(600)
    assert node.announced_for == 600
    assert 300 <= node.time <= 301


def test_a_node_without_replicas_leaves_at_once() -> None:
    node = Node(replicas_until=0)
    assert node.leave(600)
    assert node.time == 0


def test_it_waits_no_longer_than_the_grace() -> None:
    node = Node(replicas_until=1e6)
    assert not node.leave(600)
    assert 600 <= node.time <= 601


def test_where_nobody_hears_it_waits_for_the_clients() -> None:
    node = Node(replicas_until=1e6, clients_until=40, heard=False)
    assert node.leave(600)
    assert 40 <= node.time <= 41


def test_where_the_head_is_lost_meanwhile_it_waits_for_the_clients() -> None:
    node = Node(replicas_until=1e6, clients_until=200, head_until=100)
    assert node.leave(600)
    assert 200 <= node.time <= 201


def test_while_the_head_answers_idle_connections_do_not_count() -> None:
    node = Node(replicas_until=30, clients_until=1e6)
    assert node.leave(600)
    assert node.time <= 31


def test_the_deadline_leaves_ray_serve_time_for_its_graceful_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve stops a replica `drain_timeout_s` + 30 s before the deadline; the pod has 60 s more than that."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(leave_module, "this_node", lambda: "ab" * 28)
    monkeypatch.setattr(leave_module, "ray_command", lambda *arguments: bool(asked.append(arguments) or True))
    assert leave_module.announce(690)
    [arguments] = asked
    assert arguments[0] == "drain-node"
    assert f"--node-id={'ab' * 28}" in arguments
    assert "--deadline-remaining-seconds=660" in arguments


def test_a_cluster_out_of_reach_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave_module, "this_node", lambda: None)
    assert not leave_module.announce(690)


def test_a_command_that_fails_or_hangs_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    monkeypatch.setattr(leave_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(leave_module, "_COMMAND_SECONDS", 0.5)
    for script, succeeds in (("exit 0", True), ("echo no >&2; exit 1", False), ("exec sleep 60", False)):
        ray.write_text(f"#!/bin/sh\n{script}\n")
        ray.chmod(0o755)
        assert leave_module.ray_command("health-check") is succeeds


@pytest.mark.heavy
def test_ray_has_the_command_that_it_is_told_with() -> None:
    """`ray drain-node` is hidden, and Ray promises nothing about it."""
    ray = Path(sys.executable).with_name("ray")
    text = subprocess.run([ray, "drain-node", "--help"], capture_output=True, text=True, check=True).stdout
    for part in ("--node-id", "--reason ", "PREEMPTION", "--reason-message", "--deadline-remaining-seconds"):
        assert part in text, part


def test_the_node_and_its_replicas_are_found_by_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, pid: int, *cmdline: str) -> None:
            self.pid = pid
            self.info = {"cmdline": list(cmdline)}

    processes = [
        Process(1, "/bin/bash", "-c", "ray start"),
        Process(2, "/x/ray/core/src/ray/raylet/raylet", "--node_manager_port=0", "--node_id=ab12"),
        Process(3, "ray::IDLE"),
        Process(4, "ray::ServeReplica:conflux:instance"),
        Process(5, "ray::HAProxyManager"),
        Process(6),  # a kernel thread, or one that has just ended
    ]
    monkeypatch.setattr(leave_module.psutil, "process_iter", lambda attributes: iter(processes))
    assert leave_module.this_node() == "ab12"
    assert leave_module.serving_here() == [4, 5]
    del processes[1]
    assert leave_module.this_node() is None
