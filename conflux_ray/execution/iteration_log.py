"""A file with a line for every iteration: its plan, its prediction, what came of it (`conflux bench timeline`)."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from conflux_ray.execution.engine import Engine
from conflux_ray.execution.plan import IterationPlan, WorkerResult

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 1.0


class IterationLog:
    """Writes one JSON object a line, in order of iteration; times are seconds since the epoch, durations seconds.

    `planned`, `planning`: when the plan was made, and how long that took. `predicted`: by the latency model with its
    online correction, null without one. `collected`: when the results had come. `elapsed`: on the device of each
    worker. `decodes`: of each rank; `context`: their tokens. `chunks`: first token, end, and tokens of each rank;
    `allocations`: of the chunks, one number a request while it prefills. `overlap`, `decode_sms`: how attention ran.
    `transfers`: begun; `incoming`: tokens whose KV they bring to each rank from the others, as the latency model counts
    them. `pending`: requests with prompt tokens left after it; `resident`: decodes.

    A file that can no longer be written ends the log, not the serving.

    Args:
        path: of the file; lines go to its end.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._file: TextIO | None = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  open for the instance's life
        self._path = path
        self._open: deque[dict[str, Any]] = deque()
        self._flushed = time.monotonic()

    def issued(self, engine: Engine, plan: IterationPlan, planning: float) -> None:
        """The engine has made a plan, in `planning` seconds."""
        chunks = []
        for chunk in plan.chunks:
            tokens = [0] * engine.num_ranks
            for shard in chunk.shards:
                tokens[shard.rank] += shard.end - shard.start
            chunks.append([chunk.start, chunk.end, tokens])
        self._open.append(
            {
                "iteration": plan.iteration,
                "planned": time.time(),
                "planning": round(planning, 6),
                "predicted": engine.last_decision.predicted or None,
                "decodes": [len(steps) for steps in plan.decodes],
                "context": [sum(d.position + 1 for d in steps) for steps in plan.decodes],
                "chunks": chunks,
                "allocations": [chunk.alloc_id for chunk in plan.chunks],
                "overlap": plan.overlap,
                "decode_sms": plan.decode_sms,
                "transfers": len(plan.transfers),
                "incoming": _incoming(plan, engine.num_ranks),
                "pending": sum(1 for _ in engine.pending),
                "resident": sum(engine.residents.tokens),
            }
        )

    def collected(self, results: Sequence[WorkerResult]) -> None:
        """The results of the oldest iteration have come, in order of worker."""
        line = self._open.popleft()
        line["collected"] = time.time()
        line["elapsed"] = [round(result.elapsed, 6) for result in results]
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            if (now := time.monotonic()) - self._flushed > _FLUSH_SECONDS:
                self._file.flush()
                self._flushed = now
        except OSError as error:
            logger.error("no more lines in the iteration log %s: %s", self._path, error)
            self._file = None

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                logger.error("the last lines of the iteration log %s are lost: %s", self._path, error)


def _incoming(plan: IterationPlan, num_ranks: int) -> list[float]:
    """Tokens whose KV arrives at each rank: a rank has its share of the heads of every token already."""
    tokens = [0.0] * num_ranks
    for transfer in plan.transfers:
        tokens[transfer.target] += (transfer.end - transfer.start) * (num_ranks - 1) / num_ranks
    return tokens
