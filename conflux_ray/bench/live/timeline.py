"""What an instance's iterations did with their time: its iteration log (`instance.iteration_log`) as figures.

An iteration ended on a worker's device when its results were collected, or before, when the next one began there: then
it was reported late. It began `elapsed` of that worker before its end. Workers drift apart by what their ranks differ
in, so each is followed by itself: the slowest one's time of every iteration, added up, is longer than any clock's. What
lies between the last end of one and the first beginning of the next, when no device ran, is a gap. Where it comes from:

    nothing to do   until the plan was made no request was there
    instance late   there was work, and the plan was made only after the iteration before had ended
    workers late    from the plan, or from the end of the iteration before if that came later, until the workers began

With the points of `bench serve` or `bench compare`, whose times the log's clock shares, also which requests broke a
promise, and what they waited for. The log does not name requests: one is found by its prompt's chunks, which belong to
one allocation, begin after its arrival and complete its prompt when its first token comes. Logs without allocations:
chunks begin at 0 and continue where the last one ended.

Units: seconds, tokens.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from conflux_ray.bench.live.point import Point
from conflux_ray.bench.live.score import Record
from conflux_ray.bench.live.tables import markdown
from conflux_ray.planning.latency_model import IterationLoad, LatencyModel
from conflux_ray.profiling.served import LogError, load_of
from conflux_ray.simulator.metrics import ROUNDING
from conflux_ray.simulator.request import Slo

WINDOW = 30.0
"""Seconds of the window whose busy share is shown beside that of the whole log."""
KINDS = ("decode only", "mixed", "prefill only")
CAUSES = ("nothing to do", "instance late", "workers late")
LEAST_GAP = 1e-5
"""Seconds; the log has microseconds, and less is none."""
GAP_EDGES = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0, float("inf"))
"""Of the histogram of gaps, seconds."""
CLOCKS = 0.005
"""Seconds that the client's clock and the log's may be apart."""
MATCH_SECONDS = 1.0
"""Most time between the end of a prompt's last chunk and its first token at the client."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One line of the log.

    Args:
        number: of the iteration.
        planned: when its plan was ready, seconds since the epoch.
        planning: seconds that planning took.
        predicted: seconds; None without a latency model.
        collected: when its results had come, seconds since the epoch.
        workers: time on each worker's device, seconds.
        decodes: of all ranks.
        chunks: (first token, end, tokens of each rank).
        pending: requests with prompt tokens left after it.
        load: for a latency model; None where the log says too little.
        overlap: whether the attention paths ran beside each other.
        decode_sms: the partition if they did.
        allocations: of the chunks; none: the log does not say them.
        ends: on each worker's device, seconds since the epoch; none: when the results had come.
    """

    number: int
    planned: float
    planning: float
    predicted: float | None
    collected: float
    workers: tuple[float, ...]
    decodes: int
    chunks: tuple[tuple[int, int, tuple[int, ...]], ...]
    pending: int
    load: IterationLoad | None = None
    overlap: bool = True
    decode_sms: int | None = None
    allocations: tuple[int, ...] = ()
    ends: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Iteration:
        return cls(
            values["iteration"],
            values["planned"],
            values["planning"],
            values["predicted"],
            values["collected"],
            tuple(float(seconds) for seconds in values["elapsed"]),
            sum(values["decodes"]),
            tuple((start, end, tuple(ranks)) for start, end, ranks in values["chunks"]),
            values["pending"],
            load_of(values),
            values["overlap"],
            values["decode_sms"] if values["overlap"] else None,
            tuple(values.get("allocations", ())),
        )

    @property
    def elapsed(self) -> float:
        """On the slowest worker's device, seconds."""
        return max(self.workers)

    @property
    def ended(self) -> tuple[float, ...]:
        """On each worker's device, seconds since the epoch."""
        return self.ends or (self.collected,) * len(self.workers)

    @property
    def begins(self) -> tuple[float, ...]:
        """On each worker's device, seconds since the epoch."""
        return tuple(end - elapsed for end, elapsed in zip(self.ended, self.workers, strict=True))

    @property
    def end(self) -> float:
        """On the last worker's device, seconds since the epoch."""
        return max(self.ended)

    @property
    def began(self) -> float:
        """On the first worker's device, seconds since the epoch."""
        return min(self.begins)

    @property
    def prefill(self) -> int:
        """Prompt tokens."""
        return sum(end - start for start, end, _ in self.chunks)

    @property
    def kind(self) -> str:
        """One of `KINDS`; an iteration that only waits for transfers counts as decode only."""
        if not self.chunks:
            return KINDS[0]
        return KINDS[1] if self.decodes else KINDS[2]


