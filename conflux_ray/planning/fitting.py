"""From profile rows to a latency model (section 6.2, "Estimator construction"; appendix D, "Fitting").

Each component is measured alone and fitted alone; whole iterations then give what only shows when both paths run:
alpha, beta, gamma, whether ranks wait for each other before attention, the exposed share of KV transfers, and, where it
was not measured by itself, the host's time. All fits minimise *relative* errors, since a profile is judged by its MAPE
and spans four orders of magnitude, and keep every component non-decreasing, since the dispatcher's search needs a
latency that does not fall as work grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conflux_ray.planning.latency_model import (
    NOTHING,
    Affine,
    Contention,
    Curve,
    GemmCurve,
    IterationLoad,
    LatencyModel,
)
from conflux_ray.planning.profile import FitError, Profile

Floats = NDArray[np.float64]
Fitted = Affine | GemmCurve

COMPONENTS = {
    "gemm": "tokens of a rank; the shared linear region of one layer, all-reduces of the base TP included",
    "decode": "aggregate context of a rank, tokens; decode attention of one layer",
    "prefill": "sum of l (c + (l + 1) / 2) over the chunks, divided by N; prefill attention of one layer",
    "comm": "tokens of the largest shard; both all-to-alls of one layer",
    "transfer": "tokens whose KV arrives at one rank from the others; KV transfer of one layer",
    "host": "sampled tokens of the busiest rank; everything of an iteration outside its layers",
}
"""What `x` and `seconds` of a component row mean."""

FOLDS = 5
MIN_POINTS = 4
SPREAD = 2.0
"""A slope needs at least MIN_POINTS different x, the largest at least SPREAD times the smallest."""
BENDS = 8
"""Most pieces of a component that bends; each has two measured points or more."""
BENDING = ("prefill", "comm")
"""Components that may bend: what is small is bound by launches and by waves that leave multiprocessors idle, what is
large by arithmetic or bandwidth, with a wide range between."""
SIMPLER = 1.1
"""A simpler form is taken where its cross-validated error is at most this many times that of a richer one."""
PLATEAU = 1.02
"""f_GEMM's first knots within this factor count as equal: the weights are read whatever the batch."""
WORTH = 1.02
"""A form without a coefficient more is taken where its error is lower by this factor."""
OUTLIER = 0.03
"""Relative error of an iteration beyond which it weighs less and less in a fit (Huber)."""


class FitRefusedError(ValueError):
    """The rows cannot identify a coefficient; the message says which, and what to measure."""


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """One component, measured alone.

    Args:
        component: a key of `COMPONENTS`.
        x: its workload.
        seconds: of one layer; of one iteration for `host`.

    Raises:
        ValueError: there is no such component, or a value is out of range.
    """

    component: str
    x: float
    seconds: float

    def __post_init__(self) -> None:
        if self.component not in COMPONENTS:
            raise ValueError(f"component={self.component!r} is not one of {', '.join(COMPONENTS)}")
        if not (self.x >= 0 and 0 < self.seconds < float("inf")):
            raise ValueError(
                f"{self.component}: x={self.x} must be >= 0 and seconds={self.seconds} positive and finite"
            )


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One whole iteration, as the engine runs it.

    Args:
        load: what it computed.
        seconds: from the plan's arrival to the last rank's result.
        overlap: whether the attention paths ran beside each other.
        decode_sms: SM partition of the decode stream, if any.
        held_out: set aside for evaluation; not fitted.
    """

    load: IterationLoad
    seconds: float
    overlap: bool = True
    decode_sms: int | None = None
    held_out: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"iteration: seconds={self.seconds} must be positive and finite")


Row = ComponentRow | IterationRow


def row_to_json(row: Row) -> dict[str, Any]:
    """A row as a JSON object: one line of a profiler's output file."""
    if isinstance(row, ComponentRow):
        return {"kind": "component", **asdict(row)}
    fields = asdict(row)
    return {"kind": "iteration", **fields.pop("load"), **fields}


