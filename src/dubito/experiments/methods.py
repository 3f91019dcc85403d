"""What `compare` compares: each method trains the same network its own way and predicts.

A further method is one function from `Job` to `Trained` and one entry in `METHODS`. Learning rates, beta and
ranks were chosen by the negative log likelihood of the *validation* part of MNIST-5k (several seeds); test images,
letters and corruptions took no part in any choice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.data import DataSplit
from dubito.kl_schedules import KLWarmup
from dubito.likelihoods import Categorical
from dubito.monte_carlo import evaluating
from dubito.predictive import Predictive
from dubito.training import fit
from dubito.weights import Family, LowRankCovariance, LowRankFactors, MeanField

BATCH = 64
_PREDICTED_AT_ONCE = 500  # images; bounds the memory that activations take


class UnknownMethodError(ValueError):
    """No method has the name given; the message lists those there are."""


@dataclass(frozen=True)
class Job:
    """What a method is given.

    Attributes:
        network: freshly initialised, the same for every method of a seed; the method may alter it.
        split: the data; a method may look at ``train`` and ``validation`` only.
        epochs: passes over the training part.
        samples: draws of the weights in a prediction.
        seed: of the order of the batches and of draws.
        progress: whether to show a progress bar.
    """

    network: nn.Module
    split: DataSplit
    epochs: int
    samples: int
    seed: int
    progress: bool = False


@dataclass(frozen=True)
class Trained:
    """What a method gives back.

    Attributes:
        predict: standardised images, shape ``(N, C, H, W)``, to the predictive of their labels.
        parameters: trained numbers, those that describe spread included.
        device: where the images are wanted.
        warnings: what training found wrong, in words.
    """

    predict: Callable[[Tensor], Predictive]
    parameters: int
    device: torch.device
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """A method by name: how it is called in tables, what it is, and how it trains."""

    title: str
    summary: str
    train: Callable[[Job], Trained]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: Adam under the ELBO (or plain loss), SGD under the expected loss alone.

    Attributes:
        lr: highest learning rate; it rises for a tenth of the steps and falls along a cosine to nothing.
        beta: final weight of the KL, in units of the ELBO.
        warmup: share of the steps over which beta rises from 0.
        expected_loss: leave the KL out, and use SGD with momentum 0.9, whose implicit bias takes its place.
        spread_lr: learning rate of the parameters of spread relative to that of the means.
    """

    lr: float
    beta: float = 1.0
    warmup: float = 0.0
    expected_loss: bool = False
    spread_lr: float = 1.0


def _train(model: nn.Module, job: Job, recipe: Recipe) -> Trained:
    """Train `model` by the recipe; no validation, no early stop: every method gets the same epochs."""
    loader = _batches(job)
    steps = job.epochs * len(loader)

    def optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for group in groups:
            group["lr"] = recipe.lr * (recipe.spread_lr if group.get("name") == "spread" else 1.0)
        if recipe.expected_loss:
            return torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9)
        return torch.optim.Adam(groups, lr=recipe.lr)

    def schedule(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(made, lambda step: _warm_cosine(step / steps))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `FitResult.warnings` has the findings; they go into the report
        result = fit(
            model,
            loader,
            likelihood=None if isinstance(model, BayesianModule) else Categorical(),
            optimizer=optimizer,
            objective="expected_loss" if recipe.expected_loss else "elbo",
            epochs=job.epochs,
            beta=KLWarmup(round(recipe.warmup * steps), end=recipe.beta),
            scheduler=schedule,
            scheduler_interval="step",
            seed=job.seed,
            progress=job.progress,
        )
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    device = next(model.parameters()).device
    predict = _draws_predictor(model, job) if isinstance(model, BayesianModule) else _plain_predictor(model)
    return Trained(predict, parameters, device, tuple(result.warnings))


def _warm_cosine(share: float) -> float:
    """Learning rate over its highest, after this share of the steps."""
    if share < 0.1:
        return 0.04 + 0.96 * share / 0.1
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - 0.1) / 0.9)))


