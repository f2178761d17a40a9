"""One point: a trace at one rate and seed against one server, from drawing the requests to the file that keeps it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from conflux_ray.bench.live.client import UNDECIDED, Board, Job, Report, Target, client_main
from conflux_ray.bench.live.prompts import PromptSource
from conflux_ray.bench.live.score import Lag, Record, score
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.trace import Trace, TraceError
from conflux_ray.simulator.workload import Workload

FORMAT = 1
PROGRESS_SECONDS = 5.0
PREPARATION = 6.0
"""Seconds to start the clients and make a point's prompts, about."""
START_SECONDS = 1.0
"""Between the last client's "ready" and the first arrival."""
PREPARE_SECONDS = 300.0
"""Longest the clients may take to make their prompts."""
MOST_UNDECIDED = 0.005
"""Share of the requests of a valid point that may be cut undecided, and count as missed."""
_POLL = 0.2
_DIGITS = 5
"""Of the seconds in a point's file."""


@dataclass(frozen=True, slots=True)
class Load:
    """How a point is drawn and sent.

    Args:
        workload: where the requests come from; it caps their lengths.
        slo: the promises.
        seconds: of arrivals.
        arrivals: "trace" scales the trace's own gaps to the rate, "poisson" draws new ones.
        warm_up: share of the requests, the first ones, that is not counted, 0..1.
        max_lag: of the client, seconds at the 99th percentile; beyond, the point is invalid.
        drain: longest wait after the last arrival for requests that can still keep their promises, seconds.
        clients: processes.
        least: requests of a point.
        vocab_size: of the model.
        block_tokens: that one of the trace's hash ids stands for.
        shared: whether equal hash ids become equal prompts.
    """

    workload: Workload
    slo: Slo
    seconds: float
    arrivals: str = "trace"
    warm_up: float = 0.1
    max_lag: float = 0.01
    drain: float = 120.0
    clients: int = 2
    least: int = 2
    vocab_size: int = 32000
    block_tokens: int = 512
    shared: bool = True

    def __post_init__(self) -> None:
        if self.arrivals not in ("trace", "poisson"):
            raise ValueError(f"arrivals={self.arrivals!r} must be trace or poisson")
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"warm_up={self.warm_up} must be a share from 0 to below 1")
        if self.clients < 1:
            raise ValueError(f"clients={self.clients} must be at least 1 process")
        if not (self.seconds > 0 and self.max_lag > 0 and self.drain >= 0):
            raise ValueError(
                f"seconds={self.seconds} and max_lag={self.max_lag} must be positive, drain={self.drain} not negative"
            )

    def draw(self, rate: float, seed: int) -> Trace:
        """The requests of a point: the same for every server.

        Raises:
            TraceError: the trace is too short for it.
        """
        if not rate > 0:
            raise TraceError(f"rate={rate} must be positive, requests per second")
        trace = self.workload.draw(rate, self.seconds, seed, self.least)
        if self.arrivals == "trace":
            return trace
        gaps = np.random.default_rng([seed, len("poisson")]).exponential(1 / rate, len(trace))
        times = np.cumsum(gaps) - gaps[0]
        moved = [replace(r, arrival=float(t)) for r, t in zip(trace.requests, times, strict=True)]
        return trace.noted(moved, f"Poisson arrivals at {rate:g} requests/s")

    def seconds_needed(self, rate: float, seed: int) -> float:
        """About how long a point takes: all its arrivals, and the outputs at twice the promised speed."""
        ends = [r.arrival + self.slo.ttft + r.output_tokens * self.slo.tbt / 2 for r in self.draw(rate, seed).requests]
        return PREPARATION + min(max(ends), self.seconds + self.slo.ttft + self.drain)

    def prompts(self, rate: float, seed: int) -> PromptSource:
        """What makes the prompts of a point; a seed has others at another rate."""
        return PromptSource(self.vocab_size, (seed, round(1e6 * rate)), self.block_tokens, self.shared)

    def describe(self) -> dict[str, Any]:
        """What two points must share to be compared."""
        return {
            "workload": self.workload.name,
            "max_model_len": self.workload.max_model_len,
            "slo": asdict(self.slo),
            "seconds": self.seconds,
            "least": self.least,
            "arrivals": self.arrivals,
            "warm_up": self.warm_up,
            "shared_prefixes": self.shared and self.workload.trace is not None and _has_hashes(self.workload.trace),
            "block_tokens": self.block_tokens,
            "vocab_size": self.vocab_size,
        }


def _has_hashes(trace: Trace) -> bool:
    return any(r.hash_ids for r in trace.requests)


