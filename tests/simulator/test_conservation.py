"""Nothing is lost or made up, whatever the system: requests, tokens, memory, order of time."""

from __future__ import annotations

import numpy as np
import pytest

from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.deployment import PrefixCache
from conflux_ray.simulator.request import Phase, Slo
from conflux_ray.simulator.run import Outcome
from conflux_ray.simulator.systems.registry import SYSTEMS
from conflux_ray.simulator.trace import Quantiles, Trace, synthesize
from tests.simulator.build import PlainHardware, h200, served, workload

EVERY = sorted(SYSTEMS)
BASELINES = [name for name in EVERY if not name.startswith("conflux")]
ABLATIONS = ["overlap", "phase", "cobatch", "even", "skewed"]


def busy(count: int = 150, rate: float = 4.0, seed: int = 0) -> Trace:
    return synthesize("busy", Quantiles(80, 300), Quantiles(30, 120), count, rate, np.random.default_rng(seed))


def check(outcome: Outcome, trace: Trace) -> None:
    """`simulate` has checked already that every block came back; here the tokens."""
    for request, asked in zip(outcome.requests, trace.requests, strict=True):
        assert request.phase is Phase.FINISHED
        assert len(request.times) == asked.output_tokens
        assert request.times[0] > request.arrival
        assert all(a < b for a, b in zip(request.times, request.times[1:], strict=False))


def options_of(system: str) -> dict[str, object]:
    if system.startswith("distserve"):
        return {"split": "1x1:1x1"}
    return {"tp": 1} if system.startswith("data") else {}


@pytest.mark.parametrize("system", EVERY)
def test_every_request_gets_its_tokens_with_room_to_spare(system: str):
    trace = busy()
    outcome = served(system, trace, gpus=2, **options_of(system))
    check(outcome, trace)
    assert sum(r.preemptions for r in outcome.requests) == 0


@pytest.mark.parametrize("system", EVERY)
def test_every_request_gets_its_tokens_when_memory_is_scarce(system: str):
    # Requests grow to several times their prompt, and dozens are there at once.
    trace = synthesize("growing", Quantiles(60, 150), Quantiles(120, 400), 100, 50.0, np.random.default_rng(0))
    outcome = served(system, trace, gpus=2, hardware=PlainHardware(blocks=150), **options_of(system))
    check(outcome, trace)
    assert sum(r.preemptions for r in outcome.requests) > 0


@pytest.mark.parametrize("without", ABLATIONS)
def test_ablations_lose_nothing_either(without: str):
    trace = busy(rate=50.0)
    for blocks in (10_000, 150):
        check(served("conflux", trace, gpus=2, hardware=PlainHardware(blocks=blocks), without=without), trace)


@pytest.mark.parametrize("system", EVERY)
def test_a_request_larger_than_the_memory_is_rejected_and_a_miss(system: str):
    trace = workload((0.0, 50, 2), (0.1, 5000, 2))
    outcome = served(system, trace, gpus=2, hardware=PlainHardware(blocks=100), **options_of(system))
    assert [r.phase for r in outcome.requests] == [Phase.FINISHED, Phase.REJECTED]
    assert (outcome.summary.rejected, outcome.summary.attainment) == (1, 0.5)


@pytest.mark.parametrize("system", EVERY)
def test_the_same_input_gives_the_same_times(system: str):
    trace = busy(60, rate=20.0)
    first, second = (served(system, trace, gpus=2, **options_of(system)) for _ in range(2))
    assert [r.times for r in first.requests] == [r.times for r in second.requests]


@pytest.mark.parametrize("system", EVERY)
def test_another_seed_gives_other_times(system: str):
    outcomes = [served(system, busy(20, seed=seed), gpus=2, **options_of(system)) for seed in (0, 1)]
    assert outcomes[0].requests[0].times != outcomes[1].requests[0].times


@pytest.mark.parametrize("system", ["chunked", "conflux", "muxwise"])
def test_a_backlog_is_worked_off_without_a_pause(system: str):
    # 20 prompts of 100 tokens at once. At best 1 ms a token and GPU; an iteration has 10 ms of its own.
    trace = workload(*[(0.0, 100, 1)] * 20)
    outcome = served(system, trace, slo=Slo(60.0, 1.0))
    last = max(r.times[0] for r in outcome.requests)
    assert last == pytest.approx(20 * 0.1 + 0.01 * outcome.summary.iterations)


def test_prefix_cache_computes_a_shared_prompt_once():
    ids = (1, 2)
    trace = workload((0.0, 1030, 1), (5.0, 1030, 1), hash_ids=[ids, ids])
    for system in EVERY:
        outcome = served(system, trace, gpus=2, prefix_cache=0.5, **options_of(system))
        first, second = (r.times[0] - r.arrival for r in outcome.requests)
        if system.startswith("data"):
            continue  # its replicas have a cache each, and the second request goes to the other one
        # 6 of 1030 tokens are left to compute.
        assert second < 0.05 < first, system
    plain = served("chunked", trace)
    assert plain.requests[1].times[0] - 5.0 == pytest.approx(plain.requests[0].times[0])


def test_prefix_cache_forgets_the_least_recently_used():
    cache = PrefixCache(3 * 512)
    cache.remember([1, 2])
    cache.remember([3])
    assert cache.match([1, 2, 9]) == 1024
    cache.remember([4])
    assert cache.match([3]) == 0  # 1 and 2 were used since
    assert cache.match([1, 2]) == 1024


@pytest.mark.parametrize("system", ["conflux", "chunked++"])
def test_events_grow_linearly_with_simulated_time(system: str, monkeypatch: pytest.MonkeyPatch):
    clocks: list[Clock] = []
    monkeypatch.setattr(Clock, "run", lambda self, run=Clock.run: (clocks.append(self), run(self))[1])
    for seconds in (60, 240):
        trace = synthesize(
            "toolagent", Quantiles(6346, 26114), Quantiles(30, 600), 3 * seconds, 3.0, np.random.default_rng(1)
        )
        served(system, trace, gpus=4, hardware=h200(), slo=Slo(2.0, 0.1))
    short, long = (clock.events for clock in clocks)
    assert 1000 < long < 5 * short
