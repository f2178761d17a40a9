"""Goodput, where it can be counted: at the ingress, which knows when a request came and when each token left.

Goodput cannot be had from separate TTFT and TBT histograms. Token i of a request (from 1) is due at arrival + TTFT +
(i - 1) x TBT, all on one monotonic clock of this process; arrival is when the HTTP request reached the ingress. A token
counts as handed over when the front end takes it to detokenize and send it. A request is compliant when every token of
all its choices was on time, whether it streams or not.

`RequestRecord` is one HTTP request, `ChoiceRecord` one choice of it (`n`), each a request of its own for the engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conflux_ray.metrics import definitions as m
from conflux_ray.metrics.store import Distribution, Store, Value
from conflux_ray.wire import FinishReason, Slo

if TYPE_CHECKING:
    from conflux_ray.serving.dispatcher import Dispatcher

GENERATING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""A request to one of these counts even if it is refused before any engine sees it."""

_FINISHED_AS = {
    FinishReason.REJECTED: "unavailable",
    FinishReason.OVERLOADED: "overloaded",
    FinishReason.ERROR: "failed",
}
_ANSWERED_AS = {429: "overloaded", 503: "unavailable"}

SHORT_ID = 12
"""Characters of an instance's id that its label has."""


@dataclass(slots=True, eq=False)
class _ClassMeter:
    """The series of one SLO class."""

    outcomes: dict[str, Value]
    misses: dict[str, Value]
    goodput: Value
    ttft: Distribution
    tbt: Distribution
    e2e: Distribution
    prompt_tokens: Value
    output_tokens: Value


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request. `status` and `left` are the middleware's to set."""

    path: str
    arrival: float  # seconds, monotonic
    slo: Slo
    status: int | None = None  # of the answer, once it has begun
    left: bool = False  # the client did not wait for the end
    choices: list[ChoiceRecord] = field(default_factory=list)


class ChoiceRecord:
    """The tokens of one choice against their deadlines.

    Args:
        arrival: of the HTTP request, monotonic seconds.
        slo: what was promised.
        meter: of its class.
    """

    __slots__ = ("_last", "_meter", "done", "ended_as", "first_due", "miss", "tbt", "tokens")

    def __init__(self, arrival: float, slo: Slo, meter: _ClassMeter) -> None:
        self._meter = meter
        self._last = arrival
        self.first_due = arrival + slo.ttft_s
        self.tbt = slo.tbt_s
        self.tokens = 0
        self.done = False
        self.miss: str | None = None  # of `definitions.MISSES`, the first one
        self.ended_as: str | None = None  # of `definitions.OUTCOMES`, if it did not end well

    @property
    def due(self) -> float:
        """When the next token is due."""
        return self.first_due + self.tokens * self.tbt

    def took(self, count: int, now: float) -> None:
        """Count `count` tokens handed over at `now`; they arrived together, so the first of them is the latest."""
        meter, first = self._meter, self.tokens == 0
        if self.miss is None and now > self.due:
            self.miss = "ttft" if first else "tbt"
        (meter.ttft if first else meter.tbt).observe(now - self._last)
        for _ in range(count - 1):
            meter.tbt.observe(0.0)
        meter.output_tokens.value += count
        self.tokens += count
        self._last = now

    def ended(self, reason: FinishReason) -> None:
        """No token follows, for this reason."""
        self.done = True
        self.ended_as = _FINISHED_AS.get(reason)


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)
"""The record of the HTTP request that the current task serves."""


