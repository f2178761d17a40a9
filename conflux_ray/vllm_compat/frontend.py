"""vLLM's OpenAI front end over instances of ours: AsyncLLM whole, with another core client underneath.

Tokenizing, chat templates, detokenizing, stop strings, n > 1, logprobs, tool calls, usage and the `vllm:*` metrics are
vLLM's. The core client passes requests to a `Dispatcher` and turns what comes back into vLLM's types. It never raises
for the death of an instance: an exception from `get_output_async` would fail every request of this process.

`AsyncLLM` has no hook for a core client, so `ConfluxLLM` has an `__init__` of its own that sets the same attributes;
a test compares the source of the original with the one this was written against.
"""

from __future__ import annotations

import asyncio
import re
import time
from argparse import Namespace
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.api_server import build_app, init_app_state
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.engine.protocol import GenerationError
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from conflux_ray import wire
from conflux_ray.metrics.exposition import render
from conflux_ray.metrics.ingress import ChoiceRecord, IngressMetrics, current_request
from conflux_ray.serving.directory import Directory
from conflux_ray.serving.dispatcher import Dispatcher
from conflux_ray.serving.middleware import FrontMiddleware
from conflux_ray.serving.options import IngressOptions
from conflux_ray.serving.router import UnsupportedError
from conflux_ray.serving.slo import FIELDS, SloError, request_headers_slo, resolve
from conflux_ray.transport import TransportLimits
from conflux_ray.vllm_compat.version import require_version

_TASKS: tuple[SupportedTask, ...] = ("generate",)
_CHILD_ID = re.compile(r"^\d+_(.+)$")  # vLLM names the children of a request with n > 1 "0_id", "1_id", ...
_STATISTICS_INTERVAL = 1.0  # seconds
_OUTPUTS_PER_BATCH = 512  # most outputs handed to vLLM at once


def to_sampling(params: SamplingParams) -> wire.Sampling:
    """The engine's part of vLLM's parameters, after vLLM has resolved token ids and defaults."""
    structured = None
    if params.structured_outputs is not None:
        structured = {
            f.name: value
            for f in fields(params.structured_outputs)
            if (value := getattr(params.structured_outputs, f.name)) not in (None, False)
        }
    repetition = params.repetition_detection
    bad_words = params.bad_words_token_ids
    return wire.Sampling(
        max_tokens=params.max_tokens or 0,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
        eos_token_id=params.eos_token_id,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        all_stop_token_ids=tuple(sorted(params.all_stop_token_ids)),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias or None,
        allowed_token_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        bad_words_token_ids=tuple(map(tuple, bad_words)) if bad_words else None,
        logprobs=params.num_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logprob_token_ids=tuple(params.logprob_token_ids) if params.logprob_token_ids else None,
        structured_outputs=structured,
        repetition_detection=None
        if repetition is None
        else (repetition.max_pattern_size, repetition.min_pattern_size, repetition.min_count),
        thinking_token_budget=params.thinking_token_budget,
        skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache),
    )


def required_features(params: SamplingParams) -> frozenset[str]:
    """What an engine must support for these parameters, as the client gave them (bad words still as text)."""
    features = to_sampling(params).required_features()
    return features | {wire.Feature.BAD_WORDS} if params.bad_words else features


_UNSERVED = {
    wire.FinishReason.REJECTED: HTTPStatus.SERVICE_UNAVAILABLE,
    wire.FinishReason.OVERLOADED: HTTPStatus.TOO_MANY_REQUESTS,
}


@dataclass(slots=True)
class _Pending:
    """What the core client remembers of a request in progress."""

    external_id: str
    num_prompt_tokens: int
    submitted: float  # monotonic
    started: bool = False
    record: ChoiceRecord | None = None  # what is counted of it


@dataclass(slots=True)
class _Resources:
    """AsyncLLM asks `engine_core.resources.engine_dead`."""

    engine_dead: bool = False


