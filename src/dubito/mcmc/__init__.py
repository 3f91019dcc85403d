"""Markov chains over the weights of any network: NUTS through Pyro, HMC of our own, and whether they have mixed."""

from dubito.mcmc.config import HMCConfig, NUTSConfig
from dubito.mcmc.diagnostics import effective_sample_size, r_hat
from dubito.mcmc.hmc import hmc
from dubito.mcmc.nuts import MissingPyroError, nuts
from dubito.mcmc.result import Convergence, MCMCResult

__all__ = [
    "Convergence",
    "HMCConfig",
    "MCMCResult",
    "MissingPyroError",
    "NUTSConfig",
    "effective_sample_size",
    "hmc",
    "nuts",
    "r_hat",
]
