"""What a sampler gives back: draws, whether they can be trusted, and the posterior as a `BayesianModule`."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dubito.bayesian import BayesianModule
from dubito.mcmc.config import SamplerConfig
from dubito.mcmc.diagnostics import effective_sample_size, r_hat
from dubito.mcmc.potential import Potential, with_draws
from dubito.monte_carlo import evaluating
from dubito.predictive import Predictive
from dubito.weights.family import DubitoWarning

AT_ONCE = 64  # draws whose log density is computed in one pass
MAX_R_HAT = 1.05


class Chains(NamedTuple):
    """What a sampler has drawn.

    Attributes:
        z: coordinates, (C, S, D).
        acceptance: mean acceptance probability after warm-up, (C,).
        divergences: trajectories of divergent energy after warm-up, (C,).
        step_size: that the draws were made with, (C,).
    """

    z: Tensor
    acceptance: Tensor
    divergences: Tensor
    step_size: Tensor


class Convergence(NamedTuple):
    """Whether chains agree on a quantity, and what their draws are worth; one number for each entry of it.

    Attributes:
        r_hat: rank-normalised split R-hat; at most 1.01 where chains have mixed.
        ess_bulk: effective sample size for its centre.
        ess_tail: effective sample size for its 5 % and 95 % quantiles.
    """

    r_hat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Convergence:
        """Of values (chains, draws, …)."""
        return cls(
            r_hat(values), effective_sample_size(values, "bulk"), effective_sample_size(values, "tail")
        )

    def worst(self) -> tuple[float, float, float]:
        """The largest R-hat and the smallest sample sizes, over entries; NaN if any of them is."""
        return float(self.r_hat.max()), float(self.ess_bulk.min()), float(self.ess_tail.min())


@dataclass(frozen=True, eq=False, repr=False)
class MCMCResult:
    """Draws from the posterior over a network's weights.

    The weights of a network are not identified: hidden units can be exchanged, and signs flipped, without a change to
    the function, so chains that agree on every function value may well disagree on weights. Judge mixing by the
    `log_density` and by function values (`function_convergence`), not by the weights'.

    Attributes:
        method: "nuts" or "hmc".
        draws: by parameter name, (chains, S, *shape), in the dtype of sampling.
        log_density: log p(y | x, w) + log p(z), z the coordinates that were sampled: the log joint density up to a
            constant; (chains, S), in nats.
        acceptance: mean acceptance probability of each chain after warm-up, (chains,).
        divergences: trajectories of each chain whose energy error left all bounds, after warm-up, (chains,).
        step_size: of each chain, (chains,).
        gradient_evaluations: passes through the network forward and back, over all chains and with warm-up.
    """

    method: Literal["nuts", "hmc"]
    draws: dict[str, Tensor]
    log_density: Tensor
    acceptance: Tensor
    divergences: Tensor
    step_size: Tensor
    gradient_evaluations: int
    _bayes: BayesianModule = field(repr=False)

    @property
    def chains(self) -> int:
        """Number of chains."""
        return self.log_density.shape[0]

    @property
    def samples(self) -> int:
        """S, draws of each chain."""
        return self.log_density.shape[1]

    # ---- the posterior ------------------------------------------------------------------------------------

    def bayesian(self) -> BayesianModule:
        """A new `BayesianModule` in the network's own dtype, with an `Empirical` posterior of all draws.

        `predict(x, samples=result.chains * result.samples)` on it is the exact average over the draws; they are in
        order of iteration, the chains of each side by side.
        """
        return copy.deepcopy(self._bayes)

    def predict(self, x: Any, chunk_size: int | None = None, keep_draws: bool | None = None) -> Predictive:
        """The predictive distribution, averaged over every draw once.

        Args:
            x: as in `BayesianModule.predict`.
            chunk_size: draws run at once.
            keep_draws: as in `BayesianModule.predict`.
        """
        count = self.chains * self.samples
        return self._bayes.predict(x, samples=count, chunk_size=chunk_size, keep_draws=keep_draws)

    def outputs(self, x: Any, chunk_size: int | None = AT_ONCE) -> Tensor:
        """The network's outputs under every draw, (chains, S, batch, …), without gradient."""
        count = self.chains * self.samples
        with torch.no_grad(), evaluating(self._bayes.module):
            stacked = self._bayes.outputs(x, samples=count, chunk_size=chunk_size)
        by_iteration: Tensor = stacked.unflatten(0, (self.samples, self.chains))
        return by_iteration.transpose(0, 1)

    # ---- can it be trusted --------------------------------------------------------------------------------

    @cached_property
    def convergence(self) -> Convergence:
        """Of the log density: scalars."""
        return Convergence.of(self.log_density)

    def function_convergence(self, x: Any) -> Convergence:
        """Of the network's outputs at given inputs, (batch, …): what predictions are made of."""
        return Convergence.of(self.outputs(x))

    def weight_convergence(self) -> dict[str, Convergence]:
        """Of every weight, by parameter name. Weights are not identified (see the class): a high R-hat proves little.

        For linear models, whose weights are identified, it is the usual check.
        """
        return {name: Convergence.of(values) for name, values in self.draws.items()}

    def summary(self, x: Any = None) -> str:
        """A few lines: the worst R-hat and effective sample sizes of log density, function values at x, weights."""
        rows = {"log density": self.convergence.worst()}
        if x is not None:
            rows["function values (worst)"] = self.function_convergence(x).worst()
        each = zip(*self.weight_convergence().values(), strict=True)
        weights = Convergence(*(torch.cat([part.reshape(-1) for part in parts]) for parts in each))
        rows["weights (worst; not identified)"] = weights.worst()
        lines = [repr(self), f"{'':32}{'R-hat':>8}{'ESS bulk':>10}{'ESS tail':>10}"]
        lines += [f"{name:32}{r:8.3f}{bulk:10.0f}{tail:10.0f}" for name, (r, bulk, tail) in rows.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"MCMCResult({self.method}, {self.chains} chains of {self.samples} draws, acceptance "
            f"{float(self.acceptance.mean()):.2f}, {int(self.divergences.sum())} divergences, "
            f"{self.gradient_evaluations} gradient evaluations)"
        )


