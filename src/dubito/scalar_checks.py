"""Checks of single numbers and options, with errors that say what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from typing import Any, get_args

import torch
from torch import Tensor


def count(name: str, value: object, meaning: str, minimum: int = 1) -> int:
    """`value` as an int; TypeError where it is no whole number, ValueError below `minimum`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number ({meaning}), got {value!r}.")
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum} ({meaning}), got {number}.")
    return number


def non_negative(name: str, value: float) -> float:
    """`value` as a float; ValueError where it is negative, infinite or NaN."""
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}.")
    return number


def positive(name: str, value: float) -> float:
    """`value` as a float; ValueError where it is not greater than zero, infinite or NaN."""
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{name} must be a positive, finite number, got {value}.")
    return number


def choice(name: str, value: object, literal: Any) -> None:
    """ValueError where `value` is none of the options of a `Literal` type."""
    options = get_args(literal)
    if value not in options:
        raise ValueError(f"unknown {name} {value!r}: give one of {', '.join(map(repr, options))}.")


def broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of `shape` broadcasts to exactly `target`."""
    try:
        return bool(torch.broadcast_shapes(shape, target) == target)
    except RuntimeError:
        return False


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or the dtype itself where it is wider: densities need more than eight bits of mantissa."""
    return torch.promote_types(dtype, torch.float32)


def brief(tensor: Tensor) -> str:
    """A tensor in a few words, for error messages."""
    if tensor.numel() == 1:
        return f"{tensor.reshape(()).item():g}"
    return f"values from {tensor.min().item():g} to {tensor.max().item():g}"
