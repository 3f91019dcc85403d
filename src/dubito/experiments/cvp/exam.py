"""How an answer is judged, and what is kept of every test example for the bootstrap."""

from __future__ import annotations

import base64
import math
import statistics
from typing import Any, Final

import torch
from torch import Tensor

from dubito.experiments.cvp.contestants import Answer, Bench
from dubito.metrics import classification_metrics
from dubito.moments.moments import Moments
from dubito.ood import ood_metrics
from dubito.predictive import Predictive
from dubito.selective import area_under_risk_coverage, coverage_at_risk

AURC: Final = "trapezoid"  # the variant, of `dubito.selective.area_under_risk_coverage`
LEAST_VARIANCE = 1e-12


def scores(test: Predictive, labels: Tensor, unknown: Predictive) -> dict[str, float]:
    """`accuracy`, `nll`, `ece`, `aurc` × 100 (trapezoid), `c05` and `c1` (coverage in % at risks of 0.5 and 1 %).

    `ood_auroc` goes by the entropy of the predictive, which every method has.
    """
    plain = classification_metrics(test, labels)
    wrong = test.prediction != labels
    found = {name: plain[name] for name in ("accuracy", "nll", "ece")}
    found["aurc"] = float(area_under_risk_coverage(test.confidence, wrong, AURC))
    found["c05"] = float(coverage_at_risk(test.confidence, wrong, 0.005))
    found["c1"] = float(coverage_at_risk(test.confidence, wrong, 0.01))
    found["ood_auroc"] = ood_metrics(test.entropy, unknown.entropy).auroc
    return found


def agreement(moments: Moments, reference: Moments, at_mean: Tensor) -> dict[str, float]:
    """How near propagated logits' moments are to those of many draws.

    `shift_r2`: one less the share of the shift of the mean (draws' mean less the mean network's logits) that is not
    explained. `variance_ratio`: median of propagated over drawn variances. `variance_correlation`: of their logarithms.
    """
    shift = reference.mean - at_mean
    missing = reference.mean - moments.mean
    ours, theirs = (m.variance.double().clamp_min(LEAST_VARIANCE) for m in (moments, reference))
    logs = torch.stack((ours.log().flatten(), theirs.log().flatten()))
    return {
        "shift_r2": 1 - float(missing.double().square().sum() / shift.double().square().sum()),
        "variance_ratio": float((ours / theirs).median()),
        "variance_correlation": float(torch.corrcoef(logs)[0, 1]),
    }


def judge(answer: Answer, bench: Bench) -> dict[str, Any]:
    """Metrics (averaged over sets of draws where there are several), and the first set's examples for the bootstrap."""
    labels = bench.material.test[1]
    each = [scores(test, labels, unknown) for test, unknown in zip(answer.test, answer.unknown, strict=True)]
    metrics = {name: statistics.fmean(one[name] for one in each) for name in each[0]}
    if answer.moments is not None:
        found = agreement(answer.moments, bench.reference(), bench.at_mean()[0])
        metrics |= {name: value for name, value in found.items() if math.isfinite(value)}
    first = answer.test[0]
    return {
        "metrics": metrics,
        "confidence": packed(first.confidence.float()),
        "wrong": packed((first.prediction != labels).to(torch.uint8)),
        "fitted": dict(answer.fitted),
    }


def packed(values: Tensor) -> str:
    """The bytes of a tensor on the CPU, as text."""
    return base64.b64encode(values.contiguous().cpu().view(torch.uint8).numpy().tobytes()).decode("ascii")


def unpacked(text: str, dtype: torch.dtype) -> Tensor:
    """What `packed` made, flat."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).clone()
