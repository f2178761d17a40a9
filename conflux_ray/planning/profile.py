"""Profile files: a fitted latency model with what a reader needs to trust it (section 6.2, "Estimator construction").

JSON, one file per (model, machine, base TP, N). `SCHEMA_VERSION` changes whenever an older reader would misread it;
what an older version lacks has a default, so the versions before are read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conflux_ray.planning.latency_model import Affine, Contention, Curve, GemmCurve, LatencyModel

SCHEMA_VERSION = 2
"""2: components may bend, and an iteration may have no barrier."""
READABLE = (1, 2)

_AFFINE = ("decode", "prefill", "comm", "all_reduce", "transfer", "host")


class ProfileError(ValueError):
    """A profile file that cannot be used: the message names the file, the field and the remedy."""


@dataclass(frozen=True, slots=True)
class FitError:
    """Absolute percentage errors of predictions against measurements.

    Args:
        count: measurements.
        mape: mean, percent.
        p50: median, percent.
        p95: 95th percentile, percent.
        max: largest, percent.
    """

    count: int
    mape: float
    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A latency model and where it comes from.

    Args:
        latency: the model; its `name` is the profile's identity.
        measured: False for stated figures that nobody measured.
        model: the served model.
        machine: the device, in words.
        base_tp: devices of one logical rank.
        versions: of the software that was measured, by package.
        date: ISO 8601, of the measurement.
        rows: number of profile rows of each kind.
        in_sample: errors on the rows that were fitted, per component and for whole iterations.
        held_out: errors on rows that were not: cross-validated for components, set aside for whole iterations.
        gemm_forms: cross-validated errors of each form of f_GEMM; `latency.gemm.form` is the chosen one.
        conditions: how it was measured: ranges, dtype, repeats, and the noise seen; for readers, and to evaluate alike.
    """

    latency: LatencyModel
    measured: bool
    model: str
    machine: str
    base_tp: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)
    in_sample: Mapping[str, FitError] = field(default_factory=dict)
    held_out: Mapping[str, FitError] = field(default_factory=dict)
    gemm_forms: Mapping[str, FitError] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file, readable and with sorted keys, so that two profiles can be compared line by line."""
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        path.write_text(json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read and check a file.

        Raises:
            ProfileError: it cannot be read, is no profile, has another schema version, or a field is wrong.
        """
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ProfileError(f"{path}: cannot read the profile ({error}); make one with `conflux profile`") from error
        return cls.parse(document, str(path))

    @classmethod
    def parse(cls, document: Any, source: str = "profile") -> Profile:
        """Check a decoded document.

        Args:
            document: what `json.loads` returned.
            source: name for error messages.

        Raises:
            ProfileError: as for `load`.
        """
        if not isinstance(document, dict):
            raise ProfileError(f"{source}: a profile is a JSON object, this is {type(document).__name__}")
        version = document.get("schema_version")
        if version not in READABLE:
            raise ProfileError(
                f"{source}: schema_version={version!r}, this release reads {' and '.join(map(str, READABLE))}; "
                f"profile again with `conflux profile`"
            )
        reader = _Reader(source)
        return cls(
            latency=_latency(reader, reader.get(document, "latency", dict)),
            measured=reader.get(document, "measured", bool),
            model=reader.get(document, "model", str),
            machine=reader.get(document, "machine", str),
            base_tp=reader.get(document, "base_tp", int),
            versions=reader.get(document, "versions", dict),
            date=reader.get(document, "date", str),
            rows=reader.get(document, "rows", dict),
            in_sample=reader.errors(document, "in_sample"),
            held_out=reader.errors(document, "held_out"),
            gemm_forms=reader.errors(document, "gemm_forms"),
            conditions=reader.get({"conditions": {}, **document}, "conditions", dict),
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access to a decoded document, with errors that name the field."""

    source: str

    def get(self, document: Mapping[str, Any], name: str, kind: type) -> Any:
        if name not in document:
            raise ProfileError(f"{self.source}: field {name!r} is missing; profile again with `conflux profile`")
        value = document[name]
        accepts: tuple[type, ...] = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepts) or (isinstance(value, bool) and kind is not bool):
            raise ProfileError(f"{self.source}: field {name!r} is {value!r}, expected {kind.__name__}")
        return value

    def build(self, where: str, make: Any, /, **fields: Any) -> Any:
        try:
            return make(**fields)
        except (TypeError, ValueError) as error:
            raise ProfileError(f"{self.source}: field {where!r} is not valid: {error}") from error

    def errors(self, document: Mapping[str, Any], name: str) -> dict[str, FitError]:
        return {
            key: self.build(f"{name}.{key}", FitError, **value) for key, value in self.get(document, name, dict).items()
        }


def _latency(reader: _Reader, fields: Mapping[str, Any]) -> LatencyModel:
    gemm = reader.get(fields, "gemm", dict)
    affine = {name: _component(reader, name, reader.get(fields, name, dict)) for name in _AFFINE}
    return reader.build(
        "latency",
        LatencyModel,
        name=reader.get(fields, "name", str),
        num_layers=reader.get(fields, "num_layers", int),
        num_ranks=reader.get(fields, "num_ranks", int),
        gemm=reader.build(
            "gemm",
            GemmCurve,
            tokens=tuple(reader.get(gemm, "tokens", list)),
            seconds=tuple(reader.get(gemm, "seconds", list)),
            slope=reader.get(gemm, "slope", float),
            form=reader.get(gemm, "form", str),
        ),
        contention=tuple(
            reader.build("contention", Contention, **entry) for entry in reader.get(fields, "contention", list)
        ),
        serial=reader.get(fields, "serial", bool),
        transfer_exposed=reader.get(fields, "transfer_exposed", float),
        barrier=reader.get({"barrier": True, **fields}, "barrier", bool),
        **affine,
    )


def _component(reader: _Reader, name: str, fields: Mapping[str, Any]) -> Affine:
    """An affine component, or one that bends, which has knots."""
    if "knots" not in fields:
        built: Affine = reader.build(name, Affine, **fields)
        return built
    knots, seconds = (tuple(reader.get(fields, key, list)) for key in ("knots", "seconds"))
    bent: Curve = reader.build(name, Curve, **{**fields, "knots": knots, "seconds": seconds})
    return bent
