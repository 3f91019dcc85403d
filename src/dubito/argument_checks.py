"""Checks of what metrics are given: shapes, NaN, empty input, options; each error says how to mend it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


def to_double(x: Tensor) -> Tensor:
    """`x` in float64, or in float32 on a device without float64 (Apple's)."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def check_values(name: str, x: Tensor) -> Tensor:
    """Return `x` in float64 after refusing what is no tensor, complex, empty, or holds NaN."""
    if not isinstance(x, Tensor):
        ours = type(x).__module__.startswith("dubito.") and name in dir(x)
        part = f"pass predictive.{name}" if ours else "wrap it in torch.as_tensor"
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(x).__name__}: {part}.")
    if x.is_complex():
        raise TypeError(f"`{name}` is complex ({x.dtype}); real numbers are needed.")
    if x.numel() == 0:
        raise ValueError(f"`{name}` is empty (shape {tuple(x.shape)}): there is nothing to measure.")
    if x.is_floating_point() and bool(torch.isnan(x).any()):
        count = int(torch.isnan(x).sum())
        raise ValueError(
            f"`{name}` holds {count} NaN of {x.numel()} values: find where they arise, or drop those data."
        )
    return to_double(x)


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse an option that is not among `allowed`."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def check_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors of unequal shapes (broadcasting (N, 1) against (N,) would compare all pairs)."""
    if len({t.shape for t in tensors.values()}) > 1:
        shapes = ", ".join(f"`{name}` {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"Shapes differ: {shapes}. They must be equal; reshape or squeeze one of them.")


def check_fraction(name: str, value: float) -> None:
    """Refuse a level outside the open interval (0, 1)."""
    if not 0.0 < value < 1.0:
        hint = f" For {value:g} % write {value / 100:g}." if 1 < value < 100 else ""
        raise ValueError(f"`{name}` must lie strictly between 0 and 1, got {value!r}.{hint}")


def reduce(x: Tensor, reduction: Reduction) -> Tensor:
    """Mean, sum or nothing over per-datum scores."""
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if reduction == "none":
        return x
    return x.mean() if reduction == "mean" else x.sum()


def _as_columns(probs: Tensor, y: Tensor, log: bool) -> Tensor:
    """Bring probabilities to y.shape + (C,), a single binary column to two."""
    if not isinstance(y, Tensor):
        raise TypeError(f"`y` must be a torch.Tensor of labels, got {type(y).__name__}.")
    if not probs.is_floating_point():
        raise TypeError(
            f"`probs` must be floating point, got {probs.dtype}; were labels passed as probabilities?"
        )
    if probs.dtype in (torch.float16, torch.bfloat16):
        probs = probs.float()
    single = probs.shape == (*y.shape, 1)
    if single or (probs.shape == y.shape and (y.ndim == 1 or y.shape[-1:] == (1,))):
        p = probs.squeeze(-1) if single else probs
        return torch.stack(((-p.expm1()).clamp(min=0).log() if log else 1 - p, p), dim=-1)
    if probs.ndim == y.ndim + 1 and probs.shape[:-1] == y.shape:
        return probs
    hint = "the class axis must be last (use probs.movedim(axis, -1))"
    if probs.shape == y.shape:
        hint = "pass y.argmax(-1) if it is one-hot; for several binary labels a datum flatten both"
    elif probs.ndim == y.ndim + 2 and probs.shape[1:-1] == y.shape:
        hint = "draws seem to lead: average them first, probs.mean(0)"
    raise ValueError(f"`probs` {tuple(probs.shape)} do not fit labels `y` {tuple(y.shape)}: {hint}.")


def _check_sum_to_one(probs: Tensor, tolerance: float) -> None:
    total = to_double(probs).sum(-1)
    low, high = float(probs.min()), float(probs.max())
    if low >= -tolerance and high <= 1 + tolerance and float((total - 1).abs().max()) <= tolerance:
        return
    what = "these look like logits: apply softmax (or sigmoid for one column) first"
    if high <= 0 and float((to_double(probs).exp().sum(-1) - 1).abs().max()) <= tolerance:
        what = "these look like log-probabilities: apply exp (negative_log_likelihood takes log_probs=True)"
    elif low >= 0 and high <= 1:
        what = "normalise them; if they are one sigmoid a class, give each class its own binary problem"
    raise ValueError(
        f"`probs` are no probabilities: values in [{low:.4g}, {high:.4g}], sums over the last axis in "
        f"[{float(total.min()):.4g}, {float(total.max()):.4g}] where 1 is needed; {what}."
    )


def _check_labels(y: Tensor, classes: int) -> Tensor:
    if y.is_floating_point() or y.is_complex():
        values = check_values("y", y)
        if not bool((values == values.round()).all()):
            raise ValueError(
                f"`y` holds fractions ({y.dtype}); class labels must be whole numbers 0 … {classes - 1}."
            )
    y = y.long()
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"`y` holds labels from {low} to {high}, but {classes} classes allow 0 … {classes - 1}. "
            "Drop data marked to be ignored; labels counted from 1 need y - 1."
        )
    return y


def check_classification(probs: Tensor, y: Tensor, log: bool = False) -> tuple[Tensor, Tensor]:
    """Validated (N, C) probabilities (or log-probabilities) and (N,) labels, from any shapes that fit."""
    check_values("probs", probs)
    tolerance = 1e-2 if probs.dtype in (torch.float16, torch.bfloat16) else 1e-3
    columns = _as_columns(probs, y, log)
    _check_sum_to_one(to_double(columns).exp() if log else columns, tolerance)
    return columns.reshape(-1, columns.shape[-1]), _check_labels(y, columns.shape[-1]).reshape(-1)
