"""Propagation of means and variances: uncertainty in a single pass, through any module."""

from dubito.moments import rules as _rules  # noqa: F401  (fills the table)
from dubito.moments.calibration import Calibration, CalibrationError
from dubito.moments.calibration_fitting import calibrate
from dubito.moments.compiled import CompiledPropagation, compiled
from dubito.moments.coverage import Coverage, report
from dubito.moments.elementwise import fused
from dubito.moments.gaussian_tensor import GaussianTensor
from dubito.moments.head import predictive_from_moments
from dubito.moments.logit_covariance import LogitCovariance
from dubito.moments.moments import Context, InvalidMomentsError, Moments, NoRuleError
from dubito.moments.propagate import gaussian_weights, propagated
from dubito.moments.registry import rule
from dubito.moments.rule_sets import RULE_SETS, RuleSet, rule_set

__all__ = [
    "RULE_SETS",
    "Calibration",
    "CalibrationError",
    "CompiledPropagation",
    "Context",
    "Coverage",
    "GaussianTensor",
    "InvalidMomentsError",
    "LogitCovariance",
    "Moments",
    "NoRuleError",
    "RuleSet",
    "calibrate",
    "compiled",
    "fused",
    "gaussian_weights",
    "predictive_from_moments",
    "propagated",
    "report",
    "rule",
    "rule_set",
]
