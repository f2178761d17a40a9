"""A worker's side of vLLM: configuration, process groups, model weights, and the forward pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import vllm.ir
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    get_world_group,
    init_distributed_environment,
    set_custom_all_reduce,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.workspace import init_workspace_manager

from conflux_ray.vllm_compat.backend import Attend, XPAttentionBackend
from conflux_ray.vllm_compat.channel import unname
from conflux_ray.vllm_compat.graphs import ForwardGraphs
from conflux_ray.vllm_compat.version import require_version


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """What vLLM must know of the model and of one logical rank."""

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    tensor_parallel: int = 1
    block_size: int = 16
    trust_remote_code: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model on one worker of a base-TP group."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype


def make_config(args: ModelArgs) -> VllmConfig:
    """vLLM's configuration of one logical rank; raises ValueError as vLLM does for a model it cannot serve."""
    require_version()
    XPAttentionBackend.get_name()  # imported for its registration
    return EngineArgs(
        model=args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        load_format=args.load_format,
        tensor_parallel_size=args.tensor_parallel,
        block_size=args.block_size,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
        distributed_executor_backend="external_launcher",
        attention_backend="CUSTOM",
        enforce_eager=True,  # graphs are captured here, not by vLLM's runner
        use_tqdm_on_load=False,
        enable_prefix_caching=False,
        disable_log_stats=True,
    ).create_engine_config()


class LoadedModel:
    """One worker's weights and forward pass.

    Args:
        args: the model.
        rank: this worker, 0 .. world_size - 1; base-TP groups are consecutive ranks.
        world_size: N x base TP.
        local_rank: device index on this node.
        init_method: where the workers meet, `tcp://host:port` or `file://path`.
        device: of the weights.
        backend: of torch.distributed, "gloo" or "nccl".
    """

    def __init__(
        self,
        args: ModelArgs,
        rank: int,
        world_size: int,
        local_rank: int,
        init_method: str,
        device: torch.device,
        backend: str,
    ) -> None:
        self.config = make_config(args)
        self.device = device
        tensor_parallel = args.tensor_parallel
        with set_current_vllm_config(self.config):
            self.config.kernel_config.ir_op_priority.set_default()
            vllm.ir.set_default_torch_wrap(False)
            set_custom_all_reduce(device.type == "cuda")
            init_distributed_environment(world_size, rank, init_method, local_rank, backend)
            ensure_model_parallel_initialized(tensor_parallel, 1)
            broadcaster = get_tp_group().mq_broadcaster
            if broadcaster is not None:
                unname(broadcaster)
            init_workspace_manager(device)
            self.model = get_model(vllm_config=self.config)
        self.sp_degree = world_size // tensor_parallel
        self.logical_rank, self.tp_rank = divmod(rank, tensor_parallel)
        self.shape = self._shape(tensor_parallel)
        self.layer_names = sorted(
            self.config.compilation_config.static_forward_context, key=lambda name: _layer_index(name)
        )
        self._graphs: ForwardGraphs | None = None
        self.scale: float = self.config.compilation_config.static_forward_context[self.layer_names[0]].impl.scale

    def new_sp_group(self, backend: str) -> torch.distributed.ProcessGroup:
        """A new communicator over the workers that share this worker's base-TP index. All workers must call it."""
        tp = torch.distributed.get_world_size() // self.sp_degree
        own = None
        for t in range(tp):
            group = torch.distributed.new_group([r * tp + t for r in range(self.sp_degree)], backend=backend)
            if t == self.tp_rank:
                own = group
        assert own is not None
        return own

    def smallest(self, value: int) -> int:
        """The smallest `value` of all workers. All workers must call it."""
        smallest = torch.tensor([value])
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
        return int(smallest)

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture the shared linear regions as CUDA graphs at these numbers of tokens. All workers call it together.

        Raises:
            RuntimeError: see `ForwardGraphs`.
        """
        hidden_size, dtype = self.config.model_config.get_hidden_size(), self.shape.dtype
        self._graphs = ForwardGraphs(self.model, self.config, self.device, sizes, hidden_size, dtype)
        self._graphs.capture()

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input ids and positions for `forward`, to be written: `num_tokens` rows, and perhaps padding after them.

        There is one row at least, since a rank without tokens still runs every layer's collectives.
        """
        graphs = self._graphs
        if graphs is not None and num_tokens <= graphs.sizes[-1]:
            return graphs.inputs(graphs.sizes[bisect_left(graphs.sizes, num_tokens)])
        input_ids = torch.zeros(max(num_tokens, 1), dtype=torch.int64, device=self.device)
        return input_ids, torch.zeros_like(input_ids)

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend | None) -> torch.Tensor:
        """Hidden states (rows, hidden) before the language-model head; attention goes to `attend`.

        Args:
            input_ids, positions: from `inputs`.
            attend: attention of each layer; None leaves it out.

        Returns:
            Valid until the next call.
        """
        if self._graphs is not None and input_ids.shape[0] <= self._graphs.sizes[-1]:
            return self._graphs.replay(input_ids.shape[0], attend)
        with set_forward_context(
            attend, self.config, num_tokens=input_ids.shape[0], cudagraph_runtime_mode=CUDAGraphMode.NONE
        ):
            return self.model(input_ids=input_ids, positions=positions)

    def keep(self, num_tokens: int, attend: Attend) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
        """A forward pass of `num_tokens` tokens to be run many times: one CUDA graph if there are graphs.

        Args:
            num_tokens: at most the largest of the graphs' sizes. All workers call it together.
            attend: always reads and writes the same memory, on the current stream.

        Returns:
            Input ids, positions, and the pass: it reads those two as they are then, and returns what `forward` does.
        """
        if self._graphs is not None:
            return *self._graphs.inputs(num_tokens), self._graphs.capture_whole(num_tokens, attend)
        input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.zeros_like(input_ids)
        return input_ids, positions, lambda: self.forward(input_ids, positions, attend)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocab) on every worker of the base-TP group."""
        return self.model.compute_logits(hidden)

    def _shape(self, tensor_parallel: int) -> ModelShape:
        model, parallel = self.config.model_config, self.config.parallel_config
        return ModelShape(
            num_layers=model.get_num_layers(parallel),
            num_heads=model.get_num_attention_heads(parallel),
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            dtype=model.dtype,
        )


def _layer_index(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())
