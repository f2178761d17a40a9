"""Sessions between one ingress and instances: opened, refused, ended and opened again, never blocked."""

import asyncio
import time
from collections.abc import Callable

import pytest
import zmq

from conflux_ray import wire
from conflux_ray.transport import Departed, IngressEndpoint, InstanceEndpoint, TransportLimits
from conflux_ray.wire import AddRequest, InstanceInfo, LoadReport, RequestOutput, Sampling, Slo

REPORT = LoadReport(0.0, 1.0, 0, 0, 0.0)
FAST = TransportLimits(retry_first=0.01, retry_last=0.05, ping_interval=0.05, report_interval=0.01)


def ready(incarnation: str = "a") -> wire.Ready:
    return wire.Ready(wire.PROTOCOL_VERSION, "i0", incarnation, "model", 2048, 100, 8)


def add(request_id: str = "r") -> AddRequest:
    return AddRequest(request_id, 0, [1, 2], Sampling(max_tokens=2), Slo(1.0, 0.1))


class Client:
    """An IngressEndpoint whose callbacks are recorded."""

    def __init__(self, limits: TransportLimits = FAST) -> None:
        self.ready: list[wire.Ready] = []
        self.outputs: list[wire.Outputs] = []
        self.ended: list[str] = []
        self.endpoint = IngressEndpoint(
            "ingress",
            lambda _, r: self.ready.append(r),
            self.outputs.append,
            lambda _, why: self.ended.append(why),
            limits,
        )


class Server:
    """An InstanceEndpoint, polled by the test's own loop."""

    def __init__(self, incarnation: str = "a", token: str = "secret", limits: TransportLimits = FAST) -> None:
        self.endpoint = InstanceEndpoint("127.0.0.1", token, ready(incarnation), limits)
        self.info = InstanceInfo("i0", incarnation, self.endpoint.address, "secret")
        self.events: list[tuple[str, AddRequest | wire.Abort | Departed]] = []

    def turn(self) -> None:
        self.events += self.endpoint.poll()


async def until(condition: Callable[[], object], *servers: Server) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "condition not met in 10 s"
        for server in servers:
            server.turn()
        await asyncio.sleep(0.002)


def test_requests_go_out_and_outputs_come_back_with_the_count_received():
    async def scenario():
        client, server = Client(), Server()
        client.endpoint.set_instances([server.info])
        await until(lambda: client.ready, server)
        assert client.endpoint.send("i0", add())
        await until(lambda: server.events, server)
        (peer, message) = server.events[0]
        assert message == add()
        server.endpoint.publish({peer: [RequestOutput("r", 0, 0, [5])]}, REPORT)
        await until(lambda: any(o.outputs for o in client.outputs), server)
        message = next(o for o in client.outputs if o.outputs)
        assert (message.received, message.outputs[0].new_token_ids) == (1, [5])
        await client.endpoint.close()
        await until(lambda: any(isinstance(m, Departed) for _, m in server.events), server)
        server.endpoint.close()

    asyncio.run(scenario())


def test_a_wrong_token_gets_no_session():
    async def scenario():
        client, server = Client(), Server(token="another secret")
        client.endpoint.set_instances([server.info])
        await until(lambda: server.endpoint.dropped_messages, server)
        assert not client.endpoint.send("i0", add())
        assert server.endpoint.peers == ()
        assert client.ready == []
        await client.endpoint.close()
        server.endpoint.close()

    asyncio.run(scenario())


def test_messages_of_strangers_and_malformed_ones_are_dropped():
    server = Server()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(server.info.address)
        stranger.send(wire.encode(add()))
        stranger.send(b"\xc1 not msgpack")
        while server.endpoint.dropped_messages < 2:
            server.turn()
        assert server.events == []
        assert isinstance(wire.decode_to_ingress(stranger.recv()), wire.Rejected)
    server.endpoint.close()


def test_an_instance_that_closes_ends_the_session_and_its_successor_opens_a_new_one():
    async def scenario():
        client, first = Client(), Server("a")
        client.endpoint.set_instances([first.info])
        await until(lambda: client.ready, first)
        first.endpoint.close("restarts")
        await until(lambda: client.ended)
        assert "restarts" in client.ended[0]
        assert not client.endpoint.send("i0", add())
        second = Server("b")
        client.endpoint.set_instances([second.info])
        await until(lambda: len(client.ready) == 2, second)
        assert client.ready[1].incarnation == "b"
        await client.endpoint.close()
        second.endpoint.close()

    asyncio.run(scenario())


def test_an_address_that_nobody_listens_at_is_tried_again():
    async def scenario():
        client, server = Client(), Server()
        nowhere = InstanceInfo("i0", "a", "tcp://127.0.0.1:9", "secret")
        client.endpoint.set_instances([nowhere])
        await asyncio.sleep(0.1)
        assert client.ready == []
        client.endpoint.set_instances([server.info])
        await until(lambda: client.ready, server)
        await client.endpoint.close()
        server.endpoint.close()

    asyncio.run(scenario())


def test_an_instance_that_dropped_the_session_says_so_at_the_next_ping():
    async def scenario():
        client, server = Client(), Server()
        client.endpoint.set_instances([server.info])
        await until(lambda: client.ready, server)
        server.endpoint._drop(next(iter(server.endpoint._peers)), "stopped reading")
        await until(lambda: client.ended, server)
        await until(lambda: len(client.ready) == 2, server)
        assert "no such session" in client.ended[0]
        await client.endpoint.close()
        server.endpoint.close()

    asyncio.run(scenario())


def test_a_silent_instance_is_given_up():
    async def scenario():
        client, server = Client(TransportLimits(silence_timeout=0.2, ping_interval=0.05)), Server()
        client.endpoint.set_instances([server.info])
        await until(lambda: client.ready, server)
        await until(lambda: client.ended)
        assert "silent" in client.ended[0]
        await client.endpoint.close()
        server.endpoint.close()

    asyncio.run(scenario())


def test_a_peer_that_stops_reading_is_dropped_and_never_blocks_the_instance():
    server = Server(limits=TransportLimits(queue_messages=4))
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVBUF, 4096)
        peer.connect(server.info.address)
        peer.send(wire.encode(wire.Hello(wire.PROTOCOL_VERSION, "slow", "secret")))
        while not server.endpoint.peers:
            server.turn()
        (name,) = server.endpoint.peers
        big = [RequestOutput("r", 0, 0, list(range(100_000)))]
        started = time.monotonic()
        while server.endpoint.peers:
            server.endpoint.publish({name: big}, REPORT)
            assert time.monotonic() - started < 10, "publish blocked or never dropped the peer"
        server.turn()
    assert isinstance(server.events[-1][1], Departed)
    server.endpoint.close()


def test_wake_returns_a_waiting_poll_at_once():
    server = Server()
    server.endpoint.wake()
    started = time.monotonic()
    assert server.endpoint.poll(timeout_s=30) == []
    assert time.monotonic() - started < 5
    server.endpoint.close()


def test_an_empty_token_is_refused():
    with pytest.raises(ValueError, match="token"):
        InstanceEndpoint("127.0.0.1", "", ready())
