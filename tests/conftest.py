"""Shared set-up: the CPU platform for vLLM, quiet logs, and GPU tests only where there are GPUs."""

import os

import pytest
from hypothesis import settings

# How long an example takes on a busy machine says nothing about the code.
settings.register_profile("conflux", deadline=None)
settings.load_profile("conflux")

os.environ.setdefault("CONFLUX_VLLM_PLATFORM", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs NVIDIA GPUs"))