class DispatcherCoreClient(EngineCoreClient):
    """vLLM's view of all instances together: one engine, number 0, that never dies.

    Args:
        make_dispatcher: builds the dispatcher around the callback that takes its outputs.
        slo_classes: the deployment's promises.
        metrics: counts tokens against their deadlines.
    """

    engine_ranks_managed = (0,)

    def __init__(
        self,
        make_dispatcher: Callable[[Callable[[list[wire.RequestOutput]], None]], Dispatcher],
        slo_classes: Mapping[str, wire.Slo],
        metrics: IngressMetrics,
    ) -> None:
        self.resources = _Resources()
        self.dispatcher = make_dispatcher(self._arrived)
        # Requests that no instance served, by vLLM's external id; whoever waits for one takes its own out.
        self.unserved: dict[str, HTTPStatus] = {}
        self._slo_classes = slo_classes
        self._metrics = metrics
        self._pending: dict[str, _Pending] = {}
        self._queue: deque[wire.RequestOutput] = deque()
        self._filled = asyncio.Event()
        self._refresh: asyncio.TimerHandle | None = None

    async def get_output_async(self) -> EngineCoreOutputs:
        """The outputs that have arrived; without any, after a second, only statistics, so that gauges stay true."""
        if not self._queue:
            self._filled.clear()
            if self._refresh is None:
                self._refresh = asyncio.get_running_loop().call_later(_STATISTICS_INTERVAL, self._refresh_statistics)
            await self._filled.wait()
        now = self._metrics.clock()
        outputs = [self._convert(self._queue.popleft(), now) for _ in range(min(len(self._queue), _OUTPUTS_PER_BATCH))]
        return EngineCoreOutputs(engine_index=0, outputs=outputs, scheduler_stats=self._stats())

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return _TASKS

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Submit; what cannot be submitted ends with an error output, as an exception would leak vLLM's state."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        assert params is not None, "pooling is not among the supported tasks"
        assert prompt is not None, "prompt embeddings are refused by vLLM's configuration"
        child = _CHILD_ID.match(request.request_id)
        message = wire.AddRequest(
            request_id=request.request_id,
            attempt=0,
            prompt_token_ids=prompt,
            sampling=to_sampling(params),
            slo=self.slo_of(params),
            priority=request.priority,
            age_s=max(0.0, time.time() - request.arrival_time),
            cache_salt=request.cache_salt,
        )
        http_request = current_request.get()
        record = None
        if http_request is not None:
            record = self._metrics.submitted(http_request, message.slo, len(prompt))
        self._pending[request.request_id] = _Pending(
            request.external_req_id or request.request_id, len(prompt), time.monotonic(), record=record
        )
        try:
            self.dispatcher.submit(message, group=child.group(1) if child else None)
        except (UnsupportedError, ValueError) as error:
            self._arrived([wire.RequestOutput(request.request_id, 0, 0, [], wire.FinishReason.ERROR, error=str(error))])

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._pending.pop(request_id, None)
        self.dispatcher.abort(request_ids)

    async def reset_mm_cache_async(self) -> None:
        """Text only: there is none."""

    async def is_sleeping_async(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the timer; the dispatcher is closed by its owner, in the event loop."""
        if self._refresh is not None:
            self._refresh.cancel()

    def slo_of(self, params: SamplingParams) -> wire.Slo:
        """What was promised for a request with these parameters; raises SloError."""
        return resolve(self._slo_classes, request_headers_slo.get(), _slo_fields(params))

    def _refresh_statistics(self) -> None:
        self._refresh = None
        self._filled.set()

    def _arrived(self, outputs: list[wire.RequestOutput]) -> None:
        self._queue.extend(outputs)
        self._filled.set()

    def _convert(self, output: wire.RequestOutput, now: float) -> EngineCoreOutput:
        pending = self._pending.get(output.request_id)
        if pending is not None and pending.record is not None:
            if output.new_token_ids:
                pending.record.took(len(output.new_token_ids), now)
            if output.finish_reason is not None:
                pending.record.ended(output.finish_reason)
        if output.finish_reason in _UNSERVED:
            reason: FinishReason | None = FinishReason.ERROR
            if pending is not None:
                self.unserved[pending.external_id] = _UNSERVED[output.finish_reason]
        else:
            reason = None if output.finish_reason is None else FinishReason(int(output.finish_reason))
        result = EngineCoreOutput(
            request_id=output.request_id,
            new_token_ids=output.new_token_ids,
            finish_reason=reason,
            stop_reason=output.stop_reason,
        )
        if output.logprobs is not None:
            result.new_logprobs = LogprobsLists(*output.logprobs.arrays())
        if pending is not None and not pending.started and (output.new_token_ids or reason is not None):
            pending.started = True
            # vLLM's histograms of queueing and prefill time are differences of these two.
            scheduled = min(pending.submitted + (output.queued_s or 0.0), time.monotonic())
            result.events = [
                EngineCoreEvent(EngineCoreEventType.QUEUED, pending.submitted),
                EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled),
            ]
            cached = min(output.cached_tokens or 0, pending.num_prompt_tokens)
            result.prefill_stats = PrefillStats()
            result.prefill_stats.set(pending.num_prompt_tokens, cached, 0)
        if reason is not None:
            self._pending.pop(output.request_id, None)
        return result

    def _stats(self) -> SchedulerStats:
        reports = [load.report for load in self.dispatcher.router.instances.values() if load.report is not None]
        return SchedulerStats(
            num_running_reqs=sum(r.running for r in reports),
            num_waiting_reqs=sum(r.waiting for r in reports),
            kv_cache_usage=max((r.kv_used_fraction for r in reports), default=0.0),
        )


def _slo_fields(params: SamplingParams) -> dict[str, object]:
    return {name: value for name, value in (params.extra_args or {}).items() if name in FIELDS}


class ConfluxLLM(AsyncLLM):
    """AsyncLLM over a core client that is handed in.

    Make it in the event loop that serves requests.
    """

    engine_core: DispatcherCoreClient

    def __init__(self, vllm_config: VllmConfig, engine_core: DispatcherCoreClient, log_stats: bool = True) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.observability_config = vllm_config.observability_config
        self.log_requests = False
        self.log_stats = log_stats
        self.renderer = renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, renderer)
        self.output_processor = OutputProcessor(
            renderer.tokenizer, log_stats=log_stats, stream_interval=vllm_config.scheduler_config.stream_interval
        )
        self.engine_core = engine_core
        self.logger_manager: StatLoggerManager | None = None
        if log_stats:
            self.logger_manager = StatLoggerManager(
                vllm_config=vllm_config, engine_idxs=list(engine_core.engine_ranks_managed), custom_stat_loggers=None
            )
            self.logger_manager.log_engine_initialized()
        self._client_count = 1
        self.output_handler: asyncio.Task[None] | None = None
        self.profiler = None
        self._run_output_handler()

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """AsyncLLM's, but what is wrong with the parameters is raised here, not when the stream is already open.

        Raises:
            VLLMValidationError: the client's mistake, or a feature the engines do not support (both HTTP 400).
        """
        self._check(sampling_params)
        return self._explain_errors(request_id, super().generate(prompt, sampling_params, request_id, **kwargs))

    async def _explain_errors(
        self, request_id: str, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass outputs on; the end of a request that no instance served becomes a GenerationError, 503 or 429."""
        unserved = self.engine_core.unserved
        try:
            async for output in outputs:
                if (status := unserved.get(request_id)) is not None:
                    full = status is HTTPStatus.TOO_MANY_REQUESTS
                    what = "the server has more requests than it can queue" if full else "no instance could finish it"
                    error = GenerationError(f"{what}; try again later")
                    error.status_code = status
                    raise error
                yield output
        finally:
            unserved.pop(request_id, None)
            await outputs.aclose()

    def _check(self, params: SamplingParams) -> None:
        try:
            features = required_features(params)
            self.engine_core.dispatcher.router.check(features)
            self.engine_core.slo_of(params)
            params.verify(
                self.model_config, None, self.vllm_config.structured_outputs_config, self.input_processor.tokenizer
            )
        except UnsupportedError as error:
            raise VLLMValidationError(str(error), parameter=error.features[0], value=None) from None
        except SloError as error:
            raise VLLMValidationError(str(error), parameter=error.field, value=error.value) from None
        except VLLMValidationError:
            raise
        except Exception as error:
            if params.structured_outputs is None:
                raise
            # Schemas that are no schemas fail inside the grammar compiler, in many ways.
            raise VLLMValidationError(
                f"the structured output constraint cannot be used: {error}", parameter="structured_outputs"
            ) from error


@dataclass
class FrontEnd:
    """A running front end; `app` serves HTTP and ends everything with its lifespan."""

    app: FrontMiddleware
    openai_app: FastAPI
    llm: ConfluxLLM
    dispatcher: Dispatcher
    metrics: IngressMetrics
    _closed: bool = field(default=False, repr=False)
    _sampling: asyncio.TimerHandle | None = field(default=None, repr=False)

    def sample_metrics(self) -> None:
        """Bring the router's metrics up to date."""
        self.metrics.sample(self.dispatcher, self.app.in_flight, self.app.waiting)

    def keep_sampling(self) -> None:
        """Do so now, and every second from now on."""
        self.sample_metrics()
        self._sampling = asyncio.get_running_loop().call_later(_STATISTICS_INTERVAL, self.keep_sampling)

    async def close(self) -> None:
        """Abort all requests, end all sessions, stop the tokenizer's threads."""
        if not self._closed:
            self._closed = True
            if self._sampling is not None:
                self._sampling.cancel()
            await self.dispatcher.close()
            self.llm.shutdown()


@dataclass
class _Server:
    """Stands for uvicorn's server: vLLM's error handler sets `should_exit` when the engine is dead."""

    should_exit: bool = False


def parse_arguments(options: IngressOptions) -> Namespace:
    """The arguments of `vllm serve` for this ingress, with vLLM's defaults for all others."""
    arguments = [
        *("--model", options.model_path, "--served-model-name", options.served_model_name),
        *("--disable-uvicorn-access-log", "--no-enable-log-requests"),
    ]
    if options.max_model_len is not None:
        arguments += ["--max-model-len", str(options.max_model_len)]
    if options.trust_remote_code:
        arguments += ["--trust-remote-code"]
    if options.api_keys:
        arguments += ["--api-key", *options.api_keys]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*arguments, *options.extra_args])
    validate_parsed_serve_args(args)
    return args


