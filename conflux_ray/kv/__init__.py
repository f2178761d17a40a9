"""KV blocks of one instance: pools, the two views of one pool, transitions (design, section 5). Pure Python."""

from conflux_ray.kv.geometry import NULL_BLOCK, KVGeometry
from conflux_ray.kv.manager import KVManager, KVSnapshot, RankUsage, Retain
from conflux_ray.kv.pool import BlockOwnershipError, BlockPool, OutOfBlocksError
from conflux_ray.kv.state import TRANSITIONS, AllocationState, IllegalTransitionError

__all__ = [
    "NULL_BLOCK",
    "TRANSITIONS",
    "AllocationState",
    "BlockOwnershipError",
    "BlockPool",
    "IllegalTransitionError",
    "KVGeometry",
    "KVManager",
    "KVSnapshot",
    "OutOfBlocksError",
    "RankUsage",
    "Retain",
]
