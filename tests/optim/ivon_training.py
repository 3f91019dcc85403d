"""A small network under IVON, for the tests of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito import IVON


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(count: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (count,), generator=generator)


def optimizer_of(net: nn.Module, **settings: Any) -> IVON:
    options: dict[str, Any] = {"lr": 0.1, "ess": 24, "betas": (0.9, 0.99), "weight_decay": 1e-2, "seed": 5}
    return IVON(net.parameters(), **(options | settings))


def train(net: nn.Module, optimizer: IVON, steps: int, draws: int = 1) -> None:
    x, y = data(dtype=next(net.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(draws):
            with optimizer.sampled_params():
                F.cross_entropy(net(x), y).backward()
        optimizer.step()


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def states(optimizer: IVON, name: str) -> list[Tensor]:
    return [optimizer.state[p][name] for group in optimizer.param_groups for p in group["params"]]
