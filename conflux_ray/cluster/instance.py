"""One XP instance as a Ray Serve replica: the scheduler actor of its worker group (design, section 3).

The replica's constructor starts the workers and an iteration thread; from then on the thread owns the engine, the
workers and the endpoint that ingresses connect to. Ray Serve only asks for health and tells it to end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
import uuid
from typing import Any

import ray

from conflux_ray.cluster.autoscaling import KV_USED, QUEUED_WORK
from conflux_ray.cluster.load import LoadMeter
from conflux_ray.cluster.policy import make_policy
from conflux_ray.cluster.registry import HEARTBEAT_SECONDS, registry_handle
from conflux_ray.config import (
    GIB,
    ConfluxConfig,
    block_bytes,
    check_model,
    parse,
    read_model_config,
    resolve_model,
    size_pool,
)
from conflux_ray.execution.engine import Engine, TokenOutput
from conflux_ray.execution.iteration_log import IterationLog
from conflux_ray.execution.loop import IterationLoop, WorkerLostError
from conflux_ray.execution.request import Request
from conflux_ray.heap import freeze
from conflux_ray.kv import KVGeometry
from conflux_ray.logs import configure as configure_logs
from conflux_ray.metrics.definitions import INSTANCE_START
from conflux_ray.metrics.gpu import GpuSampler
from conflux_ray.metrics.ingress import SHORT_ID
from conflux_ray.metrics.instance import InstanceMetrics, MeteredWorkers
from conflux_ray.metrics.ray_export import RayExporter
from conflux_ray.profiling.machine import machine_slug
from conflux_ray.vllm_compat.plugin import use_cpu_platform
from conflux_ray.wire import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Feature,
    FinishReason,
    InstanceInfo,
    Ready,
    RequestOutput,
)

logger = logging.getLogger(__name__)

CPU_KV_GIB = 0.5
_IDLE_SECONDS = 0.05
_WAIT_SECONDS = 0.002
"""Between two looks at whether an iteration has ended before its time."""
_REPORT_SECONDS = 0.05
"""Most time between two reports of the load while iterations give no tokens."""


class Instance:
    """The replica.

    Args:
        values: the deployment's configuration, as `config.parse` takes it.

    Raises:
        ConfigError: the model or the KV pool does not fit the instance.
        WorkerLostError: a worker did not start.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        configure_logs()
        use_cpu_platform()  # this process has no GPU of its own; its workers may
        self._started = time.monotonic()
        self._config = config = parse(values)
        self._name = config.model.name
        folder = resolve_model(config.model.path)
        geometry = check_model(config, read_model_config(folder))
        instance = config.instance
        pool: KVGeometry | None = None  # on a GPU the workers size it, unless it is given
        if instance.device != "cuda" or instance.kv_memory_gib is not None:
            pool = size_pool(geometry, instance, (instance.kv_memory_gib or CPU_KV_GIB) * GIB)
        identity = ray.get_runtime_context()
        self._info_base = (f"{identity.get_actor_id() or 'instance'}", uuid.uuid4().hex)
        self._log: IterationLog | None = None
        if instance.iteration_log:  # before the weights are loaded: what is wrong with the path shows at once
            self._log = IterationLog(instance.iteration_log.replace("{id}", self._info_base[0]))
        self._progress(f"starting {instance.num_workers} workers for {self._name}")

        from conflux_ray.cluster.workers import RayWorkerGroup
        from conflux_ray.execution.worker import worker_spec
        from conflux_ray.transport import InstanceEndpoint

        spec = worker_spec(config, folder, geometry, pool.num_blocks if pool is not None else 0)
        self._workers = RayWorkerGroup(
            spec, ray.util.get_current_placement_group(), instance.start_timeout_s, self._progress
        )
        if pool is None:
            pool = KVGeometry(instance.block_tokens, instance.sp_degree, self._workers.num_blocks)
        self._engine = Engine(
            pool,
            instance.sp_degree,
            instance.tensor_parallel,
            make_policy(config, geometry, machine_slug(instance.device)),
            geometry.max_model_len,
        )
        token_bytes = block_bytes(geometry, instance) * instance.tensor_parallel / instance.block_tokens
        self._metrics = InstanceMetrics(self._name, self._info_base[0][:SHORT_ID], self._engine, token_bytes)
        metered = MeteredWorkers(self._workers, self._metrics, time.monotonic)
        self._loop = IterationLoop(
            self._engine, metered, instance.iteration_timeout_s, late=instance.late_planning, log=self._log
        )
        self._meter = LoadMeter(self._engine)
        self._load = self._meter.report()  # as last published
        self._requests: dict[str, tuple[str, AddRequest, float]] = {}  # engine id -> peer, message, receipt
        self._failure: str | None = None
        self._ending = False  # this replica is being stopped
        self._drain = False  # the registry asks for it
        self._stop = threading.Event()
        self._last_progress = time.monotonic()
        self._published = 0.0  # when ingresses last heard of this instance

        token = secrets.token_urlsafe(32)
        ready = Ready(
            PROTOCOL_VERSION,
            *self._info_base,
            model=self._name,
            max_model_len=geometry.max_model_len,
            vocab_size=geometry.vocab_size,
            max_num_seqs=instance.max_num_seqs * instance.sp_degree,
            features=(Feature.SEED, Feature.LOGPROBS),
        )
        self._endpoint = InstanceEndpoint(ray.util.get_node_ip_address(), token, ready)
        self._info = InstanceInfo(*self._info_base, address=self._endpoint.address, token=token)
        self._registry = registry_handle(self._name)
        freeze()
        self._thread = threading.Thread(target=self._run, name="conflux-iterations", daemon=True)
        self._thread.start()
        self._heart = threading.Thread(target=self._beat, name="conflux-heartbeat", daemon=True)
        self._heart.start()
        self._exporter = RayExporter(self._metrics.store, GpuSampler(self._metrics.store, self._workers.gpus).sample)
        self._metrics.store.value(INSTANCE_START).value = time.monotonic() - self._started
        self._exporter.start()
        self._progress(
            f"ready: {pool.num_blocks} KV blocks of {pool.block_size} tokens on each of {instance.sp_degree} ranks,"
            f" max_model_len {geometry.max_model_len}"
        )

    @property
    def _draining(self) -> bool:
        """Whether it goes, or the whole deployment is drained."""
        return self._ending or self._drain

    def _progress(self, line: str) -> None:
        logger.info("[%6.1f s] %s", time.monotonic() - self._started, line)

    # Called by Ray Serve

    def check_health(self) -> None:
        """Raise if the instance cannot serve: its workers are lost, or an iteration hangs."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if not self._thread.is_alive() and not self._stop.is_set():
            raise RuntimeError("the iteration thread has ended")
        stalled = time.monotonic() - self._last_progress
        if stalled > self._config.instance.iteration_timeout_s + 5:
            raise RuntimeError(f"no iteration has ended for {stalled:.0f} s")

    async def __del__(self) -> None:
        """Drain: take no new requests, let the running ones end, then stop the workers."""
        if not hasattr(self, "_thread"):
            return
        self._ending = True
        self._endpoint.wake()
        deadline = time.monotonic() + self._config.instance.drain_timeout_s
        while self._thread.is_alive() and self._engine.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._stop.set()
        self._endpoint.wake()
        await asyncio.to_thread(self._thread.join, 10.0)
        await asyncio.to_thread(self._workers.stop)
        await asyncio.to_thread(self._exporter.close)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy (`cluster.autoscaling`)."""
        report = self._load
        return {QUEUED_WORK: report.queued_work_s, KV_USED: report.kv_used_fraction}

    # What tests and operators may ask

    def stats(self) -> dict[str, Any]:
        """Counters and load of the engine."""
        report = self._meter.report(self._ending, self._drain)
        counters = self._engine.counters
        return {
            "instance_id": self._info.instance_id,
            "running": report.running,
            "waiting": report.waiting,
            "kv_used_fraction": report.kv_used_fraction,
            "draining_allocations": self._engine.kv.num_draining,
            "pid": os.getpid(),
            "timings": [timing._asdict() for timing in list(self._engine.timings)[-100:]],
            "counters": {name: getattr(counters, name) for name in counters.__slots__},
        }

    # The iteration thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except WorkerLostError as error:
            self._failure = f"workers lost: {error}"
            logger.error("%s", self._failure)
        except Exception as error:
            self._failure = f"the iteration thread failed: {error!r}"
            logger.exception("the iteration thread failed")
        finally:
            self._leave()
            self._endpoint.close("workers lost" if self._failure else "instance stops")
            if self._log is not None:
                self._log.close()
            if self._failure:
                self._workers.kill()

    def _turn(self) -> None:
        engine = self._engine
        events = self._endpoint.poll(min(self._loop.pause(), _WAIT_SECONDS) if engine.has_work else _IDLE_SECONDS)
        rejected: dict[str, list[RequestOutput]] = {}
        for peer, message in events:
            if isinstance(message, AddRequest):
                error = self._add(peer, message)
                if error is not None:
                    rejected.setdefault(peer, []).append(error)
            elif isinstance(message, Abort):
                for request_id, _ in message.requests:
                    self._abort(f"{peer}/{request_id}")
            else:  # the peer is gone, and with it its requests
                for key in [k for k, (owner, _, _) in self._requests.items() if owner == peer]:
                    self._abort(key)
        outputs: list[TokenOutput] = []
        if engine.has_work:
            outputs = self._loop.step()
            self._meter.observe(engine.timings)
        self._last_progress = time.monotonic()
        waits = not outputs and not events and engine.has_work and self._loop.pause() > 0
        if waits and self._last_progress - self._published < _REPORT_SECONDS:
            return  # it is still early for the next iteration, and nobody waits for word of this instance
        self._published = self._last_progress
        messages = self._to_wire(outputs)
        for peer, refusals in rejected.items():
            messages.setdefault(peer, []).extend(refusals)
        self._load = self._meter.report(self._ending, self._drain)
        self._endpoint.publish(messages, self._load)
        self._metrics.sample(self._load, self._last_progress)

    def _add(self, peer: str, message: AddRequest) -> RequestOutput | None:
        limits = self._config.limits
        if self._ending:  # while the whole deployment is drained, ingresses let nothing new in
            return self._refusal(message, FinishReason.REJECTED, "the instance is draining")
        if len(self._requests) >= limits.max_queued_requests:
            return self._refusal(message, FinishReason.OVERLOADED, "the instance's queue is full")
        now = self._loop.clock()
        key = f"{peer}/{message.request_id}"
        try:
            request = Request(
                request_id=key,
                attempt=message.attempt,
                prompt=list(message.prompt_token_ids),
                sampling=message.sampling,
                slo=message.slo,
                arrival=now - message.age_s,
                output=list(message.output_token_ids),
                priority=message.priority,
            )
            if limits.reject_hopeless and not request.output and not self._meter.can_meet(request, now):
                return self._refusal(message, FinishReason.OVERLOADED, "its TTFT cannot be met any more")
            self._engine.add(request)
        except ValueError as error:
            return self._refusal(message, FinishReason.ERROR, str(error))
        self._requests[key] = (peer, message, now)
        return None

    @staticmethod
    def _refusal(message: AddRequest, reason: FinishReason, error: str) -> RequestOutput:
        return RequestOutput(
            message.request_id, message.attempt, len(message.output_token_ids), [], finish_reason=reason, error=error
        )

    def _abort(self, key: str) -> None:
        if self._requests.pop(key, None) is not None:
            self._engine.abort(key)

    def _to_wire(self, outputs: list[TokenOutput]) -> dict[str, list[RequestOutput]]:
        messages: dict[str, list[RequestOutput]] = {}
        for output in outputs:
            request = output.request
            entry = self._requests.get(request.request_id)
            if entry is None:
                continue
            peer, message, received = entry
            wire = RequestOutput(
                message.request_id, request.attempt, output.index, [output.token], logprobs=output.logprobs
            )
            if output.index == len(message.output_token_ids) and request.first_scheduled is not None:
                wire.queued_s = max(0.0, request.first_scheduled - received)
            if output.finished:
                wire.finish_reason, wire.stop_reason = request.finish_reason, request.stop_reason
                del self._requests[request.request_id]
            messages.setdefault(peer, []).append(wire)
        return messages

    # Registration

    def _beat(self) -> None:
        while not self._stop.is_set() and self._failure is None:
            try:
                idle = self._draining and not self._requests
                beat = self._registry.heartbeat.remote(*self._info_base, idle)
                known, self._drain = ray.get(beat, timeout=HEARTBEAT_SECONDS * 3)
                if not known:
                    ray.get(self._registry.register.remote(self._info), timeout=HEARTBEAT_SECONDS * 3)
            except ray.exceptions.RayError as error:
                logger.warning("the instance registry does not answer (%s); trying again", type(error).__name__)
                self._registry = registry_handle(self._name)
            self._stop.wait(HEARTBEAT_SECONDS)

    def _leave(self) -> None:
        try:
            ray.get(self._registry.leave.remote(*self._info_base), timeout=2.0)
        except ray.exceptions.RayError:
            logger.warning("could not leave the instance registry; it will drop this instance when it falls silent")


def instance_bundles(config: ConfluxConfig, device: str) -> list[dict[str, float]]:
    """Placement-group bundles of one instance: the scheduler's, then one per worker."""
    if device == "cpu":
        # CPU deployments are for trying things out on small machines: shares, so that all of it fits two cores.
        return [{"CPU": 0.1}] + [{"CPU": 0.1}] * config.instance.num_workers
    return [{"CPU": 1.0}] + [{"CPU": 1.0, "GPU": 1.0}] * config.instance.num_workers
