"""Iterations of a serving instance, from its iteration log (`instance.iteration_log`), as rows to fit or judge by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conflux_ray.planning.fitting import IterationRow
from conflux_ray.planning.latency_model import IterationLoad


class LogError(ValueError):
    """A file that is no iteration log, or says too little; the message says where."""


def load_of(line: Mapping[str, Any]) -> IterationLoad | None:
    """What an iteration computed; None where the log does not say the decodes' context, or how much KV arrived.

    Args:
        line: of an iteration log, see `IterationLog`.
    """
    if "context" not in line or (line["transfers"] and "incoming" not in line):
        return None
    chunks = line["chunks"]
    return IterationLoad(
        tuple(line["decodes"]),
        tuple(line["context"]),
        tuple(sum(tokens) for tokens in zip(*(ranks for *_, ranks in chunks), strict=True)),
        tuple((end - start, start) for start, end, _ in chunks),
        tuple(line["incoming"]) if line["transfers"] else (),
    )


def served_rows(path: Path, num_ranks: int) -> list[IterationRow]:
    """The iterations of a log that ran a forward pass, in order, each with the slowest worker's time.

    Those of which the log does not say how much KV arrived are left out, and a last line that is cut short.

    Args:
        path: of the log.
        num_ranks: N of the profile that they are for.

    Raises:
        LogError: it is no iteration log, has no iteration, is of another number of ranks, or does not say the decodes'
            context.
        OSError: it cannot be read.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    rows, silent = [], ""
    for number, text in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
            load, seconds, ranks = load_of(line), max(line["elapsed"]), len(line["decodes"])
            sms = line["decode_sms"] if line["overlap"] else None
            if load is not None and any(load.loads) and seconds > 0:
                rows.append(IterationRow(load, seconds, bool(line["overlap"]), sms))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # the instance was ended while it wrote
            raise LogError(f"{where}: not an iteration ({error!r})") from None
        if ranks != num_ranks:
            raise LogError(f"{path} is of {ranks} ranks, the profile of {num_ranks}")
        if "context" not in line:
            silent = f"{where}: does not say the decodes' context; an older instance wrote it"
    if silent:
        raise LogError(silent)
    if not rows:
        raise LogError(f"{path}: no iteration in it; has the server served anything?")
    return rows
