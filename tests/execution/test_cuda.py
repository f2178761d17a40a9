"""The CUDA device's kernels and copies against the plain torch ones of the device interface."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from conflux_ray.execution.cpu import CpuDevice
from conflux_ray.execution.device import Device, Sequences

pytestmark = [pytest.mark.gpu, pytest.mark.heavy]

HEAD_SHAPES = [
    # query heads, KV heads, head size, SP degree
    (40, 8, 128, 2),
    (12, 6, 64, 3),
    (8, 4, 16, 4),
    (9, 3, 64, 1),
]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module")
def plain() -> Iterator[Device]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture(scope="module")
def cuda() -> Device:
    from conflux_ray.execution.cuda import CudaDevice

    device = CudaDevice(0, flash_attention=True, prefill_page=128)
    device.bind()
    return device


def rows(n: int, heads: int, size: int, dtype: torch.dtype, seed: int, padding: int = 0) -> torch.Tensor:
    """Values (n, heads, size) whose tokens lie `padding` elements apart, as slices of a packed projection do."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(n, heads * size + padding, generator=generator).to(dtype).cuda()
    return wide[:, : heads * size].view(n, heads, size)


def slots(n: int, num_blocks: int, page: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n distinct (block, offset) of a view."""
    chosen = np.random.default_rng(seed).permutation(num_blocks * page)[:n]
    return torch.from_numpy(chosen // page).cuda(), torch.from_numpy(chosen % page).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "degree"), HEAD_SHAPES)
@pytest.mark.parametrize("n", [0, 1, 37])
def test_heads_packed_by_destination_are_the_plain_ones(
    plain: Device, cuda: Device, n: int, heads: int, kv_heads: int, size: int, degree: int, dtype: torch.dtype
) -> None:
    q = rows(n, heads, size, dtype, 1, padding=2 * kv_heads * size)
    k, v = rows(n, kv_heads, size, dtype, 2, padding=32), rows(n, kv_heads, size, dtype, 3)
    packed = cuda.pack_heads(q, k, v, degree)
    torch.testing.assert_close(packed, plain.pack_heads(q, k, v, degree), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "degree"), HEAD_SHAPES)
@pytest.mark.parametrize("n", [0, 1, 37])
def test_heads_written_for_one_rank_are_its_part_of_the_packed_ones(
    plain: Device, n: int, heads: int, kv_heads: int, size: int, degree: int, dtype: torch.dtype
) -> None:
    from conflux_ray.execution import kernels

    q = rows(n, heads, size, dtype, 1, padding=2 * kv_heads * size)
    k, v = rows(n, kv_heads, size, dtype, 2, padding=32), rows(n, kv_heads, size, dtype, 3)
    packed = plain.pack_heads(q, k, v, degree)
    for rank in range(degree):
        target = torch.zeros(n + 2, *packed.shape[1:], dtype=dtype).cuda()
        kernels.push_heads(q, k, v, degree, rank, target[1 : n + 1])
        torch.testing.assert_close(target[1 : n + 1], packed[rank * n : (rank + 1) * n], rtol=0, atol=0)
        assert not target[0].any()
        assert not target[-1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 37])
def test_copied_heads_stay_within_their_place(n: int, dtype: torch.dtype) -> None:
    from conflux_ray.execution import kernels

    source = rows(n, 6, 48, dtype, 1, padding=32)
    target = torch.zeros(n, 20, 48, dtype=dtype).cuda()
    kernels.copy_heads(source, target[:, 7:13])
    torch.testing.assert_close(target[:, 7:13], source, rtol=0, atol=0)
    assert not target[:, :7].any()
    assert not target[:, 13:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "degree"), HEAD_SHAPES)
@pytest.mark.parametrize("n", [0, 1, 37])
def test_merged_head_shards_are_the_plain_ones(
    plain: Device, cuda: Device, n: int, heads: int, kv_heads: int, size: int, degree: int, dtype: torch.dtype
) -> None:
    shards = rows(degree * n, heads // degree, size, dtype, 1)
    got, want = torch.zeros(n, heads, size, dtype=dtype).cuda(), torch.zeros(n, heads, size, dtype=dtype).cuda()
    cuda.merge_heads(shards, got)
    plain.merge_heads(shards, want)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "degree"), HEAD_SHAPES)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("n", [0, 1, 37])
def test_kv_written_and_gathered_in_both_views_is_the_plain_one(
    plain: Device,
    cuda: Device,
    n: int,
    sharded: bool,
    heads: int,
    kv_heads: int,
    size: int,
    degree: int,
    dtype: torch.dtype,
) -> None:
    got, want = (torch.zeros(7, 2, 8, kv_heads, size, dtype=dtype).cuda() for _ in range(2))
    if sharded:
        shape = (7, 2, 8 * degree, kv_heads // degree, size)
        got, want = got.view(shape), want.view(shape)
    page, view_heads = got.shape[2:4]
    blocks, offsets = slots(n, 7, page, 4)
    k, v = rows(n, view_heads, size, dtype, 5, padding=64), rows(n, view_heads, size, dtype, 6)
    cuda.write_kv(got, blocks, offsets, k, v)
    plain.write_kv(want, blocks, offsets, k, v)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    read = cuda.gather_kv(got, blocks, offsets)
    torch.testing.assert_close(read, plain.gather_kv(want, blocks, offsets), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "degree"), HEAD_SHAPES)
@pytest.mark.parametrize("n", [0, 1, 37])
def test_scattered_head_shards_are_the_plain_ones(
    plain: Device, cuda: Device, n: int, heads: int, kv_heads: int, size: int, degree: int, dtype: torch.dtype
) -> None:
    got, want = (torch.zeros(7, 2, 8, kv_heads, size, dtype=dtype).cuda() for _ in range(2))
    blocks, offsets = slots(n, 7, 8, 4)
    shards = rows(degree * n, 2 * (kv_heads // degree), size, dtype, 7).view(degree * n, 2, kv_heads // degree, size)
    cuda.scatter_kv(got, blocks, offsets, shards)
    plain.scatter_kv(want, blocks, offsets, shards)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def attention_case(page: int, query_lens: list[int], seq_lens: list[int]) -> Sequences:
    needed = [-(-length // page) for length in seq_lens]
    tables = np.zeros((len(seq_lens), max(needed)), np.int32)
    order = np.random.default_rng(8).permutation(sum(needed)).astype(np.int32) + 1
    start = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[start : start + count]
        start += count
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return Sequences(
        query_lens,
        seq_lens,
        torch.from_numpy(tables).cuda(),
        torch.from_numpy(starts).cuda(),
        torch.tensor(seq_lens, dtype=torch.int32).cuda(),
    )


@pytest.mark.parametrize("margin", [0, 48])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page", "query_lens", "seq_lens"),
    [
        (40, 8, 128, 64, [1] * 5, [1, 64, 65, 700, 3000]),  # decode view
        (20, 4, 128, 128, [300, 1, 129, 512], [300, 400, 129, 2000]),  # prefill view, segments of several requests
        (6, 3, 64, 128, [40, 200], [100, 200]),
        (6, 3, 64, 43, [1, 1, 1], [5, 43, 444]),  # a page that is no power of two
        (4, 2, 16, 128, [100, 60], [100, 300]),
    ],
)
def test_flash_attention_is_the_plain_one_within_bfloat16(
    plain: Device,
    cuda: Device,
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    query_lens: list[int],
    seq_lens: list[int],
    margin: int,
) -> None:
    num_blocks = 1 + sum(-(-length // page) for length in seq_lens)
    sequences = attention_case(page, query_lens, seq_lens)
    sequences.sm_margin = margin
    view = (
        torch.randn(num_blocks, 2, page, kv_heads, size, generator=torch.Generator().manual_seed(9)).bfloat16().cuda()
    )
    query = rows(sum(query_lens), heads, size, torch.bfloat16, 10, padding=128)
    got, want = (
        torch.empty(sum(query_lens), heads, size).bfloat16().cuda(),
        torch.empty(sum(query_lens), heads, size).cuda(),
    )
    cuda.plan_attention(sequences, view, heads)
    for _ in range(3):  # the plan serves one layer after the other
        got.zero_()
        cuda.attend(query, view, sequences, size**-0.5, got)
    plain.attend(query.float(), view.float(), sequences, size**-0.5, want)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_uploads_arrive_whole_when_buffers_grow_and_take_turns(cuda: Device) -> None:
    rng = np.random.default_rng(11)
    for size in (3, 1000, 400_000, 5, 0, 70_000):
        arrays = [
            rng.integers(0, 1 << 30, size).astype(np.int64),
            rng.integers(0, 1 << 30, (2, size)).astype(np.int32),
            rng.standard_normal(7).astype(np.float32),
        ]
        tensors = [cuda.upload(array) for array in arrays]
        cuda.commit()
        for array, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_what_is_fetched_can_be_read_at_the_next_event(cuda: Device) -> None:
    tensor = torch.arange(1000, device="cuda")
    host = cuda.fetch(tensor)
    cuda.main.record().synchronize()
    assert host.tolist() == list(range(1000))


def test_a_small_prefill_page_is_refused_with_the_remedy() -> None:
    from conflux_ray.execution.cuda import CudaDevice

    with pytest.raises(ValueError, match=r"= 32 tokens .* raise block_size 4-fold"):
        CudaDevice(0, flash_attention=True, prefill_page=32)


def test_a_missing_gpu_is_named() -> None:
    from conflux_ray.execution.cuda import open_gpu

    with pytest.raises(RuntimeError, match="local_rank=99 has no GPU"):
        open_gpu(99)
