"""Iteration times and memory of a machine, from stated figures or from measured profiles.

A `Device` is a list of figures, each with its source; `StatedHardware` turns them and a model's shape into the
planner's `LatencyModel` for any (SP degree, base TP). `docs/simulator.md` compares the result with measured iterations.
A measured `Profile` replaces the stated model of its (SP degree, base TP): see `MeasuredHardware`.

Units: seconds, tokens, bytes, operations per second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from conflux_ray.planning.latency_model import NOTHING, Affine, Contention, GemmCurve, LatencyModel
from conflux_ray.planning.profile import Profile

GIB = 2**30
DTYPE_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with a gated FFN, from its config.json on the Hugging Face hub.

    Args:
        name: of the model.
        layers: L.
        hidden: H.
        intermediate: width of the FFN.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: size of one head.
        vocab: rows of the embedding and of the output projection.
        max_model_len: longest request, tokens.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_model_len: int

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Parameters of one layer's linear operators."""
        projections = self.hidden * (self.q_width + 2 * self.kv_width) + self.q_width * self.hidden
        return projections + 3 * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters; embedding and output projection are not tied in these models."""
        return DTYPE_BYTES * (self.layers * self.layer_weights + 2 * self.vocab * self.hidden)

    @property
    def kv_layer_bytes(self) -> int:
        """KV of one token in one layer, bytes."""
        return 2 * self.kv_width * DTYPE_BYTES

    @property
    def kv_bytes(self) -> int:
        """KV of one token, bytes."""
        return self.layers * self.kv_layer_bytes


MODELS = {
    "llama-8b": ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "qwen-14b": ModelShape("Qwen3-14B", 40, 5120, 17408, 40, 8, 128, 151936, 40960),
    "qwen-32b": ModelShape("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936, 40960),
}
"""The models of section 8.1."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """Stated figures of one GPU in a node with full NVLink.

    Args:
        name: for reports.
        memory: bytes that the framework sees.
        flops: dense bfloat16 peak.
        memory_bandwidth: bytes per second.
        gemm_share: of `flops`, in large matrix products.
        weight_share: of `memory_bandwidth`, when a matrix product of few tokens reads its weights.
        decode_share: of `memory_bandwidth`, in decode attention.
        decode_fixed: of one layer's decode attention, seconds.
        prefill_share: of `flops` in prefill attention, by query heads of a GPU, straight between entries.
        prefill_fixed: of one layer's prefill attention, seconds.
        all_reduce_fixed: by TP degree, of one all-reduce, seconds.
        all_reduce_byte: by TP degree, seconds per byte of the reduced tensor.
        exchange_fixed: of one all-to-all, seconds.
        exchange_bandwidth: of an all-to-all, bytes sent per GPU and second.
        copy_bandwidth: of a copy between two GPUs, bytes per second.
        copy_fixed: of such a copy, seconds.
        copy_exposed: share of a KV transfer that is not hidden behind the layers, 0..1.
        contention: alpha and beta of overlapped attention paths.
        host: of an iteration outside its layers, seconds.
        decode_sms: slowdown of decode on so many of the SMs.
        prefill_sms: slowdown of prefill on so many of the SMs.
        multiplex: slowdown of both when two phases share the GPU by SM partition.
        num_sms: of the device.
    """

    name: str
    memory: Figure
    flops: Figure
    memory_bandwidth: Figure
    gemm_share: Figure
    weight_share: Figure
    decode_share: Figure
    decode_fixed: Figure
    prefill_share: dict[int, Figure]
    prefill_fixed: Figure
    all_reduce_fixed: dict[int, Figure]
    all_reduce_byte: dict[int, Figure]
    exchange_fixed: Figure
    exchange_bandwidth: Figure
    copy_bandwidth: Figure
    copy_fixed: Figure
    copy_exposed: Figure
    contention: tuple[Figure, Figure]
    host: Figure
    decode_sms: dict[int, Figure]
    prefill_sms: dict[int, Figure]
    multiplex: Figure
    num_sms: int = 132

    def describe(self) -> list[tuple[str, float, str]]:
        """(name, value, source) of every figure."""
        rows: list[tuple[str, float, str]] = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Figure):
                rows.append((name, value.value, value.source))
            elif isinstance(value, dict):
                rows += [(f"{name}[{key}]", figure.value, figure.source) for key, figure in value.items()]
            elif isinstance(value, tuple):
                rows += [(f"{name}[{key}]", f.value, f.source) for key, f in zip(("alpha", "beta"), value, strict=True)]
        return rows


_SHEET_H100 = "NVIDIA H100 SXM5 data sheet"
_SHEET_H200 = "NVIDIA H200 SXM data sheet"
_READ = "one reading on 2x H200, Qwen3-14B layer, torch 2.11, FlashAttention 3"
_DGX = "fit to public NCCL figures of DGX H100"
_SHAPE = "relative scaling with SMs, the shape only: no measurement of these models"
_ASSUMED = "assumed, not measured"

_H200 = Device(
    name="H200",
    memory=Figure(139.8 * GIB, f"{_SHEET_H200}: 141 GB; what CUDA reports of it"),
    flops=Figure(989e12, _SHEET_H200),
    memory_bandwidth=Figure(4.8e12, _SHEET_H200),
    gemm_share=Figure(0.662, f"{_READ}: 646-663 TFLOP/s from 512 tokens on"),
    weight_share=Figure(0.78, f"{_READ}: 176 us for 660 MB of weights at 1 token"),
    decode_share=Figure(0.92, f"{_READ}: 7.5 us more for 8K tokens of context"),
    decode_fixed=Figure(20e-6, f"{_READ}: 78 us at 8 x 8K, 259 us at 32 x 8K"),
    prefill_share={
        20: Figure(0.58, f"{_READ}: 572-599 TFLOP/s at 4096@8K and 2048@28K with 20 query heads"),
        10: Figure(0.50, f"{_READ}: 504 TFLOP/s at 4096@8K with 10 query heads"),
        5: Figure(0.40, f"{_READ}: 393-405 TFLOP/s at 4096@8K with 4-5 query heads"),
    },
    prefill_fixed=Figure(25e-6, f"{_READ}: 39 us at 1024@0"),
    all_reduce_fixed={
        2: Figure(16e-6, _DGX),
        4: Figure(21e-6, _DGX),
        8: Figure(40e-6, _DGX),
    },
    all_reduce_byte={
        2: Figure(3.49e-12, _DGX),
        4: Figure(4.38e-12, _DGX),
        8: Figure(4.66e-12, _DGX),
    },
    exchange_fixed=Figure(40e-6, f"{_READ}: NCCL, both all-to-alls 128, 101, 87, 141, 227 us at 128 ... 4096 tokens"),
    exchange_bandwidth=Figure(350e9, f"{_READ}: the same five, 35 ns more for each token of a rank"),
    copy_bandwidth=Figure(358e9, f"{_READ}: peer-to-peer copy"),
    copy_fixed=Figure(10e-6, _ASSUMED),
    copy_exposed=Figure(0.1, _ASSUMED),
    contention=(
        Figure(1.75, f"{_READ}: between 24 decodes + 1024 tokens (424 us) and 32 + 2048 (703 us)"),
        Figure(1.3, f"{_READ}; the paper's Fig. 14a (58 % of the gap closed at 32 decodes) gives 1.28"),
    ),
    host=Figure(2e-3, "vLLM 0.26 live on 2x H200 is predicted within a few percent with it"),
    decode_sms={
        16: Figure(2.09, _SHAPE),
        32: Figure(1.39, _SHAPE),
        64: Figure(1.10, _SHAPE),
        96: Figure(1.04, _SHAPE),
        132: Figure(1.0, "definition"),
    },
    prefill_sms={
        16: Figure(4.07, _SHAPE),
        32: Figure(2.31, _SHAPE),
        64: Figure(1.42, _SHAPE),
        96: Figure(1.17, _SHAPE),
        132: Figure(1.0, "definition"),
    },
    multiplex=Figure(1.1, _ASSUMED),
)


DEVICES = {
    "h200": _H200,
    # Compute and NVLink are those of H200, and so are the shares: only the memory differs.
    "h100": replace(
        _H200,
        name="H100",
        memory=Figure(79.65 * GIB, f"{_SHEET_H100}: 80 GB; what CUDA reports of it"),
        flops=Figure(989e12, _SHEET_H100),
        memory_bandwidth=Figure(3.35e12, _SHEET_H100),
    ),
}
"""By name."""

MEMORY_SHARE = 0.9
"""Of a device's memory that the server takes: vLLM's default."""
ACTIVATION_BYTES = 3 * GIB
"""Kept for activations on each GPU."""


def kv_tokens(shape: ModelShape, device: Device, base_tp: int) -> int:
    """Tokens of KV that `base_tp` GPUs hold beside their share of the weights.

    Raises:
        ValueError: the weights leave no room.
    """
    free = device.memory.value * MEMORY_SHARE - shape.weight_bytes / base_tp - ACTIVATION_BYTES
    if free <= 0:
        raise ValueError(f"{shape.name} does not fit on {device.name} at base TP {base_tp}; use more GPUs a rank")
    return int(free * base_tp / shape.kv_bytes)


class Hardware(Protocol):
    """Where iteration times and memory come from."""

    @property
    def shape(self) -> ModelShape:
        """The model."""
        ...

    @property
    def device(self) -> Device:
        """The GPU."""
        ...

    def latency(self, num_ranks: int, base_tp: int) -> LatencyModel:
        """Iteration times of `num_ranks` logical ranks of `base_tp` GPUs."""
        ...

    def kv_tokens(self, base_tp: int) -> int:
        """Tokens of KV that one logical rank holds."""
        ...


def _interpolate(figures: dict[int, Figure], x: float) -> float:
    """Straight between the entries, constant beyond them."""
    return float(np.interp(x, sorted(figures), [figures[key].value for key in sorted(figures)]))


def sm_slowdown(figures: dict[int, Figure], sms: float) -> float:
    """Slowdown on `sms` SMs; the table's values at its entries, straight in 1 / sms between and beyond them."""
    keys = sorted(figures)
    if sms < keys[0]:
        return figures[keys[0]].value * keys[0] / sms
    inverse = [1 / key for key in reversed(keys)]
    return float(np.interp(1 / sms, inverse, [figures[key].value for key in reversed(keys)]))


