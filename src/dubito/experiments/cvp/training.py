"""Training by IVON, and the posterior as a `BayesianModule`."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.bayesian import BayesianModule
from dubito.from_gaussian import from_ivon
from dubito.likelihoods import Categorical
from dubito.optim.ivon import IVON

BATCH = 100
CLIP = 1.0  # largest gradient norm while warming up


@dataclass(frozen=True)
class Recipe:
    """How a network is trained; `spread` was chosen on validation examples.

    Attributes:
        warm: epochs of AdamW for the means, before IVON; 0 trains by IVON from the start.
        warm_lr: its highest learning rate, along a cosine after a short rise.
        epochs: of IVON.
        lr: IVON's highest learning rate, along a cosine.
        hess_init: IVON's first curvature.
        beta2: decay of its curvature.
        weight_decay: the prior's precision over the number of training examples, in both phases.
        spread: factor on the posterior's standard deviations once training is over.
    """

    warm: int = 0
    warm_lr: float = 2e-3
    epochs: int = 10
    lr: float = 0.1
    hess_init: float = 0.5
    beta2: float = 0.999
    weight_decay: float = 1e-4
    spread: float = 1.0


def train(network: nn.Module, data: tuple[Tensor, Tensor], recipe: Recipe, seed: int) -> BayesianModule:
    """Train a network and give the posterior at its own spread (`recipe.spread` is not applied yet).

    Raises:
        RuntimeError: where gradients are no longer finite.
    """
    x, y = data
    order = torch.Generator().manual_seed(seed)
    network.train()
    if recipe.warm:
        _warm_up(network, x, y, recipe, order)
    optimizer = IVON(
        network.parameters(), lr=recipe.lr, ess=len(y), hess_init=recipe.hess_init, seed=seed,
        betas=(0.9, recipe.beta2), weight_decay=recipe.weight_decay, clip_radius=1e-2 if recipe.warm else math.inf,
    )  # fmt: skip
    schedule = _cosine(optimizer, recipe.epochs * math.ceil(len(y) / BATCH))
    for _ in range(recipe.epochs):
        for index in torch.randperm(len(y), generator=order).split(BATCH):
            optimizer.zero_grad()
            with optimizer.sampled_params():
                F.cross_entropy(network(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return from_ivon(network.eval(), optimizer, Categorical()).eval()


def _warm_up(network: nn.Module, x: Tensor, y: Tensor, recipe: Recipe, order: torch.Generator) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), recipe.warm_lr, weight_decay=recipe.weight_decay)
    schedule = _cosine(optimizer, recipe.warm * math.ceil(len(y) / BATCH))
    for _ in range(recipe.warm):
        for index in torch.randperm(len(y), generator=order).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(network(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            schedule.step()


def _cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A rise over the first twentieth, then half a cosine to nothing."""
    rise = max(1, steps // 20)

    def factor(step: int) -> float:
        return min((step + 1) / rise, 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def at_spread(bayes: BayesianModule, factor: float) -> BayesianModule:
    """A copy whose posterior standard deviations are multiplied by a factor."""
    other = copy.deepcopy(bayes)
    other.rescale_spread_(factor)
    return other


@torch.no_grad()
def drawn_logits(
    bayes: BayesianModule, inputs: tuple[Tensor, ...], draws: int, seed: int, batch: int = 500
) -> tuple[Tensor, ...]:
    """Logits of each of several inputs under the same draws of the weights: `(S, N, classes)` each.

    One draw of the weights is used for all examples, as one would in practice; the first draws do not depend on how
    many there are.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[list[Tensor]] = [[] for _ in inputs]
    for _ in range(draws):
        network = bayes.sample(generator).eval()
        for kept, x in zip(found, inputs, strict=True):
            kept.append(torch.cat([network(part) for part in x.split(batch)]))
    return tuple(torch.stack(logits) for logits in found)


def save_whole(path: Path, values: Mapping[str, Any]) -> None:
    """`torch.save` so that a reader finds the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    torch.save(dict(values), temporary)
    temporary.replace(path)
