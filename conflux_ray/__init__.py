"""ConfluxServe on Ray: LLM serving with Conflux Parallelism."""

__version__ = "0.1.0"
