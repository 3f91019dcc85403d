"""What IVON keeps of a parameter: step, momentum, Hessian, and for half precision the mean in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dubito.scalar_checks import computing_dtype

State = dict[str, Any]
TENSORS = ("momentum", "hessian", "mean")


def ensure_state(state: State, p: Tensor, hess_init: float) -> State:
    """A parameter's state, made where there is none yet."""
    if "hessian" not in state:
        like: dict[str, Any] = {"dtype": computing_dtype(p.dtype), "memory_format": torch.preserve_format}
        state["step"] = 0
        state["momentum"] = torch.zeros_like(p, requires_grad=False, **like)
        state["hessian"] = torch.full_like(p, float(hess_init), requires_grad=False, **like)
    return state


def mean_of(state: State, p: Tensor) -> Tensor:
    """The mean: the parameter itself, or the float32 tensor it is rounded from. The parameter must hold no draw.

    Where the parameter is no longer the rounded mean, somebody else wrote to it (a checkpoint was loaded), and it wins.
    """
    wide = computing_dtype(p.dtype)
    if wide == p.dtype:
        return p.detach()
    kept, now = state.get("mean"), p.detach().to(wide)
    state["mean"] = now if kept is None else torch.where(kept.to(p.dtype) == p.detach(), kept, now)
    mean: Tensor = state["mean"]
    return mean


def restore_tensors(state: State, entries: Mapping[str, Any], p: Tensor) -> None:
    """Put saved tensors in place in their own precision, which torch's loading casts to the parameter's."""
    for name in TENSORS:
        if name in entries:
            value = entries[name].to(p.device, computing_dtype(p.dtype))
            state[name] = value.clone(memory_format=torch.preserve_format)
