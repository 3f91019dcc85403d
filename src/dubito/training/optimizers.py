"""The default optimizer, and combinations of objective, family and optimizer that are known to go wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from dubito.bayesian import BayesianModule
from dubito.optim.ivon import IVON
from dubito.optim.parameter_groups import parameter_groups
from dubito.training.config import FitConfig
from dubito.weights.family import DubitoWarning

OptimizerFactory = Callable[[Any], Optimizer]


def make_optimizer(
    model: nn.Module,
    extra: Iterable[nn.Parameter],
    config: FitConfig,
    optimizer: Optimizer | OptimizerFactory | None,
) -> Optimizer:
    """The user's optimizer, or the default: Adam for the ELBO and plain modules, SGD (momentum 0.9) else.

    Args:
        model: the module in training.
        extra: trainable parameters outside the model (a likelihood's learned noise).
        config: objective, learning rate and weight decay.
        optimizer: an optimizer, a function from parameter groups to one, or None.

    Raises:
        TypeError: it is neither.
        ValueError: it needs a closure, holds none of the model's trainable parameters, or is an IVON for a
            `BayesianModule`.
    """
    own, extra = [p for p in model.parameters() if p.requires_grad], list(extra)
    if not own and not extra:
        raise ValueError("the model has no trainable parameters: every requires_grad is False")
    if isinstance(optimizer, LBFGS):
        raise ValueError("optimizer: LBFGS needs a closure, which fit does not give; write the loop yourself")
    if isinstance(optimizer, Optimizer):
        _check_ivon(model, optimizer)
        _check_coverage(model, extra, optimizer)
        return optimizer
    if optimizer is not None and not callable(optimizer):
        raise TypeError(
            "optimizer must be a torch optimizer or a function from parameter groups to one, got "
            f"{type(optimizer).__name__}"
        )
    by_steps = config.objective == "expected_loss" and isinstance(model, BayesianModule)
    lr = config.lr if config.lr is not None else (1e-2 if by_steps else 1e-3)
    groups = _groups(model, extra, lr, config.weight_decay)
    if optimizer is not None:
        if config.lr is None:  # a group's own rate would silently win over the one the function gives
            groups = [{k: v for k, v in group.items() if k != "lr"} for group in groups]
        if not isinstance(model, BayesianModule) and config.weight_decay == 0:
            del groups[0]["weight_decay"]  # and so would a decay: IVON's is its prior
        made = optimizer(groups)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer(groups) must return a torch optimizer, got {type(made).__name__}")
        _check_ivon(model, made)
        return made
    return SGD(groups, lr=lr, momentum=0.9) if by_steps else Adam(groups, lr=lr)


def weight_draws(optimizer: Optimizer) -> list[AbstractContextManager[None]]:
    """The blocks under which a step's forward and backward passes run: an `IVON`'s draws, else one without effect."""
    if isinstance(optimizer, IVON):
        return [optimizer.sampled_params() for _ in range(optimizer.mc_samples)]
    return [nullcontext()]


def _check_ivon(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, IVON) and isinstance(model, BayesianModule):
        raise ValueError(
            "IVON draws the weights itself, so it would draw those of a BayesianModule twice: train the plain module, "
            "fit(module, loader, likelihood=…, optimizer=…), then dubito.from_ivon(module, optimizer, likelihood=…)"
        )


def _groups(
    model: nn.Module, extra: list[nn.Parameter], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]]
    if isinstance(model, BayesianModule):
        groups = list(parameter_groups(model, lr=lr, weight_decay=weight_decay))
    else:
        own = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": own, "lr": lr, "weight_decay": weight_decay}]
    if extra:
        groups.append({"params": extra, "lr": lr, "weight_decay": 0.0})
    return groups


def _check_coverage(model: nn.Module, extra: list[nn.Parameter], optimizer: Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    wanted.update({id(p): f"likelihood parameter {i}" for i, p in enumerate(extra)})
    missing = [name for key, name in wanted.items() if key not in held]
    if len(missing) == len(wanted):
        raise ValueError(
            "optimizer holds none of the model's trainable parameters: make it after bayesianize, from "
            "dubito.parameter_groups(bayes, lr=…)"
        )
    if missing:
        warnings.warn(
            f"optimizer does not hold {_some(missing)}, so they stay as they are; pass dubito.parameter_groups(bayes, "
            "lr=…), or set requires_grad=False to say that this is meant",
            DubitoWarning,
            stacklevel=5,
        )


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
