"""What an IVON group may hold, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from dubito.optim.ivon_update import Settings
from dubito.scalar_checks import count, non_negative, positive


class IVONOptions(TypedDict, total=False):
    """Keyword options of `IVON` beyond the paper's settings.

    Attributes:
        mc_samples: draws a step where `step` is given a closure, and in `dubito.fit`; 1. The same in all groups.
        rescale_lr: multiply the learning rate by `hess_init + weight_decay`, so that the first steps are those of SGD
            with momentum; True.
        foreach: use `torch._foreach_*`; None: where all parameters are on an accelerator.
        seed: of the noise; None: drawn from torch's global generator, so `torch.manual_seed` decides.
        distributed: average over the processes of `torch.distributed`; None: where it is initialised.
    """

    mc_samples: int
    rescale_lr: bool
    foreach: bool | None
    seed: int | None
    distributed: bool | None


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option that does not exist.

    Raises:
        TypeError: naming it and those that do.
    """
    known = IVONOptions.__annotations__
    unknown = [name for name in options if name not in known]
    if unknown:
        hint = "; betas=(beta1, beta2) takes both" if {"beta1", "beta2"} & set(unknown) else ""
        raise TypeError(f"IVON has no option {unknown[0]!r}: there are {', '.join(known)}{hint}")


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse settings outside their range, and parameters that cannot be random.

    Raises:
        TypeError, ValueError: naming the setting, what was given and what is allowed.
    """
    non_negative("lr", group["lr"])
    positive("ess", group["ess"])
    positive("hess_init", group["hess_init"])
    non_negative("weight_decay", group["weight_decay"])
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be a pair (beta1, beta2) such as (0.9, 0.99999), got {betas!r}.")
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {beta!r}.")
    if not float(group["clip_radius"]) > 0:
        raise ValueError(
            f"clip_radius must be positive (infinity: no clipping), got {group['clip_radius']!r}."
        )
    count("mc_samples", group["mc_samples"], "draws of the weights a step")
    for p in group["params"]:
        if not p.is_floating_point():
            raise TypeError(
                f"IVON is for real floating-point parameters, got {p.dtype} of shape {tuple(p.shape)}."
            )


def settings_of(group: Mapping[str, Any]) -> Settings:
    """The numbers of a group as they stand: a scheduler may have changed them."""
    rate, delta = float(group["lr"]), float(group["weight_decay"])
    if group["rescale_lr"]:
        rate *= float(group["hess_init"]) + delta
    if not math.isfinite(rate):
        raise ValueError(f"lr has become {group['lr']!r}, which is no number: look at the scheduler.")
    beta1, beta2 = group["betas"]
    return Settings(rate, float(group["ess"]), beta1, beta2, delta, float(group["clip_radius"]))


def label_of(group: Mapping[str, Any], index: int, number: int) -> str:
    """A parameter in words: its name where the optimizer was given `named_parameters()`, else its place."""
    names = group.get("param_names")
    if names is not None:
        return repr(names[index])
    p: Tensor = group["params"][index]
    return f"parameter {index} of group {number} (shape {tuple(p.shape)})"


def base_seed(seed: int | None) -> int:
    """The user's seed, or one from torch's global generator.

    Raises:
        TypeError, ValueError: it is no whole number of at least 0.
    """
    if seed is None:
        return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return count("seed", seed, "of the noise", minimum=0)
