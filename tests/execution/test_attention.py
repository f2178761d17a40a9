"""The device interface on the CPU: streams and events, attention, and the two views of a KV pool."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

pytestmark = pytest.mark.heavy

torch = pytest.importorskip("torch")
from conflux_ray.execution.attention import KVPool  # noqa: E402
from conflux_ray.execution.batch import slots, stack_tables  # noqa: E402
from conflux_ray.execution.cpu import CpuDevice  # noqa: E402
from conflux_ray.execution.device import Sequences  # noqa: E402
from conflux_ray.execution.exchange import HeadLayout  # noqa: E402

LAYOUT = HeadLayout(num_heads=8, num_kv_heads=4, head_size=16, sp_degree=2)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture
def pool() -> KVPool:
    return KVPool(2, 12, BLOCK_SIZE, LAYOUT, torch.float32, torch.device("cpu"))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write(device: CpuDevice, view: torch.Tensor, table: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
    blocks, offsets = slots(np.array(table), np.arange(len(k)), view.shape[2])
    device.write_kv(view, torch.from_numpy(blocks), torch.from_numpy(offsets), k, v)


def sequences(tables: list[list[int]], query_lens: list[int], seq_lens: list[int], page: int) -> Sequences:
    return Sequences(
        query_lens,
        seq_lens,
        torch.from_numpy(stack_tables([np.array(t) for t in tables], seq_lens, page)),
        torch.tensor(np.concatenate([[0], np.cumsum(query_lens)]), dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
    )


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence, in float64, one query and head at a time; the queries are the last of the keys' positions."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group, first = q.shape[1] // k.shape[1], len(k) - len(q)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            keys = k[: first + i + 1, head // group].double()
            weights = torch.softmax(keys @ q[i, head].double() * scale, dim=0)
            out[i, head] = weights @ v[: first + i + 1, head // group].double()
    return out


def test_both_views_are_the_same_bytes(pool: KVPool) -> None:
    for layer, view in zip(pool.layers, pool.prefill_views, strict=True):
        assert view.data_ptr() == layer.data_ptr()
        assert view.shape == (12, 2, 2 * BLOCK_SIZE, 2, 16)
        assert view.is_contiguous()


def test_a_block_keeps_its_bytes_and_its_halves_in_either_view(pool: KVPool) -> None:
    pool.prefill_views[1][5, 0] = 1.0  # K of page 5
    assert (pool.layers[1][5, 0] == 1.0).all()
    assert not pool.layers[1][5, 1].any()  # V of the same block
    assert not pool.layers[1][:5].any()
    assert not pool.layers[1][6:].any()
    assert not pool.layers[0].any()


def test_a_page_holds_p_times_the_tokens_of_one_pth_of_the_heads(device: CpuDevice, pool: KVPool) -> None:
    k, v = random(8, 2, 16, seed=1), random(8, 2, 16, seed=2)
    write(device, pool.prefill_views[0], [3], k, v)
    assert torch.equal(pool.layers[0][3, 0].flatten(), k.flatten())
    assert torch.equal(pool.layers[0][3, 1].flatten(), v.flatten())


def test_poison_overwrites_the_named_blocks_of_every_layer_only(pool: KVPool) -> None:
    pool.poison([2, 7], 3.0e4)
    for layer in pool.layers:
        assert (layer[[2, 7]] == 3.0e4).all()
        assert not layer[[0, 1, 3, 4, 5, 6, 8, 9, 10, 11]].any()


def test_layers_of_a_warm_up_pool_share_one_memory() -> None:
    pool = KVPool(3, 4, BLOCK_SIZE, LAYOUT, torch.float32, torch.device("cpu"), one_layer=True)
    assert len(pool.layers) == 3
    assert len({layer.data_ptr() for layer in pool.layers}) == 1


def test_every_rank_is_sent_its_shard_of_queries_keys_and_values(device: CpuDevice) -> None:
    q, k, v = random(3, 8, 16, seed=1), random(3, 4, 16, seed=2), random(3, 4, 16, seed=3)
    packed = device.pack_heads(q, k, v, 2)
    assert packed.shape == (6, 4 + 2 + 2, 16)
    for rank in range(2):
        want = torch.cat(
            [q[:, 4 * rank : 4 * rank + 4], k[:, 2 * rank : 2 * rank + 2], v[:, 2 * rank : 2 * rank + 2]], 1
        )
        assert torch.equal(packed[3 * rank : 3 * rank + 3], want)


def test_head_shards_come_back_side_by_side(device: CpuDevice) -> None:
    attended = random(5, 8, 16)
    output = torch.zeros(5, 8, 16)
    device.merge_heads(torch.cat([attended[:, :4], attended[:, 4:]]), output)
    assert torch.equal(output, attended)


def test_kv_moved_from_head_shards_is_what_a_local_write_would_have_left(device: CpuDevice, pool: KVPool) -> None:
    k, v = random(10, 4, 16, seed=1), random(10, 4, 16, seed=2)
    ranks = [KVPool(1, 12, BLOCK_SIZE, LAYOUT, torch.float32, torch.device("cpu")) for _ in range(2)]
    pages = [[4, 9], [1, 6]]  # of the request on each rank
    shards = []
    for rank, source in enumerate(ranks):
        heads = slice(2 * rank, 2 * rank + 2)
        write(device, source.prefill_views[0], pages[rank], k[:, heads].contiguous(), v[:, heads].contiguous())
        blocks, offsets = slots(np.array(pages[rank]), np.arange(10), source.prefill_page)
        shards.append(device.gather_kv(source.prefill_views[0], torch.from_numpy(blocks), torch.from_numpy(offsets)))
    table = [8, 2, 5]
    blocks, offsets = slots(np.array(table), np.arange(10), BLOCK_SIZE)
    device.scatter_kv(pool.layers[0], torch.from_numpy(blocks), torch.from_numpy(offsets), torch.cat(shards))
    write(device, pool.layers[1], table, k, v)
    assert torch.equal(pool.layers[0], pool.layers[1])


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1, 1, 1], [1, 9, 14]),  # decodes
        ([5], [5]),  # a whole prompt
        ([3, 4, 1], [12, 4, 8]),  # chunks with and without earlier context
        ([2, 6], [6, 6]),
    ],
)
@pytest.mark.parametrize("view_name", ["decode", "prefill"])
def test_attention_is_the_softmax_over_each_sequences_own_blocks(
    device: CpuDevice, pool: KVPool, view_name: str, query_lens: list[int], seq_lens: list[int]
) -> None:
    view = pool.layers[0] if view_name == "decode" else pool.prefill_views[0]
    view[:] = 100.0  # what no sequence may read
    page, kv_heads = view.shape[2], view.shape[3]
    free = [7, 2, 11, 4, 9, 1, 8, 3, 10, 5, 6]
    tables, keys, values = [], [], []
    for i, length in enumerate(seq_lens):
        tables.append([free.pop() for _ in range(-(-length // page))])
        keys.append(random(length, kv_heads, 16, seed=10 + i))
        values.append(random(length, kv_heads, 16, seed=20 + i))
        write(device, view, tables[-1], keys[-1], values[-1])
    query, scale = random(sum(query_lens), 2 * kv_heads, 16, seed=3), 1 / math.sqrt(16)
    output = torch.full_like(query, float("nan"))
    device.attend(query, view, sequences(tables, query_lens, seq_lens, page), scale, output)
    start = 0
    for i, count in enumerate(query_lens):
        want = softmax_attention(query[start : start + count], keys[i], values[i], scale)
        torch.testing.assert_close(output[start : start + count].double(), want, atol=1e-5, rtol=1e-5)
        start += count


def test_a_shard_attended_as_its_own_sequence_is_that_part_of_the_chunk(device: CpuDevice, pool: KVPool) -> None:
    table, view = [4, 9, 2], pool.layers[0]
    k, v, q = random(11, 4, 16, seed=1), random(11, 4, 16, seed=2), random(11, 8, 16, seed=3)
    write(device, view, table, k, v)
    whole, parts = torch.empty_like(q), torch.empty_like(q)
    device.attend(q, view, sequences([table], [11], [11], BLOCK_SIZE), 0.25, whole)
    # Received in order of rank: tokens 6..11 first, then 0..6.
    swapped = torch.cat([q[6:], q[:6]])
    device.attend(swapped, view, sequences([table, table], [5, 6], [11, 6], BLOCK_SIZE), 0.25, parts)
    torch.testing.assert_close(torch.cat([parts[5:], parts[:5]]), whole, atol=1e-6, rtol=1e-6)
