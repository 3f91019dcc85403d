"""Propagation of means and variances: uncertainty in a single pass, through any module."""

from dubito.moments import rules as _rules  # noqa: F401  (fills the table)
from dubito.moments.compiled import CompiledPropagation, compiled
from dubito.moments.coverage import Coverage, report
from dubito.moments.elementwise import fused
from dubito.moments.gaussian_tensor import GaussianTensor
from dubito.moments.moments import Context, InvalidMomentsError, Moments, NoRuleError
from dubito.moments.propagate import gaussian_weights, propagated
from dubito.moments.registry import rule
from dubito.moments.rule_sets import RULE_SETS, RuleSet

__all__ = [
    "RULE_SETS",
    "CompiledPropagation",
    "Context",
    "Coverage",
    "GaussianTensor",
    "InvalidMomentsError",
    "Moments",
    "NoRuleError",
    "RuleSet",
    "compiled",
    "fused",
    "gaussian_weights",
    "propagated",
    "report",
    "rule",
]
