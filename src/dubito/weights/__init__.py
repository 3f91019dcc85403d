"""Families of random weights, q(w): one file a family, one contract (`family.py`)."""

from dubito.weights.family import CapabilityError, DubitoWarning, Family, WeightPosterior
from dubito.weights.low_rank_covariance import LowRankCovariance
from dubito.weights.low_rank_factors import LowRankFactors
from dubito.weights.mean_field import MeanField
from dubito.weights.point import Point

__all__ = [
    "CapabilityError",
    "DubitoWarning",
    "Family",
    "LowRankCovariance",
    "LowRankFactors",
    "MeanField",
    "Point",
    "WeightPosterior",
]
