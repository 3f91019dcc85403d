"""Bayesian linear regression with its exact posterior, and helpers for comparing a sampler's draws with it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dubito.mcmc import MCMCResult, effective_sample_size

NOISE = 0.5


def regression() -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear model of two features, and 30 data."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    x = torch.randn(30, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]) + 0.3 + NOISE * torch.randn(30, 1)
    return net, x, y


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of (weights, bias) under a standard normal prior."""
    phi = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
    precision = phi.T @ phi / NOISE**2 + torch.eye(3, dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    return (covariance @ phi.T @ y.double() / NOISE**2).squeeze(-1), covariance


def flat(result: MCMCResult) -> Tensor:
    """(chains, S, 3)."""
    return torch.cat([result.draws["weight"].flatten(2), result.draws["bias"]], dim=-1)


def assert_within_monte_carlo_error(result: MCMCResult, mean: Tensor, covariance: Tensor) -> None:
    """Means and variances within four standard errors, by the effective sample size of each."""
    values = flat(result)
    sd = covariance.diagonal().sqrt()
    error = sd / effective_sample_size(values, "mean").sqrt()
    assert bool(((values.mean((0, 1)) - mean).abs() < 4 * error).all())
    squares = (values - mean).square()
    error = covariance.diagonal() * (2 / effective_sample_size(squares, "mean")).sqrt()
    assert bool(((squares.mean((0, 1)) - covariance.diagonal()).abs() < 4 * error).all())
    products = (values[..., 0] - mean[0]) * (values[..., 1] - mean[1])
    error = products.std() / effective_sample_size(products, "mean").sqrt()
    assert abs(float(products.mean() - covariance[0, 1])) < 4 * float(error)


def everything_of(module: nn.Module) -> list[Any]:
    """What a caller could notice: identities, values, versions, gradients, flags, hooks, attributes."""
    state: list[Any] = []
    for name, part in module.named_modules():
        state.append((name, id(part), type(part), part.training, sorted(vars(part))))
        state.append({k: list(v) for k, v in vars(part).items() if k.endswith("_hooks")})
    for name, p in module.named_parameters():
        grad = None if p.grad is None else p.grad.tolist()
        state.append((name, id(p), p._version, p.dtype, p.requires_grad, grad, p.detach().tolist()))
    state += [(name, id(b), b._version, b.tolist()) for name, b in module.named_buffers()]
    return copy.deepcopy(state)
