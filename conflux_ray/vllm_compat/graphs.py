"""CUDA graphs of a model's shared linear regions, by vLLM's breakable capture, and of whole forward passes.

One capture of a forward pass is a list of graphs, one for each region between two attention layers, with the
attention calls between them. A replay runs the graphs as they are and the attention of the iteration at hand, eagerly:
it writes into the buffers that the next graph reads. Attention may thus differ in every iteration while each linear
region costs one launch. Where attention always does the same with the same memory, as decodes alone do, one graph holds
the whole pass.

vLLM wraps its attention layer for this only where `GRAPHS_VARIABLE` is set before it is imported.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture, is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import GraphCaptureContext, graph_capture
from vllm.forward_context import set_forward_context

from conflux_ray.vllm_compat.backend import Attend
from conflux_ray.vllm_compat.plugin import GRAPHS_VARIABLE

LARGEST_GRAPH = 1024
"""Tokens beyond which a linear region keeps the GPU busy longer than its launches take the host."""


class ForwardGraphs:
    """The forward pass at a few numbers of tokens; a batch is padded to the next one.

    Args:
        model: takes `input_ids` and `positions`.
        config: vLLM's.
        device: a CUDA device.
        sizes: numbers of tokens, ascending.
        hidden_size: of the model's output.
        dtype: likewise.

    Raises:
        RuntimeError: `GRAPHS_VARIABLE` was not set when vLLM was imported.
    """

    def __init__(
        self,
        model: Callable[..., torch.Tensor],
        config: VllmConfig,
        device: torch.device,
        sizes: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        if not is_breakable_cudagraph_enabled():
            raise RuntimeError(f"CUDA graphs need {GRAPHS_VARIABLE}=1 in the worker's environment from its start")
        self._model = model
        self._config = config
        self._device = device
        self.sizes = tuple(sizes)
        # What graphs read and write has one address for ever. All sizes share it, each takes the first rows.
        self._input_ids = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._input_ids)
        self._hidden = torch.empty(self.sizes[-1], hidden_size, dtype=dtype, device=device)
        self._captures: dict[int, BreakableCUDAGraphCapture] = {}
        # One pool for all graphs: they run one after the other, and what they leave is in the tensors above.
        self._pool = torch.cuda.graph_pool_handle()

    def inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input ids and positions of `size` tokens, to be written before `replay`."""
        return self._input_ids[:size], self._positions[:size]

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size. All workers call it together: base TP registers its buffers with the others.

        Attention is left out meanwhile. The largest size goes first, so that the others fit into its memory.
        """
        gc.collect()
        gc.freeze()  # the collector's work would be half of a capture
        with graph_capture(self._device):
            for size in reversed(self.sizes):
                self._run(size)  # what a kernel sets up on first use must not be captured
                capture = BreakableCUDAGraphCapture(self._pool)
                with (
                    set_forward_context(
                        None, self._config, num_tokens=size, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE
                    ),
                    capture,
                ):
                    self._run_model(size)
                self._captures[size] = capture
        gc.unfreeze()

    def replay(self, size: int, attend: Attend | None) -> torch.Tensor:
        """Hidden states (size, hidden) of what `inputs` holds; valid until the next replay."""
        with set_forward_context(attend, self._config, num_tokens=size, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE):
            self._captures[size].replay()
        return self._hidden[:size]

    @torch.inference_mode()
    def capture_whole(self, size: int, attend: Attend) -> Callable[[], torch.Tensor]:
        """Capture a forward pass with its attention. All workers call it together.

        Args:
            size: tokens.
            attend: always reads and writes the same memory, on the current stream.

        Returns:
            Replays it on what `inputs(size)` holds: hidden states (size, hidden), valid until the next replay.
        """
        self._run(size, attend)  # what a kernel sets up on first use must not be captured
        graph = torch.cuda.CUDAGraph()
        # On the caller's stream, since `attend` orders its work by it.
        stream = GraphCaptureContext(torch.cuda.current_stream())
        with graph_capture(self._device, stream):
            torch.cuda.synchronize()
            # Relaxed: a kernel may load its module or set an attribute when it is first used.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                self._run(size, attend)
            finally:
                graph.capture_end()

        def replay() -> torch.Tensor:
            graph.replay()
            return self._hidden[:size]

        return replay

    def _run(self, size: int, attend: Attend | None = None) -> None:
        with set_forward_context(attend, self._config, num_tokens=size, cudagraph_runtime_mode=CUDAGraphMode.NONE):
            self._run_model(size)

    def _run_model(self, size: int) -> None:
        input_ids, positions = self.inputs(size)
        self._hidden[:size].copy_(self._model(input_ids=input_ids, positions=positions))


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Numbers of tokens to capture up to `largest`: steps that leave little to pad."""
    steps = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, largest + 1, 64)]
    return tuple(size for size in steps if size <= largest)


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decodes to capture whole, `LARGEST_GRAPH` at most, so that up to `max_num_seqs` find one."""
    sizes = graph_sizes(LARGEST_GRAPH)
    return tuple(size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_num_seqs)