@dataclass(frozen=True, slots=True)
class Point:
    """A finished point.

    Args:
        rate: asked for, requests per second.
        seed: of the draw.
        records: of its requests, in order of arrival.
        warm_up: how many of them are not counted.
        slo: the promises.
        lag: of the client.
        invalid: why it must not be used; None if it may.
        stopped: it was cut short since it was certain to miss what it had to attain.
        notes: what was done to the trace.
        seconds: that it took.
        clients: processes that sent it.
        epoch: when it began, seconds since the epoch: what the records' times count from; None if that was not kept.
    """

    rate: float
    seed: int
    records: tuple[Record, ...]
    warm_up: int
    slo: Slo
    lag: Lag
    invalid: str | None = None
    stopped: bool = False
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    clients: int = 1
    epoch: float | None = None

    @property
    def counted(self) -> tuple[Record, ...]:
        """Records after the warm-up."""
        return self.records[self.warm_up :]

    @property
    def outcomes(self) -> list[bool]:
        """Whether each counted request was compliant."""
        return [r.compliant(self.slo) for r in self.counted]

    @property
    def attainment(self) -> float:
        """Share of compliant requests; of a stopped point an upper bound of no meaning beyond its miss."""
        outcomes = self.outcomes
        return sum(outcomes) / len(outcomes)

    def score(self) -> dict[str, Any]:
        """`score.score` of it."""
        return score(self.records, self.slo, self.warm_up)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, the score beside the records that it comes from."""
        return {
            "format": FORMAT,
            "rate": self.rate,
            "seed": self.seed,
            "warm_up": self.warm_up,
            "slo": asdict(self.slo),
            "lag": asdict(self.lag),
            "invalid": self.invalid,
            "stopped": self.stopped,
            "notes": self.notes,
            "seconds": self.seconds,
            "clients": self.clients,
            "epoch": self.epoch,
            "score": self.score(),
            "records": [r.to_json() for r in self.records],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Point:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is of another format.
        """
        if values.get("format") != FORMAT:
            raise ValueError(f"format={values.get('format')!r} of a point is not {FORMAT}; measure it again")
        return cls(
            values["rate"],
            values["seed"],
            tuple(Record.from_json(r) for r in values["records"]),
            values["warm_up"],
            Slo(**values["slo"]),
            Lag(**values["lag"]),
            values["invalid"],
            values["stopped"],
            tuple(values["notes"]),
            values["seconds"],
            values["clients"],
            values.get("epoch"),
        )


def pooled(points: Sequence[Point]) -> list[tuple[float, int, int]]:
    """(rate, compliant, counted) over the seeds of each rate, valid points only."""
    totals: dict[float, list[int]] = {}
    for point in points:
        if not point.invalid and not point.stopped:
            outcomes = point.outcomes
            total = totals.setdefault(point.rate, [0, 0])
            total[0] += sum(outcomes)
            total[1] += len(outcomes)
    return [(rate, good, count) for rate, (good, count) in sorted(totals.items())]


def jobs_of(trace: Trace, warm_up: int) -> list[Job]:
    """The trace's requests as a client sends them."""
    return [
        Job(i, r.arrival, r.prompt_tokens, r.output_tokens, r.hash_ids, i >= warm_up)
        for i, r in enumerate(trace.requests)
    ]


def record_of(report: Sequence[Report], jobs: Sequence[Job], start: float) -> tuple[Record, ...]:
    """What became of every job; one that was never sent is a miss too."""
    sent = {s.job.index: s for r in report for s in r.sent}
    records = []
    for job in jobs:
        one = sent.get(job.index)
        if one is None:
            records.append(Record(job.index, job.arrival, job.prompt_tokens, job.output_tokens, (), fault="never sent"))
            continue
        records.append(
            Record(
                job.index,
                round(job.arrival, _DIGITS),
                job.prompt_tokens,
                job.output_tokens,
                tuple(round(t - start, _DIGITS) for t in one.reply.times),
                one.replica,
                round(one.lag, _DIGITS),
                one.reply.fault(job.prompt_tokens, job.output_tokens),
            )
        )
    return tuple(records)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM interrupts like Ctrl-C, so that clients and servers are ended; only in the main thread.

    Programs that run in the background may not get a Ctrl-C at all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_progress(line: str) -> None:
    """A line to standard error at once."""
    print(line, file=sys.stderr, flush=True)


def run_point(
    load: Load,
    target: Target,
    rate: float,
    seed: int,
    floor: float | None = None,
    say: Callable[[str], None] = print_progress,
) -> Point:
    """Send one point and gather what came back.

    Args:
        load: how.
        target: to whom.
        rate: requests per second.
        seed: of the draw.
        floor: stop as soon as attainment is certain to end below it; None sends everything.
        say: takes a line of progress every few seconds.

    Raises:
        TraceError: the trace is too short.
        RuntimeError: a client process failed.
    """
    return run_trace(load, target, load.draw(rate, seed), rate, seed, floor, say)


