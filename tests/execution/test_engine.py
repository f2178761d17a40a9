"""The engine against workers that answer by script: what is planned, what comes out, and that every block returns."""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_ray.execution.engine import Engine, EngineError, Timing, TokenOutput, pack_tokens
from conflux_ray.execution.plan import (
    IterationPlan,
    Shard,
    WorkerError,
    WorkerResult,
    decode_plan,
    decode_result,
    encode,
    order_shards,
)
from conflux_ray.execution.request import TRANSITIONS, Request, RequestState
from conflux_ray.kv import KVGeometry
from conflux_ray.planning.interface import Decision, DecodeState, KVState, PendingPrefill, Policy
from conflux_ray.planning.plain import PlainPolicy
from conflux_ray.planning.scheduler import Scheduler, SchedulerParams
from conflux_ray.wire import FinishReason, Sampling, Slo
from tests.planning.build import per_token_model

EOS, STOP = 7, 8


def sampled(position: int) -> int:
    """What the scripted workers sample at `position` of prompt and output, if the script does not say otherwise."""
    return 1000 + position


class Driver:
    """An engine and workers that do nothing but answer: one token per row, transfers done at once unless held."""

    def __init__(
        self,
        num_ranks: int = 1,
        tensor_parallel: int = 1,
        num_blocks: int = 65,
        max_model_len: int = 64,
        budget: int = 64,
        max_decodes: int = 8,
        policy: Policy | None = None,
        poison: bool = False,
    ) -> None:
        self.engine = Engine(
            KVGeometry(block_size=4, sp_degree=num_ranks, num_blocks=num_blocks),
            num_ranks,
            tensor_parallel,
            policy or PlainPolicy(budget, max_decodes),
            max_model_len,
            seed=1,
            poison=poison,
        )
        self.script: dict[tuple[str, int], int] = {}  # (request, position) -> token
        self.plans: list[IterationPlan] = []
        self.outputs: list[TokenOutput] = []
        self.hold_transfers = False
        self._unanswered: deque[IterationPlan] = deque()
        self._transfers: list[int] = []
        self._names: dict[int, str] = {}
        self._submitted = 0

    def submit(self, name: str, prompt: int = 8, output: Sequence[int] = (), slo: Slo | None = None, **sampling):
        sampling.setdefault("max_tokens", 4)
        request = Request(
            name,
            0,
            list(range(1, prompt + 1)),
            Sampling(**sampling),
            slo or Slo(ttft_s=2.0, tbt_s=0.1),
            float(self._submitted),
            list(output),
        )
        self._submitted += 1
        self.engine.add(request)
        return request

    def plan(self) -> IterationPlan | None:
        plan = self.engine.plan(0.0)
        if plan is not None:
            self._names.update({r.alloc_id: r.request_id for r in self.engine.requests.values()})
            self._transfers += [t.transfer_id for t in plan.transfers]
            self._unanswered.append(plan)
            self.plans.append(plan)
        self.engine.kv.check()
        return plan

    def answer(self, elapsed: float = 0.01) -> list[TokenOutput]:
        plan = self._unanswered.popleft()
        acknowledged = []
        if not self.hold_transfers or plan.wait_transfers:
            acknowledged, self._transfers = self._transfers, []
        results = []
        for worker in range(self.engine.num_workers):
            rank, tp_rank = divmod(worker, self.engine.tensor_parallel)
            result = WorkerResult(plan.iteration, worker, acknowledged=list(acknowledged), elapsed=elapsed)
            if tp_rank == 0:
                rows = [(d.alloc_id, d.position + 1) for d in plan.decodes[rank]]
                rows += [(c.alloc_id, c.end) for c in plan.chunks if c.samples and c.shards[-1].rank == rank]
                result.alloc_ids = [alloc_id for alloc_id, _ in rows]
                result.tokens = [self.script.get((self._names[a], p), sampled(p)) for a, p in rows]
            results.append(result)
        outputs = self.engine.apply(results, 0.0)
        self.outputs += outputs
        self.engine.kv.check()
        return outputs

    def step(self) -> list[TokenOutput]:
        assert self.plan() is not None
        return self.answer()

    def run(self, ahead: int = 2) -> None:
        """Plan up to `ahead` iterations before the oldest is answered, until all is done."""
        for _ in range(2000):
            while len(self._unanswered) < ahead and self.plan() is not None:
                pass
            if not self._unanswered:
                assert not self.engine.has_work, "nothing runs although there is work"
                return
            self.answer()
        raise AssertionError("the requests do not end")

    def tokens(self, name: str) -> list[int]:
        return [o.token for o in self.outputs if o.request.request_id == name]

    def indices(self, name: str) -> list[int]:
        return [o.index for o in self.outputs if o.request.request_id == name]

    def scheduled(self, name: str) -> list[int]:
        """Positions whose token some plan samples for the request, in order."""
        positions = []
        for plan in self.plans:
            positions += [c.end for c in plan.chunks if c.samples and self._names[c.alloc_id] == name]
            positions += [d.position + 1 for rank in plan.decodes for d in rank if self._names[d.alloc_id] == name]
        return positions


