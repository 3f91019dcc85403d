"""Several processes, by plain collectives.

`DistributedDataParallel` hooks into one forward call; a KL beside it, several draws under `vmap` and
parameters swapped for a call are all outside what it expects. Averaging the gradients once before each step
is exact for equal batches and needs nothing of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dubito.optim.ivon import IVON


def average_gradients(parameters: Sequence[Tensor], optimizer: Optimizer, accelerator: Any) -> None:
    """Replace each gradient by its mean over the processes; one collective a dtype.

    An `IVON` does it itself, as it averages more than the gradients.
    """
    if accelerator.num_processes == 1:
        return
    if isinstance(optimizer, IVON):
        optimizer.synchronize()
        return
    import torch.distributed as dist

    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # another process may have one; all must take part
            by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= accelerator.num_processes
        pieces = flat.split([g.numel() for g in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def mean_over_processes(value: Tensor, accelerator: Any) -> Tensor:
    """The mean of a tensor over the processes."""
    if accelerator.num_processes == 1:
        return value
    reduced: Tensor = accelerator.reduce(value, reduction="mean")
    return reduced


def broadcast_module(module: nn.Module | None) -> None:
    """Give every process the first one's parameters and buffers."""
    if module is None:
        return
    import torch.distributed as dist

    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor, src=0)


def gather(value: Any, accelerator: Any) -> list[Any]:
    """One value of each process, in order of rank."""
    if accelerator.num_processes == 1:
        return [value]
    from accelerate.utils import gather_object

    gathered: list[Any] = gather_object([value])
    return gathered
