"""Averaging gradients and curvature over processes, each of which drew its own weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.optim.ivon_draws import GatheredDraws
from dubito.scalar_checks import computing_dtype


def average_over_processes(gathered: GatheredDraws, parameters: Sequence[Tensor], world: int) -> bool:
    """Means over the processes of gradients and of gradient times noise; one collective a dtype and device.

    A parameter that has a gradient in one process only counts as zero in the others, and stays without where no process
    has one.

    Returns:
        Whether every process came with the same gradients (though their noise differs).
    """
    products = gathered.products(parameters)
    same, places = True, [(p.device, computing_dtype(p.dtype)) for p in parameters]
    for place in dict.fromkeys(places):
        chosen = [i for i, where in enumerate(places) if where == place]
        mine = [parameters[i] for i in chosen]
        same &= _average(gathered, mine, [products[i] for i in chosen], place, world)
    gathered.mark_synchronized()
    return same


def _average(
    gathered: GatheredDraws,
    parameters: Sequence[Tensor],
    products: Sequence[Tensor],
    place: tuple[torch.device, torch.dtype],
    world: int,
) -> bool:
    import torch.distributed as dist

    device, dtype = place
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=device, dtype=dtype)
    gradients = [torch.zeros_like(p, dtype=dtype) if p.grad is None else p.grad.to(dtype) for p in parameters]
    flat = torch.cat([present, *(t.reshape(-1) for t in (*gradients, *products))])
    gradient = flat[len(parameters) : len(parameters) + sum(g.numel() for g in gradients)].clone()
    dist.all_reduce(flat)
    flat /= world
    present, rest = flat[: len(parameters)], flat[len(parameters) :]
    sizes = [p.numel() for p in parameters]
    pieces = rest.split([*sizes, *sizes])
    equal = (torch.isclose(rest[: len(gradient)], gradient, rtol=1e-6, atol=0.0).all()).to(dtype)
    equal = equal * (gradient != 0).any()
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    for i, (p, has) in enumerate(zip(parameters, present.tolist(), strict=True)):
        mean = pieces[i].view_as(p) if has > 0 else None
        gathered.replace(p, mean, pieces[len(parameters) + i].view_as(p))
    return bool(equal)
