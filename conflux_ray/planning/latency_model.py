"""How long an iteration takes (paper, section 6.2, Eqs. 2-6, and appendix D, Eqs. 7-12).

An iteration has two boundaries a layer: the shared linear region ends when the rank with the most tokens ends, the
attention region when the slower of the prefill and the decode path ends:

    T_iter = L * T_layer + f_host(max_r n_r^d)
    T_layer = T_X <+> (f_GEMM(max_r (n_r^p + n_r^d)) + f_AR(same) + T_ATTN)
    T_ATTN = max(beta * T_P, alpha * T_D), or T_P + T_D without overlap; the other path's time when one is absent
    T_D = max_r f_D(sum of c_i on r),  T_P = f_comm(max_r n_r^p) + f_P(1/N * sum of l_i (c_i + (l_i + 1) / 2))

Three terms are not the paper's: f_host, the time outside the layers (launch, sampling, messages); f_AR, the
all-reduces of a base tensor parallelism whose profile keeps them apart from f_GEMM; T_X, the KV that arrives at the
busiest target of this iteration's transitions. T_X runs beside the layers, so `<+>` is max(a, b) + e * min(a, b), with
e the measured share of the shorter one that stays exposed.

Without a barrier (`LatencyModel.barrier` is False) the first boundary binds the prefill path alone, whose collectives
need every rank. With g_r and d_r the linear region and the decode path of rank r, G = max_r g_r:

    T_layer = max_r(max(G + beta * T_P, g_r + alpha * d_r) + gamma * min(T_P, d_r - (G - g_r))), overlapped
    T_layer = max_r(g_r + d_r) + T_P, one path after the other

Units: seconds and tokens. Component functions are per layer, except f_host.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, inf


@dataclass(frozen=True)
class Affine:
    """f(x) = slope * x + intercept (Eqs. 7, 8, 10, 11), seconds.

    Raises:
        ValueError: a coefficient is negative; time would fall as work grows, and the dispatcher's search needs order.
    """

    slope: float
    intercept: float = 0.0

    def __post_init__(self) -> None:
        if not (self.slope >= 0 and self.intercept >= 0):
            raise ValueError(f"coefficients of {self} must be non-negative; measure again or refit")

    def __call__(self, x: float) -> float:
        return self.slope * x + self.intercept

    def scaled(self, factor: float) -> Affine:
        """The component that takes `factor` times as long."""
        return Affine(self.slope * factor, self.intercept * factor)

    def raised(self, seconds: float) -> Affine:
        """The component that takes `seconds` longer, whatever x."""
        return Affine(self.slope, self.intercept + seconds)


NOTHING = Affine(0.0)
"""The component that takes no time."""


LARGEST_TABLE = 65536
"""Most entries of a curve's table of whole tokens."""


