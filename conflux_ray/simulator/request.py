"""A simulated request: its lengths, its promises, its state and the times of its tokens.

| From         | To           | When                                                              |
|--------------|--------------|-------------------------------------------------------------------|
| WAITING      | PREFILLING   | its first chunk is scheduled                                      |
| WAITING      | REJECTED     | it could never fit into the KV memory                             |
| PREFILLING   | DECODING     | its first output token is there, and its KV where it decodes      |
| PREFILLING   | TRANSFERRING | its first output token is there, its KV has yet to move           |
| PREFILLING   | FINISHED     | it asked for one token                                            |
| PREFILLING   | WAITING      | preempted                                                         |
| TRANSFERRING | DECODING     | its KV has arrived                                                |
| DECODING     | FINISHED     | its last token is there                                           |
| DECODING     | WAITING      | preempted: prompt and tokens so far are computed again            |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    REJECTED = "rejected"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILLING, Phase.REJECTED}),
    Phase.PREFILLING: frozenset({Phase.DECODING, Phase.TRANSFERRING, Phase.FINISHED, Phase.WAITING}),
    Phase.TRANSFERRING: frozenset({Phase.DECODING}),
    Phase.DECODING: frozenset({Phase.FINISHED, Phase.WAITING}),
    Phase.FINISHED: frozenset(),
    Phase.REJECTED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Slo:
    """The two promises (paper, section 8.1): token i is due at arrival + ttft + (i - 1) * tbt.

    Args:
        ttft: seconds.
        tbt: seconds.
    """

    ttft: float = 2.0
    tbt: float = 0.1

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tbt > 0):
            raise ValueError(f"ttft={self.ttft} and tbt={self.tbt} must be positive, seconds")

    def deadline(self, arrival: float, token: int) -> float:
        """When output token `token`, counted from 1, is due."""
        return arrival + self.ttft + (token - 1) * self.tbt


@dataclass(slots=True, eq=False)
class Request:
    """One request in one simulation.

    Args:
        index: position in the trace; names the request.
        arrival: seconds.
        prompt_tokens: at least 1.
        output_tokens: at least 1.
        slo: its promises.
        hash_ids: identities of its prompt's 512-token blocks, for prefix caching; empty if unknown.
    """

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    hash_ids: tuple[int, ...] = ()
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0  # of `total_tokens`, in the present admission
    cached_tokens: int = 0  # of them, found in the prefix cache
    times: list[float] = field(default_factory=list)  # of each output token, seconds
    preemptions: int = 0
    transferred_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"request {self.index}: prompt_tokens={self.prompt_tokens} and output_tokens={self.output_tokens} "
                f"must be at least 1"
            )

    @property
    def name(self) -> str:
        """The request id in the planner."""
        return f"{self.index:08d}"

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.times)

    @property
    def left(self) -> int:
        """Output tokens still to come."""
        return self.output_tokens - len(self.times)

    @property
    def total_tokens(self) -> int:
        """Tokens to compute before the next output token: the prompt, and after a preemption the output so far."""
        return self.prompt_tokens + len(self.times)

    @property
    def remaining(self) -> int:
        """m_i: prompt tokens still to compute."""
        return self.total_tokens - self.computed_tokens

    @property
    def next_deadline(self) -> float:
        """When its next output token is due, seconds."""
        return self.slo.deadline(self.arrival, len(self.times) + 1)

    def to(self, phase: Phase) -> None:
        """Change state.

        Raises:
            RuntimeError: the table above has no such change.
        """
        if phase not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"request {self.index}: {self.phase.name} -> {phase.name} is not permitted")
        self.phase = phase

    def emit(self, times: Sequence[float]) -> None:
        """Output tokens at `times`, seconds, in order.

        Raises:
            RuntimeError: these are more tokens than were asked for.
        """
        if len(times) > self.left:
            raise RuntimeError(
                f"request {self.index}: {len(times)} tokens are more than the {self.left} still asked for"
            )
        self.times.extend(times)

    def preempt(self) -> None:
        """Give up the KV: prompt and output so far are computed again."""
        self.to(Phase.WAITING)
        self.computed_tokens = self.cached_tokens = 0
        self.preemptions += 1
