"""Singular Bayesian neural networks: low-rank factors against the baselines of the paper."""

from __future__ import annotations

from types import MappingProxyType

from dubito.experiments.reproduction import Part, Reproduction
from dubito.experiments.singular.air_part import run_air
from dubito.experiments.singular.icu_part import run_icu
from dubito.experiments.singular.sentiment_part import run_sentiment

SINGULAR = Reproduction(
    "singular",
    "Singular Bayesian neural networks",
    "Weight matrices of low rank with Gaussian factors, from scratch and from an SVD, beside the paper's baselines: a "
    "perceptron on deaths in intensive care, an LSTM on Beijing's air, a Transformer on sentences about films, on data "
    "that stand in for the paper's.",
    MappingProxyType(
        {
            "icu": Part("death within 30 days: SUPPORT2, and RHC as the shifted set", run_icu),
            "air": Part("fine dust of the next hour over Beijing", run_air),
            "sentiment": Part(
                "sentences about films, a Transformer from scratch; other domains, and raters who differ",
                run_sentiment,
            ),
        }
    ),
    seeds=2,
)

__all__ = ["SINGULAR"]
