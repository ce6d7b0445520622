"""torch.distributed process group of tensor-parallel ranks: gloo between CPU processes, NCCL between GPUs.

Ranks find each other by a file in inherited memory and use the loopback interface only.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from worker.engines.transformers.device.cuda_errors import one_line
from worker.errors import StartError

# Limit for the rendezvous and for one collective. A rank that takes longer is lost; the router's heartbeat timeout is
# usually shorter.
PATIENCE = timedelta(seconds=120)
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the leader aborts instead (`abort`)
}


class ProcessGroup:
    """Implements `tensor_parallel_plan.RankGroup`. Usable after `connect`."""

    def __init__(self, rank: int, count: int, device: torch.device):
        self.rank, self.count, self.device = rank, count, device

    def connect(self, store: int) -> None:
        """Wait for all ranks. `store`: descriptor of the rendezvous file. Raises StartError after PATIENCE."""
        os.environ.update(_ENVIRONMENT)
        on_device = self.device.type == "cuda"
        if on_device:
            torch.cuda.set_device(self.device)
        try:
            dist.init_process_group(
                "nccl" if on_device else "gloo",
                store=dist.FileStore(f"/proc/self/fd/{store}", self.count),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.count,
                timeout=PATIENCE,
                device_id=self.device if on_device else None,
            )
        except RuntimeError as error:
            raise StartError(
                f"rank {self.rank} of {self.count} cannot reach the others over the loopback interface:"
                f" {one_line(error)}; remove tensor-parallel to use one process"
            ) from error

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():  # no logits are needed in this step
            return tensor.new_empty(*tensor.shape[:-1], self.count * tensor.shape[-1])
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, src=0)
        return tensor

    def abort(self) -> None:
        """Abort running collectives, because a rank is lost. Callable from any thread."""
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def disconnect(self) -> None:
        """Leave the group at shutdown."""
        if self.device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()