async def build_front_end(
    options: IngressOptions, directory: Directory, ingress_id: str, limits: TransportLimits | None = None
) -> FrontEnd:
    """Build the whole front end in the running event loop and begin to follow the directory.

    Args:
        options: settings; the model's folder must hold config.json and the tokenizer.
        directory: where instances are listed; requests wait until one is ready.
        ingress_id: unique among the ingresses of the cluster and its restarts.
        limits: of the transport.

    Raises:
        VersionError: the installed vLLM is another version.
    """
    require_version()
    args = parse_arguments(options)
    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    metrics = IngressMetrics(options.served_model_name, ingress_id, options.slo_classes, options.slo_objective)
    client = DispatcherCoreClient(
        lambda deliver: Dispatcher(
            ingress_id,
            directory,
            deliver,
            max_attempts=options.max_attempts,
            no_instance_timeout=options.no_instance_timeout,
            limits=limits,
            routing=options.routing,
        ),
        options.slo_classes,
        metrics,
    )
    llm = ConfluxLLM(vllm_config, client)
    app = build_app(args, _TASKS, vllm_config.model_config)
    await init_app_state(llm, app.state, args, _TASKS)
    app.state.server = _Server()

    dispatcher, configured_length = client.dispatcher, vllm_config.model_config.max_model_len

    def adopt_limits() -> None:
        """The shortest limit of the instances that are ready is the one promised to clients."""
        lengths = [load.ready.max_model_len for load in dispatcher.router.instances.values()]
        vllm_config.model_config.max_model_len = min(lengths, default=configured_length)

    dispatcher.on_instances_changed = adopt_limits
    front_end: FrontEnd

    def close() -> Awaitable[None]:
        return front_end.close()

    def exposition() -> bytes:
        front_end.sample_metrics()
        return render(metrics.store, get_prometheus_registry())

    middleware = FrontMiddleware(app, dispatcher, options, close, metrics, exposition)
    front_end = FrontEnd(middleware, app, llm, dispatcher, metrics)
    dispatcher.start()
    front_end.keep_sampling()
    return front_end
