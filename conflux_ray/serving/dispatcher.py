"""Keeps every request alive on some instance until it finishes: dispatch, fencing, migration.

A request belongs to one instance at a time. When that instance's session ends, when it rejects the request, or when
its output skips a token, the request is resubmitted elsewhere with a higher attempt and the tokens it already has; the
client sees a pause. Attempts are bounded; after the last one the request ends with FinishReason.REJECTED. If every
instance's queue is full, a new request ends at once, with OVERLOADED, and one that has tokens already waits. Output of
an attempt that is over, or of a token already delivered, is dropped.

Everything here runs in one event loop. `submit` and `abort` never wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from conflux_ray import wire
from conflux_ray.metrics.definitions import MIGRATIONS
from conflux_ray.serving.directory import Directory
from conflux_ray.serving.router import Dispatch, NoInstanceError, Router, UnsupportedError
from conflux_ray.transport import IngressEndpoint, TransportLimits
from conflux_ray.wire import FinishReason, RequestOutput

logger = logging.getLogger(__name__)

_ENDING = "the deployment is being stopped: no instance will come"


@dataclass(slots=True)
class _Active:
    request: wire.AddRequest  # as first submitted
    group: str
    arrived: float
    features: frozenset[str]
    emitted: list[int] = field(default_factory=list)
    attempt: int = 0
    dispatch: Dispatch | None = None  # None: waits for an instance
    excluded: set[str] = field(default_factory=set)
    overloaded: bool = False  # an instance had no room for it
    timeout: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class DispatcherCounters:
    """What happened since the start."""

    dispatches: int = 0  # requests sent to an instance
    migrations: int = 0
    migrated: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MIGRATIONS, 0))  # the same, by why
    stale_outputs: int = 0
    failed: int = 0
    sessions_opened: int = 0
    sessions_ended: int = 0


class Dispatcher:
    """The ingress's side of all instances.

    Args:
        ingress_id: unique among the ingresses of the cluster and its restarts.
        directory: where instances are listed.
        deliver: takes the outputs that count, in token order per request; must not block or raise.
        max_attempts: instances a request is tried on, the first included.
        no_instance_timeout: seconds a request waits while no instance can take it.
        routing: how instances are chosen, a key of `router.ROUTING`.
    """

    def __init__(
        self,
        ingress_id: str,
        directory: Directory,
        deliver: Callable[[list[RequestOutput]], None],
        max_attempts: int = 4,
        no_instance_timeout: float = 10.0,
        limits: TransportLimits | None = None,
        routing: str = "queued_work",
    ) -> None:
        self.ingress_id = ingress_id
        self.router = Router(routing=routing)
        self.counters = DispatcherCounters()
        self._directory = directory
        self._deliver = deliver
        self._max_attempts = max_attempts
        self._no_instance_timeout = no_instance_timeout
        self._limits = limits
        self._active: dict[str, _Active] = {}
        self._waiting: dict[str, _Active] = {}
        self._endpoint: IngressEndpoint | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.on_instances_changed: Callable[[], None] = lambda: None

    @property
    def in_flight(self) -> int:
        """Requests submitted and not finished or aborted."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Of them, those that no instance can take now."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to follow the directory; needs a running event loop."""
        self._endpoint = IngressEndpoint(
            self.ingress_id, self._on_ready, self._on_outputs, self._on_ended, self._limits
        )
        self._watcher = asyncio.create_task(self._follow_directory(), name="follow the instance directory")

    async def close(self) -> None:
        """Abort everything and end all sessions."""
        self.abort(list(self._active))
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.close()

    def is_ready(self) -> bool:
        """Whether some instance takes new requests."""
        return self.router.has_instance()

    async def wait_ready(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for one that takes new requests; not at all while the deployment is drained."""
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if self.router.is_closing():
                return False
            self._ready.clear()
            try:
                await asyncio.wait_for(self._ready.wait(), deadline - time.monotonic())
            except TimeoutError:
                return False
        return True

    def submit(self, request: wire.AddRequest, group: str | None = None) -> None:
        """Send a new request to an instance, or hold it until there is one.

        Args:
            request: attempt, output tokens and age are filled in here.
            group: requests with the same prompt (n > 1) go to the same instance.

        Raises:
            ValueError: the id is in use.
            UnsupportedError: no instance supports what it asks for.
        """
        if request.request_id in self._active:
            raise ValueError(f"request_id={request.request_id!r} is in use")
        features = request.sampling.required_features()
        self.router.check(features)
        if request.sampling.seed is None and request.sampling.temperature > 0:
            # Wherever it is tried again, it goes on as it would have here.
            seeded = msgspec.structs.replace(request.sampling, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, sampling=seeded)
        active = _Active(request, group or request.request_id, time.monotonic(), features)
        self._active[request.request_id] = active
        self._send(active)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and tell their instances; unknown ids are ignored."""
        aborts: dict[str, list[tuple[str, int]]] = {}
        for request_id in request_ids:
            active = self._active.get(request_id)
            if active is None:
                continue
            if active.dispatch is not None:
                aborts.setdefault(active.dispatch.instance_id, []).append((request_id, active.attempt))
            self._forget(active)
        for instance_id, requests in aborts.items():
            self._endpoint_send(instance_id, wire.Abort(requests))

    # -- one request ---------------------------------------------------------------------------------------------

    def _send(self, active: _Active) -> None:
        """Dispatch to an instance, or let it wait for one."""
        request = active.request
        tokens = len(request.prompt_token_ids) + len(active.emitted)
        while True:
            try:
                dispatch = self.router.dispatch(tokens, active.features, active.excluded, self._sibling(active))
            except NoInstanceError:
                if active.overloaded and not active.emitted:
                    self._fail(active, "every instance's queue is full", FinishReason.OVERLOADED)
                elif self.router.is_ending():
                    self._fail(active, _ENDING)
                else:
                    self._wait(active)
                return
            except UnsupportedError as error:
                self._fail(active, str(error))
                return
            message = msgspec.structs.replace(
                request,
                attempt=active.attempt,
                output_token_ids=list(active.emitted),
                age_s=request.age_s + time.monotonic() - active.arrived,
            )
            if self._endpoint_send(dispatch.instance_id, message):
                active.dispatch = dispatch
                self.counters.dispatches += 1
                self._stop_waiting(active)
                return
            dispatch.release()
            active.excluded.add(dispatch.instance_id)  # its session is ending

    def _sibling(self, active: _Active) -> str | None:
        """The instance of a request of the same group, if this is not the only one."""
        if active.group == active.request.request_id:
            return None
        for other in reversed(self._active.values()):
            if other.group == active.group and other is not active and other.dispatch is not None:
                return other.dispatch.instance_id
        return None

    def _move(self, active: _Active, cause: str, reason: str) -> None:
        """Resubmit elsewhere, or give up after the last attempt; `cause` is one of `MIGRATIONS`, `reason` its story."""
        if active.dispatch is not None:
            active.dispatch.release()
            active.dispatch = None
        active.attempt += 1
        if active.attempt >= self._max_attempts:
            full = active.overloaded and not active.emitted
            self._fail(
                active,
                f"gave up after {active.attempt} attempts; the last ended because: {reason}",
                FinishReason.OVERLOADED if full else FinishReason.REJECTED,
            )
            return
        self.counters.migrations += 1
        self.counters.migrated[cause] += 1
        self._send(active)

    def _wait(self, active: _Active) -> None:
        self._waiting[active.request.request_id] = active
        if active.timeout is None:
            active.timeout = asyncio.get_running_loop().call_later(
                self._no_instance_timeout, self._fail, active, "no instance could take it in time"
            )

    def _stop_waiting(self, active: _Active) -> None:
        self._waiting.pop(active.request.request_id, None)
        if active.timeout is not None:
            active.timeout.cancel()
            active.timeout = None

    def _fail(self, active: _Active, reason: str, finish_reason: FinishReason = FinishReason.REJECTED) -> None:
        request_id = active.request.request_id
        logger.error("request %s failed: %s", request_id, reason)
        self.counters.failed += 1
        self._forget(active)
        self._deliver([RequestOutput(request_id, active.attempt, len(active.emitted), [], finish_reason, error=reason)])

    def _forget(self, active: _Active) -> None:
        if active.dispatch is not None:
            active.dispatch.release()
        self._stop_waiting(active)
        self._active.pop(active.request.request_id, None)

    # -- sessions ------------------------------------------------------------------------------------------------

    def _endpoint_send(self, instance_id: str, message: wire.AddRequest | wire.Abort) -> bool:
        return self._endpoint is not None and self._endpoint.send(instance_id, message)

    def _on_ready(self, instance_id: str, ready: wire.Ready) -> None:
        logger.info(
            "instance %s is ready: max_model_len=%d, features=%s", instance_id, ready.max_model_len, ready.features
        )
        self.router.add_instance(ready)
        self.counters.sessions_opened += 1
        self.on_instances_changed()
        self._retry_waiting(instance_id)

    def _retry_waiting(self, instance_id: str) -> None:
        self._ready.set()
        for active in list(self._waiting.values()):
            active.excluded.discard(instance_id)
            self._send(active)

    def _on_ended(self, instance_id: str, reason: str) -> None:
        self.router.remove_instance(instance_id)
        self.counters.sessions_ended += 1
        self.on_instances_changed()
        for active in list(self._active.values()):
            if active.dispatch is not None and active.dispatch.instance_id == instance_id:
                logger.warning("request %s moves from instance %s (%s)", active.request.request_id, instance_id, reason)
                self._move(active, "instance_lost", reason)

    def _on_outputs(self, message: wire.Outputs) -> None:
        load = self.router.instances.get(message.instance_id)
        if load is None or load.ready.incarnation != message.incarnation:
            self.counters.stale_outputs += len(message.outputs)
            return
        was_open = load.open_to_new
        self.router.update(message.instance_id, message.received, message.report)
        if load.open_to_new and not was_open:
            self._retry_waiting(message.instance_id)
        elif self.router.is_closing():
            self._ready.set()  # whoever waits at the door is turned away
            if self.router.is_ending():
                for active in list(self._waiting.values()):
                    self._fail(active, _ENDING)
        if message.outputs and (outputs := [o for o in message.outputs if self._accept(message.instance_id, o)]):
            self._deliver(outputs)

    def _accept(self, instance_id: str, output: RequestOutput) -> bool:
        """Whether the output is the next one of its request; does what else it asks for."""
        active = self._active.get(output.request_id)
        if (
            active is None
            or active.dispatch is None
            or active.dispatch.instance_id != instance_id
            or active.attempt != output.attempt
            or output.token_index < len(active.emitted)
        ):
            self.counters.stale_outputs += 1
            return False
        if output.token_index > len(active.emitted):
            self._endpoint_send(instance_id, wire.Abort([(output.request_id, output.attempt)]))
            self._move(
                active,
                "token_gap",
                f"token {len(active.emitted)} is missing, instance {instance_id} went on to {output.token_index}",
            )
            return False
        if output.finish_reason in (FinishReason.REJECTED, FinishReason.OVERLOADED):
            active.overloaded |= output.finish_reason is FinishReason.OVERLOADED
            active.excluded.add(instance_id)
            self._move(active, "refused", f"instance {instance_id} rejected it: {output.error or 'no reason given'}")
            return False
        active.emitted.extend(output.new_token_ids)
        active.excluded.clear()
        if output.finish_reason is not None:
            if output.finish_reason is FinishReason.ERROR:
                logger.error("request %s failed on instance %s: %s", output.request_id, instance_id, output.error)
                self.counters.failed += 1
            self._forget(active)
        return True

    # -- directory -----------------------------------------------------------------------------------------------

    async def _follow_directory(self) -> None:
        assert self._endpoint is not None
        while True:
            try:
                async for instances in self._directory.watch():
                    self._endpoint.set_instances(instances)
                logger.error("the instance directory ended its watch; starting again")
            except Exception:
                logger.exception("following the instance directory failed; starting again")
            await asyncio.sleep(1.0)