def unpack(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


class TestOneRequest:
    def test_prefill_then_one_token_an_iteration(self):
        driver = Driver()
        driver.submit("a", prompt=8, max_tokens=3)
        driver.run(ahead=1)
        first, second, third = driver.plans
        assert unpack(first.chunks[0].token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert first.chunks[0].samples
        assert [d.position for d in second.decodes[0]] == [8]
        assert [d.position for d in third.decodes[0]] == [9]
        assert driver.tokens("a") == [1008, 1009, 1010]
        assert [o.finished for o in driver.outputs] == [False, False, True]

    def test_the_last_token_within_max_tokens_ends_it_by_length(self):
        driver = Driver()
        request = driver.submit("a", max_tokens=2)
        driver.run()
        assert request.finish_reason is FinishReason.LENGTH
        assert request.state is RequestState.FINISHED

    def test_a_long_prompt_takes_several_chunks_and_samples_with_the_last(self):
        driver = Driver(budget=8)
        driver.submit("a", prompt=20, max_tokens=1)
        driver.run()
        chunks = [plan.chunks[0] for plan in driver.plans]
        assert [(c.start, c.end, c.samples) for c in chunks] == [(0, 8, False), (8, 16, False), (16, 20, True)]
        assert [t for c in chunks for t in unpack(c.token_ids)] == list(range(1, 21))
        assert [len(plan.new_prefills) for plan in driver.plans] == [1, 0, 0]

    def test_one_output_token_needs_no_placement_and_no_transfer(self):
        driver = Driver(num_ranks=2)
        driver.submit("a", max_tokens=1)
        driver.run()
        (plan,) = driver.plans
        assert plan.transfers == ()
        assert [(r.block_table, r.rank) for r in plan.new_residents] == [([], plan.chunks[0].shards[-1].rank)]
        assert driver.tokens("a") == [1008]
        assert driver.engine.kv.is_idle
        assert driver.engine.counters.transitions == 0

    def test_the_completing_chunk_ends_on_the_rank_that_decodes(self):
        driver = Driver(num_ranks=3)
        driver.submit("a", prompt=9, max_tokens=3)
        driver.run()
        (resident,) = driver.plans[0].new_residents
        (transfer,) = driver.plans[0].transfers
        assert driver.plans[0].chunks[0].shards[-1].rank == resident.rank == transfer.target
        assert (transfer.start, transfer.end) == (0, 9)
        assert [bool(rank) for rank in driver.plans[1].decodes] == [r == resident.rank for r in range(3)]

    def test_a_decode_gets_a_new_block_when_its_position_needs_one(self):
        driver = Driver()
        driver.submit("a", prompt=6, max_tokens=8)
        driver.run()
        grown = [(p.iteration, len(g.blocks)) for p in driver.plans for g in p.growths]
        # 7 tokens fit two blocks of 4 at placement; the tokens at positions 8 and 12 open a block each.
        assert grown == [(3, 1), (7, 1)]

    def test_a_plan_survives_serialisation(self):
        driver = Driver(num_ranks=2)
        driver.submit("a", seed=5, top_p=0.5)
        plan = driver.plan()
        assert decode_plan(encode(plan)) == plan

    @pytest.mark.parametrize(
        "message", [WorkerResult(3, 1, [4], [5], [None], [6], 0.5, [b"\0\0\0\0"]), WorkerError(2, "out of memory")]
    )
    def test_an_answer_survives_serialisation(self, message: WorkerResult | WorkerError):
        assert decode_result(encode(message)) == message


class TestRunningAhead:
    def test_the_next_plan_does_not_wait_for_the_tokens_of_the_one_before(self):
        driver = Driver()
        driver.submit("a", prompt=8, max_tokens=4)
        first, second = driver.plan(), driver.plan()
        assert first.chunks[0].samples
        assert [d.position for d in second.decodes[0]] == [8]
        assert driver.engine.num_in_flight == 2
        assert [o.token for o in driver.answer()] == [1008]
        assert [o.token for o in driver.answer()] == [1009]

    @pytest.mark.parametrize("ahead", [1, 2, 3])
    def test_what_comes_out_does_not_depend_on_how_far_it_runs_ahead(self, ahead: int):
        driver = Driver(num_ranks=2, budget=6)
        for name, prompt in (("a", 5), ("b", 17), ("c", 8)):
            driver.submit(name, prompt=prompt, max_tokens=6)
        driver.run(ahead)
        for name, prompt in (("a", 5), ("b", 17), ("c", 8)):
            assert driver.tokens(name) == [sampled(prompt + i) for i in range(6)]

    def test_the_token_scheduled_after_a_stop_token_is_discarded(self):
        driver = Driver()
        request = driver.submit("a", prompt=8, max_tokens=10, stop_token_ids=(STOP,))
        driver.script["a", 9] = STOP
        driver.run(ahead=2)
        assert driver.tokens("a") == [1008, STOP]
        assert driver.scheduled("a") == [8, 9, 10]
        assert driver.engine.counters.discarded_tokens == 1
        assert request.output == [1008, STOP]
        assert driver.engine.kv.is_idle

    def test_a_request_that_ended_is_dropped_from_the_workers_once(self):
        driver = Driver()
        driver.submit("a", prompt=8, max_tokens=10, stop_token_ids=(STOP,))
        driver.submit("b", prompt=8, max_tokens=10)
        driver.script["a", 9] = STOP
        driver.run(ahead=2)
        assert [(p.iteration, p.drop) for p in driver.plans if p.drop] == [(3, (0,))]

    @pytest.mark.parametrize("ahead", [1, 2, 4])
    @pytest.mark.parametrize(("max_tokens", "max_model_len", "expected"), [(5, 64, 5), (50, 13, 5), (50, 9, 1)])
    def test_nothing_is_scheduled_past_max_tokens_or_max_model_len(
        self, ahead: int, max_tokens: int, max_model_len: int, expected: int
    ):
        driver = Driver(max_model_len=max_model_len)
        driver.submit("a", prompt=8, max_tokens=max_tokens)
        driver.run(ahead)
        assert driver.scheduled("a") == [8 + i for i in range(expected)]
        assert len(driver.tokens("a")) == expected
        assert driver.engine.counters.discarded_tokens == 0

    def test_results_of_another_iteration_than_the_oldest_are_refused(self):
        driver = Driver()
        driver.submit("a")
        driver.plan()
        driver.plan()
        with pytest.raises(EngineError, match="expected 1 results of iteration 0"):
            driver.engine.apply([WorkerResult(1, 0)], 0.0)

    def test_results_of_some_workers_only_are_refused(self):
        driver = Driver(num_ranks=2)
        driver.submit("a")
        driver.plan()
        with pytest.raises(EngineError, match="expected 2 results of iteration 0"):
            driver.engine.apply([WorkerResult(0, 0)], 0.0)

    def test_results_without_a_plan_are_refused(self):
        with pytest.raises(EngineError, match="of iteration None"):
            Driver().engine.apply([WorkerResult(0, 0)], 0.0)


class TestEnding:
    def test_eos_ends_it_without_a_stop_reason(self):
        driver = Driver()
        request = driver.submit("a", max_tokens=10, eos_token_id=EOS)
        driver.script["a", 8] = EOS
        driver.run()
        assert driver.tokens("a") == [EOS]
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)

    def test_a_stop_token_ends_it_and_is_the_stop_reason(self):
        driver = Driver()
        request = driver.submit("a", max_tokens=10, eos_token_id=EOS, stop_token_ids=(STOP,))
        driver.script["a", 9] = STOP
        driver.run()
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, STOP)

    def test_ignore_eos_runs_past_the_eos_token(self):
        driver = Driver()
        request = driver.submit("a", max_tokens=3, eos_token_id=EOS, ignore_eos=True)
        driver.script["a", 8] = EOS
        driver.run()
        assert driver.tokens("a") == [EOS, 1009, 1010]
        assert request.finish_reason is FinishReason.LENGTH

    def test_ignore_eos_keeps_stop_tokens(self):
        driver = Driver()
        driver.submit("a", max_tokens=3, eos_token_id=EOS, ignore_eos=True, stop_token_ids=(STOP,))
        driver.script["a", 9] = STOP
        driver.run()
        assert driver.tokens("a") == [1008, STOP]

    def test_before_min_tokens_neither_eos_nor_stop_token_ends_it(self):
        driver = Driver()
        driver.submit("a", max_tokens=8, min_tokens=3, eos_token_id=EOS, stop_token_ids=(STOP,))
        driver.script |= {("a", 8): EOS, ("a", 9): STOP, ("a", 10): EOS, ("a", 11): 99}
        driver.run()
        assert driver.tokens("a") == [EOS, STOP, EOS]

    def test_a_stop_token_that_is_also_the_last_one_ends_it_by_stop(self):
        driver = Driver()
        request = driver.submit("a", max_tokens=2, stop_token_ids=(STOP,))
        driver.script["a", 9] = STOP
        driver.run()
        assert request.finish_reason is FinishReason.STOP


