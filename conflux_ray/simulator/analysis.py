"""What the latency model alone says: the figures of the paper that hold a batch fixed (sections 3 and 8.3).

Every function takes the hardware and returns rows for a table, one dictionary each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from conflux_ray.planning.dispatch import waterfill
from conflux_ray.planning.latency_model import LatencyModel, chunk_work
from conflux_ray.planning.plain import even_split
from conflux_ray.simulator.hardware import Hardware, sm_slowdown
from conflux_ray.simulator.systems.ablations import SeparatedModel, UniformModel
from conflux_ray.simulator.systems.muxwise import SMS

Row = dict[str, float | str]
DEGREES = (1, 2, 4, 8)
CONTEXT = 8192


def prefill_seconds(model: LatencyModel, tokens: int) -> float:
    """A prompt of `tokens` in one iteration without decodes, evenly over the ranks."""
    none = (0,) * model.num_ranks
    shard = tokens / model.num_ranks
    return model.given(none, none).seconds(shard, shard, chunk_work(tokens, 0))


def largest_chunk(seconds: Callable[[int], float], limit: float, most: int) -> int:
    """The largest chunk in 0..most with seconds(chunk) <= limit, for a `seconds` that does not decrease."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def completion(model: LatencyModel, decodes: int, prompt: int, tbt: float) -> float:
    """Seconds that a prompt needs beside `decodes` resident requests a rank of 8K context, chunk by chunk within TBT.

    Raises:
        ValueError: the decodes alone break TBT.
    """
    n = model.num_ranks
    estimator = model.given((decodes,) * n, (decodes * CONTEXT,) * n)
    done, total = 0, 0.0

    def seconds(chunk: int) -> float:
        shard = -(-chunk // n)
        return estimator.seconds(decodes + shard, shard, chunk_work(chunk, done))

    while done < prompt:
        chunk = largest_chunk(seconds, tbt, prompt - done)
        if not chunk:
            raise ValueError(f"{decodes} decodes a rank leave no room for prefill within {tbt} s")
        total += seconds(chunk)
        done += chunk
    return total


def ablation_models(model: LatencyModel) -> dict[str, LatencyModel]:
    """Conflux and what is left of it as ideas are taken away, cumulatively (Fig. 13)."""
    serial = replace(model, contention=(), serial=True)
    return {
        "Conflux Parallelism": model,
        "w/o overlap": serial,
        "w/o phase-specific": UniformModel.of(serial),
        "w/o co-batching": SeparatedModel.of(serial),
    }


def chunk_sizes(hardware: Hardware) -> list[Row]:
    """Fig. 3c: prefill tokens beside 16 decodes of 8K on one GPU."""
    estimator = hardware.latency(1, 1).given((16,), (16 * CONTEXT,))
    return [
        {
            "tbt_ms": 1e3 * tbt,
            "tokens": largest_chunk(lambda n: estimator.seconds(16 + n, n, chunk_work(n, 0)), tbt, 100_000),
            "decode_only_ms": 1e3 * estimator.seconds(16, 0, 0.0),
        }
        for tbt in (0.05, 0.1)
    ]


def prefill_scaling(hardware: Hardware, tokens: int = 32768) -> list[Row]:
    """Fig. 4: prefill time and parallelism efficiency under TP and SP."""
    alone = prefill_seconds(hardware.latency(1, 1), tokens)
    rows: list[Row] = []
    for degree in DEGREES:
        tp = prefill_seconds(hardware.latency(1, degree), tokens)
        sp = prefill_seconds(hardware.latency(degree, 1), tokens)
        rows.append(
            {
                "degree": degree,
                "tp_seconds": tp,
                "sp_seconds": sp,
                "tp_efficiency": alone / (degree * tp),
                "sp_efficiency": alone / (degree * sp),
            }
        )
    return rows


def decode_scaling(hardware: Hardware, batch: int = 16) -> list[Row]:
    """Fig. 5: a decode iteration and its parallelism efficiency under TP and uniform SP."""
    context = batch * CONTEXT
    alone = hardware.latency(1, 1).given((batch,), (context,)).seconds(batch, 0, 0.0)
    rows: list[Row] = []
    for degree in DEGREES:
        tp = hardware.latency(1, degree).given((batch,), (context,)).seconds(batch, 0, 0.0)
        tokens = even_split(batch, degree)
        model = UniformModel.of(hardware.latency(degree, 1))
        sp = model.given(tokens, [context // degree] * degree).seconds(max(tokens), 0, 0.0)
        rows.append(
            {
                "degree": degree,
                "tp_ms": 1e3 * tp,
                "sp_ms": 1e3 * sp,
                "tp_efficiency": alone / (degree * tp),
                "sp_efficiency": alone / (degree * sp),
            }
        )
    return rows


def prefill_throughput(hardware: Hardware, gpus: int, decodes: int, prompts: Sequence[int], tbt: float) -> list[Row]:
    """Table 2: requests prefilled per second beside `decodes` resident decodes, within TBT.

    Contexts of the decodes are the mean prompt. Chunks carry the attention of their prompts' mean position.

    Args:
        hardware: of the node.
        gpus: of the node.
        decodes: resident requests of all GPUs together.
        prompts: tokens of each request.
        tbt: seconds.
    """
    mean = sum(prompts) / len(prompts)
    context = decodes * mean
    pairs = sum(chunk_work(p, 0) for p in prompts) / sum(prompts)  # attention work of a prefill token
    tp = hardware.latency(1, gpus)
    xp = hardware.latency(gpus, 1)

    def chunked(tokens: int) -> float:
        return tp.given((decodes,), (context,)).seconds(decodes + tokens, tokens, pairs * tokens)  # type: ignore[arg-type]

    each = decodes / gpus
    estimator = xp.given((each,) * gpus, (context / gpus,) * gpus)  # type: ignore[arg-type]

    def conflux(tokens: int) -> float:
        return estimator.seconds(each + tokens / gpus, tokens / gpus, pairs * tokens)

    most = 1_000_000
    batch = 4 * mean  # whole prompts of a prefill batch, where a system batches them
    alone = tp.given((0,), (0,)).seconds(batch, batch, pairs * batch)
    device = hardware.device
    decode = tp.given((decodes,), (context,)).seconds(decodes, 0, 0.0)  # type: ignore[arg-type]
    fixed = tp.num_layers * tp.all_reduce(decodes) + tp.host(decodes)
    multiplex = device.multiplex.value
    slowed = [(sms, fixed + (decode - fixed) * sm_slowdown(device.decode_sms, sms) * multiplex) for sms in SMS]
    sms = next((s for s, seconds in slowed if seconds <= tbt), SMS[-1])
    prefill_fixed = tp.num_layers * tp.all_reduce(batch) + tp.host(0)
    shared = sm_slowdown(device.prefill_sms, device.num_sms - sms) * multiplex
    muxwise = batch / (prefill_fixed + (alone - prefill_fixed) * shared)
    # LoongServe: prefill in what decode, spread over the ranks, leaves of every TBT; ring traffic behind attention.
    rank = hardware.latency(1, 1)
    step = rank.given((each,), (context / gpus,)).seconds(each, 0, 0.0)  # type: ignore[arg-type]
    ring = batch * (gpus - 1) / gpus * hardware.shape.kv_layer_bytes / device.copy_bandwidth.value
    attention = max(rank.prefill(pairs * batch / gpus), ring + (gpus - 1) * device.copy_fixed.value)
    pass_seconds = rank.num_layers * (rank.linear(batch / gpus) + attention) + rank.host(0)
    loongserve = max(0.0, tbt - step) / tbt * batch / pass_seconds
    rates = {
        "LoongServe": loongserve,
        "Chunked Prefill": largest_chunk(chunked, tbt, most) / tbt,
        "MuxWise": muxwise,
        "Conflux Parallelism": largest_chunk(conflux, tbt, most) / tbt,
    }
    return [{"system": name, "tbt_ms": 1e3 * tbt, "requests_per_s": rate / mean} for name, rate in rates.items()]


def ablation(hardware: Hardware, gpus: int = 4, decodes: int = 24, tbt: float = 0.1) -> list[Row]:
    """Fig. 13: completion of an 8K and a 32K prompt, normalised to full Conflux Parallelism."""
    rows: list[Row] = []
    for prompt in (8192, 32768):
        times = {
            name: completion(model, decodes, prompt, tbt)
            for name, model in ablation_models(hardware.latency(gpus, 1)).items()
        }
        full = times["Conflux Parallelism"]
        rows += [
            {"prompt": prompt, "variant": name, "ms": 1e3 * seconds, "normalised": seconds / full}
            for name, seconds in times.items()
        ]
    return rows


def overlap(hardware: Hardware, gpus: int = 4, prompt: int = 8192) -> list[Row]:
    """Fig. 14a: the attention region of an iteration with a whole 8K prefill, all layers."""
    model = hardware.latency(gpus, 1)
    rows: list[Row] = []
    for decodes in (8, 16, 24, 32):
        estimator = model.given((decodes,) * gpus, (decodes * CONTEXT,) * gpus)
        prefill = estimator.prefill_path(prompt / gpus, chunk_work(prompt, 0))
        decode = estimator.decode_path
        scale = 1e3 * model.num_layers
        rows.append(
            {
                "decodes": decodes,
                "serialized_ms": scale * (prefill + decode),
                "overlapped_ms": scale * estimator.attention(prefill),
                "contention_free_ms": scale * max(prefill, decode),
            }
        )
    return rows


def sp_scaling(hardware: Hardware, decodes: int = 24, prompt: int = 32768, tbt: float = 0.1) -> list[Row]:
    """Fig. 14b: completion of a 32K prompt beside 24 decodes a GPU at SP 1, 2, 4, 8."""
    alone = completion(hardware.latency(1, 1), decodes, prompt, tbt)
    rows: list[Row] = []
    for degree in DEGREES:
        seconds = completion(hardware.latency(degree, 1), decodes, prompt, tbt)
        rows.append({"degree": degree, "seconds": seconds, "speedup": alone / seconds})
    return rows


def dispatch(
    hardware: Hardware, gpus: int = 4, decodes: int = 128, context: int = 2048, chunk: int = 1024
) -> list[Row]:
    """Fig. 15a: waterfill against even dispatch, all decodes on one of the ranks."""
    model = hardware.latency(gpus, 1)
    tokens = [decodes] + [0] * (gpus - 1)
    estimator = model.given(tokens, [n * context for n in tokens])
    rows: list[Row] = []
    for name, shard in (("waterfill", waterfill(tokens, chunk)), ("even", even_split(chunk, gpus))):
        load = max(d + p for d, p in zip(tokens, shard, strict=True))
        attention = estimator.attention(estimator.prefill_path(max(shard), chunk_work(chunk, 0)))
        rows.append({"dispatch": name, "linear_us": 1e6 * model.linear(load), "attention_us": 1e6 * attention})
    return rows


def placement(hardware: Hardware, chunk: int = 1024) -> list[Row]:
    """Fig. 15b: 64 decodes of 8K, worst-fit and two skewed placements, with waterfill."""
    model = hardware.latency(4, 1)
    rows: list[Row] = []
    for name, tokens in (
        ("worst-fit", (16, 16, 16, 16)),
        ("moderate", (8, 8, 24, 24)),
        ("severe", (0, 0, 32, 32)),
    ):
        shard = waterfill(tokens, chunk)
        estimator = model.given(tokens, [n * CONTEXT for n in tokens])
        load = max(d + p for d, p in zip(tokens, shard, strict=True))
        attention = estimator.attention(estimator.prefill_path(max(shard), chunk_work(chunk, 0)))
        rows.append({"placement": name, "linear_us": 1e6 * model.linear(load), "attention_us": 1e6 * attention})
    return rows
