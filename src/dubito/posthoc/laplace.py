"""Last-layer Laplace approximation of a trained network (Daxberger et al. 2021), through laplace-torch.

A Gaussian over the last linear layer: centred on the trained weights, with the inverse of the generalised Gauss-Newton
matrix plus the prior's precision as its covariance. laplace-torch is the extra `laplace`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.likelihoods import Categorical, Gaussian, Likelihood
from dubito.monte_carlo import check_samples
from dubito.posthoc.ensemble import predict_batches
from dubito.predictive import Predictive
from dubito.scalar_checks import choice, positive

Structure = Literal["full", "kron", "diag"]
PriorChoice = Literal["marginal-likelihood"]


class MissingLaplaceError(ImportError):
    """laplace-torch is not installed."""


class LastLayerLaplace:
    """A Gaussian over a network's last layer; made by `fit`.

    Attributes:
        likelihood: how outputs become a distribution over targets.
        prior_precision: of the isotropic Gaussian prior over the last layer.
        log_marginal_likelihood: of the training data at it, nats.
        covariance: of the last layer's parameters (weight by rows, then bias), where the structure is "full".
    """

    def __init__(self, approximation: Any, likelihood: Likelihood) -> None:
        self._laplace = approximation
        self.likelihood = likelihood

    @classmethod
    def fit(
        cls,
        module: nn.Module,
        loader: Any,
        likelihood: Likelihood,
        prior_precision: float | PriorChoice = 1.0,
        structure: Structure = "kron",
    ) -> LastLayerLaplace:
        """Approximate the posterior of the last layer at the trained weights.

        The network is copied first: its parameters, flags and `requires_grad` stay as they are.

        Args:
            module: a trained network whose last layer is linear.
            loader: a `DataLoader` of its training data, (inputs, target).
            likelihood: `Categorical()`, or `Gaussian` with one known noise.
            prior_precision: of the prior over the last layer; "marginal-likelihood" chooses it on the training data.
            structure: of the covariance: "full", "kron"(ecker-factored) or "diag"(onal).

        Raises:
            MissingLaplaceError: naming the extra, if laplace-torch is not there.
            TypeError: for another likelihood.
            ValueError: for a precision that is not positive, or an unknown structure.
        """
        choice("structure", structure, Structure)
        tuned = prior_precision == "marginal-likelihood"
        if isinstance(prior_precision, str) and not tuned:
            raise ValueError(
                f"prior_precision={prior_precision!r} must be a positive number or 'marginal-likelihood'"
            )
        precision = 1.0 if isinstance(prior_precision, str) else positive("prior_precision", prior_precision)
        kind, options = _kind(likelihood)
        make = _laplace()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # laplace-torch's own deprecations
            approximation = make(
                copy.deepcopy(module).eval(),
                kind,
                subset_of_weights="last_layer",
                hessian_structure=structure,
                prior_precision=precision,
                **options,
            )
            approximation.fit(loader)
            if tuned:
                approximation.optimize_prior_precision(method="marglik", pred_type="glm")
        return cls(approximation, likelihood)

    @property
    def prior_precision(self) -> float:
        """Of the isotropic prior."""
        return float(torch.as_tensor(self._laplace.prior_precision).detach().reshape(-1)[0])

    @property
    def log_marginal_likelihood(self) -> float:
        """Of the training data, nats."""
        return float(self._laplace.log_marginal_likelihood().detach())

    @property
    def covariance(self) -> Tensor:
        """Of the last layer's parameters.

        Raises:
            RuntimeError: where the structure is not "full".
        """
        found = getattr(self._laplace, "posterior_covariance", None)
        if not isinstance(found, Tensor):
            raise RuntimeError('only structure="full" holds a covariance matrix')
        return found.detach()

    def outputs(self, x: Tensor, samples: int = 32, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the last layer's outputs, independent from datum to datum: `(S, batch, outputs)`."""
        check_samples(samples)
        with torch.no_grad():
            found: Tensor = self._laplace.functional_samples(
                x, pred_type="glm", n_samples=samples, generator=generator
            )
        return found

    def predict(
        self,
        x: Tensor | Iterable[Any],
        samples: int = 32,
        generator: torch.Generator | None = None,
        keep_draws: bool | None = None,
    ) -> Predictive:
        """The predictive of `samples` draws of the outputs.

        Args:
            x: inputs, or batches whose first entries are inputs.
            samples: draws.
            generator: source of the draws.
            keep_draws: hold each draw's prediction; None: where `x` is one input.
        """
        return predict_batches(
            lambda inputs: self.outputs(inputs, samples, generator),
            self.likelihood,
            x,
            keep_draws,
            consistent=False,
        )


def _kind(likelihood: Likelihood) -> tuple[str, dict[str, float]]:
    if isinstance(likelihood, Categorical):
        return "classification", {}
    if isinstance(likelihood, Gaussian) and likelihood.noise.numel() == 1:
        return "regression", {"sigma_noise": float(likelihood.noise.detach())}
    raise TypeError(
        f"last-layer Laplace is for Categorical and for Gaussian with one noise, not {type(likelihood).__name__}"
    )


def _laplace() -> Any:
    try:
        from laplace import Laplace
    except ImportError as error:
        raise MissingLaplaceError(
            "last-layer Laplace needs laplace-torch: `make install-laplace` in the repository, or "
            "`pip install 'dubito[laplace]'`"
        ) from error
    return Laplace