def against(iterations: Sequence[Iteration], model: LatencyModel) -> dict[str, dict[str, float]]:
    """Measured over predicted by a latency model alone, without online correction: percentiles by kind.

    Iterations of which the log does not say how much KV arrived are passed over.

    Raises:
        LogError: the log does not say the decodes' context of any, or is of another number of ranks.
    """
    settings = {contention.decode_sms for contention in model.contention}
    found: dict[str, list[float]] = {}
    for iteration in iterations:
        load = iteration.load
        if load is None:
            continue
        if len(load.decode_tokens) != model.num_ranks:
            raise LogError(f"the log is of {len(load.decode_tokens)} ranks, {model.name} of {model.num_ranks}")
        known = iteration.decode_sms in settings
        how: dict[str, Any] = {}  # a way that the model does not know: the fastest of those it does
        if known or not iteration.overlap:
            how = {"overlap": iteration.overlap, "decode_sms": iteration.decode_sms}
        found.setdefault(iteration.kind, []).append(iteration.elapsed / model.predict(load, **how).seconds)
    if not found:
        raise LogError("the log does not say the decodes' context; it cannot be held against a profile")
    return {kind: _percentiles(ratios, 5, 50, 95) for kind, ratios in found.items()}


def read(path: Path) -> list[Iteration]:
    """The iterations of a log, in order; a last line that is cut short is left out.

    Raises:
        LogError: it is none, or has no iteration.
        OSError: it cannot be read.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    iterations = []
    for number, line in enumerate(lines, 1):
        try:
            iterations.append(Iteration.from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # the instance was ended while it wrote
            raise LogError(f"{path}, line {number}: not an iteration ({error!r})") from None
    if not iterations:
        raise LogError(f"{path}: no iteration in it; has the server served anything?")
    return on_device(iterations)


def on_device(iterations: Sequence[Iteration]) -> list[Iteration]:
    """Iterations with their ends: each had ended on a device when the next one began there."""
    found = list(iterations)
    for k in range(len(found) - 2, -1, -1):
        if min(found[k + 1].begins) < found[k].collected:
            ends = tuple(min(found[k].collected, began) for began in found[k + 1].begins)
            found[k] = replace(found[k], ends=ends)
    return found


@dataclass(frozen=True, slots=True)
class Gap:
    """No device ran between two iterations.

    Args:
        at: when it began, seconds since the epoch.
        parts: seconds by cause, in the order of `CAUSES`.
    """

    at: float
    parts: tuple[float, float, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts)

    @property
    def cause(self) -> str:
        """Of its longest part."""
        return CAUSES[int(np.argmax(self.parts))]


def gap_between(before: Iteration, after: Iteration) -> Gap:
    """What lies between two iterations that follow each other; 0 seconds where some device ran all the time."""
    began = max(after.began, before.end)
    planned = min(max(after.planned, before.end), began)
    # A plan of first chunks alone, with nothing left to prefill before, came of an arrival.
    had_work = before.pending > 0 or after.decodes > 0 or any(start > 0 for start, _, _ in after.chunks)
    waited = planned - before.end
    return Gap(before.end, (0.0, waited, began - planned) if had_work else (waited, 0.0, began - planned))


def _percentiles(values: Sequence[float], *percents: int) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in percents} if len(values) else {}


def _busy(iterations: Sequence[Iteration]) -> float:
    """Share of the time from the first beginning to the last end in which a device ran, mean over the workers."""
    span = iterations[-1].end - iterations[0].began
    return sum(sum(i.workers) / len(i.workers) for i in iterations) / span if span > 0 else 1.0


def _window(iterations: Sequence[Iteration], gaps: Sequence[Gap]) -> Sequence[Iteration]:
    """The `WINDOW` seconds with work all the time and the most of it; the longest such stretch if none is as long."""
    stretches: list[tuple[int, int]] = []
    first = 0
    for k, gap in enumerate(gaps):
        if gap.parts[0] > LEAST_GAP:
            stretches.append((first, k + 1))
            first = k + 1
    stretches.append((first, len(iterations)))
    best, most = None, -1.0
    for first, end in stretches:
        waiting = np.cumsum([0.0, *(i.elapsed * (i.pending > 0) for i in iterations[first:end])])
        ends = [i.end for i in iterations[first:end]]
        for k in range(end - first):
            last = int(np.searchsorted(ends, iterations[first + k].began + WINDOW))
            if last >= end - first:
                break
            if waiting[last + 1] - waiting[k] > most:
                most = waiting[last + 1] - waiting[k]
                best = iterations[first + k : first + last + 1]
    if best is not None:
        return best
    first, end = max(stretches, key=lambda s: iterations[s[1] - 1].end - iterations[s[0]].began)
    return iterations[first:end]


def summarize(iterations: Sequence[Iteration], tbt: float) -> dict[str, Any]:
    """The log's figures as a JSON object.

    Args:
        iterations: in order.
        tbt: promised, seconds: what iterations are held against.
    """
    gaps = [gap_between(a, b) for a, b in pairwise(iterations)]
    real = [gap for gap in gaps if gap.seconds > LEAST_GAP]
    window = _window(iterations, gaps)
    kinds = {}
    for kind in KINDS:
        mine = [i for i in iterations if i.kind == kind]
        if not mine:
            continue
        ratios = [i.elapsed / i.predicted for i in mine if i.predicted]
        kinds[kind] = {
            "count": len(mine),
            "seconds": sum(i.elapsed for i in mine),
            "elapsed": _percentiles([i.elapsed for i in mine], 50, 95),
            "measured_over_predicted": _percentiles(ratios, 5, 50, 95),
            "above_tbt": sum(i.elapsed > tbt for i in mine) / len(mine),
            "predicted_above_tbt": sum((i.predicted or 0.0) > tbt for i in mine) / len(mine),
        }
    working = [pair for pair, gap in zip(pairwise(iterations), gaps, strict=True) if gap.parts[0] <= LEAST_GAP]
    # How long before the end of the iteration that ran a plan was ready; negative: after it.
    leads = [a.end - b.planned for a, b in working]
    periods = [b.collected - a.collected for a, b in working]
    chunked = [i for i in iterations if i.chunks]
    return {
        "iterations": len(iterations),
        "seconds": iterations[-1].end - iterations[0].began,
        "tbt": tbt,
        "busy": _busy(iterations),
        "window": {"seconds": window[-1].end - window[0].began, "busy": _busy(window), "iterations": len(window)},
        "gaps": {
            "seconds": {cause: sum(g.parts[k] for g in gaps) for k, cause in enumerate(CAUSES)},
            "length": _percentiles([g.seconds for g in gaps if g.parts[0] <= LEAST_GAP], 50, 95, 99),
            "histogram": [
                {"from": low, "to": high if np.isfinite(high) else None}
                | {cause: sum(low <= g.seconds < high for g in real if g.cause == cause) for cause in CAUSES}
                for low, high in pairwise(GAP_EDGES)
            ],
        },
        "kinds": kinds,
        "periods_above_tbt": sum(p > tbt for p in periods) / len(periods) if periods else 0.0,
        "planning": _percentiles([i.planning for i in iterations], 50, 95, 99),
        "lead": _percentiles(leads, 5, 50, 95),
        "reported_late": _percentiles([i.collected - i.end for i in iterations], 50, 95, 99)
        | {"share_above_5_ms": sum(i.collected - i.end > 0.005 for i in iterations) / len(iterations)},
        "prefill": {
            "tokens_an_iteration": _percentiles([i.prefill for i in chunked], 5, 50, 95),
            "chunk": _percentiles([end - start for i in chunked for start, end, _ in i.chunks], 5, 50, 95),
            "chunks_an_iteration": _percentiles([len(i.chunks) for i in chunked], 50, 95),
        },
    }


@dataclass(frozen=True, slots=True)
class Prompt:
    """The iterations that computed one prompt, by their places in the log."""

    tokens: int
    iterations: tuple[int, ...]


def prompts(iterations: Sequence[Iteration]) -> list[Prompt]:
    """Chains of chunks; of two that could be continued by a chunk, the older one is, where the log does not say which.
    Chains without an end are left out by whoever looks for their length."""
    if any(iteration.allocations for iteration in iterations):
        return _allocated(iterations)
    chains: dict[int, list[list[int]]] = defaultdict(list)  # by the token that comes next
    for place, iteration in enumerate(iterations):
        continued = []
        for start, end, _ in iteration.chunks:
            waiting = chains[start] if start else []
            continued.append((end, [*(waiting.pop(0) if waiting else []), place]))
        for end, chain in continued:  # after all: a chunk continues none of its own iteration
            chains[end].append(chain)
    return [Prompt(end, tuple(chain)) for end, waiting in chains.items() for chain in waiting]


def _allocated(iterations: Sequence[Iteration]) -> list[Prompt]:
    places: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for place, iteration in enumerate(iterations):
        for allocation, (_, end, _) in zip(iteration.allocations, iteration.chunks, strict=True):
            places.setdefault(allocation, []).append(place)
            ends[allocation] = end
    return [Prompt(ends[allocation], tuple(chain)) for allocation, chain in places.items()]


def misses(iterations: Sequence[Iteration], point: Point) -> list[dict[str, Any]]:
    """The counted requests of a point that broke a promise, and why.

    Raises:
        LogError: the point does not know when it began.
    """
    if point.epoch is None:
        raise LogError("these points do not say when they began: measure them again, or leave --points out")
    found = _Finder(iterations, point.epoch)
    return [_miss(r, point.slo, found) for r in point.counted if not r.compliant(point.slo)]


class _Finder:
    """Times of a point's requests in the log.

    Args:
        iterations: of the log.
        epoch: when the point began.
    """

    def __init__(self, iterations: Sequence[Iteration], epoch: float) -> None:
        self.iterations = iterations
        self.ends = np.array([i.collected for i in iterations]) - epoch
        self.begins = np.array([i.began for i in iterations]) - epoch
        self._by_length: dict[int, list[Prompt]] = defaultdict(list)
        for prompt in prompts(iterations):
            self._by_length[prompt.tokens].append(prompt)

    def prompt(self, record: Record) -> Prompt | None:
        """The chunks of a request that got its first token."""
        if not record.times:
            return None
        late = [
            (record.times[0] - self.ends[prompt.iterations[-1]], prompt)
            for prompt in self._by_length[record.prompt_tokens]
            if self.begins[prompt.iterations[0]] >= record.arrival - CLOCKS
        ]
        fitting = [entry for entry in late if -CLOCKS <= entry[0] <= MATCH_SECONDS]
        return min(fitting, key=lambda entry: entry[0])[1] if fitting else None

    def until(self, time: float) -> int:
        """The place of the last iteration that had ended by then; -1 for none."""
        return int(np.searchsorted(self.ends, time + ROUNDING)) - 1


def _miss(record: Record, slo: Slo, found: _Finder) -> dict[str, Any]:
    row: dict[str, Any] = {"request": record.index, "prompt_tokens": record.prompt_tokens, "arrival": record.arrival}
    late = next((i for i, t in enumerate(record.times) if t > slo.deadline(record.arrival, i + 1) + ROUNDING), None)
    if not record.times or late is None:
        return row | {"cause": "wrong answer" if record.times else "no first token", "fault": record.fault}
    row |= {"token": late, "late": record.times[late] - slo.deadline(record.arrival, late + 1)}
    if late == 0:
        return row | _first_token(record, found)
    return row | _later_token(record, late, slo, found)


def _first_token(record: Record, found: _Finder) -> dict[str, Any]:
    prompt = found.prompt(record)
    if prompt is None:
        return {"cause": "first token late, not found in the log"}
    ran = [found.iterations[k] for k in prompt.iterations]
    first, last = prompt.iterations[0], prompt.iterations[-1]
    waited = float(found.ends[first]) - ran[0].elapsed - record.arrival
    spread = float(found.ends[last]) - float(found.ends[first]) + ran[0].elapsed
    return {
        "cause": "first token late: waited for its first chunk" if waited > spread else "first token late: in chunks",
        "waited": waited,
        "spread": spread,
        "chunks": len(ran),
        "between": last - first + 1 - len(ran),  # iterations in between that had none of it
        "delivery": record.times[0] - float(found.ends[last]),
    }


def _later_token(record: Record, late: int, slo: Slo, found: _Finder) -> dict[str, Any]:
    """Token `late`, counted from 0, came too late though the first one did not."""
    first, last = found.until(record.times[0]), found.until(record.times[late])
    ran = found.iterations[first + 1 : last + 1]
    over = [i for i in ran if i.elapsed > slo.tbt]
    unforeseen = sum(i.elapsed - slo.tbt for i in over if (i.predicted or 0.0) <= slo.tbt)
    planned = sum(i.elapsed - slo.tbt for i in over if (i.predicted or 0.0) > slo.tbt)
    if len(ran) > late + 1:  # one may have ended while the token was on its way
        cause = "token late: it was left out of iterations"
    elif not over:
        cause = "token late: gaps or delivery"
    else:
        cause = "token late: iterations overran" if unforeseen >= planned else "token late: iterations planned too long"
    return {
        "cause": cause,
        "slack": slo.deadline(record.arrival, 1) - record.times[0],  # of the first token
        "iterations": len(ran),
        "above_tbt": len(over),
        "overran": unforeseen,
        "planned_over": planned,
    }


def text(summary: dict[str, Any], title: str, missed: Sequence[dict[str, Any]] | None = None) -> str:
    """A summary as Markdown.

    Args:
        summary: of `summarize`.
        title: its first line.
        missed: of `misses`; None if no points were given.
    """
    window, gaps = summary["window"], summary["gaps"]
    idle = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in gaps["seconds"].items())
    parts = [
        title,
        "",
        f"{summary['iterations']} iterations in {summary['seconds']:.1f} s. The devices were busy "
        f"{summary['busy']:.1%} of the time, and {window['busy']:.1%} in the {window['seconds']:.0f} s with most work. "
        f"Idle: {idle}.",
        "",
        _row("Gaps while there was work, ms", gaps["length"]),
        _row("Planning, ms", summary["planning"]),
        _row("Plan ready before the iteration ended, ms", summary["lead"]),
        _row(
            "Results came after the iteration's end, as the next one's beginning shows it, ms",
            {name: value for name, value in summary["reported_late"].items() if name.startswith("p")},
        ),
        f"More than 5 ms after it: {summary['reported_late']['share_above_5_ms']:.1%} of the iterations.  ",
        f"Iterations followed the one before after more than {1e3 * summary['tbt']:.0f} ms: "
        f"{summary['periods_above_tbt']:.1%}.",
        _row("Prompt tokens of an iteration with any", summary["prefill"]["tokens_an_iteration"], 1.0),
        "",
    ]
    rows = []
    for kind, figures in summary["kinds"].items():
        ratio = figures["measured_over_predicted"]
        rows.append(
            [
                kind,
                f"{figures['count']}",
                f"{figures['seconds']:.1f}",
                f"{1e3 * figures['elapsed']['p50']:.1f} / {1e3 * figures['elapsed']['p95']:.1f}",
                f"{ratio['p50']:.3f} [{ratio['p5']:.3f}, {ratio['p95']:.3f}]" if ratio else "-",
                f"{figures['above_tbt']:.1%}",
                f"{figures['predicted_above_tbt']:.1%}",
            ]
        )
    header = (
        "Iterations",
        "Count",
        "Seconds",
        "P50 / P95, ms",
        "Measured / predicted [P5, P95]",
        "Above TBT",
        "Planned so",
    )
    parts += [markdown(header, rows), ""]
    filled = [b for b in gaps["histogram"] if any(b[cause] for cause in CAUSES)]
    rows = [
        [
            f"{1e3 * b['from']:g} to {1e3 * b['to']:g}" if b["to"] else f"over {1e3 * b['from']:g}",
            *(f"{b[c]}" for c in CAUSES),
        ]
        for b in filled
    ]
    if rows:
        parts += [markdown(("Gap, ms", *CAUSES), rows), ""]
    if missed is not None:
        counts = Counter(row["cause"] for row in missed)
        parts += [f"{len(missed)} requests broke a promise.", ""]
        if counts:
            parts += [markdown(("Cause", "Requests"), [[cause, f"{n}"] for cause, n in counts.most_common()]), ""]
    return "\n".join(parts)


def _row(name: str, figures: dict[str, float], scale: float = 1e3) -> str:
    values = ", ".join(f"{p.upper()} {scale * v:.{1 if scale > 1 else 0}f}" for p, v in figures.items())
    return f"{name}: {values or '-'}.  "


def during(iterations: Sequence[Iteration], begin: float, end: float) -> list[Iteration]:
    """The iterations that began within these times, seconds since the epoch."""
    return [i for i in iterations if begin <= i.began < end]


def of_points(iterations: Sequence[Iteration], points: Sequence[Point]) -> Iterator[tuple[Point, list[Iteration]]]:
    """Every point with the iterations of its time, those without any left out."""
    for point in points:
        if point.epoch is None:
            continue
        last = max((t for r in point.records for t in r.times), default=0.0)
        mine = during(iterations, point.epoch, point.epoch + last)
        if mine:
            yield point, mine
