"""Certificates: bounds that state what they assume, what was measured, and which predictor they are about.

    eckart_young, learned_factors, network_eckart_young     what a rank costs in loss, for fixed weights
    stochastic_gap                                          the same between two random layers
    pac_bayes, rank_sweep                                   the risk of the Gibbs predictor on new data
    gaussian_complexity                                     the risk of one layer's posterior mean
    centre_check                                            a diagnostic of the network at the mean weights

A certificate that would not hold is refused (`RefusedError`), one that says nothing is `vacuous`.
"""

from dubito.certificates.centre_network import CentreCheck, centre_check
from dubito.certificates.certificate import PREDICTORS, Certificate, Predictor, RefusedError
from dubito.certificates.eckart_young import LossGap, eckart_young, learned_factors, network_eckart_young
from dubito.certificates.gaussian_complexity import (
    GaussianComplexity,
    complexity_bound,
    complexity_estimate,
    gaussian_complexity,
)
from dubito.certificates.gibbs_risk import GibbsRisk, gibbs_risk
from dubito.certificates.kl_inversion import binary_kl, kl_bound, kl_inverse, sqrt_bound
from dubito.certificates.loss_constants import (
    ClippedLoss,
    LossConstants,
    clipped_cross_entropy,
    loss_constants,
)
from dubito.certificates.pac_bayes import PacBayes, pac_bayes
from dubito.certificates.rank_sweep import RankPoint, RankSweep, rank_sweep
from dubito.certificates.stochastic_gap import StochasticGap, output_moments, stochastic_gap

__all__ = [
    "PREDICTORS",
    "CentreCheck",
    "Certificate",
    "ClippedLoss",
    "GaussianComplexity",
    "GibbsRisk",
    "LossConstants",
    "LossGap",
    "PacBayes",
    "Predictor",
    "RankPoint",
    "RankSweep",
    "RefusedError",
    "StochasticGap",
    "binary_kl",
    "centre_check",
    "clipped_cross_entropy",
    "complexity_bound",
    "complexity_estimate",
    "eckart_young",
    "gaussian_complexity",
    "gibbs_risk",
    "kl_bound",
    "kl_inverse",
    "learned_factors",
    "loss_constants",
    "network_eckart_young",
    "output_moments",
    "pac_bayes",
    "rank_sweep",
    "sqrt_bound",
    "stochastic_gap",
]
