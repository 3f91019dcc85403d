"""Calibration of propagated variances: factors at the sites where propagation is known to be wrong.

A site is a place before an activation, before a normalisation, or the output: there a factor alpha multiplies the
variance. At pooling and attention a correlation rho says how much of the summed entries' noise is shared (a weight's
noise is the same at every position, which independence misses). Sites are module paths, so a calibration is a small
table that can be saved beside the model. Three ways to find one (`calibrate`):

- `"nll"`: alphas (and rhos) by the held-out negative log likelihood, differentiating through the propagation: the
  published way, with labels. They then also regularise, and need not resemble the true variances.
- `"matched"`: alpha = mean Monte Carlo variance / mean propagated variance, site after site in one propagation, from
  draws of the weights on unlabelled inputs; rho likewise, before.
- `"matched+nll"`: the second, followed by two scalars by NLL: a temperature of the logits' mean, and a factor on their
  variance.

`"output"` fits that factor alone, as the first-order baseline does.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from dubito.moments.head import predictive_from_moments
from dubito.moments.moments import CORRELATED, SCALED, Context, Moments
from dubito.moments.propagate import gaussian_weights, propagated, sites_of_draw
from dubito.moments.rule_sets import RuleSet, rule_set
from dubito.weights.family import CapabilityError

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule

Method = Literal["matched+nll", "matched", "nll", "output"]
FORMAT = 1
_MAX_LOG = 12.0  # alphas stay within e^±12


class CalibrationError(ValueError):
    """A calibration that was fitted for something else, or a file that holds none."""


@dataclass(frozen=True)
class Calibration:
    """Factors by site; made by `calibrate`, given to `bayes.propagate(x, calibration=…)`.

    Attributes:
        alphas: factor on the variance, by site.
        rhos: correlation in [0, 1], by pooling or attention site.
        temperature: what the output's mean is divided by (classification; its variance by the square).
        rules: name of the rule set it was fitted under.
        fingerprint: of the network's parameters' names and shapes.
        method: how it was found.
        history: losses of the fit by NLL, first and last.
    """

    alphas: Mapping[str, float]
    rhos: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    rules: str = "cvp"
    fingerprint: str = ""
    method: str = ""
    history: tuple[float, ...] = ()

    def alpha(self, site: str) -> float | None:
        """The factor on the variance at a site; None is 1."""
        return self.alphas.get(site)

    def rho(self, site: str) -> float | None:
        """The correlation at a site; None is independence."""
        return self.rhos.get(site)

    def finish(self, moments: Moments) -> Moments:
        """The output's moments at the temperature."""
        if self.temperature == 1.0:
            return moments
        return Moments(moments.mean / self.temperature, moments.variance / self.temperature**2)

    def check(self, bayes: BayesianModule, rules: RuleSet) -> None:
        """Refuse a network or a rule set that this was not fitted for.

        Raises:
            CalibrationError: saying which.
        """
        if self.fingerprint and self.fingerprint != fingerprint(bayes):
            raise CalibrationError(
                "this calibration was fitted for a network whose parameters have other names or shapes; fit one for "
                "this network: dubito.moments.calibrate(bayes, validation)"
            )
        if self.rules != rules.name:
            raise CalibrationError(
                f"this calibration was fitted under rules={self.rules!r}, but the propagation uses {rules.name!r}: "
                f"pass rules={self.rules!r}, or fit one for {rules.name!r}"
            )

    def save(self, path: str | Path) -> None:
        """Write it as JSON; a file that stands there is replaced at once or not at all."""
        path = Path(path)
        values = {"format": FORMAT, **{n: _plain(v) for n, v in vars(self).items()}}
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            CalibrationError: a file that is no calibration, of a newer format, or with impossible values.
        """
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") > FORMAT:
                raise CalibrationError(
                    f"{path}: written by a newer version of dubito; update it to read this file"
                )
            made = cls(**{**values, "history": tuple(values["history"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CalibrationError):
                raise
            raise CalibrationError(f"{path}: not a calibration saved by dubito ({error})") from error
        numbers = [*made.alphas.values(), made.temperature]
        if not all(math.isfinite(v) and v > 0 for v in numbers) or not all(
            0 <= r <= 1 for r in made.rhos.values()
        ):
            raise CalibrationError(f"{path}: alphas and the temperature must be positive, rhos within [0, 1]")
        return made


def fingerprint(bayes: BayesianModule) -> str:
    """A hash of the random parameters' names and shapes, which is what sites depend on."""
    slots = sorted((name, tuple(slot.shape)) for name, slot in bayes._slots.items())
    return hashlib.sha256(repr((type(bayes.module).__name__, slots)).encode()).hexdigest()[:16]


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
    batches = _batches(bayes, data, labels=method != "matched")
    fitting = _Fitting(bayes, batches, chosen, head)
    alphas: dict[str, float] = {}
    rhos: dict[str, float] = {}
    temperature = 1.0
    history: tuple[float, ...] = ()
    if method.startswith("matched"):
        alphas, rhos = _matched(fitting, correlations, draws, generator)
    if method == "nll":
        alphas, rhos, history = _by_likelihood(fitting, correlations, steps, lr)
    if method in ("matched+nll", "output"):
        start = Calibration(alphas, rhos)
        scale, temperature, history = _two_scalars(fitting, start, steps, lr, method == "matched+nll")
        alphas = {**alphas, fitting.output: alphas.get(fitting.output, 1.0) * scale}
    return Calibration(alphas, rhos, temperature, chosen.name, fingerprint(bayes), method, history)


