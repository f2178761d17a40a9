"""How far a profile is from measured iterations (section 8.5, Table 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conflux_ray.planning.fitting import IterationRow, fit_error
from conflux_ray.planning.latency_model import LatencyModel
from conflux_ray.planning.profile import FitError


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Errors of a latency model on whole iterations.

    Args:
        overall: absolute percentage errors.
        bias: mean signed error, percent; positive where the model predicts too much. The online correction removes it.
        std: standard deviation of the signed errors, percent.
        by_kind: absolute percentage errors of each kind of batch.
    """

    overall: FitError
    bias: float
    std: float
    by_kind: Mapping[str, FitError]


def evaluate_iterations(model: LatencyModel, rows: Sequence[IterationRow], kinds: Sequence[str]) -> Evaluation:
    """Compare predictions with measurements; each batch is predicted with the overlap it was measured with.

    Args:
        model: under test.
        rows: whole iterations; not empty.
        kinds: of each row's batch, for `by_kind`.
    """
    predicted = np.array([model.predict(r.load, overlap=r.overlap, decode_sms=r.decode_sms).seconds for r in rows])
    measured = np.array([r.seconds for r in rows])
    signed = 100 * (predicted / measured - 1)
    of_kind = {kind: np.array([k == kind for k in kinds]) for kind in sorted(set(kinds))}
    return Evaluation(
        overall=fit_error(predicted, measured),
        bias=float(signed.mean()),
        std=float(signed.std()),
        by_kind={kind: fit_error(predicted[chosen], measured[chosen]) for kind, chosen in of_kind.items()},
    )
