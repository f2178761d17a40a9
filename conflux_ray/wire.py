"""What an ingress and an instance say to each other: typed messages in msgpack, never pickle.

An ingress opens a *session* with an instance (`Hello` -> `Ready` or `Rejected`), adds and aborts requests in it, and
receives one `Outputs` message per iteration. A session ends when its connection is lost, when either side says `Bye`,
or when the instance answers `Rejected`; the requests of an ended session are over on the instance, and the ingress
resubmits them elsewhere with a higher `attempt`. Two numbers fence late output: an output counts only if its `attempt`
is the ingress's present one and its `token_index` is the number of tokens the ingress already has.

Every message is an array whose first element is its tag. A field may be added at the end, with a default, without a
new `PROTOCOL_VERSION`; any other change needs one. Times are durations in seconds, never clock values: the clocks of
two nodes differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 3


class FinishReason(IntEnum):
    """Why a request produces no more tokens. The first five have vLLM's values."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4
    REJECTED = 5  # not served here (draining, no instance): may be tried elsewhere, or later
    OVERLOADED = 6  # not served here, the queue is full: may be tried elsewhere, or later


class Feature:
    """Names of what an engine may or may not support; `Ready.features` lists those it does."""

    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    LOGPROB_TOKEN_IDS = "logprob_token_ids"
    PENALTIES = "penalties"  # presence, frequency and repetition penalty
    MIN_P = "min_p"
    MIN_TOKENS = "min_tokens"
    SEED = "seed"
    LOGIT_BIAS = "logit_bias"
    BAD_WORDS = "bad_words"
    ALLOWED_TOKEN_IDS = "allowed_token_ids"
    STRUCTURED_OUTPUTS = "structured_outputs"
    REPETITION_DETECTION = "repetition_detection"
    THINKING_TOKEN_BUDGET = "thinking_token_budget"


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """How to reach an instance: what it puts into the registry and ingresses read there."""

    instance_id: str
    incarnation: str  # differs at every start of the same instance
    address: str  # tcp://host:port of its InstanceEndpoint
    token: str = field(repr=False)  # secret that a Hello must carry


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How to choose and when to stop: the engine's part of vLLM's SamplingParams, token ids resolved.

    Stop strings, detokenization and `n` are the ingress's and do not appear.
    """

    max_tokens: int
    min_tokens: int = 0  # until then, every id in all_stop_token_ids is masked
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    eos_token_id: int | None = None  # None with ignore_eos
    stop_token_ids: tuple[int, ...] = ()  # the client's, and the model's further end-of-sequence ids
    all_stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] | None = None
    logprobs: int | None = None  # alternatives per token; -1: the whole vocabulary; None: no log-probabilities
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    structured_outputs: dict[str, Any] | None = None  # the fields of vLLM's StructuredOutputsParams that are set
    repetition_detection: tuple[int, int, int] | None = None  # largest and smallest pattern, least count
    thinking_token_budget: int | None = None
    skip_reading_prefix_cache: bool = False

    def required_features(self) -> frozenset[str]:
        """The `Feature`s an engine needs to honour these parameters."""
        penalties = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        uses = {
            Feature.LOGPROBS: self.logprobs is not None,
            Feature.PROMPT_LOGPROBS: self.prompt_logprobs is not None,
            Feature.LOGPROB_TOKEN_IDS: bool(self.logprob_token_ids),
            Feature.PENALTIES: penalties,
            Feature.MIN_P: self.min_p > 0,
            Feature.MIN_TOKENS: self.min_tokens > 0,
            Feature.SEED: self.seed is not None and self.temperature > 0,
            Feature.LOGIT_BIAS: bool(self.logit_bias),
            Feature.BAD_WORDS: bool(self.bad_words_token_ids),
            Feature.ALLOWED_TOKEN_IDS: self.allowed_token_ids is not None,
            Feature.STRUCTURED_OUTPUTS: self.structured_outputs is not None,
            Feature.REPETITION_DETECTION: self.repetition_detection is not None,
            Feature.THINKING_TOKEN_BUDGET: self.thinking_token_budget is not None,
        }
        return frozenset(name for name, used in uses.items() if used)


class Slo(msgspec.Struct, frozen=True, array_like=True):
    """What the client was promised. The deadline of token i (from 1) is arrival + ttft_s + (i - 1) * tbt_s."""

    ttft_s: float
    tbt_s: float
    slo_class: str = "default"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Ingress to instance, first message of a session. `token` is the instance's secret, from the registry."""

    version: int
    ingress_id: str
    token: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Instance to ingress, the answer to `Hello`: what the ingress must know of the engine."""

    version: int
    instance_id: str
    incarnation: str  # differs at every start of the same instance
    model: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    max_num_seqs: int
    features: tuple[str, ...] = ()


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """Instance to ingress: there is no session (wrong token or version, unknown or dropped peer)."""

    reason: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Ingress to instance, every few seconds: `Rejected` comes back if the instance has dropped the session."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Either side: the session ends now."""

    reason: str = ""


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Ingress to instance: generate for this request.

    `output_token_ids` are tokens the client already has, when an earlier attempt ran elsewhere: the engine continues
    at position len(prompt_token_ids) + len(output_token_ids), they count against max_tokens and min_tokens and in
    penalties, and the first token it emits has token_index = len(output_token_ids).
    """

    request_id: str
    attempt: int
    prompt_token_ids: list[int]
    sampling: Sampling
    slo: Slo
    output_token_ids: list[int] = []
    priority: int = 0  # smaller is more urgent, as in vLLM
    age_s: float = 0.0  # since the request arrived at the ingress
    cache_salt: str | None = None


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ingress to instance: drop these (request_id, attempt); unknown ones are ignored. No output follows."""

    requests: list[tuple[str, int]]


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of n tokens: little-endian arrays, (n, width), (n, width) and (n,).

    Column 0 is the sampled token, the others are the most likely ones, best first; `ranks` is the sampled token's
    rank in the vocabulary, from 1.
    """

    width: int
    token_ids: bytes  # int32
    logprobs: bytes  # float32
    ranks: bytes  # int32

    @classmethod
    def from_arrays(cls, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, ranks: npt.ArrayLike) -> Logprobs:
        """Pack arrays of shape (n, width), (n, width) and (n,)."""
        ids = np.ascontiguousarray(token_ids, dtype="<i4")
        values = np.ascontiguousarray(logprobs, dtype="<f4")
        rank = np.ascontiguousarray(ranks, dtype="<i4")
        if ids.ndim != 2 or values.shape != ids.shape or rank.shape != ids.shape[:1]:
            raise ValueError(f"logprobs shapes {ids.shape}, {values.shape}, {rank.shape} are not (n, w), (n, w), (n,)")
        return cls(ids.shape[1], ids.tobytes(), values.tobytes(), rank.tobytes())

    def arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """The arrays given to `from_arrays`."""
        ids = np.frombuffer(self.token_ids, dtype="<i4").reshape(-1, self.width)
        values = np.frombuffer(self.logprobs, dtype="<f4").reshape(-1, self.width)
        return ids, values, np.frombuffer(self.ranks, dtype="<i4")


class RequestOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one iteration produced for one request."""

    request_id: str
    attempt: int
    token_index: int  # position of new_token_ids[0] in the request's output
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # with STOP: the stop token id, None for end-of-sequence
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int | None = None  # with the first token: prompt tokens taken from the prefix cache
    queued_s: float | None = None  # with the first token: from receipt to first scheduling
    error: str | None = None  # with ERROR, REJECTED or OVERLOADED: for the log; clients see a general message


class LoadReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How busy an instance is, by its own latency model."""

    queued_work_s: float  # time to finish the prefills it holds, and the load of its decodes
    capacity: float  # prompt tokens per second: turns tokens that it has not reported yet into seconds
    running: int
    waiting: int
    kv_used_fraction: float
    draining: bool = False  # takes nothing more: this instance goes
    closing: bool = False  # the deployment is being drained: every instance takes only what an ingress has let in


class Outputs(msgspec.Struct, array_like=True, tag="out", gc=False):
    """Instance to ingress: everything one iteration produced for that ingress, and the present load."""

    instance_id: str
    incarnation: str
    received: int  # AddRequests of this session that the report already counts
    outputs: list[RequestOutput]
    report: LoadReport


ToInstance = Hello | AddRequest | Abort | Ping | Bye
ToIngress = Ready | Rejected | Outputs | Bye

_encoder = msgspec.msgpack.Encoder()
_to_instance: msgspec.msgpack.Decoder[ToInstance] = msgspec.msgpack.Decoder(ToInstance)
_to_ingress: msgspec.msgpack.Decoder[ToIngress] = msgspec.msgpack.Decoder(ToIngress)


def encode(message: ToInstance | ToIngress) -> bytes:
    """Serialise a message."""
    return _encoder.encode(message)


def decode_to_instance(data: bytes) -> ToInstance:
    """Parse what an ingress sent; raises msgspec.DecodeError (ValidationError included) for anything else."""
    return _to_instance.decode(data)


def decode_to_ingress(data: bytes) -> ToIngress:
    """Parse what an instance sent; raises msgspec.DecodeError (ValidationError included) for anything else."""
    return _to_ingress.decode(data)
