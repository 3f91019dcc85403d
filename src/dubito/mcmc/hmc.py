"""Hamiltonian Monte Carlo over a network's weights, all chains in one batch."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dubito.likelihoods import Likelihood
from dubito.mcmc.config import HMCConfig, HMCOptions, check_names
from dubito.mcmc.coordinates import Priors
from dubito.mcmc.leapfrog import State, at, iterate
from dubito.mcmc.potential import Potential, randomness_of
from dubito.mcmc.result import Chains, MCMCResult, finish
from dubito.mcmc.step_size import DualAveraging, reasonable_step_size


def hmc(
    module: nn.Module,
    prior: Priors,
    x: Any,
    y: Tensor,
    likelihood: Likelihood | None = None,
    **options: Unpack[HMCOptions],
) -> MCMCResult:
    """Sample the posterior over a network's weights by Hamiltonian Monte Carlo with a fixed number of leapfrog steps.

    Fresh momentum for each proposal and acceptance by the true energies, so the posterior is stationary whatever the
    step size. One step size serves all chains; in warm-up it is adapted by dual averaging on their mean acceptance
    (Hoffman & Gelman 2014), then it is fixed. Chains run under one `torch.func.vmap`, which makes several cost little
    more than one. The mass matrix is the identity in whitened coordinates: where the data narrow some directions far
    more than others, `nuts`, which adapts it, needs fewer steps.

    The network is copied and left as it was: flags, attributes, hooks, gradients. See `nuts` for what is sampled and
    for minibatches, which are not offered.

    Args:
        module: any network, in evaluation mode where it has dropout or batch normalisation.
        prior: over its weights: a distribution or rule for each parameter, a joint `WeightPrior`, or a mapping from
            patterns to these. Whatever is Gaussian or can whiten is sampled in whitened coordinates.
        x: all inputs (a tensor, or a tuple or mapping of the network's arguments).
        y: all targets.
        likelihood: of the targets; None takes that which a learned prior carries. Learned noise is held as it is.
        options: any field of `HMCConfig`, which see.

    Returns:
        The draws, their diagnostics, and the posterior as a `BayesianModule`.

    Warns:
        DubitoWarning: R-hat of the log density above 1.05, or divergent trajectories.

    Raises:
        TypeError, ValueError: what does not fit, before anything is sampled.

    Example:
        ``dubito.mcmc.hmc(net, "fan_in", x, y, dubito.Gaussian(0.1), samples=500).predict(x_new)``
    """
    check_names("hmc", HMCConfig, options)
    config = HMCConfig(**options)
    potential = Potential(module, prior, x, y, likelihood, config)
    with randomness_of(config.generator, potential.coordinates.like.device):
        chains = sample(potential, config)
    return finish("hmc", module, potential, config, chains)


def sample(potential: Potential, config: HMCConfig) -> Chains:
    """The chains, by the global generator."""
    target = potential.energy_and_gradient
    state = at(target, potential.starts(config))
    start = config.step_size if config.step_size is not None else reasonable_step_size(target, state)
    adaptation = DualAveraging(start, config.target_accept) if config.adapt and config.warmup else None
    drawn = state.z.new_empty(config.samples, *state.z.shape)
    probability = state.energy.new_zeros(state.energy.shape)
    divergences = torch.zeros(state.energy.shape, dtype=torch.int64, device=state.z.device)
    for iteration in _counted(config):
        warm = iteration < config.warmup
        step_size = start if adaptation is None else adaptation.current if warm else adaptation.averaged
        step = iterate(target, state, _jittered(step_size, config.jitter, state), config.leapfrog_steps)
        state = step.state
        if warm:
            if adaptation is not None:
                adaptation.update(float(step.probability.mean()))
            continue
        drawn[iteration - config.warmup] = state.z
        probability += step.probability / config.samples
        divergences += step.divergent
    used = torch.full_like(probability, start if adaptation is None else adaptation.averaged)
    return Chains(drawn.movedim(0, 1), probability, divergences, used)


def _jittered(step_size: float, jitter: float, state: State) -> Tensor:
    """A step size for each chain's next trajectory, (C, 1), whatever the state is."""
    factor = 1 + jitter * (2 * torch.rand_like(state.energy) - 1)
    return step_size * factor.unsqueeze(-1)


def _counted(config: HMCConfig) -> Any:
    total = range(config.warmup + config.samples)
    if not config.progress:
        return total
    from rich.progress import track

    return track(total, description=f"HMC, {config.chains} chains")