class IngressMetrics:
    """Counts what one ingress replica does.

    Args:
        model: served model's name.
        replica: name of this process, unique in the cluster.
        slo_classes: the deployment's promises.
        objective: share of requests that should meet them.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: str,
        replica: str,
        slo_classes: Mapping[str, Slo],
        objective: float = 0.99,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        ttfts = {slo.ttft_s for slo in slo_classes.values()}
        tbts = {slo.tbt_s for slo in slo_classes.values()}
        self.store = store = Store({"model": model, "replica": replica}, {m.TTFT: ttfts, m.TBT: tbts, m.E2E: ttfts})
        names = sorted(slo_classes)
        for metric in m.all_metrics():
            if metric.where == "ingress" and metric.kind is not m.Kind.GAUGE:
                store.start(metric, slo_class=names)
        self._meters = {name: self._meter(name) for name in names}
        self._slo_classes = slo_classes
        for name, slo in slo_classes.items():
            store.value(m.SLO_TARGET, name, "ttft").value = slo.ttft_s
            store.value(m.SLO_TARGET, name, "tbt").value = slo.tbt_s
            store.value(m.SLO_OBJECTIVE, name).value = objective
        self._in_flight = store.value(m.INGRESS_IN_FLIGHT)
        self._waiting = store.value(m.INGRESS_WAITING)

    def _meter(self, name: str) -> _ClassMeter:
        store = self.store
        return _ClassMeter(
            outcomes={outcome: store.value(m.REQUESTS, name, outcome) for outcome in m.OUTCOMES},
            misses={miss: store.value(m.SLO_MISSES, name, miss) for miss in m.MISSES},
            goodput=store.value(m.GOODPUT, name),
            ttft=store.distribution(m.TTFT, name),
            tbt=store.distribution(m.TBT, name),
            e2e=store.distribution(m.E2E, name),
            prompt_tokens=store.value(m.PROMPT_TOKENS, name),
            output_tokens=store.value(m.OUTPUT_TOKENS, name),
        )

    # Requests

    def arrived(self, path: str, slo: Slo | None = None) -> RequestRecord:
        """An HTTP request that may generate has come.

        Args:
            path: of its URL.
            slo: what its headers promise; the body may say otherwise later.
        """
        return RequestRecord(path, self.clock(), slo or self._slo_classes["default"])

    def submitted(self, record: RequestRecord, slo: Slo, prompt_tokens: int) -> ChoiceRecord:
        """A choice of `record` goes to the engines under this promise."""
        meter = self._meters[slo.slo_class]
        meter.prompt_tokens.value += prompt_tokens
        record.slo = slo
        choice = ChoiceRecord(record.arrival, slo, meter)
        record.choices.append(choice)
        return choice

    def ended(self, record: RequestRecord) -> None:
        """The HTTP request is over: count how, and whether every token met its deadline."""
        if not record.choices and record.path not in GENERATING_PATHS:
            return
        meter, now = self._meters[record.slo.slo_class], self.clock()
        outcome = self._outcome(record)
        meter.outcomes[outcome].value += 1
        if outcome == "invalid":
            return  # nothing was promised
        miss = next((choice.miss for choice in record.choices if choice.miss is not None), None)
        if outcome == "completed":
            meter.e2e.observe(now - record.arrival)
        elif outcome == "aborted":
            if miss is None and not self._late(record, now):
                return  # on time until the client left: neither kept nor broken
            miss = miss or ("tbt" if any(choice.tokens for choice in record.choices) else "ttft")
        else:
            miss = miss or outcome
        if miss is None:
            meter.goodput.value += 1
        else:
            meter.misses[miss].value += 1

    @staticmethod
    def _outcome(record: RequestRecord) -> str:
        if record.left:
            return "aborted"
        status = record.status
        if status in _ANSWERED_AS:
            return _ANSWERED_AS[status]
        if status is None or status >= 500:
            return "failed"
        if status >= 400:
            return "invalid"
        # A stream's status is sent before its end is known.
        return next((choice.ended_as for choice in record.choices if choice.ended_as is not None), "completed")

    @staticmethod
    def _late(record: RequestRecord, now: float) -> bool:
        if not record.choices:
            return now > record.arrival + record.slo.ttft_s
        return any(now > choice.due for choice in record.choices if not choice.done)

    # Router

    def sample(self, dispatcher: Dispatcher, in_flight: int, waiting: int) -> None:
        """Take over the dispatcher's counters and the instances' loads; in the dispatcher's event loop.

        Args:
            dispatcher: of this ingress.
            in_flight: HTTP requests that have not ended.
            waiting: of them, those that wait for the first instance.
        """
        store, counters, now = self.store, dispatcher.counters, time.monotonic()
        self._in_flight.value = in_flight
        self._waiting.value = waiting + dispatcher.num_waiting
        loads = {id_[:SHORT_ID]: load for id_, load in dispatcher.router.instances.items()}
        store.value(m.ROUTER_READY).value = sum(load.open_to_new for load in loads.values())
        store.value(m.ROUTER_DRAINING).value = sum(load.draining or load.closing for load in loads.values())
        store.replace(m.ROUTER_QUEUED_WORK, {(id_,): load.queued_work(now) for id_, load in loads.items()})
        store.replace(m.ROUTER_REQUESTS, {(id_,): load.in_flight for id_, load in loads.items()})
        store.replace(m.ROUTER_REPORT_AGE, {(id_,): now - load.reported_at for id_, load in loads.items()})
        store.value(m.ROUTER_DISPATCHES).value = counters.dispatches
        store.value(m.ROUTER_SESSIONS_OPENED).value = counters.sessions_opened
        store.value(m.ROUTER_SESSIONS_ENDED).value = counters.sessions_ended
        store.value(m.STALE_OUTPUTS).value = counters.stale_outputs
        for reason, count in counters.migrated.items():
            store.value(m.MIGRATED, reason).value = count
