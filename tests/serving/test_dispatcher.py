"""A request survives its instance; what does not count is dropped; nothing waits for ever."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from fake_engine import FakeEngine, FakeEngineProcess, tokens

from conflux_ray.serving.directory import StaticDirectory
from conflux_ray.serving.dispatcher import Dispatcher
from conflux_ray.serving.router import UnsupportedError
from conflux_ray.transport import TransportLimits
from conflux_ray.wire import AddRequest, FinishReason, RequestOutput, Sampling, Slo

LIMITS = TransportLimits(retry_first=0.01, retry_last=0.05)


def request(request_id: str = "r", count: int = 5, prompt_length: int = 3, **sampling: object) -> AddRequest:
    parameters = Sampling(max_tokens=count, **({"temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return AddRequest(request_id, 0, [1] * prompt_length, parameters, Slo(1.0, 0.1))


class Front:
    """A dispatcher whose outputs are collected per request."""

    def __init__(self, *engines: FakeEngine | FakeEngineProcess, **options: float) -> None:
        self.directory = StaticDirectory([engine.info for engine in engines])
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.dispatcher = Dispatcher("ingress", self.directory, self.collect, limits=LIMITS, **options)  # type: ignore[arg-type]

    def collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def tokens(self, request_id: str = "r") -> list[int]:
        return [t for output in self.outputs.get(request_id, []) for t in output.new_token_ids]

    def finish(self, request_id: str = "r") -> FinishReason | None:
        outputs = self.outputs.get(request_id)
        return outputs[-1].finish_reason if outputs else None


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "condition not met in 15 s"
        await asyncio.sleep(0.002)


def run(front: Front, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        front.dispatcher.start()
        try:
            await scenario()
        finally:
            await front.dispatcher.close()

    asyncio.run(main())


@pytest.fixture
def engine():
    engine = FakeEngine("i0").start()
    yield engine
    engine.stop()


@pytest.fixture
def other():
    engine = FakeEngine("i1").start()
    yield engine
    engine.stop()


def test_a_request_gets_its_tokens_and_its_claim_is_released(engine):
    front = Front(engine)

    async def scenario():
        assert await front.dispatcher.wait_ready(5)
        front.dispatcher.submit(request(count=7))
        await until(front.finish)
        assert front.tokens() == tokens(3, 7)
        assert front.finish() is FinishReason.LENGTH
        assert front.dispatcher.in_flight == 0
        assert front.dispatcher.router.instances["i0"].in_flight == 0

    run(front, scenario)


def test_an_abort_reaches_the_engine_and_releases_the_claim(engine):
    front = Front(engine)

    async def scenario():
        await front.dispatcher.wait_ready(5)
        front.dispatcher.submit(request(count=100_000))
        await until(front.tokens)
        front.dispatcher.abort(["r", "unknown"])
        await until(lambda: ("r", 0) in engine.aborted and not engine.running)
        assert front.dispatcher.router.instances["i0"].in_flight == 0

    run(front, scenario)


def test_a_killed_instance_costs_no_token_and_repeats_none(other):
    victim = FakeEngineProcess("i0", interval=0.01)
    other.interval = 0.01
    front = Front(victim)

    async def scenario():
        await front.dispatcher.wait_ready(5)
        for i in range(8):
            front.dispatcher.submit(request(f"r{i}", count=60, prompt_length=3 + i))
        await until(lambda: all(len(front.tokens(f"r{i}")) > 5 for i in range(8)))
        front.directory.set([victim.info, other.info])
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        victim.kill()
        await until(lambda: all(front.finish(f"r{i}") for i in range(8)))
        for i in range(8):
            assert front.tokens(f"r{i}") == tokens(3 + i, 60)
            assert [o.token_index for o in front.outputs[f"r{i}"]] == list(range(60))
        assert len(other.added) == 8
        assert all(0 < len(added.output_token_ids) < 60 and added.attempt == 1 for added in other.added)
        assert front.dispatcher.counters.migrations == 8

    run(front, scenario)


def test_a_request_waits_for_an_instance_and_is_then_served(engine):
    front = Front()

    async def scenario():
        front.dispatcher.submit(request())
        await asyncio.sleep(0.05)
        assert not front.dispatcher.is_ready()
        front.directory.set([engine.info])
        await until(front.finish)
        assert front.tokens() == tokens(3, 5)
        assert engine.added[0].age_s >= 0.05

    run(front, scenario)


def test_without_an_instance_in_time_the_request_ends_with_an_error():
    front = Front(no_instance_timeout=0.05)

    async def scenario():
        front.dispatcher.submit(request())
        await until(front.finish)
        assert front.finish() is FinishReason.REJECTED
        assert front.dispatcher.in_flight == 0
        assert not await front.dispatcher.wait_ready(0.01)

    run(front, scenario)


def test_attempts_are_bounded(engine, other):
    def reject(output: RequestOutput) -> RequestOutput:
        return RequestOutput(output.request_id, output.attempt, output.token_index, [], FinishReason.REJECTED)

    engine.tamper = other.tamper = reject
    front = Front(engine, other, max_attempts=2, no_instance_timeout=0.2)

    async def scenario():
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        front.dispatcher.submit(request())
        await until(front.finish)
        assert front.finish() is FinishReason.REJECTED
        assert "2 attempts" in (front.outputs["r"][-1].error or "")
        assert len(engine.added) == len(other.added) == 1

    run(front, scenario)


def test_a_rejected_request_is_served_by_another_instance(engine, other):
    engine.tamper = lambda o: RequestOutput(o.request_id, o.attempt, o.token_index, [], FinishReason.REJECTED)
    front = Front(engine, other)

    async def scenario():
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        for i in range(4):
            front.dispatcher.submit(request(f"r{i}"))
        await until(lambda: all(front.finish(f"r{i}") for i in range(4)))
        assert all(front.tokens(f"r{i}") == tokens(3, 5) for i in range(4))

    run(front, scenario)


def full(output: RequestOutput) -> RequestOutput:
    return RequestOutput(output.request_id, output.attempt, output.token_index, [], FinishReason.OVERLOADED)


def test_when_every_queue_is_full_a_new_request_ends_at_once(engine, other):
    engine.tamper = other.tamper = full
    front = Front(engine, other, no_instance_timeout=60.0)

    async def scenario():
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        front.dispatcher.submit(request())
        await until(front.finish)
        assert front.finish() is FinishReason.OVERLOADED
        assert len(engine.added) == len(other.added) == 1
        assert front.dispatcher.in_flight == 0

    run(front, scenario)


def test_an_instance_with_room_takes_what_a_full_one_refuses(engine, other):
    engine.tamper = full
    front = Front(engine, other)

    async def scenario():
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        for i in range(4):
            front.dispatcher.submit(request(f"r{i}"))
        await until(lambda: all(front.finish(f"r{i}") for i in range(4)))
        assert all(front.tokens(f"r{i}") == tokens(3, 5) for i in range(4))

    run(front, scenario)


def test_a_request_with_tokens_waits_where_a_new_one_would_be_refused(engine, other):
    """Its instance dies after some tokens, the next is full; a third one, which comes later, has room."""
    victim = FakeEngineProcess("victim")
    engine.tamper = full
    front = Front(victim, no_instance_timeout=60.0)

    async def scenario():
        await until(lambda: len(front.dispatcher.router.instances) == 1)
        front.dispatcher.submit(request(count=200))
        await until(lambda: len(front.tokens()) >= 2)
        front.directory.set([victim.info, engine.info])
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        victim.kill()
        await until(lambda: len(engine.added) == 1)
        await asyncio.sleep(0.1)
        assert front.finish() is None
        front.directory.set([engine.info, other.info])
        await until(front.finish)
        assert front.finish() is FinishReason.LENGTH
        assert front.tokens() == tokens(3, 200)

    run(front, scenario)


def test_a_request_without_a_seed_gets_one_that_it_keeps(engine, other):
    engine.tamper = lambda o: RequestOutput(o.request_id, o.attempt, o.token_index, [], FinishReason.REJECTED)
    front = Front(engine, other)

    async def scenario():
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        for i in range(4):
            front.dispatcher.submit(request(f"r{i}", temperature=0.7))
        front.dispatcher.submit(request("greedy", temperature=0.0))
        front.dispatcher.submit(request("own", temperature=0.7, seed=5))
        names = [*(f"r{i}" for i in range(4)), "greedy", "own"]
        await until(lambda: all(front.finish(name) for name in names))
        seeds = {name: {a.sampling.seed for a in engine.added + other.added if a.request_id == name} for name in names}
        assert seeds.pop("greedy") == {None}
        assert seeds.pop("own") == {5}
        assert all(len(seen) == 1 and None not in seen for seen in seeds.values())
        assert len(set.union(*seeds.values())) == 4
        assert any(a.attempt == 1 for a in other.added)

    run(front, scenario)


def test_outputs_of_another_attempt_and_repeated_tokens_are_dropped(engine):
    front = Front(engine)

    def stale(output: RequestOutput) -> RequestOutput:
        if output.token_index == 2:
            return msgspec.structs.replace(output, attempt=7, new_token_ids=[1])
        if output.token_index == 3:
            return msgspec.structs.replace(output, token_index=0, new_token_ids=[1])
        return output

    engine.tamper = stale

    async def scenario():
        await front.dispatcher.wait_ready(5)
        front.dispatcher.submit(request(count=4))
        await until(lambda: front.dispatcher.counters.stale_outputs == 2)
        assert front.tokens() == tokens(3, 2)

    run(front, scenario)


def test_a_missing_token_moves_the_request_and_stops_the_old_attempt(engine):
    front = Front(engine)
    engine.tamper = lambda o: (
        msgspec.structs.replace(o, token_index=o.token_index + 1) if o.attempt == 0 and o.token_index == 2 else o
    )

    async def scenario():
        await front.dispatcher.wait_ready(5)
        front.dispatcher.submit(request(count=6))
        await until(front.finish)
        assert front.tokens() == tokens(3, 6)
        assert ("r", 0) in engine.aborted
        assert [(a.attempt, a.output_token_ids) for a in engine.added] == [(0, []), (1, tokens(3, 2))]

    run(front, scenario)


def test_a_draining_instance_keeps_its_requests_and_gets_no_new_ones(engine, other):
    front = Front(engine)

    async def scenario():
        await front.dispatcher.wait_ready(5)
        front.dispatcher.submit(request("old", count=100))
        await until(lambda: front.tokens("old"))
        engine.draining = True
        await until(lambda: not front.dispatcher.is_ready())
        front.dispatcher.submit(request("new"))
        front.directory.set([engine.info, other.info])
        await until(lambda: front.finish("new") and front.finish("old"))
        assert front.tokens("old") == tokens(3, 100)
        assert [a.request_id for a in other.added] == ["new"]

    run(front, scenario)


def test_while_the_deployment_is_drained_nobody_waits_for_an_instance(engine):
    engine.closing = True
    front = Front(engine)

    async def scenario():
        await until(front.dispatcher.router.is_closing)
        assert not front.dispatcher.is_ready()
        assert not await asyncio.wait_for(front.dispatcher.wait_ready(60.0), 1.0)
        engine.draining, engine.closing = True, False
        await until(lambda: not front.dispatcher.router.is_closing())
        waiting = asyncio.create_task(front.dispatcher.wait_ready(60.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()  # an instance may come
        engine.closing = True
        assert not await asyncio.wait_for(waiting, 1.0)

    run(front, scenario)


def test_what_has_been_let_in_is_served_while_the_deployment_is_drained(engine):
    """A request that is between the door and its instance when the drain begins."""
    engine.closing = True
    front = Front(engine)

    async def scenario():
        await until(front.dispatcher.router.is_closing)
        front.dispatcher.submit(request("late", count=3))
        await until(lambda: front.finish("late"))
        assert front.finish("late") is FinishReason.LENGTH
        assert len(front.tokens("late")) == 3

    run(front, scenario)


def test_a_stream_that_loses_its_instance_while_the_deployment_is_drained_goes_on_at_another(engine, other):
    front = Front(engine, no_instance_timeout=60.0)

    async def scenario():
        await front.dispatcher.wait_ready(5)
        front.directory.set([engine.info, other.info])
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        other.draining = True
        await until(lambda: front.dispatcher.router.instances["i1"].draining)
        front.dispatcher.submit(request("r", count=1000))
        await until(lambda: front.tokens())
        other.draining = False
        engine.closing = other.closing = True
        await until(front.dispatcher.router.is_closing)
        engine.stop()
        await until(front.finish)
        assert front.tokens() == tokens(3, 1000)
        assert len(other.added) == 1

    run(front, scenario)


def test_a_stream_waits_for_the_successor_of_the_only_instance_while_the_deployment_is_drained(engine, other):
    front = Front(engine, no_instance_timeout=60.0)
    engine.closing = other.closing = True

    async def scenario():
        await until(front.dispatcher.router.is_closing)
        front.dispatcher.submit(request("r", count=1000))
        await until(lambda: front.tokens())
        engine.stop()
        await until(lambda: front.dispatcher.num_waiting == 1)
        front.directory.set([other.info])
        await until(lambda: other.added)
        assert not front.dispatcher.is_ready()  # the successor has said nothing yet, or that it is drained too
        await until(front.finish)
        assert front.tokens() == tokens(3, 1000)

    run(front, scenario)


def test_whoever_waits_is_let_in_when_a_drain_is_undone(engine, other):
    """One instance goes, the other is open again: only the whole deployment was closed before."""
    engine.closing = other.closing = other.draining = True
    front = Front(engine)

    async def scenario():
        front.directory.set([engine.info, other.info])
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        await until(front.dispatcher.router.is_closing)
        other.closing = False  # it hears of it first
        await until(lambda: not front.dispatcher.router.is_closing())
        waiting = asyncio.create_task(front.dispatcher.wait_ready(60.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engine.closing = False
        assert await asyncio.wait_for(waiting, 5.0)

    run(front, scenario)


def test_while_the_deployment_is_stopped_a_request_without_an_instance_ends_at_once(engine):
    front = Front(engine, no_instance_timeout=60.0)

    async def scenario():
        await until(front.dispatcher.is_ready)
        engine.draining = True
        await until(lambda: not front.dispatcher.is_ready())
        front.dispatcher.submit(request("waits"))
        await asyncio.sleep(0.05)
        assert front.finish("waits") is None  # an instance may come
        engine.closing = True
        await until(lambda: front.finish("waits"))
        front.dispatcher.submit(request("late"))
        await until(lambda: front.finish("late"))
        assert front.finish("waits") is front.finish("late") is FinishReason.REJECTED
        assert "stopped" in (front.outputs["late"][-1].error or "")
        assert front.dispatcher.in_flight == 0

    run(front, scenario)


def test_requests_of_one_group_share_an_instance(engine, other):
    front = Front(engine, other)

    async def scenario():
        await until(lambda: len(front.dispatcher.router.instances) == 2)
        for i in range(6):
            front.dispatcher.submit(request(f"{i}_p", count=50), group="p")
        await until(lambda: all(front.finish(f"{i}_p") for i in range(6)))
        assert sorted([len(engine.added), len(other.added)]) == [0, 6]

    run(front, scenario)


def test_unsupported_features_and_ids_in_use_are_refused(engine):
    front = Front(engine)

    async def scenario():
        await front.dispatcher.wait_ready(5)
        with pytest.raises(UnsupportedError, match="logit_bias"):
            front.dispatcher.submit(request(logit_bias={1: 1.0}))
        front.dispatcher.submit(request(count=100))
        with pytest.raises(ValueError, match="in use"):
            front.dispatcher.submit(request())

    run(front, scenario)


def test_a_directory_that_fails_is_followed_again(engine):
    class Flaky(StaticDirectory):
        failures = 1

        async def watch(self):
            if self.failures:
                self.failures -= 1
                raise ConnectionError("registry is away")
            async for instances in super().watch():
                yield instances

    front = Front()
    front.dispatcher._directory = Flaky([engine.info])

    async def scenario():
        assert await front.dispatcher.wait_ready(10)

    run(front, scenario)
