"""The CUDA implementation of the device interface: CUDA streams, FlashAttention 3, Triton copies, NCCL.

Nothing here waits for the GPU but `Staging`, and that only for copies of an iteration long done.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conflux_ray.config import PREFILL_PAGE
from conflux_ray.execution import kernels
from conflux_ray.execution.attention import MOST_PLACES
from conflux_ray.execution.device import Device, Event, Sequences

_HOPPER = 9
_ALIGNMENT = 64  # bytes between arrays of one upload
_STAGES = 3  # an upload buffer each for the running iteration, the next, and the one being built
_STAGE_BYTES = 1 << 20
_LIVE_GRAPHS = 4 * (MOST_PLACES + 1)  # of the running iteration and the next, and of two that may still be ending
_RESERVE_BYTES = 512 << 20  # left free beside the KV pool: allocator fragments, and what NCCL allocates late
_CYCLES_PER_SECOND = 1.5e9  # about, to turn a test's delay into the GPU's clock


class CudaStream:
    """A CUDA stream.

    Args:
        stream: the stream.
        delay: (least, most) seconds the GPU idles before each piece of work, drawn evenly, for tests.
        seed: of the delays.
    """

    def __init__(self, stream: torch.cuda.Stream, delay: tuple[float, float] = (0.0, 0.0), seed: int = 0) -> None:
        self.stream = stream
        self._delay = delay
        self._random = random.Random(seed)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            if self._delay[1] > 0:
                torch.cuda._sleep(int(self._random.uniform(*self._delay) * _CYCLES_PER_SECOND))
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        self.stream.wait_event(event)


class Staging:
    """Copies an iteration's arrays to the GPU at once, through pinned memory that is used in turns.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts: list[torch.Tensor] = [self._pinned(_STAGE_BYTES) for _ in range(_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)]
        self._turn = 0
        self._target: torch.Tensor | None = None  # what this turn's buffer will be copied to
        self._used = 0

    def add(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The tensor that will hold `array` once what `commit` enqueues has run."""
        data = np.ascontiguousarray(array)
        dtype = torch.from_numpy(np.empty(0, data.dtype)).dtype
        if data.nbytes == 0:
            return torch.empty(data.shape, dtype=dtype, device=self._device)
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self._target is None or start + data.nbytes > len(self._target):
            self.commit()
            self._open(data.nbytes)
            start = 0
        assert self._target is not None
        end = start + data.nbytes
        self._hosts[self._turn].numpy()[start:end] = data.reshape(-1).view(np.uint8)
        self._used = end
        return self._target[start:end].view(dtype).view(data.shape)

    def commit(self) -> None:
        """Enqueue the copy of what was added, on the current stream."""
        if self._target is None:
            return
        self._target[: self._used].copy_(self._hosts[self._turn][: self._used], non_blocking=True)
        self._copied[self._turn].record()
        self._turn = (self._turn + 1) % _STAGES
        self._target, self._used = None, 0

    def _open(self, size: int) -> None:
        self._copied[self._turn].synchronize()  # reached long ago, unless an iteration needs several buffers
        host = self._hosts[self._turn]
        if len(host) < size:
            host = self._hosts[self._turn] = self._pinned(1 << (size - 1).bit_length())
        # New each time: tensors of earlier iterations still live in the last one, and the allocator reuses it in order.
        self._target = torch.empty(len(host), dtype=torch.uint8, device=self._device)

    @staticmethod
    def _pinned(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class CudaDevice(Device):
    """Executes on one NVIDIA GPU.

    Args:
        index: of the GPU among those this process sees.
        flash_attention: attend with FlashAttention 3, which knows float16 and bfloat16; otherwise with plain torch,
            slow and for float32.
        prefill_page: tokens of a page in the prefill view.
        decode_delay, transfer_delay: (least, most) seconds before each piece of work of that stream (tests).
        seed: of the delays.

    Raises:
        RuntimeError: there is no such GPU, the driver is too old, or FlashAttention 3 does not run on it.
        ValueError: the prefill page is too small for FlashAttention 3's fast path.
    """

    compiles = True

    def __init__(
        self,
        index: int,
        flash_attention: bool,
        prefill_page: int,
        decode_delay: tuple[float, float] = (0.0, 0.0),
        transfer_delay: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
    ) -> None:
        # Communicators of several streams deadlock if two GPUs start their kernels in different orders.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all workers of an instance are on one node
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # ours takes its place, and it need not be there
        open_gpu(index)
        self.torch_device = torch.device("cuda", index)
        self.flash_attention = flash_attention
        self.keeps_attention = flash_attention  # plain torch reads lengths on the host
        if flash_attention:
            require_flash_attention(index)
            if prefill_page < PREFILL_PAGE:
                raise ValueError(
                    f"block_size x SP degree = {prefill_page} tokens is a prefill page below {PREFILL_PAGE}, which "
                    "keeps FlashAttention 3 off its fast path: raise block_size "
                    f"{-(-PREFILL_PAGE // prefill_page)}-fold"
                )
        torch.cuda.set_device(self.torch_device)
        self._main = torch.cuda.Stream()
        self.main = CudaStream(self._main)
        self.decode = CudaStream(torch.cuda.Stream(), decode_delay, seed)
        self.transfer = CudaStream(torch.cuda.Stream(), transfer_delay, seed + 1)
        self.num_sms = torch.cuda.get_device_properties(index).multi_processor_count
        self._staging = Staging(self.torch_device)
        self._graph_memory = torch.cuda.graph_pool_handle()
        self._graphs: deque[torch.cuda.CUDAGraph] = deque(maxlen=_LIVE_GRAPHS)
        torch.cuda.reset_peak_memory_stats()

    def bind(self) -> None:
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._main)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return self._staging.add(array)

    def commit(self) -> None:
        self._staging.commit()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", non_blocking=True)  # pinned, and kept until the copy has run

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._main)
        return event

    def elapsed(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3

    def repeatable(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel may load its module or set an attribute when it is first used.
        graph.capture_begin(pool=self._graph_memory, capture_error_mode="relaxed")
        try:
            work()
        finally:
            graph.capture_end()
        # One that runs must not be destroyed. Their memory is shared: they run one after the other.
        self._graphs.append(graph)
        return graph.replay

    def kv_budget(self, utilization: float) -> int:
        self.synchronize()
        peak = torch.cuda.max_memory_allocated()
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        # Tensors that live now are in what is used; the largest iteration comes on top of them.
        activations = peak - torch.cuda.memory_allocated()
        return int(total * utilization) - (total - free) - activations - _RESERVE_BYTES

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        group: torch.distributed.ProcessGroup,
    ) -> None:
        if len(output_sizes) == 1:
            output.copy_(input)
            return
        torch.distributed.all_to_all_single(output, input, list(output_sizes), list(input_sizes), group=group)

    def write_kv(
        self, view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        kernels.write_kv(view, blocks, offsets, k, v)

    def pack_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, degree: int) -> torch.Tensor:
        return kernels.pack_heads(query, key, value, degree)

    def merge_heads(self, shards: torch.Tensor, output: torch.Tensor) -> None:
        kernels.merge_heads(shards, output)

    def gather_kv(self, view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return kernels.gather_kv(view, blocks, offsets)

    def scatter_kv(self, view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, shards: torch.Tensor) -> None:
        kernels.scatter_kv(view, blocks, offsets, shards)

    def plan_attention(self, sequences: Sequences, view: torch.Tensor, num_heads: int) -> None:
        if not self.flash_attention:
            return
        page, kv_heads, head_size = view.shape[2:]
        # The plan holds the tile counter of its kernels, so decode and prefill, which overlap, have one each. What
        # follows, from the page size to the margin, must be what `attend` passes.
        sequences.schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            len(sequences.query_lens),
            sequences.max_query_len,
            sequences.max_seq_len,
            num_heads,
            kv_heads,
            head_size,
            head_size,
            view.dtype,
            sequences.lengths,
            sequences.query_starts,
            None,  # cu_seqlens_k
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            None,  # leftpad_k
            page,
            0,  # max_seqlen_k_new
            True,  # causal
            -1,  # window, left
            -1,  # window, right
            False,  # softcap
            sequences.num_splits,
            None,  # pack_gqa: the kernel's choice
            sequences.sm_margin,
        )

    def attend(
        self, query: torch.Tensor, view: torch.Tensor, sequences: Sequences, scale: float, output: torch.Tensor
    ) -> None:
        if not self.flash_attention:
            super().attend(query, view, sequences, scale, output)
            return
        torch.ops._vllm_fa3_C.fwd(
            query,
            view[:, 0],
            view[:, 1],
            None,  # k_new
            None,  # v_new
            None,  # q_v
            output,
            sequences.query_starts,
            None,  # cu_seqlens_k
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            sequences.lengths,
            sequences.max_query_len,
            sequences.max_seq_len,
            sequences.tables,
            None,  # kv_batch_idx
            None,  # leftpad_k
            None,  # rotary_cos
            None,  # rotary_sin
            None,  # seqlens_rotary
            None,  # q_descale
            None,  # k_descale
            None,  # v_descale
            scale,
            True,  # causal
            -1,  # window, left
            -1,  # window, right
            0.0,  # softcap
            True,  # rotary_interleaved
            sequences.schedule,
            sequences.num_splits,
            None,  # pack_gqa
            sequences.sm_margin,
            None,  # s_aux
            1,  # cp_world_size
            0,  # cp_rank
            None,  # cp_tot_seqused_k
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        pass


class SharedCudaDevice(CudaDevice):
    """One of several workers' share of the same GPU, for tests: NCCL refuses that, so collectives go by the host."""

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        group: torch.distributed.ProcessGroup,
    ) -> None:
        received = torch.empty(output.shape, dtype=output.dtype)
        torch.distributed.all_to_all_single(received, input.cpu(), list(output_sizes), list(input_sizes), group=group)
        output.copy_(received)


def open_gpu(index: int) -> None:
    """Initialise CUDA in this process.

    Raises:
        RuntimeError: no driver, one that is too old, or no GPU of that index.
    """
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        raise RuntimeError(
            f"CUDA does not start: torch {torch.__version__} is built for CUDA {torch.version.cuda} and says: {error} "
            "(a driver of that CUDA version or newer is needed; see nvidia-smi)"
        ) from error
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise RuntimeError(f"local_rank={index} has no GPU: this process sees {count} (CUDA_VISIBLE_DEVICES {visible})")


def require_flash_attention(index: int) -> None:
    """Load FlashAttention 3.

    Raises:
        RuntimeError: the GPU is not of the Hopper generation, or vLLM has no FlashAttention 3 that loads.
    """
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    gpu = f"{name} (compute capability {capability[0]}.{capability[1]}, vllm {version('vllm')})"
    if capability[0] != _HOPPER:
        raise RuntimeError(f"FlashAttention 3 needs a Hopper GPU (compute capability 9.x), this is {gpu}")
    try:
        importlib.import_module("vllm.vllm_flash_attn._vllm_fa3_C")
    except ImportError as error:
        raise RuntimeError(f"vLLM's FlashAttention 3 does not load on {gpu}: {error}") from error
