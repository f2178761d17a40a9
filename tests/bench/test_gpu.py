"""What `conflux bench gpu` measures and how it sets iterations beside their bound; no device is needed for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conflux_ray.bench.gpu import Row, cases_of, format_rows, rows_of
from conflux_ray.profiling.samples import SampleFile

ROW = Row(
    1024, overlap=33.0, overlap_low=32.0, overlap_high=35.0, serial=36.0, gemm=20.0, decode=8.0, prefill=9.0, comm=1.0
)


def test_the_bound_is_the_linear_region_and_the_longer_attention_path() -> None:
    assert ROW.bound == 30.0
    assert ROW.ratio == pytest.approx(33 / 30)
    assert "| 1024 | 33.00 [32.00, 35.00] |  | 36.00 |" in format_rows([ROW])


def test_a_split_of_the_multiprocessors_counts_where_it_is_fastest() -> None:
    row = replace(ROW, splits={32: 34.0, 48: 31.5})
    assert row.ratio == pytest.approx(31.5 / 30)
    assert "| 32: 34.00, 48: 31.50 |" in format_rows([row])
    cases = cases_of(1024, 2, 24, 8192, splits=(32, 48))
    assert [cases[f"split-{sms}"].batch.decode_sms for sms in (32, 48)] == [32, 48]
    assert not {"split-32", "split-48"} & set(cases_of(0, 2, 24, 8192, splits=(32, 48)))


def test_the_linear_region_alone_has_the_iteration_s_tokens_on_every_rank() -> None:
    cases = cases_of(1024, num_ranks=2, decodes=24, context=8192)
    assert cases["overlap"].batch.load.max_load == cases["gemm"].workload == 24 + 512
    assert cases["gemm"].batch.load.prefill_tokens == (536, 536)
    assert cases["decode"].workload == 24 * 8192
    assert cases["comm"].workload == 512
    assert (cases["overlap"].batch.overlap, cases["serial"].batch.overlap) == (True, False)


def test_without_a_chunk_or_a_second_rank_there_is_nothing_to_exchange() -> None:
    assert set(cases_of(0, 2, 24, 8192)) == {"overlap", "gemm", "decode"}
    assert "comm" not in cases_of(1024, 1, 24, 8192)


def test_rows_are_medians_over_the_rounds(tmp_path: Path) -> None:
    samples = SampleFile(tmp_path / "samples", {})
    for name, case in cases_of(64, 2, 4, 128).items():
        for number, seconds in enumerate((0.5, 0.002, 0.003) if name == "overlap" else (0.001,) * 3):
            samples.add(case.name, number, seconds)
    (row,) = rows_of([64], samples, 2, 4, 128)
    assert (row.overlap, row.overlap_low, row.overlap_high) == pytest.approx((3.0, 2.0, 500.0))
    assert (row.serial, row.bound) == pytest.approx((1.0, 3.0))
