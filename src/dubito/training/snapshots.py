"""Copies of everything that is trained, and putting them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dubito.training.checkpoints import CheckpointError

Weights = dict[str, dict[str, Any]]


def copy_weights(model: nn.Module, likelihood: nn.Module | None) -> Weights:
    """A copy of the states of a model and of a likelihood that is not part of it."""
    modules = {"model": model} | ({} if likelihood is None else {"likelihood": likelihood})
    return {name: {k: _copy(v) for k, v in module.state_dict().items()} for name, module in modules.items()}


def load_weights(weights: Weights, model: nn.Module, likelihood: nn.Module | None) -> None:
    """Put a copy back.

    Raises:
        CheckpointError: it is not of this model; nothing is changed.
    """
    modules = {"model": model} | ({} if likelihood is None else {"likelihood": likelihood})
    for name, module in modules.items():
        check_matches(module, weights.get(name, {}), name)
    for name, module in modules.items():
        module.load_state_dict(weights[name])


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def check_matches(module: nn.Module, state: Mapping[str, Any], name: str) -> None:
    """Refuse a state that is not this module's before anything is copied.

    Raises:
        CheckpointError: naming the first entries that are missing, unknown or of another shape.
    """
    own = module.state_dict()
    wrong = [f"{key!r} is missing" for key in own if key not in state]
    # a buffer that is None appears in a state dict once it is set (the targets' scale): not an error
    unset = {name for name, buffer in module._buffers.items() if buffer is None}
    wrong += [f"{key!r} is unknown" for key in state if key not in own and key not in unset]
    wrong += [
        f"{key!r} is {tuple(state[key].shape)}, not {tuple(value.shape)}"
        for key, value in own.items()
        if isinstance(value, Tensor)
        and isinstance(state.get(key), Tensor)
        and state[key].shape != value.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(f"the checkpoint is not of this {name}: {'; '.join(wrong[:4])}{more}")
