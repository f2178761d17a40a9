"""A worker's runner that can also time one part of an iteration alone (section 6.2, "Estimator construction").

A plan without a `part` runs as the engine runs it. With one, only that part of its forward pass runs, for every layer
one after the other, and `elapsed` is the time it takes on this worker:

* `gemm`: the model with nothing in place of attention: the shared linear region, all-reduces of the base TP included;
* `decode`: the decode path of the attention region;
* `prefill`: the prefill path without its collectives: K and V written, this rank's heads attended;
* `comm`: its collectives alone: heads packed, exchanged there and back, merged;
* `transfer`: the hand-over of KV to decode ranks;
* `host`: what is outside the layers: index tensors of the batch, the language-model head, sampling.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from conflux_ray.execution.attention import AttentionStep, XPAttention
from conflux_ray.execution.device import Device
from conflux_ray.execution.plan import IterationPlan, WorkerResult
from conflux_ray.execution.runner import ModelRunner, RunningIteration
from conflux_ray.profiling.measure import runs_before

RUNNER = f"{__name__}:ProfilingRunner"
"""For `WorkerSpec.runner`."""

Variant = TypeVar("Variant", bound=XPAttention)


def timed(device: Device, work: Callable[[], None], agree: Callable[[int], int]) -> float:
    """Seconds that `work`, enqueued on the main stream, takes on the device.

    Where the device works on its own, behind other runs of it, so that the host's enqueueing does not show and the
    device is as warm as serving makes it (`measure.HOT_SECONDS`).

    Args:
        device: of this worker.
        work: enqueues it; collectives and all.
        agree: the smallest of an integer of all workers, who must run the work equally often.
    """
    device.synchronize()
    if device.compiles:
        for _ in range(agree(runs_before(_timed_once(device, work)))):
            work()
    return _timed_once(device, work)


def _timed_once(device: Device, work: Callable[[], None]) -> float:
    start = device.mark()
    work()
    end, done = device.mark(), device.main.record()
    done.synchronize()
    return device.elapsed(start, end)


class LocalPrefill(XPAttention):
    """The prefill path without its collectives: what they would bring is there already."""

    received: torch.Tensor

    def _scatter_heads(
        self, step: AttentionStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return self.received

    def _gather_heads(self, step: AttentionStep, attended: torch.Tensor, output: torch.Tensor) -> None:
        pass


class Collectives(XPAttention):
    """The prefill path's collectives without what lies between them."""

    def _prefill(
        self,
        step: AttentionStep,
        view: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        received = self._scatter_heads(step, query, key, value)
        attended = received.new_empty(step.num_received, self.layout.shard_heads, self.layout.head_size)
        self._gather_heads(step, attended, output)


class ProfilingRunner(ModelRunner):
    """Runs plans, or the one part of them that they name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # An interrupt at the terminal reaches every process of the group; the profiler ends its workers itself.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        super().__init__(*args, **options)
        for layer in self.pool.layers:  # zeros take less power and time on some devices
            layer.normal_()

    @torch.inference_mode()
    def run(self, plan: IterationPlan) -> RunningIteration:
        """Run the plan, or its part; see the module. A part is over when this returns."""
        if plan.part:
            result = WorkerResult(plan.iteration, self.worker)
            result.elapsed = self._time_part(plan)
        elif plan.transfers and not self.device.compiles:
            # The iteration is over when the KV has arrived, which is after its last layer. (A device that works on its
            # own is in the next iteration by then, and what this one's transfers cost shows on its main stream.)
            results: list[WorkerResult] = []
            self._begin_together()

            def whole() -> None:
                results.append(super(ProfilingRunner, self).run(plan).finish())

            elapsed = timed(self.device, whole, self.model.smallest)
            result = results[0]
            result.elapsed = elapsed
        else:
            return super().run(plan)
        return RunningIteration(self.device.main.record(), lambda: result)

    def _begin_together(self) -> None:
        self.model.smallest(0)

    def _time_part(self, plan: IterationPlan) -> float:
        make = {
            "gemm": self._linear,
            "decode": self._attention,
            "prefill": self._attention,
            "comm": self._attention,
            "transfer": self._transfer,
            "host": self._outside,
        }[plan.part]
        work = make(plan)
        if plan.part in ("decode", "prefill", "comm"):
            # These are dozens of short kernels a layer, which the host of a busy engine enqueues ahead of time.
            work()  # kernels that are new compile
            work = self.device.repeatable(work)
        self._begin_together()
        elapsed = timed(self.device, work, self.model.smallest)
        self.transitions.acknowledge(self.transitions.num_begun, wait=True)
        return elapsed

    def _linear(self, plan: IterationPlan) -> Callable[[], None]:
        batch = self.build_batch(plan)
        input_ids, positions = self.model.inputs(batch.num_tokens)
        own_positions = self.device.upload(batch.positions)
        self.device.commit()
        input_ids.random_(self.model.shape.vocab_size)  # rows that are alike take less power and time on some devices
        positions[: batch.num_tokens] = own_positions

        def work() -> None:
            self.model.forward(input_ids, positions, None)

        return work

    def _attention(self, plan: IterationPlan) -> Callable[[], None]:
        step = self.build_step(self.build_batch(plan), overlap=False)
        attention = self._variant(XPAttention)
        if plan.part == "prefill":
            attention = local = self._variant(LocalPrefill)
            local.received = self._random(step.num_received, self.layout.packed_heads)
        elif plan.part == "comm":
            attention = self._variant(Collectives)
        attention.plan(step)
        tokens = step.num_decodes + step.shard_sizes[step.rank]
        query, output = (self._random(tokens, self.layout.num_heads) for _ in range(2))
        key, value = (self._random(tokens, self.layout.num_kv_heads) for _ in range(2))

        def work() -> None:
            for layer in range(self.model.shape.num_layers):
                attention(step, layer, query, key, value, output)

        return work

    def _transfer(self, plan: IterationPlan) -> Callable[[], None]:
        handoff = self.transitions.begin(plan.transfers, self._prefill_tables, self._decode_tables)
        assert handoff is not None
        self.device.commit()

        def work() -> None:
            for layer in range(self.model.shape.num_layers):
                self.transitions.after_layer(handoff, layer)
            self.device.main.wait(handoff.arrived[-1])

        return work

    def _outside(self, plan: IterationPlan) -> Callable[[], None]:
        size = self.model.config.model_config.get_hidden_size()
        tokens = self.build_batch(plan).num_tokens
        hidden = torch.randn((tokens, size), dtype=self.model.shape.dtype, device=self.device.torch_device)

        def work() -> None:
            batch = self.build_batch(plan)
            sampling = self._prepare_sampling(batch) if batch.sample_ids else None
            self.attention.plan(self.build_step(batch, plan.overlap, plan.decode_sms))
            if sampling is not None:
                self._sample(batch, hidden, sampling)

        return work

    def _variant(self, kind: type[Variant]) -> Variant:
        own = self.attention
        return kind(self.device, self.pool, self.layout, own.exchange, own.scale)

    def _random(self, tokens: int, heads: int) -> torch.Tensor:
        shape = (tokens, heads, self.layout.head_size)
        return torch.randn(shape, dtype=self.model.shape.dtype, device=self.device.torch_device)
