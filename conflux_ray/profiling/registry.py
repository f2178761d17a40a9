"""The latency profiles that are shipped, and any other by its file. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from conflux_ray.planning.profile import Profile, ProfileError

SHIPPED = Path(__file__).resolve().parents[1] / "profiles"


def profile_name(model: str, device: str, num_ranks: int, base_tp: int = 1) -> str:
    """Name of the profile of a model (name or path) on an instance: `MODEL.DEVICE.spN`, `.tpT` where T is not 1."""
    tensor_parallel = f".tp{base_tp}" if base_tp > 1 else ""
    return f"{Path(model).name}.{device}.sp{num_ranks}{tensor_parallel}"


def list_profiles() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def find_profile(name_or_path: str | Path) -> Profile:
    """The profile of a file, or the shipped one of a name.

    Raises:
        ProfileError: there is none, or it cannot be used.
    """
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        shipped = SHIPPED / f"{name_or_path}.json"
        if not shipped.is_file():
            raise ProfileError(
                f"profile {str(name_or_path)!r}: neither a file nor shipped; shipped are "
                f"{', '.join(list_profiles()) or 'none'}; make one with `conflux profile`"
            )
        path = shipped
    return Profile.load(path)
