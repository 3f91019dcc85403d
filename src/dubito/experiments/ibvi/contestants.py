"""The methods of the comparison: each from a `Task` to a `Fitted` predictor.

All train the same network on the same images for the same epochs. What is done after training (temperature, Laplace,
SWAG) starts from the plain network, whose time counts as theirs too; the first member of the ensemble is that network.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito.bayesian import BayesianModule
from dubito.experiments.evaluation import Stopwatch
from dubito.experiments.ibvi.networks import lenet5, small_resnet
from dubito.experiments.ibvi.training import (
    Recipe,
    groups,
    loss_of,
    sgd,
    train,
    with_low_rank,
    with_mean_field,
)
from dubito.likelihoods import Categorical
from dubito.posthoc.ensemble import DeepEnsemble
from dubito.posthoc.laplace import LastLayerLaplace, PriorChoice
from dubito.posthoc.swag import SWAG
from dubito.posthoc.temperature import TemperatureScaling
from dubito.predictive import Predictive

MEMBERS, SWAG_RANK = 5, 10
_AT_ONCE = 500  # images


@dataclass(frozen=True)
class Architecture:
    """A network, the layers that are random under either reading of the paper, and the recipes validation chose."""

    title: str
    make: Callable[[], nn.Module]
    first_last: tuple[str, ...]
    last_two: tuple[str, ...]
    plain: Recipe
    ibvi: Recipe
    ibvi_last_two: Recipe
    mean_field: Recipe


NETWORKS: Mapping[str, Architecture] = MappingProxyType(
    {
        "lenet5": Architecture(
            "LeNet-5",
            lenet5,
            ("conv1", "out"),
            ("hidden2", "out"),
            plain=Recipe(lr=0.05),
            ibvi=Recipe(lr=0.05),
            ibvi_last_two=Recipe(lr=0.05),
            mean_field=Recipe(lr=0.05),
        ),
        "resnet": Architecture(
            "small ResNet",
            small_resnet,
            ("conv1", "out"),
            ("block3.conv2", "out"),
            plain=Recipe(lr=0.05),
            ibvi=Recipe(lr=0.05),
            ibvi_last_two=Recipe(lr=0.05),
            mean_field=Recipe(lr=0.05),
        ),
    }
)


@dataclass
class Task:
    """One network on one data set.

    Attributes:
        architecture: of `NETWORKS`.
        train: standardised images `(N, 1, 28, 28)` and labels.
        validation: the same; for the temperature alone.
        epochs: passes over the training images.
        samples: draws of the weights in a prediction.
        seed: of initial weights, order of batches and draws.
    """

    architecture: Architecture
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    epochs: int
    samples: int
    seed: int = 0
    spent: dict[str, float] = field(default_factory=dict)

    def network(self, offset: int = 0) -> nn.Module:
        """Freshly initialised, the same for every method at offset 0."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + 1000 * offset)
            return self.architecture.make().to(self.train[0].device)

    def train_plain(self, offset: int = 0) -> nn.Module:
        """A network without random weights, trained."""
        network, recipe = self.network(offset), self.architecture.plain
        optimizer = sgd(network.parameters(), recipe.lr)
        train(network, loss_of(network, 1), optimizer, self.train, self.epochs, self.seed + offset)
        return network

    @cached_property
    def plain(self) -> nn.Module:
        """The plain network, trained once; not to be altered."""
        watch = Stopwatch()
        network = self.train_plain()
        self.spent["plain"] = watch.seconds(device_of(network))
        return network

    def generator(self) -> torch.Generator:
        """Of the draws of a prediction."""
        return torch.Generator(self.train[0].device).manual_seed(self.seed)


@dataclass(frozen=True)
class Fitted:
    """A predictor of standardised images, the numbers it stores, and processor seconds of its training."""

    predict: Callable[[Tensor], Predictive]
    stored: int
    seconds: float
    note: str = ""


def plain(task: Task) -> Fitted:
    """The network as it is."""
    ensemble = DeepEnsemble([task.plain], Categorical())
    return Fitted(_batched(ensemble.predict), _size(task.plain), task.spent["plain"])


def temperature(task: Task) -> Fitted:
    """One temperature, found on the validation images."""
    base = task.plain
    watch = Stopwatch()
    scaling = TemperatureScaling.fit(base, [task.validation], likelihood=Categorical())
    ensemble = DeepEnsemble([base], scaling.likelihood)
    seconds = task.spent["plain"] + watch.seconds(device_of(task.plain))
    note = f"T = {scaling.temperature:.2f}"
    return Fitted(_batched(ensemble.predict), _size(base) + 1, seconds, note)


def laplace_fixed(task: Task) -> Fitted:
    """Last-layer Laplace under a prior of precision 1."""
    return _laplace(task, marginal=False)


def laplace_marginal(task: Task) -> Fitted:
    """Last-layer Laplace under the prior of the largest marginal likelihood."""
    return _laplace(task, marginal=True)


def _laplace(task: Task, marginal: bool) -> Fitted:
    base = task.plain
    watch = Stopwatch()
    loader = DataLoader(TensorDataset(*task.train), batch_size=_AT_ONCE)
    precision: float | PriorChoice = "marginal-likelihood" if marginal else 1.0
    with _seeded(task):  # an iteration over a loader draws a seed
        fitted = LastLayerLaplace.fit(base, loader, Categorical(), precision, structure="kron")
    seconds = task.spent["plain"] + watch.seconds(device_of(task.plain))
    last = _size(base.get_submodule("out"))
    inputs = next(p for p in base.get_submodule("out").parameters()).shape[1]
    stored = _size(base) + 2 * (last - inputs * 10) ** 2 + inputs**2  # Kronecker factors of weight and bias
    generator = task.generator()
    return Fitted(
        _batched(lambda x: fitted.predict(x, task.samples, generator, keep_draws=False)),
        stored,
        seconds,
        f"prior precision {fitted.prior_precision:.3g}",
    )


