"""vLLM's own engine in this process, to measure beside ours (`conflux bench gpu decode`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm import LLM, SamplingParams


def decode_steps(
    model: str,
    load_format: str,
    max_model_len: int,
    count: int,
    make_prompts: Callable[[int], Sequence[Sequence[int]]],
    output: int,
    settle: int,
) -> list[float]:
    """When the steps ended in which all requests decoded, seconds of the performance counter.

    Args:
        model: folder.
        load_format: of its weights.
        max_model_len: of the engine.
        count: requests.
        make_prompts: their token ids, from the size of the vocabulary.
        output: tokens that each generates.
        settle: steps with decodes alone that do not count, at the beginning and the end.
    """
    llm = LLM(
        model,
        load_format=load_format,
        max_model_len=max_model_len,
        max_num_seqs=max(count, 2),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(make_prompts(llm.model_config.get_vocab_size())):
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
    times: list[float] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if len(outputs) == count and all(settle < len(o.outputs[0].token_ids) < output for o in outputs):
            times.append(time.perf_counter())
    return times
