"""Both ends of the wire between ingresses and instances (`conflux_ray.wire`), over ZeroMQ.

An instance binds one ROUTER; every ingress connects one DEALER to it. A session lives as long as its TCP connection:
a dead process closes it, a frozen node or process fails ZeroMQ's heartbeat, which both ends' I/O threads keep while
Python is busy. Nothing is reconnected silently, because what was on the way is lost then: the ingress opens a new
session and resubmits.

Neither end ever blocks on the other. Queues are bounded (`TransportLimits.queue_messages` each way); a peer that lets
its queue fill has stopped reading, and its session is ended rather than its outputs thinned out.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from conflux_ray import wire
from conflux_ray.wire import InstanceInfo

logger = logging.getLogger(__name__)

_CONNECTION_OVER = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Reconnecting is switched off by a long interval: with -1 libzmq throws away what had arrived before the disconnect.
_NEVER_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds and intervals of the transport; seconds unless the name says otherwise."""

    queue_messages: int = 10_000  # unsent messages per peer before its session ends
    message_bytes: int = 64 * 1024 * 1024
    peers: int = 1024  # sessions of one instance
    messages_per_poll: int = 512
    report_interval: float = 0.05  # an instance's load reaches every ingress at least this often
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 5.0
    handshake_timeout: float = 10.0  # from connecting to Ready
    ping_interval: float = 2.0
    silence_timeout: float = 30.0  # no message from an instance for this long ends the session
    last_words: float = 0.02  # for messages that arrived just before their connection was lost
    retry_first: float = 0.05  # pause before the next session, doubling up to retry_last
    retry_last: float = 2.0


