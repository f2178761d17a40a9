"""Triton kernels that move heads and KV between layouts; each does what the method of its name in `device` does.

All of them copy rows: the heads of one token are contiguous everywhere, so a program copies a run of elements from one
place to another and the rest is where. Indices are int64 throughout: a pool has more than 2^31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
"""Elements a program copies at most."""


@triton.jit
def _write_kv(
    key,
    value,
    view,
    blocks,
    offsets,
    key_stride,
    value_stride,
    block_stride,
    kv_stride,
    token_stride,
    width,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * block + tl.arange(0, block)
    inside = element < width
    target = view + tl.load(blocks + token).to(tl.int64) * block_stride + tl.load(offsets + token) * token_stride
    k = tl.load(key + token * key_stride + element, mask=inside)
    v = tl.load(value + token * value_stride + element, mask=inside)
    tl.store(target + element, k, mask=inside)
    tl.store(target + kv_stride + element, v, mask=inside)


def write_kv(view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """See `Device.write_kv`."""
    n, width = len(blocks), view.shape[3] * view.shape[4]
    if n == 0:
        return
    block = _block(width)
    _write_kv[(n, triton.cdiv(width, block))](
        k,
        v,
        view,
        blocks,
        offsets,
        k.stride(0),
        v.stride(0),
        view.stride(0),
        view.stride(1),
        view.stride(2),
        width,
        block=block,
    )


@triton.jit
def _pack_heads(
    query,
    key,
    value,
    packed,
    num_tokens,
    first_rank,
    query_stride,
    key_stride,
    value_stride,
    query_width,
    kv_width,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    rank = first_rank + tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * block + tl.arange(0, block)
    width = query_width + 2 * kv_width
    is_query = element < query_width
    is_key = (element >= query_width) & (element < query_width + kv_width)
    is_value = (element >= query_width + kv_width) & (element < width)
    q = tl.load(query + token * query_stride + rank * query_width + element, mask=is_query, other=0.0)
    k = tl.load(key + token * key_stride + rank * kv_width + element - query_width, mask=is_key, other=0.0)
    v = tl.load(
        value + token * value_stride + rank * kv_width + element - query_width - kv_width, mask=is_value, other=0.0
    )
    row = tl.where(is_query, q, tl.where(is_key, k, v))
    tl.store(packed + ((rank - first_rank) * num_tokens + token) * width + element, row, mask=element < width)


def pack_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, degree: int) -> torch.Tensor:
    """See `Device.pack_heads`."""
    n, heads, size = query.shape
    packed = query.new_empty(degree * n, (heads + 2 * key.shape[1]) // degree, size)
    _pack(query, key, value, degree, 0, degree, packed)
    return packed


def push_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, degree: int, rank: int, target: torch.Tensor
) -> None:
    """Write one rank's shard of n tokens' heads.

    Args:
        query, key, value, degree: as `pack_heads` takes them.
        rank: whose.
        target: (n, (heads + 2 * kv_heads) / P, D), contiguous; written. It may be another GPU's memory.
    """
    _pack(query, key, value, degree, rank, 1, target)


def _pack(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    degree: int,
    first_rank: int,
    ranks: int,
    packed: torch.Tensor,
) -> None:
    n, heads, size = query.shape
    if n == 0:
        return
    shard_heads, shard_kv_heads = heads // degree, key.shape[1] // degree
    width = packed.shape[1] * size
    block = _block(width)
    _pack_heads[(n, ranks, triton.cdiv(width, block))](
        query,
        key,
        value,
        packed,
        n,
        first_rank,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        shard_heads * size,
        shard_kv_heads * size,
        block=block,
    )


@triton.jit
def _merge_heads(shards, output, num_tokens, output_stride, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * block + tl.arange(0, block)
    inside = element < width
    row = tl.load(shards + (rank * num_tokens + token) * width + element, mask=inside)
    tl.store(output + token * output_stride + rank * width + element, row, mask=inside)


def merge_heads(shards: torch.Tensor, output: torch.Tensor) -> None:
    """See `Device.merge_heads`."""
    n = output.shape[0]
    if n == 0:
        return
    width = shards.shape[1] * shards.shape[2]
    degree = output.shape[1] // shards.shape[1]
    block = _block(width)
    _merge_heads[(n, degree, triton.cdiv(width, block))](shards, output, n, output.stride(0), width, block=block)


@triton.jit
def _copy_heads(source, target, source_stride, target_stride, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * block + tl.arange(0, block)
    inside = element < width
    row = tl.load(source + token * source_stride + element, mask=inside)
    tl.store(target + token * target_stride + element, row, mask=inside)


def copy_heads(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy n tokens' heads, (n, heads, D), each token contiguous; the target may be another GPU's memory."""
    n, width = source.shape[0], source.shape[1] * source.shape[2]
    if n == 0:
        return
    block = _block(width)
    _copy_heads[(n, triton.cdiv(width, block))](source, target, source.stride(0), target.stride(0), width, block=block)


@triton.jit
def _gather_kv(view, blocks, offsets, rows, block_stride, kv_stride, token_stride, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1).to(tl.int64)  # K or V
    element = tl.program_id(2) * block + tl.arange(0, block)
    inside = element < width
    source = tl.load(blocks + token) * block_stride + which * kv_stride + tl.load(offsets + token) * token_stride
    row = tl.load(view + source + element, mask=inside)
    tl.store(rows + (2 * token + which) * width + element, row, mask=inside)


def gather_kv(view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """See `Device.gather_kv`."""
    n = len(blocks)
    rows = view.new_empty(n, 2, *view.shape[3:])
    if n == 0:
        return rows
    width = view.shape[3] * view.shape[4]
    block = _block(width)
    _gather_kv[(n, 2, triton.cdiv(width, block))](
        view, blocks, offsets, rows, view.stride(0), view.stride(1), view.stride(2), width, block=block
    )
    return rows


@triton.jit
def _scatter_kv(
    shards,
    view,
    blocks,
    offsets,
    num_tokens,
    degree,
    block_stride,
    kv_stride,
    token_stride,
    width,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    rank = (tl.program_id(1) % degree).to(tl.int64)
    which = (tl.program_id(1) // degree).to(tl.int64)  # K or V
    element = tl.program_id(2) * block + tl.arange(0, block)
    inside = element < width
    row = tl.load(shards + ((rank * num_tokens + token) * 2 + which) * width + element, mask=inside)
    target = tl.load(blocks + token) * block_stride + which * kv_stride + tl.load(offsets + token) * token_stride
    tl.store(view + target + rank * width + element, row, mask=inside)


def scatter_kv(view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, shards: torch.Tensor) -> None:
    """See `Device.scatter_kv`."""
    n = len(blocks)
    if n == 0:
        return
    width = shards.shape[2] * shards.shape[3]
    degree = view.shape[3] // shards.shape[2]
    block = _block(width)
    _scatter_kv[(n, 2 * degree, triton.cdiv(width, block))](
        shards,
        view,
        blocks,
        offsets,
        n,
        degree,
        view.stride(0),
        view.stride(1),
        view.stride(2),
        width,
        block=block,
    )


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))
