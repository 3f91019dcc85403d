"""The methods that are compared: all from one trained posterior, all fitted on the same validation examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.bayesian import BayesianModule
from dubito.experiments.cvp.material import Material
from dubito.experiments.cvp.training import drawn_logits, save_whole
from dubito.likelihoods import Categorical
from dubito.moments.calibration import Calibration
from dubito.moments.calibration_fitting import calibrate
from dubito.moments.logit_covariance import LogitCovariance
from dubito.moments.moments import Context, Moments
from dubito.moments.propagate import gaussian_weights, propagated
from dubito.moments.rule_sets import RuleSet, rule_set
from dubito.posthoc.temperature import TemperatureScaling
from dubito.predictive import Predictive

DRAWS = 400
REPEATS = 8  # disjoint sets of draws over which a Monte Carlo row's metrics are averaged, at most
BATCH = 500
#: The rules of ours with one part of the method taken away.
WITHOUT = {
    "no-moments": rule_set("cvp", activation="delta"),
    "no-norm": rule_set("cvp", normalization="mean-scale"),
}


@dataclass(frozen=True)
class Budget:
    """How much is spent on fitting and on draws.

    Attributes:
        draws: of the reference; the smaller Monte Carlo rows take the first of them.
        matching: draws for matching and for the logits' covariance.
        nll_steps: of Adam for alphas by NLL.
        nll_lr: its learning rate, on logarithms.
        scalar_steps: for the one or two scalars, whose steps cost little (twice as many are taken).
    """

    draws: int = DRAWS
    matching: int = 60
    nll_steps: int = 30
    nll_lr: float = 0.1
    scalar_steps: int = 60


@dataclass
class Bench:
    """A trained posterior, the data, and what the methods share.

    Attributes:
        bayes: the posterior.
        material: the data.
        seed: of all draws.
        budget: draws and steps.
        kept: file of the reference's moments, which are not drawn again where it is there; None keeps nothing.
        key: what those moments depend on.
    """

    bayes: BayesianModule
    material: Material
    seed: int
    budget: Budget = field(default_factory=Budget)
    kept: Path | None = None
    key: Mapping[str, Any] = field(default_factory=dict)
    _reference: Moments | None = None
    _logits: tuple[Tensor, Tensor] | None = None
    _mean: tuple[Tensor, Tensor] | None = None
    _calibrations: dict[tuple[str, str, str], Calibration] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """Test and unknown inputs."""
        return self.material.test[0], self.material.unknown

    def drawn(self) -> tuple[Tensor, Tensor]:
        """Logits of all draws on test and unknown inputs; made once."""
        if self._logits is None:
            test, unknown = drawn_logits(self.bayes, self.inputs, self.budget.draws, 10_000 + self.seed)
            self._logits = (test, unknown)
        return self._logits

    def reference(self) -> Moments:
        """Mean and variance of the test logits over all draws; made once, and kept in a file where there is one."""
        if self._reference is None and self.kept is not None and self.kept.is_file():
            found = torch.load(self.kept, weights_only=True)
            if found["key"] == self.key:
                self._reference = Moments(found["mean"], found["variance"])
        if self._reference is None:
            test = self.drawn()[0]
            self._reference = Moments(test.mean(0), test.var(0))
            if self.kept is not None:
                values = {"key": self.key, "mean": self._reference.mean, "variance": self._reference.variance}
                save_whole(self.kept, values)
        return self._reference

    def at_mean(self) -> tuple[Tensor, Tensor]:
        """Logits of the mean network on test and unknown inputs."""
        if self._mean is None:
            with torch.no_grad():
                test, unknown = (torch.cat([self.bayes(b) for b in x.split(BATCH)]) for x in self.inputs)
            self._mean = (test, unknown)
        return self._mean

    def calibration(self, rules: RuleSet, method: Any, head: str, correlations: bool = True) -> Calibration:
        """Fitted on the validation examples; made once."""
        key = (repr(rules), f"{method} {correlations}", head)
        if key not in self._calibrations:
            budget = self.budget
            steps, lr = (budget.nll_steps, budget.nll_lr) if method == "nll" else (budget.scalar_steps, 0.1)
            self._calibrations[key] = calibrate(
                self.bayes, _batched(self.material.validation), method, rules=rules, head=head, lr=lr,
                correlations=correlations, draws=budget.matching, steps=steps,
                generator=torch.Generator().manual_seed(20_000 + self.seed),
            )  # fmt: skip
        return self._calibrations[key]


def _batched(data: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(BATCH), data[1].split(BATCH), strict=True))


@dataclass(frozen=True)
class Answer:
    """What a method says.

    Attributes:
        test, unknown: predictives, one each; Monte Carlo has one for every set of draws.
        moments: the test logits' mean and variance as the method has them, before any temperature.
        fitted: what was fitted, as plain values.
    """

    test: tuple[Predictive, ...]
    unknown: tuple[Predictive, ...]
    moments: Moments | None = None
    fitted: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contestant:
    """A method: its name in tables, how it answers, and what its prediction costs.

    Attributes:
        title: in tables.
        answer: fits what it has to on validation examples, and predicts.
        cost: the kind of pass in `costs` that a prediction takes; "passes" of Monte Carlo count their draws.
        passes: how many.
    """

    title: str
    answer: Callable[[Bench], Answer]
    cost: str
    passes: int = 1


def _softmax(logits: Tensor, temperature: float = 1.0) -> Predictive:
    scaled = logits.unsqueeze(0) / temperature
    return Predictive.from_draws("categorical", scaled, logits=True, keep_draws=False)


def mean_network(bench: Bench) -> Answer:
    """The network at the posterior's mean."""
    test, unknown = bench.at_mean()
    return Answer((_softmax(test),), (_softmax(unknown),))