class TestAdding:
    def test_an_id_in_use_is_refused(self):
        driver = Driver()
        driver.submit("a")
        with pytest.raises(ValueError, match="request_id a is in use"):
            driver.submit("a")

    def test_an_id_may_come_again_when_it_has_ended(self):
        driver = Driver()
        driver.submit("a", max_tokens=1)
        driver.run()
        driver.submit("a", max_tokens=1)
        driver.run()
        assert driver.tokens("a") == [1008, 1008]

    def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(self):
        with pytest.raises(ValueError, match=r"64 prompt and 0 output tokens leave no room .* max_model_len=64"):
            Driver(max_model_len=64).submit("a", prompt=64)

    def test_a_resumed_request_that_has_all_its_tokens_is_refused(self):
        with pytest.raises(ValueError, match=r"8 prompt and 4 output tokens leave no room .* max_tokens=4"):
            Driver().submit("a", prompt=8, output=[50, 51, 52, 53], max_tokens=4)

    def test_an_empty_prompt_is_refused(self):
        with pytest.raises(ValueError, match="prompt is empty"):
            Driver().submit("a", prompt=0)

    def test_a_pool_too_small_for_the_longest_request_is_refused(self):
        with pytest.raises(ValueError, match="num_blocks=32 per rank is too few for max_model_len=64"):
            Driver(num_blocks=32, max_model_len=64)

    def test_a_seed_given_is_kept_and_others_are_drawn_from_the_engines(self):
        given_, drawn = Driver().submit("a", seed=42), [Driver().submit(n) for n in ("b", "b")]
        assert given_.seed == 42
        assert drawn[0].seed == drawn[1].seed != 0


