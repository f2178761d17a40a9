"""The demonstration shows what it claims to show."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.heavy


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conflux_ray.execution.demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_reader_sees_mixed_forwards_uneven_shards_transitions_and_tokens() -> None:
    run = demo("--iterations", "8")
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^iteration \d+  \(\d+\.\d ms\)$", run.stdout, re.MULTILINE)) == 8
    # Rank 0 has one decode and rank 1 five, so G's prefill is cut 22 to 18: both compute 23 tokens.
    assert "rank 0  1 decode + 22 prefill tokens |d" + "p" * 22 + "\n" in run.stdout
    assert "rank 1  5 decode + 18 prefill tokens |ddddd" + "p" * 18 + "\n" in run.stdout
    assert "prefill: G[0:22]" in run.stdout
    assert "prefill: G[22:40]" in run.stdout
    assert "transition: KV of A[0:70] from all ranks to rank 0, layer by layer" in run.stdout
    assert re.search(r"sampled: A0=\d+ B0=\d+$", run.stdout, re.MULTILINE)
    assert "4 of them with prefill and decode in one forward pass; 3 chunks in uneven shards" in run.stdout


def test_a_degree_that_the_heads_do_not_divide_by_is_refused_before_anything_starts() -> None:
    run = demo("--sp-degree", "3")
    assert run.returncode == 2
    assert "8 query heads do not divide by 1 x 3; for tensor_parallel=1 it can be 1, 2, 4" in run.stderr
    assert run.stdout == ""
