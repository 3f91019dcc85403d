"""Families of random weights, q(w): one file a family, one contract (`family.py`)."""

from dubito.weights.diagonal_covariance import DiagonalCovariance
from dubito.weights.empirical import Empirical
from dubito.weights.family import CapabilityError, DubitoWarning, Family, WeightPosterior
from dubito.weights.full_covariance import FullCovariance
from dubito.weights.global_inducing import GlobalInducingWeights
from dubito.weights.kronecker import KroneckerCovariance
from dubito.weights.low_rank_covariance import LowRankCovariance
from dubito.weights.low_rank_factors import LowRankFactors
from dubito.weights.mean_field import MeanField
from dubito.weights.point import Point
from dubito.weights.radial import Radial
from dubito.weights.rank_one import RankOne

__all__ = [
    "CapabilityError",
    "DiagonalCovariance",
    "DubitoWarning",
    "Empirical",
    "Family",
    "FullCovariance",
    "GlobalInducingWeights",
    "KroneckerCovariance",
    "LowRankCovariance",
    "LowRankFactors",
    "MeanField",
    "Point",
    "Radial",
    "RankOne",
    "WeightPosterior",
]