@dataclass(frozen=True)
class GemmCurve:
    """f_GEMM as straight pieces between knots, then `slope` (Eq. 3 asks only that it does not decrease).

    One class holds the forms that fitting compares: `affine` (Eq. 7) has the single knot 0; `floor` is flat from 0 to
    a knee, because the weights are read whatever the batch, and linear after it; `piecewise` follows measured steps.

    Args:
        tokens: knots, increasing, the first one 0.
        seconds: values at the knots, not decreasing.
        slope: seconds per token after the last knot.
        form: how it was fitted, for reports.

    Raises:
        ValueError: the knots are not such.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    slope: float
    form: str = "affine"

    def __post_init__(self) -> None:
        _check_knots("f_GEMM", self.tokens, self.seconds, self.slope)

    @classmethod
    def affine(cls, slope: float, intercept: float) -> GemmCurve:
        """Eq. 7."""
        return cls((0.0,), (intercept,), slope, "affine")

    @classmethod
    def floor(cls, floor: float, knee: float, slope: float) -> GemmCurve:
        """`floor` seconds up to `knee` tokens, then `slope` seconds a token more."""
        if knee <= 0:
            return cls((0.0,), (floor,), slope, "floor")
        return cls((0.0, knee), (floor, floor), slope, "floor")

    def __call__(self, n: float) -> float:
        return _interpolate(self.tokens, self.seconds, self.slope, n)

    def scaled(self, factor: float) -> GemmCurve:
        """The curve that takes `factor` times as long."""
        return GemmCurve(self.tokens, tuple(s * factor for s in self.seconds), self.slope * factor, self.form)

    @cached_property
    def knee(self) -> float:
        """Tokens up to which f_GEMM costs no more than it does for none."""
        flat = [n for n, s in zip(self.tokens, self.seconds, strict=True) if s == self.seconds[0]]
        return float("inf") if len(flat) == len(self.tokens) and self.slope == 0 else flat[-1]

    @cached_property
    def table(self) -> array[float]:
        """f(0), f(1), ... up to the last knot: a step asks for the same few thousand values again and again."""
        return _table(self, self.tokens[-1])


@dataclass(frozen=True)
class Curve(Affine):
    """A component that bends: straight pieces between knots, then the line `slope`, `intercept`.

    It is an `Affine` for those who only need the far end, where that line holds.

    Args:
        knots: increasing, the first one 0.
        seconds: values at the knots, not decreasing; the last one lies on the line.

    Raises:
        ValueError: the knots are not such.
    """

    knots: tuple[float, ...] = (0.0,)
    seconds: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        # Where the last piece is the steepest, its intercept lies below zero, though no time is.
        _check_knots("curve", self.knots, self.seconds, self.slope)

    @classmethod
    def through(cls, knots: Sequence[float], seconds: Sequence[float], slope: float) -> Curve:
        """The curve with these knots that goes on with `slope`."""
        return cls(slope, seconds[-1] - slope * knots[-1], tuple(knots), tuple(seconds))

    def __call__(self, x: float) -> float:
        return _interpolate(self.knots, self.seconds, self.slope, x)

    def scaled(self, factor: float) -> Curve:
        """The component that takes `factor` times as long."""
        return Curve.through(self.knots, [s * factor for s in self.seconds], self.slope * factor)

    def raised(self, seconds: float) -> Curve:
        """The component that takes `seconds` longer, whatever x."""
        return Curve.through(self.knots, [s + seconds for s in self.seconds], self.slope)

    @cached_property
    def table(self) -> array[float]:
        """f(0), f(1), ... up to the last knot."""
        return _table(self, self.knots[-1])

    @cached_property
    def lines(self) -> tuple[list[float], list[float], list[float]]:
        """Where each piece but the first begins, and slope and intercept of each."""
        ends = zip(pairwise(self.knots), pairwise(self.seconds), strict=True)
        slopes = [*((b - a) / (y - x) for (x, y), (a, b) in ends), self.slope]
        starts = zip(self.knots, self.seconds, slopes, strict=True)
        return list(self.knots[1:]), slopes, [y - slope * x for x, y, slope in starts]


def _bent(component: Affine) -> Curve:
    """The component as a curve."""
    if isinstance(component, Curve):
        return component
    return Curve.through((0.0,), (component.intercept,), component.slope)


def _check_knots(name: str, knots: Sequence[float], seconds: Sequence[float], slope: float) -> None:
    increasing = all(a < b for a, b in pairwise(knots))
    monotone = all(a <= b for a, b in pairwise(seconds))
    if not knots or knots[0] != 0 or len(knots) != len(seconds) or not increasing:
        raise ValueError(f"{name}: knots {knots} must start at 0, increase, and each have a value")
    if not monotone or not seconds[0] >= 0 or not slope >= 0:
        raise ValueError(f"{name} must not decrease: seconds={seconds}, slope={slope}")


def _interpolate(knots: Sequence[float], seconds: Sequence[float], slope: float, x: float) -> float:
    last = knots[-1]
    if x >= last:
        return seconds[-1] + slope * (x - last)
    k = bisect_right(knots, x) - 1
    x0, x1, y0, y1 = knots[k], knots[k + 1], seconds[k], seconds[k + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _table(curve: GemmCurve | Curve, end: float) -> array[float]:
    return array("d", (curve(n) for n in range(min(ceil(end), LARGEST_TABLE))))


@dataclass(frozen=True, slots=True)
class Contention:
    """How much the two attention paths slow each other down when they overlap (Eq. 4).

    Eq. 4 is gamma = 0: the longer path hides the shorter one, however near they are. Where both want all of the GPU's
    multiprocessors, part of the shorter one comes on top.

    Args:
        alpha: factor on the decode path, at least 1.
        beta: factor on the prefill path, at least 1.
        decode_sms: the SM partition of the decode stream for which this holds; None is no partition.
        gamma: share of the shorter path that the longer one does not hide, 0..1.
    """

    alpha: float
    beta: float
    decode_sms: int | None = None
    gamma: float = 0.0

    def __post_init__(self) -> None:
        if not (self.alpha >= 1 and self.beta >= 1):
            raise ValueError(f"alpha={self.alpha} and beta={self.beta} are slowdowns and must be at least 1")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma} is a share and must be in [0, 1]")

    def attention(self, prefill: float, decode: float, ahead: float = 0.0) -> float:
        """T_ATTN of paths that take `prefill` and `decode` seconds alone.

        Args:
            ahead: seconds that the decode path begins before the prefill path.
        """
        shared = min(prefill, max(decode - ahead, 0.0))
        return max(self.beta * prefill, self.alpha * decode - ahead) + self.gamma * shared


@dataclass(frozen=True, slots=True)
class IterationLoad:
    """What one iteration computes. Tuples over ranks have one entry for each of the N logical ranks.

    Args:
        decode_tokens: n_r^d, resident decodes of each rank.
        decode_context: sum of their context on each rank, tokens.
        prefill_tokens: n_r^p, prefill tokens of each rank; empty means none.
        chunks: (l_i, c_i) of each prefill chunk: its length and the context before it, tokens.
        incoming: tokens whose KV arrives at each rank from the others; empty means none.
    """

    decode_tokens: tuple[int, ...]
    decode_context: tuple[int, ...]
    prefill_tokens: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    incoming: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.decode_tokens)
        if len(self.decode_context) != n or any(len(t) not in (0, n) for t in (self.prefill_tokens, self.incoming)):
            raise ValueError(f"every tuple over ranks of {self} must have {n} entries")
        if sum(self.prefill_tokens) != sum(length for length, _ in self.chunks):
            raise ValueError(f"prefill_tokens {self.prefill_tokens} do not add up to the chunks {self.chunks}")

    @property
    def loads(self) -> tuple[int, ...]:
        """n_r^p + n_r^d of every rank."""
        prefill = self.prefill_tokens or (0,) * len(self.decode_tokens)
        return tuple(p + d for p, d in zip(prefill, self.decode_tokens, strict=True))

    @property
    def max_load(self) -> int:
        """max_r (n_r^p + n_r^d), the argument of f_GEMM in Eq. 3."""
        return max(self.loads)

    @property
    def max_shard(self) -> int:
        """max_r n_r^p, the argument of f_comm in Eq. 6."""
        return max(self.prefill_tokens, default=0)

    @property
    def work(self) -> float:
        """Prefill attention workload of all chunks (Eq. 9), token pairs."""
        return sum(chunk_work(length, context) for length, context in self.chunks)


def chunk_work(length: int, context: int) -> float:
    """Causal attention workload of a chunk, l (c + (l + 1) / 2), token pairs (Eq. 9)."""
    return length * (context + (length + 1) / 2)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted iteration with its parts; the parts are per layer. `overlap` and `decode_sms` are what it assumes."""

    seconds: float
    gemm: float
    prefill: float
    decode: float
    attention: float
    transfer: float
    host: float
    overlap: bool
    decode_sms: int | None


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The latency of an iteration of one model on one machine with N logical ranks.

    Args:
        name: identity of the profile it came from.
        num_layers: L.
        num_ranks: N. f_comm holds for this degree only.
        gemm: f_GEMM(tokens of the busiest rank).
        decode: f_D(aggregate context of a rank).
        prefill: f_P(workload of a rank, token pairs).
        comm: f_comm(largest shard): both all-to-alls.
        barrier: whether every rank waits for the busiest one before its attention (Eq. 2). Without one, a rank begins
            its decode attention when its own linear region ends; only the prefill path waits for all.
        contention: the overlap settings to choose from; empty if the engine cannot overlap.
        serial: whether running the paths one after the other is a choice too.
        all_reduce: f_AR(tokens of the busiest rank); NOTHING where `gemm` was measured with it.
        transfer: T_X(tokens arriving at the busiest target).
        transfer_exposed: e in 0..1; 0 hides the shorter of transfer and layers, 1 adds them.
        host: f_host(sampled tokens of the busiest rank), seconds per iteration.

    Raises:
        ValueError: a size is not positive, `transfer_exposed` is out of range, or no attention setting is left.
    """

    name: str
    num_layers: int
    num_ranks: int
    gemm: GemmCurve
    decode: Affine
    prefill: Affine
    comm: Affine
    contention: tuple[Contention, ...] = (Contention(1.0, 1.0),)
    serial: bool = True
    all_reduce: Affine = NOTHING
    transfer: Affine = NOTHING
    transfer_exposed: float = 0.0
    host: Affine = NOTHING
    barrier: bool = True

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_ranks < 1:
            raise ValueError(f"num_layers={self.num_layers} and num_ranks={self.num_ranks} must be at least 1")
        if not 0 <= self.transfer_exposed <= 1:
            raise ValueError(f"transfer_exposed={self.transfer_exposed} must be in [0, 1]")
        if not self.contention and not self.serial:
            raise ValueError("neither overlapped nor serial attention is allowed; set `serial` or give `contention`")

    @property
    def free_level(self) -> float:
        """Tokens of a rank up to which the shared linear region costs no more than for an idle one."""
        return self.gemm.knee if self.all_reduce.slope == 0 else 0

    def given(self, decode_tokens: Sequence[int], decode_context: Sequence[int]) -> IterationEstimator:
        """The model with the resident decodes filled in: what remains depends on the prefills alone.

        Args:
            decode_tokens: n_r^d per rank.
            decode_context: aggregate context per rank, tokens.

        Raises:
            ValueError: there are not N ranks.
        """
        if len(decode_tokens) != self.num_ranks or len(decode_context) != self.num_ranks:
            raise ValueError(
                f"latency model {self.name!r} is for {self.num_ranks} ranks, the decode state has "
                f"{len(decode_tokens)}; use a profile of that degree"
            )
        return IterationEstimator(self, decode_tokens, decode_context)

    def predict(self, load: IterationLoad, *, overlap: bool | None = None, decode_sms: int | None = None) -> Prediction:
        """Latency of `load` (Eqs. 2-6).

        Args:
            load: the iteration.
            overlap: whether the attention paths overlap; None takes the fastest setting of the model.
            decode_sms: the partition if they do.

        Raises:
            ValueError: another number of ranks, or a setting that the model does not know.
        """
        estimator = self.given(load.decode_tokens, load.decode_context)
        shard, work = load.max_shard, load.work
        prefill = estimator.prefill_path(shard, work)
        if overlap is None:
            overlap, decode_sms = estimator.setting(shard, work)
        gemm = self.linear(load.max_load)
        if self.barrier:
            attention = self._attention(prefill, estimator.decode_path, overlap, decode_sms)
        else:
            attention = max(
                self._attention(prefill, self._decode_path(tokens, context), overlap, decode_sms, gemm - own)
                for tokens, context, own in zip(
                    load.decode_tokens, load.decode_context, map(self.linear, load.loads), strict=True
                )
            )
        incoming = max(load.incoming, default=0)
        transfer = self.transfer(incoming) if incoming else 0.0
        layer = self.with_transfer(gemm + attention, transfer)
        return Prediction(
            seconds=self.num_layers * layer + estimator.host,
            gemm=gemm,
            prefill=prefill,
            decode=estimator.decode_path,
            attention=attention,
            transfer=transfer,
            host=estimator.host,
            overlap=overlap,
            decode_sms=decode_sms if overlap else None,
        )

    def linear(self, max_load: float) -> float:
        """Time of the shared linear region with `max_load` tokens on the busiest rank (Eq. 3), seconds a layer."""
        if not max_load:
            return 0.0
        return self.gemm(max_load) + self.all_reduce(max_load)

    def _decode_path(self, tokens: int, context: int) -> float:
        """T_D of one rank (Eq. 5), seconds a layer."""
        return self.decode(context) if tokens else 0.0

    def _attention(
        self, prefill: float, decode: float, overlap: bool, decode_sms: int | None, ahead: float = 0.0
    ) -> float:
        """T_ATTN as seen from the first boundary, of a rank that reached it `ahead` seconds earlier."""
        if not prefill or not decode or not overlap:
            return prefill + decode - ahead if decode else prefill
        for c in self.contention:
            if c.decode_sms == decode_sms:
                return c.attention(prefill, decode, ahead)
        known = [c.decode_sms for c in self.contention]
        raise ValueError(f"decode_sms={decode_sms} is not among the settings {known} of latency model {self.name!r}")

    def with_transfer(self, layer: float, transfer: float) -> float:
        """Time of a layer of `layer` seconds beside a KV transfer of `transfer` seconds."""
        if not transfer:
            return layer
        return max(layer, transfer) + self.transfer_exposed * min(layer, transfer)


class IterationEstimator:
    """A latency model with the resident decodes fixed, for the dispatcher's many queries in one step.

    Latency depends on a prefill assignment through four numbers only: the largest load, the largest shard, the total
    attention work and the KV arriving at the busiest target. It does not decrease in any of them. Without a barrier
    these four give an upper bound, which `LatencyModel.predict` reaches where all ranks are equally loaded, as
    waterfill leaves them.
    """

    def __init__(self, model: LatencyModel, decode_tokens: Sequence[int], decode_context: Sequence[int]) -> None:
        self.model = model
        self.decode_path = model.decode(max(decode_context)) if any(decode_tokens) else 0.0  # T_D, Eq. 5
        self.host = model.host(max(decode_tokens))
        self._serial = self.decode_path if model.serial else inf
        self._overlapped = [(c.beta, c.alpha * self.decode_path, c.gamma) for c in model.contention]
        self._per_token = model.comm.slope
        self._per_pair = model.prefill.slope / model.num_ranks
        self._per_chunk = model.comm.intercept + model.prefill.intercept
        self._bent = isinstance(model.comm, Curve) or isinstance(model.prefill, Curve)
        if self._bent:
            comm, attend = _bent(model.comm), _bent(model.prefill)
            self._comm, self._comm_table = comm, comm.table
            self._bends, self._slopes, self._intercepts = attend.lines
            self._share = 1 / model.num_ranks
        self._gemm, self._gemm_slope, self._table = model.gemm, model.gemm.slope, model.gemm.table
        self._last_knot, self._at_last_knot = model.gemm.tokens[-1], model.gemm.seconds[-1]
        self._all_reduce_slope, self._all_reduce_intercept = model.all_reduce.slope, model.all_reduce.intercept
        self._transfer_slope, self._transfer_intercept = model.transfer.slope, model.transfer.intercept
        self._transfer_exposed = model.transfer_exposed
        self._num_layers = model.num_layers

    @property
    def seconds_per_pair(self) -> float:
        """Time of one more token pair of prefill attention in all layers, seconds of an iteration (Eqs. 6, 9).

        Of a curve that bends it is that beyond the last bend.
        """
        return self._per_pair * self._num_layers

    def prefill_path(self, shard: float, work: float) -> float:
        """T_P (Eq. 6), seconds a layer: `shard` tokens on the rank with most, `work` token pairs over all ranks."""
        if not shard:
            return 0.0
        if not self._bent:
            return self._per_token * shard + self._per_pair * work + self._per_chunk
        try:
            comm = self._comm_table[shard]  # type: ignore[call-overload]
        except (IndexError, TypeError):  # beyond the table, or no whole tokens
            comm = self._comm(shard)
        share = self._share * work
        k = bisect_right(self._bends, share)
        return comm + self._intercepts[k] + self._slopes[k] * share

    def attention(self, prefill: float) -> float:
        """T_ATTN (Eq. 4) under the fastest setting, for a prefill path of `prefill` seconds."""
        if not prefill or not self.decode_path:
            return prefill + self.decode_path
        fastest = prefill + self._serial
        shorter = min(prefill, self.decode_path)
        for beta, slowed_decode, gamma in self._overlapped:
            slower = beta * prefill
            if slower < slowed_decode:
                slower = slowed_decode
            slower += gamma * shorter
            if slower < fastest:
                fastest = slower
        return fastest

    def setting(self, shard: float, work: float) -> tuple[bool, int | None]:
        """The (overlap, decode_sms) that `attention` assumes; the first of equals, overlap before serial."""
        prefill = self.prefill_path(shard, work)
        if self.model.contention and (not prefill or not self.decode_path):
            return True, self.model.contention[0].decode_sms
        fastest = self.attention(prefill)
        for c in self.model.contention:
            if c.attention(prefill, self.decode_path) <= fastest:
                return True, c.decode_sms
        return False, None

    def seconds(self, load: float, shard: float, work: float, incoming: float = 0) -> float:
        """T_iter (Eq. 2), seconds.

        Args:
            load: max_r (n_r^p + n_r^d), tokens.
            shard: max_r n_r^p, tokens.
            work: total prefill attention work, token pairs.
            incoming: tokens whose KV arrives at the busiest target.
        """
        # `LatencyModel.linear`, `with_transfer`, `prefill_path` and `attention` in one function: called one by one they
        # take twice the time, and a step asks more than ten times. A test holds both to the last bit.
        decode = self.decode_path
        if shard:
            if self._bent:
                try:
                    comm = self._comm_table[shard]  # type: ignore[call-overload]
                except (IndexError, TypeError):
                    comm = self._comm(shard)
                share = self._share * work
                k = bisect_right(self._bends, share)
                prefill = comm + self._intercepts[k] + self._slopes[k] * share
            else:
                prefill = self._per_token * shard + self._per_pair * work + self._per_chunk
            if prefill and decode:
                attention = prefill + self._serial
                shorter = prefill if prefill < decode else decode
                for beta, slowed_decode, gamma in self._overlapped:
                    slower = beta * prefill
                    if slower < slowed_decode:
                        slower = slowed_decode
                    slower += gamma * shorter
                    if slower < attention:
                        attention = slower
            else:
                attention = prefill + decode
        else:
            attention = decode
        if load >= self._last_knot:
            gemm = self._at_last_knot + self._gemm_slope * (load - self._last_knot)
        else:
            try:
                gemm = self._table[load]  # type: ignore[call-overload]
            except (IndexError, TypeError):
                gemm = self._gemm(load)
        layer = attention
        if load:
            layer += gemm + (self._all_reduce_slope * load + self._all_reduce_intercept)
        if incoming:
            transfer = self._transfer_slope * incoming + self._transfer_intercept
            if transfer > layer:
                layer, transfer = transfer, layer
            layer += self._transfer_exposed * transfer
        return self._num_layers * layer + self.host