def _configure(socket: zmq.Socket | zmq.asyncio.Socket, limits: TransportLimits) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, limits.queue_messages)
    socket.setsockopt(zmq.RCVHWM, limits.queue_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(limits.heartbeat_interval * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(limits.heartbeat_timeout * 1000))


# ---------------------------------------------------------------------------------------------------- instance


@dataclass(frozen=True, slots=True)
class Departed:
    """The session is over: forget its requests, nobody waits for their output."""

    reason: str


@dataclass(slots=True)
class _Peer:
    name: str
    ingress_id: str
    received: int = 0
    last_sent: float = 0.0


class InstanceEndpoint:
    """An instance's end, owned by one thread (the iteration thread); only `wake` may be called from others.

    Peers are named by strings, one per session. Usage, once an iteration:

        for peer, message in endpoint.poll(timeout_s=0.0 if busy else 0.05):
            ...  # AddRequest, Abort or Departed
        endpoint.publish({peer: [RequestOutput(...)]}, LoadReport(...))

    Call `publish` while idle too (with no outputs): ingresses take a silent instance for a hung one.

    Args:
        host: address of this node to bind; ingresses must reach it. The port is chosen by the system.
        token: secret that a Hello must carry.
        ready: the answer to a Hello.
    """

    def __init__(self, host: str, token: str, ready: wire.Ready, limits: TransportLimits | None = None) -> None:
        if not token:
            raise ValueError("token must not be empty: it keeps strangers from the instance")
        self._limits = limits or TransportLimits()
        self._token = token.encode()
        self._ready = wire.encode(ready)
        self._ids = (ready.instance_id, ready.incarnation)
        self._peers: dict[bytes, _Peer] = {}
        self._identities: dict[str, bytes] = {}
        self._departed: list[tuple[str, Departed]] = []
        self.dropped_messages = 0  # malformed, or from strangers

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, self._limits)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        self._socket.bind(f"tcp://{host}:0")
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    @property
    def peers(self) -> tuple[str, ...]:
        """The sessions that are open."""
        return tuple(self._identities)

    def wake(self) -> None:
        """Make a `poll` that waits return; callable from any thread, without effect after `close`."""
        with self._wake_lock:
            if not self._socket.closed:
                os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, wire.AddRequest | wire.Abort | Departed]]:
        """What has arrived, in order per peer: at most `messages_per_poll`, waiting up to `timeout_s` for the first."""
        events: list[tuple[str, wire.AddRequest | wire.Abort | Departed]] = []
        if timeout_s > 0 and not self._departed and self._wake_fd in dict(self._poller.poll(round(timeout_s * 1000))):
            os.eventfd_read(self._wake_fd)
        for _ in range(self._limits.messages_per_poll):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if (event := self._receive(frames)) is not None:
                events.append(event)
        if self._departed:
            events.extend(self._departed)
            self._departed = []
        return events

    def publish(self, outputs: Mapping[str, Sequence[wire.RequestOutput]], report: wire.LoadReport) -> None:
        """Send each peer its outputs with the load; the load alone to those who have not heard it for a while.

        Outputs for a peer whose session has ended are dropped; `poll` reports its `Departed` once.
        """
        now = time.monotonic()
        for identity, peer in list(self._peers.items()):
            own = outputs.get(peer.name)
            if not own and now - peer.last_sent < self._limits.report_interval:
                continue
            message = wire.Outputs(*self._ids, peer.received, list(own or ()), report)
            if self._send(identity, wire.encode(message)):
                peer.last_sent = now

    def close(self, reason: str = "instance stops") -> None:
        """Say Bye to every peer and close, giving the farewells 0.2 s to leave."""
        if self._socket.closed:
            return
        for identity in list(self._peers):
            self._send(identity, wire.encode(wire.Bye(reason)))
        with self._wake_lock:
            self._socket.close(linger=200)
            os.close(self._wake_fd)
        self._context.term()

    def _receive(self, frames: list[bytes]) -> tuple[str, wire.AddRequest | wire.Abort | Departed] | None:
        identity = frames[0]
        peer = self._peers.get(identity)
        try:
            message = wire.decode_to_instance(frames[-1])
        except msgspec.DecodeError as error:
            self.dropped_messages += 1
            logger.warning("dropped a malformed message from %s: %s", peer.name if peer else "a stranger", error)
            return None
        if isinstance(message, wire.Hello):
            self._admit(identity, message)
            return None
        if peer is None:
            self.dropped_messages += 1
            self._send(identity, wire.encode(wire.Rejected("no such session")))
            return None
        if isinstance(message, wire.Bye):
            self._drop(identity, message.reason or "said goodbye")
            return None
        if isinstance(message, wire.Ping):
            return None
        if isinstance(message, wire.AddRequest):
            peer.received += 1
        return peer.name, message

    def _admit(self, identity: bytes, hello: wire.Hello) -> None:
        refusal = None
        if not hmac.compare_digest(hello.token.encode(), self._token):
            refusal = "wrong token"
        elif hello.version != wire.PROTOCOL_VERSION:
            refusal = f"protocol version {hello.version}, this instance speaks {wire.PROTOCOL_VERSION}"
        elif len(self._peers) >= self._limits.peers:
            refusal = f"{self._limits.peers} sessions are open already"
        if refusal is not None:
            self.dropped_messages += 1
            logger.warning("refused a session: %s", refusal)
            self._send(identity, wire.encode(wire.Rejected(refusal)))
            return
        for other, peer in list(self._peers.items()):
            if peer.ingress_id == hello.ingress_id:
                self._drop(other, "replaced by a newer session")
        name = identity.decode(errors="replace")
        self._peers[identity] = _Peer(name, hello.ingress_id)
        self._identities[name] = identity
        self._send(identity, self._ready)

    def _send(self, identity: bytes, data: bytes) -> bool:
        try:
            self._socket.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.Again:
            self._drop(identity, f"stopped reading ({self._limits.queue_messages} messages unread)")
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(identity, "connection lost")
            return False
        return True

    def _drop(self, identity: bytes, reason: str) -> None:
        peer = self._peers.pop(identity, None)
        if peer is not None:
            del self._identities[peer.name]
            self._departed.append((peer.name, Departed(reason)))
            logger.info("session %s ended: %s", peer.name, reason)


# ----------------------------------------------------------------------------------------------------- ingress


class SessionEnded(Exception):  # noqa: N818 - an event, not an error
    """Why a session is over."""


