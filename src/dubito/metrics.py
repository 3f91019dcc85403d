"""How good, and how honest, are predictions: proper scores, calibration, intervals.

Plain functions on tensors of any device and float type. Sums are taken in float64 (float32 where the device
has no float64) and results are 0-dim tensors, or one value a datum with ``reduction="none"``; the two
functions on a `Predictive` return dictionaries of Python floats.

Classification takes *probabilities* with the class axis last, ``(..., C)``, and integer labels ``(...)``.
A binary problem may also give one column, P(y = 1), shaped ``(N,)`` or ``(N, 1)``: it is read as the two
columns (1 - p, p), so confidence is max(p, 1 - p) and accuracy counts correct decisions.
Out-of-distribution and error detection live in `dubito.ood`, selective prediction in `dubito.selective`.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from dubito.argument_checks import (
    Reduction,
    check_choice,
    check_classification,
    check_fraction,
    check_same_shape,
    check_values,
    reduce,
    to_double,
)
from dubito.regression_scores import (
    crps_ensemble,
    crps_gaussian,
    crps_gaussian_mixture,
    interval_score,
    mean_absolute_error,
    mean_prediction_interval_width,
    prediction_interval_coverage,
    root_mean_squared_error,
)

if TYPE_CHECKING:
    from dubito.predictive import Predictive

Binning = Literal["width", "mass"]


__all__ = [
    "Reliability",
    "accuracy",
    "brier_score",
    "classification_metrics",
    "classwise_calibration_error",
    "crps_ensemble",
    "crps_gaussian",
    "crps_gaussian_mixture",
    "expected_calibration_error",
    "interval_score",
    "maximum_calibration_error",
    "mean_absolute_error",
    "mean_prediction_interval_width",
    "negative_log_likelihood",
    "prediction_interval_coverage",
    "regression_metrics",
    "reliability",
    "root_mean_squared_error",
]


class Reliability(NamedTuple):
    """A reliability diagram: per bin, what was claimed and what came true.

    Attributes:
        confidence: (bins,) mean confidence of the data in the bin; NaN where the bin is empty.
        accuracy: (bins,) fraction of them that was right; NaN where the bin is empty.
        count: (bins,) number of data, int64.
        edges: (bins + 1,) bin edges; bin b is [edges[b], edges[b+1]), the last one closed.
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    edges: Tensor


# ---------------------------------------- classification
def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """Fraction of data whose most probable class is the label (the first class wins a tie).

    Args:
        probs: (..., C) probabilities, or one column P(y = 1).
        y: (...) integer labels.
    """
    p, y = check_classification(probs, y)
    return to_double(p.argmax(-1) == y).mean()


