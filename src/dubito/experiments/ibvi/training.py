"""The protocol's training: SGD with momentum 0.9, batches of 128, a cosine, one draw of the weights a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito import mup
from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.likelihoods import Categorical
from dubito.objectives import negative_elbo
from dubito.training import NonFiniteError
from dubito.weights import LowRankCovariance, MeanField

BATCH, MOMENTUM = 128, 0.9


@dataclass(frozen=True)
class Recipe:
    """What is tuned of a method, on validation images only.

    Attributes:
        lr: highest learning rate.
        rank: of the covariance of each random layer (implicit-bias variational inference only).
        scale: of its start, in units of the prior of the parametrisation.
        parametrization: "mup" draws the weights anew at its scales and takes its learning rates; "standard" keeps
            torch's initial weights, one learning rate for all, and 1/R of it for the covariance.
        spread: further factor of the covariance's learning rate. One factor for all of S leaves the limit that
            SGD tends to as it is; in few epochs it decides whether gradient noise makes S grow first.
    """

    lr: float
    rank: int = 8
    scale: float = 1.0
    parametrization: mup.Parametrization = "standard"
    spread: float = 1.0


def groups(model: nn.Module, recipe: Recipe, objective: str = "expected_loss") -> list[dict[str, Any]]:
    """Optimiser groups at the recipe's rates."""
    found: list[dict[str, Any]] = mup.parameter_groups(
        model,
        recipe.lr,
        optimizer="sgd",
        parametrization=recipe.parametrization,
        objective="elbo" if objective == "elbo" else "expected_loss",
    )
    for group in found:
        if "spread" in group["name"]:
            group["lr"] *= recipe.spread
    return found


def with_low_rank(network: nn.Module, layers: Sequence[str], recipe: Recipe) -> BayesianModule:
    """The network with a low-rank covariance in the named layers, started at the recipe's prior."""
    family = LowRankCovariance(recipe.rank, scale=recipe.scale)
    bayes: BayesianModule = bayesianize(network, dict.fromkeys(layers, family), likelihood=Categorical())
    if recipe.parametrization != "standard":
        mup.initialize_(bayes, recipe.parametrization)
    return bayes


def with_mean_field(network: nn.Module) -> BayesianModule:
    """Weight-space variational inference: independent Gaussian weights everywhere."""
    bayes: BayesianModule = bayesianize(network, MeanField(), likelihood=Categorical())
    return bayes


def loss_of(model: nn.Module, n_data: int, elbo: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a batch in nats: of one draw for random weights, with the KL over N under the ELBO."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(model(x), y)
        if elbo and isinstance(model, BayesianModule):
            value = negative_elbo(value, model.kl(), n_data, check=False).loss
        return value

    return loss


def train(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    epochs: int,
    seed: int,
    after_epoch: Callable[[], None] | None = None,
) -> None:
    """Train in place, leaving the model in evaluation mode.

    The learning rate rises for a tenth of the steps and falls along a cosine; with `after_epoch`, which is for
    collecting iterates, it stays constant.

    Raises:
        NonFiniteError: if an epoch ends at a loss that is not finite.
    """
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    per_epoch = math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 if after_epoch else _warm_cosine(step / (epochs * per_epoch))
    )
    model.train()
    for epoch in range(epochs):
        value = torch.zeros(())
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            value = loss(x[index], y[index])
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        value = value.detach()
        if not bool(value.isfinite()):
            raise NonFiniteError(
                f"the training loss is {float(value)} in epoch {epoch + 1}: lower the learning rate"
            )
        if after_epoch is not None:
            after_epoch()
    model.eval()


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """SGD with the protocol's momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)


def _warm_cosine(share: float) -> float:
    if share < 0.1:
        return 0.04 + 0.96 * share / 0.1
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - 0.1) / 0.9)))
