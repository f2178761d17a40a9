"""The router spreads by queued work and never loses count."""

from typing import get_args

import pytest

from conflux_ray.config import IngressConfig
from conflux_ray.serving.router import ROUTING, NoInstanceError, Router, UnsupportedError
from conflux_ray.simulator.router import ROUTERS
from conflux_ray.wire import LoadReport, Ready


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ready(name: str, max_model_len: int = 10_000, features: tuple[str, ...] = ()) -> Ready:
    return Ready(1, name, "a", "model", max_model_len, 100, 8, features)


def report(
    queued_work_s: float = 0.0,
    capacity: float = 1000.0,
    draining: bool = False,
    running: int = 0,
    waiting: int = 0,
    closing: bool = False,
) -> LoadReport:
    return LoadReport(queued_work_s, capacity, running, waiting, 0.0, draining, closing)


def router_of(*names: str, clock: Clock | None = None, routing: str = "queued_work") -> Router:
    router = Router(clock=clock or Clock(), routing=routing)
    for name in names:
        router.add_instance(ready(name))
        router.update(name, 0, report())
    return router


def test_a_burst_between_two_reports_spreads_evenly():
    router = router_of("a", "b", "c")
    chosen = [router.dispatch(1000).instance_id for _ in range(9)]
    assert {name: chosen.count(name) for name in "abc"} == {"a": 3, "b": 3, "c": 3}


def test_work_goes_by_capacity_not_by_count():
    router = router_of("slow", "fast")
    router.update("fast", 0, report(capacity=3000.0))
    chosen = [router.dispatch(1000).instance_id for _ in range(40)]
    assert chosen.count("fast") == 30


def test_an_idle_fast_instance_is_chosen_before_an_idle_slow_one():
    router = router_of("slow", "fast")
    router.update("fast", 0, report(capacity=3000.0))
    for _ in range(3):
        dispatch = router.dispatch(1000)
        assert dispatch.instance_id == "fast"
        dispatch.release()


def test_a_short_request_goes_past_the_queue_of_the_fast_instance_and_a_long_one_waits_in_it():
    router = router_of("slow", "fast")
    router.update("fast", 0, report(queued_work_s=0.5, capacity=4000.0))
    assert router.dispatch(100).instance_id == "slow"
    assert router.dispatch(2000).instance_id == "fast"


def test_a_long_prompt_counts_for_many_short_ones():
    router = router_of("a", "b")
    first = router.dispatch(8000)
    others = {router.dispatch(1000).instance_id for _ in range(7)}
    assert first.instance_id not in others


def test_the_least_reported_work_wins():
    router = router_of("a", "b")
    router.update("a", 0, report(queued_work_s=2.0))
    router.update("b", 0, report(queued_work_s=1.5))
    assert router.dispatch(10).instance_id == "b"


def test_reported_work_shrinks_while_no_report_comes():
    clock = Clock()
    router = router_of("a", "b", clock=clock)
    router.update("a", 0, report(queued_work_s=1.0))
    clock.now += 0.9
    router.update("b", 0, report(queued_work_s=0.2))
    assert router.dispatch(10).instance_id == "a"


def test_an_instance_that_has_not_reported_for_long_is_the_last_choice():
    clock = Clock()
    router = router_of("stale", "busy", clock=clock)
    clock.now += 5.0
    router.update("busy", 0, report(queued_work_s=9.0))
    assert router.dispatch(10).instance_id == "busy"
    assert router.dispatch(10, exclude={"busy"}).instance_id == "stale"


def test_a_report_replaces_exactly_the_dispatches_that_it_has_received():
    router = router_of("a")
    for _ in range(3):
        router.dispatch(1000)
    load = router.instances["a"]
    router.update("a", 2, report(queued_work_s=0.5))
    assert load.queued_work(Clock.now) == pytest.approx(0.5 + 1.0)
    router.update("a", 3, report(queued_work_s=0.5))
    assert load.queued_work(Clock.now) == pytest.approx(0.5)


def test_release_counts_once():
    router = router_of("a")
    first, second = router.dispatch(1000), router.dispatch(1000)
    first.release()
    first.release()
    assert router.instances["a"].in_flight == 1
    assert router.instances["a"].queued_work(Clock.now) == pytest.approx(1.0)
    second.release()
    assert router.instances["a"].in_flight == 0


