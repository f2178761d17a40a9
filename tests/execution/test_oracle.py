"""Conflux Parallelism computes what the model computes: real processes, any schedule, checked by transformers."""

import functools

import pytest

from conflux_ray.execution.group import LocalWorkerGroup
from conflux_ray.execution.loop import WorkerLostError
from conflux_ray.execution.worker import WorkerSpec
from conflux_ray.kv import KVGeometry
from conflux_ray.models import store
from conflux_ray.models.reference import Reference
from conflux_ray.vllm_compat.loader import ModelArgs
from tests.execution.oracle import OracleMismatchError, Outcome, Schedule, run_schedule

pytestmark = pytest.mark.heavy

BLOCK_SIZE = 4
MAX_MODEL_LEN = 128

LAYOUTS = [
    # model, N, base TP, schedules
    ("tiny-llama", 2, 1, 6),
    ("tiny-qwen3", 2, 1, 6),
    ("tiny-llama", 4, 1, 4),
    ("tiny-qwen3", 4, 1, 4),
    ("tiny-llama", 2, 2, 4),
    ("tiny-qwen3", 2, 2, 4),
    ("smollm2-135m-instruct", 3, 1, 1),
    ("smollm2-135m-instruct-12-6", 2, 1, 1),
    ("smollm2-135m-instruct-12-6", 1, 2, 1),
    ("smollm2-135m-instruct-12-12", 2, 2, 1),
]


def num_blocks(n: int) -> int:
    """Just what one request of MAX_MODEL_LEN needs for its transition, so that decodes are preempted."""
    return KVGeometry(BLOCK_SIZE, n, 2).min_blocks(MAX_MODEL_LEN)


@functools.lru_cache(maxsize=2)
def reference(model: str) -> Reference:
    return Reference(store.model_dir(model))


def spec(model: str, n: int, tp: int, **options) -> WorkerSpec:
    args = ModelArgs(
        str(store.model_dir(model)),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        tensor_parallel=tp,
        block_size=BLOCK_SIZE,
    )
    return WorkerSpec(args, 0, n * tp, num_blocks(n), BLOCK_SIZE, "", return_logits=True, **options)


def run(schedule: Schedule, group: LocalWorkerGroup, model: str, n: int, tp: int) -> Outcome:
    return run_schedule(schedule, group, reference(model), n, tp, num_blocks(n), BLOCK_SIZE, MAX_MODEL_LEN)


@pytest.mark.parametrize(("model", "n", "tp", "schedules"), LAYOUTS)
def test_random_schedules_give_the_reference_models_tokens(model: str, n: int, tp: int, schedules: int) -> None:
    group = LocalWorkerGroup(spec(model, n, tp))
    try:
        outcomes = [run(Schedule(seed), group, model, n, tp) for seed in range(schedules)]
    finally:
        group.close()
    total = [outcome.counters for outcome in outcomes]
    # What was meant to happen did: otherwise the comparison above proves little.
    assert sum(c.mixed_iterations for c in total) > 0
    assert sum(c.several_prefills for c in total) > 0
    assert sum(c.finished for c in total) > 0
    if n > 1:
        assert sum(c.uneven_chunks for c in total) > 0
        assert sum(c.empty_shards for c in total) > 0
        assert sum(c.cross_rank_transitions for c in total) > 0
    if schedules > 1:
        assert sum(c.preemptions for c in total) > 0
        assert sum(c.aborted for c in total) > 0
        assert sum(c.discarded_tokens for c in total) > 0


@pytest.mark.parametrize("repeat", [False, True])
def test_slow_transfers_and_slow_decode_streams_change_nothing(repeat: bool) -> None:
    model = "tiny-llama"
    delays = {"transfer_delay": (0.0, 0.004), "decode_delay": (0.0, 0.002)}
    group = LocalWorkerGroup(spec(model, 2, 1, repeat_attention=repeat, **delays))
    try:
        outcomes = [run(Schedule(100 + seed, num_requests=8), group, model, 2, 1) for seed in range(3)]
    finally:
        group.close()
    assert sum(o.counters.cross_rank_transitions for o in outcomes) > 0


@pytest.mark.parametrize(("model", "n", "tp"), [("tiny-llama", 4, 1), ("tiny-qwen3", 2, 2)])
def test_attention_enqueued_once_and_repeated_for_every_layer_changes_nothing(model: str, n: int, tp: int) -> None:
    group = LocalWorkerGroup(spec(model, n, tp, repeat_attention=True))
    try:
        outcomes = [run(Schedule(200 + seed), group, model, n, tp) for seed in range(3)]
    finally:
        group.close()
    assert sum(o.counters.mixed_iterations for o in outcomes) > 0
    assert sum(o.counters.cross_rank_transitions for o in outcomes) > 0


@pytest.mark.parametrize(("model", "n", "tp"), [("tiny-llama", 4, 1), ("tiny-qwen3", 2, 2)])
def test_decodes_alone_in_a_pass_that_is_kept_change_nothing(model: str, n: int, tp: int) -> None:
    # Sizes that leave rows to pad, and batches too large for any.
    group = LocalWorkerGroup(spec(model, n, tp, decode_sizes=(2, 3), transfer_delay=(0.0, 0.002)))
    try:
        outcomes = [run(Schedule(300 + seed), group, model, n, tp) for seed in range(3)]
    finally:
        group.close()
    assert sum(o.counters.iterations - o.counters.mixed_iterations for o in outcomes) > 0
    assert sum(o.counters.cross_rank_transitions for o in outcomes) > 0


@pytest.mark.parametrize("fault", ["ShiftedPosition", "StaleBlock"])
def test_the_oracle_fails_on_a_planted_bug_in_a_pass_that_is_kept(fault: str) -> None:
    model = "tiny-llama"
    group = LocalWorkerGroup(spec(model, 2, 1, runner=f"tests.execution.faults:{fault}", decode_sizes=(1, 4)))
    try:
        with pytest.raises(OracleMismatchError):
            run(Schedule(7), group, model, 2, 1)
    finally:
        group.kill()


@pytest.mark.parametrize("fault", ["DroppedBlock", "SwappedHeads", "ShiftedPosition", "ReversedSegments", "StaleBlock"])
def test_the_oracle_fails_on_a_planted_bug(fault: str) -> None:
    model = "tiny-llama"
    group = LocalWorkerGroup(spec(model, 2, 1, runner=f"tests.execution.faults:{fault}"))
    try:
        with pytest.raises(OracleMismatchError):
            run(Schedule(7), group, model, 2, 1)
    finally:
        group.kill()


def test_a_failing_worker_is_reported_with_its_error() -> None:
    group = LocalWorkerGroup(spec("tiny-llama", 2, 1, runner="tests.execution.faults:Raises"))
    try:
        with pytest.raises(WorkerLostError, match="planted failure"):
            run(Schedule(7), group, "tiny-llama", 2, 1)
    finally:
        group.kill()