@dataclass(frozen=True)
class StatedHardware:
    """A model on a device, from stated figures. NOT MEASURED as a whole.

    Args:
        shape: of the model.
        device: its figures.
    """

    shape: ModelShape
    device: Device
    _cache: dict[tuple[int, int], LatencyModel] = field(default_factory=dict, repr=False, compare=False)

    def kv_tokens(self, base_tp: int) -> int:
        return kv_tokens(self.shape, self.device, base_tp)

    def latency(self, num_ranks: int, base_tp: int) -> LatencyModel:
        """Iteration times.

        Raises:
            ValueError: the KV heads cannot be divided by the degree, or it has no all-reduce figures.
        """
        key = (num_ranks, base_tp)
        if key not in self._cache:
            self._cache[key] = self._make(num_ranks, base_tp)
        return self._cache[key]

    def _make(self, num_ranks: int, base_tp: int) -> LatencyModel:
        shape, device = self.shape, self.device
        if shape.kv_heads % (num_ranks * base_tp):
            raise ValueError(
                f"{shape.name} has {shape.kv_heads} KV heads, which SP {num_ranks} x TP {base_tp} does not divide"
            )
        if base_tp > 1 and base_tp not in device.all_reduce_fixed:
            raise ValueError(f"{device.name} has no all-reduce figures for TP {base_tp}")
        flops = device.flops.value * base_tp
        gemm = device.gemm_share.value * flops
        memory = device.memory_bandwidth.value * base_tp
        per_token = 2 * shape.layer_weights / gemm
        reading = shape.layer_weights * DTYPE_BYTES / (device.weight_share.value * memory)
        attention = flops * _interpolate(device.prefill_share, shape.heads / (num_ranks * base_tp))
        comm = NOTHING
        if num_ranks > 1:
            width = 2 * shape.q_width + 2 * shape.kv_width  # QKV there, O back
            crossing = (num_ranks - 1) / num_ranks * width * DTYPE_BYTES / base_tp
            comm = Affine(crossing / device.exchange_bandwidth.value, 2 * device.exchange_fixed.value)
        all_reduce = NOTHING
        if base_tp > 1:
            all_reduce = Affine(
                2 * device.all_reduce_byte[base_tp].value * shape.hidden * DTYPE_BYTES,
                2 * device.all_reduce_fixed[base_tp].value,
            )
        transfer = NOTHING
        if num_ranks > 1:
            transfer = Affine(shape.kv_layer_bytes / (device.copy_bandwidth.value * base_tp), device.copy_fixed.value)
        alpha, beta = device.contention
        return LatencyModel(
            name=f"stated:{shape.name}:{device.name}:sp{num_ranks}tp{base_tp}",
            num_layers=shape.layers,
            num_ranks=num_ranks,
            gemm=GemmCurve.floor(reading, reading / per_token, per_token),
            decode=Affine(shape.kv_layer_bytes / (device.decode_share.value * memory), device.decode_fixed.value),
            prefill=Affine(4 * shape.q_width / attention, device.prefill_fixed.value),
            comm=comm,
            # One rank has one attention invocation: nothing to overlap.
            contention=(Contention(alpha.value, beta.value),) if num_ranks > 1 else (),
            serial=True,
            all_reduce=all_reduce,
            transfer=transfer,
            transfer_exposed=device.copy_exposed.value if num_ranks > 1 else 0.0,
            host=Affine(2 * shape.vocab * shape.hidden / gemm, device.host.value),
        )


