"""What every system is built from, and what every simulated instance can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from conflux_ray.planning.latency_model import LatencyModel, chunk_work
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.hardware import Hardware
from conflux_ray.simulator.request import Phase, Request

BLOCK_SIZE = 16
"""Tokens of a KV block, vLLM's default."""
HASH_BLOCK = 512
"""Prompt tokens that one hash id of a trace stands for."""
PROBE_TOKENS = 4096
"""Prompt whose prefill rate is an instance's capacity for the router."""


class PrefixCache:
    """The prompt blocks that an instance remembers, least recently used out first.

    Args:
        capacity: tokens.
    """

    def __init__(self, capacity: int) -> None:
        self._blocks = capacity // HASH_BLOCK
        self._kept: OrderedDict[int, None] = OrderedDict()

    def match(self, hash_ids: Sequence[int]) -> int:
        """Tokens of the longest prefix that is remembered."""
        found = 0
        for block in hash_ids:
            if block not in self._kept:
                break
            self._kept.move_to_end(block)
            found += 1
        return found * HASH_BLOCK

    def remember(self, hash_ids: Sequence[int]) -> None:
        """Keep the blocks of a prompt that has been computed."""
        for block in reversed(hash_ids):  # the end of a prompt is forgotten before its beginning
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._blocks:
            self._kept.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One instance's hardware and what all systems have in common.

    Args:
        hardware: times and memory.
        gpus: of one instance.
        prefix_cache: share of the KV memory that is set aside for remembered prompts, 0..1; 0 switches it off.

    Raises:
        ValueError: a value is out of range.
    """

    hardware: Hardware
    gpus: int
    prefix_cache: float = 0.0

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1")
        if not 0 <= self.prefix_cache < 1:
            raise ValueError(f"prefix_cache={self.prefix_cache} must be in [0, 1)")

    def kv_blocks(self, base_tp: int) -> int:
        """KV blocks that running requests can use on one logical rank of `base_tp` GPUs."""
        return int(self.hardware.kv_tokens(base_tp) * (1 - self.prefix_cache)) // BLOCK_SIZE

    def new_cache(self, base_tp: int, num_ranks: int = 1) -> PrefixCache | None:
        """The prefix cache of `num_ranks` ranks together."""
        if not self.prefix_cache:
            return None
        return PrefixCache(int(self.hardware.kv_tokens(base_tp) * self.prefix_cache) * num_ranks)


class Instance(ABC):
    """A unit that the global router sends requests to.

    Args:
        clock: of the simulation.
        cache: its prefix cache.
    """

    def __init__(self, clock: Clock, cache: PrefixCache | None = None) -> None:
        self.clock = clock
        self.cache = cache
        self.iterations = 0
        self.capacity = 1.0  # prompt tokens per second; subclasses set it

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Take a request, now."""

    @abstractmethod
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute, of all requests that it holds."""

    @abstractmethod
    def kv_in_use(self) -> int:
        """KV blocks that requests hold."""

    def queued_work(self) -> float:
        """Seconds of prefill ahead of a new request (section 5.1: queued work relative to capacity)."""
        return self.queued_tokens() / self.capacity

    def begin(self, request: Request) -> None:
        """A prefill of `request` starts: what the cache knows of its prompt need not be computed."""
        request.to(Phase.PREFILLING)
        request.cached_tokens = self.cached(request)
        request.computed_tokens = request.cached_tokens

    def cached(self, request: Request) -> int:
        """Tokens of the request that the cache holds; at least one token is always computed."""
        if self.cache is None:
            return 0
        return min(self.cache.match(request.hash_ids), request.total_tokens - 1)

    def prefilled(self, request: Request, now: float) -> None:
        """The prefill of `request` ended at `now` with its next output token."""
        request.computed_tokens = request.total_tokens
        if self.cache is not None:
            self.cache.remember(request.hash_ids)
        request.emit([now])
        if not request.left:
            request.to(Phase.FINISHED)


def prefill_rate(model: LatencyModel) -> float:
    """Prompt tokens per second of an instance without decodes."""
    none = (0,) * model.num_ranks
    shard = PROBE_TOKENS // model.num_ranks
    return PROBE_TOKENS / model.given(none, none).seconds(shard, shard, chunk_work(PROBE_TOKENS, 0))
