"""Selective prediction: answer the confident data, leave the rest; how risk falls as coverage does.

Everything takes one confidence and one risk (loss) a datum. Data of equal confidence cannot be told apart by
any threshold, so they are answered together or not at all: no result depends on the order of the data.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dubito.argument_checks import check_choice, check_same_shape, check_values, to_double

# Running sums of losses such as 0.1 round: without this a risk equal to its bound could miss it by 1e-17.
_ROUNDING = 1e-12


class RiskCoverage(NamedTuple):
    """A risk-coverage curve, one point a distinct confidence, from the most confident data on.

    Attributes:
        coverage: (K,) fraction of data answered, rising to 1.
        risk: (K,) mean risk of the data answered.
        thresholds: (K,) falling; point k answers exactly the data with confidence >= thresholds[k].
    """

    coverage: Tensor
    risk: Tensor
    thresholds: Tensor


def _sorted_groups(confidence: Tensor, risk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct confidences falling, and the count and summed risk of each."""
    check_values("confidence", confidence)
    risk = check_values("risk", risk)
    check_same_shape(confidence=confidence, risk=risk)
    if bool(torch.isinf(risk).any()):
        raise ValueError(
            "`risk` holds infinities: bound the loss (0/1 error, 1 - accuracy) before averaging it."
        )
    # Grouped in the type given: equality there is what a threshold in that type can tell apart.
    levels, group, count = confidence.flatten().unique(sorted=True, return_inverse=True, return_counts=True)
    total = risk.new_zeros(len(levels)).scatter_add(0, group, risk.flatten())
    return levels.flip(0), to_double(count.flip(0)), total.flip(0)


def risk_coverage(confidence: Tensor, risk: Tensor) -> RiskCoverage:
    """The risk-coverage curve (El-Yaniv & Wiener, 2010; Geifman & El-Yaniv, 2017).

    Args:
        confidence: any shape; higher is surer (of a classifier, `predictive.confidence`).
        risk: the same shape; loss of each datum: 0/1 error (bool is fine), 1 - soft accuracy, squared error …
    """
    levels, count, total = _sorted_groups(confidence, risk)
    answered = count.cumsum(0)
    return RiskCoverage(answered / answered[-1], total.cumsum(0) / answered, levels)


def area_under_risk_coverage(
    confidence: Tensor, risk: Tensor, variant: Literal["trapezoid", "normalised", "mean"] = "trapezoid"
) -> Tensor:
    """AURC × 100: area under risk r_k (of the k surest data) against coverage k/n; lower is better.

    The literature has three, and they differ by about r/n:

    - "trapezoid" (default): the trapezoid rule from coverage 1/n to 1 (Whitehead et al., 2022, "Reliable
      visual question answering");
    - "normalised": the same divided by its length 1 - 1/n;
    - "mean": the plain mean of r_1 … r_n (Geifman et al., 2019).

    Where confidences tie, r_k is its expectation over the orders of the tied data, so constant confidence
    gives the overall risk. A single datum leaves the trapezoid no width: its risk is returned.

    Args:
        confidence: any shape; higher is surer.
        risk: the same shape; loss of each datum.
        variant: which area.
    """
    check_choice("variant", variant, ("trapezoid", "normalised", "mean"))
    _, count, total = _sorted_groups(confidence, risk)
    size = count.long()
    each = (total / count).repeat_interleave(size)
    n = len(each)
    r = each.cumsum(0) / to_double(torch.arange(1, n + 1, device=each.device))
    if variant == "mean" or n == 1:
        return 100 * r.mean()
    area = (r[1:] + r[:-1]).sum() / (2 * n)
    return 100 * area / (1 - 1 / n) if variant == "normalised" else 100 * area


def coverage_at_risk(confidence: Tensor, loss: Tensor, max_risk: float) -> Tensor:
    """C@R × 100: the largest share of data that can be answered at a risk of at most `max_risk`.

    The largest k/n with r_k <= R, scanned from full coverage down; a boundary inside a group of equal
    confidences steps back to before the group (Whitehead et al., 2022). 0 if even the surest data risk more.
    The threshold is chosen on the data it is measured on: an optimistic figure, as in the literature.

    Args:
        confidence: any shape; higher is surer.
        loss: the same shape; loss of each datum.
        max_risk: the bound R in the loss's own unit (0.01 for 1 % error).
    """
    if not max_risk >= 0:
        raise ValueError(
            f"`max_risk` must be a number >= 0 in the loss's unit (0.01 for 1 %), got {max_risk!r}."
        )
    curve = risk_coverage(confidence, loss)
    return 100 * torch.where(curve.risk <= max_risk + _ROUNDING, curve.coverage, 0.0).max()


def risk_at_coverage(confidence: Tensor, risk: Tensor, coverage: float) -> Tensor:
    """Mean risk, in its own unit, at the smallest attainable coverage that is at least `coverage`.

    Attainable are the coverages that a threshold gives: a group of equal confidences counts whole.

    Args:
        confidence: any shape; higher is surer.
        risk: the same shape; loss of each datum.
        coverage: in (0, 1].
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"`coverage` must be a fraction in (0, 1] (0.8 for 80 %), got {coverage!r}.")
    curve = risk_coverage(confidence, risk)
    return curve.risk[(curve.coverage >= coverage - _ROUNDING).to(torch.int8).argmax()]
