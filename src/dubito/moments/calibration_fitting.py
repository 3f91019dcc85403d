"""Finding a calibration of propagated variances (`calibrate`), in three ways.

- `"nll"`: alphas (and rhos) by the held-out negative log likelihood, differentiating through the propagation: the
  published way, with labels. They then also regularise, and need not resemble the true variances.
- `"matched"`: to the variances of draws of the weights, on unlabelled inputs (`calibration_matching`).
- `"matched+nll"`: the second, followed by two scalars by NLL: a temperature of the logits' mean, and a factor on their
  variance.

`"output"` fits that factor alone, as the first-order baseline does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from dubito.likelihoods import Bernoulli, Categorical
from dubito.moments.calibration import Calibration, fingerprint
from dubito.moments.calibration_matching import MAX_LOG, matched
from dubito.moments.head import predictive_from_moments
from dubito.moments.moments import CORRELATED, SCALED, Context, Moments
from dubito.moments.propagate import gaussian_weights, propagated
from dubito.moments.rule_sets import RuleSet, rule_set
from dubito.monte_carlo import LABELS, device_of
from dubito.weights.family import CapabilityError

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule

Method = Literal["matched+nll", "matched", "nll", "output"]


def calibrate(
    bayes: BayesianModule,
    data: Any,
    method: Method = "matched+nll",
    *,
    rules: str | RuleSet = "cvp",
    correlations: bool = True,
    draws: int = 50,
    steps: int = 120,
    lr: float = 0.05,
    head: str = "probit",
    generator: torch.Generator | None = None,
) -> Calibration:
    """Find a calibration on held-out data.

    Args:
        bayes: a network with random weights and a likelihood.
        data: a loader or sequence of batches `(inputs, target)`, or one batch; "matched" needs no targets.
        method: see the module.
        rules: the rule set that it will be used with.
        correlations: fit rho at pooling and attention too.
        draws: of the weights, for matching.
        steps: of Adam over all the data, for NLL.
        lr: of Adam, on logarithms of alphas.
        head: how logits' moments become probabilities while fitting by NLL; "probit" is smooth and cheap.
        generator: source of the draws.

    Raises:
        ValueError: an unknown method, no data, no targets where they are needed, no likelihood.
    """
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} must be one of {', '.join(map(repr, get_args(Method)))}")
    chosen = rule_set(rules)
    batches = batches_of(bayes, data, labels=method != "matched")
    fitting = Fitting(bayes, batches, chosen, head)
    alphas: dict[str, float] = {}
    rhos: dict[str, float] = {}
    temperature = 1.0
    history: tuple[float, ...] = ()
    if method.startswith("matched"):
        alphas, rhos = matched(fitting, correlations, draws, generator)
    if method == "nll":
        alphas, rhos, history = _by_likelihood(fitting, correlations, steps, lr)
    if method in ("matched+nll", "output"):
        start = Calibration(alphas, rhos)
        scale, temperature, history = _two_scalars(fitting, start, steps, lr, method == "matched+nll")
        alphas = {**alphas, fitting.output: alphas.get(fitting.output, 1.0) * scale}
    return Calibration(alphas, rhos, temperature, chosen.name, fingerprint(bayes), method, history)


Batch = tuple[Any, Tensor | None]


def batches_of(bayes: BayesianModule, data: Any, labels: bool) -> list[Batch]:
    """Inputs and targets on the network's device.

    Raises:
        ValueError: no batches, or no targets where they are needed.
    """
    single = isinstance(data, Tensor | Mapping) or (isinstance(data, tuple) and isinstance(data[-1], Tensor))
    found: list[Batch] = []
    for batch in [data] if single else data:
        inputs, target = _parted(batch)
        if labels and target is None:
            raise ValueError(
                "data: these batches have no targets, which fitting by NLL needs: give (inputs, target), or use "
                'method="matched", which needs none'
            )
        found.append(
            (_moved(inputs, device_of(bayes)), None if target is None else target.to(device_of(bayes)))
        )
    if not found:
        raise ValueError("data: the loader is empty; calibration needs at least one batch")
    return found


def _parted(batch: Any) -> Batch:
    if isinstance(batch, Mapping):
        target = next((batch[name] for name in LABELS if name in batch), None)
        return {k: v for k, v in batch.items() if k not in LABELS}, target
    if isinstance(batch, tuple | list):
        if len(batch) == 1:
            return batch[0], None
        inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        return inputs, batch[-1]
    return batch, None


def _moved(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {k: _moved(v, device) for k, v in inputs.items()}
    return tuple(_moved(v, device) for v in inputs) if isinstance(inputs, tuple | list) else inputs


@dataclass
class Fitting:
    """What every way of fitting needs: the network, the data, and the sites there are."""

    bayes: BayesianModule
    batches: list[Batch]
    rules: RuleSet
    head: str

    def __post_init__(self) -> None:
        self.bayes.require_likelihood()
        names: list[str] = []
        with torch.no_grad():
            self.weights = gaussian_weights(self.bayes)
            context = Context(self.rules, record=lambda site, _: names.append(site))
            propagated(self.bayes, self.batches[0][0], context, self.weights)
        self.scaled = [name for name in names if _kind(name) in SCALED]
        self.correlated = [name for name in names if _kind(name) in CORRELATED]
        self.output = self.scaled[-1]

    def moments(self, inputs: Any, calibration: Any) -> Moments:
        """The output's moments under a calibration, differentiable in it."""
        return propagated(self.bayes, inputs, Context(self.rules, calibration), self.weights)

    def nll(self, moments: Moments, target: Tensor) -> Tensor:
        """Mean over the batch, in nats."""
        predictive = predictive_from_moments(
            self.bayes.require_likelihood(), moments.mean, moments.variance, head=self.head
        )
        return -predictive.log_prob(target).mean()


