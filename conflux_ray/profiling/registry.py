"""The latency profiles that are shipped, and any other by its file. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from conflux_ray.planning.profile import Profile, ProfileError

SHIPPED = Path(__file__).resolve().parents[1] / "profiles"


def profile_name(model: str, machine: str, num_ranks: int, base_tp: int = 1) -> str:
    """Name of the profile of a model on an instance: `MODEL.MACHINE.spN`, and `.tpT` where T is not 1.

    Args:
        model: name or path; of a shape without weights the name of the model whose shape it is.
        machine: `cpu`, or `gpu_slug` of its GPUs.
        num_ranks: N.
        base_tp: T.
    """
    tensor_parallel = f".tp{base_tp}" if base_tp > 1 else ""
    return f"{Path(model).name.lower().removesuffix('-shape')}.{machine}.sp{num_ranks}{tensor_parallel}"


def gpu_slug(name: str) -> str:
    """A GPU's name as profiles have it: "NVIDIA H200" is `h200`, "NVIDIA H100 80GB HBM3" is `h100-80gb-hbm3`."""
    return "-".join(name.lower().removeprefix("nvidia ").split())


def shipped_profile(model: str, machine: str, num_ranks: int, base_tp: int = 1) -> Path | None:
    """The file of the shipped profile for these, as for `profile_name`; a tuned model may use that of its base."""
    for name in (model, model.lower().removesuffix("-instruct")):
        path = SHIPPED / f"{profile_name(name, machine, num_ranks, base_tp)}.json"
        if path.is_file():
            return path
    return None


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
