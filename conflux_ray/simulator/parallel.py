"""Independent simulations over the cores, with a progress bar."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from tqdm import tqdm

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_all(function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, label: str = "") -> list[Result]:
    """`function` of every task, in the order of the tasks.

    Args:
        function: of a module; it and the tasks are pickled when there is more than one job.
        tasks: independent of each other.
        jobs: processes; 1 stays in this one.
        label: of the progress bar, which appears on a terminal only; "" shows none.
    """
    bar = tqdm(total=len(tasks), desc=label, disable=not label or not sys.stderr.isatty(), leave=False)
    with bar:
        if jobs <= 1 or len(tasks) <= 1:
            results = []
            for task in tasks:
                results.append(function(task))
                bar.update()
            return results
        # Spawned, so that results do not depend on what the parent has imported or started.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
            futures = {pool.submit(function, task): k for k, task in enumerate(tasks)}
            done: dict[int, Result] = {}
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                bar.update()
            return [done[k] for k in range(len(tasks))]