def _kind(site: str) -> str:
    return site.rpartition(":")[2].partition("#")[0]


class _Learning:
    """A calibration in the making: alphas and rhos as tensors with gradients."""

    def __init__(self, scaled: Sequence[str], correlated: Sequence[str], like: Tensor) -> None:
        place: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
        self.log_alphas = torch.zeros(len(scaled), **place).requires_grad_()
        self.logit_rhos = torch.full((len(correlated),), -3.0, **place).requires_grad_()
        self.scaled = {name: i for i, name in enumerate(scaled)}
        self.correlated = {name: i for i, name in enumerate(correlated)}

    def alpha(self, site: str) -> Tensor | None:
        index = self.scaled.get(site)
        return None if index is None else self.log_alphas[index].clamp(-MAX_LOG, MAX_LOG).exp()

    def rho(self, site: str) -> Tensor | None:
        index = self.correlated.get(site)
        return None if index is None else self.logit_rhos[index].sigmoid()

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in (self.log_alphas, self.logit_rhos) if p.numel()]

    def values(self) -> tuple[dict[str, float], dict[str, float]]:
        alphas = self.log_alphas.detach().clamp(-MAX_LOG, MAX_LOG).exp().tolist()
        rhos = self.logit_rhos.detach().sigmoid().tolist()
        return dict(zip(self.scaled, alphas, strict=True)), dict(zip(self.correlated, rhos, strict=True))


def _by_likelihood(
    fitting: Fitting, correlations: bool, steps: int, lr: float
) -> tuple[dict[str, float], dict[str, float], tuple[float, ...]]:
    like = next(iter(fitting.weights.values())).mean
    learning = _Learning(fitting.scaled, fitting.correlated if correlations else (), like)
    history = _minimised(fitting, learning.parameters, steps, lr, lambda x: fitting.moments(x, learning))
    return (*learning.values(), history)


def _minimised(
    fitting: Fitting, parameters: list[Tensor], steps: int, lr: float, moments: Any
) -> tuple[float, ...]:
    """Adam over all batches; keeps the best parameters. The first loss and the best."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    total = sum(len(target) for _, target in fitting.batches if target is not None)
    first, best = math.nan, math.inf
    kept = [p.detach().clone() for p in parameters]
    with torch.enable_grad():
        for step in range(steps + 1):
            optimizer.zero_grad()
            value = 0.0
            for inputs, target in fitting.batches:
                assert target is not None
                loss = fitting.nll(moments(inputs), target) * (len(target) / total)
                loss.backward()  # type: ignore[no-untyped-call]
                value += float(loss.detach())
            if not math.isfinite(value):
                break
            first = value if step == 0 else first
            if value < best:
                best, kept = value, [p.detach().clone() for p in parameters]
            optimizer.step()
    with torch.no_grad():
        for parameter, value_kept in zip(parameters, kept, strict=True):
            parameter.copy_(value_kept)
    if not math.isfinite(best):
        raise CapabilityError(
            "the NLL of the propagated moments is not finite: look at the posterior's spread first"
        )
    return first, best


def _two_scalars(
    fitting: Fitting, start: Calibration, steps: int, lr: float, with_temperature: bool
) -> tuple[float, float, tuple[float, ...]]:
    """Factor on the output's variance, and temperature of its mean, by NLL: the propagations are made once."""
    with torch.no_grad():
        made = {id(inputs): fitting.moments(inputs, start) for inputs, _ in fitting.batches}
    like = next(iter(made.values())).mean
    log_scale, log_temperature = (torch.zeros((), device=like.device, requires_grad=True) for _ in range(2))

    def moments(inputs: Any) -> Moments:
        before = made[id(inputs)]
        temperature = log_temperature.exp()
        variance = before.variance * log_scale.clamp(-MAX_LOG, MAX_LOG).exp()
        return Moments(before.mean / temperature, variance / temperature.square())

    free = [log_scale]
    if with_temperature and _is_classification(fitting.bayes):
        free.append(log_temperature)
    history = _minimised(fitting, free, 2 * steps, lr, moments)
    scale = log_scale.detach().clamp(-MAX_LOG, MAX_LOG)
    return math.exp(float(scale)), math.exp(float(log_temperature.detach())), history


def _is_classification(bayes: BayesianModule) -> bool:
    return isinstance(bayes.likelihood, Bernoulli | Categorical)
