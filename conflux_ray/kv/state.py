"""The life of one KV allocation (design, section 5).

| From       | To         | When                                                                                      |
|------------|------------|-------------------------------------------------------------------------------------------|
| PREFILLING | TRANSITION | a decode rank is chosen and its blocks are reserved (`place`), early or for the last chunk |
| PREFILLING | DRAINING   | the request ended with its first token, or was aborted (`release`)                        |
| TRANSITION | DECODING   | all tokens are transferred, acknowledged by all workers, and the last carrier is retired  |
| TRANSITION | DRAINING   | finished, preempted or aborted (`release`)                                                |
| DECODING   | DRAINING   | finished, preempted or aborted (`release`)                                                |
| DRAINING   | FREED      | nothing in flight may touch its blocks any more; they are back in the pools               |

A request that resumes after a preemption does so under a new allocation; the old one drains independently.
"""

from __future__ import annotations

from enum import Enum


class AllocationState(Enum):
    """Where an allocation is, and with that which blocks it holds."""

    PREFILLING = "prefilling"
    """Holds prefill blocks on every rank, none in the decode view."""
    TRANSITION = "transition"
    """Holds both. Its first decodes may already run: they wait for the arrival of each layer on the device."""
    DECODING = "decoding"
    """Holds decode blocks on one rank; its prefill blocks are released."""
    DRAINING = "draining"
    """Released, but in-flight iterations or transfers may still touch the blocks it held."""
    FREED = "freed"
    """Holds nothing; the manager has forgotten it."""


TRANSITIONS: dict[AllocationState, frozenset[AllocationState]] = {
    AllocationState.PREFILLING: frozenset({AllocationState.TRANSITION, AllocationState.DRAINING}),
    AllocationState.TRANSITION: frozenset({AllocationState.DECODING, AllocationState.DRAINING}),
    AllocationState.DECODING: frozenset({AllocationState.DRAINING}),
    AllocationState.DRAINING: frozenset({AllocationState.FREED}),
    AllocationState.FREED: frozenset(),
}


class IllegalTransitionError(RuntimeError):
    """The caller asked for something that the allocation's state does not permit."""
