"""Rule sets: which approximations a propagation uses, by name or one by one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Activation = Literal["moments", "delta"]
Normalization = Literal["jacobian", "expected-scale", "mean-scale"]
Attention = Literal["delta", "mean"]
Weights = Literal["full", "rank-one"]


@dataclass(frozen=True)
class RuleSet:
    """The choices where more than one rule exists.

    Attributes:
        name: what it is called in messages and saved calibrations.
        activation: `"moments"` (Gaussian moments, exact where a closed form exists) or `"delta"` (first order: the
            mean passes as if it were certain).
        normalization: `"jacobian"` (expected scale, and the exact diagonal of the Jacobian), `"expected-scale"` (the
            published rule) or `"mean-scale"` (statistics at the mean).
        attention: `"delta"` (also the spread of queries and keys, to first order) or `"mean"` (probabilities at the
            mean of queries and keys).
        weights: `"full"` (every weight's own variance) or `"rank-one"` (of matrices and kernels with independent
            entries the row means times the column means of the variances: two products in place of three, and no
            memory for variances; nearly the same moments).
    """

    name: str
    activation: Activation = "moments"
    normalization: Normalization = "jacobian"
    attention: Attention = "delta"
    weights: Weights = "full"

    def __post_init__(self) -> None:
        for field, allowed in _ALLOWED.items():
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"{field}={getattr(self, field)!r} must be one of {', '.join(map(repr, allowed))}"
                )


_ALLOWED = {
    "activation": ("moments", "delta"),
    "normalization": ("jacobian", "expected-scale", "mean-scale"),
    "attention": ("delta", "mean"),
    "weights": ("full", "rank-one"),
}

RULE_SETS = {
    "cvp": RuleSet("cvp"),
    "cvp-paper": RuleSet("cvp-paper", normalization="expected-scale", attention="mean"),
    "streamlining": RuleSet("streamlining", "delta", "mean-scale", "mean"),
}


def rule_set(rules: str | RuleSet, **changes: str) -> RuleSet:
    """A rule set by name, or one given, with some choices changed.

    Args:
        rules: `"cvp"`, `"cvp-paper"` (calibrated variance propagation with exactly the paper's rules for
            normalisation and attention), `"streamlining"` (the first-order baseline), or a `RuleSet`.
        **changes: `activation`, `normalization`, `attention`, `weights`.

    Raises:
        ValueError: for an unknown name or choice.
        TypeError: for anything but a name or a `RuleSet`.
    """
    if isinstance(rules, str):
        if rules not in RULE_SETS:
            raise ValueError(
                f"rules={rules!r} must be one of {', '.join(map(repr, RULE_SETS))}, or a RuleSet"
            )
        rules = RULE_SETS[rules]
    if not isinstance(rules, RuleSet):
        raise TypeError(
            f"rules must be a name ({', '.join(RULE_SETS)}) or a RuleSet, not {type(rules).__name__}"
        )
    if changes:
        rules = dataclasses.replace(rules, name=f"{rules.name} (changed)", **changes)  # type: ignore[arg-type]
    return rules