def row_from_json(fields: Mapping[str, Any]) -> Row:
    """The row of a JSON object.

    Raises:
        ValueError: it is no row; the message names the field.
    """
    fields = dict(fields)
    kind = fields.pop("kind", None)
    try:
        if kind == "component":
            return ComponentRow(**fields)
        if kind == "iteration":
            over_ranks = ("decode_tokens", "decode_context", "prefill_tokens", "incoming")
            load = IterationLoad(
                **{name: tuple(fields.pop(name)) for name in over_ranks},
                chunks=tuple((length, context) for length, context in fields.pop("chunks")),
            )
            return IterationRow(load, **fields)
    except KeyError as error:
        raise ValueError(f"{kind} row has no field {error}") from error
    except TypeError as error:
        raise ValueError(f"{kind} row: {error}") from error
    raise ValueError(f"kind={kind!r} is neither 'component' nor 'iteration'")


def fit_error(predicted: ArrayLike, measured: ArrayLike) -> FitError:
    """Absolute percentage errors of `predicted` against `measured`, both seconds, of equal length and not empty."""
    truth = np.asarray(measured, dtype=np.float64)
    errors = 100 * np.abs(np.asarray(predicted, dtype=np.float64) - truth) / truth
    p50, p95 = np.percentile(errors, (50, 95))
    return FitError(len(errors), float(errors.mean()), float(p50), float(p95), float(errors.max()))


def evaluate(model: LatencyModel, rows: Iterable[Row]) -> FitError:
    """Errors of the model on the whole iterations among `rows`, each under the setting it was measured with.

    Raises:
        FitRefusedError: there is no such row.
    """
    iterations = [row for row in rows if isinstance(row, IterationRow)]
    if not iterations:
        raise FitRefusedError("there are no iteration rows to evaluate the model on")
    predicted = [model.predict(r.load, overlap=r.overlap, decode_sms=r.decode_sms).seconds for r in iterations]
    return fit_error(predicted, [r.seconds for r in iterations])


def fit_profile(
    rows: Sequence[Row],
    *,
    model: str,
    machine: str,
    num_layers: int,
    num_ranks: int,
    base_tp: int = 1,
    versions: Mapping[str, str] | None = None,
    date: str = "",
    padded: Sequence[int] = (),
) -> Profile:
    """Fit a latency model.

    Needs rows of gemm, decode, prefill and, with more than one rank, comm. Iteration rows are optional, but without
    overlapped ones the model never overlaps, and without any the host's time must have rows of its own. Transfer rows
    are optional.

    Args:
        rows: what the profiler measured.
        model: the served model.
        machine: the device, in words.
        num_layers: L.
        num_ranks: N.
        base_tp: devices of one logical rank.
        versions: of the measured software, by package.
        date: ISO 8601.
        padded: numbers of tokens that the linear region runs at, ascending: other batches are padded to the next one.

    Returns:
        The profile, with errors in-sample and held out.

    Raises:
        FitRefusedError: a coefficient cannot be identified.
    """
    columns = _columns(rows)
    required = ["gemm", "decode", "prefill", *(["comm"] if num_ranks > 1 else [])]
    for name in required:
        if name not in columns:
            raise FitRefusedError(f"{name}: no rows; measure it over x = {COMPONENTS[name]}")
    gemm, forms = fit_gemm(*columns["gemm"], padded)
    fits: dict[str, Callable[[Floats, Floats], Affine]] = {name: _affine for name in columns if name != "gemm"}
    for name in fits:
        _require_spread(name, columns[name][0])
        if name in BENDING:
            fits[name] = _simplest(*columns[name])
    affine = {name: fit(*columns[name]) for name, fit in fits.items()}
    curves: dict[str, Fitted] = {"gemm": gemm, **affine}
    in_sample = {
        name: fit_error([curve(x) for x in columns[name][0].tolist()], columns[name][1])
        for name, curve in curves.items()
    }
    held_out = {"gemm": forms[gemm.form], **{name: _cross_validated(*columns[name], fit) for name, fit in fits.items()}}
    latency = LatencyModel(
        name=f"{model}:{machine}:sp{num_ranks}tp{base_tp}:{date}",
        num_layers=num_layers,
        num_ranks=num_ranks,
        gemm=gemm,
        decode=affine["decode"],
        prefill=affine["prefill"],
        comm=affine.get("comm", NOTHING),
        transfer=affine.get("transfer", NOTHING),
        host=affine.get("host", NOTHING),
        contention=(),
    )
    iterations = [row for row in rows if isinstance(row, IterationRow)]
    fitted, aside = [r for r in iterations if not r.held_out], [r for r in iterations if r.held_out]
    latency = _calibrate(latency, fitted, host_known="host" in columns)
    if fitted:
        in_sample["iteration"] = evaluate(latency, fitted)
    if aside:
        held_out["iteration"] = evaluate(latency, aside)
    return Profile(
        latency=latency,
        measured=True,
        model=model,
        machine=machine,
        base_tp=base_tp,
        versions=dict(versions or {}),
        date=date,
        rows=dict(Counter(r.component if isinstance(r, ComponentRow) else "iteration" for r in rows)),
        in_sample=in_sample,
        held_out=held_out,
        gemm_forms=forms,
    )