class TestResumed:
    def test_indices_go_on_after_the_output_it_came_with(self):
        driver = Driver()
        driver.submit("a", prompt=8, output=[50, 51], max_tokens=5)
        driver.run()
        assert driver.indices("a") == [2, 3, 4]
        assert driver.tokens("a") == [1010, 1011, 1012]

    def test_the_output_it_came_with_is_prefilled_after_the_prompt(self):
        driver = Driver()
        driver.submit("a", prompt=3, output=[50, 51], max_tokens=5)
        plan = driver.plan()
        assert unpack(plan.chunks[0].token_ids) == [1, 2, 3, 50, 51]
        (resident,) = plan.new_residents
        assert unpack(resident.token_ids) == [1, 2, 3, 50, 51]
        assert resident.num_prompt_tokens == 3

    def test_the_output_it_came_with_counts_against_min_tokens(self):
        driver = Driver()
        driver.submit("a", output=[50, 51], max_tokens=9, min_tokens=3, stop_token_ids=(STOP,))
        driver.script["a", 10] = STOP
        driver.run()
        assert driver.tokens("a") == [STOP]

    def test_one_token_short_of_max_tokens_needs_no_placement(self):
        driver = Driver()
        driver.submit("a", output=[50, 51, 52], max_tokens=4)
        driver.run()
        assert [len(plan.transfers) for plan in driver.plans] == [0]
        assert driver.indices("a") == [3]

    def test_its_deadline_is_that_of_its_next_token(self):
        request = Driver().submit("a", output=[50, 51], slo=Slo(ttft_s=2.0, tbt_s=0.25))
        assert request.deadline == request.arrival + 2.0 + 2 * 0.25


def overfull(ahead: int) -> Driver:
    """Three requests whose decodes outgrow the 8 usable blocks of one rank; the third is the newest."""
    driver = Driver(num_blocks=9, max_model_len=16)
    for name in ("a", "b", "c"):
        driver.submit(name, prompt=4, max_tokens=10)
        for _ in range(ahead):
            driver.plan()
        for _ in range(ahead):
            driver.answer()
    return driver