@dataclass(slots=True)
class _Session:
    info: InstanceInfo
    task: asyncio.Task[None] | None = None
    socket: zmq.asyncio.Socket | None = None  # set while the session is open
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""


class IngressEndpoint:
    """An ingress's end: one session per instance, reopened when it ends, all in one event loop.

    The callbacks run in that loop and must not block. `on_ready` and `on_ended` alternate for each instance;
    `on_outputs` comes only between them.

    Args:
        ingress_id: unique among the ingresses of the cluster and its restarts.
        on_ready: called with the instance's id and what it says of itself.
        on_outputs: called with every Outputs message.
        on_ended: called with the instance's id and the reason; its requests are over there.
    """

    def __init__(
        self,
        ingress_id: str,
        on_ready: Callable[[str, wire.Ready], None],
        on_outputs: Callable[[wire.Outputs], None],
        on_ended: Callable[[str, str], None],
        limits: TransportLimits | None = None,
    ) -> None:
        self._ingress_id = ingress_id
        self._on_ready = on_ready
        self._on_outputs = on_outputs
        self._on_ended = on_ended
        self._limits = limits or TransportLimits()
        self._context = zmq.asyncio.Context()
        self._sessions: dict[str, _Session] = {}
        self._session_count = 0

    def set_instances(self, instances: Sequence[InstanceInfo]) -> None:
        """Keep sessions with exactly these instances: open the new ones, end the others."""
        wanted = {info.instance_id: info for info in instances}
        for instance_id, session in list(self._sessions.items()):
            if wanted.get(instance_id) != session.info:
                del self._sessions[instance_id]
                assert session.task is not None
                session.task.cancel("instance left the directory")
        for instance_id, info in wanted.items():
            if instance_id not in self._sessions:
                session = self._sessions[instance_id] = _Session(info)
                session.task = asyncio.create_task(self._keep_session(session), name=f"session with {instance_id}")

    def send(self, instance_id: str, message: wire.AddRequest | wire.Abort) -> bool:
        """Hand a message to the instance's session; False if none is open (then `on_ended` has been or will be called).

        A session whose queue is full is ended.
        """
        session = self._sessions.get(instance_id)
        if session is None or session.socket is None:
            return False
        if not self._send_now(session.socket, message):
            self._end(session, f"stopped reading ({self._limits.queue_messages} messages unsent)")
            return False
        return True

    async def close(self) -> None:
        """End every session with a Bye."""
        tasks = [s.task for s in self._sessions.values() if s.task is not None]
        self.set_instances(())
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=200)

    @staticmethod
    def _send_now(socket: zmq.asyncio.Socket, message: wire.ToInstance) -> bool:
        sent = cast(asyncio.Future[object], socket.send(wire.encode(message), zmq.NOBLOCK))
        return not (sent.done() and sent.exception() is not None)

    @staticmethod
    def _end(session: _Session, reason: str) -> None:
        session.socket = None
        session.reason = session.reason or reason
        session.ended.set()

    async def _keep_session(self, session: _Session) -> None:
        """Open sessions one after the other until cancelled; any failure ends one session, never this task."""
        instance_id, pause = session.info.instance_id, self._limits.retry_first
        while True:
            opened = time.monotonic()
            reason = "cancelled"
            try:
                await self._run_session(session)
            except SessionEnded as ended:
                reason = str(ended)
            except asyncio.CancelledError as cancelled:
                reason = str(cancelled) or reason
                raise
            except Exception as error:
                logger.exception("session with instance %s failed", instance_id)
                reason = f"{type(error).__name__}: {error}"
            finally:
                was_open, session.socket = session.socket is not None or session.ended.is_set(), None
                session.ended.clear()
                session.reason = ""
                logger.log(
                    logging.WARNING if was_open else logging.DEBUG, "session with %s ended: %s", instance_id, reason
                )
                if was_open:
                    self._on_ended(instance_id, reason)
            if time.monotonic() - opened > self._limits.retry_last:
                pause = self._limits.retry_first
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._limits.retry_last)

    async def _run_session(self, session: _Session) -> None:
        """One session from Hello to its end; raises SessionEnded. `session.socket` is set between Ready and the end."""
        limits = self._limits
        self._session_count += 1
        socket = self._context.socket(zmq.DEALER)
        _configure(socket, limits)
        socket.setsockopt_string(zmq.IDENTITY, f"{self._ingress_id}/{self._session_count}")
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        if "[" in session.info.address:
            socket.setsockopt(zmq.IPV6, 1)
        monitor = socket.get_monitor_socket(_CONNECTION_OVER)
        tasks: list[asyncio.Task[Any]] = []
        try:
            watch = asyncio.create_task(self._watch_connection(monitor))
            tasks.append(watch)
            socket.connect(session.info.address)
            greet = asyncio.create_task(self._greet(socket, session.info))
            tasks.append(greet)
            await asyncio.wait({watch, greet}, timeout=limits.handshake_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not greet.done():
                raise SessionEnded(watch.result() if watch.done() else "no answer to Hello")
            ready = greet.result()
            if not isinstance(ready, wire.Ready):
                raise SessionEnded(ready)
            session.socket = socket
            self._on_ready(session.info.instance_id, ready)

            heard = [time.monotonic()]
            receive = asyncio.create_task(self._receive(socket, heard))
            ping = asyncio.create_task(self._ping(session, socket, heard))
            ended = asyncio.create_task(self._wait_ended(session))
            tasks += [receive, ping, ended]
            done, _ = await asyncio.wait({watch, receive, ping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if receive not in done:  # what had arrived before the end need not be computed again
                await asyncio.wait({receive}, timeout=limits.last_words)
            raise SessionEnded((receive if receive.done() else next(iter(done))).result())
        finally:
            if session.socket is not None:
                self._send_now(socket, wire.Bye())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=200)

    async def _greet(self, socket: zmq.asyncio.Socket, info: InstanceInfo) -> wire.Ready | str:
        await socket.send(wire.encode(wire.Hello(wire.PROTOCOL_VERSION, self._ingress_id, info.token)))
        answer = wire.decode_to_ingress(await socket.recv())
        if isinstance(answer, wire.Rejected):
            return f"rejected: {answer.reason}"
        if not isinstance(answer, wire.Ready):
            return f"answered Hello with {type(answer).__name__}"
        if (answer.instance_id, answer.incarnation) != (info.instance_id, info.incarnation):
            return f"another instance answers at {info.address}: {answer.instance_id} {answer.incarnation}"
        return answer

    @staticmethod
    async def _watch_connection(monitor: zmq.asyncio.Socket) -> str:
        event = await recv_monitor_message(monitor)
        return f"connection lost ({zmq.Event(event['event']).name})"

    @staticmethod
    async def _wait_ended(session: _Session) -> str:
        await session.ended.wait()
        return session.reason

    async def _receive(self, socket: zmq.asyncio.Socket, heard: list[float]) -> str:
        count = 0
        while True:
            reason = self._take(await socket.recv(), heard)
            if reason is not None:
                return reason
            count += 1
            if count % 16 == 0:
                await asyncio.sleep(0)  # recv does not yield while messages are waiting

    def _take(self, data: bytes, heard: list[float]) -> str | None:
        """Handle one message; a reason if it ends the session."""
        message = wire.decode_to_ingress(data)
        heard[0] = time.monotonic()
        if isinstance(message, wire.Outputs):
            self._on_outputs(message)
            return None
        if isinstance(message, wire.Bye):
            return f"instance said goodbye: {message.reason}"
        if isinstance(message, wire.Rejected):
            return f"rejected: {message.reason}"
        return "a second Ready in one session"

    async def _ping(self, session: _Session, socket: zmq.asyncio.Socket, heard: list[float]) -> str:
        while True:
            await asyncio.sleep(self._limits.ping_interval)
            if (silent := time.monotonic() - heard[0]) > self._limits.silence_timeout:
                return f"silent for {silent:.0f} s"
            if not self._send_now(socket, wire.Ping()):
                return "stopped reading"