def _columns(rows: Iterable[Row]) -> dict[str, tuple[Floats, Floats]]:
    """(x, seconds) of every component that has rows, in the order of `COMPONENTS`, sorted by x."""
    columns = {}
    for name in COMPONENTS:
        pairs = sorted((r.x, r.seconds) for r in rows if isinstance(r, ComponentRow) and r.component == name)
        if pairs:
            columns[name] = (np.array([x for x, _ in pairs]), np.array([y for _, y in pairs]))
    return columns


def _require_spread(name: str, x: Floats) -> None:
    points = np.unique(x)
    if len(points) < MIN_POINTS or points[-1] < SPREAD * max(points[0], 1):
        raise FitRefusedError(
            f"{name}: {len(points)} different x in [{points[0]:g}, {points[-1]:g}] cannot tell slope from intercept: "
            f"measure at least {MIN_POINTS}, the largest {SPREAD:g} times the smallest (x = {COMPONENTS[name]})"
        )


def _non_negative(columns: Floats, y: Floats) -> Floats:
    """Least squares of relative errors with non-negative coefficients, for a handful of columns.

    Args:
        columns: shape (rows, coefficients).
        y: seconds, positive.
    """
    scaled = columns / y[:, None]
    best, least = np.zeros(columns.shape[1]), np.inf
    # The optimum is the plain least-squares solution of some subset of the columns: try all of the few subsets.
    for subset in range(1, 2 ** columns.shape[1]):
        chosen = [k for k in range(columns.shape[1]) if subset >> k & 1]
        solution = np.linalg.lstsq(scaled[:, chosen], np.ones(len(y)), rcond=None)[0]
        if (solution < 0).any():
            continue
        error = float(((scaled[:, chosen] @ solution - 1) ** 2).sum())
        if error < least:
            best, least = np.zeros(columns.shape[1]), error
            best[chosen] = solution
    return best


def _affine(x: Floats, y: Floats) -> Affine:
    slope, intercept = _non_negative(np.column_stack((x, np.ones_like(x))), y)
    return Affine(float(slope), float(intercept))


def _simplest(x: Floats, y: Floats) -> Callable[[Floats, Floats], Affine]:
    """How to fit a component that may bend: straight (Eqs. 10, 11), unless bending pays."""
    straight, bent = (_cross_validated(x, y, fit).mape for fit in (_affine, _bent))
    return _affine if straight <= SIMPLER * bent + 1e-9 else _bent