@dataclass(frozen=True)
class MeasuredHardware:
    """Measured profiles where there are some, stated figures elsewhere.

    Args:
        stated: for every other (SP degree, base TP), and for memory.
        profiles: by (SP degree, base TP).
    """

    stated: StatedHardware
    profiles: dict[tuple[int, int], Profile]

    @classmethod
    def load(cls, stated: StatedHardware, paths: Iterable[Path]) -> MeasuredHardware:
        """Read profile files.

        Raises:
            ProfileError: a file cannot be used.
            ValueError: two files are of the same (SP degree, base TP).
        """
        profiles: dict[tuple[int, int], Profile] = {}
        for path in paths:
            profile = Profile.load(path)
            key = (profile.latency.num_ranks, profile.base_tp)
            if key in profiles:
                raise ValueError(f"{path}: a profile for SP {key[0]} x TP {key[1]} was given before; keep one")
            profiles[key] = profile
        return cls(stated, profiles)

    @property
    def shape(self) -> ModelShape:
        return self.stated.shape

    @property
    def device(self) -> Device:
        return self.stated.device

    def kv_tokens(self, base_tp: int) -> int:
        return self.stated.kv_tokens(base_tp)

    def latency(self, num_ranks: int, base_tp: int) -> LatencyModel:
        profile = self.profiles.get((num_ranks, base_tp))
        return profile.latency if profile else self.stated.latency(num_ranks, base_tp)