Batch = tuple[Any, Tensor | None]


def _batches(bayes: BayesianModule, data: Any, labels: bool) -> list[Batch]:
    """Inputs and targets on the network's device.

    Raises:
        ValueError: no batches, or no targets where they are needed.
    """
    from dubito.monte_carlo import device_of

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
        from dubito.monte_carlo import LABELS

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
class _Fitting:
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
        return propagated(self.bayes, inputs, Context(self.rules, calibration), self.weights)

    def nll(self, moments: Moments, target: Tensor) -> Tensor:
        """Mean over the batch, in nats."""
        predictive = predictive_from_moments(
            self.bayes.require_likelihood(), moments.mean, moments.variance, head=self.head
        )
        return -predictive.log_prob(target).mean()


def _kind(site: str) -> str:
    return site.rpartition(":")[2].partition("#")[0]


# ------------------------------------------------------------------------------------------------ by likelihood


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
        return None if index is None else self.log_alphas[index].clamp(-_MAX_LOG, _MAX_LOG).exp()

    def rho(self, site: str) -> Tensor | None:
        index = self.correlated.get(site)
        return None if index is None else self.logit_rhos[index].sigmoid()

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in (self.log_alphas, self.logit_rhos) if p.numel()]

    def values(self) -> tuple[dict[str, float], dict[str, float]]:
        alphas = self.log_alphas.detach().clamp(-_MAX_LOG, _MAX_LOG).exp().tolist()
        rhos = self.logit_rhos.detach().sigmoid().tolist()
        return dict(zip(self.scaled, alphas, strict=True)), dict(zip(self.correlated, rhos, strict=True))


def _by_likelihood(
    fitting: _Fitting, correlations: bool, steps: int, lr: float
) -> tuple[dict[str, float], dict[str, float], tuple[float, ...]]:
    like = next(iter(fitting.weights.values())).mean
    learning = _Learning(fitting.scaled, fitting.correlated if correlations else (), like)
    history = _minimised(fitting, learning.parameters, steps, lr, lambda x: fitting.moments(x, learning))
    return (*learning.values(), history)


def _minimised(
    fitting: _Fitting, parameters: list[Tensor], steps: int, lr: float, moments: Any
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
    fitting: _Fitting, start: Calibration, steps: int, lr: float, with_temperature: bool
) -> tuple[float, float, tuple[float, ...]]:
    """Factor on the output's variance, and temperature of its mean, by NLL: the propagations are made once."""
    with torch.no_grad():
        made = {id(inputs): fitting.moments(inputs, start) for inputs, _ in fitting.batches}
    like = next(iter(made.values())).mean
    log_scale, log_temperature = (torch.zeros((), device=like.device, requires_grad=True) for _ in range(2))

    def moments(inputs: Any) -> Moments:
        before = made[id(inputs)]
        temperature = log_temperature.exp()
        variance = before.variance * log_scale.clamp(-_MAX_LOG, _MAX_LOG).exp()
        return Moments(before.mean / temperature, variance / temperature.square())

    free = [log_scale]
    if with_temperature and _is_classification(fitting.bayes):
        free.append(log_temperature)
    history = _minimised(fitting, free, 2 * steps, lr, moments)
    scale = log_scale.detach().clamp(-_MAX_LOG, _MAX_LOG)
    return math.exp(float(scale)), math.exp(float(log_temperature.detach())), history


def _is_classification(bayes: BayesianModule) -> bool:
    from dubito.likelihoods import Bernoulli, Categorical

    return isinstance(bayes.likelihood, Bernoulli | Categorical)


# ------------------------------------------------------------------------------------------------ by matching


