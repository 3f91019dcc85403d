"""dubito: Bayesian deep learning in PyTorch. Any module, called with random weights."""

from dubito import certificates, last_layer, mcmc, moments, mup, objectives, theory
from dubito.amortised import BNNProcess, fit_process
from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.diagnostics import summary
from dubito.from_gaussian import from_ivon, from_variances
from dubito.learned_priors import EmpiricalBayes
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.monte_carlo import Draws
from dubito.objectives import Elbo, negative_elbo
from dubito.optim.ivon import IVON
from dubito.optim.parameter_groups import parameter_groups
from dubito.posthoc.temperature import TemperatureScaling
from dubito.predictive import Predictive
from dubito.priors import FanIn, Pretrained, ScaleMixture, WeightPrior
from dubito.pruning import prune, pruning_curve, signal_to_noise, sparse_state_dict
from dubito.snapshot import Snapshot
from dubito.spectrum import spectrum
from dubito.training import FitConfig, FitResult, NonFiniteError, fit
from dubito.weights import (
    CapabilityError,
    DiagonalCovariance,
    DubitoWarning,
    Empirical,
    Family,
    FullCovariance,
    GlobalInducingWeights,
    KroneckerCovariance,
    LowRankCovariance,
    LowRankFactors,
    MeanField,
    Point,
    Radial,
    RankOne,
    WeightPosterior,
)
from dubito.weights.factor_balance import balance_

__version__ = "0.1.0"

__all__ = [
    "IVON",
    "BNNProcess",
    "BayesianModule",
    "Bernoulli",
    "CapabilityError",
    "Categorical",
    "DiagonalCovariance",
    "Draws",
    "DubitoWarning",
    "Elbo",
    "Empirical",
    "EmpiricalBayes",
    "Family",
    "FanIn",
    "FitConfig",
    "FitResult",
    "FullCovariance",
    "Gaussian",
    "GlobalInducingWeights",
    "HeteroscedasticGaussian",
    "KroneckerCovariance",
    "Likelihood",
    "LowRankCovariance",
    "LowRankFactors",
    "MeanField",
    "NonFiniteError",
    "Point",
    "Predictive",
    "Pretrained",
    "Radial",
    "RankOne",
    "ScaleMixture",
    "Snapshot",
    "TemperatureScaling",
    "WeightPosterior",
    "WeightPrior",
    "balance_",
    "bayesianize",
    "certificates",
    "fit",
    "fit_process",
    "from_ivon",
    "from_variances",
    "last_layer",
    "mcmc",
    "moments",
    "mup",
    "negative_elbo",
    "objectives",
    "parameter_groups",
    "prune",
    "pruning_curve",
    "signal_to_noise",
    "sparse_state_dict",
    "spectrum",
    "summary",
    "theory",
]