def weight_space(task: Task) -> Fitted:
    """Mean-field Gaussian weights everywhere, trained under the ELBO."""
    watch = Stopwatch()
    with _seeded(task):
        bayes = with_mean_field(task.network())
        recipe = task.architecture.mean_field
        optimizer = sgd(groups(bayes, recipe, "elbo"), recipe.lr)
        train(
            bayes,
            loss_of(bayes, len(task.train[0]), elbo=True),
            optimizer,
            task.train,
            task.epochs,
            task.seed,
        )
    return _bayesian(task, bayes, watch.seconds(device_of(bayes)), one_by_one=True)


def swag(task: Task) -> Fitted:
    """SGD goes on from the plain network at a fifth of its rate, collecting once an epoch for half as many epochs."""
    network = copy.deepcopy(task.plain)
    watch = Stopwatch()
    collector = SWAG(network, SWAG_RANK, Categorical())
    lr = task.architecture.plain.lr / 5
    epochs = max(3, task.epochs // 2)
    optimizer = sgd(network.parameters(), lr)
    train(network, loss_of(network, 1), optimizer, task.train, epochs, task.seed + 1, collector.collect)
    seconds = task.spent["plain"] + watch.seconds(device_of(task.plain))
    generator = task.generator()
    members = [collector.sample(generator=generator) for _ in range(task.samples)]
    ensemble = DeepEnsemble(members, Categorical())
    stored = _size(network) * (2 + len(collector.deviations))
    return Fitted(_batched(ensemble.predict), stored, seconds, f"{collector.count} iterates")


def ensemble(task: Task) -> Fitted:
    """Five plain networks from different initial weights and orders."""
    first = task.plain
    watch = Stopwatch()
    members = [first, *(task.train_plain(offset) for offset in range(1, MEMBERS))]
    made = DeepEnsemble(members, Categorical())
    seconds = task.spent["plain"] + watch.seconds(device_of(task.plain))
    return Fitted(_batched(made.predict), MEMBERS * _size(first), seconds)


def ibvi_first_last(task: Task) -> Fitted:
    """Implicit-bias variational inference with low-rank covariances in the first and the last layer."""
    return ibvi(task, task.architecture.first_last, task.architecture.ibvi)


def ibvi_last_two(task: Task) -> Fitted:
    """The same with the covariances in the last two layers."""
    return ibvi(task, task.architecture.last_two, task.architecture.ibvi_last_two)


def ibvi(task: Task, layers: Sequence[str], recipe: Recipe) -> Fitted:
    """Train a network whose named layers are random by its expected loss alone."""
    watch = Stopwatch()
    with _seeded(task):
        bayes = with_low_rank(task.network(), layers, recipe)
        optimizer = sgd(groups(bayes, recipe), recipe.lr)
        train(bayes, loss_of(bayes, 1), optimizer, task.train, task.epochs, task.seed)
    note = f"rank {recipe.rank}, scale {recipe.scale:g}, lr {recipe.lr:g}, spread {recipe.spread:g}"
    # Many small convolutions at once are one grouped convolution, which CPUs do slower than one by one.
    convolutions = any(isinstance(bayes.module.get_submodule(name), nn.Conv2d) for name in layers)
    return replace(_bayesian(task, bayes, watch.seconds(device_of(bayes)), convolutions), note=note)


CONTESTANTS: Mapping[str, tuple[str, Callable[[Task], Fitted]]] = MappingProxyType(
    {
        "plain": ("plain", plain),
        "temperature": ("temperature", temperature),
        "laplace": ("Laplace, prior 1", laplace_fixed),
        "laplace-ml": ("Laplace, marginal l.", laplace_marginal),
        "weight-space": ("weight-space VI", weight_space),
        "swag": ("SWAG", swag),
        "ensemble": ("ensemble of 5", ensemble),
        "ibvi": ("IBVI first+last", ibvi_first_last),
        "ibvi-last-two": ("IBVI last two", ibvi_last_two),
    }
)


def _bayesian(task: Task, bayes: BayesianModule, seconds: float, one_by_one: bool) -> Fitted:
    draws = bayes.draw(task.samples, task.generator())
    chunk = 1 if one_by_one else None
    stored = sum(p.numel() for p in bayes.parameters())

    def predict(x: Tensor) -> Predictive:
        return bayes.predict(x, draws=draws, chunk_size=chunk, generator=task.generator(), keep_draws=False)

    return Fitted(_batched(predict), stored, seconds)


def _batched(predict: Callable[..., Predictive]) -> Callable[[Tensor], Predictive]:
    """Prediction in batches that bound the memory of activations."""

    def whole(x: Tensor) -> Predictive:
        return Predictive.concatenate([predict(part) for part in x.split(_AT_ONCE)])

    return whole


def device_of(module: nn.Module) -> torch.device:
    """Where the parameters of a network are."""
    return next(module.parameters()).device


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@contextlib.contextmanager
def _seeded(task: Task) -> Iterator[None]:
    """Global randomness of a training, put back afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(task.seed)
        yield
