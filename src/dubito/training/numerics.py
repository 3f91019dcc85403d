"""Stopping at the first number that is not one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dubito.training.batches import Batch


class NonFiniteError(RuntimeError):
    """Training met NaN or infinity. The model has been put back to its last good state.

    Attributes:
        step: the optimizer step, counted from 1, that was not taken.
        epoch: its epoch, counted from 1.
        part: "nll", "kl", "loss", "gradient" or "parameters" (after a step): where it showed first.
        parameters: names of the parameters whose gradients (or values) are not finite.
    """

    def __init__(
        self, message: str, *, step: int = 0, epoch: int = 0, part: str = "", parameters: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.step, self.epoch, self.part, self.parameters = step, epoch, part, tuple(parameters)


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, on their device; 0 where there are none."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    return torch.nn.utils.get_total_norm(gradients)


def not_finite(named: Mapping[str, Tensor | None]) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    return [
        name
        for name, value in named.items()
        if value is not None and value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]


def diagnose(
    parts: Mapping[str, float], model: nn.Module, outside: nn.Module | None, group: Sequence[Batch]
) -> tuple[str, str, list[str]]:
    """Where a non-finite number came from.

    Args:
        parts: values of "nll", "kl" and "loss".
        model: the module, with its gradients still in place.
        outside: a likelihood that is not part of it.
        group: the batches of the step.

    Returns:
        The part ("nll", "kl", "loss", "gradient" or "" if all is finite after all), a sentence, and the names
        of the parameters concerned.
    """
    named = dict(model.named_parameters())
    if outside is not None:
        named |= {f"likelihood.{name}": p for name, p in outside.named_parameters()}
    values = not_finite(named)
    said = ""
    part = next((name for name in ("nll", "kl", "loss") if not torch.isfinite(torch.tensor(parts[name]))), "")
    if part:
        said = f"the {'loss' if part == 'loss' else part.upper()} is {parts[part]}"
        concerned = values
        if values:
            said += f" (already not finite: {_few(values)})"
    else:
        concerned = not_finite({name: p.grad for name, p in named.items()})
        if concerned:
            part, said = "gradient", f"the gradient is not finite in {_few(concerned)}"
    if part and any(holds_not_finite(batch) for batch in group):
        said += "; the batch itself holds NaN or infinity"
    return part, said, concerned


def holds_not_finite(batch: Batch) -> bool:
    """Whether a tensor of the batch holds NaN or infinity."""
    tensors = [batch.target, *batch.args, *batch.kwargs.values()]
    return bool(not_finite({str(i): t for i, t in enumerate(tensors) if isinstance(t, Tensor)}))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"
