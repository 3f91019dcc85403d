"""Deep ensembles (Lakshminarayanan et al. 2017): networks trained apart, predicting together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dubito.likelihoods import Likelihood
from dubito.monte_carlo import as_arguments, evaluating
from dubito.predictive import Predictive


class DeepEnsemble(nn.Module):
    """Several networks as equally weighted draws of one predictive.

    Args:
        members: trained networks with the same outputs, e.g. one architecture trained from different initial weights
            and orders of the data. They are held, not copied.
        likelihood: how their outputs become a distribution over targets.

    Raises:
        TypeError: for what is no module or no likelihood.
        ValueError: for no member at all.
    """

    def __init__(self, members: Sequence[nn.Module], likelihood: Likelihood) -> None:
        super().__init__()
        if isinstance(members, nn.Module) and not isinstance(members, nn.ModuleList):
            raise TypeError(
                f"members must be several networks, got one {type(members).__name__}: pass a list"
            )
        if not members:
            raise ValueError("members is empty: an ensemble needs at least one network (five are usual)")
        for index, member in enumerate(members):
            if not isinstance(member, nn.Module):
                raise TypeError(f"members[{index}] must be an nn.Module, not {type(member).__name__}")
        if not isinstance(likelihood, Likelihood):
            raise TypeError(
                f"likelihood must be a dubito Likelihood such as Categorical(), not {likelihood!r}"
            )
        self.members = nn.ModuleList(members)
        self.likelihood = likelihood

    def outputs(self, x: Any) -> Tensor:
        """Outputs of every member for one input, in evaluation mode and without gradient: `(S, batch, …)`."""
        args, kwargs = as_arguments(x)
        found: list[Tensor] = []
        with torch.no_grad():
            for member in self.members:
                with evaluating(member):
                    found.append(member(*args, **kwargs))
        return torch.stack(found)

    def predict(self, x: Any, keep_draws: bool | None = None) -> Predictive:
        """The predictive whose draws are the members.

        Args:
            x: an input (a tensor; a tuple or mapping of arguments), or an iterable of batches, whose first entries
                are the inputs.
            keep_draws: hold each member's prediction; None: where `x` is one input.

        Raises:
            ValueError: for an empty iterable.
        """
        return predict_batches(self.outputs, self.likelihood, x, keep_draws)

    def extra_repr(self) -> str:
        """How many members."""
        return f"{len(self.members)} members"


def predict_batches(
    outputs: Callable[[Any], Tensor],
    likelihood: Likelihood,
    x: Any,
    keep_draws: bool | None = None,
    consistent: bool = True,
) -> Predictive:
    """The predictive of one input or of an iterable of batches, from a function of one input to `(S, batch, …)`."""
    if isinstance(x, Tensor | tuple | Mapping):
        return likelihood.predictive(outputs(x), keep_draws is not False, consistent)
    if not isinstance(x, Iterable):
        raise TypeError(
            f"x must be a tensor, a tuple or mapping of arguments, or batches, not {type(x).__name__}"
        )
    parts = []
    for batch in x:
        inputs = batch[0] if isinstance(batch, list | tuple) else batch
        parts.append(likelihood.predictive(outputs(inputs), bool(keep_draws), consistent))
    if not parts:
        raise ValueError("x is an empty loader: it gave no batch to predict")
    return parts[0] if len(parts) == 1 else Predictive.concatenate(parts)
