"""Capacity planning on machines where the answer is plain."""

from __future__ import annotations

import pytest

from conflux_ray.planning.latency_model import GemmCurve
from conflux_ray.simulator.capacity import layouts, make_plan
from conflux_ray.simulator.goodput import Search
from conflux_ray.simulator.hardware import DEVICES, MODELS, StatedHardware, narrowest_tp
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.trace import Quantiles
from conflux_ray.simulator.workload import Workload
from tests.simulator.build import MS, PlainHardware, h200

QUICK = Search(seconds=20, seeds=1, tolerance=0.2, guess=3.0, requests=150)


def test_layouts_use_every_gpu_and_fit_the_model():
    found = layouts(h200(), "conflux", 8)
    assert {(gpus, instances) for gpus, _, instances in found} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    big = layouts(StatedHardware(MODELS["qwen-32b"], DEVICES["h100"]), "conflux", 8)
    assert min(base_tp for _, base_tp, _ in big) == 2


def test_an_odd_number_of_gpus_is_used_as_far_as_it_goes():
    assert {(gpus, instances) for gpus, _, instances in layouts(h200(), "chunked", 3)} == {(1, 3)}


def test_narrowest_rank_follows_the_paper():
    h100 = {name: StatedHardware(shape, DEVICES["h100"]) for name, shape in MODELS.items()}
    assert narrowest_tp(h100["llama-8b"], 4) == 1
    assert narrowest_tp(h100["qwen-14b"], 4) == 1
    assert narrowest_tp(h100["qwen-32b"], 8) == 2
    with pytest.raises(ValueError, match="does not fit on 1 H100"):
        narrowest_tp(h100["qwen-32b"], 1)


def test_plan_prefers_replicas_for_short_prompts_and_sharing_for_long_ones():
    # Tensor parallelism saves nothing here: replicas double what short prompts get, but a long prompt needs its ranks.
    hardware = PlainHardware(blocks=100_000, changes={"gemm": GemmCurve.affine(MS, 0.0)})
    short = Workload("short", 4000, quantiles=(Quantiles(50, 80), Quantiles(5, 10)))
    long = Workload("long", 4000, quantiles=(Quantiles(2000, 2500), Quantiles(2, 4)))
    slo = Slo(1.0, 0.2)
    replicas = make_plan(hardware, short, slo, 2, 5.0, QUICK, jobs=1, systems=("chunked",))
    shared = make_plan(hardware, long, Slo(2.0, 0.2), 2, 0.2, QUICK, jobs=1, systems=("conflux", "chunked"))
    assert replicas.options[0].instances == 2
    assert shared.options[0].instances == 1  # one GPU takes over 2 s for a long prompt
    assert shared.options[-1].goodput < shared.options[0].goodput


def test_headroom_is_relative_to_the_rate():
    workload = Workload("short", 4000, quantiles=(Quantiles(50, 80), Quantiles(20, 40)))
    plan = make_plan(PlainHardware(), workload, Slo(1.0, 0.2), 1, 2.0, QUICK, jobs=1, systems=("chunked",))
    assert plan.headroom == pytest.approx(plan.options[0].goodput / 2.0 - 1)
    assert plan.headroom > 0
    assert plan.attainment >= 0.95
