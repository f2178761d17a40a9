"""Everything that can be set about an ingress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conflux_ray.serving.slo import DEFAULT_CLASS
from conflux_ray.wire import Slo


@dataclass(frozen=True)
class IngressOptions:
    """Settings of one ingress replica; seconds unless the name says otherwise."""

    model_path: str  # folder with config.json and the tokenizer; weights are not read
    served_model_name: str
    max_model_len: int | None = None  # tokens; None: what the instances say
    trust_remote_code: bool = False
    api_keys: tuple[str, ...] = ()  # none: everyone may ask
    extra_args: tuple[str, ...] = ()  # more arguments of `vllm serve`, e.g. ("--tool-call-parser", "hermes")

    slo_classes: Mapping[str, Slo] = field(default_factory=lambda: {DEFAULT_CLASS: Slo(2.0, 0.2)})

    slo_objective: float = 0.99  # share of requests that should meet their promises; the rest is the error budget

    max_in_flight: int = 2048  # HTTP requests to the model; more get 429
    max_waiting_for_instance: int = 256  # requests held while no instance is ready; more get 503 at once
    no_instance_timeout: float = 10.0  # how long they are held
    retry_after: float = 1.0  # told to clients with 429 and 503
    max_body_bytes: int = 32 * 1024 * 1024
    max_attempts: int = 4  # instances a request is tried on, the first included
    routing: str = "queued_work"  # how instances are chosen: a key of router.ROUTING

    def __post_init__(self) -> None:
        if DEFAULT_CLASS not in self.slo_classes:
            raise ValueError(f"slo_classes={sorted(self.slo_classes)} must contain {DEFAULT_CLASS!r}")
        if not 0 < self.slo_objective < 1:
            raise ValueError(f"slo_objective={self.slo_objective} must be between 0 and 1")
        for name in ("max_in_flight", "max_waiting_for_instance", "max_body_bytes", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
