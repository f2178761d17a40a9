"""What is measured: grids that identify every coefficient, random batches in their ranges, plans of both."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from conflux_ray.planning.fitting import MIN_POINTS, SPREAD
from conflux_ray.profiling.batches import (
    PARTS,
    Batch,
    BatchChunk,
    Case,
    Ranges,
    captured_sizes,
    component_case,
    component_cases,
    iteration_cases,
    linear_sizes,
    padded_sizes,
)
from conflux_ray.profiling.plans import TableLayout, make_plans

RANGES = [Ranges(1, 64, 8, 128), Ranges(2, 64, 8, 128), Ranges(3, 768, 16, 1536), Ranges(8)]


@pytest.mark.parametrize("ranges", RANGES)
def test_the_grid_tells_slope_from_intercept_for_every_part(ranges: Ranges) -> None:
    cases = component_cases(ranges)
    assert len({case.name for case in cases}) == len(cases)
    for part in PARTS if ranges.num_ranks > 1 else ("gemm", "decode", "prefill", "host"):
        points = {case.workload for case in cases if case.part == part}
        assert len(points) >= MIN_POINTS, part
        assert max(points) >= SPREAD * min(points), part


@pytest.mark.parametrize("ranges", RANGES)
def test_random_batches_stay_in_their_ranges(ranges: Ranges) -> None:
    for case in iteration_cases(ranges, 200, seed=3):
        contexts = [context for rank in case.batch.decodes for context in rank]
        assert all(ranges.min_context <= context <= ranges.max_context for context in contexts)
        assert all(len(rank) <= ranges.max_batch for rank in case.batch.decodes)
        assert sum(chunk.length for chunk in case.batch.chunks) <= ranges.max_tokens
        assert all(chunk.context + chunk.length <= ranges.max_length for chunk in case.batch.chunks)
        assert case.batch.decodes != () or case.batch.chunks != ()


def test_random_batches_are_of_all_kinds_skewed_ones_and_transfers_too() -> None:
    batches = [case.batch for case in iteration_cases(Ranges(3, 768, 16, 1536), 200, seed=0)]
    assert {batch.kind for batch in batches} == {"decode", "prefill", "mixed overlap", "mixed serial"}
    assert any(len({len(rank) for rank in batch.decodes}) > 1 for batch in batches)
    assert any(any(batch.load.incoming) for batch in batches)


def test_cases_follow_from_the_seed_and_the_held_out_share_is_exact() -> None:
    ranges = Ranges(2, 64, 8, 128)
    cases = iteration_cases(ranges, 50, seed=1, held_out=0.2)
    assert cases == iteration_cases(ranges, 50, seed=1, held_out=0.2)
    assert cases != iteration_cases(ranges, 50, seed=2, held_out=0.2)
    assert sum(case.held_out for case in cases) == 10


def test_too_small_a_range_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_batch=2 must be at least 4"):
        Ranges(2, 64, 2, 128)


def test_a_plan_computes_what_the_load_says() -> None:
    batch = Batch(((40, 7), ()), (BatchChunk(8, (3, 2)), BatchChunk(0, (0, 4), handed_to=1)))
    plans = make_plans(Case("c", batch), TableLayout(50, 4, 2, 300))
    load, step = batch.load, plans.numbered(5)
    assert step.iteration == 5
    assert tuple(map(len, step.decodes)) == load.decode_tokens == (2, 0)
    assert [d.position + 1 for d in step.decodes[0]] == [40, 7]
    assert load.decode_context == (47, 0)
    sizes = [(chunk.end - chunk.start, chunk.start) for chunk in step.chunks]
    assert tuple(sizes) == load.chunks == ((5, 8), (4, 0))
    assert load.prefill_tokens == (3, 6)
    assert load.incoming == (0.0, 2.0)  # 4 tokens, half of whose KV is on rank 1 already
    assert [(t.start, t.end, t.target) for t in step.transfers] == [(0, 4, 1)]
    assert step.wait_transfers
    known = {p.alloc_id for p in plans.setup.new_prefills} | {r.alloc_id for r in plans.setup.new_residents}
    assert {d.alloc_id for d in step.decodes[0]} | {c.alloc_id for c in step.chunks} <= known


def test_prompts_are_random_ids_and_the_same_for_a_case_of_the_same_name() -> None:
    batch = Batch(((), ()), (BatchChunk(0, (200, 200)), BatchChunk(0, (50, 50))))
    made = [make_plans(Case(name, batch), TableLayout(50, 4, 2, 300)).step.chunks for name in "aab"]
    assert [c.token_ids for c in made[0]] == [c.token_ids for c in made[1]] != [c.token_ids for c in made[2]]
    first, second = (np.frombuffer(chunk.token_ids, "<i4") for chunk in made[0])
    assert (len(first), len(second)) == (400, 100)
    assert first.min() >= 0
    assert first.max() < 300
    assert len(set(first.tolist())) > 150  # of 300 ids, 220 are expected in 400 draws
    assert first[:100].tolist() != second.tolist()


def test_tables_begin_again_where_the_pool_ends_and_leave_the_null_block_out() -> None:
    layout = TableLayout(num_blocks=4, block_size=4, num_ranks=2, vocab_size=300)
    assert layout.decode(8) == [1, 2]
    assert layout.prefill(9) == [3, 1]


def test_overlapped_batches_meet_every_split_of_the_multiprocessors_in_every_mix() -> None:
    cases = iteration_cases(Ranges(2), 240, seed=1, splits=(32, 48, 64))
    mixed = [case.batch for case in cases if case.batch.kind.startswith("mixed")]
    counts = {sms: sum(b.overlap and b.decode_sms == sms for b in mixed) for sms in (None, 32, 48, 64)}
    assert min(counts.values()) >= 20
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(b.decode_sms is None for b in mixed if not b.overlap)
    longer_decodes = [b for b in mixed if b.decode_sms == 48 and max(b.load.decode_tokens) >= 64]
    longer_prefill = [b for b in mixed if b.decode_sms == 48 and sum(b.load.prefill_tokens) >= 5000]
    assert longer_decodes
    assert longer_prefill


def test_a_split_reaches_the_workers() -> None:
    batch = Batch(((8,), (4,)), (BatchChunk(4, (1, 1)),), decode_sms=48)
    assert make_plans(Case("c", batch), TableLayout(50, 4, 2, 300)).step.decode_sms == 48


@pytest.mark.parametrize("ranges", RANGES)
def test_a_name_says_what_is_measured(ranges: Ranges) -> None:
    for case in component_cases(ranges):
        assert component_case(case.name, ranges) == case


@pytest.mark.parametrize("name", ["gemm", "gemm-x", "prefill-5", "iteration-3", "decode-5"])
def test_a_name_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        component_case(name, Ranges(2))


@pytest.mark.heavy
def test_the_captured_sizes_are_those_of_the_graphs() -> None:
    from conflux_ray.vllm_compat.graphs import LARGEST_GRAPH, graph_sizes

    assert captured_sizes() == graph_sizes(LARGEST_GRAPH)


def test_on_a_gpu_every_step_of_the_linear_region_is_measured() -> None:
    ranges = Ranges(2, 8192, 128)
    sizes = linear_sizes(ranges)
    assert set(captured_sizes()) <= set(sizes)
    assert set(range(1024, 4225, 128)) <= set(sizes)  # half of the tokens and all decodes, on one rank
    assert sizes[-1] == 8320
    assert len(sizes) < 110
    padded = padded_sizes(component_cases(ranges, linear=sizes))
    assert padded[: len(captured_sizes())] == captured_sizes()
    assert padded[-1] == 4224  # beyond, not every tile is measured
    assert all(b - a == 128 for a, b in pairwise(padded[len(captured_sizes()) - 1 :]))
    assert padded_sizes([component_case("gemm-8320", ranges)]) == captured_sizes()
