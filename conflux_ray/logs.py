"""Log lines of the server's processes: one format, to standard error, which Ray gathers on the console."""

from __future__ import annotations

import logging
import os
import sys


def configure() -> None:
    """Set up logging in a process of the server. vLLM speaks only of warnings unless VLLM_LOGGING_LEVEL is set."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logger = logging.getLogger("conflux_ray")
    if not logger.handlers:
        # In a replica Ray Serve puts a file of its own in the place of sys.stderr; Ray gathers the original.
        handler = logging.StreamHandler(sys.__stderr__ or sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("CONFLUX_LOG_LEVEL", "INFO"))
        logger.propagate = False
