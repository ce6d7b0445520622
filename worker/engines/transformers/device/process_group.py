"""The ranks of a divided model as torch connects them: gloo between processes on the CPU, NCCL between accelerators.

They find one another by a file in memory that all of them inherited, and speak over the loopback interface only.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from worker.engines.transformers.device.memory import one_line
from worker.errors import StartError

PATIENCE = timedelta(seconds=120)
"""For the meeting, and for one sum: a rank that is stuck for longer is lost. The router, who misses the pulse, is less
patient as a rule."""
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # whoever leads sees to that (`Peers.abort`)
}


class Peers:
    """See `slices.Group`. Nothing can be computed before all have met."""

    def __init__(self, rank: int, count: int, device: torch.device):
        self.rank, self.count, self.device = rank, count, device

    def meet(self, store: int) -> None:
        """Returns once all ranks are here. `store`: descriptor of the file by which they find one another. Raises
        StartError if they do not."""
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
                f" {one_line(error)}; without tensor-parallel nobody has to"
            ) from error

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def put_together(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():  # nobody wants logits of this step
            return tensor.new_empty(*tensor.shape[:-1], self.count * tensor.shape[-1])
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    def abort(self) -> None:
        """A rank is gone: let nobody wait for it. What is being computed comes to nothing. From any thread."""
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def part(self) -> None:
        """They need one another no more."""
        if self.device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()