def _batches(job: Job) -> DataLoader[Any]:
    """Shuffled batches, each cut out of the tensors at once rather than gathered image by image."""
    data = job.split.dataset(job.split.train)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(job.seed))
    return DataLoader(data, batch_size=None, sampler=BatchSampler(order, BATCH, drop_last=False))


def _plain_predictor(model: nn.Module) -> Callable[[Tensor], Predictive]:
    likelihood = Categorical()

    def predict(x: Tensor) -> Predictive:
        with torch.no_grad(), evaluating(model):
            parts = [likelihood.predictive(model(part)[None]) for part in x.split(_PREDICTED_AT_ONCE)]
        return Predictive.concatenate(parts)

    return predict


def _draws_predictor(model: BayesianModule, job: Job) -> Callable[[Tensor], Predictive]:
    device = next(model.parameters()).device
    # Many small convolutions at once run as one grouped convolution, which CPUs do slower than one by one.
    chunk = 1 if device.type == "cpu" else None

    def predict(x: Tensor) -> Predictive:
        draws = model.draw(job.samples, torch.Generator(device).manual_seed(job.seed))
        parts = (
            model.predict(part, draws=draws, chunk_size=chunk, keep_draws=False)
            for part in x.split(_PREDICTED_AT_ONCE)
        )
        return Predictive.concatenate(list(parts))

    return predict


def _bayesian(families: Mapping[Any, Family], recipe: Recipe) -> Callable[[Job], Trained]:
    def train(job: Job) -> Trained:
        # Building draws initial values, and says on a small image that a rank is clipped: seeded, and expected.
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(job.seed)
            model = bayesianize(job.network, families, likelihood=Categorical())
        return _train(model, job, recipe)

    return train


def check_method_names(names: object) -> tuple[str, ...]:
    """The names, if each is one of `METHODS` and none comes twice.

    Raises:
        UnknownMethodError: listing the names there are.
        ValueError: for none at all, or one given twice.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)  # type: ignore[arg-type]
    if not wanted:
        raise ValueError(f"methods is empty; there are {', '.join(METHODS)}")
    for name in wanted:
        if name not in METHODS:
            raise UnknownMethodError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"methods holds a name twice: {', '.join(wanted)}")
    return wanted


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "deterministic": Method(
            "deterministic",
            "The network as it is, trained by Adam; its uncertainty is that of its softmax.",
            lambda job: _train(job.network, job, Recipe(lr=2e-3)),
        ),
        "mean-field": Method(
            "mean field",
            "Bayes by Backprop: independent Gaussian weights everywhere, trained by Adam under the ELBO with the "
            "KL weighted by 0.1 (a cold posterior: at the full weight 3,500 images leave it under-confident).",
            _bayesian({"rest": MeanField()}, Recipe(lr=8e-3, beta=0.1)),
        ),
        "low-rank-covariance": Method(
            "low-rank covariance",
            "Implicit-bias variational inference: Gaussian weights with a covariance of rank 8 in the first and in "
            "the last layer, started at the prior and trained by the expected loss alone (no KL) by SGD with "
            "momentum; the other layers are ordinary.",
            _bayesian(
                {"conv1": LowRankCovariance(8), "out": LowRankCovariance(8)},
                Recipe(lr=0.035, expected_loss=True, spread_lr=1 / 8),
            ),
        ),
        "low-rank-factors": Method(
            "low-rank factors",
            "A singular Bayesian network: weight matrices A Bᵀ of rank 24 in the hidden layer and 8 in the second "
            "convolution and the last layer, with Gaussian factors; mean field for the rest. Trained as mean field is.",
            _bayesian(
                {
                    "hidden.weight": LowRankFactors(24, init="random"),
                    "conv2.weight": LowRankFactors(8, init="random"),
                    "out.weight": LowRankFactors(8, init="random"),
                    "rest": MeanField(),
                },
                Recipe(lr=8e-3, beta=0.1),
            ),
        ),
    }
)
