"""The methods of the comparison: each from a `Contest` to a `Fitted` predictor.

All train the same network on the same examples, with Adam along the same cosine, for the same epochs, and end with the
weights of the best validation NLL. What starts from the trained plain network (the SVD initialisation, Rank-1 and SWAG)
has that network's time added to its own; the first member of the ensemble is that network.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.experiments.evaluation import Stopwatch
from dubito.kl_schedules import KLWarmup
from dubito.likelihoods import Gaussian, Likelihood
from dubito.monte_carlo import evaluating
from dubito.posthoc.swag import SWAG
from dubito.predictive import Predictive
from dubito.training import fit
from dubito.weights import Family, LowRankFactors, MeanField, RankOne

MEMBERS, SWAG_RANK, SWAG_EPOCHS = 5, 10, 10

Inputs = Tensor | tuple[Tensor, ...]  #: positional arguments of the network, examples first
Examples = tuple[Inputs, Tensor]
Estimator = Literal["weights", "local", "flipout"]


@dataclass(frozen=True)
class Recipe:
    """What is tuned of a method with random weights, by validation NLL only.

    Attributes:
        beta: final weight of the KL, in units of the ELBO (1 is the ELBO).
        scale: initial posterior standard deviation, as a fraction of the weights' (or factors') own scale.
        lr: highest learning rate; None takes the problem's.
        warmup: share of the steps over which beta rises from 0.
        estimator: how a training step draws.
    """

    beta: float = 1.0
    scale: float = 0.1
    lr: float | None = None
    warmup: float = 0.2
    estimator: Estimator = "weights"


@dataclass(frozen=True)
class Problem:
    """A network and the data it learns from.

    Attributes:
        network: makes a freshly initialised network; randomness from torch's global generator.
        likelihood: makes a fresh likelihood; its learned noise is trained with the network.
        train: inputs (a tensor, or a tuple of the network's positional arguments) and targets.
        validation: the same, for early stopping.
        ranks: of the low-rank factors, by pattern of parameter names; parameters that no pattern names are mean field.
        epochs: most passes over the training examples.
        lr: highest learning rate of Adam; it falls to zero along a cosine.
        batch: examples a step.
        samples: draws of the weights in a prediction.
        seed: of initial weights, order of batches and draws.
        patience: epochs without a better validation NLL before training stops; None: never.
        recipes: by name in `CONTESTANTS`; without one the default `Recipe`.
        swag_lr: constant learning rate of the SGD whose iterates SWAG collects.
        at_once: examples a prediction takes at once, which bounds its memory.
        validation_samples: draws in the validation's predictive.
    """

    network: Callable[[], nn.Module]
    likelihood: Callable[[], Likelihood]
    train: Examples
    validation: Examples
    ranks: Mapping[str, int]
    epochs: int
    lr: float = 1e-3
    batch: int = 64
    samples: int = 32
    seed: int = 0
    patience: int | None = None
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    swag_lr: float = 1e-2
    at_once: int = 1024
    validation_samples: int = 8

    def recipe(self, method: str) -> Recipe:
        """The method's own, or the default."""
        return self.recipes.get(method, Recipe())


@dataclass(frozen=True)
class Fitted:
    """A trained method.

    Attributes:
        predict: inputs to the predictive of their targets, on the CPU.
        variational: trainable numbers of random weights, means and spreads together; 0 where no weight is random.
        stored: numbers that a prediction needs.
        seconds: of training: of the processor on a CPU, of the clock elsewhere.
        warnings: what training found wrong, in words.
    """

    predict: Callable[[Inputs], Predictive]
    variational: int
    stored: int
    seconds: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plain:
    """A trained network without random weights."""

    network: nn.Module
    likelihood: Likelihood
    seconds: float


@dataclass
class Contest:
    """A problem and what its methods share."""

    problem: Problem

    def __post_init__(self) -> None:
        import accelerate  # noqa: F401  # takes a second, which is not the first method's to pay

    @cached_property
    def plain(self) -> Plain:
        """The plain network, trained once; not to be altered."""
        return self.train_plain(0)

    def train_plain(self, member: int) -> Plain:
        """A network without random weights, trained; members differ in initial weights and order of batches."""
        with self.seeded(member):
            watch = Stopwatch()
            network, likelihood = self.problem.network(), self.problem.likelihood()
            self.train(network, likelihood, None)
            return Plain(network, likelihood, watch.seconds(_device(network)))

    def train(self, model: nn.Module, likelihood: Likelihood, recipe: Recipe | None) -> tuple[str, ...]:
        """Train in place; what was found wrong, in words."""
        p = self.problem
        loader = batches(p.train, p.batch)
        steps = p.epochs * len(loader)
        recipe = recipe or Recipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `FitResult.warnings` has the findings
            result = fit(
                model,
                loader,
                batches(p.validation, p.at_once, shuffle=False),
                likelihood=None if isinstance(model, BayesianModule) else likelihood,
                epochs=p.epochs,
                lr=recipe.lr or p.lr,
                beta=KLWarmup(round(recipe.warmup * steps), end=recipe.beta),
                scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(
                    made, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
                ),
                scheduler_interval="step",
                patience=p.patience,
                validation_samples=p.validation_samples,
                progress=False,
            )
        return tuple(result.warnings)

    @contextlib.contextmanager
    def seeded(self, member: int = 0) -> Iterator[None]:
        """Global randomness of a training, put back afterwards."""
        with torch.random.fork_rng():
            torch.manual_seed(self.problem.seed + 1000 * member)
            yield

    def bayesian(
        self, network: nn.Module, families: Mapping[Any, Family], method: str, seconds: float = 0.0
    ) -> Fitted:
        """Give the network random weights, train, and predict by draws of them."""
        with self.seeded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # heads of width one are always at break-even
            watch = Stopwatch()
            bayes = bayesianize(network, families, likelihood=self.problem.likelihood())
            found = self.train(bayes, bayes.require_likelihood(), self.problem.recipe(method))
            seconds += watch.seconds(_device(bayes))
        draws = bayes.draw(self.problem.samples, self.generator(_device(bayes)))

        def outputs(x: tuple[Tensor, ...]) -> Predictive:
            return bayes.predict(x, draws=draws, generator=self.generator(_device(bayes)), keep_draws=True)

        predict = _in_parts(outputs, self.problem.at_once, _device(bayes))
        return Fitted(predict, variational_parameters(bayes), _size(bayes), seconds, found)

    def mixture(
        self,
        networks: list[nn.Module],
        likelihoods: list[Likelihood],
        stored: int,
        seconds: float,
    ) -> Fitted:
        """Plain networks as equally weighted draws."""

        def outputs(x: tuple[Tensor, ...]) -> Predictive:
            found = []
            with torch.no_grad():
                for network in networks:
                    with evaluating(network):
                        found.append(network(*x))
            return mixture_predictive(torch.stack(found), likelihoods)

        predict = _in_parts(outputs, self.problem.at_once, _device(networks[0]))
        return Fitted(predict, 0, stored, seconds)

    def generator(self, device: torch.device) -> torch.Generator:
        """Of the draws of a prediction."""
        return torch.Generator(device).manual_seed(self.problem.seed)


def deterministic(contest: Contest) -> Fitted:
    """The network as it is."""
    plain = contest.plain
    return contest.mixture([plain.network], [plain.likelihood], _size(plain.network), plain.seconds)


def ensemble(contest: Contest) -> Fitted:
    """Five plain networks from different initial weights and orders of the examples."""
    members = [contest.plain, *(contest.train_plain(member) for member in range(1, MEMBERS))]
    stored = sum(_size(member.network) for member in members)
    seconds = sum(member.seconds for member in members)
    return contest.mixture([m.network for m in members], [m.likelihood for m in members], stored, seconds)


def mean_field(contest: Contest) -> Fitted:
    """Independent Gaussian weights everywhere; means start at torch's initialisation, not uniformly in (−0.2, 0.2)."""
    recipe = contest.problem.recipe("mean-field")
    with contest.seeded():
        network = contest.problem.network()
    return contest.bayesian(
        network, {"rest": MeanField(scale=recipe.scale, estimator=recipe.estimator)}, "mean-field"
    )


def low_rank(contest: Contest) -> Fitted:
    """Low-rank factors, their product initialised with the Glorot variance."""
    with contest.seeded():
        network = contest.problem.network()
    return contest.bayesian(network, _factors(contest.problem, "low-rank", "random"), "low-rank")


def low_rank_svd(contest: Contest) -> Fitted:
    """Low-rank factors that start at the best approximation of the trained plain network."""
    plain = contest.plain
    families = _factors(contest.problem, "low-rank-svd", "svd")
    return contest.bayesian(copy.deepcopy(plain.network), families, "low-rank-svd", plain.seconds)


def rank_one(contest: Contest) -> Fitted:
    """Gaussian multipliers of rows and columns on the trained plain network, which is frozen, biases too."""
    plain = contest.plain
    network = copy.deepcopy(plain.network).requires_grad_(False)
    recipe = contest.problem.recipe("rank-one")
    families = dict.fromkeys(contest.problem.ranks, RankOne(scale=recipe.scale))
    return contest.bayesian(network, families, "rank-one", plain.seconds)


def swag(contest: Contest) -> Fitted:
    """SGD at a constant rate goes on from the plain network, and its weights are collected once an epoch."""
    p, plain = contest.problem, contest.plain
    network, likelihood = copy.deepcopy(plain.network), copy.deepcopy(plain.likelihood)
    with contest.seeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = Stopwatch()
        collector = SWAG(network, SWAG_RANK, likelihood)
        trained = [*network.parameters(), *likelihood.parameters()]
        optimizer = torch.optim.SGD(trained, p.swag_lr, momentum=0.9)
        loader = batches(p.train, p.batch)
        for _ in range(SWAG_EPOCHS):
            fit(network, loader, likelihood=likelihood, optimizer=optimizer, epochs=1, progress=False)
            collector.collect()
        seconds = plain.seconds + watch.seconds(_device(network))
    generator = contest.generator(_device(network))
    members = [collector.sample(generator=generator) for _ in range(p.samples)]
    stored = _size(network) * (2 + len(collector.deviations))
    return contest.mixture(members, [likelihood] * p.samples, stored, seconds)


@dataclass(frozen=True)
class Contestant:
    """A method by name: its title in tables, and how it trains."""

    title: str
    train: Callable[[Contest], Fitted]


CONTESTANTS: Mapping[str, Contestant] = MappingProxyType(
    {
        "deterministic": Contestant("deterministic", deterministic),
        "ensemble": Contestant("ensemble of 5", ensemble),
        "mean-field": Contestant("full-rank mean field", mean_field),
        "low-rank": Contestant("low-rank factors", low_rank),
        "low-rank-svd": Contestant("low-rank, SVD start", low_rank_svd),
        "rank-one": Contestant("Rank-1 multiplicative", rank_one),
        "swag": Contestant("SWAG", swag),
    }
)


def batches(examples: Examples, size: int, shuffle: bool = True) -> DataLoader[Any]:
    """Batches `(*inputs, targets)`, each cut out of the tensors at once rather than gathered one by one."""
    inputs, targets = examples
    data = TensorDataset(*as_tuple(inputs), targets)
    order = RandomSampler(data) if shuffle else SequentialSampler(data)
    return DataLoader(data, batch_size=None, sampler=BatchSampler(order, size, drop_last=False))


def as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    """The network's positional arguments."""
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


def mixture_predictive(outputs: Tensor, likelihoods: list[Likelihood]) -> Predictive:
    """Predictive of networks that each have a likelihood of their own; outputs `(S, batch, …)`."""
    first = likelihoods[0]
    if not isinstance(first, Gaussian):
        return first.predictive(outputs)
    noise = torch.stack([one.noise.detach() for one in likelihoods if isinstance(one, Gaussian)]).square()
    shape = (len(outputs), *([1] * (outputs.ndim - noise.ndim)), *noise.shape[1:])
    return Predictive.from_draws("regression", outputs, aleatoric=noise.reshape(shape))


def variational_parameters(bayes: BayesianModule) -> int:
    """Trainable numbers of the random weights: means and spreads."""
    held: dict[int, Tensor] = {id(p): p for posterior in bayes.posteriors() for p in posterior.parameters()}
    for posterior in bayes.posteriors():
        for slot in posterior.slots:
            if slot.occupied:
                held[id(slot.parameter)] = slot.parameter
    return sum(p.numel() for p in held.values() if p.requires_grad)


def _factors(problem: Problem, method: str, init: Literal["random", "svd"]) -> dict[Any, Family]:
    recipe = problem.recipe(method)
    rest = MeanField(scale=recipe.scale, estimator=recipe.estimator)
    families: dict[Any, Family] = {
        pattern: LowRankFactors(rank, init, scale=recipe.scale, estimator=recipe.estimator)
        for pattern, rank in problem.ranks.items()
    }
    return {**families, "rest": rest}


def _in_parts(
    predict: Callable[[tuple[Tensor, ...]], Predictive], at_once: int, device: torch.device
) -> Callable[[Inputs], Predictive]:
    def whole(x: Inputs) -> Predictive:
        pieces = zip(*(one.split(at_once) for one in as_tuple(x)), strict=True)
        parts = [predict(tuple(one.to(device) for one in piece)).cpu() for piece in pieces]
        return parts[0] if len(parts) == 1 else Predictive.concatenate(parts)

    return whole


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
