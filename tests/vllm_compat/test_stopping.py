"""A request of ours stops where vLLM's `check_stop` stops it, and for the same reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_ray.execution.request import Request
from conflux_ray.wire import FinishReason, Sampling, Slo

pytestmark = pytest.mark.heavy

PROMPT = 3
TOKEN = st.integers(0, 4)  # few, so that stop tokens come
EOS = st.one_of(st.none(), TOKEN)


def vllms_answer(
    tokens: list[int], sampling: Sampling, max_model_len: int
) -> tuple[int, FinishReason, int | str | None] | None:
    """(tokens, reason, stop reason) where vLLM ends a request that samples `tokens`; None if it goes on."""
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.request import RequestStatus

    params = SimpleNamespace(
        min_tokens=sampling.min_tokens,
        eos_token_id=None if sampling.ignore_eos else sampling.eos_token_id,
        stop_token_ids=list(sampling.stop_token_ids),
        repetition_detection=None,
    )
    for count in range(1, len(tokens) + 1):
        request = SimpleNamespace(
            pooling_params=None,
            sampling_params=params,
            num_output_tokens=count,
            output_token_ids=tokens[:count],
            num_tokens=PROMPT + count,
            max_tokens=sampling.max_tokens,
            status=None,
            stop_reason=None,
        )
        if check_stop(request, max_model_len):
            reason = FinishReason(int(RequestStatus.get_finished_reason(request.status)))
            return count, reason, request.stop_reason
    return None


def our_answer(
    tokens: list[int], sampling: Sampling, max_model_len: int
) -> tuple[int, FinishReason | None, int | str | None] | None:
    request = Request("r", 0, [9] * PROMPT, sampling, Slo(1.0, 0.1), 0.0)
    for count, token in enumerate(tokens, 1):
        if request.accept(token, max_model_len):
            return count, request.finish_reason, request.stop_reason
    return None


@given(
    tokens=st.lists(TOKEN, min_size=1, max_size=8),
    max_tokens=st.integers(1, 9),
    min_share=st.floats(0, 1),
    eos=EOS,
    stop=st.lists(TOKEN, max_size=2, unique=True),
    ignore_eos=st.booleans(),
    max_model_len=st.integers(PROMPT + 1, PROMPT + 10),
)
def test_the_end_and_its_reason_are_vllms(
    tokens: list[int],
    max_tokens: int,
    min_share: float,
    eos: int | None,
    stop: list[int],
    ignore_eos: bool,
    max_model_len: int,
) -> None:
    # vLLM's front end refuses min_tokens above max_tokens and lowers max_tokens to what max_model_len leaves.
    min_tokens = int(min_share * min(max_tokens, max_model_len - PROMPT))
    sampling = Sampling(
        max_tokens, min_tokens=min_tokens, eos_token_id=eos, stop_token_ids=tuple(stop), ignore_eos=ignore_eos
    )
    assert our_answer(tokens, sampling, max_model_len) == vllms_answer(tokens, sampling, max_model_len)
