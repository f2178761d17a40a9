"""A worker's start and its loop, on the CPU."""

import threading
import traceback

import pytest

from conflux_ray.execution.group import LocalWorkerGroup
from conflux_ray.execution.loop import WorkerLostError
from conflux_ray.execution.plan import IterationPlan, WorkerResult, encode
from conflux_ray.execution.runner import ModelRunner, RunnerLimits
from conflux_ray.execution.worker import STOP, ReportedError, WorkerSpec, run_plans
from conflux_ray.kv import KVGeometry
from conflux_ray.models import store
from conflux_ray.models.reference import Reference
from conflux_ray.vllm_compat.loader import ModelArgs
from tests.execution.oracle import Schedule, run_schedule

pytestmark = pytest.mark.heavy


class Iteration:
    """An iteration that is done when it is told so, or fails."""

    def __init__(self, number: int, done: threading.Event, failure: str = "") -> None:
        self._number = number
        self._done = done
        self._failure = failure

    def finish(self) -> WorkerResult:
        assert self._done.wait(10)
        if self._failure:
            raise RuntimeError(self._failure)
        return WorkerResult(self._number, 0)


class Inbox:
    """Plans that are all there."""

    def __init__(self, count: int) -> None:
        self._messages = [encode(IterationPlan(i, ((),))) for i in range(count)] + [STOP]

    def receive(self, timeout: float) -> bytes:
        return self._messages.pop(0)


def fail() -> None:
    raise AssertionError("no iteration fails here")


def test_the_next_plan_is_enqueued_before_a_result_is_waited_for() -> None:
    enqueued, sent = threading.Event(), []

    def run(plan: IterationPlan) -> Iteration:
        if plan.iteration == 1:
            enqueued.set()  # what the first one waits for
        return Iteration(plan.iteration, enqueued)

    run_plans(Inbox(4), run, lambda result: sent.append(result.iteration), fail)
    assert sent == [0, 1, 2, 3]


def test_a_result_is_sent_while_the_next_plan_is_being_enqueued() -> None:
    done, reported = threading.Event(), threading.Event()
    done.set()

    def run(plan: IterationPlan) -> Iteration:
        if plan.iteration == 1:
            assert reported.wait(10)  # a long iteration: the one before is reported meanwhile
        return Iteration(plan.iteration, done)

    run_plans(Inbox(2), run, lambda result: reported.set(), fail)


def test_an_iteration_that_fails_ends_the_loop_with_its_error() -> None:
    done, sent, errors = threading.Event(), [], []
    done.set()
    with pytest.raises(ReportedError, match="broken"):
        run_plans(
            Inbox(3),
            lambda plan: Iteration(plan.iteration, done, "broken"),
            sent.append,
            lambda: errors.append(traceback.format_exc()),
        )
    assert sent == []
    assert len(errors) == 1
    assert "broken" in errors[0]


def test_an_iteration_that_fails_is_noticed_while_no_plan_comes() -> None:
    class Silent:
        def __init__(self) -> None:
            self._first = [encode(IterationPlan(0, ((),)))]

        def receive(self, timeout: float) -> bytes:
            if self._first:
                return self._first.pop()
            raise TimeoutError

    done, reported = threading.Event(), threading.Event()
    done.set()
    with pytest.raises(ReportedError, match="broken"):
        run_plans(Silent(), lambda plan: Iteration(plan.iteration, done, "broken"), lambda result: None, reported.set)
    assert reported.is_set()


def test_what_an_iteration_held_is_let_go_by_the_thread_that_enqueues() -> None:
    freed: list[tuple[int, str]] = []

    class Held(Iteration):
        def __del__(self) -> None:
            freed.append((self._number, threading.current_thread().name))

    done, all_sent = threading.Event(), threading.Event()
    done.set()

    def run(plan: IterationPlan) -> Iteration:
        if plan.iteration == 3:
            assert all_sent.wait(10)
        return Held(plan.iteration, done)

    run_plans(Inbox(4), run, lambda result: all_sent.set() if result.iteration == 2 else None, fail)
    assert {name for number, name in freed if number < 3} <= {threading.current_thread().name}


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