def run_until(driver: Driver, name: str, state: RequestState, ahead: int = 2) -> None:
    request = driver.engine.requests[name]
    for _ in range(100):
        while len(driver._unanswered) < ahead and request.state is not state and driver.plan() is not None:
            pass
        if request.state is state:
            return
        driver.answer()
    raise AssertionError(f"{name} never became {state.name}")


class TestPreemption:
    def test_the_newest_decode_pauses_while_its_token_is_in_flight_and_is_preempted_when_it_arrives(self):
        driver = overfull(ahead=2)
        newest = driver.engine.requests["c"]
        run_until(driver, "c", RequestState.PAUSED)
        assert newest.in_flight > 0
        assert driver.engine.counters.preemptions == 0
        while newest.in_flight:
            assert newest.state is RequestState.PAUSED
            driver.answer()
        assert newest.state is RequestState.WAITING
        assert newest.num_preemptions == driver.engine.counters.preemptions == 1

    def test_without_a_token_in_flight_it_is_preempted_at_once(self):
        driver = overfull(ahead=1)
        driver.run(ahead=1)
        assert driver.engine.counters.preemptions > 0
        assert driver.engine.counters.pauses == 0

    def test_its_tokens_become_prompt(self):
        driver = overfull(ahead=2)
        newest = driver.engine.requests["c"]
        run_until(driver, "c", RequestState.PAUSED)
        run_until(driver, "c", RequestState.WAITING)
        known = list(newest.output)
        assert known == [sampled(4 + i) for i in range(len(known))]
        assert newest.prefill_tokens == 4 + len(known)
        run_until(driver, "c", RequestState.DECODING)
        (chunk,) = driver.plans[-1].chunks
        assert unpack(chunk.token_ids) == [1, 2, 3, 4, *known]
        (resident,) = driver.plans[-1].new_residents
        assert resident.num_prompt_tokens == 4
        assert resident.alloc_id == 3

    @pytest.mark.parametrize("ahead", [1, 2])
    def test_indices_go_on_and_nothing_is_emitted_twice(self, ahead: int):
        driver = overfull(ahead)
        driver.run(ahead)
        assert driver.engine.counters.preemptions > 0
        for name in ("a", "b", "c"):
            assert driver.indices(name) == list(range(10))
            assert driver.tokens(name) == [sampled(4 + i) for i in range(10)]
        assert driver.engine.kv.is_idle

    def test_it_leaves_the_workers_under_its_old_allocation(self):
        driver = overfull(ahead=2)
        driver.run()
        preempted = [n.alloc_id for p in driver.plans for n in p.new_prefills]
        dropped = [a for p in driver.plans for a in p.drop]
        assert 2 in dropped
        assert len(preempted) == len(set(preempted)) == 3 + driver.engine.counters.preemptions
        assert len(dropped) == len(set(dropped))

    def test_an_older_decode_takes_the_room_of_a_newer_one_in_the_same_plan(self):
        driver = Driver(num_blocks=9, max_model_len=16)
        # a opens its third and fourth block while b and c, newer, hold 3 and 2.
        a = driver.submit("a", prompt=7, max_tokens=9)
        driver.step()
        for name in ("b", "c"):
            driver.submit(name, prompt=4, max_tokens=10)
            driver.step()
        while driver.engine.counters.preemptions == 0:
            driver.step()
        assert a.num_preemptions == 0
        assert driver.engine.requests["c"].num_preemptions == 1
        driver.run()
        for name, prompt in (("a", 7), ("b", 4), ("c", 4)):
            assert driver.tokens(name) == [sampled(prompt + i) for i in range(min(10, 16 - prompt))]


