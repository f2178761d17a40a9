"""How far a profile is from measured iterations (section 8.5, Table 4)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from conflux_ray.planning.fitting import IterationRow, fit_error
from conflux_ray.planning.latency_model import LatencyModel
from conflux_ray.planning.profile import FitError
from conflux_ray.profiling.batches import Case
from conflux_ray.profiling.journal import Measured


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Errors of a latency model on whole iterations.

    Args:
        overall: absolute percentage errors.
        std: standard deviation of the signed errors, percent.
        bias: mean signed error, percent; positive where the model predicts too much. The online correction removes it.
        by_kind: absolute percentage errors of each kind of batch.
        noise: median over the batches of (slowest - fastest repeat) / median, percent: what the machine itself does.
    """

    overall: FitError
    std: float
    bias: float
    by_kind: Mapping[str, FitError]
    noise: float

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As a table."""
        e = self.overall
        return [
            f"{'batches':<14} {'count':>5} {'MAPE %':>7} {'P50 %':>7} {'P95 %':>7} {'max %':>7}",
            *(
                f"{kind:<14} {error.count:>5} {error.mape:>7.1f} {error.p50:>7.1f} {error.p95:>7.1f} {error.max:>7.1f}"
                for kind, error in {"all": e, **self.by_kind}.items()
            ),
            f"signed error: mean {self.bias:+.1f} %, standard deviation {self.std:.1f} %",
            f"repeats of one batch differ by {self.noise:.1f} % (median of their range)",
        ]


def evaluate_cases(model: LatencyModel, cases: Sequence[Case], measured: Sequence[Measured]) -> Evaluation:
    """Compare predictions with measurements; each batch is predicted with the overlap it was measured with.

    Args:
        model: under test.
        cases: whole iterations.
        measured: of the same cases, in the same order; not empty.
    """
    predicted, truth, kinds = [], [], []
    for case, measurement in zip(cases, measured, strict=True):
        row = measurement.row
        assert isinstance(row, IterationRow)
        predicted.append(_predict(model, row))
        truth.append(row.seconds)
        kinds.append(case.batch.kind)
    signed = 100 * (np.array(predicted) / np.array(truth) - 1)
    return Evaluation(
        overall=fit_error(predicted, truth),
        std=float(signed.std()),
        bias=float(signed.mean()),
        by_kind={
            kind: fit_error(
                *zip(*[(p, t) for p, t, k in zip(predicted, truth, kinds, strict=True) if k == kind], strict=True)
            )
            for kind in sorted(set(kinds))
        },
        noise=noise(measured),
    )


def _predict(model: LatencyModel, row: IterationRow) -> float:
    return model.predict(row.load, overlap=row.overlap, decode_sms=row.decode_sms).seconds


def noise(measured: Sequence[Measured]) -> float:
    """Median range of the repeats of a case, percent of their median."""
    return 100 * statistics.median(m.spread for m in measured)
