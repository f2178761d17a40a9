"""A request inside an instance: its one state machine, and what is known and what is scheduled of its output."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from conflux_ray.planning.interface import PendingPrefill
from conflux_ray.wire import FinishReason, Sampling, Slo


class RequestState(Enum):
    """Where a request stands. `TRANSITIONS` lists every permitted change."""

    WAITING = auto()  # no blocks held: new, or preempted
    PREFILLING = auto()  # holds prefill blocks on every rank
    DECODING = auto()  # its completing chunk is scheduled: resident on one rank (or ends with its first token)
    PAUSED = auto()  # resident and out of the next plan: it is preempted when its last token is known
    FINISHED = auto()  # ended, aborted or failed; its blocks may still drain


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILLING, RequestState.FINISHED}),
    RequestState.PREFILLING: frozenset({RequestState.DECODING, RequestState.FINISHED}),
    RequestState.DECODING: frozenset({RequestState.PAUSED, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.PAUSED: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One generation request.

    `output` holds the tokens that are known; `scheduled_output` counts those that issued plans will have sampled, so
    `scheduled_output - len(output)` tokens are in flight.
    """

    request_id: str
    attempt: int
    prompt: list[int]
    sampling: Sampling
    slo: Slo
    arrival: float  # seconds on the instance's clock
    output: list[int] = field(default_factory=list)
    priority: int = 0
    seed: int = 0
    state: RequestState = RequestState.WAITING
    alloc_id: int = -1
    prefill_tokens: int = 0  # tokens this admission prefills: prompt and output known at admission
    computed_tokens: int = 0  # of them scheduled
    scheduled_output: int = 0
    rank: int = -1
    num_preemptions: int = 0
    first_scheduled: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    described: PendingPrefill | None = None  # what the policy saw last; None once it no longer holds

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"{self.request_id}: prompt is empty")
        self.scheduled_output = len(self.output)
        self.prefill_tokens = len(self.prompt) + len(self.output)

    def to(self, state: RequestState) -> None:
        """Change state; raises ValueError for a change that `TRANSITIONS` does not list."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self.request_id}: {self.state.name} -> {state.name} is not permitted")
        self.state = state

    @property
    def token_ids(self) -> list[int]:
        """Prompt and known output."""
        return self.prompt + self.output

    @property
    def scheduled_tokens(self) -> int:
        """Prompt and output, tokens in flight included."""
        return len(self.prompt) + self.scheduled_output

    @property
    def in_flight(self) -> int:
        """Output tokens that issued plans sample and whose values are not known yet."""
        return self.scheduled_output - len(self.output)

    @property
    def deadline(self) -> float:
        """When the next token is due: arrival + TTFT + (tokens so far) * TBT (paper, section 8.1)."""
        return self.arrival + self.slo.ttft_s + len(self.output) * self.slo.tbt_s

    def max_output(self, max_model_len: int) -> int:
        """Most output tokens it may have: max_tokens, and max_model_len for prompt and output together."""
        return min(self.sampling.max_tokens, max_model_len - len(self.prompt))

    def preempt(self) -> None:
        """Back to WAITING: what it has so far is prefilled again."""
        assert self.in_flight == 0, "a request is preempted only when its last token is known"
        self.to(RequestState.WAITING)
        self.alloc_id = self.rank = -1
        self.prefill_tokens = len(self.prompt) + len(self.output)
        self.computed_tokens = 0
        self.described = None
        self.num_preemptions += 1

    def accept(self, token: int, max_model_len: int) -> bool:
        """Add a sampled token; returns whether the request ends with it, and sets the reason.

        Same order as vLLM: a stop token ends it (unless fewer than min_tokens came), then the length.
        """
        self.output.append(token)
        sampling = self.sampling
        if len(self.output) >= sampling.min_tokens:
            if not sampling.ignore_eos and token == sampling.eos_token_id:
                self.finish_reason = FinishReason.STOP
                return True
            if token in sampling.stop_token_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP, token
                return True
        if len(self.output) >= self.max_output(max_model_len):
            self.finish_reason = FinishReason.LENGTH
            return True
        return False