@dataclass(frozen=True)
class SlowedHardware:
    """A machine whose iterations take `factor` times as long as `hardware` has them; its memory is the same.

    Args:
        hardware: the machine.
        factor: above 0; below 1 the machine is faster.
    """

    hardware: Hardware
    factor: float

    @property
    def shape(self) -> ModelShape:
        return self.hardware.shape

    @property
    def device(self) -> Device:
        return self.hardware.device

    def kv_tokens(self, base_tp: int) -> int:
        return self.hardware.kv_tokens(base_tp)

    def latency(self, num_ranks: int, base_tp: int) -> LatencyModel:
        model, factor = self.hardware.latency(num_ranks, base_tp), self.factor
        parts = ("gemm", "decode", "prefill", "comm", "all_reduce", "transfer", "host")
        longer = {part: getattr(model, part).scaled(factor) for part in parts}
        return replace(model, name=f"{model.name}:x{factor:g}", **longer)


@dataclass(frozen=True)
class SizedHardware:
    """A machine whose KV memory is known, a running server's say; the rest is that of `hardware`.

    Args:
        hardware: the machine.
        tokens: of KV on one logical rank, whatever its base TP.
    """

    hardware: Hardware
    tokens: int

    @property
    def shape(self) -> ModelShape:
        return self.hardware.shape

    @property
    def device(self) -> Device:
        return self.hardware.device

    def latency(self, num_ranks: int, base_tp: int) -> LatencyModel:
        return self.hardware.latency(num_ranks, base_tp)

    def kv_tokens(self, base_tp: int) -> int:
        return self.tokens


def narrowest_tp(hardware: Hardware, gpus: int) -> int:
    """The fewest GPUs of a logical rank that hold the weights and two requests of the longest kind (section 5).

    Raises:
        ValueError: not even all GPUs do.
    """
    for base_tp in (1, 2, 4, 8):
        if base_tp > gpus or gpus % base_tp:
            continue
        try:
            room = hardware.kv_tokens(base_tp)
        except ValueError:
            continue
        if room >= 2 * hardware.shape.max_model_len:
            return base_tp
    raise ValueError(f"{hardware.shape.name} does not fit on {gpus} {hardware.device.name}; use more GPUs")
