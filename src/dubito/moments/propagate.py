"""Predict in a single pass: means and variances of the outputs, and the predictive they stand for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.moments.bilinear_moments import rank_one_variance
from dubito.moments.calibration import Calibration
from dubito.moments.gaussian_tensor import GaussianTensor
from dubito.moments.head import predictive_from_moments
from dubito.moments.moments import Calibrator, Context, InvalidMomentsError, Moments, NoRuleError
from dubito.moments.rule_sets import RuleSet, rule_set
from dubito.monte_carlo import _batches, as_arguments, device_of, evaluating
from dubito.predictive import Predictive
from dubito.swap import Swap
from dubito.weights.family import CapabilityError
from dubito.weights.gaussian_weights import RankOneMoments

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule
    from dubito.moments.logit_covariance import LogitCovariance


def gaussian_weights(bayes: BayesianModule) -> dict[str, Moments]:
    """Every random weight's moments, by name, differentiable in the posterior's parameters.

    Raises:
        CapabilityError: where a family has no mean or variance in closed form, or there are no random weights.
    """
    weights: dict[str, Moments] = {}
    for posterior in bayes.posteriors():
        try:
            weights.update(posterior.gaussian_weights())
        except CapabilityError as error:
            raise CapabilityError(
                f"{posterior.slots[0].name!r} has no mean and variance to propagate ({error}); use Monte Carlo: "
                "bayes.predict(x)"
            ) from error
    if not weights:
        raise CapabilityError(
            "no parameter is random, so there is no variance to propagate: call bayes(x) in eval()"
        )
    return weights


def condensed(weights: Mapping[str, Moments], rules: RuleSet) -> dict[str, Moments]:
    """The weights' moments in the form that the rule set asks for."""
    if rules.weights == "full":
        return dict(weights)
    return {n: _rank_one(m) if type(m) is Moments and m.ndim >= 2 else m for n, m in weights.items()}


def _rank_one(moments: Moments) -> RankOneMoments:
    row, column = rank_one_variance(moments.variance)
    return RankOneMoments(moments.mean, row, column)


def propagated(
    bayes: BayesianModule,
    x: Any,
    context: Context | None = None,
    weights: Mapping[str, Moments] | None = None,
) -> Moments:
    """Mean and variance of the network's outputs; differentiable where gradient is enabled.

    Args:
        bayes: the network. Dropout and normalisation behave as in evaluation; every flag is put back.
        x: a tensor, or a tuple or mapping of arguments.
        context: rules, calibration, recording of sites.
        weights: moments to use in place of the posterior's (`gaussian_weights(bayes)`).

    Raises:
        NoRuleError: for an operator without a rule.
        InvalidMomentsError: where a mean or variance comes out NaN, or a variance negative; it names the module.
    """
    context = context if context is not None else Context()
    weights = weights if weights is not None else condensed(gaussian_weights(bayes), context.rules)
    args, kwargs = as_arguments(x)
    with bayes._lock, evaluating(bayes.module):
        result = _once(bayes, args, kwargs, context, weights)
        if not context.drawing and not are_valid(result):
            _name_the_site(bayes, args, kwargs, context, weights)
            raise context.checked("output", result)._invalid("output", result)
    return result


def _once(
    bayes: BayesianModule, args: Any, kwargs: dict[str, Any], context: Context, weights: Mapping[str, Moments]
) -> Moments:
    refuse_recurrent(bayes.module)
    context.start()
    context.seen.clear()
    with context.following(bayes.module), standing_in(bayes, weights, context), _no_compiling():
        try:
            output = bayes.select(bayes.module(*args, **kwargs))
        except RuntimeError as error:
            if context.failure is not None and error is not context.failure:
                raise context.failure from error
            raise
    if not isinstance(output, GaussianTensor):
        raise NoRuleError(
            "the network's output carries no variance: it was lost on the way (a scripted function, a tensor made from "
            "numbers), or no random parameter has a part in it. dubito.moments.report(bayes, x) says which operators "
            "were met; Monte Carlo needs no rules: bayes.predict(x)"
        )
    moments = output.moments.marginal()
    return context.site("output", moments)