class TestAbort:
    def test_while_waiting(self):
        driver = Driver()
        request = driver.submit("a")
        assert driver.engine.abort("a")
        assert request.finish_reason is FinishReason.ABORT
        assert not driver.engine.has_work
        assert driver.plan() is None

    @pytest.mark.parametrize("in_flight", [0, 1, 2])
    def test_while_prefilling(self, in_flight: int):
        driver = Driver(num_ranks=2, budget=4)
        request = driver.submit("a", prompt=30)
        driver.step()
        for _ in range(in_flight):
            driver.plan()
        assert request.state is RequestState.PREFILLING
        assert driver.engine.abort("a")
        assert driver.engine.kv.is_idle == (in_flight == 0)
        driver.run()
        assert driver.outputs == []
        assert driver.engine.kv.is_idle

    @pytest.mark.parametrize("in_flight", [0, 1, 2])
    def test_while_decoding(self, in_flight: int):
        driver = Driver(num_ranks=2)
        request = driver.submit("a", max_tokens=20)
        driver.step()
        for _ in range(in_flight):
            driver.plan()
        assert request.state is RequestState.DECODING
        assert driver.engine.abort("a")
        driver.run()
        assert driver.tokens("a") == [1008]
        assert driver.engine.counters.discarded_tokens == in_flight
        assert driver.engine.kv.is_idle

    def test_while_its_transfer_is_under_way(self):
        driver = Driver(num_ranks=2)
        driver.hold_transfers = True
        driver.submit("a", max_tokens=20)
        driver.step()
        assert driver.engine.abort("a")
        assert driver.engine.has_work
        assert not driver.engine.kv.is_idle
        driver.run()
        assert driver.plans[-1].wait_transfers
        assert driver.engine.kv.is_idle

    def test_while_paused(self):
        driver = overfull(ahead=2)
        run_until(driver, "c", RequestState.PAUSED)
        before = driver.tokens("c")
        assert driver.engine.abort("c")
        driver.run()
        assert driver.tokens("c") == before
        assert len(driver.tokens("a")) == len(driver.tokens("b")) == 10
        assert driver.engine.kv.is_idle

    def test_after_a_preemption(self):
        driver = overfull(ahead=2)
        run_until(driver, "c", RequestState.PAUSED)
        run_until(driver, "c", RequestState.WAITING)
        assert driver.engine.abort("c")
        driver.run()
        assert len(driver.tokens("a")) == len(driver.tokens("b")) == 10
        assert driver.engine.kv.is_idle

    def test_of_an_unknown_or_ended_request_does_nothing(self):
        driver = Driver()
        driver.submit("a", max_tokens=1)
        driver.run()
        assert not driver.engine.abort("a")
        assert not driver.engine.abort("b")
        assert driver.engine.counters.aborted == 0


class TestHeartbeat:
    def ended_with_a_transfer_outstanding(self) -> Driver:
        driver = Driver(num_ranks=2)
        driver.hold_transfers = True
        driver.submit("a", max_tokens=2)
        driver.step()
        driver.step()
        assert not driver.engine.requests
        return driver

    def test_with_only_transfers_outstanding_a_plan_waits_for_them(self):
        driver = self.ended_with_a_transfer_outstanding()
        assert driver.engine.has_work
        plan = driver.plan()
        assert plan.wait_transfers
        assert plan.decodes == ((), ())
        assert plan.chunks == ()
        assert plan.drop == (0,)
        driver.answer()
        assert not driver.engine.has_work
        assert driver.plan() is None

    def test_one_is_in_flight_at_a_time(self):
        driver = self.ended_with_a_transfer_outstanding()
        assert driver.plan().wait_transfers
        assert driver.plan() is None

    def test_none_is_sent_while_another_plan_brings_acknowledgements(self):
        driver = Driver(num_ranks=2)
        driver.hold_transfers = True
        driver.submit("a", max_tokens=2)
        driver.plan()
        driver.plan()
        assert driver.plan() is None

    def test_a_new_request_does_not_wait_for_the_outstanding_transfer(self):
        driver = self.ended_with_a_transfer_outstanding()
        driver.submit("b", max_tokens=1)
        plan = driver.plan()
        assert plan.chunks
        assert not plan.wait_transfers

    def test_every_worker_must_acknowledge(self):
        driver = Driver(num_ranks=2, tensor_parallel=2)
        driver.submit("a", max_tokens=2)
        plan = driver.plan()
        (transfer,) = plan.transfers
        tokens = {plan.chunks[0].shards[-1].rank * 2: ([plan.chunks[0].alloc_id], [5])}
        results = [WorkerResult(0, w, *tokens.get(w, ([], [])), acknowledged=[transfer.transfer_id]) for w in range(4)]
        results[3].acknowledged = []
        driver.engine.apply(results, 0.0)
        assert driver.engine.kv.transferred_tokens(0) == 8
        assert driver.engine.kv.prefill_tables(0)[0] != []
        driver.plan()
        late = [WorkerResult(1, w, acknowledged=[transfer.transfer_id] if w == 3 else []) for w in range(4)]
        driver.engine.apply(late, 0.0)
        assert driver.engine.kv.prefill_tables(0)[0] == []


