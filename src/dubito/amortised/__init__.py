"""Bayesian neural network processes: a prior over weights learned from many data sets, and amortised inference."""

from dubito.amortised.exported import LearnedWeightPrior, ProcessNetwork
from dubito.amortised.fitting import ProcessFitConfig, ProcessFitResult, fit_process
from dubito.amortised.linear import AmortisedLinear
from dubito.amortised.posterior import Evidence, ImportanceSamplingError, ProcessPosterior
from dubito.amortised.process import BNNProcess
from dubito.amortised.process_prior import ProcessPrior
from dubito.amortised.tasks import TaskBatch, gather_tasks, split_context
from dubito.gaussian_conditionals import PrecisionError

__all__ = [
    "AmortisedLinear",
    "BNNProcess",
    "Evidence",
    "ImportanceSamplingError",
    "LearnedWeightPrior",
    "PrecisionError",
    "ProcessFitConfig",
    "ProcessFitResult",
    "ProcessNetwork",
    "ProcessPosterior",
    "ProcessPrior",
    "TaskBatch",
    "fit_process",
    "gather_tasks",
    "split_context",
]
