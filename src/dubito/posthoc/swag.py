"""SWAG (Maddox et al. 2019): a Gaussian over weights from the iterates of SGD.

The mean is that of the iterates; half of the covariance is diagonal, of their variances, and half has low rank, of the
last iterates' deviations from the running mean (their algorithm 1 and equation 1).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.likelihoods import Likelihood
from dubito.monte_carlo import as_arguments, check_samples, evaluating
from dubito.posthoc.ensemble import predict_batches
from dubito.predictive import Predictive
from dubito.scalar_checks import non_negative

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class SWAG:
    """Moments of a network's weights over the iterates of its training.

    Train the network, go on with SGD at a constant learning rate, and call `collect()` once an epoch (or every so many
    steps). Only parameters that need gradient are random. Networks with batch normalisation need their statistics
    anew for every draw: give `predict` or `sample` batches of training inputs as `refresh`.

    Args:
        module: the network; it is read by `collect` and never altered.
        rank: how many of the last deviations are kept (K).
        likelihood: how outputs become a distribution over targets; for `predict`.

    Attributes:
        count: iterates collected so far.
        deviations: `(min(K, count), parameters)`.

    Raises:
        ValueError: for a rank below 2 or a network without trainable parameters.
    """

    def __init__(self, module: nn.Module, rank: int = 20, likelihood: Likelihood | None = None) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 2:
            raise ValueError(f"rank={rank!r} must be a whole number of at least 2 (deviations kept)")
        if not any(p.requires_grad for p in module.parameters()):
            raise ValueError("the module has no trainable parameter (requires_grad is False everywhere)")
        self.module, self.rank, self.likelihood = module, rank, likelihood
        self.count = 0
        self._mean = torch.zeros(0)
        self._scatter = torch.zeros(0)
        self._deviations: list[Tensor] = []

    @torch.no_grad()
    def collect(self) -> None:
        """Take the network's present weights as one more iterate.

        Raises:
            ValueError: if they hold NaN or infinity.
        """
        w = _flat(self.module)
        if not bool(w.isfinite().all()):
            raise ValueError("the weights are not finite: SWAG needs a training that has not diverged")
        if self.count == 0:
            self._mean, self._scatter = torch.zeros_like(w), torch.zeros_like(w)
        self.count += 1
        before = w - self._mean
        self._mean = self._mean + before / self.count
        self._scatter = self._scatter + before * (w - self._mean)  # Welford: no difference of large squares
        self._deviations = [*self._deviations, w - self._mean][-self.rank :]

    @property
    def mean(self) -> Tensor:
        """Mean of the iterates, flat: `(parameters,)`."""
        self._need(1)
        return self._mean

    @property
    def variance(self) -> Tensor:
        """Variance of the iterates (divided by their number), flat: `(parameters,)`."""
        self._need(1)
        return self._scatter / self.count

    @property
    def deviations(self) -> Tensor:
        """The last iterates less the running mean each was met with."""
        self._need(1)
        return torch.stack(self._deviations)

    @torch.no_grad()
    def draw(self, scale: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """One flat draw: `mean + sqrt(scale / 2) (sd z₁ + deviationsᵀ z₂ / sqrt(K - 1))`.

        Raises:
            RuntimeError: before two iterates were collected.
        """
        non_negative("scale", scale)
        self._need(2)
        mean, deviations = self._mean, self.deviations
        options: dict[str, Any] = {"generator": generator, "dtype": mean.dtype, "device": mean.device}
        diagonal = self.variance.sqrt() * torch.randn(mean.shape, **options)
        low_rank = torch.randn(len(deviations), **options) @ deviations / math.sqrt(len(deviations) - 1)
        return mean + math.sqrt(scale / 2) * (diagonal + low_rank)

    @torch.no_grad()
    def sample(
        self,
        scale: float = 1.0,
        refresh: Iterable[Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> nn.Module:
        """A copy of the network with one draw of the weights; batch normalisation measured anew on `refresh`."""
        return self._with(self.draw(scale, generator), refresh)

    def predict(
        self,
        x: Any,
        samples: int = 32,
        scale: float = 1.0,
        refresh: Iterable[Any] | None = None,
        generator: torch.Generator | None = None,
        keep_draws: bool | None = None,
    ) -> Predictive:
        """The predictive of `samples` draws, the same for every batch.

        Args:
            x: an input, or an iterable of batches whose first entries are inputs.
            samples: draws of the weights.
            scale: of the covariance; 1 is the paper's.
            refresh: batches of training inputs, which networks with batch normalisation need.
            generator: source of the draws.
            keep_draws: hold each draw's prediction; None: where `x` is one input.

        Raises:
            ValueError: no likelihood; batch normalisation without `refresh`.
            RuntimeError: before two iterates were collected.
        """
        if self.likelihood is None:
            raise ValueError(
                "SWAG has no likelihood to predict with: SWAG(module, likelihood=dubito.Categorical())"
            )
        networks = [self.sample(scale, refresh, generator) for _ in range(check_samples(samples))]

        def outputs(inputs: Any) -> Tensor:
            args, kwargs = as_arguments(inputs)
            found = []
            with torch.no_grad():
                for network in networks:
                    with evaluating(network):
                        found.append(network(*args, **kwargs))
            return torch.stack(found)

        return predict_batches(outputs, self.likelihood, x, keep_draws)

    def _with(self, flat: Tensor, refresh: Iterable[Any] | None) -> nn.Module:
        network = copy.deepcopy(self.module)
        trained = [p for p in network.parameters() if p.requires_grad]
        for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            parameter.copy_(part.reshape(parameter.shape))
        norms = [m for m in network.modules() if isinstance(m, _BATCH_NORM) and m.track_running_stats]
        if norms and refresh is None:
            raise ValueError(
                "the network normalises by batch, and its statistics belong to other weights: give batches of training "
                "inputs as refresh="
            )
        if norms and refresh is not None:
            _remeasure(network, norms, refresh)
        return network

    def _need(self, count: int) -> None:
        if self.count < count:
            raise RuntimeError(
                f"{self.count} iterates were collected, {count} are needed: call collect() during training"
            )


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])


def _remeasure(network: nn.Module, norms: list[Any], refresh: Iterable[Any]) -> None:
    """Statistics averaged over the batches, each with the same weight; dropout stays off."""
    before: list[tuple[Any, float | None]] = [(norm, norm.momentum) for norm in norms]
    with evaluating(network):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        for batch in refresh:
            args, kwargs = as_arguments(batch[0] if isinstance(batch, list | tuple) else batch)
            network(*args, **kwargs)
    for norm, momentum in before:
        norm.momentum = momentum
