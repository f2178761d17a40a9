"""A worker's start and its loop, on the CPU."""

import pytest

from conflux_ray.execution.group import LocalWorkerGroup
from conflux_ray.execution.loop import WorkerLostError
from conflux_ray.execution.plan import IterationPlan, WorkerResult, encode
from conflux_ray.execution.runner import ModelRunner, RunnerLimits
from conflux_ray.execution.worker import STOP, WorkerSpec, run_plans
from conflux_ray.kv import KVGeometry
from conflux_ray.models import store
from conflux_ray.models.reference import Reference
from conflux_ray.vllm_compat.loader import ModelArgs
from tests.execution.oracle import Schedule, run_schedule

pytestmark = pytest.mark.heavy


class SlowIteration:
    """An iteration that is done only when it is waited for."""

    def __init__(self, log: list[str], iteration: int) -> None:
        self._log = log
        self._iteration = iteration

    def ready(self) -> bool:
        return False

    def finish(self) -> WorkerResult:
        self._log.append(f"finish {self._iteration}")
        return WorkerResult(self._iteration, 0)


class Inbox:
    """Plans that are all there."""

    def __init__(self, count: int) -> None:
        self._messages = [encode(IterationPlan(i, ((),))) for i in range(count)] + [STOP]

    def ready(self) -> bool:
        return bool(self._messages)

    def receive(self, timeout: float) -> bytes:
        return self._messages.pop(0)


def test_the_next_plan_is_enqueued_before_a_result_is_waited_for() -> None:
    log: list[str] = []

    def run(plan: IterationPlan) -> SlowIteration:
        log.append(f"run {plan.iteration}")
        return SlowIteration(log, plan.iteration)

    run_plans(Inbox(4), run, lambda result: log.append(f"send {result.iteration}"))
    assert log == [
        "run 0", "run 1", "finish 0", "send 0", "run 2", "finish 1", "send 1", "run 3", "finish 2", "send 2",
    ]  # fmt: skip


class QuickIteration(SlowIteration):
    def ready(self) -> bool:
        return True


def test_a_result_that_is_there_is_sent_before_the_next_plan_runs() -> None:
    log: list[str] = []

    def run(plan: IterationPlan) -> QuickIteration:
        log.append(f"run {plan.iteration}")
        return QuickIteration(log, plan.iteration)

    run_plans(Inbox(2), run, lambda result: log.append(f"send {result.iteration}"))
    assert log == ["run 0", "finish 0", "send 0", "run 1", "finish 1", "send 1"]


class WarmedUp(ModelRunner):
    """Runs the largest iteration before it serves, as on a GPU."""

    def __init__(self, *args, limits: RunnerLimits, **options) -> None:
        super().__init__(*args, limits=limits, **options)
        before = self.pool
        self.warm_up(RunnerLimits(max_prefill_tokens=150, max_num_seqs=5))
        assert self.pool is before
        assert not self._residents
        assert not self._prefill_tables
        assert not any(layer.any() for layer in before.layers)


@pytest.mark.parametrize(("n", "tp"), [(2, 1), (2, 2)])
def test_a_warm_up_leaves_nothing_behind(n: int, tp: int) -> None:
    blocks = KVGeometry(4, n, 2).min_blocks(128)
    args = ModelArgs(str(store.model_dir("tiny-llama")), "float32", 128, tensor_parallel=tp, block_size=4)
    name = "tests.execution.test_worker:WarmedUp"
    group = LocalWorkerGroup(WorkerSpec(args, 0, n * tp, blocks, 4, "", return_logits=True, runner=name))
    try:
        assert group.num_blocks == blocks
        reference = Reference(store.model_dir("tiny-llama"))
        outcome = run_schedule(Schedule(3, num_requests=4), group, reference, n, tp, blocks, 4, 128)
    finally:
        group.close()
    assert outcome.completed > 0


def test_a_pool_cannot_be_sized_by_the_hosts_memory() -> None:
    args = ModelArgs(str(store.model_dir("tiny-llama")), "float32", 128, block_size=4)
    with pytest.raises(WorkerLostError, match="on device=cpu name its blocks"):
        LocalWorkerGroup(WorkerSpec(args, 0, 1, 0, 4, ""))
