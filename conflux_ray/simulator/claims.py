"""The paper's numbers, each with how to read ours from the results, and why it may differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conflux_ray.simulator.figures import ENHANCED, FCFS, Results

Reading = Callable[[Results], float | None]
TOLERANCE = 0.10
"""Relative difference above which the page gives a reason."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One number of the paper.

    Args:
        where: in the paper.
        what: in words.
        paper: its value.
        ours: how to read ours; None where it was not run.
        absolute: whether it is a rate, for which the page compares ratios first, rather than a ratio.
        why: the most likely reason of a difference.
        decide: the experiment that would tell.
    """

    where: str
    what: str
    paper: float
    ours: Reading
    absolute: bool = False
    why: str = ""
    decide: str = ""


def _over(group: str, model: str, system: str, rivals: tuple[str, ...], **more: object) -> Reading:
    def ratio(results: Results) -> float | None:
        ours = results.goodput(group, model, system, **more)
        best = results.best(group, model, rivals, **more)[1]
        return ours / best if ours is not None and best else None

    return ratio


def _goodput(group: str, model: str, system: str, **more: object) -> Reading:
    return lambda results: results.goodput(group, model, system, **more)


def _cell(table: str, column: str, **fields: object) -> Reading:
    def read(results: Results) -> float | None:
        for row in results.tables.get(table, ()):
            if all(row[name] == value for name, value in fields.items()):
                return float(row[column])
        return None

    return read


def _ratio(first: Reading, second: Reading) -> Reading:
    def read(results: Results) -> float | None:
        a, b = first(results), second(results)
        return a / b if a is not None and b else None

    return read


_RIVAL = (
    "our rivals are ideal, which lowers a ratio: every one of them has the same kernels, host time and a swept "
    "configuration, where the paper ran three code bases; admission that counts attention, which Algorithm 4 leaves "
    "out, raises it (`planner.md`); and the workload's correlations are a surrogate's"
)
_LONG = (
    "some prompts below this model's length cap of 131,072 tokens take longer than its TTFT of 1 s by themselves, "
    "and whatever waits behind one of them in FCFS order is late too: attainment falls slowly with the rate and "
    "crosses 95 % where the luck of the draw has it"
)
_MEMORY = (
    "Conflux holds a third less KV on these GPUs than tensor parallelism, and long outputs make KV a limit, but not "
    "the only one: with the memory of H200 it is ahead of Chunked++ (26.6 against 22.6 req/s, one seed of `conflux "
    "goodput --device h200 --gpus 4 --workload qwen-a`) and still behind MuxWise++ (30.3), which reads the weights "
    "once for four GPUs where Conflux reads them on each"
)
_LIVE = "live runs of vLLM and of this server on one node of the stated size, same trace, at least 180 s of arrivals"
_RATE = "the rate depends on the length cap, on subsampling and on prefix reuse, none of which the paper states"
_TRACE = "the published toolagent trace in place of the surrogate"
_KERNEL = "stated kernel figures of one H200 reading stand in for the paper's H100 kernels"
_PROFILE = "`conflux profile` on H100 and H200, then `--profile`"

CLAIMS: list[Claim] = []


def _add() -> None:
    baselines, enhanced = FCFS[:-1], ENHANCED[:-1]
    models = ("llama-8b", "qwen-14b", "qwen-32b")
    names = {"llama-8b": "Llama-8B", "qwen-14b": "Qwen-14B", "qwen-32b": "Qwen-32B"}
    for model, fcfs, full in zip(models, (1.33, 1.34, 1.62), (1.26, 1.52, 1.44), strict=True):
        for what, system, rivals, value in (
            ("FCFS", "conflux-fcfs", baselines, fcfs),
            ("full", "conflux", enhanced, full),
        ):
            CLAIMS.append(
                Claim(
                    "Fig. 12",
                    f"{names[model]}, {what}: ratio to the strongest baseline",
                    value,
                    _over("fig12", model, system, rivals),
                    why=_LONG if model == "llama-8b" else _RIVAL,
                    decide=_LIVE,
                )
            )
    for model, value in zip(models, (1.16, 1.32, 1.37), strict=True):
        CLAIMS.append(
            Claim(
                "Fig. 12",
                f"{names[model]}: the SLO-aware scheduler over FCFS",
                value,
                _ratio(_goodput("fig12", model, "conflux"), _goodput("fig12", model, "conflux-fcfs")),
                why="what reordering gains grows with the tail of prompt lengths and with queueing, "
                "both of which the surrogate invents",
                decide=_TRACE,
            )
        )
    for workload, value, name in (("synthetic", 1.7, "Mooncake-Synthetic"), ("qwen-a", 1.1, "QwenA")):
        CLAIMS.append(
            Claim(
                "Fig. 16",
                f"{name}: ratio to the strongest baseline",
                value,
                _over("fig16", "qwen-14b", "conflux", enhanced, workload=workload),
                why=_MEMORY if workload == "qwen-a" else _RIVAL,
                decide=_LIVE,
            )
        )
    for tbt, value in ((150, 1.4), (50, 1.5)):
        CLAIMS.append(
            Claim(
                "Fig. 17",
                f"TBT {tbt} ms: ratio to the strongest baseline",
                value,
                _tbt_ratio(tbt, enhanced),
                why=_RIVAL,
                decide=_LIVE,
            )
        )
    for tbt, values in (
        (50, {"LoongServe": 2.41, "Chunked Prefill": 4.17, "MuxWise": 4.38, "Conflux Parallelism": 6.15}),
        (100, {"LoongServe": 5.17, "Chunked Prefill": 5.92, "MuxWise": 5.43, "Conflux Parallelism": 8.27}),
    ):
        ours = _cell("table2", "requests_per_s", tbt_ms=float(tbt), system="Conflux Parallelism")
        for system, value in values.items():
            if system == "Conflux Parallelism":
                continue
            CLAIMS.append(
                Claim(
                    "Table 2",
                    f"TBT {tbt} ms: prefill throughput, Conflux Parallelism over {system}",
                    values["Conflux Parallelism"] / value,
                    _ratio(ours, _cell("table2", "requests_per_s", tbt_ms=float(tbt), system=system)),
                    why="a static figure: contexts of the 96 decodes, batching of whole prompts and SM contention "
                    "are assumptions, and phase isolation is charged nothing for switching",
                    decide="the fixed-batch experiment of section 3.3 on four GPUs",
                )
            )
    for prompt, values13 in (
        (8192, {"w/o overlap": 1.07, "w/o phase-specific": 1.13, "w/o co-batching": 1.23}),
        (32768, {"w/o overlap": 1.11, "w/o phase-specific": 1.16, "w/o co-batching": 1.34}),
    ):
        CLAIMS.extend(
            Claim(
                "Fig. 13",
                f"{prompt // 1024}K prefill, {variant}: latency over full Conflux Parallelism",
                value,
                _cell("fig13", "normalised", prompt=prompt, variant=variant),
                why="contention factors are one fit for all mixes; " + _KERNEL,
                decide=_PROFILE,
            )
            for variant, value in values13.items()
        )
    CLAIMS.append(
        Claim(
            "Fig. 14a",
            "32 decodes a GPU: serialized over overlapped attention",
            36.5 / 28.0,
            _ratio(_cell("fig14a", "serialized_ms", decodes=32), _cell("fig14a", "overlapped_ms", decodes=32)),
            why="contention factors are one fit for all mixes",
            decide=_PROFILE,
        )
    )
    CLAIMS.extend(
        Claim(
            "Fig. 14b",
            f"SP {degree}: speed-up of a 32K prefill beside 24 decodes a GPU",
            value,
            _cell("fig14b", "speedup", degree=degree),
            why="the paper's 4.17x at 4 is more than linear: its SP 1 run loses something that ours does not; ours "
            "loses attention efficiency with few heads a GPU and the fixed cost of all-to-alls",
            decide="all-to-alls and prefill attention profiled at SP 4 and 8",
        )
        for degree, value in ((2, 1.93), (4, 4.17), (8, 7.94))
    )
    CLAIMS.append(
        Claim(
            "Fig. 15a",
            "even dispatch over waterfill: shared-linear latency",
            1.32,
            _ratio(_cell("fig15a", "linear_us", dispatch="even"), _cell("fig15a", "linear_us", dispatch="waterfill")),
            why=_KERNEL,
            decide=_PROFILE,
        )
    )
    CLAIMS.extend(
        Claim(
            "Fig. 15b",
            f"{name} skew over worst-fit: attention latency",
            value,
            _ratio(
                _cell("fig15b", "attention_us", placement=name),
                _cell("fig15b", "attention_us", placement="worst-fit"),
            ),
            why="alpha and beta are one fit for all mixes, and the lighter the decode the more the prefill path counts",
            decide=_PROFILE,
        )
        for name, value in (("moderate", 1.39), ("severe", 1.75))
    )
    for degree_claims in (
        ("Fig. 4b", "SP efficiency of a 32K prefill at degree 8", 0.93, "fig4", "sp_efficiency"),
        ("Fig. 4b", "TP efficiency of a 32K prefill at degree 8", 0.66, "fig4", "tp_efficiency"),
        ("Fig. 5b", "TP efficiency of 16 decodes at degree 8", 0.39, "fig5", "tp_efficiency"),
        ("Fig. 5b", "SP efficiency of 16 decodes at degree 8", 0.16, "fig5", "sp_efficiency"),
    ):
        where, what, value, table, column = degree_claims
        CLAIMS.append(
            Claim(
                where,
                what,
                value,
                _cell(table, column, degree=8),
                why="fixed costs of collectives and attention with 5 query heads a GPU, both from one machine; 2 ms of "
                "host time are counted in",
                decide="collectives and attention profiled at degree 8",
            )
        )
    for limit, tokens in ((50.0, 1000.0), (100.0, 2200.0)):
        CLAIMS.append(
            Claim(
                "Fig. 3c",
                f"prefill tokens beside 16 decodes of 8K on one GPU within {limit:g} ms",
                tokens,
                _cell("fig3c", "tokens", tbt_ms=limit),
                absolute=True,
                why=_KERNEL,
                decide=_PROFILE,
            )
        )
    for model, fcfs, full in zip(models, (7.9, 6.0, 4.1), (9.2, 7.9, 5.6), strict=True):
        for what, system, value in (("FCFS", "conflux-fcfs", fcfs), ("full", "conflux", full)):
            CLAIMS.append(
                Claim(
                    "Fig. 12",
                    f"{names[model]}, {what}: goodput, requests/s",
                    value,
                    _goodput("fig12", model, system),
                    absolute=True,
                    why=_LONG if model == "llama-8b" else _RATE,
                    decide=_TRACE,
                )
            )
    for workload, value, name in (("synthetic", 5.5, "Mooncake-Synthetic"), ("qwen-a", 15.6, "QwenA")):
        CLAIMS.append(
            Claim(
                "Fig. 16",
                f"{name}: goodput, requests/s",
                value,
                _goodput("fig16", "qwen-14b", "conflux", workload=workload),
                absolute=True,
                why=_RATE,
                decide=_TRACE,
            )
        )


def _tbt_ratio(milliseconds: int, rivals: tuple[str, ...]) -> Reading:
    def ratio(results: Results) -> float | None:
        rates = {
            case.system: result.mean
            for case, result in results.goodputs
            if case.group == "fig17" and round(1e3 * case.slo.tbt) == milliseconds
        }
        best = max((rates.get(system, 0.0) for system in rivals), default=0.0)
        return rates["conflux"] / best if best and "conflux" in rates else None

    return ratio


_add()