def run_trace(
    load: Load,
    target: Target,
    trace: Trace,
    rate: float,
    seed: int,
    floor: float | None = None,
    say: Callable[[str], None] = print_progress,
) -> Point:
    """Send a trace as it is; `run_point` has the other arguments and what is raised.

    Args:
        trace: the requests and when they leave.
        rate: under which the point is kept.
        seed: of the prompts.
    """
    warm_up = int(load.warm_up * len(trace))
    jobs = jobs_of(trace, warm_up)
    began = time.monotonic()
    # Spawned: a client starts from a clean interpreter, whatever this process has imported.
    context = multiprocessing.get_context("spawn")
    board = Board(context, load.clients, len(target.urls))
    pipes: list[Connection] = []
    processes = []
    try:
        for number in range(load.clients):
            here, there = context.Pipe()
            process = context.Process(
                target=client_main,
                args=(number, jobs[number :: load.clients], target, load.prompts(rate, seed), load.slo, board, there),
                daemon=True,
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        _gather(pipes, time.monotonic() + PREPARE_SECONDS)
        board.start = time.monotonic() + START_SECONDS
        epoch = time.time() + START_SECONDS
        stopped = _watch(board, pipes, jobs, load, floor, say)
        reports: list[Report] = _gather(pipes, time.monotonic() + 60)
    finally:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.terminate()
                process.join()
        for pipe in pipes:
            pipe.close()
    records = record_of(reports, jobs, board.start)
    lag = Lag.of([s.lag for r in reports for s in r.sent], [t for r in reports for t in r.ticks])
    cut_short = stopped == "certain miss"
    return Point(
        rate,
        seed,
        records,
        warm_up,
        load.slo,
        lag,
        lag.verdict(load.max_lag) or unfinished(records, stopped),
        cut_short,
        trace.notes,
        round(time.monotonic() - began, 1),
        load.clients,
        round(epoch, _DIGITS),
    )


def unfinished(records: Sequence[Record], stopped: str) -> str | None:
    """Why a run that ended before its requests is invalid: those that were undecided count as missed, so few may be."""
    cut = sum(r.fault == UNDECIDED for r in records)
    if stopped == "drained" and cut > MOST_UNDECIDED * len(records):
        return f"{cut} requests were cut while they could still keep their promises; give --drain more seconds"
    return None


def _gather(pipes: Sequence[Connection], deadline: float) -> list[Any]:
    """One message from every client.

    Raises:
        RuntimeError: a client failed, ended or was too slow.
    """
    messages: dict[Connection, Any] = {}
    while len(messages) < len(pipes):
        left = deadline - time.monotonic()
        ready = wait([p for p in pipes if p not in messages], timeout=max(0.0, left))
        if not ready:
            raise RuntimeError("a client process does not answer; is the machine out of memory or cores?")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                messages[pipe] = pipe.recv()
            except EOFError:
                raise RuntimeError("a client process ended; its message is above") from None
            if isinstance(messages[pipe], Exception):
                raise RuntimeError(f"a client process failed: {messages[pipe]!r}") from messages[pipe]
    return [messages[pipe] for pipe in pipes]


def _watch(
    board: Board,
    pipes: Sequence[Connection],
    jobs: Sequence[Job],
    load: Load,
    floor: float | None,
    say: Callable[[str], None],
) -> str:
    """Show progress until the clients are done or nothing is left to wait for; returns why it ended."""
    last = board.start + jobs[-1].arrival
    counted = sum(job.counted for job in jobs)
    allowed = counted if floor is None else counted - floor * counted + 1e-9
    shown = time.monotonic()
    while True:
        ready = wait(pipes, timeout=_POLL)
        if len(ready) == len(pipes):
            return "done"
        now = time.monotonic()
        if now - shown >= PROGRESS_SECONDS:
            shown = now
            say(progress_line(board, len(jobs), now - board.start))
        if floor is not None and board.total("counted_missed") > allowed:
            board.stop()
            return "certain miss"
        if now > last + load.slo.ttft:
            if board.total("hopeful") == 0 and board.total("sent") == len(jobs):
                board.stop()
                return "decided"
            if now > last + load.drain:
                board.stop()
                return "drained"


def progress_line(board: Board, total: int, seconds: float) -> str:
    """What the clients have done so far."""
    sent, done, missed = (int(board.total(name)) for name in ("sent", "done", "missed"))
    share = f"{1 - missed / sent:.1%}" if sent else "-"
    return (
        f"  {seconds:5.0f} s  {sent}/{total} sent, {sent - done} running, {share} on time so far, "
        f"{board.total('tokens') / max(seconds, 1e-9):.0f} tokens/s, client late {board.worst('late') * 1e3:.0f} ms"
    )


def write_json(path: Path, document: Any) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(document) + "\n")
    part.replace(path)