def finish(
    method: Literal["nuts", "hmc"],
    module: nn.Module,
    potential: Potential,
    config: SamplerConfig,
    chains: Chains,
) -> MCMCResult:
    """The result of the chains; warns where they are not to be trusted."""
    flat = chains.z.flatten(0, 1)
    with torch.no_grad():
        weights = potential.coordinates.weights(flat)
        energy = torch.cat([potential.energy(part) for part in flat.split(AT_ONCE)])
    draws = {name: w.unflatten(0, chains.z.shape[:2]) for name, w in weights.items()}
    in_order = {name: w.transpose(0, 1).flatten(0, 1) for name, w in draws.items()}
    bayes = with_draws(copy.deepcopy(module), in_order, potential.likelihood, config.output)
    result = MCMCResult(
        method,
        draws,
        -energy.unflatten(0, chains.z.shape[:2]),
        chains.acceptance,
        chains.divergences,
        chains.step_size,
        potential.evaluations,
        bayes,
    )
    _warn(result)
    return result


def _warn(result: MCMCResult) -> None:
    found = []
    value = float(result.convergence.r_hat)
    if not value <= MAX_R_HAT:
        found.append(
            f"R-hat of the log density is {value:.3f}, above {MAX_R_HAT}: the chains have not mixed; raise warmup and "
            "samples, or start from trained weights (init)"
        )
    divergences = int(result.divergences.sum())
    if divergences:
        found.append(
            f"{divergences} of {result.chains * result.samples} trajectories diverged: the draws may miss narrow parts "
            "of the posterior; raise target_accept towards 0.99"
        )
    if found:
        warnings.warn("; ".join(found), DubitoWarning, stacklevel=4)
