"""The exact vLLM this project is written against. Its Python interfaces change between minor versions."""

from importlib.metadata import PackageNotFoundError, version

VLLM_VERSION = "0.26.0"


class VersionError(RuntimeError):
    """The installed vLLM is not the one this project is written against."""


def require_version() -> None:
    """Check the installed vLLM without importing it.

    Raises:
        VersionError: vLLM is missing or of another version.
    """
    try:
        found = version("vllm")
    except PackageNotFoundError:
        raise VersionError(f"vllm is not installed; install vllm=={VLLM_VERSION} (see locks/)") from None
    if found.split("+")[0] != VLLM_VERSION:
        raise VersionError(f"vllm=={found} is installed; conflux-ray needs exactly vllm=={VLLM_VERSION} (see locks/)")
