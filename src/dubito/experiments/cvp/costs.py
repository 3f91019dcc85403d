"""What a prediction costs, in passes of the mean network: measured in turns, so that whatever slows one slows all."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dubito.bayesian import BayesianModule
from dubito.experiments.evaluation import Stopwatch
from dubito.moments.compiled import compiled
from dubito.moments.elementwise import compiler_found
from dubito.moments.head import predictive_from_moments
from dubito.moments.logit_covariance import LogitCovariance
from dubito.moments.moments import Context, Moments
from dubito.moments.propagate import gaussian_weights, propagated
from dubito.moments.rule_sets import rule_set
from dubito.monte_carlo import device_of

EXAMPLES = 256  # in the batch that is timed
TURNS = 9

Work = Callable[[], Any]


@torch.no_grad()
def costs(
    bayes: BayesianModule,
    x: Tensor,
    covariance: LogitCovariance,
    turns: int = TURNS,
    compile_too: bool = True,
) -> dict[str, float]:
    """Median ratios to one eager pass of the mean network, on a batch of `EXAMPLES`.

    "draw": a pass under one draw of the weights, the drawing included; "streamlining", "cvp-paper", "cvp": eager
    propagation and head; "ours": with the logits' covariance. Where a compiler is found, "… compiled" are the same of
    the propagation compiled whole, and "mean compiled" the compiled mean network. Processor seconds on a CPU.

    Args:
        bayes: a trained network.
        x: inputs, of which the first `EXAMPLES` are taken.
        covariance: of `bayes`.
        turns: how often everything is timed, one after the other.
        compile_too: measure compiled propagations where a compiler is found.
    """
    batch = x[:EXAMPLES]
    works = _works(bayes, batch, covariance)
    if compile_too and compiler_found():
        works |= _compiled_works(bayes, batch, covariance)
    for work in works.values():
        work()
        work()
    ratios: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        spent = {name: _seconds(work, bayes) for name, work in works.items()}
        for name, seconds in spent.items():
            ratios[name].append(seconds / spent["mean"])
    return {name: statistics.median(found) for name, found in ratios.items()}


def _seconds(work: Work, bayes: BayesianModule) -> float:
    watch = Stopwatch()
    work()
    return watch.seconds(device_of(bayes))


def _works(bayes: BayesianModule, batch: Tensor, covariance: LogitCovariance) -> dict[str, Work]:
    weights = gaussian_weights(bayes)
    plain = bayes.merge().eval()
    generator = torch.Generator().manual_seed(0)

    def eager(rules: str) -> Moments:
        return propagated(bayes, batch, Context(rule_set(rules)), weights)

    works: dict[str, Work] = {
        "mean": lambda: plain(batch).softmax(-1),
        "draw": lambda: bayes.sample(generator).eval()(batch).softmax(-1),
    }
    for rules, head in (("streamlining", "probit"), ("cvp-paper", "probit"), ("cvp", "sampled")):
        works[rules] = _with_head(bayes, functools.partial(eager, rules), head)
    works["ours"] = lambda: covariance.predictive(
        bayes, propagated(bayes, batch, Context(rule_set("cvp"), covariance.calibration), weights)
    )
    return works


def _with_head(bayes: BayesianModule, moments: Callable[[], Moments], head: str) -> Work:
    def work() -> Any:
        made = moments()
        return predictive_from_moments(bayes.require_likelihood(), made.mean, made.variance, head=head)

    return work


def _compiled_works(bayes: BayesianModule, batch: Tensor, covariance: LogitCovariance) -> Mapping[str, Work]:
    whole = compiled(bayes, batch, calibration=covariance.calibration)
    plain: Any = torch.compile(bayes.merge().eval())
    return {
        "mean compiled": lambda: plain(batch).softmax(-1),
        "cvp compiled": lambda: whole(batch),
        "ours compiled": lambda: covariance.predictive(bayes, whole.moments(batch)),
    }
