"""The No-U-Turn sampler over a network's weights, by Pyro."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dubito.likelihoods import Likelihood
from dubito.mcmc.config import NUTSConfig, NUTSOptions, check_names
from dubito.mcmc.coordinates import Priors
from dubito.mcmc.potential import Potential, randomness_of
from dubito.mcmc.result import Chains, MCMCResult, finish


class MissingPyroError(ImportError):
    """Pyro is not installed."""


def nuts(
    module: nn.Module,
    prior: Priors,
    x: Any,
    y: Tensor,
    likelihood: Likelihood | None = None,
    **options: Unpack[NUTSOptions],
) -> MCMCResult:
    """Sample the posterior over a network's weights by NUTS (Hoffman & Gelman 2014), through Pyro.

    All parameters that need gradient are sampled together; those with `requires_grad=False` are held as they are. A
    Gaussian prior, or a joint one that can whiten (such as `process.weight_prior()`), is sampled in coordinates in
    which it is standard normal, others in the weights themselves. In warm-up step size and mass matrix are adapted.
    Chains run one after the other in this process.

    Minibatches are not offered: NUTS accepts by differences of the log density, and with that of some of the data it
    would leave another distribution stationary. Memory and time go with the whole data at each leapfrog step.

    The network is copied and left as it was: flags, attributes, hooks, gradients.

    Args:
        module: any network, in evaluation mode where it has dropout or batch normalisation.
        prior: over its weights: a distribution or rule for each parameter, a joint `WeightPrior`, or a mapping from
            patterns to these.
        x: all inputs (a tensor, or a tuple or mapping of the network's arguments).
        y: all targets.
        likelihood: of the targets; None takes that which a learned prior carries. Learned noise is held as it is.
        options: any field of `NUTSConfig`, which see.

    Returns:
        The draws, their diagnostics, and the posterior as a `BayesianModule`.

    Warns:
        DubitoWarning: R-hat of the log density above 1.05, or divergent trajectories.

    Raises:
        MissingPyroError: naming the extra, if Pyro is not there.
        TypeError, ValueError: what does not fit, before anything is sampled.

    Example:
        ``dubito.mcmc.nuts(net, "fan_in", x, y, dubito.Gaussian(0.1), samples=500).predict(x_new)``
    """
    check_names("nuts", NUTSConfig, options)
    config = NUTSConfig(**options)
    sampler = _pyro()
    potential = Potential(module, prior, x, y, likelihood, config)
    with randomness_of(config.generator, potential.coordinates.like.device):
        chains = _sample(sampler, potential, config)
    return finish("nuts", module, potential, config, chains)


def _pyro() -> Any:
    try:
        from pyro.infer import mcmc
    except ImportError as error:
        raise MissingPyroError(
            'NUTS runs on Pyro, the extra "mcmc": pip install "dubito[mcmc]". dubito.mcmc.hmc needs no extra'
        ) from error
    return mcmc


def _sample(pyro_mcmc: Any, potential: Potential, config: NUTSConfig) -> Chains:
    """The chains, one after the other, by the global generator."""
    drawn, divergences, watched = [], [], []
    seen = [0.0, 0.0]

    def energy(site: dict[str, Tensor]) -> Tensor:
        potential.evaluations += 1
        return potential.energy(site["z"])

    def watch(kernel: Any, *_: Any) -> None:
        seen[:] = float(kernel._mean_accept_prob), float(kernel.step_size)  # forgotten when the chain ends

    for start in potential.starts(config):
        kernel = pyro_mcmc.NUTS(
            potential_fn=energy,
            step_size=1.0 if config.step_size is None else config.step_size,
            adapt_step_size=config.warmup > 0,
            adapt_mass_matrix=config.warmup > 0,
            full_mass=config.full_mass,
            target_accept_prob=config.target_accept,
            max_tree_depth=config.max_tree_depth,
        )
        run = pyro_mcmc.MCMC(
            kernel,
            num_samples=config.samples,
            warmup_steps=config.warmup,
            initial_params={"z": start},
            hook_fn=watch,
            disable_progbar=not config.progress,
        )
        run.run()
        drawn.append(run.get_samples()["z"].detach())
        divergences.append(len(run.diagnostics()["divergences"]["chain 0"]))
        watched.append(list(seen))
    like = potential.coordinates.like
    acceptance, step_size = torch.tensor(watched, dtype=torch.float64).to(like).unbind(-1)
    return Chains(
        torch.stack(drawn),
        acceptance,
        torch.tensor(divergences, device=like.device),
        step_size,
    )
