"""A latency model without a profile: a roofline from stated figures, so that policy `slo` runs on any machine.

NOT MEASURED. The figures are of the kind a data sheet states, taken at a conservative share, and every profile made
here says `measured: false`. It overestimates on purpose: too small a budget costs throughput, too large a one breaks
TBT. The online correction narrows the gap while serving; a profile from `conflux profile` closes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from conflux_ray.planning.latency_model import Affine, Contention, GemmCurve, LatencyModel
from conflux_ray.planning.profile import Profile


@dataclass(frozen=True, slots=True)
class Machine:
    """Stated figures of one device.

    Args:
        name: for the profile.
        flops: dense peak in the serving type, operations per second.
        memory_bandwidth: bytes per second.
        link_bandwidth: to the other devices of the node, one direction, bytes per second.
        efficiency: share of `flops` and of the bandwidths that is counted on, 0..1.
        launch: fixed cost of one operator group of a layer (linear region, attention path), seconds.
        collective: fixed cost of one collective, seconds.
        host: fixed cost of an iteration outside its layers, seconds.
        overlap: whether the engine can run the two attention paths beside each other.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    efficiency: float
    launch: float
    collective: float
    host: float
    overlap: bool


MACHINES = {
    "cpu": Machine("cpu", 1e11, 2e10, 2e9, 0.3, 1e-4, 3e-4, 2e-3, overlap=False),
    "a100": Machine("a100", 312e12, 2.0e12, 300e9, 0.5, 10e-6, 40e-6, 4e-3, overlap=True),
    "h100": Machine("h100", 989e12, 3.35e12, 450e9, 0.5, 10e-6, 40e-6, 4e-3, overlap=True),
    "h200": Machine("h200", 989e12, 4.8e12, 450e9, 0.5, 10e-6, 40e-6, 4e-3, overlap=True),
}
"""By name; `cpu` stands for a few slow cores."""


def fallback_profile(
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    num_ranks: int,
    base_tp: int = 1,
    dtype_bytes: int = 2,
    machine: str | Machine = "cpu",
    model: str = "unknown",
) -> Profile:
    """A conservative profile of a dense decoder with a gated FFN, from its shape.

    Args:
        num_layers: L.
        hidden_size: H.
        intermediate_size: width of the gated FFN.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of one head.
        vocab_size: rows of the output projection.
        num_ranks: N.
        base_tp: devices of one logical rank.
        dtype_bytes: of weights and KV.
        machine: a key of `MACHINES`, or figures of your own.
        model: name for the profile.

    Raises:
        ValueError: the machine is not known.
    """
    if isinstance(machine, str):
        if machine not in MACHINES:
            raise ValueError(f"machine={machine!r} has no stated figures; choose one of {', '.join(MACHINES)}")
        machine = MACHINES[machine]
    flops = machine.flops * machine.efficiency * base_tp
    memory = machine.memory_bandwidth * machine.efficiency * base_tp
    link = machine.link_bandwidth * machine.efficiency * base_tp
    q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    weights = hidden_size * (q_width + 2 * kv_width) + q_width * hidden_size + 3 * hidden_size * intermediate_size
    per_token = 2 * weights / flops
    reading = weights * dtype_bytes / memory
    kv_bytes = 2 * kv_width * dtype_bytes
    travelling = (num_ranks - 1) / num_ranks
    alone = num_ranks == 1
    all_reduce = Affine(0.0)
    if base_tp > 1:
        crossing = 2 * 2 * (base_tp - 1) / base_tp * hidden_size * dtype_bytes
        all_reduce = Affine(crossing / (machine.link_bandwidth * machine.efficiency), 2 * machine.collective)
    latency = LatencyModel(
        name=f"fallback:{model}:{machine.name}:sp{num_ranks}tp{base_tp}",
        num_layers=num_layers,
        num_ranks=num_ranks,
        gemm=GemmCurve.floor(reading + machine.launch, reading / per_token, per_token),
        decode=Affine(kv_bytes / memory, machine.launch),
        prefill=Affine(4 * q_width / flops, machine.launch),
        comm=Affine(0.0)
        if alone
        else Affine(travelling * (2 * q_width + 2 * kv_width) * dtype_bytes / link, 2 * machine.collective),
        contention=(Contention(1.5, 1.5),) if machine.overlap else (),
        serial=True,
        all_reduce=all_reduce,
        transfer=Affine(0.0) if alone else Affine(kv_bytes / link, machine.collective),
        transfer_exposed=1.0,
        host=Affine(
            2 * vocab_size * hidden_size / flops, machine.host + vocab_size * hidden_size * dtype_bytes / memory
        ),
    )
    return Profile(latency=latency, measured=False, model=model, machine=machine.name, base_tp=base_tp)