class Predicting(PlainPolicy):
    """The plain policy with a fixed prediction; keeps what it observes."""

    def __init__(self) -> None:
        super().__init__(budget=8, max_decodes=8)
        self.observed: list[tuple[int, float]] = []

    def schedule(self, pending: Sequence[PendingPrefill], decodes: DecodeState, kv: KVState, now: float) -> Decision:
        return dataclasses.replace(super().schedule(pending, decodes, kv, now), predicted=0.25)

    def observe(self, decision: Decision, measured: float) -> None:
        self.observed.append((sum(c.length for c in decision.chunks), measured))


class TestTimings:
    def test_each_iteration_is_recorded_as_predicted_and_as_measured(self):
        driver = Driver(policy=Predicting())
        driver.submit("a", prompt=12, max_tokens=2)
        for elapsed in (0.5, 0.125, 0.0625):
            driver.plan()
            driver.answer(elapsed)
        assert list(driver.engine.timings) == [
            Timing(0, 8, 0.25, 0.5),
            Timing(1, 4, 0.25, 0.125),
            Timing(2, 0, 0.25, 0.0625),
        ]

    def test_the_slowest_worker_counts_and_the_policy_learns_it(self):
        policy = Predicting()
        driver = Driver(num_ranks=2, policy=policy)
        driver.submit("a", prompt=20)
        driver.plan()
        driver.engine.apply([WorkerResult(0, 0, elapsed=0.5), WorkerResult(0, 1, elapsed=0.75)], 0.0)
        assert policy.observed == [(8, 0.75)]

    def test_the_time_of_first_scheduling_is_kept(self):
        driver = Driver(budget=8)
        request = driver.submit("a", prompt=20)
        assert request.first_scheduled is None
        driver.engine.plan(3.0)
        driver.engine.plan(4.0)
        assert request.first_scheduled == 3.0


class TestPoison:
    def test_the_first_plan_overwrites_every_block_and_later_ones_those_freed(self):
        driver = Driver(num_ranks=2, num_blocks=65, poison=True)
        driver.submit("a", prompt=8, max_tokens=1)
        first = driver.plan()
        assert sorted(first.poison) == [(rank, block) for rank in range(2) for block in range(65)]
        driver.answer()
        driver.submit("b", prompt=8, max_tokens=1)
        second = driver.plan()
        tables = first.new_prefills[0].block_tables
        assert sorted(second.poison) == [(rank, block) for rank, table in enumerate(tables) for block in sorted(table)]


class TestStates:
    def test_a_finished_request_goes_nowhere(self):
        assert TRANSITIONS[RequestState.FINISHED] == frozenset()

    @pytest.mark.parametrize("state", RequestState)
    def test_only_listed_changes_are_permitted(self, state: RequestState):
        for target in RequestState:
            request = Request("a", 0, [1], Sampling(max_tokens=1), Slo(1.0, 0.1), 0.0, state=state)
            if target in TRANSITIONS[state]:
                request.to(target)
                assert request.state is target
            else:
                with pytest.raises(ValueError, match=f"a: {state.name} -> {target.name} is not permitted"):
                    request.to(target)


class TestOrderShards:
    @pytest.mark.parametrize(
        ("last_rank", "expected"),
        [
            (None, (Shard(0, 10, 12), Shard(1, 12, 15), Shard(2, 15, 16))),
            (2, (Shard(0, 10, 12), Shard(1, 12, 15), Shard(2, 15, 16))),
            (0, (Shard(1, 10, 13), Shard(2, 13, 14), Shard(0, 14, 16))),
            (1, (Shard(2, 10, 11), Shard(0, 11, 13), Shard(1, 13, 16))),
        ],
    )
    def test_the_order_rotates_so_that_the_decode_rank_comes_last(
        self, last_rank: int | None, expected: tuple[Shard, ...]
    ):
        assert order_shards(10, (2, 3, 1), last_rank) == expected

    def test_a_rank_without_tokens_has_no_shard(self):
        assert order_shards(0, (0, 4, 2), 1) == (Shard(2, 0, 2), Shard(1, 2, 6))

    def test_the_decode_rank_must_have_a_token(self):
        with pytest.raises(ValueError, match=r"rank 1 must compute the last token but its shard of \(4, 0, 2\)"):
            order_shards(0, (4, 0, 2), 1)

    @settings(deadline=None)
    @given(
        start=st.integers(0, 1000),
        counts=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
        data=st.data(),
    )
    def test_shards_cover_the_range_without_gap_or_overlap(self, start: int, counts: list[int], data: st.DataObject):
        last = data.draw(st.sampled_from([None, *(r for r, n in enumerate(counts) if n)]))
        shards = order_shards(start, tuple(counts), last)
        assert [s.start for s in shards] == [start, *(s.end for s in shards[:-1])]
        assert shards[-1].end == start + sum(counts)
        assert {s.rank: s.end - s.start for s in shards} == {r: n for r, n in enumerate(counts) if n}
        assert last in (None, shards[-1].rank)


