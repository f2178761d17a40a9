"""Every system against schedules computed by hand: token times in milliseconds, the arithmetic beside them.

The plain machine (`build.PlainHardware`) takes 10 ms an iteration and 1 ms a token of the busiest rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conflux_ray.planning.latency_model import Affine, GemmCurve
from conflux_ray.simulator.hardware import DEVICES, Figure, sm_slowdown
from conflux_ray.simulator.request import Slo
from tests.simulator.build import MS, PlainHardware, served, times, workload

AT_THE_END: dict[str, Any] = {"run_ahead": 1}
"""Every iteration is planned when the one before has ended: what arrives meanwhile is in it."""


def slow_link() -> PlainHardware:
    """KV of one token moves in 1 ms between engines; around a prefill ring in 25 us a layer (1/40 of it)."""
    device = replace(
        DEVICES["h100"],
        copy_bandwidth=Figure(163_840 / MS, "test: 163,840 bytes of KV a token"),
        copy_fixed=Figure(0.0, "test"),
    )
    return PlainHardware(device=device)


# A single request, and what a decode costs


@pytest.mark.parametrize("system", ["chunked", "data-parallel", "muxwise", "conflux", "loongserve"])
def test_a_single_request_on_one_gpu(system: str):
    # Prefill 10 + 50; decodes 10 + 1.
    assert times(served(system, workload((0.0, 50, 3)))) == [[60.0, 71.0, 82.0]]


def test_one_decode_iteration_adds_weights_attention_and_host():
    # 2 layers of (2 ms linear + 0.5 ms attention + 0.01 ms per token of context) + 1 ms host; contexts 101 and 102.
    hardware = PlainHardware(
        changes={
            "num_layers": 2,
            "gemm": GemmCurve.affine(0.0, 2 * MS),
            "decode": Affine(0.01 * MS, 0.5 * MS),
            "host": Affine(0.0, 1 * MS),
        }
    )
    first, second, third = times(served("chunked", workload((0.0, 100, 3)), hardware=hardware))[0]
    assert first == 5.0
    assert second - first == pytest.approx(2 * (2 + 0.5 + 1.01) + 1)  # 8.02
    assert third - second == pytest.approx(2 * (2 + 0.5 + 1.02) + 1)  # 8.04


# Chunked Prefill


def test_chunked_prefill_co_batches_within_its_budget():
    outcome = served("chunked", workload((0.0, 150, 3), (0.05, 30, 2)), budget=100, **AT_THE_END)
    # 1: A 100 -> 110.  2: A 50 + B 30 -> 200.  3: two decodes -> 212.  4: one -> 223.
    assert times(outcome) == [[200.0, 212.0, 223.0], [200.0, 212.0]]


def test_decodes_come_out_of_the_budget_first():
    outcome = served("chunked", workload((0.0, 20, 4), (0.005, 25, 1)), budget=20, **AT_THE_END)
    # 1: A 20 -> 30.  2: A decodes, B 19 -> 60.  3: A decodes, B 6 -> 77.  4: A decodes -> 88.
    assert times(outcome) == [[30.0, 60.0, 77.0, 88.0], [77.0]]


@pytest.mark.parametrize(
    ("system", "long", "short"),
    [
        # A 100 -> 110, A 100 -> 220, A 50 + B 50 -> 330, B 10 -> 350.
        ("chunked", 330.0, 350.0),
        # A 100 -> 110, B 60 + A 40 -> 220, A 100 -> 330, A 10 -> 350.
        ("chunked++", 350.0, 220.0),
    ],
)
def test_plus_plus_lets_the_shorter_remainder_go_first(system: str, long: float, short: float):
    outcome = served(system, workload((0.0, 250, 1), (0.05, 60, 1)), budget=100, **AT_THE_END)
    assert times(outcome) == [[long], [short]]


def test_tensor_parallelism_divides_the_linear_work():
    # 10 + 50 / 2; decodes 10 + 1 / 2.
    assert times(served("chunked", workload((0.0, 50, 2)), gpus=2)) == [[35.0, 45.5]]


def test_a_decode_that_cannot_grow_preempts_the_newest_which_is_computed_again():
    # 4 blocks of 16 tokens: A and B hold 2 each (16 + 1 tokens) and none is free.
    trace = workload((0.0, 16, 20), (0.0, 16, 20))
    outcome = served("chunked", trace, hardware=PlainHardware(blocks=4), budget=100, **AT_THE_END)
    first, second = outcome.requests
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert first.generated == second.generated == 20
    # A is one token ahead. With its 18th its context reaches 33: B goes with 16 tokens, and its 17th follows A's last.
    assert second.times[15] < first.times[17] < first.times[19] < second.times[16]


# Data parallel


def test_data_parallel_replicas_take_the_shortest_queue():
    outcome = served("data-parallel", workload((0.0, 100, 1), (0.0, 60, 1), (0.001, 10, 1)), gpus=2, tp=1)
    # A on replica 0 -> 110, B on replica 1 -> 70, where C, behind the fewest tokens, follows -> 90.
    assert times(outcome) == [[110.0], [70.0], [90.0]]
    assert outcome.routed == (1, 2)


# DistServe


def test_distserve_moves_kv_before_the_second_token():
    outcome = served("distserve", workload((0.0, 100, 3), (0.01, 50, 2)), gpus=2, hardware=slow_link(), split="1x1:1x1")
    # A: prefill -> 110, its KV 100 ms -> 210, decodes -> 221, 232.
    # B: prefill 110 -> 170, the link is free at 210, 50 ms -> 260, decode -> 271.
    assert times(outcome) == [[110.0, 221.0, 232.0], [170.0, 271.0]]


def test_distserve_prefill_is_not_disturbed_by_decode():
    trace = workload((0.0, 100, 30), (0.3, 100, 1))
    outcome = served("distserve", trace, gpus=2, hardware=slow_link(), split="1x1:1x1")
    assert times(outcome)[1] == [410.0]  # 300 + 10 + 100, beside A's decodes


def test_distserve_plus_plus_orders_only_the_prefill_queue():
    trace = workload((0.0, 100, 1), (0.01, 90, 1), (0.02, 40, 1))
    # B and C wait for A -> 110; one prompt a batch.
    fcfs = served("distserve", trace, gpus=2, split="1x1:1x1", batch=1)
    assert times(fcfs) == [[110.0], [210.0], [260.0]]
    srpt = served("distserve++", trace, gpus=2, split="1x1:1x1", batch=1)
    assert times(srpt) == [[110.0], [260.0], [160.0]]


def test_distserve_splits_are_checked():
    with pytest.raises(ValueError, match="must look like 1x2:1x2"):
        served("distserve", workload((0.0, 1, 1)), gpus=2, split="2")
    with pytest.raises(ValueError, match="needs 3 GPUs; the deployment has 2"):
        served("distserve", workload((0.0, 1, 1)), gpus=2, split="1x1:1x2")


# LoongServe


def test_loongserve_prefills_on_all_idle_ranks_and_decodes_on_one():
    outcome = served("loongserve", workload((0.0, 100, 3), (0.065, 40, 1)), gpus=2, hardware=slow_link())
    # A on two ranks: 100 / 2 + ring 100 * 1/2 * 0.025 + 10 = 61.25 (one rank: 110); decodes of one rank 11 each.
    # B at 65, while rank 0 decodes, on rank 1 alone: 40 + 10.
    assert times(outcome) == [[61.25, 72.25, 83.25], [115.0]]


def test_loongserve_prefill_waits_for_ten_decode_steps_and_then_stops_decode():
    outcome = served("loongserve", workload((0.0, 100, 13), (0.115, 40, 1)))
    first, second = times(outcome)
    # A: 110, ten steps -> 220; B: 220 + 50; A goes on from 270.
    assert first[10:] == [220.0, 281.0, 292.0]
    assert second == [270.0]


def test_loongserve_cuts_two_prompts_into_groups_when_that_is_cheaper():
    # Together on two ranks: ((40 + 40) / 2 + 80/2 * 0.025 + 10) * 2/40 = 51 * 0.05 = 2.55;
    # one each: 2 * (40 + 10) / 40 = 2.5. Both had waited for C, which took both ranks (100 / 2 + 1.25 + 10 = 61.25).
    outcome = served("loongserve", workload((0.0, 100, 1), (0.01, 40, 1), (0.02, 40, 1)), gpus=2, hardware=slow_link())
    assert times(outcome) == [[61.25], [111.25], [111.25]]


# MuxWise


def multiplexed() -> PlainHardware:
    """Decode on 16 SMs and prefill on the other 116 take twice their time on the SMs; no other contention.

    Ten layers of 0.1 ms a token.
    """
    device = replace(
        DEVICES["h100"],
        decode_sms={16: Figure(2.0, "test"), 132: Figure(1.0, "test")},
        prefill_sms={116: Figure(2.0, "test"), 132: Figure(1.0, "test")},
        multiplex=Figure(1.0, "test"),
    )
    return PlainHardware(device=device, changes={"num_layers": 10, "gemm": GemmCurve.affine(0.1 * MS, 0.0)})


def test_muxwise_runs_both_phases_on_a_partition():
    outcome = served("muxwise", workload((0.0, 100, 3), (0.115, 200, 1)), hardware=multiplexed())
    first, second = times(outcome)
    # A alone: 110, 121. B comes at 115 and waits for the split. From 121 on decode has 16 SMs: 10 + 1 * 2 = 12 -> 133.
    assert first == [110.0, 121.0, 133.0]
    # B: 12 of the 10 + 200 * 2 = 410 ms beside decode, the rest of its 210 ms alone: 133 + 210 * 398 / 410.
    assert second == [pytest.approx(336.854)]


def test_muxwise_drains_to_a_layer_before_decode_gets_its_partition():
    outcome = served("muxwise", workload((0.0, 100, 2), (0.001, 200, 1)), hardware=multiplexed(), batch=1)
    first, second = times(outcome)
    # A -> 110. B starts at once, and so does A's decode: B has done nothing that must drain. 10 + 2 -> 122.
    assert first == [110.0, 122.0]
    assert second == [pytest.approx(122 + 210 * 398 / 410, abs=1e-3)]


def test_muxwise_fcfs_does_not_preempt_and_plus_plus_does():
    trace = workload((0.0, 300, 1), (0.05, 20, 1))
    # A alone -> 310, then B -> 340.
    assert times(served("muxwise", trace, hardware=multiplexed())) == [[310.0], [340.0]]
    # B at once: 50 + 30 -> 80; A goes on -> 340.
    assert times(served("muxwise++", trace, hardware=multiplexed())) == [[340.0], [80.0]]


def test_muxwise_gives_decode_more_sms_when_tbt_is_tight():
    trace = workload((0.0, 100, 3), (0.115, 200, 1))
    # 12 ms on 16 SMs would break 11.5: 32 SMs it is, 1 + (2 - 1) * (1/32 - 1/132) / (1/16 - 1/132) = 1.431.
    slowdown = sm_slowdown(multiplexed().device.decode_sms, 32)
    assert slowdown == pytest.approx(1.431, abs=1e-3)
    outcome = served("muxwise", trace, hardware=multiplexed(), slo=Slo(10.0, 11.5 * MS))
    assert times(outcome)[0][2] == pytest.approx(121 + 10 + slowdown, abs=1e-3)


# Conflux


def test_conflux_splits_a_prompt_over_ranks_and_decodes_on_one():
    # 100 / 2 + 10; decodes 11.
    assert times(served("conflux", workload((0.0, 100, 3)), gpus=2)) == [[60.0, 71.0, 82.0]]


def test_conflux_waterfills_around_the_decodes():
    outcome = served("conflux", workload((0.0, 100, 3), (0.065, 99, 1)), gpus=2, **AT_THE_END)
    # A decodes on one rank -> 71. Then 99 tokens and A's one make 50 a rank -> 131.
    assert times(outcome) == [[60.0, 71.0, 131.0], [131.0]]


def test_even_dispatch_leaves_the_decode_rank_longer():
    outcome = served("conflux", workload((0.0, 100, 3), (0.065, 100, 1)), gpus=2, without="even", **AT_THE_END)
    assert times(outcome)[0] == [60.0, 71.0, 132.0]  # 50 + 1 on the decode's rank


def test_conflux_keeps_tbt_while_a_long_prompt_prefills():
    slo = Slo(ttft=2.0, tbt=0.05)
    outcome = served("conflux", workload((0.0, 20, 20), (0.03, 600, 1)), gpus=2, slo=slo)
    gaps = [b - a for a, b in zip(outcome.requests[0].times, outcome.requests[0].times[1:], strict=False)]
    assert max(gaps) <= 0.05 + 1e-9
    assert outcome.requests[1].times[0] > 0.3  # 600 tokens in chunks of at most 2 * 40


def test_conflux_srpt_serves_the_shorter_prompt_first():
    trace = workload((0.0, 100, 1), (0.001, 1000, 1), (0.002, 50, 1))
    slo = Slo(ttft=10.0, tbt=0.06)  # an idle instance plans 0.06 s ahead: 96 tokens (48 a rank)
    first = {name: times(served(name, trace, gpus=2, slo=slo)) for name in ("conflux-fcfs", "conflux-srpt")}
    assert first["conflux-fcfs"][1] <= first["conflux-fcfs"][2]
    assert first["conflux-srpt"][2] < first["conflux-srpt"][1]


def test_without_co_batching_the_two_phases_run_one_after_the_other():
    outcome = served("conflux", workload((0.0, 100, 3), (0.065, 100, 1)), gpus=2, without="cobatch", **AT_THE_END)
    # A's decode and B's prefill: (1 + 10) + (50 + 10) from 71 on.
    assert times(outcome)[0] == [60.0, 71.0, 142.0]


def test_without_phase_specific_parallelism_decode_pays_the_all_to_all():
    hardware = PlainHardware(changes={"comm": Affine(0.0, 5 * MS)})
    trace = workload((0.0, 100, 2))
    assert times(served("conflux", trace, gpus=2, hardware=hardware)) == [[65.0, 76.0]]
    assert times(served("conflux", trace, gpus=2, hardware=hardware, without="phase")) == [[65.0, 81.0]]


def test_kv_that_moves_to_the_decode_rank_costs_its_exposed_time():
    # Half of 100 tokens' KV is on the other rank: 50 ms at 1 ms a token, all of it exposed: 50 + 50 + 10.
    hardware = PlainHardware(changes={"transfer": Affine(1 * MS), "transfer_exposed": 1.0})
    assert times(served("conflux", workload((0.0, 100, 2)), gpus=2, hardware=hardware)) == [[110.0, 121.0]]


@pytest.mark.parametrize(("without", "both_decode"), [("none", 11.0), ("skewed", 12.0)])
def test_worst_fit_spreads_decodes_and_skewed_placement_packs_them(without: str, both_decode: float):
    trace = workload((0.0, 100, 3), (0.001, 100, 3))
    outcome = served("conflux", trace, gpus=2, without=without, **AT_THE_END)
    # A -> 60; A's decode and B's 100 tokens, 51 on a rank -> 121; then both decode, on two ranks or on one.
    assert times(outcome)[0] == [60.0, 121.0, 121.0 + both_decode]
