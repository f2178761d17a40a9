"""What a request was promised: TTFT and TBT from its body, its headers or the deployment's defaults.

Headers: `x-conflux-slo-class`, `x-conflux-ttft-ms`, `x-conflux-tbt-ms`. Body: `vllm_xargs` with the keys `slo_class`,
`ttft_ms` and `tbt_ms`, which win over headers. A class sets both targets; the others override one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

from conflux_ray.wire import Slo

FIELDS = ("slo_class", "ttft_ms", "tbt_ms")
DEFAULT_CLASS = "default"
MAX_TARGET_MS = 24 * 3600 * 1000.0

request_headers_slo: ContextVar[Mapping[str, str]] = ContextVar(
    "request_headers_slo",
    default=MappingProxyType({}),
)
"""The SLO fields found in the headers of the HTTP request that the current task serves."""


class SloError(ValueError):
    """A field that cannot be read; `field` names it."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field = field
        self.value = value
        super().__init__(f"{field}={value!r} {problem}")


def resolve(classes: Mapping[str, Slo], *sources: Mapping[str, object]) -> Slo:
    """The SLO of one request.

    Args:
        classes: the deployment's classes; one is called "default".
        sources: fields that were given, the weaker ones first.

    Raises:
        SloError: an unknown class, or a target that is not a positive number of milliseconds.
    """
    given: dict[str, object] = {}
    for source in sources:
        given.update({name: source[name] for name in FIELDS if name in source})
    name = given.get("slo_class", DEFAULT_CLASS)
    if not isinstance(name, str) or name not in classes:
        raise SloError("slo_class", name, f"is not one of {sorted(classes)}")
    slo = classes[name]
    ttft = _seconds("ttft_ms", given["ttft_ms"]) if "ttft_ms" in given else slo.ttft_s
    tbt = _seconds("tbt_ms", given["tbt_ms"]) if "tbt_ms" in given else slo.tbt_s
    return Slo(ttft, tbt, name)


def _seconds(field: str, value: object) -> float:
    problem = f"must be a number of milliseconds above 0 and at most {MAX_TARGET_MS:.0f}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SloError(field, value, problem)
    try:
        number = float(value)
    except ValueError:
        raise SloError(field, value, problem) from None
    if not math.isfinite(number) or not 0 < number <= MAX_TARGET_MS:
        raise SloError(field, value, problem)
    return number / 1000
