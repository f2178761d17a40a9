"""Algorithm 1: what one step decides, and what must hold for any input."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from conflux_ray.planning.correction import Correction
from conflux_ray.planning.interface import DecodeState, KVState, ResidentDecode
from conflux_ray.planning.latency_model import Affine, GemmCurve, IterationLoad
from conflux_ray.planning.ordering import ORDERS
from conflux_ray.planning.scheduler import Scheduler, SchedulerParams
from tests.planning.assignments import random_model
from tests.planning.build import MS, per_token_model, request, resident, roomy_kv

PARAMS = SchedulerParams(quantum=1, headroom=0, idle_tau=0.1, starvation_quantum=4, starvation_share=0.0)


def scheduler(num_ranks=2, policy="slo", params=PARAMS, **model):
    return Scheduler(per_token_model(num_ranks, **model), policy, params)


def lengths(decision):
    return {chunk.request_id: chunk.length for chunk in decision.chunks}


def test_chunks_fill_the_budget_in_deadline_order():
    # 1 ms a token and 100 ms: 100 tokens a rank, 10 and 30 of them taken by decodes.
    decision = scheduler().schedule(
        [request("second", 300, deadline=9.0), request("first", 60, deadline=5.0)], resident(10, 30), roomy_kv(), 0.0
    )
    assert decision.budget == 160
    assert lengths(decision) == {"first": 60, "second": 100}
    assert [chunk.completes for chunk in decision.chunks] == [True, False]
    assert decision.predicted == pytest.approx(0.1)
    assert not decision.tbt_violation


def test_tau_is_the_smallest_tbt_of_the_resident_decodes():
    decodes = DecodeState(((ResidentDecode("a", 5, tbt=0.05),), (ResidentDecode("b", 5, tbt=0.2),)))
    assert scheduler().schedule([request("r", 500)], decodes, roomy_kv(), 0.0).budget == 98


def test_requests_completing_together_spread_over_the_ranks():
    decision = scheduler().schedule(
        [request(name, 40, deadline=d) for d, name in enumerate("ab", start=5)], resident(1, 1), roomy_kv(), 0.0
    )
    assert decision.placements == {"a": 0, "b": 1}


def test_a_request_that_ends_with_its_first_token_needs_no_placement():
    decision = scheduler().schedule([request("r", 40, needs_placement=False)], resident(1, 1), KVState(10, [0, 0]), 0.0)
    assert lengths(decision) == {"r": 40}
    assert decision.placements == {}


def test_the_decode_rank_gets_a_token_of_the_completing_chunk():
    # The water stays below rank 0; the decode lands there because it has the least context.
    decodes = DecodeState(
        (tuple(ResidentDecode(f"a{i}", 1) for i in range(50)), tuple(ResidentDecode(f"b{i}", 90) for i in range(2)))
    )
    decision = scheduler().schedule([request("r", 20)], decodes, roomy_kv(), 0.0)
    assert decision.placements == {"r": 0}
    assert decision.chunks[0].shard == (1, 19)


def test_a_rank_where_the_sampled_token_would_break_tau_is_not_chosen():
    # Rank 0 is full to tau: not one token more.
    decodes = DecodeState(
        (tuple(ResidentDecode(f"a{i}", 1) for i in range(100)), tuple(ResidentDecode(f"b{i}", 90) for i in range(2)))
    )
    decision = scheduler().schedule([request("r", 20)], decodes, roomy_kv(), 0.0)
    assert decision.placements == {"r": 1}
    assert decision.predicted <= 0.1


def test_an_infeasible_placement_discards_the_chunk_and_stops_admission():
    kv = KVState(capacity=100, free=[5, 5])
    pending = [
        request("partial", 500, deadline=1.0, computed_tokens=450),
        request("homeless", 20, deadline=2.0, decode_blocks=6),
        request("behind", 20, deadline=3.0, decode_blocks=1),
    ]
    pending[0] = replace(pending[0], needs_placement=False)
    decision = scheduler().schedule(pending, resident(1, 1), kv, 0.0)
    assert lengths(decision) == {"partial": 50}
    assert decision.placements == {}


def test_a_full_rank_takes_no_more_decodes():
    params = replace(PARAMS, max_decodes=3)
    decision = scheduler(params=params).schedule(
        [request(name, 10, deadline=i) for i, name in enumerate("abc", start=5)], resident(3, 1), roomy_kv(), 0.0
    )
    assert decision.placements == {"a": 1, "b": 1}
    assert "c" not in lengths(decision)


def test_a_request_that_cannot_start_lets_partial_prefills_pass_but_no_new_one():
    kv = KVState(capacity=100, free=[10, 10])
    pending = [
        request("large", 900, deadline=1e3, prefill_blocks=20),
        request("small", 30, deadline=1e3 + 1, prefill_blocks=1),
        request("running", 80, deadline=1e3 + 2, computed_tokens=10),
    ]
    assert lengths(scheduler().schedule(pending, resident(1, 1), kv, 0.0)) == {"running": 70}


def test_a_large_request_is_not_overtaken_for_ever_when_memory_is_short():
    # A new small request arrives in every step; memory returns as earlier ones finish.
    s = scheduler()
    large, free, held = request("large", 150, deadline=50.0, prefill_blocks=8), 7, []
    for step in range(30):
        kv = KVState(capacity=20, free=[free, free])
        small = request(f"small{step}", 20, deadline=60.0 + step, prefill_blocks=2)
        decision = s.schedule([small, large], resident(1, 1), kv, 0.0)
        if "large" in lengths(decision):
            return
        free = kv.free[0]
        held.append(2 if small.request_id in lengths(decision) else 0)
        if step >= 3:
            free += 1
    pytest.fail("the large request never started")


def test_kv_of_a_transition_counts_at_its_target():
    # 0.5 ms for each arriving token; half of the KV of 100 tokens arrives: 25 ms beside 100 ms of layers.
    free = scheduler().schedule([request("r", 100)], resident(1, 1), roomy_kv(), 0.0)
    slow = scheduler(transfer=Affine(MS / 2), transfer_exposed=1.0).schedule(
        [request("r", 100)], resident(1, 1), roomy_kv(), 0.0
    )
    assert slow.predicted == pytest.approx(free.predicted + 0.025)


def slow_transfers():
    # 1 ms a token and 1 ms for each arriving token, one after the other; half of a request's KV arrives.
    return scheduler(transfer=Affine(MS), transfer_exposed=1.0)


def test_a_transition_that_breaks_tau_together_with_the_chunk_leaves_a_rest_to_complete_later():
    s = slow_transfers()
    full = s.schedule([request("r", 160)], resident(1, 1), roomy_kv(), 0.0)  # 81 ms of layers, 80 of transfer
    assert lengths(full) == {"r": 158}  # one water level, a token a rank, is left
    assert full.placements == {}
    assert full.predicted == pytest.approx(0.080)
    last = s.schedule([request("r", 160, computed_tokens=158)], resident(1, 1), roomy_kv(), 0.0)
    assert last.placements == {"r": 0}
    assert last.predicted == pytest.approx(0.082)


def test_requests_behind_a_chunk_cut_short_use_the_budget():
    decision = slow_transfers().schedule(
        [request("first", 160, deadline=1.0), request("behind", 300, deadline=2.0)], resident(1, 1), roomy_kv(), 0.0
    )
    assert lengths(decision) == {"first": 158, "behind": 40}
    assert decision.predicted == pytest.approx(0.1)
    assert not decision.tbt_violation


def test_a_rest_that_breaks_tau_behind_others_is_passed_over():
    # 11 ms of layers after "first"; the KV of "rest" would take 95 ms more.
    pending = [
        request("first", 20, deadline=1.0, needs_placement=False),
        request("rest", 190, deadline=2.0, computed_tokens=189),
        request("behind", 300, deadline=3.0),
    ]
    decision = slow_transfers().schedule(pending, resident(1, 1), roomy_kv(), 0.0)
    assert lengths(decision) == {"first": 20, "behind": 178}
    assert not decision.tbt_violation


def test_a_rest_that_breaks_tau_at_the_head_goes_through_and_is_flagged():
    s = slow_transfers()
    decision = s.schedule([request("r", 198, computed_tokens=197)], resident(3, 3), roomy_kv(), 0.0)
    assert decision.placements == {"r": 0}
    assert decision.predicted == pytest.approx(0.103)
    assert decision.tbt_violation


@pytest.mark.parametrize("tokens", [5, 100, 150, 210, 400])
@pytest.mark.parametrize("policy", sorted(ORDERS))
def test_a_lone_request_always_completes_however_large_its_transition(policy, tokens):
    s = scheduler(policy=policy, transfer=Affine(MS), transfer_exposed=1.0)
    computed = 0
    for _ in range(5):
        pending = [request("r", tokens, computed_tokens=computed)]
        decision = s.schedule(pending, resident(10, 10), roomy_kv(), 0.0)
        assert decision.chunks
        computed += decision.chunks[0].length
        if decision.placements:
            return
    pytest.fail(f"{computed} of {tokens} tokens computed")


def test_decode_goes_on_and_the_violation_is_flagged_when_tbt_cannot_be_met():
    decision = scheduler().schedule([request("r", 10)], resident(200, 1), roomy_kv(), 0.0)
    assert decision.chunks == ()
    assert decision.budget == 0
    assert decision.tbt_violation
    assert decision.predicted == pytest.approx(0.2)


def test_nothing_to_do_predicts_nothing():
    decision = scheduler().schedule([], resident(0, 0), roomy_kv(), 0.0)
    assert (decision.chunks, decision.predicted, decision.tbt_violation) == ((), 0.0, False)


def test_without_decodes_tau_bounds_the_wait_of_arrivals():
    decision = scheduler().schedule([request("r", 10_000, tbt=0.001)], resident(0, 0), roomy_kv(), 0.0)
    assert lengths(decision) == {"r": 200}


def test_an_idle_instance_runs_a_quantum_even_when_none_fits():
    params = replace(PARAMS, idle_tau=1e-6, quantum=8)
    for policy in ORDERS:
        decision = scheduler(policy=policy, params=params).schedule(
            [request("r", 10_000)], resident(0, 0), roomy_kv(), 0.0
        )
        assert lengths(decision) == {"r": 16}
        assert not decision.tbt_violation


def test_an_idle_instance_completes_requests_however_slow_they_are():
    params = replace(PARAMS, idle_tau=1e-6, quantum=8)
    s = scheduler(params=params, transfer=Affine(1.0))
    assert s.schedule([request("r", 12)], resident(0, 0), roomy_kv(), 0.0).placements == {"r": 0}


def test_one_rank_needs_no_communication_and_no_transfer():
    decision = scheduler(1).schedule([request("r", 30)], resident(10), roomy_kv(1), 0.0)
    assert decision.chunks[0].shard == (30,)
    assert decision.placements == {"r": 0}


def test_deadlines_in_the_past_are_served_shortest_first():
    pending = [request("long", 90, deadline=-1.0), request("short", 80, deadline=-1.0)]
    decision = scheduler().schedule(pending, resident(1, 1), roomy_kv(), 10.0)
    assert decision.rejected == 2
    assert [c.request_id for c in decision.chunks] == ["short", "long"]


def test_what_only_its_attention_makes_late_is_not_admitted():
    # 100 tokens a rank in 0.1 s; a pair costs 0.005 ms over both ranks, 0.01 of a token. 380 tokens are 72 390 pairs.
    pending = [request("long", 380, deadline=0.3), request("short", 10, deadline=5.0)]
    free = scheduler().schedule(pending, resident(0, 0), roomy_kv(), 0.0)
    assert (free.rejected, free.chunks[0].request_id) == (0, "long")
    s = scheduler(prefill=Affine(0.01 * MS))
    decision = s.schedule(pending, resident(0, 0), roomy_kv(), 0.0)
    assert (decision.rejected, decision.chunks[0].request_id) == (1, "short")


def test_an_overdue_request_takes_three_percent_of_the_budget():
    params = SchedulerParams(quantum=1, headroom=0, idle_tau=0.1, starvation_after=1.0)
    s = Scheduler(per_token_model(gemm=GemmCurve.affine(0.01 * MS, 0.0)), "slo", params)
    pending = [request("lost", 50_000, deadline=0.0), request("fresh", 50_000, deadline=9.0)]
    decision = s.schedule(pending, resident(0, 0), roomy_kv(), 5.0)
    assert decision.budget == params.max_prefill_tokens == 16384
    assert lengths(decision) == {"lost": 491, "fresh": 16384 - 491}


def test_what_would_be_on_time_by_less_than_the_margin_is_not_admitted():
    # 200 tokens an iteration of 0.1 s: 400 end in the second one, at 0.2 s.
    pending = [request("tight", 400, deadline=0.24), request("other", 10, deadline=5.0)]
    for margin, rejected, first in ((0.03, 0, "tight"), (0.05, 1, "other")):
        s = scheduler(params=replace(PARAMS, deadline_margin=margin))
        decision = s.schedule(pending, resident(0, 0), roomy_kv(), 0.0)
        assert (decision.rejected, decision.chunks[0].request_id) == (rejected, first)


@pytest.mark.parametrize(
    ("policy", "seconds"),
    # 200 tokens every 0.1 s. The lost one has 5000 tokens, the one on time 300, the new one 100.
    [("slo", 0.05), ("fcfs", 2.7), ("srpt", 0.05)],
)
def test_a_newcomer_waits_for_what_its_policy_serves_before_it(policy, seconds):
    pending = [
        request("lost", 5000, deadline=1.0, arrival=0.0),
        request("on time", 300, deadline=4.0, arrival=0.5),
    ]
    new = request("new", 100, deadline=2.0, arrival=1.0)
    assert scheduler(policy=policy).wait_of(new, pending, resident(0, 0), 1.0) == pytest.approx(seconds)


def test_a_newcomer_that_cannot_be_on_time_waits_behind_those_that_can():
    pending = [request("on time", 300, deadline=4.0), request("later", 100, deadline=5.0)]
    new = request("new", 500, deadline=1.2, arrival=1.0)
    assert scheduler().wait_of(new, pending, resident(0, 0), 1.0) == pytest.approx(0.45)


def test_a_newcomer_of_an_idle_instance_waits_for_iterations_as_short_as_its_budget_makes_them():
    # 40 tokens an iteration of 20 ms, where 200 would fit into tau.
    s = scheduler(params=replace(PARAMS, max_prefill_tokens=40))
    new = request("new", 400, deadline=9.0, arrival=1.0)
    assert s.wait_of(new, [], resident(0, 0), 1.0) == pytest.approx(0.2)
    assert s.prefill_rate(resident(0, 0)) == pytest.approx(2000)


def test_a_newcomer_without_a_deadline_waits_for_all_that_have_one():
    new = request("new", 100, deadline=float("inf"), arrival=1.0)
    pending = [request("on time", 300, deadline=4.0)]
    assert scheduler().wait_of(new, pending, resident(0, 0), 1.0) == pytest.approx(0.2)


def test_the_attention_of_a_long_newcomer_counts():
    short, long = (
        scheduler(prefill=Affine(1e-7)).wait_of(request("new", m, deadline=9.0), [], resident(0, 0), 0.0)
        for m in (1000, 4000)
    )
    assert long > 4.5 * short


def test_an_urgent_newcomer_waits_for_its_own_class_alone():
    pending = [request("usual", 300, deadline=1.5), request("urgent", 40, deadline=9.0, priority=-1)]
    new = request("new", 60, deadline=9.5, arrival=1.0, priority=-1)
    assert scheduler().wait_of(new, pending, resident(0, 0), 1.0) == pytest.approx(0.05)


def test_a_rejected_request_is_served_within_the_stated_bound():
    # Every step brings a request that takes the whole budget and can meet its deadline; `lost` never can.
    s = scheduler(params=replace(PARAMS, starvation_after=1.0, starvation_quantum=16))
    lost_length, computed, steps, now, done = 150, 0, 0, 0.0, None
    while done is None:
        fresh = request(f"fresh{steps}", 190, deadline=now + 0.2)
        lost = request("lost", lost_length, deadline=0.01, computed_tokens=computed)
        decision = s.schedule([fresh, lost], resident(1, 1), roomy_kv(), now)
        got = lengths(decision).get("lost", 0)
        if now <= 1.01:
            assert got <= 8  # only what the fresh one leaves
        else:
            steps += 1
            assert got >= min(16, lost_length - computed)
            assert lengths(decision)[fresh.request_id] > 100  # on-time traffic goes on
        computed += got
        done = computed == lost_length or None
        now += 0.1
    assert steps <= -(-lost_length // 16)


@pytest.mark.parametrize("policy", sorted(ORDERS))
def test_an_overdue_request_gets_its_quantum_even_with_zero_budget(policy):
    s = scheduler(policy=policy, params=replace(PARAMS, starvation_after=1.0))
    decision = s.schedule([request("r", 50, deadline=0.0)], resident(200, 1), roomy_kv(), 5.0)
    assert lengths(decision) == {"r": 4}
    assert decision.budget == 0
    assert decision.tbt_violation


def test_a_preempted_request_is_admitted_by_the_deadline_of_its_next_token():
    pending = [request("preempted", 60, arrival=0.0, deadline=100.2), request("new", 150, deadline=101.5)]
    decision = scheduler().schedule(pending, resident(1, 1), roomy_kv(), 100.0)
    assert decision.rejected == 0
    assert decision.chunks[0].request_id == "preempted"


def test_fcfs_keeps_arrival_order_under_overload_where_srpt_and_slo_do_not():
    pending = [request("old", 900, deadline=0.1, arrival=0.0), request("new", 20, deadline=9.0, arrival=1.0)]
    first = {
        policy: scheduler(policy=policy).schedule(pending, resident(1, 1), roomy_kv(), 2.0).chunks[0].request_id
        for policy in ORDERS
    }
    assert first == {"fcfs": "old", "srpt": "new", "slo": "new"}


def test_a_slower_machine_than_profiled_shrinks_the_budget():
    s = Scheduler(per_token_model(), params=PARAMS, correction=Correction(rate=1.0, clip=10.0))
    decision = s.schedule([request("r", 500)], resident(1, 1), roomy_kv(), 0.0)
    s.observe(decision, 1.25 * decision.predicted)
    corrected = s.schedule([request("r", 500)], resident(1, 1), roomy_kv(), 0.0)
    assert s.correction.factor == pytest.approx(1.25)
    assert corrected.budget == 2 * 80 - 2
    assert corrected.predicted == pytest.approx(0.1)
    s.use_model(per_token_model())
    assert s.correction.factor == 1.0


def test_iterations_of_decodes_alone_do_not_hide_that_mixed_ones_are_slow():
    s = Scheduler(per_token_model(), params=PARAMS)
    for _ in range(1000):
        alone = s.schedule([], resident(40, 40), roomy_kv(), 0.0)
        s.observe(alone, 0.9 * 0.040)
        mixed = s.schedule([request("r", 500)], resident(40, 40), roomy_kv(), 0.0)
        s.observe(mixed, 1.25 * 0.001 * (40 + mixed.chunks[0].length / 2))
    assert s.schedule([request("r", 500)], resident(40, 40), roomy_kv(), 0.0).budget == 2 * (80 - 40)
    assert s.schedule([], resident(40, 40), roomy_kv(), 0.0).predicted == pytest.approx(0.036, rel=1e-3)
    assert s.decode_seconds(resident(40, 40)) == pytest.approx(0.036, rel=1e-3)
    s.use_model(per_token_model())
    assert s.decode_seconds(resident(40, 40)) == pytest.approx(0.040)


def test_another_number_of_ranks_than_the_profile_is_refused():
    with pytest.raises(ValueError, match="2 ranks"):
        scheduler(2).schedule([], resident(0, 0, 0), roomy_kv(3), 0.0)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="fcfs, slo, srpt"):
        Scheduler(per_token_model(), "lifo")


@pytest.mark.parametrize(
    "field",
    [
        "quantum",
        "max_decodes",
        "idle_tau",
        "headroom",
        "eta",
        "deadline_margin",
        "starvation_after",
        "starvation_quantum",
        "starvation_share",
    ],
)
def test_parameters_out_of_range_are_named(field):
    with pytest.raises(ValueError, match=field):
        SchedulerParams(**{field: -1})


def random_step(rng, num_ranks):
    """A mixed state: (pending, decodes, kv)."""
    pending = []
    oldest = rng.choice((-1.0, -1.0, -5.0))
    for i in range(rng.randint(0, 25)):
        total = rng.choice((rng.randint(1, 60), rng.randint(1, 4000)))
        computed = rng.choice((0, rng.randrange(total)))
        pending.append(
            request(
                f"r{i}",
                total,
                deadline=rng.uniform(oldest, 8),
                computed_tokens=computed,
                priority=rng.choice((0, 0, 1)),
                prefill_blocks=0 if computed else -(-total // (16 * num_ranks)),
                decode_blocks=-(-total // 16),
                needs_placement=rng.random() < 0.9,
            )
        )
    decodes = DecodeState(
        tuple(
            tuple(ResidentDecode(f"d{r}.{i}", rng.randint(1, 4000), rng.choice((0.05, 0.1))) for i in range(count))
            for r in range(num_ranks)
            for count in (rng.choice((0, rng.randint(0, 90))),)
        )
    )
    kv = KVState(2000, [rng.randint(0, 2000) for _ in range(num_ranks)], [(rng.randint(1, 50), rng.randint(1, 300))])
    return pending, decodes, kv


@pytest.mark.parametrize("policy", sorted(ORDERS))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_decision_keeps_the_invariants(policy, num_ranks):
    rng = random.Random(f"{policy}{num_ranks}")
    params = SchedulerParams(starvation_after=2.0, max_decodes=100)
    completions = within_tau = 0
    for _ in range(80):
        model = replace(random_model(rng, num_ranks), transfer=Affine(4e-8, 1e-5), transfer_exposed=rng.random())
        pending, decodes, kv = random_step(rng, num_ranks)
        before = copy.deepcopy(kv)
        decision = Scheduler(model, policy, params).schedule(pending, decodes, kv, 0.0)

        shuffled = rng.sample(pending, len(pending))
        assert Scheduler(model, policy, params).schedule(shuffled, decodes, copy.deepcopy(before), 0.0).chunks == (
            decision.chunks
        )

        by_id = {p.request_id: p for p in pending}
        residents, incoming, prefill = list(decodes.tokens), [0.0] * num_ranks, [0] * num_ranks
        assert len({c.request_id for c in decision.chunks}) == len(decision.chunks)
        for chunk in decision.chunks:
            r = by_id[chunk.request_id]
            assert chunk.start == r.computed_tokens
            assert chunk.completes == (chunk.length == r.remaining)
            assert before.can_start(r)
            before.start(r)
            prefill = [a + b for a, b in zip(prefill, chunk.shard, strict=True)]
            if not (chunk.completes and r.needs_placement):
                assert chunk.request_id not in decision.placements
                continue
            completions += 1
            rank = decision.placements[chunk.request_id]
            assert chunk.shard[rank] >= 1
            assert before.fits(r, rank)
            before.place(r, rank)
            residents[rank] += 1
            assert residents[rank] <= params.max_decodes
            incoming[rank] += r.total_tokens * (num_ranks - 1) / num_ranks
        assert before.free == kv.free
        assert min(kv.free) >= 0
        assert set(decision.placements) <= {c.request_id for c in decision.chunks}

        load = IterationLoad(
            decodes.tokens,
            decodes.context,
            tuple(prefill),
            tuple((c.length, c.start) for c in decision.chunks),
            tuple(incoming),
        )
        if decision.predicted:
            expected = model.predict(load, overlap=decision.overlap, decode_sms=decision.decode_sms).seconds
            assert decision.predicted == pytest.approx(expected, rel=1e-9)
        if any(decodes.tokens):
            assert decision.tbt_violation == (decision.predicted > decodes.tightest_tbt)
            overdue = decision.chunks and by_id[decision.chunks[0].request_id].deadline < -2.0
            first = decision.chunks and by_id[decision.chunks[0].request_id]
            rest = (
                first
                and decision.chunks[0].completes
                and first.needs_placement
                and (first.remaining <= params.quantum * num_ranks)
            )
            if decision.chunks and not overdue:
                assert not decision.tbt_violation or (rest and len(decision.chunks) == 1)
                within_tau += 1
    assert completions > 30
    assert within_tau > 15


def test_summed_decodes_plan_like_listed_ones():
    pending, decodes, kv = random_step(random.Random(5), 2)
    model = random_model(random.Random(6), 2)
    summed = DecodeState.summed(decodes.tokens, decodes.context, decodes.tightest_tbt)
    assert summed.num_ranks == 2
    assert Scheduler(model).schedule(pending, summed, copy.deepcopy(kv), 0.0) == Scheduler(model).schedule(
        pending, decodes, kv, 0.0
    )
