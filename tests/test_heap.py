"""What start-up made is out of the garbage collector's sight; what comes later is not."""

from __future__ import annotations

import gc
import weakref

from conflux_ray.heap import freeze


class Node:
    """One end of a cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_only_what_is_there_is_frozen() -> None:
    before, kept = weakref.ref(Node()), Node()
    try:
        freeze()
        assert before() is None  # garbage is not kept for ever
        assert gc.get_freeze_count() > 0
        assert not any(found is kept for found in gc.get_objects())
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
