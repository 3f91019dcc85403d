"""The leapfrog's step size: a first guess, and dual averaging to a wanted acceptance probability."""

from __future__ import annotations

import math

import torch

from dubito.mcmc.leapfrog import EnergyAndGradient, State, fresh_momentum, hamiltonian, leapfrog


class DualAveraging:
    """Adapts log ε so that the mean acceptance probability tends to a target.

    Hoffman & Gelman 2014, "The No-U-Turn Sampler", section 3.2 and algorithm 5, with their constants: after iteration
    t of acceptance probability α_t, with H̄ the running mean of δ - α,

        log ε = μ - √t/γ · H̄,      log ε̄ = t^-κ log ε + (1 - t^-κ) log ε̄,      μ = log(10 ε₀)

    Args:
        step_size: ε₀.
        target: δ, the wanted acceptance probability.

    Attributes:
        current: ε, to explore with.
        averaged: ε̄, to sample with.
    """

    gamma, t0, kappa = 0.05, 10.0, 0.75

    def __init__(self, step_size: float, target: float) -> None:
        self.target = target
        self.mu = math.log(10 * step_size)
        self.current = step_size
        self._log_averaged = 0.0
        self._error = 0.0
        self._count = 0

    @property
    def averaged(self) -> float:
        """The smoothed step size; the first one before any update."""
        return math.exp(self._log_averaged) if self._count else self.current

    def update(self, probability: float) -> None:
        """Take one iteration's acceptance probability into account (of several chains, their mean)."""
        self._count += 1
        t = self._count
        weight = 1 / (t + self.t0)
        self._error = (1 - weight) * self._error + weight * (self.target - probability)
        log_step = self.mu - math.sqrt(t) / self.gamma * self._error
        decay = t**-self.kappa
        self._log_averaged = decay * log_step + (1 - decay) * self._log_averaged
        self.current = math.exp(log_step)


def reasonable_step_size(target: EnergyAndGradient, state: State, start: float = 1.0) -> float:
    """A step size at which one leapfrog step is accepted about half the time, over the chains (their algorithm 4).

    Raises:
        RuntimeError: if there is none between 1e-10 and 1e10.
    """
    momentum = fresh_momentum(state.z)

    def accepted_often(step_size: float) -> bool:
        proposal, end = leapfrog(target, state, momentum, step_size, 1)
        log_ratio = hamiltonian(state, momentum) - hamiltonian(proposal, end)
        probability = torch.nan_to_num(log_ratio, nan=-torch.inf, posinf=-torch.inf).clamp(max=0).exp()
        return float(probability.mean()) > 0.5

    step_size = start
    upward = accepted_often(step_size)
    while accepted_often(step_size * (2.0 if upward else 0.5)) == upward:
        step_size *= 2.0 if upward else 0.5
        if not 1e-10 < step_size < 1e10:
            raise RuntimeError(
                f"no step size is accepted about half the time (tried down to {step_size:.1g}): the log density is "
                "flat, or jumps where the chains start; give step_size=, or start elsewhere by init="
            )
    return step_size if upward else 0.5 * step_size
