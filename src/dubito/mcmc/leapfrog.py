"""One iteration of Hamiltonian Monte Carlo, for many chains at once, on any energy with a gradient.

H(z, r) = U(z) + ½ |r|², with r ~ N(0, I) drawn afresh for every proposal; the proposal is the end of L leapfrog steps,
taken with probability min(1, exp(H(z, r) - H(z', r'))), both energies at the true positions and the momenta of this
very trajectory (Neal 2011, "MCMC using Hamiltonian dynamics", sections 5.2 and 5.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

EnergyAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]

DIVERGENT = 1000.0  # nats of energy error beyond which a trajectory is called divergent, as in Stan


class State(NamedTuple):
    """Where the chains are.

    Attributes:
        z: coordinates, (C, D).
        energy: U(z), (C,).
        gradient: of U at z, (C, D).
    """

    z: Tensor
    energy: Tensor
    gradient: Tensor


class Step(NamedTuple):
    """What one iteration did.

    Attributes:
        state: where the chains are now.
        probability: of acceptance, (C,).
        accepted: whether each chain moved, (C,).
        divergent: whether the energy error was infinite, NaN or above 1000 nats, (C,).
    """

    state: State
    probability: Tensor
    accepted: Tensor
    divergent: Tensor


def at(target: EnergyAndGradient, z: Tensor) -> State:
    """The state at coordinates (C, D)."""
    return State(z, *target(z))


def leapfrog(
    target: EnergyAndGradient, state: State, momentum: Tensor, step_size: Tensor | float, steps: int
) -> tuple[State, Tensor]:
    """`steps` leapfrog steps: half a kick, a drift, half a kick, each; reversible, of second order in the step size.

    Args:
        target: U and its gradient at (C, D).
        state: where the chains are.
        momentum: (C, D).
        step_size: a number, or (C, 1).
        steps: L.

    Returns:
        The end and its momentum.
    """
    for _ in range(steps):
        momentum = momentum - 0.5 * step_size * state.gradient
        state = at(target, state.z + step_size * momentum)
        momentum = momentum - 0.5 * step_size * state.gradient
    return state, momentum


def hamiltonian(state: State, momentum: Tensor) -> Tensor:
    """H = U + ½ |r|², (C,)."""
    return state.energy + 0.5 * momentum.square().sum(-1)


def fresh_momentum(z: Tensor) -> Tensor:
    """r ~ N(0, I), (C, D), by the global generator."""
    return torch.randn_like(z)


def accepts(log_uniform: Tensor, log_ratio: Tensor) -> Tensor:
    """Whether log u < H(z, r) - H(z', r')."""
    return log_uniform < log_ratio


def selected(accepted: Tensor, proposal: State, current: State) -> State:
    """The proposal for the chains that accept it, where they were for the others."""
    row = accepted.unsqueeze(-1)
    return State(
        torch.where(row, proposal.z, current.z),
        torch.where(accepted, proposal.energy, current.energy),
        torch.where(row, proposal.gradient, current.gradient),
    )


def iterate(target: EnergyAndGradient, state: State, step_size: Tensor | float, steps: int) -> Step:
    """One iteration of every chain, by the global generator.

    Args:
        target: U and its gradient.
        state: where the chains are.
        step_size: a number, or (C, 1).
        steps: leapfrog steps of the proposal.
    """
    momentum = fresh_momentum(state.z)
    proposal, end = leapfrog(target, state, momentum, step_size, steps)
    log_ratio = hamiltonian(state, momentum) - hamiltonian(proposal, end)
    broken = ~log_ratio.isfinite()  # a proposal of no density, or of energy beyond the range
    log_ratio = torch.where(broken, torch.full_like(log_ratio, -torch.inf), log_ratio)
    accepted = accepts(torch.rand_like(log_ratio).log(), log_ratio)
    return Step(
        selected(accepted, proposal, state), log_ratio.clamp(max=0).exp(), accepted, log_ratio < -DIVERGENT
    )