def _bent(x: Floats, y: Floats) -> Affine:
    """Straight pieces between geometrically spaced knots, flat below the first measured x."""
    points = np.unique(np.maximum(x, 1.0))
    count = min(BENDS, len(points) // 2) + 1
    knots = np.geomspace(points[0], points[-1], count)
    # Every piece adds what the component grows by along it, so growth is a non-negative coefficient of each.
    pieces = [np.clip((x - a) / (b - a), 0.0, 1.0 if b < knots[-1] else None) for a, b in pairwise(knots)]
    seconds = np.cumsum(_lawson_hanson(np.column_stack((np.ones_like(x), *pieces)) / y[:, None], np.ones_like(y)))
    slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
    return Curve.through((0.0, *knots.tolist()), (float(seconds[0]), *seconds.tolist()), float(slope))


def _lawson_hanson(columns: Floats, y: Floats) -> Floats:
    """The non-negative least-squares solution of `columns` @ x = y (Lawson and Hanson, 1974, chapter 23).

    Args:
        columns: shape (rows, coefficients).
        y: shape (rows,).
    """
    size = columns.shape[1]
    solution, free = np.zeros(size), np.zeros(size, dtype=bool)
    gradient = columns.T @ y
    enough = 1e-12 * float(np.abs(gradient).max())
    for _ in range(10 * size):
        if free.all() or gradient[~free].max() <= enough:
            break
        free[np.where(free, -np.inf, gradient).argmax()] = True
        while True:
            tried = np.zeros(size)
            tried[free] = np.linalg.lstsq(columns[:, free], y, rcond=None)[0]
            negative = free & (tried <= 0)
            if not negative.any():
                break
            # As far as all of them stay non-negative; the one that reaches zero is bound from here on.
            step = float((solution[negative] / (solution[negative] - tried[negative])).min())
            solution += step * (tried - solution)
            free &= solution > 1e-15 * solution.max()
            solution[~free] = 0.0
            if not free.any():
                break
        solution = tried
        gradient = columns.T @ (y - columns @ solution)
    return np.maximum(solution, 0.0)


def fit_gemm(x: Floats, y: Floats, padded: Sequence[int] = ()) -> tuple[GemmCurve, dict[str, FitError]]:
    """f_GEMM in the form with the least cross-validated MAPE; a simpler form that is within a tenth of it is preferred.

    Where batches are padded and at least half of the sizes were measured, it is the form `steps`: what runs is one of
    them, and each takes what it takes. With fewer, a line through two of them may lie off all that are between.

    Args:
        x: tokens of a rank.
        y: seconds.
        padded: as for `fit_profile`.

    Returns:
        The curve, and the cross-validated error of every form.

    Raises:
        FitRefusedError: x varies too little.
    """
    _require_spread("gemm", x)
    forms: dict[str, Callable[[Floats, Floats], GemmCurve]] = {
        "affine": _gemm_affine,
        "floor": _gemm_floor,
        "piecewise": _gemm_piecewise,
    }
    sizes = np.array([size for size in padded if size <= x.max()], dtype=np.float64)
    known = bool(len(sizes)) and len(np.unique(np.searchsorted(sizes, x[x <= sizes[-1]]))) >= len(sizes) / 2
    if known:
        forms["steps"] = lambda x, y: _gemm_steps(x, y, padded)
    errors = {form: _cross_validated(x, y, fit) for form, fit in forms.items()}
    if known:
        return forms["steps"](x, y), errors
    least = min(error.mape for error in errors.values())
    chosen = next(form for form in forms if errors[form].mape <= SIMPLER * least + 1e-9)
    return forms[chosen](x, y), errors


def _gemm_affine(x: Floats, y: Floats) -> GemmCurve:
    slope, intercept = _non_negative(np.column_stack((x, np.ones_like(x))), y)
    return GemmCurve.affine(float(slope), float(intercept))


def _gemm_floor(x: Floats, y: Floats) -> GemmCurve:
    """Flat to a knee, then linear; the knee is where the relative error is least."""

    def fit(knee: float) -> tuple[float, Floats]:
        columns = np.column_stack((np.ones_like(x), np.maximum(0.0, x - knee)))
        coefficients = _non_negative(columns, y)
        return float((((columns @ coefficients) / y - 1) ** 2).sum()), coefficients

    candidates = np.unique(x)
    # Between two measured points the error is smooth in the knee: look around the best point on a finer grid.
    coarse = int(np.argmin([fit(knee)[0] for knee in candidates]))
    around = np.linspace(candidates[max(coarse - 1, 0)], candidates[min(coarse + 1, len(candidates) - 1)], 65)
    knee = float(min(around, key=lambda k: fit(k)[0]))
    floor, slope = fit(knee)[1]
    return GemmCurve.floor(float(floor), knee, float(slope))


def _gemm_piecewise(x: Floats, y: Floats, max_knots: int = 16) -> GemmCurve:
    """Straight pieces between geometrically spaced measured points, made monotone, flat below the first one."""
    points = np.unique(x)
    if len(points) > max_knots:
        spaced = np.geomspace(max(points[0], 1), points[-1], max_knots)
        points = np.unique(points[np.abs(points[:, None] - spaced[None, :]).argmin(axis=0)])
    hats = np.column_stack([np.interp(x, points, unit) for unit in np.eye(len(points))])
    seconds = np.linalg.lstsq(hats / y[:, None], np.ones_like(y), rcond=None)[0]
    seconds = _isotonic(np.maximum(seconds, 0.0))
    top = x >= x[-1] / 4
    tail = (x[top], y[top]) if len(np.unique(x[top])) > 1 else (x, y)
    slope, _ = _non_negative(np.column_stack((tail[0], np.ones_like(tail[0]))), tail[1])
    if points[0] > 0:
        points, seconds = np.concatenate(([0.0], points)), np.concatenate((seconds[:1], seconds))
    return GemmCurve(tuple(points.tolist()), tuple(seconds.tolist()), float(slope), "piecewise")


def _gemm_steps(x: Floats, y: Floats, padded: Sequence[int]) -> GemmCurve:
    """Through every measured size, straight between them; each padded size holds down to the one before it."""
    sizes = np.array(padded, dtype=np.float64)
    ran = np.where(x <= sizes[-1], sizes[np.minimum(np.searchsorted(sizes, x), len(sizes) - 1)], x)
    points = np.unique(ran)
    # In logarithms: a pool's mean has the same relative distance to all of it.
    logs = _isotonic(np.array([float(np.median(np.log(y[ran == point]))) for point in points]))
    flat = logs <= logs[0] + np.log(PLATEAU)
    seconds = np.exp(np.where(flat, logs[flat].mean(), logs))
    steps: list[tuple[float, float]] = []
    before = -1.0
    for size in sizes[sizes <= points[-1]].tolist():
        value = float(np.interp(size, points, seconds))
        steps += [(start, value) for start in sorted({before + 1, size})]
        before = size
    steps += [(n, s) for n, s in zip(points.tolist(), seconds.tolist(), strict=True) if n > before]
    within = [False, *(a[1] == b[1] == c[1] for a, b, c in zip(steps, steps[1:], steps[2:], strict=False)), False]
    knots = [step for step, needless in zip(steps, within, strict=True) if not needless]
    top = points >= points[-1] / 4
    slope = _affine(points[top], seconds[top]).slope if top.sum() > 1 else seconds[-1] / points[-1]
    return GemmCurve(tuple(n for n, _ in knots), tuple(s for _, s in knots), float(slope), "steps")


def _isotonic(values: Floats) -> Floats:
    """The non-decreasing sequence nearest to `values` (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        pools.append((mean, count))
    return np.concatenate([np.full(count, mean) for mean, count in pools])


def _cross_validated(x: Floats, y: Floats, fit: Callable[[Floats, Floats], Fitted]) -> FitError:
    """Errors on rows that were left out: all rows of one x are left out together, every `FOLDS`-th x in one fold.

    The smallest and the largest x always stay in: predicting outside the measured range is not what is judged.
    """
    inner = np.unique(x)[1:-1]
    predicted, measured = [], []
    for fold in range(min(FOLDS, len(inner))):
        out = np.isin(x, inner[fold::FOLDS])
        curve = fit(x[~out], y[~out])
        predicted += [curve(value) for value in x[out].tolist()]
        measured += y[out].tolist()
    return fit_error(predicted, measured)


def _calibrate(model: LatencyModel, rows: Sequence[IterationRow], host_known: bool) -> LatencyModel:
    """Add host, contention, barrier and transfers from whole iterations."""
    with_barrier = _calibrate_as(model, rows, host_known)
    if model.num_ranks == 1 or not rows:
        return with_barrier
    without = _calibrate_as(replace(model, barrier=False), rows, host_known)
    # Both have as many coefficients, so the rows that they are fitted to can judge.
    return with_barrier if _mape(with_barrier, rows) <= WORTH * _mape(without, rows) + 1e-9 else without


def _mape(model: LatencyModel, rows: Sequence[IterationRow]) -> float:
    still = [row for row in rows if not any(row.load.incoming)]
    return evaluate(model, still or rows).mape


def _calibrate_as(model: LatencyModel, rows: Sequence[IterationRow], host_known: bool) -> LatencyModel:
    if not host_known:
        model = _fit_rest(model, [r for r in rows if not is_mixed(r) or not r.overlap])
    settings = sorted(
        {r.decode_sms for r in rows if is_mixed(r) and r.overlap}, key=lambda sms: (sms is not None, sms or 0)
    )
    contention = tuple(
        _fit_contention(model, sms, [r for r in rows if is_mixed(r) and r.overlap and r.decode_sms == sms])
        for sms in settings
    )
    model = replace(model, contention=contention)
    moving = [r for r in rows if any(r.load.incoming)]
    return fit_moving(model, moving) if moving else model


def is_mixed(row: IterationRow) -> bool:
    """Whether decodes and prefill meet in it."""
    return bool(any(row.load.decode_tokens) and any(row.load.prefill_tokens))


def standalone_parts(model: LatencyModel, row: IterationRow) -> tuple[list[float], float, list[float]]:
    """Standalone (linear, prefill, decode) times of a row, seconds a layer; linear and decode of each rank.

    With a barrier every rank has the times of the busiest one.
    """
    load = row.load
    estimator = model.given(load.decode_tokens, load.decode_context)
    prefill = estimator.prefill_path(load.max_shard, load.work)
    if model.barrier:
        n = model.num_ranks
        return [model.linear(load.max_load)] * n, prefill, [estimator.decode_path] * n
    decode = [
        model.decode(context) if tokens else 0.0
        for tokens, context in zip(load.decode_tokens, load.decode_context, strict=True)
    ]
    return [model.linear(tokens) for tokens in load.loads], prefill, decode


def _fit_rest(model: LatencyModel, rows: Sequence[IterationRow]) -> LatencyModel:
    """f_host, and how fast components run within iterations, from iterations without contention and transfers.

    A component alone runs back to back for all layers: at another clock, power and cache state than between the others.
    One factor for each of linear region, prefill path and decode path, where that lowers the cross-validated error; and
    what a prefill path costs in every iteration that has one, beyond what it costs alone.
    """
    rows = [r for r in rows if not any(r.load.incoming)]
    if len(rows) < MIN_POINTS:
        raise FitRefusedError(
            f"host: {len(rows)} iterations without overlap or transfers cannot identify the time outside the layers; "
            f"measure `host` rows, or at least {MIN_POINTS} decode-only, prefill-only or serial iterations"
        )
    y = np.array([r.seconds for r in rows])
    layers = np.array([model.num_layers * np.array(_critical(*standalone_parts(model, r))) for r in rows])
    sampled = np.array([float(max(r.load.decode_tokens)) for r in rows])
    with_prefill = np.array([float(any(r.load.prefill_tokens)) for r in rows])
    host = np.column_stack((np.ones_like(sampled), sampled, with_prefill)) / y[:, None]
    known, layers = layers.sum(axis=1) / y, layers / y[:, None]

    def plain(some: NDArray[np.bool_]) -> Floats:
        return np.concatenate((np.ones(3), robust_least_squares(host[some], 1 - known[some])))

    def factored(some: NDArray[np.bool_]) -> Floats:
        return robust_least_squares(np.hstack((layers, host))[some], np.ones(int(some.sum())))

    def cross_validated(fit: Callable[[NDArray[np.bool_]], Floats]) -> float:
        numbers = np.arange(len(y))
        errors = []
        for fold in range(FOLDS):
            out = numbers % FOLDS == fold
            errors.append(np.abs(np.hstack((layers, host))[out] @ fit(~out) - 1))
        return float(np.concatenate(errors).mean())

    enough = len(rows) >= 2 * FOLDS
    fit = factored if enough and cross_validated(factored) * WORTH < cross_validated(plain) else plain
    gemm, prefill, decode, constant, slope, path = (float(c) for c in fit(np.ones(len(y), dtype=bool)))
    return replace(
        model,
        gemm=model.gemm.scaled(gemm),
        all_reduce=model.all_reduce.scaled(gemm),
        prefill=model.prefill.scaled(prefill).raised(path / model.num_layers),
        comm=model.comm.scaled(prefill),
        decode=model.decode.scaled(decode),
        host=Affine(slope, constant),
    )


def _critical(linear: Sequence[float], prefill: float, decode: Sequence[float]) -> tuple[float, float, float]:
    """Linear, prefill and decode time of the rank that ends last where the paths run one after the other."""
    own, path = max(zip(linear, decode, strict=True), key=sum)
    return own, prefill, path


def robust_least_squares(columns: Floats, y: Floats) -> Floats:
    """Non-negative least squares that outliers do not rule (Huber).

    Args:
        columns: shape (rows, coefficients).
        y: shape (rows,).
    """
    weights = np.ones_like(y)
    solution = np.zeros(columns.shape[1])
    for _ in range(10):
        scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
        solution = _lawson_hanson(columns / scale * weights[:, None], y * weights) / scale
        weights = np.sqrt(OUTLIER / np.maximum(np.abs(columns @ solution - y), OUTLIER))
    return solution


def _fit_contention(model: LatencyModel, sms: int | None, rows: Sequence[IterationRow]) -> Contention:
    """alpha, beta and gamma of one overlap setting; gamma = 0 (Eq. 4) unless it lowers the cross-validated error."""
    rows = [r for r in rows if not any(r.load.incoming)]
    parts = [standalone_parts(model, r) for r in rows]
    linear, decode_of = (np.array([p[k] for p in parts]).reshape(-1, model.num_ranks) for k in (0, 2))
    prefill, decode = np.array([p for _, p, _ in parts]), decode_of.max(axis=1)
    where = "without a partition" if sms is None else f"with decode_sms={sms}"
    for name, slower, faster in (("alpha", decode, prefill), ("beta", prefill, decode)):
        if not (slower > faster).any():
            path = "decode" if name == "alpha" else "prefill"
            raise FitRefusedError(
                f"{name}: {path} attention is the slower path in none of the {len(rows)} overlapped mixed iterations "
                f"{where}; measure iterations with more {path} work"
            )
    y = np.array([r.seconds for r in rows])
    host = np.array([model.host(max(r.load.decode_tokens)) for r in rows])
    attention = _Attention(linear, prefill, decode_of, (y - host) / model.num_layers, model.num_layers / y)
    hidden, shared = (attention.cross_validated(shares) for shares in (_NO_SHARE, _SHARES))
    shares = _NO_SHARE if hidden <= SIMPLER * shared + 1e-9 else _SHARES
    alpha, beta, gamma = attention.fit(shares)
    return Contention(alpha, beta, sms, gamma)


_FACTORS = np.linspace(1.0, 5.0, 401)
_NO_SHARE = (0.0,)
_SHARES = tuple(np.linspace(0.0, 1.0, 21).tolist())


@dataclass(frozen=True, slots=True)
class _Attention:
    """What fits alpha, beta and gamma of overlapped iterations.

    Args:
        linear: shared linear region of each rank, seconds a layer; shape (iterations, N).
        prefill: prefill path of each, seconds a layer.
        decode: decode path of each rank, seconds a layer; shape (iterations, N).
        layer: measured seconds of one layer of each.
        weight: turns an error of a layer into one relative to the iteration.
    """

    linear: Floats
    prefill: Floats
    decode: Floats
    layer: Floats
    weight: Floats

    def fit(self, shares: Sequence[float]) -> tuple[float, float, float]:
        """The (alpha, beta, gamma) of least squares of relative errors, gamma out of `shares`."""
        best, least = (1.0, 1.0, 0.0), np.inf
        for gamma in shares:
            alpha, beta = 1.0, 1.0
            for _ in range(20):
                before = (alpha, beta)
                alpha = float(_FACTORS[self._squares(_FACTORS, beta, gamma).argmin()])
                beta = float(_FACTORS[self._squares(alpha, _FACTORS, gamma).argmin()])
                if (alpha, beta) == before:
                    break
            squares = float(self._squares(np.array([alpha]), beta, gamma)[0])
            if squares < least - 1e-12:
                best, least = (alpha, beta, gamma), squares
        return best

    def cross_validated(self, shares: Sequence[float]) -> float:
        """Mean absolute relative error of iterations that were left out of the fit, every `FOLDS`-th at a time."""
        errors = []
        numbers = np.arange(len(self.layer))
        for fold in range(min(FOLDS, len(numbers))):
            out = numbers % FOLDS == fold
            alpha, beta, gamma = self._of(~out).fit(shares)
            errors.append(np.abs(self._of(out)._errors(np.array([alpha]), beta, gamma)[0]))
        return float(np.concatenate(errors).mean())

    def _of(self, chosen: NDArray[np.bool_]) -> _Attention:
        return _Attention(*(getattr(self, name)[chosen] for name in self.__slots__))

    def _squares(self, alpha: ArrayLike, beta: ArrayLike, gamma: float) -> Floats:
        """Squared errors, beyond OUTLIER in proportion to the error (Huber)."""
        errors = np.abs(self._errors(alpha, beta, gamma))
        return np.where(errors <= OUTLIER, errors**2, OUTLIER * (2 * errors - OUTLIER)).sum(axis=-1)

    def _errors(self, alpha: ArrayLike, beta: ArrayLike, gamma: float) -> Floats:
        boundary = self.linear.max(axis=1)
        waiting = np.multiply.outer(beta, self.prefill) + boundary
        predicted: Any = 0.0
        for linear, decode in zip(self.linear.T, self.decode.T, strict=True):  # of each rank
            shared = np.minimum(self.prefill, np.maximum(decode - (boundary - linear), 0.0))
            of_rank = np.maximum(waiting, np.multiply.outer(alpha, decode) + linear) + gamma * shared
            predicted = np.maximum(predicted, of_rank)
        return np.atleast_2d((predicted - self.layer) * self.weight)


def fit_moving(model: LatencyModel, rows: Sequence[IterationRow]) -> LatencyModel:
    """The exposed share of transfers, and how much longer one takes in an iteration than alone if that pays."""
    if model.transfer == NOTHING:
        raise FitRefusedError("transfer: iterations with incoming KV but no transfer rows; measure the transfer alone")
    y = np.array([r.seconds for r in rows])
    arriving = np.array([model.transfer(max(r.load.incoming)) for r in rows])
    still = [replace(r.load, incoming=()) for r in rows]
    without = [model.predict(b, overlap=r.overlap, decode_sms=r.decode_sms) for b, r in zip(still, rows, strict=True)]
    host = np.array([made.host for made in without])
    layer = (np.array([made.seconds for made in without]) - host) / model.num_layers

    def errors(factor: float, share: float) -> Floats:
        transfer = factor * arriving
        longer, shorter = np.maximum(layer, transfer), np.minimum(layer, transfer)
        return np.abs((host + model.num_layers * (longer + share * shorter)) / y - 1)

    def fit(factors: Sequence[float], some: NDArray[np.bool_]) -> tuple[float, float]:
        # The mean error, not its square: how long the host takes over a transfer has a long tail.
        choices = [(factor, share) for factor in factors for share in _EXPOSED]
        return min(choices, key=lambda choice: float(errors(*choice)[some].mean()))

    def cross_validated(factors: Sequence[float]) -> float:
        numbers = np.arange(len(rows))
        folds = [numbers % FOLDS == fold for fold in range(min(FOLDS, len(rows)))]
        return float(
            np.concatenate([errors(*fit(factors, ~out if (~out).any() else out))[out] for out in folds]).mean()
        )

    alone = cross_validated((1.0,)) <= WORTH * cross_validated(_SLOWDOWNS) + 1e-3
    factor, share = fit((1.0,) if alone else _SLOWDOWNS, np.ones(len(rows), dtype=bool))
    return replace(model, transfer=model.transfer.scaled(factor), transfer_exposed=share)


_SLOWDOWNS = tuple(np.linspace(1.0, 4.0, 13).tolist())
_EXPOSED = tuple(np.linspace(0.0, 1.0, 51).tolist())
