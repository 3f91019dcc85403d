"""dubito: Bayesian deep learning in PyTorch. Any module, called with random weights."""

from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.monte_carlo import Draws
from dubito.objectives import Elbo, negative_elbo
from dubito.optim.parameter_groups import parameter_groups
from dubito.predictive import Predictive
from dubito.priors import FanIn, Pretrained, ScaleMixture, WeightPrior
from dubito.weights import (
    CapabilityError,
    DubitoWarning,
    Family,
    LowRankCovariance,
    LowRankFactors,
    MeanField,
    Point,
    WeightPosterior,
)

__version__ = "0.1.0"

__all__ = [
    "BayesianModule",
    "Bernoulli",
    "CapabilityError",
    "Categorical",
    "Draws",
    "DubitoWarning",
    "Elbo",
    "Family",
    "FanIn",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "LowRankCovariance",
    "LowRankFactors",
    "MeanField",
    "Point",
    "Predictive",
    "Pretrained",
    "ScaleMixture",
    "WeightPosterior",
    "WeightPrior",
    "bayesianize",
    "negative_elbo",
    "parameter_groups",
]