def with_temperature(bench: Bench) -> Answer:
    """The mean network, its logits divided by a temperature."""
    scaling = TemperatureScaling.fit(
        bench.bayes.merge().eval(), _batched(bench.material.validation), Categorical()
    )
    test, unknown = (_softmax(one, scaling.temperature) for one in bench.at_mean())
    return Answer((test,), (unknown,), fitted={"temperature": scaling.temperature})


def monte_carlo(draws: int) -> Callable[[Bench], Answer]:
    """Averages over draws of the weights, each used for all examples."""

    def answer(bench: Bench) -> Answer:
        size = min(draws, bench.budget.draws)
        repeats = max(1, min(REPEATS, bench.budget.draws // size))

        def sets(logits: Tensor) -> tuple[Predictive, ...]:
            parts = logits[: repeats * size].split(size)
            return tuple(
                Predictive.from_draws("categorical", part, logits=True, keep_draws=False) for part in parts
            )

        test, unknown = bench.drawn()
        moments = Moments(test[:size].mean(0), test[:size].var(0)) if size > 1 else None
        return Answer(sets(test), sets(unknown), moments, {"sets": repeats})

    return answer


def one_pass(
    rules: RuleSet, head: str, method: str | None, correlations: bool = True
) -> Callable[[Bench], Answer]:
    """A propagation under a rule set, calibrated by a method of `dubito.moments.calibrate` or not at all."""

    def answer(bench: Bench) -> Answer:
        calibration = None if method is None else bench.calibration(rules, method, head, correlations)
        test, unknown = (
            bench.bayes.propagate(list(x.split(BATCH)), calibration=calibration, rules=rules, head=head)
            for x in bench.inputs
        )
        moments = _before_temperature(test, calibration)
        return Answer((test,), (unknown,), moments, _summary(calibration))

    return answer


def with_covariance(bench: Bench) -> Answer:
    """Ours: variances matched to draws, correlations of the logits measured before, temperature and scale by NLL."""
    rules = rule_set("cvp")
    matched = bench.calibration(rules, "matched", "sampled")
    found = LogitCovariance.fit(
        bench.bayes, _batched(bench.material.validation), matched, draws=bench.budget.matching,
        generator=torch.Generator().manual_seed(20_000 + bench.seed),
    )  # fmt: skip
    weights = gaussian_weights(bench.bayes)
    predictives, kept = [], []
    with torch.no_grad():
        for x in bench.inputs:
            made = [propagated(bench.bayes, b, Context(rules, matched), weights) for b in x.split(BATCH)]
            predictives.append(Predictive.concatenate([found.predictive(bench.bayes, m) for m in made]))
            kept.append(torch.cat([m.mean for m in made]))
            covariances = [found.of(m)[1].diagonal(dim1=-2, dim2=-1) for m in made]
            kept.append(torch.cat(covariances) * found.temperature**2)
    fitted = {"temperature": found.temperature, "scale": found.scale, **_summary(matched, "matched ")}
    return Answer((predictives[0],), (predictives[1],), Moments(kept[0], kept[1]), fitted)


def _before_temperature(predictive: Predictive, calibration: Calibration | None) -> Moments:
    t = 1.0 if calibration is None else calibration.temperature
    mean, variance = predictive.logits_mean, predictive.logits_variance
    assert mean is not None
    assert variance is not None
    return Moments(mean * t, variance * t**2)


def _summary(calibration: Calibration | None, prefix: str = "") -> dict[str, Any]:
    if calibration is None:
        return {}
    alphas = {site: round(value, 4) for site, value in calibration.alphas.items()}
    rhos = {site: round(value, 4) for site, value in calibration.rhos.items()}
    found: dict[str, Any] = {f"{prefix}alphas": alphas, f"{prefix}rhos": rhos}
    return found | {f"{prefix}temperature": calibration.temperature}


_CVP, _PAPER, _FIRST = (rule_set(name) for name in ("cvp", "cvp-paper", "streamlining"))

CONTESTANTS: Mapping[str, Contestant] = {
    "mean": Contestant("mean network", mean_network, "mean"),
    "mean-t": Contestant("mean network + temperature", with_temperature, "mean"),
    "mc-4": Contestant("Monte Carlo, 4 draws", monte_carlo(4), "draw", 4),
    "mc-16": Contestant("Monte Carlo, 16 draws", monte_carlo(16), "draw", 16),
    "mc-64": Contestant("Monte Carlo, 64 draws", monte_carlo(64), "draw", 64),
    "mc-400": Contestant("Monte Carlo, 400 draws", monte_carlo(DRAWS), "draw", DRAWS),
    "streamlining": Contestant("Streamlining", one_pass(_FIRST, "probit", None), "streamlining"),
    "streamlining-scale": Contestant(
        "Streamlining + output scale", one_pass(_FIRST, "probit", "output"), "streamlining"
    ),
    "paper": Contestant("CVP, paper's rules, not calibrated", one_pass(_PAPER, "probit", None), "cvp-paper"),
    "paper-nll": Contestant(
        "CVP, paper's rules + NLL alphas", one_pass(_PAPER, "probit", "nll", False), "cvp-paper"
    ),
    "cvp": Contestant("CVP, not calibrated", one_pass(_CVP, "sampled", None), "cvp"),
    "cvp-nll": Contestant("CVP + NLL alphas and rhos", one_pass(_CVP, "probit", "nll"), "cvp"),
    "cvp-matched": Contestant("CVP + matched", one_pass(_CVP, "sampled", "matched"), "cvp"),
    "cvp-matched-nll": Contestant(
        "CVP + matched + 2 scalars", one_pass(_CVP, "sampled", "matched+nll"), "cvp"
    ),
    "no-moments": Contestant(
        "· first-order activations", one_pass(WITHOUT["no-moments"], "sampled", "matched+nll"), "cvp"
    ),
    "no-norm": Contestant(
        "· statistics of norms at the mean", one_pass(WITHOUT["no-norm"], "sampled", "matched+nll"), "cvp"
    ),
    "ours": Contestant("ours: CVP + matched + covariance of the logits", with_covariance, "ours"),
}
#: The published method and its baseline, and ours with its reference: what the targets are about.
PUBLISHED, BASELINES, OURS, REFERENCE = "paper-nll", ("mean", "streamlining-scale"), "ours", "mc-400"
#: Rows of the ablation: whole, then without each part.
ABLATION = ("cvp-matched-nll", "no-moments", "no-norm", "cvp")
