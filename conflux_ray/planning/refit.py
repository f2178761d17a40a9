"""A latency model made better by what iterations took while serving (section 6.2; beyond the paper).

A profile is measured on made-up batches. Real ones come with other power draw, clocks and neighbours, and at the sizes
that the planner likes. So coefficients that iterations of a serving instance can tell are fitted to them, and the rest
stays: f_GEMM anew, one factor each for the prefill and the decode path, gamma of each overlap setting that was used,
and how long KV transfers take and show. alpha and beta are 1 then: what they would be is in those factors. Settings
that were not used, or hardly, are left out of the new model: they were measured under another f_GEMM, and would look
better or worse than they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from conflux_ray.planning.fitting import (
    FOLDS,
    MIN_POINTS,
    SIMPLER,
    FitRefusedError,
    Floats,
    IterationRow,
    evaluate,
    fit_moving,
    is_mixed,
    robust_least_squares,
    standalone_parts,
)
from conflux_ray.planning.latency_model import NOTHING, Contention, GemmCurve, LatencyModel
from conflux_ray.planning.profile import FitError

LEAST_ROWS = 100
"""Iterations with prefill that a fit needs, and as many without."""
BLOCK = 20
"""Iterations that are set aside together: neighbours are alike."""
FIRST_KNOT = 64
"""Tokens; f_GEMM may bend there and at each doubling of it."""
ROWS_OF_A_PIECE = 20
"""Fewest iterations that a piece of f_GEMM, or an overlap setting, is fitted to."""
BELIEVED = 3.0
"""A path that takes more than so many times what the old model says, or less than one part in so many, is no path that
was measured: iterations that are too alike leave open what belongs to which."""

Setting = tuple[bool, int | None]
"""Whether the attention paths overlapped, and the partition if they did."""

_SHARES = tuple(np.linspace(0.0, 1.0, 21).tolist())


@dataclass(frozen=True, slots=True)
class Refit:
    """A new model, and absolute percentage errors on iterations that it was not fitted to.

    Args:
        latency: the new model.
        count: iterations that it was fitted to.
        before: errors of the old model.
        after: errors of the new one.
        in_sample: errors of the new one on what it was fitted to.
    """

    latency: LatencyModel
    count: int
    before: FitError
    after: FitError
    in_sample: FitError


def refit(model: LatencyModel, rows: Sequence[IterationRow], name: str) -> Refit:
    """Fit every second block of iterations, and judge by the others.

    Args:
        model: what they were planned by, without online correction.
        rows: iterations in order.
        name: of the new model.

    Raises:
        FitRefusedError: there are too few iterations of a kind, or too few kinds of them.
        ValueError: they ran attention in a way that the model does not know.
    """
    check_settings(model, rows)
    blocks = [k // BLOCK % 2 for k in range(len(rows))]
    fitted, aside = ([row for row, block in zip(rows, blocks, strict=True) if block == part] for part in (0, 1))
    still = [row for row in fitted if not any(row.load.incoming)]
    counts = Counter(_setting(row) for row in still)
    known = {setting for setting, count in counts.items() if count >= ROWS_OF_A_PIECE} | {None}
    still = [row for row in still if _setting(row) in known]
    with_prefill = sum(any(row.load.prefill_tokens) for row in still)
    if min(with_prefill, len(still) - with_prefill) < LEAST_ROWS or not any(s is not None and s[0] for s in known):
        raise FitRefusedError(
            f"{with_prefill} iterations with prefill and {len(still) - with_prefill} without, to which no KV arrives, "
            f"in every second block of {BLOCK}, are too few to refit a profile: {LEAST_ROWS} of each are needed, "
            f"{ROWS_OF_A_PIECE} of them with decodes beside prefill; serve longer, near the load that matters"
        )
    better = replace(_fit(model, still), name=name)
    moving = [row for row in fitted if any(row.load.incoming) and _setting(row) in known]
    if len(moving) >= LEAST_ROWS:
        better = fit_moving(better, moving)
    judged, used = ([row for row in part if _setting(row) in known] for part in (aside, fitted))
    return Refit(better, len(used), evaluate(model, judged), evaluate(better, judged), evaluate(better, used))


def check_settings(model: LatencyModel, rows: Sequence[IterationRow]) -> None:
    """Raises ValueError if iterations ran attention in a way that the model does not know."""
    known = {(True, c.decode_sms) for c in model.contention} | {(False, None), None}
    for row in rows:
        if _setting(row) not in known:
            raise ValueError(
                f"{model.name}: does not know iterations with decode_sms={row.decode_sms}, which these are; give the "
                f"profile that was served"
            )


def _setting(row: IterationRow) -> Setting | None:
    """How attention ran; None where there was but one path."""
    return (row.overlap, row.decode_sms if row.overlap else None) if is_mixed(row) else None


def _critical(model: LatencyModel, row: IterationRow) -> tuple[float, float, float]:
    """Tokens of the rank that ends last, its prefill and its decode path, seconds a layer.

    Where paths overlap without a barrier this is a bound, which even loads reach (`IterationEstimator`).
    """
    linear, prefill, decode = standalone_parts(model, row)
    if model.barrier or (prefill and row.overlap):  # all wait for the rank with the most tokens
        return float(row.load.max_load), prefill, max(decode)
    last = max(range(len(linear)), key=lambda rank: linear[rank] + decode[rank])
    return float(row.load.loads[last]), prefill, decode[last]


def _fit(model: LatencyModel, rows: Sequence[IterationRow]) -> LatencyModel:
    columns = _Columns.of(model, rows)
    forms = [columns.with_knots(knots) for knots in _knots(columns.tokens)]
    straight, bent = ((form, form.shares()) for form in forms)
    errors = [form.cross_validated(shares) for form, shares in (straight, bent)]
    chosen, shares = straight if errors[0] <= SIMPLER * errors[1] + 1e-9 else bent
    solution = chosen.solve(shares, np.ones(len(rows), dtype=bool))
    seconds = np.cumsum(solution[: len(chosen.knots)]) / model.num_layers
    prefill, decode = (float(factor) for factor in solution[-2:])
    for path, factor in (("prefill", prefill), ("decode", decode)):
        if not 1 / BELIEVED <= factor <= BELIEVED:
            raise FitRefusedError(
                f"{path}: {factor:.2f} times the old model's time fits best, which is none: the iterations are too "
                f"alike to tell {path} attention from the rest; serve prompts and contexts of other lengths too"
            )
    return replace(
        model,
        gemm=_curve(chosen.knots, seconds),
        all_reduce=NOTHING,  # f_GEMM has it
        prefill=model.prefill.scaled(prefill),
        comm=model.comm.scaled(prefill),
        decode=model.decode.scaled(decode),
        contention=tuple(
            Contention(1.0, 1.0, sms, share)
            for (overlap, sms), share in sorted(
                shares.items(), key=lambda item: (item[0][1] is not None, item[0][1] or 0)
            )
            if overlap
        ),
    )


def _knots(tokens: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Where f_GEMM bends: the straight form, and the one with as many knots as the iterations can tell."""
    last = float(tokens.max())
    knots = [0.0]
    knot = float(FIRST_KNOT)
    while knot < last:
        enough = ((tokens > knots[-1]) & (tokens <= knot)).sum() >= ROWS_OF_A_PIECE
        if enough and (tokens > knot).sum() >= ROWS_OF_A_PIECE:
            knots.append(knot)
        knot *= 2
    return (*knots[:2], last) if len(knots) > 1 else (0.0, last), (*knots, last)


