"""What a propagation carries besides the moments: the rules chosen, the sites of calibration, what was noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dubito.moments.rule_sets import RuleSet, rule_set
from dubito.weights.family import CapabilityError
from dubito.weights.gaussian_weights import Moments, paired

__all__ = ["Calibrator", "Context", "InvalidMomentsError", "Moments", "NoRuleError", "Used", "paired"]

SCALED = ("activation", "norm", "output")  # sites at which variances are multiplied
CORRELATED = ("pool", "attention")  # sites at which a correlation is interpolated


class NoRuleError(CapabilityError):
    """An operator met a random tensor and there is no rule for it."""


class InvalidMomentsError(RuntimeError):
    """A mean or a variance is NaN, or a variance negative."""


class Calibrator(Protocol):
    """What a calibration answers a propagation, site by site."""

    def alpha(self, site: str) -> Tensor | float | None:
        """The factor on the variance at a site before an activation or a norm, or at the output; None is 1."""
        ...

    def rho(self, site: str) -> Tensor | float | None:
        """The correlation at a pooling or attention site; None is independence."""
        ...


@dataclass(frozen=True)
class Used:
    """One use of a rule, for the report.

    Attributes:
        path: path of the module it happened in ("" is the network itself).
        operator: the operator's name.
        exactness: "exact", "approximate" or "none".
        note: how it is approximated.
    """

    path: str
    operator: str
    exactness: str
    note: str


@dataclass
class Context:
    """One propagation's settings and bookkeeping; rules receive it as their first argument.

    A *site* is a place that a calibration may act on: before an activation ("activation") and before a normalisation
    ("norm") and at the output ("output") a factor alpha multiplies the variance; at pooling ("pool") and attention
    ("attention") a correlation rho interpolates between independent and fully correlated terms. It is named by module
    path, kind and index of use, such as `encoder.0.act:activation` or `block.relu:activation#1` for the second use:
    the same in every run, batch and front end.

    Attributes:
        rules: the rule set.
        calibration: answers alpha and rho by site, or None.
        record: called with each site's name and its moments (before alpha; for pooling and attention the result):
            what a calibration is fitted on.
        drawing: there are no variances: the operators themselves run on one draw of the weights, and sites are
            recorded as in a propagation, with a variance of None.
        check: look at every operator's result, and name the first that is invalid (the output, and what a user's
            rule returns, is looked at in any case).
        used: rules used, in order, where a report is wanted (else None).
        survey: go on at the mean where an operator has no rule (for a report of all of them).
        path: the module that runs now.
        failure: an error that compiled code may have wrapped in one of its own.
        seen: random parameters that an operator has met.
    """

    rules: RuleSet = field(default_factory=lambda: rule_set("cvp"))
    calibration: Calibrator | None = None
    record: Callable[[str, Any], None] | None = None
    drawing: bool = False
    check: bool = False
    used: list[Used] | None = None
    survey: bool = False
    path: str = ""
    failure: NoRuleError | None = None
    seen: set[str] = field(default_factory=set)
    _stack: list[str] = field(default_factory=list)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def start(self) -> None:
        """A new pass begins: indices of use start at 0."""
        self.path, self.failure = "", None
        self._stack.clear()
        self._counts.clear()

    # ---- sites ------------------------------------------------------------------------------------------

    def name_site(self, kind: str) -> str:
        """The name of the site of this kind reached now; every call is one more use."""
        key = (self.path, kind)
        index = self._counts.get(key, 0)
        self._counts[key] = index + 1
        name = f"{self.path}:{kind}"
        return f"{name}#{index}" if index else name

    def site(self, kind: str, moments: Moments) -> Moments:
        """The moments as they enter an activation or a norm, or leave the network: variance times alpha."""
        name = self.name_site(kind)
        if self.record is not None:
            self.record(name, moments)
        alpha = None if self.calibration is None else self.calibration.alpha(name)
        if alpha is None or self.drawing:
            return moments
        return Moments(moments.mean, moments.variance * alpha)

    def correlation(self, kind: str) -> tuple[str, Tensor | float | None]:
        """The name of a pooling or attention site, and rho there (None: independent)."""
        name = self.name_site(kind)
        return name, None if self.calibration is None else self.calibration.rho(name)

    def observe(self, site: str, moments: Any) -> None:
        """Record the result at a pooling or attention site."""
        if self.record is not None and isinstance(moments, Moments):
            self.record(site, moments)

    # ---- where we are -----------------------------------------------------------------------------------

    def enter(self, path: str) -> None:
        """A module's forward begins."""
        self._stack.append(self.path)
        self.path = path

    def leave(self) -> None:
        """It has ended."""
        self.path = self._stack.pop() if self._stack else ""

    @contextlib.contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Keep `path` while `module` runs, by hooks that are removed again."""
        handles = []
        for path, child in module.named_modules():
            if isinstance(child, torch.jit.ScriptModule):
                continue  # which takes no hooks; what it would do to a random tensor is refused below
            handles.append(child.register_forward_pre_hook(self._entering(path), prepend=True))
            handles.append(child.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.enter(path)

        return hook

    def _leaving(self, *_: Any) -> None:
        self.leave()

    # ---- what is noticed --------------------------------------------------------------------------------

    def note(self, operator: str, exactness: str, note: str) -> None:
        """Note the use of a rule for a report."""
        if self.used is not None:
            self.used.append(Used(self.path, operator, exactness, note))

    def where(self) -> str:
        """The module, for messages."""
        return f"module {self.path!r}" if self.path else "the network's own forward"

    def no_rule(self, operator: str, reason: str = "") -> NoRuleError:
        """The error for an operator without a rule."""
        return NoRuleError(
            f"operator {operator!r} in {self.where()} has no rule for random tensors{reason}. Give it one with "
            "@dubito.moments.rule(function), keep what comes before it deterministic (leave those parameters out of "
            "the patterns of bayesianize), or use Monte Carlo: bayes.predict(x). dubito.moments.report(bayes, x) "
            "lists all such operators"
        )

    def checked(self, operator: str, result: Any) -> Any:
        """The result of a rule, or an error where it is no mean and variance."""
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Moments) and type(part) is Moments and not _valid(part):
                raise self._invalid(operator, part)
        return result

    def _invalid(self, operator: str, moments: Moments) -> InvalidMomentsError:
        nan_means = int(moments.mean.isnan().sum())
        nan = int(moments.variance.isnan().sum())
        negative = int((moments.variance < 0).sum())
        return InvalidMomentsError(
            f"after {operator!r} in {self.where()} {nan_means} means and {nan} variances are NaN and {negative} "
            f"variances negative, of {moments.mean.numel()}. Look at the input and the weights first, then for "
            "posterior standard deviations so large that they overflow, or a rule of your own"
        )


def _valid(moments: Moments) -> bool:
    if not moments.variance.numel():
        return True
    # A NaN anywhere makes the minimum NaN, and no comparison with NaN holds.
    return bool((moments.variance.detach().amin() >= 0) & ~moments.mean.detach().isnan().any())