def sites_of_draw(
    bayes: BayesianModule, x: Any, draw: Mapping[str, Tensor], record: Callable[[str, Moments], None]
) -> Tensor:
    """Run the network on one draw of its weights, recording the same sites as a propagation would.

    Args:
        bayes: the network.
        x: one batch of arguments.
        draw: dense weights by name, as `posterior.draw()` gives them.
        record: called with each site's name and what arrives there, as the `mean` of moments without a variance.

    Returns:
        The output.
    """
    context = Context(record=record, drawing=True)
    weights = {name: Moments(value, None) for name, value in draw.items()}  # type: ignore[arg-type]
    return propagated(bayes, x, context, weights).mean


@contextlib.contextmanager
def standing_in(bayes: BayesianModule, weights: Mapping[str, Moments], context: Context) -> Iterator[None]:
    """Gaussian tensors in the slots of the random parameters."""
    pairs = [(bayes._slots[n], GaussianTensor.of(m, context, n)) for n, m in weights.items()]
    with Swap(pairs, (), bayes._lock, inline=True):
        yield


@contextlib.contextmanager
def _no_compiling() -> Iterator[None]:
    """Compiled submodules run eagerly: compiled code does not see the tensors' class."""
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse_recurrent(network: nn.Module) -> None:
    """Raise `NoRuleError` for recurrent layers."""
    for path, module in network.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            raise NoRuleError(
                f"{type(module).__name__} {path!r} is recurrent, and means and variances cannot be propagated through "
                "it: its steps share their weights' noise. Use Monte Carlo: bayes.predict(x)"
            )


def are_valid(moments: Moments) -> bool:
    """Whether no mean is NaN or infinite, and no variance NaN or negative."""
    if not moments.mean.numel():
        return True
    lowest = torch.stack([moments.variance.detach().amin().float(), moments.mean.detach().sum().float() * 0])
    return bool((lowest >= 0).all())


def _name_the_site(
    bayes: BayesianModule, args: Any, kwargs: dict[str, Any], context: Context, weights: Mapping[str, Moments]
) -> None:
    """Run again looking at every result, to name the first that is invalid."""
    again = Context(context.rules, context.calibration, check=True)
    with torch.no_grad():
        _once(bayes, args, kwargs, again, weights)
    raise InvalidMomentsError(
        "the output's moments are NaN, infinite or negative; every operator's were valid"
    )


def propagate(
    bayes: BayesianModule,
    x: Any,
    *,
    calibration: Calibrator | None = None,
    rules: str | RuleSet = "cvp",
    head: str = "sampled",
    covariance: LogitCovariance | None = None,
) -> Predictive:
    """See `BayesianModule.propagate`."""
    bayes.require_likelihood()
    chosen = rule_set(rules)
    check_calibration(bayes, calibration, chosen)
    if covariance is not None:
        covariance.check(bayes, chosen.name, calibration)
    with bayes._lock, torch.no_grad():
        weights = condensed(gaussian_weights(bayes), chosen)

        def one(batch: Any) -> Predictive:
            moments = propagated(bayes, batch, Context(chosen, calibration), weights)
            if covariance is not None:
                return covariance.predictive(bayes, moments, head)
            return predictive_of(bayes, moments, head, calibration)

        return streamed(bayes, x, one)


def streamed(bayes: BayesianModule, x: Any, one: Callable[[Any], Predictive]) -> Predictive:
    """The predictive of one batch of arguments, or of a loader's, joined.

    Raises:
        ValueError: for an empty loader.
    """
    stream = not isinstance(x, Tensor | tuple | Mapping)
    parts = [one(batch) for batch in (_batches(x, device_of(bayes)) if stream else (x,))]
    if not parts:
        raise ValueError("x is an empty loader: it gave no batch to predict")
    predictive = parts[0] if len(parts) == 1 else Predictive.concatenate(parts)
    if bayes.target_scale is not None and bayes.target_shift is not None:
        predictive = predictive.affine(bayes.target_shift, bayes.target_scale)
    return predictive


def check_calibration(bayes: BayesianModule, calibration: Calibrator | None, rules: RuleSet) -> None:
    """Refuse a calibration that was fitted for another network or rule set."""
    if isinstance(calibration, Calibration):
        calibration.check(bayes, rules)


def predictive_of(
    bayes: BayesianModule, moments: Moments, head: str, calibration: Calibrator | None = None
) -> Predictive:
    """What the outputs' moments stand for under the likelihood, at the calibration's temperature."""
    if isinstance(calibration, Calibration):
        moments = calibration.finish(moments)
    return predictive_from_moments(bayes.require_likelihood(), moments.mean, moments.variance, head=head)