def test_a_claim_on_an_instance_that_came_back_does_not_touch_the_new_account():
    router = router_of("a")
    old = router.dispatch(1000)
    router.remove_instance("a")
    router.add_instance(ready("a"))
    old.release()
    assert router.instances["a"].in_flight == 0


def test_500_aborts_leave_nothing_behind_and_load_spreads_evenly_afterwards():
    router = router_of("a", "b")
    for dispatch in [router.dispatch(8000) for _ in range(500)]:
        dispatch.release()
    router.remove_instance("b")
    router.add_instance(ready("b"))
    router.update("b", 0, report())
    chosen = [router.dispatch(1000).instance_id for _ in range(10)]
    assert chosen.count("a") == 5


def test_siblings_stay_together():
    router = router_of("a", "b")
    first = router.dispatch(1000).instance_id
    assert router.dispatch(1000, prefer=first).instance_id == first


def test_draining_too_small_and_excluded_instances_are_not_chosen():
    router = router_of("draining", "excluded")
    router.update("draining", 0, report(draining=True))
    router.add_instance(ready("small", max_model_len=100))
    with pytest.raises(NoInstanceError):
        router.dispatch(100, exclude={"excluded"})
    assert router.dispatch(99, exclude={"excluded"}).instance_id == "small"


def test_an_instance_takes_new_requests_once_it_has_said_so():
    router = Router()
    router.add_instance(ready("a"))
    assert not router.has_instance()
    assert router.dispatch(10).instance_id == "a"  # what has been let in need not wait for that
    router.update("a", 0, report())
    assert router.has_instance()


def test_one_that_is_drained_with_all_others_comes_last():
    router = router_of("closing", "busy")
    router.update("closing", 0, report(closing=True))
    router.update("busy", 0, report(queued_work_s=60.0))
    assert router.has_instance()
    assert router.dispatch(10).instance_id == "busy"
    router.update("busy", 0, report(queued_work_s=60.0, closing=True))
    assert not router.has_instance()
    assert router.is_closing()
    assert router.dispatch(10).instance_id == "closing"
    router.update("closing", 0, report(draining=True, closing=True))
    assert router.dispatch(10).instance_id == "busy"
    assert not router.is_ending()
    router.update("busy", 0, report(draining=True, closing=True))
    assert router.is_ending()


def test_only_instances_with_the_features_are_chosen_and_a_feature_that_none_has_is_named():
    router = router_of("plain")
    router.add_instance(ready("able", features=("logprobs",)))
    assert router.dispatch(10, {"logprobs"}).instance_id == "able"
    with pytest.raises(UnsupportedError, match="logit_bias"):
        router.dispatch(10, {"logprobs", "logit_bias"})


def test_without_any_instance_nothing_is_called_unsupported():
    with pytest.raises(NoInstanceError):
        Router().dispatch(10, {"logprobs"})


def test_the_shortest_queue_counts_requests_of_all_ingresses_and_what_no_report_has_yet():
    router = router_of("a", "b", routing="shortest_queue")
    router.update("a", 0, report(running=2, waiting=1))
    router.update("b", 0, report(queued_work_s=60.0, running=1))
    assert [router.dispatch(1000).instance_id for _ in range(2)] == ["b", "b"]
    last = router.dispatch(1000)  # 3 and 3: the one that got its last request first
    assert last.instance_id == "a"
    assert router.instances["a"].requests == 4
    last.release()
    assert router.instances["a"].requests == 3


def test_round_robin_takes_turns_whatever_the_work_but_not_with_one_that_may_not_be_chosen():
    router = router_of("a", "b", "c", routing="round_robin")
    router.update("a", 0, report(queued_work_s=60.0, waiting=9))
    assert [router.dispatch(1000).instance_id for _ in range(6)] == ["a", "b", "c"] * 2
    router.update("b", 0, report(draining=True))
    assert [router.dispatch(1000).instance_id for _ in range(4)] == ["a", "c"] * 2


def test_the_same_names_everywhere():
    literal = get_args(IngressConfig.model_fields["routing"].annotation)
    assert list(literal) == list(ROUTING) == list(ROUTERS)
    with pytest.raises(ValueError, match="choose one of queued_work, shortest_queue, round_robin"):
        Router(routing="random")
