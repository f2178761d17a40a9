"""The tick arithmetic of resident decodes, against advancing every decode one by one."""

from __future__ import annotations

import numpy as np

from conflux_ray.simulator.decodes import DecodePool
from conflux_ray.simulator.request import Phase, Request, Slo


def prefilled(index: int, prompt: int, output: int, first: float = 0.0) -> Request:
    request = Request(index, 0.0, prompt, output, Slo())
    request.to(Phase.PREFILLING)
    request.computed_tokens = prompt
    request.emit([first])
    return request


def test_a_resident_gets_one_token_a_tick_and_leaves_after_its_last():
    pool = DecodePool(1, 16)
    request = prefilled(0, prompt=5, output=3, first=1.0)
    pool.join(request, 0)
    assert pool.context == [6]
    assert pool.tick(2.0) == []
    assert pool.context == [7]
    assert pool.tick(3.5) == [(request, 0, 1)]
    assert request.times == [1.0, 2.0, 3.5]
    assert (pool.tokens, pool.context, pool.count) == ([0], [0], 0)


def test_a_block_is_needed_when_the_last_one_is_full():
    pool = DecodePool(1, 4)
    pool.join(prefilled(0, prompt=5, output=20), 0)  # context 6: two blocks, room for contexts up to 8
    needs = []
    for tick in range(7):  # contexts 6 ... 12
        needs.append(pool.growth(0))
        pool.tick(float(tick))
    assert needs == [0, 0, 0, 1, 0, 0, 0]


def test_preemption_takes_the_newest_and_turns_its_tokens_into_prompt():
    pool = DecodePool(1, 4)
    old, new = prefilled(0, 5, 9), prefilled(1, 7, 9)
    pool.join(old, 0)
    pool.tick(1.0)
    pool.join(new, 0)
    pool.tick(2.0)
    request, held = pool.preempt(0)
    assert request is new
    assert held == 2  # contexts 8: two blocks of 4
    assert (new.phase, new.total_tokens, new.computed_tokens) == (Phase.WAITING, 9, 0)
    assert pool.context == [old.prompt_tokens + 1 + 2]


def test_pool_agrees_with_advancing_each_decode():
    rng = np.random.default_rng(5)
    block = 4
    pool = DecodePool(2, block)
    contexts: dict[int, int] = {}  # of each resident in the coming iteration
    left: dict[int, int] = {}
    rank_of: dict[int, int] = {}
    held: dict[int, int] = {}
    order: list[int] = []
    for step in range(400):
        if rng.random() < 0.5:
            request = prefilled(step, int(rng.integers(1, 30)), int(rng.integers(2, 25)))
            rank = int(rng.integers(2))
            pool.join(request, rank)
            contexts[step], left[step], rank_of[step] = request.prompt_tokens + 1, request.output_tokens - 1, rank
            held[step] = -(-contexts[step] // block)
            order.append(step)
        if rng.random() < 0.1:
            rank = int(rng.integers(2))
            mine = [i for i in order if rank_of[i] == rank]
            if mine:
                request, blocks = pool.preempt(rank)
                assert (request.index, blocks) == (mine[-1], held[mine[-1]])
                order.remove(mine[-1])
        for rank in range(2):
            mine = [i for i in order if rank_of[i] == rank]
            growth = sum(-(-contexts[i] // block) - held[i] for i in mine)
            assert pool.growth(rank) == growth
            assert pool.context[rank] == sum(contexts[i] for i in mine)
            assert pool.tokens[rank] == len(mine)
        ended = {request.index: blocks for request, _, blocks in _tick(pool, order, contexts, left, held, block, step)}
        expected = {i: held[i] for i in order if left[i] == 0}
        assert ended == expected
        order = [i for i in order if left[i]]


def _tick(pool, order, contexts, left, held, block, step):
    for i in order:
        held[i] = -(-contexts[i] // block)
        contexts[i] += 1
        left[i] -= 1
    return pool.tick(float(step))
