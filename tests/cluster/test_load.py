"""What an instance says of its load, and how long it waits for an iteration."""

from __future__ import annotations

import pytest

from conflux_ray.cluster.load import LoadMeter
from conflux_ray.execution.engine import Engine
from conflux_ray.execution.loop import LEAST_PATIENCE, PATIENCE, IterationLoop
from conflux_ray.execution.plan import WorkerResult
from conflux_ray.execution.request import Request
from conflux_ray.kv import KVGeometry
from conflux_ray.planning.interface import DecodeState
from conflux_ray.planning.plain import PlainPolicy
from conflux_ray.planning.scheduler import Scheduler, SchedulerParams
from conflux_ray.wire import Sampling, Slo
from tests.planning.build import per_token_model

NUM_RANKS = 2
TBT = 0.1


def scheduler() -> Scheduler:
    return Scheduler(per_token_model(NUM_RANKS), "fcfs", SchedulerParams(quantum=4, idle_tau=TBT, starvation_quantum=8))


def engine(policy=None) -> Engine:
    geometry = KVGeometry(block_size=4, sp_degree=NUM_RANKS, num_blocks=500)
    return Engine(geometry, NUM_RANKS, 1, policy or scheduler(), max_model_len=512)


def add(engine: Engine, name: str, tokens: int) -> None:
    engine.add(Request(name, 0, [1] * tokens, Sampling(max_tokens=50, temperature=0.0), Slo(1.0, TBT), arrival=0.0))


def newcomer(tokens: int, seconds: float, priority: int = 0) -> Request:
    """A request that came at 7.0 and is to be answered in `seconds`."""
    sampling = Sampling(max_tokens=50, temperature=0.0)
    return Request("new", 0, [1] * tokens, sampling, Slo(seconds, TBT), arrival=7.0, priority=priority)


def run_one(engine: Engine, now: float = 0.0) -> None:
    plan = engine.plan(now)
    assert plan is not None
    results = []
    for rank in range(NUM_RANKS):
        ids = [d.alloc_id for d in plan.decodes[rank]] + [
            c.alloc_id for c in plan.chunks if c.samples and c.shards[-1].rank == rank
        ]
        acknowledged = [t.transfer_id for t in plan.transfers]
        results.append(WorkerResult(plan.iteration, rank, ids, [5] * len(ids), acknowledged=acknowledged))
    engine.apply(results, now)


def test_queued_work_is_what_the_latency_model_needs_for_the_prompts_left() -> None:
    instance = engine()
    meter = LoadMeter(instance)
    assert meter.report(False).queued_work_s == 0
    add(instance, "a", 300)
    one = meter.report(False)
    add(instance, "b", 150)
    two = meter.report(False)
    assert one.queued_work_s == pytest.approx(300 / one.capacity)
    assert two.queued_work_s == pytest.approx(1.5 * one.queued_work_s)
    rate = scheduler().prefill_rate(DecodeState.summed([0, 0], [0, 0]))
    assert one.capacity == rate > 0


def test_resident_decodes_are_load_and_slow_the_prompts() -> None:
    instance = engine()
    meter = LoadMeter(instance)
    idle = meter.report(False)
    for name in "abcdef":
        add(instance, name, 20)
    while any(True for _ in instance.pending):
        run_one(instance)
    busy = meter.report(False)
    assert sum(instance.residents.tokens) == 6
    assert busy.queued_work_s > 0  # an iteration of the decodes
    assert busy.capacity < idle.capacity


def test_without_a_latency_model_the_rate_is_the_measured_one() -> None:
    instance = engine(PlainPolicy(64, 8))
    meter = LoadMeter(instance)
    before = meter.report(False).capacity
    add(instance, "a", 100)
    run_one(instance)
    instance.timings[-1] = instance.timings[-1]._replace(measured=0.001)
    meter.observe(instance.timings)
    assert meter.report(False).capacity > before


def test_a_request_can_be_met_if_it_and_what_is_queued_before_it_fit_its_time() -> None:
    instance = engine()
    meter = LoadMeter(instance)
    rate = meter.report().capacity
    assert meter.can_meet(newcomer(100, 1.01 * 100 / rate), now=7.0)
    assert not meter.can_meet(newcomer(100, 0.99 * 100 / rate), now=7.0)
    add(instance, "before", 300)
    assert not meter.can_meet(newcomer(100, 1.01 * 100 / rate), now=7.0)
    assert meter.can_meet(newcomer(100, 1.01 * 400 / rate), now=7.0)
    assert meter.can_meet(newcomer(100, 1.01 * 100 / rate, priority=-1), now=7.0)


def test_without_a_latency_model_a_request_waits_for_all_that_is_queued() -> None:
    instance = engine(PlainPolicy(64, 8))
    meter = LoadMeter(instance)
    rate = meter.report().capacity
    add(instance, "before", 300)
    assert not meter.can_meet(newcomer(100, 0.99 * 400 / rate, priority=-1), now=7.0)
    assert meter.can_meet(newcomer(100, 1.01 * 400 / rate), now=7.0)


def test_resident_decodes_count_for_a_new_request() -> None:
    instance = engine()
    meter = LoadMeter(instance)
    rate = meter.report().capacity
    assert meter.can_meet(newcomer(100, 1.01 * 100 / rate), now=7.0)
    for name in "abcdef":
        add(instance, name, 20)
    while any(True for _ in instance.pending):
        run_one(instance)
    assert not meter.can_meet(newcomer(100, 1.01 * 100 / rate), now=7.0)


class Deaf:
    """Workers that note how long they are waited for."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def broadcast(self, plan) -> None:
        pass

    def ready(self) -> bool:
        return False

    def collect(self, timeout: float):
        self.timeouts.append(timeout)
        raise TimeoutError


@pytest.mark.parametrize("limit", [1000.0, 5.0])
def test_an_iteration_is_waited_for_as_long_as_its_prediction_permits(limit: float) -> None:
    instance, workers = engine(), Deaf()
    add(instance, "a", 100)
    loop = IterationLoop(instance, workers, timeout=limit)
    with pytest.raises(TimeoutError):
        loop.step()
    predicted = instance.predicted_in_flight
    assert predicted is not None
    assert predicted > 0
    assert workers.timeouts == [min(limit, LEAST_PATIENCE + PATIENCE * predicted)]


def test_without_a_prediction_the_limit_counts() -> None:
    instance, workers = engine(PlainPolicy(64, 8)), Deaf()
    add(instance, "a", 100)
    with pytest.raises(TimeoutError):
        IterationLoop(instance, workers, timeout=77.0).step()
    assert workers.timeouts == [77.0]
