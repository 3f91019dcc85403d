"""Out-of-distribution and error detection: scores, and how well they separate.

The positive class is stated everywhere (for out-of-distribution detection: the out-of-distribution data), and
so are chance levels, since that of average precision is the share of positives, not one half.

The curves are computed here rather than by torchmetrics: its binary metrics pass scores outside [0, 1]
through a sigmoid in their own precision, which ties large scores (variances, sums of nats) at chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from dubito.argument_checks import check_choice, check_fraction, check_same_shape, check_values, to_double

if TYPE_CHECKING:
    from dubito.predictive import Predictive


class OodMetrics(NamedTuple):
    """How well a score separates out-of-distribution (positive) from in-distribution data.

    Attributes:
        auroc: area under the ROC curve = P(out > in) + P(out = in) / 2.
        aupr_out: average precision, out-of-distribution positive.
        aupr_in: average precision of the negated score, in-distribution positive.
        fpr95: share of in-distribution data flagged when at least 95 % of the others are; lower is better.
        chance: what a score independent of the data would give, under the same names.
    """

    auroc: float
    aupr_out: float
    aupr_in: float
    fpr95: float
    chance: dict[str, float]


def ood_scores(
    predictive: Predictive,
    score: Literal["mutual_information", "entropy", "confidence", "variance"] = "mutual_information",
) -> Tensor:
    """One score a datum, higher meaning more likely out of distribution.

    Args:
        predictive: any method's predictive.
        score: "mutual_information" (epistemic, nats) or "entropy" (total, nats) of a classifier; "confidence"
            for 1 - the largest probability (Hendrycks & Gimpel, 2017); "variance" for regression, summed over
            the dimensions of the target.

    Returns:
        (batch, …) scores.
    """
    check_choice("score", score, ("mutual_information", "entropy", "confidence", "variance"))
    if score == "confidence":
        return 1 - predictive.confidence
    if score == "variance":
        variance = predictive.variance
        return variance.flatten(1).sum(-1) if variance.ndim > 1 else variance
    return predictive.entropy if score == "entropy" else predictive.mutual_information


def _checked(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Flat float64 scores and a flat bool mask with both classes present."""
    scores, values = check_values("scores", scores), check_values("positive", positive)
    check_same_shape(scores=scores, positive=positive)
    if not bool(((values == 0) | (values == 1)).all()):
        raise ValueError("`positive` must be bool, or 0 and 1 only.")
    mask = values.flatten() == 1
    if bool(mask.all()) or not bool(mask.any()):
        which = "negative" if bool(mask.all()) else "positive"
        raise ValueError(
            f"There is no {which} datum among {len(mask)}: nothing to separate, the curve is undefined."
        )
    return scores.flatten(), mask


def _counts(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Positives and negatives at or above each distinct score, scores falling: one point a group of ties."""
    scores, mask = _checked(scores, positive)
    _, group = scores.unique(sorted=True, return_inverse=True)
    per_group = scores.new_zeros(2, int(group.max()) + 1)
    per_group = per_group.scatter_add(1, group.expand(2, -1), to_double(torch.stack((mask, ~mask))))
    above = per_group.flip(1).cumsum(1)
    return above[0], above[1]


def auroc(scores: Tensor, positive: Tensor) -> Tensor:
    """Area under the ROC curve, a tie counting one half (the Mann-Whitney statistic; Hanley & McNeil, 1982).

    Args:
        scores: any shape; higher should mean positive.
        positive: the same shape; bool or 0/1.
    """
    hits, alarms = (torch.nn.functional.pad(c, (1, 0)) for c in _counts(scores, positive))
    return torch.trapezoid(hits / hits[-1], alarms / alarms[-1])


def average_precision(scores: Tensor, positive: Tensor) -> Tensor:
    """AUPR as average precision Σ (R_k - R_{k-1}) P_k over distinct thresholds: scikit-learn's, ties grouped.

    Chance is the share of positives. No interpolation (Davis & Goadrich, 2006: the trapezoid is optimistic).

    Args:
        scores: any shape; higher should mean positive.
        positive: the same shape; bool or 0/1.
    """
    hits, alarms = _counts(scores, positive)
    gained = torch.diff(hits, prepend=hits.new_zeros(1))
    return (gained * hits / (hits + alarms)).sum() / hits[-1]


def fpr_at_tpr(scores: Tensor, positive: Tensor, tpr: float = 0.95) -> Tensor:
    """False positive rate at the highest threshold whose true positive rate reaches `tpr` (no interpolation).

    Args:
        scores: any shape; higher should mean positive.
        positive: the same shape; bool or 0/1.
        tpr: rate of detection asked for, in (0, 1).
    """
    check_fraction("tpr", tpr)
    hits, alarms = _counts(scores, positive)
    reached = hits >= tpr * hits[-1] * (1 - 1e-12)  # 0.95 · 20 must not round to above 19
    return alarms[reached.to(torch.int8).argmax()] / alarms[-1]


def ood_metrics(in_scores: Tensor, out_scores: Tensor) -> OodMetrics:
    """AUROC, both average precisions and FPR at 95 % TPR, out-of-distribution positive, with chance levels.

    Args:
        in_scores: scores of in-distribution data, any shape; higher means more likely out of distribution.
        out_scores: scores of out-of-distribution data, any shape. Not to be used for tuning anything.
    """
    inside, outside = (
        check_values("in_scores", in_scores).flatten(),
        check_values("out_scores", out_scores).flatten(),
    )
    scores = torch.cat((inside, outside))
    out = torch.arange(len(scores), device=scores.device) >= len(inside)
    share = len(outside) / len(scores)
    return OodMetrics(
        auroc=float(auroc(scores, out)),
        aupr_out=float(average_precision(scores, out)),
        aupr_in=float(average_precision(-scores, ~out)),
        fpr95=float(fpr_at_tpr(scores, out)),
        chance={"auroc": 0.5, "aupr_out": share, "aupr_in": 1 - share, "fpr95": 0.95},
    )


def _checked_correct(uncertainty: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    uncertainty, values = check_values("uncertainty", uncertainty), check_values("correct", correct)
    check_same_shape(uncertainty=uncertainty, correct=correct)
    if not bool(((values == 0) | (values == 1)).all()):
        raise ValueError("`correct` must be bool, or 0 and 1 only (predicted == label, not the label).")
    return uncertainty, values == 1


def aupr_error(uncertainty: Tensor, correct: Tensor) -> Tensor:
    """AUPR-Err: average precision of finding mistakes by uncertainty (misclassified positive).

    Chance is the error rate; without any mistake it is undefined and a ValueError.

    Args:
        uncertainty: any shape; higher is less sure.
        correct: the same shape; whether the prediction was right, bool or 0/1.
    """
    uncertainty, right = _checked_correct(uncertainty, correct)
    return average_precision(uncertainty, ~right)


def aupr_success(uncertainty: Tensor, correct: Tensor) -> Tensor:
    """AUPR-Succ: average precision of finding right answers by low uncertainty (correct positive).

    Chance is the accuracy; without any right answer it is undefined and a ValueError.

    Args:
        uncertainty: any shape; higher is less sure.
        correct: the same shape; whether the prediction was right, bool or 0/1.
    """
    uncertainty, right = _checked_correct(uncertainty, correct)
    return average_precision(-uncertainty, right)
