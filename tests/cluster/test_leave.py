"""A node that leaves waits for its streams: as long as there are any, and no longer than it may."""

from __future__ import annotations

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


def test_a_cluster_out_of_reach_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> str:
        raise ConnectionError("no cluster")

    monkeypatch.setattr(leave_module, "this_node", refuse)
    monkeypatch.setattr(leave_module.logger, "propagate", True)
    assert not leave_module.announce(690)
