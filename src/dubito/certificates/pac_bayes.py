"""PAC-Bayes bounds of the Gibbs predictor: its risk on new data, from its loss on given ones and the KL paid.

The paper bounds the KL by its largest coordinate times the number of coordinates; here it is the actual one. What the
paper keeps of its theorem 3.8, the factor sqrt(r (m + n) / (m n)) by which the complexity term of low-rank factors is
below that of the dense matrix *at equal KL a coordinate*, stands beside the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dubito.argument_checks import check_fraction
from dubito.bayesian import BayesianModule
from dubito.certificates.certificate import Certificate, Predictor
from dubito.certificates.gibbs_risk import GibbsRisk, gibbs_risk
from dubito.certificates.kl_inversion import kl_bound, sqrt_bound
from dubito.certificates.loss_constants import BoundedLoss
from dubito.certificates.validity import deterministic, exact_kl, require_fixed_prior
from dubito.scalar_checks import count
from dubito.weights.family import WeightPosterior
from dubito.weights.low_rank_factors import LowRankFactorsPosterior
from dubito.weights.rank_one import RankOnePosterior

__all__ = ["PacBayes", "pac_bayes"]

#: The share of δ spent on the draws that estimate the empirical risk.
MONTE_CARLO_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class PacBayes(Certificate):
    """A bound of the Gibbs predictor's risk, with probability 1 - δ over the data and the draws.

    `bound` is the inverted-kl form, which is never above the square-root form.

    Attributes:
        kl_form: the inverted-kl bound.
        sqrt_form: the square-root bound (it may exceed 1).
        kl: KL(Q‖P) in nats, closed form or upper bound.
        kl_by_parameter: its parts.
        n: number of data.
        delta: δ.
        samples: draws M for each batch behind the empirical risk.
        choices: K, how many priors, ranks, … this is one of.
        empirical_risk: mean loss of the draws on the data.
        corrected_risk: its upper confidence limit over the draws, which the bounds take.
        ratio: the paper's sqrt(D / D_dense), D the coordinates of the posterior, over the network.
        ratios: sqrt(r (m + n) / (m n)) of each factored matrix.
    """

    predictor: Predictor = "Gibbs"
    statement: str = (
        "risk ≤ kl⁻¹(empirical risk, c) ≤ empirical risk + sqrt(c / 2), c = (KL + ln(2 √N / δ)) / N"
    )
    kl_form: float
    sqrt_form: float
    kl: float
    kl_by_parameter: Mapping[str, float]
    n: int
    delta: float
    samples: int
    choices: int
    empirical_risk: float
    corrected_risk: float
    ratio: float
    ratios: Mapping[str, float]


def pac_bayes(
    bayes: BayesianModule,
    data: Any,
    *,
    loss: str | BoundedLoss = "zero_one",
    delta: float = 0.05,
    samples: int = 64,
    choices: int = 1,
    prior_is_fixed: bool = False,
    generator: torch.Generator | None = None,
) -> PacBayes:
    """Bound the Gibbs predictor's risk (McAllester 1999, Maurer 2004; Langford and Caruana 2001 for the draws).

    With δ' = 0.2 δ / K spent on M draws for each of B batches and δ'' = 0.8 δ / K on the data:
        L̂ ≤ kl⁻¹(L̂_M, ln(2 / δ') / (M B)),    L ≤ kl⁻¹(L̂, (KL + ln(2 √N / δ'')) / N)

    Args:
        bayes: the network; every trainable parameter has a posterior and a prior fixed before the data.
        data: the data the posterior was trained on (or others of the same kind): (x, y), or an iterable of such
            batches without augmentation, run through once.
        loss: "zero_one" (`Categorical`, `Bernoulli`), or a function from outputs (S, batch, …) and y to losses in
            [0, 1] of shape (S, batch, …), such as `clipped_cross_entropy(cap=4.0)`.
        delta: δ, the probability that the bound fails.
        samples: draws M for each batch.
        choices: K, among how many candidates (ranks, prior scales, β, early stops, …) these data chose; it divides δ.
        prior_is_fixed: your word that priors, deterministic weights and statistics were made without these data,
            where that cannot be seen (`Pretrained` priors, frozen learned scales, SVD of given weights).
        generator: source of the draws.

    Raises:
        RefusedError: an unbounded loss, a prior or deterministic weights that may depend on the data, a sampled KL.
        ValueError: fewer than 8 data, δ outside (0, 1), bad counts.
    """
    check_fraction("delta", delta)
    candidates = count("choices", choices, "candidates this network was chosen among")
    require_fixed_prior(bayes, prior_is_fixed)
    kl_by_parameter, bounded = exact_kl(bayes)
    found = gibbs_risk(bayes, data, loss, samples, generator)
    kl = math.fsum(kl_by_parameter.values())
    corrected, kl_form, sqrt_form = _forms(found, kl, delta / candidates)
    ratios, ratio = _ratios(bayes)
    return PacBayes(
        name="PAC-Bayes, " + ("0-1 loss" if loss == "zero_one" else "bounded loss"),
        bound=kl_form,
        trivial=found.chance,
        assumptions=_assumptions(bayes, loss, bounded, candidates, prior_is_fixed),
        measured=_measured(found, corrected, kl, (kl_form, sqrt_form), (ratio, ratios)) | {"δ": delta},
        kl_form=kl_form,
        sqrt_form=sqrt_form,
        kl=kl,
        kl_by_parameter=kl_by_parameter,
        n=found.n,
        delta=delta,
        samples=samples,
        choices=candidates,
        empirical_risk=found.risk,
        corrected_risk=corrected,
        ratio=ratio,
        ratios=ratios,
    )


def _forms(found: GibbsRisk, kl: float, delta: float) -> tuple[float, float, float]:
    """(empirical risk corrected for the draws, inverted-kl form, square-root form)."""
    spent = MONTE_CARLO_SHARE * delta
    corrected = found.upper(spent)
    arguments = (corrected, kl, found.n, delta - spent)
    return corrected, kl_bound(*arguments), sqrt_bound(*arguments)


def _measured(
    found: GibbsRisk,
    corrected: float,
    kl: float,
    forms: tuple[float, float],
    ratios: tuple[float, dict[str, float]],
) -> dict[str, float]:
    rows: dict[str, float] = {
        "N": found.n,
        "KL (nats)": kl,
        "KL / N": kl / found.n,
        "empirical risk": found.risk,
        "independent draws": found.evaluations,
        "empirical risk, corrected for draws": corrected,
        "inverted-kl form": forms[0],
        "square-root form": forms[1],
        "ratio sqrt(D / D_dense), network": ratios[0],
    }
    return rows | {f"ratio sqrt(r(m+n)/(mn)), {name}": value for name, value in ratios[1].items()}


def _assumptions(
    bayes: BayesianModule, loss: str | BoundedLoss, bounded: bool, choices: int, asserted: bool
) -> tuple[str, ...]:
    factored = any(isinstance(p, LowRankFactorsPosterior) for p in bayes.posteriors())
    said = (
        "You assert (prior_is_fixed=True) that the prior, and all that has no posterior, was fixed before the data."
        if asserted
        else "The prior, architecture and ranks were fixed before the data (nothing seen in the posteriors says "
        "otherwise; a choice made by hand on the data is not seen)."
    )
    among = (
        f"one of {choices} candidates, all covered by δ" if choices > 1 else "not one of several (choices=1)"
    )
    sentences = [
        "The data are independent draws of the distribution on which the risk is taken; no augmentation.",
        said,
        f"This network is {among}.",
        "The certified predictor draws new weights for each prediction. The majority vote of draws errs at most twice "
        "as often (0-1 loss); averaged probabilities and the posterior mean are other predictors, and not covered.",
        "The draws behind the empirical risk were not looked at when the network was chosen.",
    ]
    if loss != "zero_one":
        sentences.append("The loss lies in [0, 1] everywhere, not only on these data.")
    frozen = deterministic(bayes)
    if frozen:
        sentences.append(
            f"The {frozen} frozen parameters without a posterior (a backbone, say) were made without these data."
        )
    if bounded:
        sentences.append("The KL to mixture priors is an upper bound in closed form.")
    if factored:
        sentences.append(
            "The KL is taken on the factors; that of the products is no larger (data processing)."
        )
    return tuple(sentences)


def coordinates(posterior: WeightPosterior, rank: int | None = None) -> int:
    """D: random coordinates of a posterior, r(m + n) where factored (at another `rank`, if given)."""
    if isinstance(posterior, LowRankFactorsPosterior):
        each = (posterior.left_mean.numel() + posterior.right_mean.numel()) // posterior.rank
        return each * (posterior.rank if rank is None else min(rank, largest_rank(posterior)))
    if isinstance(posterior, RankOnePosterior):
        return sum(posterior.slot.shape[:2])
    return dense_coordinates(posterior)


def largest_rank(posterior: LowRankFactorsPosterior) -> int:
    """min(m, n), of one block where the rows are in several."""
    blocks = posterior.right_mean.shape[1] // posterior.rank
    return min(posterior.slot.shape[0] // blocks, posterior.slot.shape[1:].numel())


def dense_coordinates(posterior: WeightPosterior) -> int:
    """Entries of the parameters that a posterior covers."""
    return sum(slot.shape.numel() for slot in posterior.slots)


def _ratios(bayes: BayesianModule) -> tuple[dict[str, float], float]:
    posteriors = list(bayes.posteriors())
    ratios = {
        p.slot.name: math.sqrt(coordinates(p) / dense_coordinates(p))
        for p in posteriors
        if isinstance(p, LowRankFactorsPosterior)
    }
    whole = sum(dense_coordinates(p) for p in posteriors)
    return ratios, math.sqrt(sum(coordinates(p) for p in posteriors) / whole) if whole else 1.0
