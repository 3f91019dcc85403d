"""What a target may look like, and what to say to people when it does not.

Shapes are checked on every call, since they cost nothing and a silent broadcast of `(B, 1)` against `(B,)` is
the commonest wrong regression loss there is. Values (labels out of range, NaN) are checked with one
synchronisation for all of them; where a value cannot be read (under `torch.func.vmap`, while compiling) only
the shapes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Fault(NamedTuple):
    """Where something is wrong (a boolean mask) and how to say so (given the first wrong index)."""

    mask: Tensor
    describe: Callable[[tuple[int, ...]], str]


def raise_faults(*faults: Fault) -> None:
    """Raise a `ValueError` for the first fault found anywhere; synchronises once when all is well."""
    if torch.compiler.is_compiling():
        return
    try:
        if all(fault.mask.is_cpu for fault in faults):
            found = any(bool(fault.mask.any()) for fault in faults)
        else:  # one wait for the device, not one a fault
            found = bool(torch.stack([fault.mask.any() for fault in faults]).any())
    except RuntimeError:  # vmap and meta tensors cannot answer; shapes have been checked already
        return
    if not found:
        return
    for fault in faults:
        wrong = fault.mask.nonzero()
        if len(wrong):
            raise ValueError(fault.describe(tuple(wrong[0].tolist())))


def nan_fault(name: str, values: Tensor, remedy: str) -> Fault:
    """Fault of a tensor that holds NaN."""
    mask = values.isnan()
    return Fault(mask, lambda i: f"{name} holds {int(mask.sum())} NaN, first at index {_index(i)}. {remedy}")


def label_fault(y: Tensor, classes: int) -> Fault:
    """Fault of integer labels outside `0 … classes - 1`."""
    return Fault(
        (y < 0) | (y >= classes),
        lambda i: (
            f"y[{_index(i)}] is {int(y[i])}, but the outputs have {classes} classes, so labels run from 0 to "
            f"{classes - 1}. "
            + (
                "One output for two classes is a logit: use Bernoulli()."
                if classes == 1
                else "Renumber the labels, or give the network more outputs."
            )
        ),
    )


def binary_fault(y: Tensor) -> Fault:
    """Fault of Bernoulli targets that are not in [0, 1] (NaN included)."""
    return Fault(
        ~((y >= 0) & (y <= 1)),
        lambda i: (
            f"y[{_index(i)}] is {y[i].item()}, but a Bernoulli target is 0, 1 or a probability in [0, 1]."
        ),
    )


def finite_fault(y: Tensor) -> Fault:
    """Fault of regression targets that are NaN or infinite."""
    return Fault(
        ~y.isfinite(),
        lambda i: f"y[{_index(i)}] is {y[i].item()}: drop or impute what is not finite before fitting.",
    )


def check_label_dtype(y: Tensor) -> None:
    """Raise `TypeError` unless `y` holds integers."""
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TypeError(
            f"y holds {y.dtype}, but a Categorical target is integer class labels: pass y.long(), or "
            "y.argmax(dim) if it is one-hot. For 0/1 targets use Bernoulli, for real ones Gaussian."
        )


def check_real_dtype(y: Tensor) -> None:
    """Raise `TypeError` unless `y` holds real numbers."""
    if y.is_complex() or y.dtype == torch.bool:
        raise TypeError(f"y holds {y.dtype}, but a Gaussian target is real numbers: pass y.float().")


def check_tensor(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} is a {type(value).__name__}, but a tensor is needed"
            + (
                f": pass {name}.logits"
                if hasattr(value, "logits")
                else f": pass torch.as_tensor({name}), or choose the tensor out of it"
            )
        )


def check_floating(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is a floating-point tensor."""
    check_tensor(name, value)
    assert isinstance(value, Tensor)
    if not value.is_floating_point():
        raise TypeError(f"{name} holds {value.dtype}, but floating point is needed: pass {name}.float().")


def check_shape(
    y: Tensor, like: Sequence[int], lead: int, outputs: tuple[int, ...], class_axis: int | None = None
) -> None:
    """Raise `ValueError` unless `y` has exactly the expected shape; the message says how to mend it.

    Args:
        y: the target.
        like: the shape `y` must have, behind `lead` dimensions of draws.
        lead: the number of leading draw dimensions, 0 or 1.
        outputs: the shape of the outputs, named in the message.
        class_axis: the axis of the classes in the outputs, where there is one.
    """
    expected = tuple(like[lead:])
    if tuple(y.shape) == expected:
        return
    given = tuple(y.shape)
    if tuple(like[-1:]) == (1,) and tuple(like[:-1])[-len(given) :] == given:  # nothing but the 1 is amiss
        expected = (*given, 1)
    elif lead and given[0] == like[0]:  # the first dimension is the batch, not draws
        expected = tuple(like)
    raise ValueError(
        f"y has shape {given}, but outputs of shape {outputs} need a y of shape {expected}. "
        + _remedy(given, expected, outputs, class_axis)
    )


def _remedy(
    y: tuple[int, ...], expected: tuple[int, ...], outputs: tuple[int, ...], class_axis: int | None
) -> str:
    if expected == (*y, 1):
        either = (
            ", or drop the last dimension of the outputs by outputs.squeeze(-1)" if outputs[-1] == 1 else ""
        )
        return (
            f"Pass y.unsqueeze(-1){either}. It is not broadcast: that would compare each with every target."
        )
    if y == (*expected, 1):
        return "y ends in a dimension of size 1 that it should not have: pass y.squeeze(-1)."
    if class_axis is not None and y == outputs:
        return f"y looks one-hot: pass the labels, y.argmax({class_axis})."
    if class_axis is not None:
        return (
            f"The classes were looked for on axis {class_axis}; say Categorical(dim=…) if they are elsewhere "
            "(-3 for images of shape (batch, classes, height, width)). Draws come first."
        )
    return "The batch comes first in both, after the draws in outputs; nothing is broadcast."


def compute_dtype(values: Tensor) -> Tensor:
    """`values` in the type statistics are computed in: half precision becomes float32, the rest stays."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _index(index: tuple[int, ...]) -> str:
    return ", ".join(str(i) for i in index)