def negative_log_likelihood(
    probs: Tensor,
    y: Tensor,
    *,
    log_probs: bool = False,
    floor: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Negative log-probability of the labels, in nats: -log p(y), the logarithmic score (Good, 1952).

    A probability of exactly 0 means "less than this float type can hold", so by default probabilities are
    raised to the type's smallest normal number: 87.3 nats at most in float32, 708.4 in float64 (log_loss of
    scikit-learn clips at the type's epsilon instead: 15.9 and 36.0). ``floor=0`` gives the honest infinity.

    Args:
        probs: (..., C) probabilities, or one column P(y = 1).
        y: (...) integer labels.
        log_probs: `probs` are log-probabilities. They are then floored only if `floor` is given.
        floor: smallest probability allowed, in [0, 1).
        reduction: over data: "mean", "sum" or "none".
    """
    table, y = check_classification(probs, y, log=log_probs)
    if floor is not None and not 0.0 <= floor < 1.0:
        raise ValueError(f"`floor` must lie in [0, 1), got {floor!r}.")
    picked = to_double(table.gather(1, y[:, None]).squeeze(1))
    if log_probs:
        return reduce(-picked if not floor else -picked.clamp(min=math.log(floor)), reduction)
    least = torch.finfo(table.dtype).tiny if floor is None else floor
    return reduce(-picked.clamp(min=least).log(), reduction)


def brier_score(
    probs: Tensor, y: Tensor, *, over_classes: Literal["sum", "mean"] = "sum", reduction: Reduction = "mean"
) -> Tensor:
    """Brier score: squared distance between probabilities and the one-hot label (Brier, 1950).

    Summed over classes by default, as in the original: in [0, 2], and for one binary column 2 (p - y)².
    ``over_classes="mean"`` divides by C; for binary problems that is scikit-learn's (p - y)².

    Args:
        probs: (..., C) probabilities, or one column P(y = 1).
        y: (...) integer labels.
        over_classes: "sum" or "mean".
        reduction: over data: "mean", "sum" or "none".
    """
    check_choice("over_classes", over_classes, ("sum", "mean"))
    p, y = check_classification(probs, y)
    p = to_double(p)
    square = p.scatter_add(1, y[:, None], p.new_full((len(y), 1), -1.0)).square()
    return reduce(square.sum(-1) if over_classes == "sum" else square.mean(-1), reduction)


def _bin_sums(
    claimed: Tensor, hit: Tensor, bins: int, binning: Binning
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of claimed probability and of hits, counts, and edges, per row of (K, N) input: (K, bins) each."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"`bins` must be a positive whole number, got {bins!r}.")
    check_choice("binning", binning, ("width", "mass"))
    rows, n = claimed.shape
    steps = torch.arange(bins + 1, device=claimed.device)
    if binning == "width":
        # In the input's own type: a float32 0.7 then lies on the edge 0.7, not a rounding error below it.
        edges = (steps.to(claimed.dtype) / bins).expand(rows, -1)
    else:
        edges = claimed.sort(dim=-1).values[:, (steps * n // bins).clamp(max=n - 1)]
    # Only inner edges are searched, so 0 falls in the first bin and 1 in the last whatever the rounding.
    index = torch.searchsorted(edges[:, 1:-1].contiguous(), claimed.contiguous(), right=True)
    empty = to_double(torch.zeros(rows, bins, device=claimed.device))
    claimed, hit = to_double(claimed), to_double(hit)
    count = empty.scatter_add(1, index, torch.ones_like(claimed))
    return empty.scatter_add(1, index, claimed), empty.scatter_add(1, index, hit), count, to_double(edges)


def reliability(probs: Tensor, y: Tensor, bins: int = 15, binning: Binning = "width") -> Reliability:
    """Bin data by confidence (the largest probability) for a reliability diagram (DeGroot & Fienberg, 1983).

    Bins are [a, b), the last one closed, as numpy.histogram's: confidence 1 is in the last bin, 0 the first.

    Args:
        probs: (..., C) probabilities, or one column P(y = 1).
        y: (...) integer labels.
        bins: number of bins.
        binning: "width" for equal widths on [0, 1]; "mass" for equal counts (to one datum). With "mass" equal
            confidences share a bin, so bins may be empty but the order of the data never matters.
    """
    p, y = check_classification(probs, y)
    confidence, predicted = p.max(-1)
    sums = _bin_sums(confidence[None], (predicted == y)[None], bins, binning)
    claimed, hit, count, edges = (s.squeeze(0) for s in sums)
    return Reliability(claimed / count, hit / count, count.long(), edges)


def expected_calibration_error(
    probs: Tensor,
    y: Tensor,
    bins: int = 15,
    binning: Binning = "width",
    norm: Literal["l1", "l2", "max"] = "l1",
) -> Tensor:
    """Calibration error of the top label: bin-weighted distance of accuracy from confidence.

    "l1" is the ECE, Σ_b n_b/N |acc_b - conf_b| (Naeini et al., 2015; Guo et al., 2017, eq. 3); "l2" the root
    of the weighted mean square (Kumar et al., 2019); "max" the largest gap of a non-empty bin.
    ``binning="mass"`` is the adaptive ECE (Nguyen & O'Connor, 2015). Biased upwards when bins hold few data.

    Args:
        probs: (..., C) probabilities, or one column P(y = 1).
        y: (...) integer labels.
        bins: number of bins.
        binning: "width" or "mass", see `reliability`.
        norm: "l1", "l2" or "max".
    """
    check_choice("norm", norm, ("l1", "l2", "max"))
    table = reliability(probs, y, bins, binning)
    filled = table.count > 0
    gap = (table.accuracy[filled] - table.confidence[filled]).abs()
    weight = to_double(table.count[filled]) / table.count.sum()
    if norm == "max":
        return gap.max()
    return (weight * gap).sum() if norm == "l1" else (weight * gap.square()).sum().sqrt()


def maximum_calibration_error(probs: Tensor, y: Tensor, bins: int = 15, binning: Binning = "width") -> Tensor:
    """Largest gap between accuracy and confidence over non-empty bins (Guo et al., 2017, eq. 5)."""
    return expected_calibration_error(probs, y, bins, binning, norm="max")


def classwise_calibration_error(
    probs: Tensor, y: Tensor, bins: int = 15, binning: Binning = "width", reduction: Reduction = "mean"
) -> Tensor:
    """Classwise ECE: the ECE of P(y = k) against 1[y = k] for every class k (Kull et al., 2019).

    A class that never occurs counts too: whatever is claimed for it is error.

    Args:
        probs: (..., C) probabilities, or one column P(y = 1).
        y: (...) integer labels.
        bins: number of bins.
        binning: "width" or "mass", see `reliability`.
        reduction: over classes: "mean" (the usual), "sum" or "none" for (C,).
    """
    p, y = check_classification(probs, y)
    truth = torch.arange(p.shape[1], device=p.device)[:, None] == y
    claimed, hit, count, _ = _bin_sums(p.T, truth, bins, binning)
    return reduce((hit - claimed).abs().sum(-1) / count.sum(-1), reduction)


def _outcomes(predictive: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities with the classes last and fitting labels; several binary labels a datum become data."""
    probs = predictive.probs
    if predictive.kind == "bernoulli":
        check_same_shape(probs=probs, y=y)
        return probs.flatten(), y.flatten()
    return probs.movedim(
        getattr(predictive, "_axis", -1), -1
    ), y  # dense outputs keep their classes elsewhere


def classification_metrics(predictive: Predictive, y: Tensor, bins: int = 15) -> dict[str, float]:
    """The usual table of a classifier: accuracy, nll, brier, ece, mce, classwise_ece and aurc (× 100).

    All are means over outcomes (for dense or multi-label problems: pixels, single labels). `nll` is in nats and
    the predictive's own log-probability, so infinite where a label was given probability 0.

    Args:
        predictive: categorical or Bernoulli, of any method.
        y: labels, as `predictive.log_prob` takes them.
        bins: number of equal-width bins.
    """
    from dubito.selective import area_under_risk_coverage

    log_prob = check_values("predictive.log_prob(y)", predictive.log_prob(y))
    p, labels = check_classification(*_outcomes(predictive, y))
    confidence, predicted = p.max(-1)
    return {
        "accuracy": float(accuracy(p, labels)),
        "nll": -float(log_prob.sum()) / len(labels),
        "brier": float(brier_score(p, labels)),
        "ece": float(expected_calibration_error(p, labels, bins)),
        "mce": float(maximum_calibration_error(p, labels, bins)),
        "classwise_ece": float(classwise_calibration_error(p, labels, bins)),
        "aurc": float(area_under_risk_coverage(confidence, predicted != labels)),
    }


def regression_metrics(predictive: Predictive, y: Tensor, level: float = 0.95) -> dict[str, float]:
    """The usual table of a regression: rmse, mae, nll, crps, picp, mpiw and interval_score.

    All are means over outcomes, in the target's unit; `nll` in nats, and left out where the predictive has no
    density (noise variance 0). The CRPS is that of the predictive itself: the mixture over its draws (O(S²) a
    datum), or one Gaussian where no draws were kept.

    Args:
        predictive: regression, of any method; `predictive.affine` undoes a standardised target first.
        y: targets of the shape of `predictive.mean`.
        level: nominal coverage of the interval, in (0, 1).
    """
    from dubito.predictive import NotAvailableError

    check_fraction("level", level)
    mean = predictive.mean
    table = {
        "rmse": float(root_mean_squared_error(mean, y)),
        "mae": float(mean_absolute_error(mean, y)),
    }
    with contextlib.suppress(NotAvailableError):
        log_prob = check_values("predictive.log_prob(y)", predictive.log_prob(y))
        table["nll"] = -float(log_prob.sum()) / y.numel()
    means, variances = predictive._components()  # type: ignore[attr-defined]
    table["crps"] = float(crps_gaussian_mixture(means, variances.sqrt().expand_as(means), y))
    lower, upper = predictive.interval(level)
    table["picp"] = float(prediction_interval_coverage(lower, upper, y))
    table["mpiw"] = float(mean_prediction_interval_width(lower, upper))
    table["interval_score"] = float(interval_score(lower, upper, y, level))
    return table