def test_tokens_are_packed_as_little_endian_int32():
    assert pack_tokens([1, 258, 128255]) == b"\1\0\0\0\2\1\0\0\xff\xf4\1\0"


REQUEST = st.tuples(
    st.integers(1, 15),  # prompt
    st.integers(1, 16),  # max_tokens
    st.one_of(st.none(), st.integers(1, 24)),  # position of a stop token
    st.one_of(st.none(), st.integers(0, 30)),  # step before which it is aborted
)


def make_policy(name: str, num_ranks: int, budget: int, headroom: int) -> Policy:
    if name == "plain":
        return PlainPolicy(budget, max_decodes=4)
    params = SchedulerParams(quantum=2, headroom=headroom, max_decodes=4, max_prefill_tokens=budget)
    return Scheduler(per_token_model(num_ranks), name, params)


@pytest.mark.parametrize("policy", ["plain", "slo", "fcfs", "srpt"])
@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    num_ranks=st.sampled_from([1, 2, 3]),
    budget=st.integers(3, 24),
    ahead=st.integers(1, 3),
    held=st.booleans(),
    headroom=st.integers(0, 3),
)
def test_in_any_mix_every_token_comes_once_and_every_block_returns(
    policy: str, requests: list[tuple], num_ranks: int, budget: int, ahead: int, held: bool, headroom: int
):
    driver = Driver(
        num_ranks,
        num_blocks=KVGeometry(4, num_ranks, 100).min_blocks(16),
        max_model_len=16,
        policy=make_policy(policy, num_ranks, budget, headroom),
    )
    driver.hold_transfers = held
    expected, aborts = {}, {}
    for i, (prompt, max_tokens, stop, abort) in enumerate(requests):
        name = f"r{i}"
        driver.submit(name, prompt=prompt, max_tokens=max_tokens, stop_token_ids=(STOP,))
        tokens = [sampled(p) for p in range(prompt, prompt + min(max_tokens, 16 - prompt))]
        if stop is not None and prompt <= stop < prompt + len(tokens):
            driver.script[name, stop] = STOP
            tokens = [*tokens[: stop - prompt], STOP]
        expected[name] = tokens
        if abort is not None:
            aborts.setdefault(abort, []).append(name)
    aborted = []
    for step in range(31):
        aborted += [name for name in aborts.get(step, []) if driver.engine.abort(name)]
        while len(driver._unanswered) < ahead and driver.plan() is not None:
            pass
        if driver._unanswered:
            driver.answer()
    driver.run(ahead)
    for name, tokens in expected.items():
        got = driver.tokens(name)
        assert got == (tokens[: len(got)] if name in aborted else tokens)
        assert driver.indices(name) == list(range(len(got)))
    sampled_by_plans = sum(len(driver.scheduled(name)) for name in expected)
    assert sampled_by_plans == len(driver.outputs) + driver.engine.counters.discarded_tokens
    assert Counter(o.request.request_id for o in driver.outputs if o.finished).total() == len(requests) - len(aborted)
    assert driver.engine.kv.is_idle


@pytest.mark.parametrize("policy", ["plain", "slo", "fcfs", "srpt"])
def test_a_preempted_request_that_cannot_start_again_yet_does_not_hold_up_a_partial_prefill(policy: str):
    # b, preempted while c is half prefilled, needs 3 + 3 blocks; c holds 4 of 8 and comes after b in order of arrival.
    driver = Driver(num_blocks=9, max_model_len=16, policy=make_policy(policy, num_ranks=1, budget=3, headroom=0))
    driver.submit("a", prompt=1, max_tokens=5)
    driver.submit("b", prompt=8, max_tokens=3)
    driver.submit("c", prompt=13, max_tokens=2)
    driver.run(ahead=1)
    assert [len(driver.tokens(name)) for name in "abc"] == [5, 3, 2]