class _SiteVariances:
    """Mean variance over draws at every site, entries and inputs averaged."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        self.count = 0

    def record(self, site: str, moments: Moments) -> None:
        value = moments.mean.detach().double()
        if site not in self.sums:
            self.sums[site], self.squares[site] = torch.zeros_like(value), torch.zeros_like(value)
        self.sums[site] += value
        self.squares[site] += value.square()

    def means(self) -> dict[str, float]:
        result = {}
        for site, total in self.sums.items():
            mean = total / self.count
            variance = (self.squares[site] / self.count - mean.square()).clamp_min(0.0)
            result[site] = float(variance.mean()) * self.count / (self.count - 1)
        return result


class _Matching:
    """Answers alpha by what just arrived at a site: as a propagation goes on, each site is matched to the draws."""

    def __init__(self, wanted: Mapping[str, float], rhos: Mapping[str, Any]) -> None:
        self.wanted, self.rhos = wanted, rhos
        self.arrived: dict[str, float] = {}
        self.results: dict[str, Tensor] = {}
        self.alphas: dict[str, float] = {}

    def record(self, site: str, moments: Moments) -> None:
        mean = moments.variance.mean()
        self.results[site] = mean
        self.arrived[site] = float(mean.detach())

    def alpha(self, site: str) -> float:
        propagated_mean, wanted = self.arrived[site], self.wanted[site]
        usable = propagated_mean > 0 and wanted > 0
        ratio = min(max(wanted / propagated_mean, math.exp(-_MAX_LOG)), math.exp(_MAX_LOG)) if usable else 1.0
        self.alphas[site] = ratio
        return ratio

    def rho(self, site: str) -> Any:
        return self.rhos.get(site)


def _matched(
    fitting: _Fitting, correlations: bool, draws: int, generator: torch.Generator | None
) -> tuple[dict[str, float], dict[str, float]]:
    if draws < 2:
        raise ValueError(f"draws={draws} must be at least 2: a variance over draws is needed")
    sums: list[dict[str, float]] = []
    for inputs, _ in fitting.batches:
        sites = _SiteVariances()
        with torch.no_grad():
            for _ in range(draws):
                weights: dict[str, Tensor] = {}
                for posterior in fitting.bayes.posteriors():
                    weights.update(posterior.draw((), generator))
                sites_of_draw(fitting.bayes, inputs, weights, sites.record)
                sites.count += 1
        sums.append(sites.means())
    wanted = {site: sum(s[site] for s in sums) / len(sums) for site in sums[0]}
    rhos = _matched_rhos(fitting, wanted) if correlations and fitting.correlated else {}
    alphas: dict[str, list[float]] = {}
    for inputs, _ in fitting.batches:
        matching = _Matching(wanted, rhos)
        with torch.no_grad():
            _propagated(fitting, inputs, matching)
        for site, value in matching.alphas.items():
            alphas.setdefault(site, []).append(value)
    return {site: math.exp(sum(map(math.log, v)) / len(v)) for site, v in alphas.items()}, rhos


def _matched_rhos(fitting: _Fitting, wanted: Mapping[str, float]) -> dict[str, float]:
    """rho at which a pooling's or an attention's mean variance is that of the draws: it is linear in rho."""
    zeros = {site: torch.zeros((), requires_grad=True) for site in fitting.correlated}
    matching = _Matching(wanted, zeros)
    with torch.enable_grad():
        _propagated(fitting, fitting.batches[0][0], matching)
    result = {}
    for site, zero in zeros.items():
        value = matching.results[site]
        slope = (
            torch.autograd.grad(value, zero, retain_graph=True, allow_unused=True)[0]
            if value.requires_grad
            else None
        )
        missing = wanted[site] - float(value.detach())
        known = slope is not None and float(slope) > 0
        result[site] = min(max(missing / float(slope), 0.0), 1.0) if known else 0.0  # type: ignore[arg-type]
    return result


def _propagated(fitting: _Fitting, inputs: Any, matching: _Matching) -> Moments:
    context = Context(fitting.rules, matching, record=matching.record)
    return propagated(fitting.bayes, inputs, context, fitting.weights)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: float(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def without_sites(calibration: Calibration, kinds: Iterable[str]) -> Calibration:
    """The calibration with the sites of some kinds ("activation", "norm", "pool", …) left at their neutral values."""
    dropped = set(kinds)
    return replace(
        calibration,
        alphas={s: v for s, v in calibration.alphas.items() if _kind(s) not in dropped},
        rhos={s: v for s, v in calibration.rhos.items() if _kind(s) not in dropped},
    )
