"""Bayes by Backprop (Blundell et al. 2015): its three experiments, at a size that takes minutes."""

from types import MappingProxyType

from dubito.experiments.bbb.bandit_part import run_bandit
from dubito.experiments.bbb.mnist_part import run_mnist
from dubito.experiments.bbb.regression_part import run_regression
from dubito.experiments.reproduction import Part, Reproduction

__all__ = ["BBB"]

BBB = Reproduction(
    name="bbb",
    title="Bayes by Backprop, reproduced",
    summary=(
        "The experiments of Blundell, Cornebise, Kavukcuoglu and Wierstra (2015), Weight Uncertainty in Neural "
        "Networks: digits and pruning, a regression curve, and a contextual bandit."
    ),
    parts=MappingProxyType(
        {
            "mnist": Part("test error of four networks on digits, and pruning by signal-to-noise", run_mnist),
            "regression": Part("quantile bands that widen off the data", run_regression),
            "bandit": Part("Thompson sampling against greedy agents on mushrooms", run_bandit),
        }
    ),
)