def _curve(knots: Sequence[float], seconds: Floats) -> GemmCurve:
    """f_GEMM through the knots; after the last one it grows as it did from the first bend on."""
    start = 1 if len(knots) > 2 else 0
    slope = float((seconds[-1] - seconds[start]) / (knots[-1] - knots[start]))
    if not (seconds[0] > 0 and slope > 0):
        raise FitRefusedError(
            f"gemm: {seconds[0]:g} s for none and {slope:g} s for another token fit best, which is none: the "
            f"iterations are too alike; serve other numbers of tokens too"
        )
    return GemmCurve(tuple(knots), tuple(seconds.tolist()), slope, "piecewise")


@dataclass(frozen=True, slots=True)
class _Columns:
    """What iterations consist of, one entry for each; seconds of a whole iteration as the old model has them.

    Args:
        tokens: of the rank that ends last.
        prefill: the prefill path.
        decode: the decode path.
        rest: measured seconds less the host's.
        weight: turns an error into one relative to the iteration.
        settings: how attention ran, see `_setting`.
        knots: of f_GEMM.
    """

    tokens: Floats
    prefill: Floats
    decode: Floats
    rest: Floats
    weight: Floats
    settings: tuple[Setting | None, ...]
    knots: tuple[float, ...] = (0.0,)

    @classmethod
    def of(cls, model: LatencyModel, rows: Sequence[IterationRow]) -> _Columns:
        parts = np.array([_critical(model, row) for row in rows])
        measured = np.array([row.seconds for row in rows])
        host = np.array([model.host(max(row.load.decode_tokens)) for row in rows])
        tokens, prefill, decode = parts.T * np.array([[1.0], [model.num_layers], [model.num_layers]])
        return cls(tokens, prefill, decode, measured - host, 1 / measured, tuple(_setting(row) for row in rows))

    def with_knots(self, knots: Sequence[float]) -> _Columns:
        return replace(self, knots=tuple(knots))

    def solve(self, shares: dict[Setting, float], some: NDArray[np.bool_]) -> Floats:
        """f_GEMM's value at 0, its growth along each piece, and factors on the prefill and the decode path."""
        return robust_least_squares(self._matrix(shares)[some], (self.rest * self.weight)[some])

    def shares(self) -> dict[Setting, float]:
        """gamma of each overlap setting; of paths in turn it is 1."""
        found: dict[Setting, float] = {setting: 1.0 for setting in self.settings if setting is not None}
        everything = np.ones(len(self.rest), dtype=bool)
        for setting in [s for s in found if s[0]]:
            mine = np.array([s == setting for s in self.settings])
            found[setting] = min(_SHARES, key=lambda share: self._error({**found, setting: share}, everything, mine))
        return found

    def cross_validated(self, shares: dict[Setting, float]) -> float:
        """Mean absolute relative error of blocks that were left out of the fit."""
        block = np.arange(len(self.rest)) // BLOCK
        folds = [block % FOLDS == fold for fold in range(FOLDS)]
        return float(
            np.mean([self._error(shares, ~out, out) for out in folds if out.any() and (~out).sum() > MIN_POINTS])
        )

    def _error(self, shares: dict[Setting, float], fitted: NDArray[np.bool_], judged: NDArray[np.bool_]) -> float:
        solution = self.solve(shares, fitted)
        return float(np.abs(self._matrix(shares)[judged] @ solution - (self.rest * self.weight)[judged]).mean())

    def _matrix(self, shares: dict[Setting, float]) -> Floats:
        share = np.array([1.0 if setting is None else shares[setting] for setting in self.settings])
        prefill_longer = self.prefill >= self.decode
        pieces = [np.clip((self.tokens - a) / (b - a), 0.0, 1.0) for a, b in pairwise(self.knots)]
        paths = [
            self.prefill * np.where(prefill_longer, 1.0, share),
            self.decode * np.where(prefill_longer, share, 1.0),
        ]
        return np.column_stack((np.ones_like(self.tokens), *pieces, *paths)) * self.weight[:, None]
